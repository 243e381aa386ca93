//! `kvcr-phase1` and what it says to mistakes, to an empty machine and to a broken one.

use std::collections::BTreeSet;
use std::fs;
use std::net::TcpListener;
use std::path::Path;

use regex::Regex;

use crate::place::Place;
use crate::promises;

promises![
    an_unknown_name_of_any_kind_names_the_nearest,
    a_profile_that_is_wrong_names_file_line_and_reason,
    a_profile_that_is_not_there_is_a_usage_error,
    a_contradiction_names_both_sides,
    a_value_out_of_range_names_its_flag,
    nothing_runs_nothing_to_stop,
    an_empty_machine_can_be_examined,
    doctor_knows_what_the_plan_needs_before_anything_is_installed,
    without_python_there_is_one_sentence_and_what_to_do,
    a_failed_run_is_as_wide_as_a_page,
    a_cache_that_cannot_be_written_is_said_by_everybody,
    a_state_directory_that_cannot_be_used_names_the_flag_that_moves_it,
    evidence_that_cannot_be_written_names_the_variable_that_moves_it,
    a_taken_port_names_its_owner,
    a_model_that_ends_early_is_named,
    a_told_insta_may_not_hide_a_difference,
    a_replay_of_nothing_is_a_usage_error,
    a_supervisor_is_not_started_by_hand,
    every_command_that_a_text_names_is_one,
    whoever_stops_reading_breaks_nothing,
];

fn an_unknown_name_of_any_kind_names_the_nearest() {
    let place = Place::with_python();
    let fails = |args: &[&str], words: &str| place.says(args).fails(2, &[words]);
    fails(
        &["run", "--device-bloks", "4"],
        "--device-bloks: no such flag; the nearest is --device-blocks",
    );
    fails(&["runn"], "'run'");
    fails(&["env", "instal"], "'install'");
    fails(&["run", "tc01::clod"], "the nearest is tc01::cold");
    fails(&["run", "all"], "no arm is called \"all\"");
    fails(&["run", "--require", "cold"], "no arm is called \"cold\"");
    fails(&["render", "--profile", "cpx"], "there are cpu");
    place
        .command(&["run"])
        .var("PHASE1_DEVICE_BLOKS", "4")
        .said()
        .fails(2, &["the nearest is PHASE1_DEVICE_BLOCKS"]);
    let file = place.file("mine.toml", "[engine]\nblock_token = 64\n");
    fails(
        &["render", "--profile", &file],
        "mine.toml:2: engine.block_token: no such field; the nearest is engine.block_tokens",
    );
}

fn a_profile_that_is_wrong_names_file_line_and_reason() {
    let place = Place::with_python();
    let wrong = place.file(
        "mine.toml",
        "title = \"x\"\n[engine]\nblock_tokens = \"64\"\n",
    );
    place.says(&["render", "--profile", &wrong]).fails(
        2,
        &[
            "mine.toml:3: engine.block_tokens: expected an integer, found the string \"64\"",
            "engine.kind: missing",
        ],
    );
    let broken = place.file("broken.toml", "title = \"x\"\n[engine\n");
    place
        .says(&["run", "--profile", &broken])
        .fails(2, &["broken.toml:2: "]);
}

fn a_profile_that_is_not_there_is_a_usage_error() {
    let place = Place::with_python();
    place.says(&["render", "--profile", "gone.toml"]).fails(
        2,
        &[
            "--profile: cannot read the profile ",
            "gone.toml: No such file",
        ],
    );
}

fn a_contradiction_names_both_sides() {
    let place = Place::with_python();
    place
        .says(&["render", "--python", "/x", "--lock", "cpu"])
        .fails(
            2,
            &["--python: ", "excludes environment.lock, which --lock sets"],
        );
    // The flag is to blame, not the line of the profile that it overrides.
    place
        .says(&["render", "--workers", "0"])
        .fails(2, &["--workers: topology.workers: must be at least 1"]);
    place
        .says(&["render", "--workers", "2", "--workers", "3"])
        .fails(2, &["--workers: given twice"]);
}

fn a_value_out_of_range_names_its_flag() {
    let place = Place::with_python();
    place
        .says(&["run", "--frontend-port", "99999"])
        .fails(2, &["--frontend-port: ", "from 0 to 65535, found 99999"]);
    place
        .says(&["run", "--frontend-port"])
        .fails(2, &["--frontend-port: needs a value"]);
}

fn nothing_runs_nothing_to_stop() {
    let place = Place::bare();
    place.says(&["status"]).succeeds(&["no stack runs"]);
    assert_eq!(
        place.says(&["status", "--json"]).json(),
        serde_json::json!([])
    );
    place.says(&["down"]).succeeds(&["nothing to stop"]);
    place
        .says(&["env", "list"])
        .succeeds(&["Nothing is installed"]);
    assert!(
        !place.path("state").exists(),
        "a question makes no directories"
    );
}

