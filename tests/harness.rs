//! The contract of `tests/phase1.rs`, tried as cargo, nextest and people use it, on the simulated
//! stack: what is listed runs, by the same name, in any process, and ends as it says.
//!
//! This binary is also `phase1` when it is called that, so that its very arguments are tried.
//! What a gate, a wrong flag or a broken machine does without any stack is `tests/cli`'s.

use std::collections::BTreeSet;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::Duration;

use kvcr_phase1::cases::PHASE1;
use kvcr_phase1::evidence::result::ArmResult;
use kvcr_phase1::failure::Class;
use kvcr_phase1::gate::Wants;
use kvcr_phase1::stack::wait::{Look, until_blocking};
use kvcr_phase1::verdict::Outcome;
use libtest_mimic::{Arguments, Trial};
use rustix::process::{Pid, Signal, kill_process};

/// What this binary has to be called to be the test binary.
const NAME: &str = "phase1";
/// Generous: it only bounds a test that has gone wrong.
const LONG: Duration = Duration::from_secs(120);

macro_rules! promises {
    ($($name:ident),* $(,)?) => {
        const ALL: &[(&str, fn())] = &[$((stringify!($name), $name)),*];
    };
}

promises![
    names_are_those_that_histories_key_on,
    a_fresh_checkout_runs_the_simulated_stack_and_says_so,
    whoever_requires_the_product_gets_no_simulated_stack,
    every_listed_name_selects_one_trial,
    exit_codes_say_how_it_ended,
    processes_share_one_stack,
    nextest_and_the_test_binary_agree,
    an_archive_runs_from_another_directory,
    a_timeout_of_nextest_leaves_evidence,
    sigterm_leaves_evidence_and_the_stack,
    a_killed_run_leaves_a_stack_that_works,
    nothing_holds_the_pipe_of_a_run,
];

