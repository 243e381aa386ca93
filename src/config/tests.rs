//! How the whole of it behaves: precedence, every field by every way, every contradiction.

use std::collections::BTreeSet;
use std::path::Path;

use proptest::prelude::*;
use serde_json::Value;

use super::fields::{self, FIELDS, Presence};
use super::profile::Performance;
use super::testing::{FakeEnv, cpu, own, sim};
use super::*;

fn with(vars: &[(&str, &str)], args: &[&str]) -> Result<Config, String> {
    let mut env = FakeEnv::new([]).cwd("/work");
    for (name, value) in vars {
        env = env.var_set(name, value);
    }
    load(own(args).map_err(|error| error.0)?, &env).map_err(|error| error.0)
}

fn refused(args: &[&str]) -> String {
    with(&[], args).unwrap_err()
}

/// A text for every profile field, different from what `env/cpu.toml` says wherever there is a
/// second valid value.
fn sample(field: &Field) -> &'static str {
    match field.name() {
        "title" => "another",
        "known" => "tc03::x blocks,bytes: known; tc01::cold text: too",
        "environment.lock" => "other",
        "environment.python" => "/opt/python",
        "environment.overlay" => "false",
        "engine.kind" => "vllm",
        "engine.device" => "cuda",
        "engine.dtype" => "bfloat16",
        "engine.block_tokens" => "128",
        "engine.max_model_len" => "2048",
        "engine.device_blocks" => "256",
        "engine.gpu_memory_utilization" => "0.5",
        "engine.env" => "A=1 B='x y'",
        "engine.args" => "--seed 7",
        "model.build" => "dense",
        "model.path" => "/models/other",
        "model.served_name" => "other",
        "geometry.hit_block_tokens" => "576",
        "geometry.ssm_groups" => "3",
        "geometry.page_bytes" => "18874368",
        "kvcr.primary_bytes" => "67108864",
        "kvcr.dram_slots" => "512",
        "kvcr.operation_timeout_ms" => "1000",
        "kvcr.abandon_timeout_ms" => "20000",
        "kvcr.opportunistic_query" => "true",
        "kvcr.guard" => "true",
        "kvcr.pool_bytes" => "1048576",
        "kvcr.heartbeat_timeout_ms" => "2000",
        "topology.kind" => "aggregated",
        "topology.workers" => "3",
        "topology.external_services" => "/run/sidecars",
        "devices.gpus" => "0,0,1",
        "discovery.backend" => "etcd",
        "network.host_address" => "192.0.2.7",
        "network.frontend_port" => "8000",
        "stack.keep_seconds" => "1",
        "stack.reference_keep_seconds" => "33",
        "stack.bring_up_seconds" => "34",
        "stack.max_lifetime_seconds" => "3600",
        "request.deadline_seconds" => "35",
        "request.max_tokens" => "36",
        "tc02.seed_prefix" => "4",
        "tc02.extra_shared_sections" => "1",
        "tc02.evict_target" => "1",
        "performance.dedicated" => "true",
        "performance.repeats" => "8",
        "performance.warm_up" => "2",
        "performance.blocks" => "12",
        "performance.seed" => "44",
        "performance.cold_ttft_ratio_max" => "1.2",
        "performance.local_ttft_ratio_max" => "0.5",
        "performance.peer_ttft_ratio_max" => "0.6",
        "performance.guard_ttft_ratio_max" => "0.7",
        "budget.promotion_ms" => "51",
        "budget.first_correct_response_ms" => "52",
        "budget.first_guard_hit_ms" => "53",
        "budget.replacement_serving_ms" => "54",
        "sim.seed" => "7",
        "sim.faults" => "corrupt_block@worker1#2, swap_blocks",
        "sim.start_us" => "37",
        "sim.prefill_token_us" => "38",
        "sim.load_block_us" => "39",
        "sim.transfer_block_us" => "40",
        "sim.decode_token_us" => "41",
        "sim.lease_us" => "42",
        "sim.promotion_us" => "43",
        other => panic!("{other} is new: say a value for it here"),
    }
}

fn profile_fields() -> impl Iterator<Item = &'static Field> {
    FIELDS.iter().filter(|field| field.place != Place::Run)
}

