//! Services that somebody else runs: what they are called, where they are, what they are started
//! with. The contract of docs/sidecar.md; pure.
//!
//! A plan with such services has no process for them: [`External`] says what it expects instead.
//! `kvcr-phase1 services` makes processes of the same contract.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::guard::{self, Guarded, service_name};
use super::{Bindings, ChosenDiscovery, Plan, Process, settings_of};
use crate::config::Config;
use crate::engine::vllm::worker;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::hash;
use crate::sim::settings;

/// Hexadecimal digits of the directory's hash that are part of names in `/dev/shm`.
const DIGITS: usize = 16;

/// A service that the stack needs and does not start.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct External {
    /// As a process of the plan would be called: `service0`.
    pub name: String,
    /// Process of the worker that it guards.
    pub worker: String,
    /// Where it listens.
    pub socket: PathBuf,
    /// Where what it says is written.
    pub log: PathBuf,
    /// Where its pool is: it is seen there if and only if `/dev/shm` is shared.
    pub pool_dir: PathBuf,
    /// Bytes of the pool, at least; a whole number of pages.
    pub pool_bytes: u64,
    /// The digest that it must have been started with.
    pub digest: String,
    /// Name of the worker's port that it answers on once the worker is dead.
    pub control_port: String,
}

/// The socket of service `index` in `directory`.
pub(crate) fn socket(directory: &Path, index: usize) -> PathBuf {
    directory.join(format!("{}.sock", service_name(index)))
}

/// The log of service `index` in `directory`.
pub(crate) fn log(directory: &Path, index: usize) -> PathBuf {
    directory.join(format!("{}.log", service_name(index)))
}

/// Where service `index` of `directory` keeps its pool.
pub(crate) fn pool_dir(directory: &Path, index: usize) -> PathBuf {
    PathBuf::from(format!("/dev/shm/{}{index}", shm_prefix(directory)))
}

/// How the names of those begin. The directory's path is in it, for two directories' services must
/// not meet, and both sides have to come to the same name.
pub(crate) fn shm_prefix(directory: &Path) -> String {
    let digest = hash::sha256(directory.to_string_lossy().as_bytes());
    format!("kvcr_pool_ext{}-", &digest[..DIGITS])
}

/// What the stack of `config` expects of others; nothing where it starts its services itself.
///
/// # Errors
/// As [`Guarded::of`].
pub(crate) fn external(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
) -> Result<Vec<External>, Failure> {
    let Some(directory) = &config.profile.topology.external_services else {
        return Ok(Vec::new());
    };
    let Some(guarded) = Guarded::of(config, installed, bindings)? else {
        return Ok(Vec::new());
    };
    let service = |index| External {
        name: service_name(index),
        worker: worker::process_name(index),
        socket: socket(directory, index),
        log: log(directory, index),
        pool_dir: pool_dir(directory, index),
        pool_bytes: guard::pool_bytes(config),
        digest: guarded.digest().to_owned(),
        control_port: worker::control_port(index),
    };
    Ok((0..config.profile.topology.workers).map(service).collect())
}

/// The services themselves and nothing else, for whoever runs them in `directory`.
///
/// # Errors
/// As [`Guarded::of`]; Environment, if the settings of a simulated one cannot be written.
pub(crate) fn plan(
    config: &Config,
    installed: &Installed,
    directory: &Path,
) -> Result<Plan, Failure> {
    let workers = 0..config.profile.topology.workers;
    Ok(Plan {
        topology: "services".to_owned(),
        discovery: ChosenDiscovery {
            backend: "none".to_owned(),
            reason: "services find nobody".to_owned(),
        },
        processes: services(config, installed)?,
        frontend_url: String::new(),
        workers: Vec::new(),
        reference: None,
        directories: workers.map(|index| pool_dir(directory, index)).collect(),
        shm_prefixes: vec![shm_prefix(directory)],
        shm_bytes: guard::services_bytes(config),
        external: Vec::new(),
    })
}

fn services(config: &Config, installed: &Installed) -> Result<Vec<Process>, Failure> {
    // They need no port and no address of the host.
    let bindings = Bindings::canonical(&[], &[]);
    let Some(guarded) = Guarded::of(config, installed, &bindings)? else {
        return Ok(Vec::new());
    };
    let simulated = config.profile.engine.kind.is_simulated();
    (0..config.profile.topology.workers)
        .map(|index| {
            let mut process =
                guarded.service(config, installed, &bindings, index, environment(installed));
            if simulated {
                // `sim tell` reaches the stack only: these stand beside it.
                let settings = settings_of(config, &process.name, None)?;
                process.env.insert(settings::VARIABLE.to_owned(), settings);
            }
            Ok(process)
        })
        .collect()
}

/// What a service needs beside its arguments, wherever it runs.
fn environment(installed: &Installed) -> BTreeMap<String, String> {
    let mut env = BTreeMap::new();
    if installed.program.python().is_some() {
        // A dying process must not take its last words along.
        env.insert("PYTHONUNBUFFERED".to_owned(), "1".to_owned());
    }
    if let Some(overlay) = &installed.overlay {
        env.insert(
            "PYTHONPATH".to_owned(),
            overlay.to_string_lossy().into_owned(),
        );
    }
    env
}

