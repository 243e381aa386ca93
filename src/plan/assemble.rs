//! A stack as a whole: discovery and front door, Guards where they are wanted, the engines under
//! test, and a reference engine beside them.
//!
//! Which engines there are follows from the topology; what each of them is started with is
//! [`worker`]'s.

use super::dynamo::{self, Discovery};
use super::guard::{self, Guarded};
use super::{Bindings, Plan, Serves, sidecar};
use crate::config::Config;
use crate::config::profile::{Topology, TopologyKind};
use crate::engine::vllm::worker::{self, Part};
use crate::environment::Installed;
use crate::failure::Failure;

/// Names of the ports of [`assemble`].
pub(super) fn ports(config: &Config) -> Vec<String> {
    let mut names = dynamo::ports(config);
    for part in parts(config) {
        names.extend(worker::ports(part));
    }
    names
}

fn parts(config: &Config) -> impl Iterator<Item = Part> {
    let Topology { kind, workers, .. } = config.profile.topology;
    let (serves, decode) = match kind {
        TopologyKind::Aggregated => (Serves::Whole, None),
        TopologyKind::Disagg => (Serves::Prefill, Some(Part::Decode { index: workers })),
    };
    let core = (0..workers).map(move |index| Part::Core { index, serves });
    core.chain(decode).chain([Part::Reference])
}

/// Bytes of `/dev/shm` that the whole stack takes.
pub(super) fn shm_bytes(config: &Config) -> u64 {
    let engines = parts(config).map(|part| worker::shm_bytes(config, part));
    engines.fold(guard::shm_bytes(config), u64::saturating_add)
}

