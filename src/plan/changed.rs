//! A process of a plan with another digest, owner or service: a replacement that should be
//! refused, or take over what is not its own.

use serde_json::Value;

use super::{Plan, Process, Role};
use crate::failure::Failure;
use crate::stack::harm::Changes;

const TRANSFER: &str = "--kv-transfer-config";
const DIGEST: &str = "--compatibility-digest";
const TIERS: &str = "/kv_connector_extra_config/secondary_tiers";
const OWNERS: &str = "/kv_connector_extra_config/dynamo_state_agent/cache_owner_ids";
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
        let tier = tier(&mut config).ok_or_else(|| cannot("the digest"))?;
        tier["compatibility_digest"] = digest.clone().into();
    }
    if let Some(index) = changes.service_of {
        let mut other = other(plan, index)?;
        let socket = tier(&mut other).map(|tier| tier[SOCKET].clone());
        let tier = tier(&mut config).zip(socket);
        let (tier, socket) = tier.ok_or_else(|| cannot("the service"))?;
        tier[SOCKET] = socket;
    }
    if let Some(index) = changes.owner_of {
        let other = other(plan, index)?.pointer(OWNERS).cloned();
        let owners = config.pointer_mut(OWNERS).zip(other);
        let (owners, other) = owners.ok_or_else(|| cannot("the owner"))?;
        *owners = other;
    }
    *value(&mut process, TRANSFER).ok_or_else(|| cannot("the tier"))? = config.to_string();
    Ok(process)
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

/// KVCR's tier, if it has a service.
fn tier(config: &mut Value) -> Option<&mut Value> {
    let tiers = config.pointer_mut(TIERS)?.as_array_mut()?;
    tiers.iter_mut().find(|tier| tier.get(SOCKET).is_some())
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