/// Dotted paths of every leaf; what the table calls a table of texts is one leaf.
fn leaves(prefix: &str, value: &Value, out: &mut BTreeSet<String>) {
    match value {
        Value::Object(map) if fields::by_path(prefix).is_none() => {
            for (key, inner) in map {
                let dot = if prefix.is_empty() { "" } else { "." };
                leaves(&format!("{prefix}{dot}{key}"), inner, out);
            }
        }
        _ => {
            out.insert(prefix.to_owned());
        }
    }
}

#[test]
fn table_and_struct_have_the_same_fields() {
    // What the simulated stack has is left out where it has nothing to say.
    let profile = sim(&["--sim-seed", "1"]).profile;
    let profile = serde_json::to_value(profile).unwrap();
    let mut in_struct = BTreeSet::new();
    leaves("", &profile, &mut in_struct);
    let in_table: BTreeSet<String> = profile_fields()
        .map(|field| field.name().to_owned())
        .collect();
    assert_eq!(in_struct, in_table);
}

/// Everything by flag, everything by variable: the same profile, and not the one of the file.
#[test]
fn every_field_is_settable_by_flag_and_by_variable_to_the_same_effect() {
    for field in profile_fields() {
        let text = sample(field);
        let flag = format!("--{}={text}", field.flag);
        let variable = field.variable();
        let by_flag = with(&[], &[&flag]);
        let by_variable = with(&[(&variable, text)], &[]);
        match (by_flag, by_variable) {
            (Ok(by_flag), Ok(by_variable)) => {
                assert_eq!(by_flag.profile, by_variable.profile, "{}", field.name());
                let one_value = ["engine.kind", "topology.kind", "model.build"];
                let changed = by_flag.profile != cpu(&[]).profile;
                assert_eq!(
                    changed,
                    !one_value.contains(&field.name()),
                    "{}",
                    field.name()
                );
                let over = (field.name().to_owned(), text.to_owned());
                assert_eq!(by_flag.overrides, [over]);
            }
            // Fields of a device that is not supported yet are refused for that reason alone,
            // in the name of whoever set them.
            (Err(by_flag), Err(by_variable)) => {
                let flag = format!("--{}", field.flag);
                assert!(
                    by_flag.contains(&format!("{flag}: {}: ", field.name())),
                    "{by_flag}"
                );
                assert_eq!(by_flag.replace(&flag, &variable), by_variable);
            }
            (by_flag, by_variable) => panic!("{}: {by_flag:?} {by_variable:?}", field.name()),
        }
    }
}

/// Serde's idea of what may be absent is the table's.
#[test]
fn presence_is_what_the_struct_says() {
    let whole = toml::Table::try_from(sim(&["--sim-seed", "1"]).profile).unwrap();
    for field in profile_fields() {
        let mut document = whole.clone();
        match field.name().split_once('.') {
            None => {
                document.remove(field.name());
            }
            Some((section, key)) => {
                let table = document
                    .get_mut(section)
                    .and_then(toml::Value::as_table_mut);
                table.unwrap().remove(key);
            }
        }
        let accepted = document.try_into::<Profile>().is_ok();
        assert_eq!(
            accepted,
            field.presence != Presence::Required,
            "{}",
            field.name()
        );
    }
}

#[test]
fn flags_win_over_variables_and_variables_over_the_file() {
    assert_eq!(cpu(&[]).profile.engine.device_blocks, Some(224));
    let vars = [("PHASE1_DEVICE_BLOCKS", "225")];
    assert_eq!(
        with(&vars, &[]).unwrap().profile.engine.device_blocks,
        Some(225)
    );
    let config = with(&vars, &["--device-blocks", "226"]).unwrap();
    assert_eq!(config.profile.engine.device_blocks, Some(226));
    assert_eq!(
        config.overrides,
        [("engine.device_blocks".to_owned(), "226".to_owned())]
    );
    assert_eq!(
        config.replay_args(),
        ["--profile=cpu", "--device-blocks=226"]
    );
}