/// One line a service for a Dockerfile, a CI step or a pod: what a shell has to do, with the pool's
/// directory, the variables that it needs and its log.
pub(crate) fn render(plan: &Plan, directory: &Path) -> String {
    let quote = |text: &str| shlex::try_quote(text).map_or_else(|_| text.to_owned(), Into::into);
    let path = |path: &Path| quote(&path.to_string_lossy());
    let mut out = String::new();
    for (index, process) in plan.processes.iter().enumerate() {
        let variables = process.env.iter();
        let words = variables
            .map(|(name, value)| format!("{name}={}", quote(value)))
            .chain(process.argv.iter().map(|word| quote(word)));
        out += &format!(
            "mkdir -p -m 700 {} && {} >>{} 2>&1\n",
            path(&pool_dir(directory, index)),
            words.collect::<Vec<_>>().join(" "),
            path(&log(directory, index))
        );
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::testing::{canonical, installed, simulated};
    use super::super::{Role, render as render_plan};
    use super::*;
    use crate::config::testing::{cpu, sim};

    const FLAG: &str = "--external-services=/run/sidecars";

    #[test]
    fn the_plan_with_sidecars_is_as_pinned() {
        let plan = canonical(&cpu(&[FLAG]), &installed()).unwrap();
        crate::snapshot::golden("plan/cpu-sidecar", &render_plan(&plan));
    }

    /// The same worker, the same rest: only the services are elsewhere.
    #[test]
    fn a_stack_with_sidecars_is_one_with_guards_less_the_services() {
        let own = canonical(&cpu(&["--guard"]), &installed()).unwrap();
        let plan = canonical(&cpu(&[FLAG]), &installed()).unwrap();
        let names = |plan: &super::super::Plan| -> Vec<String> {
            let rest = plan.processes.iter().filter(|it| it.role != Role::Service);
            rest.map(|process| process.name.clone()).collect()
        };
        assert_eq!(names(&plan), names(&own));
        assert_eq!(plan.processes.len() + 2, own.processes.len());
        assert!(plan.shm_bytes < own.shm_bytes);
        assert!(
            plan.directories
                .iter()
                .all(|path| !path.starts_with("/dev/shm"))
        );
        assert_eq!(plan.shm_prefixes.len(), 1);
        let find = |name: &str| plan.processes.iter().find(|it| it.name == name).unwrap();
        let worker = find("worker1");
        assert!(
            worker.after.contains(&"state-agent".to_owned()),
            "{:?}",
            worker.after
        );
        assert!(!worker.after.contains(&"service1".to_owned()));
        let told = worker
            .argv
            .iter()
            .any(|arg| arg.contains("/run/sidecars/service1.sock"));
        assert!(told);
        let external = &plan.external[1];
        assert_eq!(external.socket, Path::new("/run/sidecars/service1.sock"));
        assert_eq!(external.log, Path::new("/run/sidecars/service1.log"));
        assert_eq!(
            (&*external.name, &*external.worker),
            ("service1", "worker1")
        );
        assert_eq!(own.external, []);
    }

    /// Whoever starts what is printed has what the stack expects.
    #[test]
    fn services_are_started_with_what_the_stack_expects() {
        for (config, software) in [(cpu(&[FLAG]), installed()), (sim(&[FLAG]), simulated())] {
            let bindings = Bindings::canonical(&[], &[]);
            let expected = external(&config, &software, &bindings).unwrap();
            let plan = plan(&config, &software, Path::new("/run/sidecars")).unwrap();
            let services = &plan.processes;
            assert_eq!(expected.len(), services.len());
            for (expected, service) in expected.iter().zip(services) {
                let value = |flag: &str| {
                    let at = service.argv.iter().position(|arg| arg == flag).unwrap();
                    service.argv[at + 1].clone()
                };
                assert_eq!(value("--socket-path"), expected.socket.to_string_lossy());
                assert_eq!(value("--pool-dir"), expected.pool_dir.to_string_lossy());
                assert!(plan.directories.contains(&expected.pool_dir));
                let name = expected.pool_dir.file_name().unwrap().to_string_lossy();
                assert!(name.starts_with(&plan.shm_prefixes[0]));
                assert_eq!(value("--compatibility-digest"), expected.digest);
                assert_eq!(value("--log-level"), "DEBUG");
                assert_eq!(value("--guard-count"), "1");
            }
            let text = render(&plan, Path::new("/run/sidecars"));
            assert_eq!(text.lines().count(), 2);
            for (line, service) in text.lines().zip(services) {
                let words = shlex::split(line).unwrap();
                let start = words
                    .iter()
                    .position(|word| *word == service.argv[0])
                    .unwrap();
                assert_eq!(words[start..start + service.argv.len()], service.argv);
                assert!(words[words.len() - 2].starts_with(">>/run/sidecars/service"));
            }
        }
    }

    #[test]
    fn pools_of_two_directories_never_meet() {
        let (one, other) = (Path::new("/a"), Path::new("/b"));
        assert_ne!(shm_prefix(one), shm_prefix(other));
        assert_eq!(shm_prefix(one), shm_prefix(Path::new("/a")));
        assert!(pool_dir(one, 1).to_string_lossy().ends_with("-1"));
    }
}
