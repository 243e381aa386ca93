//! A process of a plan with another digest, owner or service: a replacement that should be
//! refused, or take over what is not its own.

use serde_json::Value;

use super::{Plan, Process, Role};
use crate::failure::Failure;
use crate::stack::harm::Changes;

const TRANSFER: &str = "--kv-transfer-config";
const DIGEST: &str = "--compatibility-digest";
const EXTRA: &str = "/kv_connector_extra_config";
const CONNECTORS: &str = "/kv_connector_extra_config/connectors";
const TIERS: &str = "/secondary_tiers";
const OWNERS: &str = "/dynamo_state_agent/cache_owner_ids";
const SOCKET: &str = "kvcr_service_socket_path";

/// `name` of `plan` with these changes.
///
/// # Errors
/// Inconclusive, if there is no such process, or nothing in it that could be changed so.
pub(crate) fn changed(plan: &Plan, name: &str, changes: &Changes) -> Result<Process, Failure> {
    let mut process = find(plan, name)?.clone();
    if changes.is_none() {
        return Ok(process);
    }
    let cannot = |what: &str| {
        Failure::inconclusive(format!("{what} of {name} cannot be changed"))
            .expected("a process of a stack with Guards (--guard)")
    };
    if process.role == Role::Service {
        let only = Changes {
            digest: changes.digest.clone(),
            ..Changes::default()
        };
        let digest = value(&mut process, DIGEST).filter(|_| *changes == only);
        *digest.ok_or_else(|| cannot("that"))? =
            changes.digest.clone().ok_or_else(|| cannot("that"))?;
        return Ok(process);
    }
    let mut config = transfer(&process).ok_or_else(|| cannot("the tier"))?;
    if let Some(digest) = &changes.digest {
        set_in_tiers(&mut config, "compatibility_digest", &digest.as_str().into())
            .ok_or_else(|| cannot("the digest"))?;
    }
    if let Some(index) = changes.service_of {
        let socket = socket(&other(plan, index)?);
        let socket = socket.ok_or_else(|| cannot("the service"))?;
        set_in_tiers(&mut config, SOCKET, &socket).ok_or_else(|| cannot("the service"))?;
    }
    if let Some(index) = changes.owner_of {
        let other = other(plan, index)?;
        let owners = places(&other)
            .iter()
            .find_map(|place| other.pointer(&format!("{place}{OWNERS}")).cloned());
        let owners = owners.ok_or_else(|| cannot("the owner"))?;
        set_owners(&mut config, &owners).ok_or_else(|| cannot("the owner"))?;
    }
    *value(&mut process, TRANSFER).ok_or_else(|| cannot("the tier"))? = config.to_string();
    Ok(process)
}

/// `process` as it is started when it was `before` times already: under another engine id, as an
/// engine that nobody gave one would have. Who decodes remembers where an engine's blocks are, by its id.
pub(crate) fn renewed(mut process: Process, before: u32) -> Process {
    let Some(mut config) = transfer(&process) else {
        return process;
    };
    if let Some(Value::String(id)) = config.get_mut("engine_id") {
        id.push_str(&format!("-{}", before + 1));
    }
    if let Some(said) = value(&mut process, TRANSFER) {
        *said = config.to_string();
    }
    process
}

fn find<'a>(plan: &'a Plan, name: &str) -> Result<&'a Process, Failure> {
    let found = plan.processes.iter().find(|process| process.name == name);
    found.ok_or_else(|| Failure::inconclusive(format!("the plan has no process called {name}")))
}

/// What the worker with this index is told of its tiers.
fn other(plan: &Plan, index: usize) -> Result<Value, Failure> {
    let worker = plan.workers.iter().find(|worker| worker.index == index);
    let process = worker
        .map(|worker| find(plan, &worker.process))
        .transpose()?;
    process.and_then(transfer).ok_or_else(|| {
        Failure::inconclusive(format!(
            "no worker {index} whose owner or service could be taken"
        ))
        .expected(format!("one of {} workers", plan.workers.len()))
    })
}

fn transfer(process: &Process) -> Option<Value> {
    let at = process.argv.iter().position(|word| word == TRANSFER)?;
    serde_json::from_str(process.argv.get(at + 1)?).ok()
}

/// Where the settings of a worker's tiers stand: the connector's own, and, where it is one of
/// several inside another, that one's too.
fn places(config: &Value) -> Vec<String> {
    let inside = config.pointer(CONNECTORS).and_then(Value::as_array);
    let inside = (0..inside.map_or(0, Vec::len)).map(|at| format!("{CONNECTORS}/{at}{EXTRA}"));
    [EXTRA.to_owned()].into_iter().chain(inside).collect()
}

/// KVCR's tiers that have a service.
fn guarded<'a>(config: &'a mut Value, place: &str) -> impl Iterator<Item = &'a mut Value> {
    let tiers = config.pointer_mut(&format!("{place}{TIERS}"));
    let tiers = tiers.and_then(Value::as_array_mut).into_iter().flatten();
    tiers.filter(|tier| tier.get(SOCKET).is_some())
}

fn socket(config: &Value) -> Option<Value> {
    let mut config = config.clone();
    let places = places(&config);
    let mut found = places.iter().filter_map(|place| {
        let tier = guarded(&mut config, place).next()?;
        tier.get(SOCKET).cloned()
    });
    found.next()
}