#[test]
fn a_replay_is_the_same_configuration() {
    let vars = [
        ("PHASE1_ENGINE_ENV", "A='x y'"),
        ("PHASE1_KEEP", "1"),
        ("PHASE1_REQUIRE", "all"),
    ];
    let vars = [vars.as_slice(), &[("PHASE1_LOCK", "cpu")]].concat();
    let config = with(&vars, &["--python", "bin/python"]).unwrap();
    let args = config.replay_args();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let again = with(&[], &args).unwrap();
    assert_eq!(again.profile, config.profile);
    assert_eq!(again.require, config.require);
    // A person pastes it into a shell.
    assert_eq!(
        shlex::split(&config.replay_line()),
        Some(config.replay_args())
    );
}

#[test]
fn keep_one_means_an_hour() {
    assert_eq!(
        with(&[("PHASE1_KEEP", "1")], &[])
            .unwrap()
            .profile
            .stack
            .keep_seconds,
        3600
    );
    assert_eq!(cpu(&["--keep", "90"]).profile.stack.keep_seconds, 90);
}

#[test]
fn none_removes_an_optional_value_and_nothing_else() {
    assert_eq!(
        cpu(&["--device-blocks", "none"])
            .profile
            .engine
            .device_blocks,
        None
    );
    assert_eq!(
        refused(&["--workers", "none"]),
        r#"--workers: topology.workers: expected an integer, found "none""#
    );
}

#[test]
fn an_alternative_displaces_what_the_file_says() {
    let environment = cpu(&["--python", "/opt/python"]).profile.environment;
    assert_eq!(environment.lock, None);
    assert_eq!(
        environment.python.as_deref(),
        Some(Path::new("/opt/python"))
    );
    let why = refused(&["--python", "/opt/python", "--lock", "cpu"]);
    assert_eq!(
        why,
        "--python: environment.python: excludes environment.lock, which --lock sets; keep one of them"
    );
}

#[test]
fn settings_and_surroundings() {
    let vars = [
        ("NEXTEST", "1"),
        ("NEXTEST_RUN_ID", "run"),
        ("NEXTEST_ATTEMPT", "2"),
        ("CI", "true"),
        ("INSTA_FORCE_PASS", "1"),
        ("INSTA_UPDATE", "always"),
        ("PHASE1_STRICT_PINS", "1"),
        ("PHASE1_RUNS_DIR", "runs"),
        ("PHASE1_DEVICE_BLOCKS", ""),
    ];
    let config = with(&vars, &["--require", "tc01, tc02::cold", "--state-dir=/s"]).unwrap();
    assert!(config.under_nextest && config.ci && config.strict_pins);
    assert_eq!((config.run_id.as_str(), config.attempt), ("run", 2));
    assert_eq!(config.require, ["tc01", "tc02::cold"]);
    assert_eq!(config.paths.state, Path::new("/s"));
    assert_eq!(config.paths.runs, Path::new("/work/runs"));
    let insta = InstaState {
        force_pass: true,
        update: Some("always".to_owned()),
    };
    assert_eq!(config.insta, insta);
    let bare = cpu(&[]);
    assert!(!bare.under_nextest && !bare.ci && !bare.strict_pins);
    assert_eq!((bare.attempt, bare.insta), (1, InstaState::default()));
    assert_eq!(bare.run_id.len(), 36);
}

#[test]
fn unknown_variables_name_the_nearest() {
    assert_eq!(
        with(&[("PHASE1_DEVICE_BLOKS", "1")], &[]).unwrap_err(),
        "PHASE1_DEVICE_BLOKS: no such variable; the nearest is PHASE1_DEVICE_BLOCKS"
    );
}

#[test]
fn a_wrong_value_is_blamed_on_who_gave_it() {
    assert_eq!(
        with(&[("PHASE1_WORKERS", "two")], &[]).unwrap_err(),
        r#"PHASE1_WORKERS: topology.workers: expected an integer, found "two""#
    );
    assert_eq!(
        refused(&["--profile", "gpu"]),
        r#"--profile: no profile is called "gpu"; there are cpu, cpu-hybrid, sim, sim-hybrid (or give a path to a .toml file)"#
    );
}

#[test]
fn a_recovery_case_without_a_kill_would_prove_nothing() {
    assert_eq!(cpu(&[]).kills, 5);
    assert_eq!(cpu(&["--kills=2"]).kills, 2);
    assert_eq!(refused(&["--kills=0"]), "--kills: must be at least 1");
}