fn an_empty_machine_can_be_examined() {
    let place = Place::with_python();
    place.says(&["render"]).fails(
        101,
        &[
            "Environment: the `cpu` environment is not installed",
            "`kvcr-phase1 env install cpu`",
        ],
    );
    let table = place.says(&["doctor"]);
    assert_eq!(table.code, Some(1), "{table:?}");
    for word in [
        "NEED",
        "FOUND",
        "WHAT TO DO",
        "`kvcr-phase1 env install cpu`",
        "cannot run here",
    ] {
        assert!(table.out.contains(word), "no {word:?} in {table:#?}");
    }
    let json = place.says(&["doctor", "--json"]);
    assert_eq!(json.code, Some(1), "{json:?}");
    let json = json.json();
    assert_eq!(json["runnable"], false);
    assert_eq!(json["class"], "environment");
    let row = row(&json, "environment");
    assert_eq!(row["status"], "unmet");
    assert_eq!(row["hint"], "run `kvcr-phase1 env install cpu`");
}

fn row<'a>(report: &'a serde_json::Value, name: &str) -> &'a serde_json::Value {
    let rows = report["rows"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["name"] == name);
    row.unwrap_or_else(|| panic!("no row {name:?} in {report:#}"))
}

fn doctor_knows_what_the_plan_needs_before_anything_is_installed() {
    let place = Place::with_python();
    let report = place
        .says(&["doctor", "--json", "--primary-bytes", "1099511627776"])
        .json();
    assert_eq!(
        row(&report, "shm")["status"],
        "unmet",
        "two terabytes: {report:#}"
    );
}

fn without_python_there_is_one_sentence_and_what_to_do() {
    let place = Place::bare();
    let words = [
        "Environment: no suitable Python interpreter; expected CPython 3.12 or 3.11; found none",
        "apt-get install",
        "put one on PATH",
    ];
    place.says(&["env", "install"]).fails(1, &words);
    place.says(&["render"]).fails(101, &words);
    let run = place.says(&["run", "tc01::cold"]);
    run.fails(101, &words);
    assert!(!run.err.contains("software is ready"), "{run:#?}");
}

fn a_failed_run_is_as_wide_as_a_page() {
    let run = Place::bare().says(&["run"]);
    let width = run.out.lines().map(|line| line.chars().count()).max();
    assert!(run.out.contains("tc01::warm_tier"), "{run:#?}");
    // The evidence path is not part of the table, and may be longer.
    assert!(width <= Some(160), "{run:#?}");
}

fn a_cache_that_cannot_be_written_is_said_by_everybody() {
    let place = Place::with_python().and_uv();
    let file = place.file("file", "");
    let words = ["Environment: ", "PHASE1_CACHE_DIR=DIR"];
    let says = |args: &[&str]| place.command(args).var("PHASE1_CACHE_DIR", &file).said();
    says(&["env", "install"]).fails(1, &words);
    says(&["run", "tc01::cold"]).fails(101, &words);
    let report = says(&["doctor", "--json"]).json();
    assert_eq!(row(&report, "cache")["status"], "unmet");
}

fn a_state_directory_that_cannot_be_used_names_the_flag_that_moves_it() {
    let place = Place::with_python();
    let file = place.file("file", "");
    let says =
        |args: &[&str], state: &str| place.command(args).var("PHASE1_STATE_DIR", state).said();
    for command in ["status", "down"] {
        says(&[command], &file).fails(101, &["Environment: ", "PHASE1_STATE_DIR=DIR"]);
    }
    let report = says(&["doctor", "--json"], &file).json();
    assert_eq!(row(&report, "state")["status"], "unmet");

    let long = place.text(&"d".repeat(100));
    let report = says(&["doctor", "--json"], &long).json();
    assert_eq!(row(&report, "state")["status"], "unmet");
    let (python, model) = (place.python(), place.model());
    says(
        &[
            "run",
            "tc01::cold",
            "--python",
            &python,
            "--model-path",
            &model,
        ],
        &long,
    )
    .fails(
        101,
        &[
            "Environment: the state directory ",
            "is too long for a unix socket; expected socket paths of at most 107 bytes",
            "PHASE1_STATE_DIR=DIR",
        ],
    );
}

fn evidence_that_cannot_be_written_names_the_variable_that_moves_it() {
    let place = Place::with_python();
    let file = place.file("file", "");
    place
        .command(&["run"])
        .var("PHASE1_RUNS_DIR", &file)
        .said()
        .fails(
            101,
            &["Environment: evidence cannot be written", "PHASE1_RUNS_DIR"],
        );
}

