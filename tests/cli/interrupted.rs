//! Ctrl-C, and a stack that cannot come up. Engines are shell scripts; the supervisor is real.

use std::fs;

use regex::Regex;

use crate::place::{Place, eventually, read_json};
use crate::promises;

promises![
    an_interrupted_install_is_never_taken_for_a_good_one,
    an_interrupted_run_keeps_its_evidence_and_leaves_no_process,
    the_second_ctrl_c_leaves_at_once_and_the_stack_follows,
    a_bring_up_that_cannot_work_fails_every_arm_at_once,
];

fn an_interrupted_install_is_never_taken_for_a_good_one() {
    let place = Place::with_python();
    let reached = place.path("reached");
    place.script(
        "uv",
        &format!(
            "case \"$1\" in --version) echo 'uv 0.9.0' ;; venv) : > {} && exec /bin/sleep 600 ;; esac",
            reached.display()
        ),
    );
    let install = place.command(&["env", "install"]).start();
    eventually("uv works", || reached.exists().then_some(()));
    install.ctrl_c();
    let said = install.end();
    assert_ne!(said.code, Some(0), "{said:?}");
    let refused = place.says(&["render"]);
    refused.fails(
        101,
        &[
            "Environment: ",
            "is not installed; ",
            "an unfinished install",
        ],
    );
    place.says(&["env", "list"]).succeeds(&["interrupted"]);
}

fn an_interrupted_run_keeps_its_evidence_and_leaves_no_process() {
    let place = Place::with_engine("exec /bin/sleep 600");
    let (python, model) = (place.python(), place.model());
    let run = place
        .command(&["run", "tc01", "--python", &python, "--model-path", &model])
        .start();
    let started = Regex::new(r"(\w+): started as (\d+)").expect("a pattern");
    let pids: Vec<String> = eventually("every process of the stack is started", || {
        let said = run.so_far();
        let found = started.captures_iter(&said);
        let pids: Vec<String> = found.map(|found| found[2].to_owned()).collect();
        said.contains("worker1: started").then_some(pids)
    });
    run.ctrl_c();
    run.end().fails(
        130,
        &["tc01::cold: Inconclusive: interrupted by Ctrl-C before a verdict"],
    );
    let result = read_json(&place.path("runs/latest/tc01__cold/result.json"));
    assert_eq!(result["failure"]["class"], "inconclusive");
    assert!(
        !place.path("runs/latest/tc01__warm_tier").exists(),
        "nothing begins after it"
    );
    place.says(&["status"]).succeeds(&["no stack runs"]);
    for pid in pids {
        let command = fs::read_to_string(format!("/proc/{pid}/cmdline"));
        let alive = command.is_ok_and(|text| text.contains("sleep"));
        assert!(!alive, "{pid} survived");
    }
}

fn a_bring_up_that_cannot_work_fails_every_arm_at_once() {
    let place = Place::with_python();
    let (python, model) = (place.python(), place.model());
    let said = place.says(&["run", "--python", &python, "--model-path", &model]);
    said.fails(101, &["No module named dynamo"]);
    assert!(!said.out.contains("stays warm"), "{said:#?}");
    let run = read_json(&place.path("runs/latest/run.json"));
    let arms = run["arms"].as_array().expect("arms");
    assert!(arms.len() > 1);
    for arm in arms {
        assert_eq!(arm["outcome"], arms[0]["outcome"]);
        assert_eq!(arm["reason"], arms[0]["reason"]);
    }
    let later: f64 = arms[1..]
        .iter()
        .filter_map(|arm| arm["wall"].as_f64())
        .sum();
    assert!(later < 10_000.0, "{later} ms after the first failure");
    let status = place.says(&["status"]);
    status.succeeds(&["failed", "No module named dynamo"]);
    place.says(&["down"]).succeeds(&["stopped"]);
}

fn the_second_ctrl_c_leaves_at_once_and_the_stack_follows() {
    // Engines that do not go when they are asked, so that the first Ctrl-C has to wait; they go
    // when the test lets them.
    let place = Place::with_engine(
        "trap '' INT TERM; until [ -e \"${0%/bin/*}/go\" ]; do /bin/sleep 0.05; done",
    );
    let (python, model) = (place.python(), place.model());
    let run = place
        .command(&["run", "tc01", "--python", &python, "--model-path", &model])
        .start();
    eventually("the stack starts", || {
        run.so_far().contains("worker1: started").then_some(())
    });
    run.ctrl_c();
    eventually("it is heard", || {
        run.so_far().contains("interrupted: ").then_some(())
    });
    run.ctrl_c();
    run.end().fails(130, &["interrupted again: leaving now"]);
    place.file("go", "");
    eventually("the stack is gone", || {
        let status = place.says(&["status"]);
        status.out.contains("no stack runs").then_some(())
    });
}