#[test]
fn performance_is_judged_only_where_somebody_says_so() {
    let performance = cpu(&[]).profile.performance;
    assert_eq!(performance, Performance::default());
    assert!(!performance.dedicated && performance.repeats == 7 && performance.warm_up == 1);
    let flags = ["--dedicated", "--repeats=9", "--warm-up=0", "--perf-seed=5"];
    let limits = ["--local-ttft-ratio-max=0.8", "--cold-ttft-ratio-max=1"];
    let performance = cpu(&[flags.as_slice(), &limits].concat())
        .profile
        .performance;
    let expected = Performance {
        dedicated: true,
        repeats: 9,
        warm_up: 0,
        seed: 5,
        local_ttft_ratio_max: Some(0.8),
        cold_ttft_ratio_max: Some(1.0),
        ..Performance::default()
    };
    assert_eq!(performance, expected);
    // Few repeats are allowed where nothing is judged.
    assert_eq!(cpu(&["--repeats=1"]).profile.performance.repeats, 1);
}

#[test]
fn every_contradiction_is_refused_with_its_reason() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["--repeats", "0"],
            "--repeats: performance.repeats: must be at least 1",
        ),
        (
            &["--repeats", "5", "--dedicated"],
            "--repeats: performance.repeats: must be at least 6 where performance.dedicated: fewer hold no median to 95 %; found 5",
        ),
        (
            &["--local-ttft-ratio-max", "0"],
            "--local-ttft-ratio-max: performance.local_ttft_ratio_max: must be above 0, found 0",
        ),
        (
            &["--peer-ttft-ratio-max=-0.5"],
            "--peer-ttft-ratio-max: performance.peer_ttft_ratio_max: must be above 0, found -0.5",
        ),
        (
            &["--abandon-timeout-ms", "9999"],
            "--abandon-timeout-ms: kvcr.abandon_timeout_ms: must be at least twice operation_timeout_ms, 10000, found 9999",
        ),
        // The public quick start's timeout with the adapter's default: KVCR would refuse at start.
        (
            &[
                "--operation-timeout-ms",
                "5000",
                "--abandon-timeout-ms",
                "5000",
            ],
            "--abandon-timeout-ms: kvcr.abandon_timeout_ms: must be at least twice operation_timeout_ms, 10000, found 5000",
        ),
        (
            &["--operation-timeout-ms", "6000"],
            "env/cpu.toml:46: kvcr.abandon_timeout_ms: must be at least twice operation_timeout_ms, 12000, found 10000",
        ),
        (
            &["--lock", "none"],
            "env/cpu.toml: environment.lock: missing; say it, or environment.python",
        ),
        (
            &["--model-build", "none"],
            "env/cpu.toml: model.build: missing; say it, or model.path",
        ),
        (
            &["--lock", "../x"],
            r#"--lock: environment.lock: must be the name of a folder under env/, found "../x""#,
        ),
        (
            &["--workers", "0"],
            "--workers: topology.workers: must be at least 1",
        ),
        (
            &["--gpus", "0,1"],
            "--gpus: devices.gpus: must be empty when engine.device is cpu",
        ),
        (
            &["--gpu-memory-utilization", "0.5"],
            "--gpu-memory-utilization: engine.gpu_memory_utilization: has no meaning when engine.device is cpu",
        ),
        (
            &["--device-blocks", "63"],
            "env/cpu.toml:31: engine.max_model_len: must fit into the device cache, at most 63 blocks x 64 tokens = 4032, found 12864",
        ),
        (
            &["--dram-slots", "0"],
            "--dram-slots: kvcr.dram_slots: must be at least 1",
        ),
        (
            &["--primary-bytes", "262143"],
            "--primary-bytes: kvcr.primary_bytes: must hold at least one block of 262144 bytes, found 262143",
        ),
        (
            &["--pool-bytes", "1048576"],
            "--pool-bytes: kvcr.pool_bytes: has no meaning unless kvcr.guard is true",
        ),
        (
            &["--guard", "--pool-bytes", "262143"],
            "--pool-bytes: kvcr.pool_bytes: must be at least 262144, found 262143",
        ),
        (
            &["--guard", "--heartbeat-timeout-ms", "999"],
            "--heartbeat-timeout-ms: kvcr.heartbeat_timeout_ms: must be at least 1000; leave it out to wait for death only",
        ),
        (
            &["--guard", "--host-address", "2001:db8::1"],
            "--host-address: network.host_address: must be an IPv4 address when kvcr.guard is true: KVCR takes no other",
        ),
        (
            &["--guard=false", "--external-services", "/run/s"],
            "--external-services: topology.external_services: has no meaning without Guards, and --guard sets kvcr.guard to false",
        ),
        (
            &["--frontend-port", "0"],
            "--frontend-port: network.frontend_port: must not be 0; leave it out to have one allocated",
        ),
        (
            &["--bring-up", "0"],
            "--bring-up: stack.bring_up_seconds: must be at least 1",
        ),
        (
            &["--deadline", "0"],
            "--deadline: request.deadline_seconds: must be at least 1",
        ),
        (
            &["--max-lifetime", "900"],
            "--max-lifetime: stack.max_lifetime_seconds: must be more than stack.bring_up_seconds 900, found 900",
        ),
        (
            &["--served-name="],
            r#"--served-name: model.served_name: must be a name without spaces, found """#,
        ),
        (&["--title="], "--title: title: must not be empty"),
        (
            &["--max-tokens", "12864"],
            "--max-tokens: request.max_tokens: must be less than engine.max_model_len 12864, found 12864",
        ),
        (
            &["--host-address", "127.0.0.1"],
            "--host-address: network.host_address: must be an address that other hosts reach, found 127.0.0.1",
        ),
        (
            &["--engine-env", "DYN_NAMESPACE=x"],
            "--engine-env: engine.env: DYN_NAMESPACE is set by the plan and cannot be changed",
        ),
        (
            &["--engine-args=--block-size=32"],
            "--engine-args: engine.args: --block-size=32 is set by the plan; change engine.block_tokens instead",
        ),
    ];
    for (args, expected) in cases {
        assert_eq!(refused(args), *expected, "{args:?}");
    }
}