fn a_taken_port_names_its_owner() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener
        .local_addr()
        .expect("an address")
        .port()
        .to_string();
    let place = Place::with_python();
    let report = place
        .says(&["doctor", "--json", "--frontend-port", &port])
        .json();
    let found = row(&report, "ports")["found"].to_string();
    assert!(found.contains(&port), "{found}");
    assert!(
        found.contains(&format!("pid {}", std::process::id())),
        "{found}"
    );

    let (python, model) = (place.python(), place.model());
    let args = [
        "run",
        "tc01::cold",
        "--python",
        &python,
        "--model-path",
        &model,
    ];
    place
        .says(&[args.as_slice(), &["--frontend-port", &port]].concat())
        .fails(
            101,
            &[
                "Environment: ",
                &port,
                &format!("pid {}", std::process::id()),
            ],
        );
}

fn a_model_that_ends_early_is_named() {
    let place = Place::with_python().and_uv();
    place.says(&["env", "install"]).fails(
        1,
        &[
            "Environment: the model is damaged: ",
            "model.safetensors; expected sha256 00; found sha256 ",
            "in 5 bytes; ",
        ],
    );
    // The environment itself is whole, and is not installed again.
    place.says(&["env", "list"]).succeeds(&["complete"]);
    place
        .says(&["render"])
        .fails(101, &["Environment: the model is damaged: "]);

    let (python, model) = (place.python(), place.model());
    fs::write(Path::new(&model).join("model.safetensors"), "weigh").expect("a file");
    place
        .says(&["render", "--python", &python, "--model-path", &model])
        .fails(
            101,
            &[
                "Environment: cannot use the model at ",
                "model.safetensors is cut short",
            ],
        );
}

fn a_told_insta_may_not_hide_a_difference() {
    let place = Place::with_python();
    for (name, value) in [("INSTA_FORCE_PASS", "1"), ("INSTA_UPDATE", "always")] {
        place
            .command(&["run"])
            .var(name, value)
            .said()
            .fails(3, &[name]);
        let report = place
            .command(&["doctor", "--json"])
            .var(name, value)
            .said()
            .json();
        assert_eq!(row(&report, "snapshots")["status"], "unmet");
    }
    assert!(!place.path("runs").exists(), "refused before anything ran");
}

fn a_replay_of_nothing_is_a_usage_error() {
    let place = Place::with_python();
    place.says(&["replay", "nothing"]).fails(
        2,
        &["\"nothing\" is no RUN/CASE; for example latest/tc01::cold"],
    );
    place.says(&["replay", "latest/tc01::cold"]).fails(
        2,
        &[
            "no result at ",
            "latest/tc01__cold/result.json: No such file",
        ],
    );
    let other = place.file("result.json", "{\"schema\": 1}");
    place
        .says(&["replay", &other])
        .fails(2, &["is not a result this version can read"]);
}

fn a_supervisor_is_not_started_by_hand() {
    let said = Place::bare().says(&["__supervise"]);
    said.fails(1, &["this is started by the harness, never by hand"]);
}

/// Hints and documents that tell people to type something which is refused are worse than none.
fn every_command_that_a_text_names_is_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut texts = Vec::new();
    for folder in ["src", "docs", "README.md", "CONTRIBUTING.md"] {
        collect(&root.join(folder), &mut texts);
    }
    let quoted = Regex::new(r"(?:`|-- )kvcr-phase1 ([^`\n#]+)").expect("a pattern");
    let lines: BTreeSet<&str> = texts
        .iter()
        .flat_map(|text| quoted.captures_iter(text))
        .filter_map(|found| Some(found.get(1)?.as_str().trim()))
        // What is left out, and what is code that looks for commands itself.
        .filter(|line| !line.contains(['…', '"']))
        .collect();
    assert!(lines.len() > 5, "{lines:?}");
    let place = Place::bare();
    for line in lines {
        // Help is asked for last: whatever comes before it has been understood.
        let mut args: Vec<&str> = line.split_whitespace().collect();
        args.push("--help");
        let said = place.says(&args);
        assert_eq!(said.code, Some(0), "{line}: {said:#?}");
    }
}

fn collect(path: &Path, texts: &mut Vec<String>) {
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a folder").flatten() {
            collect(&entry.path(), texts);
        }
    } else if path
        .extension()
        .is_some_and(|ending| ending == "rs" || ending == "md")
    {
        texts.push(fs::read_to_string(path).expect("a text"));
    }
}

fn whoever_stops_reading_breaks_nothing() {
    let place = Place::with_python();
    let commands: &[&[&str]] = &[
        &["status"],
        &["down"],
        &["env", "list"],
        &["sim", "faults"],
        &["render", "--profile", "sim"],
        &["doctor", "--profile", "sim"],
    ];
    for command in commands {
        let read = place.says(command).code;
        let unread = place.command(command).unread().code();
        assert_eq!(unread, read, "{command:?}");
    }
}