fn main() -> ExitCode {
    let called = std::env::args_os().next().map(PathBuf::from);
    // A process of the simulated stack may go by another name: an engine core does.
    let simulated = std::env::args_os().nth(1).is_some_and(|arg| arg == "__sim");
    if simulated || called.is_some_and(|path| path.file_name().is_some_and(|name| name == NAME)) {
        return kvcr_phase1::harness::main(PHASE1);
    }
    let trials = ALL.iter().map(|(name, test)| {
        let nextest = name.contains("nextest") || name.contains("archive");
        let missing = nextest && which::which("cargo-nextest").is_err();
        Trial::test(*name, move || {
            test();
            Ok(())
        })
        .with_ignored_flag(missing)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}

/// A user's machine: nothing installed, directories of its own. Nothing that was started in it
/// survives the value.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        let machine = Self(tempfile::tempdir().expect("a directory"));
        let me = std::env::current_exe().expect("this binary");
        // A link where the file system allows it: a test binary is large.
        let copy = machine.path(NAME);
        fs::hard_link(&me, &copy)
            .or_else(|_| fs::copy(&me, &copy).map(drop))
            .expect("a test binary");
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// A program in an environment of this machine alone.
    fn command(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(args)
            .env_clear()
            .env("HOME", self.0.path())
            .env("PHASE1_STATE_DIR", self.path("s"))
            .env("PHASE1_RUNS_DIR", self.path("runs"))
            .env("PHASE1_CACHE_DIR", self.path("cache"))
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        command
    }

    fn phase1(&self, args: &[&str]) -> Output {
        self.command(&self.path(NAME), args)
            .output()
            .expect("the test binary runs")
    }

    fn start(&self, args: &[&str]) -> Child {
        self.command(&self.path(NAME), args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the test binary runs")
    }

    fn program(&self, args: &[&str]) -> Output {
        self.command(Path::new(env!("CARGO_BIN_EXE_kvcr-phase1")), args)
            .output()
            .expect("the program runs")
    }

    /// nextest as CI uses it; cargo needs the user's own environment.
    fn nextest(&self, args: &[&str]) -> Command {
        let mut command = Command::new("cargo");
        command
            .arg("nextest")
            .args(args)
            .env("PHASE1_STATE_DIR", self.path("s"))
            .env("PHASE1_RUNS_DIR", self.path("runs"))
            .env("PHASE1_CACHE_DIR", self.path("cache"))
            // What a nextest or cargo around this test says is not meant for the one within.
            .env_remove("NEXTEST")
            .env_remove("NEXTEST_RUN_ID")
            .env_remove("NEXTEST_ATTEMPT")
            .env_remove("NEXTEST_PROFILE")
            .env_remove("PHASE1_PROFILE")
            .env_remove("PHASE1_REQUIRE")
            .env("CARGO_TERM_COLOR", "never")
            .current_dir(env!("CARGO_MANIFEST_DIR"));
        command
    }

    fn result(&self, arm: &str) -> Option<ArmResult> {
        let file = self
            .path("runs/latest")
            .join(arm.replace("::", "__"))
            .join("result.json");
        serde_json::from_slice(&fs::read(file).ok()?).ok()
    }

    fn status(&self) -> serde_json::Value {
        let output = self.program(&["status", "--json"]);
        serde_json::from_slice(&output.stdout).expect("JSON")
    }

    /// Until somebody holds the stack.
    fn until_held(&self) {
        eventually("a lease", || self.status().pointer("/0/leases/0").is_some());
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.program(&["down", "--force"]);
    }
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    until_blocking::<(), String>(LONG, Duration::from_millis(20), || match condition() {
        true => Look::Ready(()),
        false => Look::NotYet(what.to_owned()),
    })
    .unwrap_or_else(|gave| panic!("{gave}"));
}

fn text(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

/// Arms that the simulated stack of these tests can tell: it has a dense model and no Guards.
fn told() -> Vec<&'static str> {
    let here = [
        Wants::Any,
        Wants::Hints,
        Wants::DenseHints,
        Wants::StaleHints,
    ];
    let all = PHASE1.iter().flat_map(|case| case.arms);
    all.filter(|arm| here.contains(&arm.wants))
        .map(|arm| arm.name)
        .collect()
}

fn arms() -> Vec<&'static str> {
    PHASE1
        .iter()
        .flat_map(|case| case.arms)
        .map(|arm| arm.name)
        .collect()
}

/// A story that outlasts any test, so that it can be interrupted.
const SLOW: &str = "--sim-decode-token-us=3000000";

fn names_are_those_that_histories_key_on() {
    // Renaming an arm cuts its history, its pins and its filters: do it on purpose.
    let golden = include_str!("names.txt");
    let machine = Machine::new();
    let listed = machine.phase1(&["--list", "--format", "terse"]);
    assert_eq!(String::from_utf8_lossy(&listed.stdout), golden);
}

fn a_fresh_checkout_runs_the_simulated_stack_and_says_so() {
    let machine = Machine::new();
    let output = machine.phase1(&["tc01"]);
    let said = text(&output);
    assert!(output.status.success(), "{said}");
    let line = said
        .lines()
        .find(|line| line.contains("simulated stack"))
        .expect("a line that says so");
    assert!(line.contains("kvcr-phase1 run --profile cpu"), "{line}");
    for line in said.lines().filter(|line| line.starts_with("test ")) {
        assert!(
            line.contains("[sim]") || line.starts_with("test result"),
            "{line}"
        );
    }
    let result = machine.result("tc01::cold").expect("a result");
    assert_eq!(result.profile_name, "sim");
}

fn whoever_requires_the_product_gets_no_simulated_stack() {
    let machine = Machine::new();
    let output = machine.phase1(&["tc01::cold", "--require=all"]);
    assert_eq!(output.status.code(), Some(101), "{}", text(&output));
    assert!(!text(&output).contains("simulated"), "{}", text(&output));
}

fn every_listed_name_selects_one_trial() {
    let machine = Machine::new();
    for arm in arms() {
        let listed = machine.phase1(&["--list", "--format", "terse", "--exact", arm]);
        let names = String::from_utf8_lossy(&listed.stdout).into_owned();
        assert_eq!(names, format!("{arm}: test\n"));
    }
}

fn exit_codes_say_how_it_ended() {
    let machine = Machine::new();
    let code = |args: &[&str]| machine.phase1(args).status.code();
    assert_eq!(code(&["--exact", "tc01::warm_device"]), Some(0));
    let lie = "--sim-faults=corrupt_device_block@worker0";
    let sim = "--profile=sim";
    assert_eq!(code(&["--exact", "tc01::warm_device", sim, lie]), Some(101));
    assert_eq!(code(&["--exact", "tc01::warm"]), Some(2));
    assert_eq!(
        code(&["--exact", "tc01::cold", "--skip", "tc01::cold"]),
        Some(3)
    );
}

fn processes_share_one_stack() {
    let machine = Machine::new();
    let mut all: Vec<Child> = told()
        .iter()
        .map(|arm| machine.start(&["--exact", arm]))
        .collect();
    for child in &mut all {
        assert!(child.wait().expect("it ends").success());
    }
    let status = machine.status();
    assert_eq!(status.as_array().map(Vec::len), Some(1), "{status}");
    assert_eq!(status[0]["generation"], 1, "{status}");
}

/// Names that nextest says it ran, with how they ended.
fn ran(output: &Output) -> BTreeSet<(String, String)> {
    text(output)
        .lines()
        .filter_map(|line| {
            let (head, name) = line.trim().rsplit_once(' ')?;
            let ended = head.split_whitespace().next()?;
            let known = ["PASS", "FAIL", "TERMINATING", "TIMEOUT", "SIGTERM"].contains(&ended);
            known.then(|| (name.to_owned(), ended.to_owned()))
        })
        .collect()
}

fn passed() -> BTreeSet<(String, String)> {
    let pass = |arm: &str| (arm.to_owned(), "PASS".to_owned());
    told().into_iter().map(pass).collect()
}

fn nextest_and_the_test_binary_agree() {
    let machine = Machine::new();
    let output = machine
        .nextest(&["run", "--test", "phase1"])
        .output()
        .expect("nextest runs");
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(ran(&output), passed(), "{}", text(&output));
    let direct = machine.phase1(&[]);
    assert!(direct.status.success(), "{}", text(&direct));
    let of_nextest: u64 = machine.status()[0]["generation"]
        .as_u64()
        .expect("a number");
    assert_eq!(of_nextest, 1, "one stack for all of nextest's processes");
}

fn an_archive_runs_from_another_directory() {
    let machine = Machine::new();
    let archive = machine.path("tests.tar.zst");
    let file = archive.to_str().expect("UTF-8");
    let made = machine
        .nextest(&["archive", "--test", "phase1", "--archive-file", file])
        .output()
        .expect("nextest runs");
    assert!(made.status.success(), "{}", text(&made));
    let elsewhere = machine.path("elsewhere");
    fs::create_dir(&elsewhere).expect("a directory");
    let root = env!("CARGO_MANIFEST_DIR");
    let output = machine
        .nextest(&["run", "--archive-file", file, "--workspace-remap", root])
        .current_dir(&elsewhere)
        .output()
        .expect("nextest runs");
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(ran(&output), passed(), "{}", text(&output));
}

fn a_timeout_of_nextest_leaves_evidence() {
    let machine = Machine::new();
    let config = machine.path("nextest.toml");
    fs::write(
        &config,
        "[profile.default]\nslow-timeout = { period = \"3s\", terminate-after = 1, grace-period = \"30s\" }\n",
    )
    .expect("a file");
    let output = machine
        .nextest(&["run", "--test", "phase1", "--config-file"])
        .arg(&config)
        .args(["-E", "test(=tc01::warm_device)"])
        .env("PHASE1_PROFILE", "sim")
        .env("PHASE1_SIM_DECODE_TOKEN_US", "3000000")
        .output()
        .expect("nextest runs");
    assert!(!output.status.success(), "{}", text(&output));
    let result = machine.result("tc01::warm_device").expect("evidence");
    assert_eq!(result.verdict.outcome, Outcome::Fail(Class::Inconclusive));
    let why = result.failure.expect("a reason").to_string();
    assert!(why.contains("SIGTERM"), "{why}");
}

fn sigterm_leaves_evidence_and_the_stack() {
    let machine = Machine::new();
    let mut child = machine.start(&["--exact", "tc01::warm_device", "--profile=sim", SLOW]);
    machine.until_held();
    kill_process(Pid::from_child(&child), Signal::TERM).expect("it runs");
    let status = child.wait().expect("it ends");
    assert_eq!(status.code(), Some(101));
    let result = machine.result("tc01::warm_device").expect("evidence");
    let why = result.failure.expect("a reason").to_string();
    assert!(why.contains("SIGTERM"), "{why}");
    assert_eq!(machine.status()[0]["state"], "ready");
}

fn a_killed_run_leaves_a_stack_that_works() {
    let machine = Machine::new();
    let slow = "--sim-decode-token-us=40000";
    let mut child = machine.start(&["--exact", "tc01::warm_device", "--profile=sim", slow]);
    machine.until_held();
    child.kill().expect("it runs");
    child.wait().expect("it ends");
    let output = machine.phase1(&["--exact", "tc01::warm_device", "--profile=sim", slow]);
    assert!(output.status.success(), "{}", text(&output));
    assert_eq!(machine.status()[0]["generation"], 1);
}

fn nothing_holds_the_pipe_of_a_run() {
    let machine = Machine::new();
    let mut child = machine.start(&["--exact", "tc01::warm_device"]);
    let mut stdout = child.stdout.take().expect("a pipe");
    assert!(child.wait().expect("it ends").success());
    // The stack is warm and lives on; were it to hold our pipe, this would not end.
    stdout.read_to_end(&mut Vec::new()).expect("the end");
    assert_eq!(machine.status()[0]["state"], "ready");
}