#[test]
fn cuda_is_refused_until_it_works() {
    let why = refused(&["--device", "cuda", "--gpus", "0,1"]);
    assert_eq!(
        why,
        "--device: engine.device: cuda is not supported yet; the only device is cpu"
    );
}

#[test]
fn all_problems_are_said_together() {
    let vars = [("PHASE1_WORKRES", "2"), ("PHASE1_STRICT_PINS", "maybe")];
    let why = with(&vars, &["--workers", "0", "--keep", "soon"]).unwrap_err();
    let lines: Vec<&str> = why.lines().collect();
    assert_eq!(lines[0], "4 problems:");
    assert_eq!(lines.len(), 5);
    for part in [
        "PHASE1_WORKRES",
        "PHASE1_STRICT_PINS",
        "--workers",
        "--keep",
    ] {
        assert!(why.contains(part), "{why}");
    }
}

#[test]
fn a_profile_of_the_user() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("mine.toml");
    let text = include_str!("../../env/cpu.toml")
        .replace("lock = \"cpu\"", "python = \"venv/bin/python\"");
    std::fs::write(&file, text).unwrap();
    let config = cpu(&["--profile", file.to_str().unwrap()]);
    let python = config.profile.environment.python.unwrap();
    assert_eq!(python, dir.path().join("venv/bin/python"));

    std::fs::write(&file, "title = \"x\"\n[engine]\nkind = \"sglang\"\n").unwrap();
    let why = refused(&["--profile", file.to_str().unwrap()]);
    let name = file.display();
    assert!(
        why.contains(&format!(
            "{name}:3: engine.kind: expected one of vllm, sim, found \"sglang\""
        )),
        "{why}"
    );
    assert!(
        why.contains(&format!("{name}: engine.dtype: missing (")),
        "{why}"
    );
    assert!(why.contains("--dtype or with PHASE1_DTYPE"), "{why}");
    assert!(!why.contains("engine.kind: missing"), "{why}");
}

/// Every profile of this repository loads as it is.
#[test]
fn every_embedded_profile_is_valid() {
    let config = cpu(&[]);
    assert_eq!(config.profile_name, "cpu");
    assert_eq!(config.overrides, []);
    let config = sim(&[]);
    assert!(config.profile.engine.kind.is_simulated());
    assert_eq!(config.profile.sim, profile::Sim::default());
    assert_eq!(config.overrides, []);
}