/// The plan of any topology.
pub(super) fn assemble(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
) -> Result<Plan, Failure> {
    let discovery = Discovery::choose(config, installed, bindings)?;
    let frontend = dynamo::frontend(config, installed, bindings, &discovery)?;
    let env = dynamo::environment(installed, bindings, &discovery)?;

    let mut processes: Vec<_> = discovery.process(bindings).into_iter().collect();
    processes.push(frontend);
    let guarded = Guarded::of(config, installed, bindings)?;
    let mut directories = dynamo::directories(bindings);
    let mut shm_prefixes = vec![worker::shm_prefix(bindings)];
    if let Some(guarded) = &guarded {
        processes.push(dynamo::state_agent(
            config, installed, bindings, &discovery,
        )?);
        let own = guarded.has_services();
        for index in (0..config.profile.topology.workers).filter(|_| own) {
            processes.push(guarded.service(config, installed, bindings, index, env.clone()));
            directories.push(guard::pool_dir(bindings, index));
        }
        shm_prefixes.extend(own.then(|| guard::shm_prefix(bindings)));
    }
    let mut workers = Vec::new();
    let mut reference = None;
    for part in parts(config) {
        let engine = worker::plan(config, installed, bindings, part, env.clone())?;
        processes.push(super::Process {
            after: match (part, &guarded) {
                (Part::Core { index, .. }, Some(guarded)) => {
                    [discovery.after(), guarded.after(index)].concat()
                }
                _ => discovery.after(),
            },
            ..engine.process
        });
        match part {
            Part::Core { .. } | Part::Decode { .. } => workers.push(engine.seen),
            Part::Reference => reference = Some(engine.seen),
        }
    }

    let port = bindings.port(dynamo::FRONTEND_PORT)?;
    Ok(Plan {
        topology: match config.profile.topology.kind {
            TopologyKind::Aggregated => "aggregated".to_owned(),
            TopologyKind::Disagg => "disagg".to_owned(),
        },
        discovery: discovery.chosen(),
        processes,
        frontend_url: format!("http://127.0.0.1:{port}"),
        workers,
        reference,
        directories,
        shm_prefixes,
        shm_bytes: shm_bytes(config),
        external: sidecar::external(config, installed, bindings)?,
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::testing::{canonical, installed, simulated};
    use super::super::{Group, Process, render};
    use super::*;
    use crate::config::testing::{cpu, sim};
    use crate::failure::Class;
    use crate::sim::settings::{Settings, VARIABLE};

    #[test]
    fn the_cpu_profile_is_as_pinned() {
        let plan = canonical(&cpu(&[]), &installed()).unwrap();
        crate::snapshot::golden("plan/cpu", &render(&plan));
    }

    #[test]
    fn disaggregated_it_is_as_pinned() {
        let flags = ["--topology", "disagg", "--guard"];
        let plan = canonical(&cpu(&flags), &installed()).unwrap();
        crate::snapshot::golden("plan/cpu-disagg-guard", &render(&plan));
    }

    /// Who decodes has no tier, and no cache in which an answer could hide what it was handed.
    #[test]
    fn one_worker_decodes_for_all_that_prefill() {
        let config = cpu(&["--topology", "disagg", "--workers", "3"]);
        let plan = canonical(&config, &installed()).unwrap();
        let serves: Vec<_> = plan.workers.iter().map(|worker| worker.serves).collect();
        let prefill = Serves::Prefill;
        assert_eq!(serves, [prefill, prefill, prefill, Serves::Decode]);
        let kvcr: Vec<_> = plan.workers.iter().map(|worker| worker.kvcr).collect();
        assert_eq!(kvcr, [true, true, true, false]);
        let places: Vec<_> = plan.workers.iter().map(|worker| worker.index).collect();
        assert_eq!(places, [0, 1, 2, 3]);
        let find = |name: &str| plan.processes.iter().find(|process| process.name == name);
        let decode = find("worker3").unwrap();
        assert!(
            decode
                .argv
                .contains(&"--no-enable-prefix-caching".to_owned())
        );
        let side_channels: BTreeSet<_> = (0..4)
            .map(|index| &find(&format!("worker{index}")).unwrap().env["VLLM_NIXL_SIDE_CHANNEL_PORT"])
            .collect();
        assert_eq!(side_channels.len(), 4);
        assert!(
            !find("reference")
                .unwrap()
                .env
                .contains_key("VLLM_NIXL_SIDE_CHANNEL_PORT")
        );
    }

    /// Dynamo looks at the outermost connector only, vLLM at the one that offloads.
    #[test]
    fn what_dynamo_reads_stands_in_both_places() {
        let plan = canonical(&cpu(&["--topology", "disagg", "--guard"]), &installed()).unwrap();
        let worker = plan
            .processes
            .iter()
            .find(|process| process.name == "worker0");
        let argv = &worker.unwrap().argv;
        let at = argv.iter().position(|word| word == "--kv-transfer-config");
        let config: serde_json::Value = serde_json::from_str(&argv[at.unwrap() + 1]).unwrap();
        let outer = &config["kv_connector_extra_config"];
        let inner = &outer["connectors"][0]["kv_connector_extra_config"];
        for name in [
            "secondary_tiers",
            "self_describing_kv_events",
            "dynamo_state_agent",
        ] {
            assert!(!inner[name].is_null(), "{name}");
            assert_eq!(outer[name], inner[name], "{name}");
        }
        let newer = Installed {
            reads_nested_tiers: true,
            ..installed()
        };
        let plan = canonical(&cpu(&["--topology", "disagg", "--guard"]), &newer).unwrap();
        let worker = plan
            .processes
            .iter()
            .find(|process| process.name == "worker0");
        let once = worker.unwrap().argv.join(" ");
        assert_eq!(once.matches("secondary_tiers").count(), 1);
        // vLLM gives the outer one's to those inside, and dies of one that has its own.
        assert!(
            outer["connectors"]
                .as_array()
                .unwrap()
                .iter()
                .all(|it| it["engine_id"].is_null())
        );
    }

    #[test]
    fn the_sim_profile_is_as_pinned() {
        let plan = canonical(&sim(&[]), &simulated()).unwrap();
        crate::snapshot::golden("plan/sim", &render(&plan));
    }

    /// The harness must not be able to tell which stack it starts: beside the program, the
    /// model, the numbers of the profile and what only Python needs, the plans are the same.
    #[test]
    fn a_simulated_process_gets_the_command_line_of_the_real_one() {
        let real = canonical(&cpu(&["--discovery", "file"]), &installed()).unwrap();
        let plan = canonical(&sim(&[]), &simulated()).unwrap();
        assert_eq!(real.processes.len(), plan.processes.len());
        for (real, sim) in real.processes.iter().zip(&plan.processes) {
            let place = |argv: &[String], module: &str| argv[1] == module;
            assert!(place(&real.argv, "-m") && place(&sim.argv, "__sim"));
            assert_eq!(sim.argv[0], "/sim/kvcr-phase1");
            assert_eq!(real.argv[2], sim.argv[2]);
            let flags = |process: &Process| -> Vec<String> {
                let flags = process.argv.iter().filter(|arg| arg.starts_with("--"));
                flags.cloned().collect()
            };
            assert_eq!(flags(real), flags(sim));
            assert_eq!((&real.name, &real.ready), (&sim.name, &sim.ready));
            for name in sim.env.keys().filter(|name| *name != VARIABLE) {
                assert!(real.env.contains_key(name), "{name}");
            }
        }
        assert_eq!(real.workers, plan.workers);
    }

    #[test]
    fn every_simulated_process_is_told_who_it_is_and_what_to_tell() {
        let config = sim(&["--sim-faults", "corrupt_block@worker1#2", "--sim-seed", "9"]);
        let plan = canonical(&config, &simulated()).unwrap();
        for process in &plan.processes {
            let settings = Settings::parse(&process.env[VARIABLE]).unwrap();
            assert_eq!(settings.process, process.name);
            assert_eq!(settings.seed, 9);
            assert_eq!(settings.faults, config.profile.sim.faults);
            assert_eq!(
                settings.faults_file.unwrap(),
                std::path::Path::new("/scratch/faults")
            );
        }
        let real = canonical(&cpu(&[]), &installed()).unwrap();
        assert!(
            real.processes
                .iter()
                .all(|it| !it.env.contains_key(VARIABLE))
        );
        let nobody = sim(&["--sim-faults", "corrupt_block@worker7"]);
        let text = canonical(&nobody, &simulated()).unwrap_err().to_string();
        assert!(
            text.contains("corrupt_block@worker7 would be told by nobody"),
            "{text}"
        );
        assert!(
            text.contains("frontend, reference, worker0, worker1"),
            "{text}"
        );
    }

    #[test]
    fn a_simulated_stack_has_no_rings_in_shared_memory() {
        let plan = canonical(&sim(&[]), &simulated()).unwrap();
        assert_eq!(plan.shm_bytes, 2 * 835_584);
    }

    #[test]
    fn names_ports_and_metrics_pages_are_unique() {
        let config = cpu(&["--workers", "4"]);
        let plan = canonical(&config, &installed()).unwrap();
        let names: BTreeSet<_> = plan.processes.iter().map(|process| &process.name).collect();
        assert_eq!(names.len(), plan.processes.len());
        let ports: BTreeSet<_> = ports(&config).into_iter().collect();
        assert_eq!(ports.len(), super::ports(&config).len());
        let pages: BTreeSet<_> = plan
            .workers
            .iter()
            .map(|worker| &worker.metrics_url)
            .collect();
        assert_eq!(pages.len(), 4);
    }

    #[test]
    fn whoever_is_waited_for_exists_and_stands_earlier() {
        let plan = canonical(&cpu(&[]), &installed()).unwrap();
        for (at, process) in plan.processes.iter().enumerate() {
            for name in &process.after {
                assert!(plan.processes[..at].iter().any(|other| &other.name == name));
            }
        }
    }

    /// The reference answers for the engine, so it may differ from a worker in KVCR and names
    /// only.
    #[test]
    fn the_reference_is_a_worker_without_kvcr() {
        let plan = canonical(&cpu(&[]), &installed()).unwrap();
        let find = |name: &str| plan.processes.iter().find(|process| process.name == name);
        let (worker, reference) = (find("worker0").unwrap(), find("reference").unwrap());
        assert_eq!(reference.group, Group::Reference);
        let flags = |process: &Process| -> BTreeSet<String> {
            let flags = process.argv.iter().filter(|arg| arg.starts_with("--"));
            flags.cloned().collect()
        };
        let only_worker: Vec<_> = flags(worker)
            .difference(&flags(reference))
            .cloned()
            .collect();
        assert_eq!(only_worker, ["--kv-transfer-config"]);
        assert!(flags(reference).is_subset(&flags(worker)));
        let differing: Vec<_> = worker
            .env
            .iter()
            .filter(|(name, value)| reference.env.get(*name) != Some(value))
            .map(|(name, _)| name.as_str())
            .collect();
        assert_eq!(differing, ["DYN_NAMESPACE", "DYN_SYSTEM_PORT"]);
        assert!(!plan.reference.unwrap().kvcr);
    }

    #[test]
    fn without_etcd_files_are_used_and_the_plan_says_why() {
        let mut bare = installed();
        bare.etcd = None;
        let plan = canonical(&cpu(&[]), &bare).unwrap();
        assert_eq!(plan.discovery.backend, "file");
        assert_eq!(plan.discovery.reason, "no etcd is installed");
        assert!(
            plan.processes
                .iter()
                .all(|process| process.after.is_empty())
        );
        let env = &plan.processes[0].env;
        assert_eq!(env["DYN_FILE_KV"], "/scratch/discovery");
        assert!(!env.contains_key("ETCD_ENDPOINTS"));
    }

    #[test]
    fn etcd_that_is_asked_for_and_missing_is_an_environment_failure() {
        let mut bare = installed();
        bare.etcd = None;
        let failure = canonical(&cpu(&["--discovery", "etcd"]), &bare).unwrap_err();
        assert_eq!(failure.class, Class::Environment);
    }

    #[test]
    fn a_deep_state_directory_is_refused_before_sockets_fail() {
        let config = cpu(&[]);
        let mut bindings = Bindings::canonical(&super::ports(&config), &[]);
        bindings.scratch = format!("/{}", "x".repeat(80)).into();
        let failure = assemble(&config, &installed(), &bindings).unwrap_err();
        assert_eq!(failure.class, Class::Environment);
        assert!(failure.hint.unwrap().contains("--state-dir"));
    }

    #[test]
    fn a_missing_port_is_said_by_name() {
        let bindings = Bindings::canonical(&[], &[]);
        let failure = assemble(&cpu(&[]), &installed(), &bindings).unwrap_err();
        assert!(failure.to_string().contains("etcd-client"), "{failure}");
    }

    #[test]
    fn shared_memory_is_counted_as_the_engine_takes_it() {
        let plan = canonical(&cpu(&[]), &installed()).unwrap();
        let rings = 251_658_260 + 167_772_180;
        assert_eq!(plan.shm_bytes, 2 * (53_477_376 + rings) + rings);
        assert_eq!(plan.shm_prefixes, ["vllm_offload_0000000000000000-g0-"]);
    }
}