/// `None` if there is no such tier.
fn set_in_tiers(config: &mut Value, field: &str, to: &Value) -> Option<()> {
    let mut set = None;
    for place in places(config) {
        for tier in guarded(config, &place) {
            tier[field] = to.clone();
            set = Some(());
        }
    }
    set
}

/// `None` if there are none.
fn set_owners(config: &mut Value, to: &Value) -> Option<()> {
    let mut set = None;
    for place in places(config) {
        if let Some(owners) = config.pointer_mut(&format!("{place}{OWNERS}")) {
            *owners = to.clone();
            set = Some(());
        }
    }
    set
}

fn value<'a>(process: &'a mut Process, flag: &str) -> Option<&'a mut String> {
    let at = process.argv.iter().position(|word| word == flag)?;
    process.argv.get_mut(at + 1)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{canonical, installed};
    use super::*;
    use crate::config::testing::cpu;

    fn guarded() -> Plan {
        canonical(&cpu(&["--guard"]), &installed()).unwrap()
    }

    fn text(plan: &Plan, name: &str, changes: &Changes) -> String {
        changed(plan, name, changes).unwrap().argv.join(" ")
    }

    #[test]
    fn nothing_changes_unless_it_is_said() {
        let plan = guarded();
        for process in &plan.processes {
            let same = changed(&plan, &process.name, &Changes::default()).unwrap();
            assert_eq!(same, *process);
        }
        // Rewriting alone changes no byte.
        let own = Changes {
            owner_of: Some(0),
            service_of: Some(0),
            ..Changes::default()
        };
        assert_eq!(
            changed(&plan, "worker0", &own).unwrap(),
            *find(&plan, "worker0").unwrap()
        );
    }

    #[test]
    fn a_replacement_gets_another_digest_owner_or_service() {
        let plan = guarded();
        let of = |name: &str| find(&plan, name).unwrap().argv.join(" ");
        let digest = Changes {
            digest: Some("f".repeat(64)),
            ..Changes::default()
        };
        for name in ["worker0", "service1"] {
            let changed = text(&plan, name, &digest);
            assert!(changed.contains(&"f".repeat(64)), "{changed}");
            assert!(!of(name).contains(&"f".repeat(64)));
        }
        let foreign = Changes {
            owner_of: Some(1),
            service_of: Some(1),
            ..Changes::default()
        };
        let changed = text(&plan, "worker0", &foreign);
        let owner = |slot: u64| format!("/{slot:032x}");
        assert!(changed.contains("service1.sock") && !changed.contains("service0.sock"));
        assert!(changed.contains(&owner(101)) && !changed.contains(&owner(100)));
    }

    /// Dynamo reads one of the two places, vLLM the other.
    #[test]
    fn inside_several_connectors_both_places_change() {
        let plan = canonical(&cpu(&["--guard", "--topology", "disagg"]), &installed()).unwrap();
        let of = |name: &str| find(&plan, name).unwrap().argv.join(" ");
        let count = |text: &str, what: &str| text.matches(what).count();
        let foreign = Changes {
            digest: Some("f".repeat(64)),
            owner_of: Some(1),
            service_of: Some(1),
        };
        let changed = text(&plan, "worker0", &foreign);
        let owner = |slot: u64| format!("/{slot:032x}");
        for (before, after) in [
            ("service0.sock".to_owned(), "service1.sock".to_owned()),
            (owner(100), owner(101)),
        ] {
            assert_eq!(count(&of("worker0"), &before), 2);
            assert_eq!((count(&changed, &before), count(&changed, &after)), (0, 2));
        }
        assert_eq!(count(&changed, &"f".repeat(64)), 2);
    }

    #[test]
    fn whoever_is_started_again_has_another_engine_id_and_the_same_files() {
        let plan = guarded();
        let (worker, frontend) = (find(&plan, "worker0"), find(&plan, "frontend"));
        let id = |process: &Process| transfer(process).unwrap()["engine_id"].clone();
        let worker = worker.unwrap().clone();
        let first = id(&worker);
        let again = renewed(worker.clone(), 2);
        assert_eq!(id(&again), format!("{}-3", first.as_str().unwrap()));
        assert_eq!(again.env, worker.env);
        let frontend = frontend.unwrap().clone();
        assert_eq!(renewed(frontend.clone(), 1), frontend);
    }

    #[test]
    fn what_is_not_there_cannot_be_changed() {
        let (guarded, bare) = (guarded(), canonical(&cpu(&[]), &installed()).unwrap());
        let digest = Changes {
            digest: Some("f".repeat(64)),
            ..Changes::default()
        };
        let owner = Changes {
            owner_of: Some(7),
            ..Changes::default()
        };
        let mixed = Changes {
            digest: Some("f".repeat(64)),
            service_of: Some(0),
            ..Changes::default()
        };
        for (plan, name, changes) in [
            (&bare, "worker0", &digest),
            (&guarded, "frontend", &digest),
            (&guarded, "nobody", &digest),
            (&guarded, "worker0", &owner),
            (&guarded, "service0", &owner),
            (&guarded, "service0", &mixed),
        ] {
            assert!(changed(plan, name, changes).is_err(), "{name} {changes:?}");
        }
    }
}