#[test]
fn the_default_profile_is_replaced_only_where_nobody_names_what_runs() {
    let chosen = |vars: &[(&str, &str)], args: &[&str]| {
        let mut env = FakeEnv::new([]).cwd("/work");
        for (name, value) in vars {
            env = env.var_set(name, value);
        }
        let config = load_choosing(own(args).unwrap(), &env, |config| {
            assert_eq!(config.profile_name, "cpu");
            Some("sim")
        });
        config.unwrap().profile_name
    };
    assert_eq!(chosen(&[], &[]), "sim");
    assert_eq!(chosen(&[], &["--workers", "3"]), "sim");
    assert_eq!(chosen(&[], &["--profile", "cpu"]), "cpu");
    assert_eq!(chosen(&[("PHASE1_PROFILE", "cpu")], &[]), "cpu");
    assert_eq!(chosen(&[("PHASE1_PYTHON", "/py")], &[]), "cpu");
    assert_eq!(chosen(&[], &["--model-path", "/m"]), "cpu");
    // The simulated stack has no etcd, and somebody wants one.
    assert_eq!(chosen(&[], &["--discovery", "etcd"]), "cpu");
    let none = load_choosing(own(&[]).unwrap(), &FakeEnv::new([]), |_| None);
    assert_eq!(none.unwrap().profile_name, "cpu");
}

#[test]
fn every_field_of_the_simulated_stack_is_settable() {
    let base = sim(&[]);
    for field in profile_fields().filter(|field| field.name().starts_with("sim.")) {
        let text = sample(field);
        let by_flag = sim(&[&format!("--{}={text}", field.flag)]);
        let variables = [("PHASE1_PROFILE", "sim"), (&field.variable(), text)];
        let by_variable = with(&variables, &[]).unwrap();
        assert_eq!(by_flag.profile, by_variable.profile);
        assert_ne!(by_flag.profile.sim, base.profile.sim, "{}", field.name());
        let again = by_flag.replay_args();
        let again: Vec<&str> = again.iter().map(String::as_str).collect();
        assert_eq!(with(&[], &again).unwrap().profile, by_flag.profile);
    }
    let faults = sim(&["--sim-faults", "corrupt_block@worker1#2 swap_blocks"]);
    let faults: Vec<String> = faults
        .profile
        .sim
        .faults
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(faults, ["corrupt_block@worker1#2", "swap_blocks"]);
    assert_eq!(
        sim(&["--sim-start-us", "5"]).profile.sim.latency().start_us,
        5
    );
}

#[test]
fn a_geometry_of_nothing_is_refused_in_words() {
    for (flag, value) in [
        ("--hit-block-tokens", "geometry.hit_block_tokens"),
        ("--page-bytes", "geometry.page_bytes"),
    ] {
        assert_eq!(
            refused(&[flag, "0"]),
            format!("{flag}: {value}: must be at least 1; leave it out where it is not known")
        );
    }
    let guarded = ["--guard", "--model-path", "/m"];
    let why = refused(&guarded);
    assert!(
        why.contains("only where geometry.page_bytes is known"),
        "{why}"
    );
    let known = [&guarded[..], &["--page-bytes", "4096"]].concat();
    assert!(with(&[], &known).is_ok());
}

#[test]
fn what_the_simulated_stack_has_not_is_refused_in_words() {
    let cases: &[(&[&str], &str)] = &[
        (
            &["--lock", "cpu"],
            "--lock: environment.lock: the simulated stack is this program, and nothing is installed for it; leave it out (--profile sim does)",
        ),
        (
            &["--python", "/py"],
            "--python: environment.python: the simulated stack is this program, and nothing is installed for it; leave it out (--profile sim does)",
        ),
        (
            &["--model-build", "dense"],
            "--model-build: model.build: the simulated stack has no weights, found dense; use sim or sim-hybrid",
        ),
        (
            &["--model-path", "/m"],
            "--model-path: model.path: the simulated stack has no weights; use --model-build sim or sim-hybrid",
        ),
        (
            &["--discovery", "etcd"],
            "--discovery: discovery.backend: the simulated stack registers in files only; use file",
        ),
        (
            &["--sim-faults", "swap_block"],
            r#"--sim-faults: sim.faults: no fault is called "swap_block"; the nearest is swap_blocks"#,
        ),
    ];
    for (args, expected) in cases {
        let args = [&["--profile", "sim"], *args].concat();
        assert_eq!(refused(&args), *expected, "{args:?}");
    }
    assert_eq!(
        refused(&["--sim-seed", "1"]),
        "--sim-seed: sim.seed: only the simulated stack has it; use --profile sim (engine.kind sim)"
    );
    assert_eq!(
        refused(&["--model-build", "sim"]),
        "--model-build: model.build: sim is a model of the simulated stack; vllm needs dense or hybrid, or model.path"
    );
    let why = refused(&["--engine", "sim"]);
    assert!(why.contains("env/cpu.toml:20: environment.lock: "), "{why}");
    assert!(why.contains("model.build: "), "{why}");
    let why = refused(&["--profile", "sim", "--device", "cuda"]);
    assert!(
        why.contains("the simulated stack uses none but cpu"),
        "{why}"
    );
}

proptest! {
    #[test]
    fn no_override_panics(at in 0..FIELDS.len(), text in any::<String>()) {
        let field = &FIELDS[at];
        let _ = with(&[(&field.variable(), &text)], &[]);
    }

    /// Whatever configuration accepts can be planned.
    #[test]
    fn no_number_panics(at in 0..FIELDS.len(), number in any::<u64>(), bits in 0u32..64) {
        let text = (number >> bits).to_string();
        if let Ok(config) = with(&[(&FIELDS[at].variable(), &text)], &[]) {
            let plan = crate::plan::testing::canonical(&config, &crate::plan::testing::installed());
            prop_assert!(plan.is_ok());
        }
    }

    #[test]
    fn the_last_of_file_variable_and_flag_counts(
        variable in prop::option::of(201u32..1000),
        flag in prop::option::of(201u32..1000),
    ) {
        let in_variable = variable.map(|number| number.to_string());
        let vars: Vec<(&str, &str)> = in_variable.iter().map(|text| ("PHASE1_DEVICE_BLOCKS", text.as_str())).collect();
        let args: Vec<String> = flag.iter().map(|number| format!("--device-blocks={number}")).collect();
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let config = with(&vars, &args).unwrap();
        prop_assert_eq!(config.profile.engine.device_blocks, flag.or(variable).or(Some(224)));
    }
}

#[test]
fn a_run_id_cannot_lead_out_of_a_directory() {
    for (id, name) in [
        ("../../etc", "______etc"),
        ("/etc", "_etc"),
        ("..", "__"),
        ("0b4c-1f", "0b4c-1f"),
    ] {
        let env = FakeEnv::new([("NEXTEST_RUN_ID", id)]);
        assert_eq!(load(own(&[]).unwrap(), &env).unwrap().run_id, name);
    }
}

/// Clocks and durations are added to later on, which must not overflow.
#[test]
fn a_time_that_no_clock_can_count_is_refused() {
    let most = i64::MAX.to_string();
    for flag in [
        "--keep",
        "--reference-keep",
        "--bring-up",
        "--max-lifetime",
        "--deadline",
        "--operation-timeout-ms",
        "--abandon-timeout-ms",
    ] {
        let given = own(&[flag, &most]).unwrap();
        let text = load(given, &FakeEnv::new([])).unwrap_err().to_string();
        assert!(text.contains("expected an integer from 0 to"), "{text}");
    }
}

/// Whoever names the services of Guards need not ask for Guards too, and a relative directory is one
/// of where the flag was typed.
#[test]
fn services_elsewhere_mean_guards_and_an_absolute_directory() {
    let config = with(&[], &["--external-services", "run/../sidecars"]).unwrap();
    assert!(config.profile.kvcr.guard);
    let directory = config.profile.topology.external_services.unwrap();
    assert!(directory.is_absolute() && directory.ends_with("sidecars"));
    // What follows from it is no override of its own.
    assert_eq!(config.overrides.len(), 1);
    let variable = with(&[("PHASE1_EXTERNAL_SERVICES", "/run/s")], &[]).unwrap();
    assert!(variable.profile.kvcr.guard);
    let long = format!("/{}", "x".repeat(100));
    let text = refused(&["--external-services", &long]);
    assert!(text.contains("too long a path for unix sockets"), "{text}");
    assert!(text.starts_with("--external-services: "), "{text}");
}
