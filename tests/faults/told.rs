//! Runs the program on a lying stack as a user would, and reads what it left.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use kvcr_phase1::evidence::result::ArmResult;
use kvcr_phase1::verdict::Verdict;

use crate::table::Row;

/// What a run said and left behind.
pub(crate) struct Told {
    /// By arm.
    pub(crate) verdicts: BTreeMap<String, Verdict>,
    /// Both streams.
    pub(crate) printed: String,
    /// The supervisor's log.
    pub(crate) log: String,
    /// What was left although everything was stopped.
    pub(crate) left: Option<String>,
}

/// A user's directories of one test. Nothing that was started in them survives the value.
pub(crate) struct Machine(tempfile::TempDir);

impl Machine {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// The program with these arguments, in an environment of its own.
    pub(crate) fn phase1(&self, args: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_kvcr-phase1"))
            .args(args)
            .env_clear()
            .env("HOME", self.0.path())
            .env("PHASE1_PROFILE", "sim")
            .env("PHASE1_STATE_DIR", self.path("s"))
            .env("PHASE1_RUNS_DIR", self.path("runs"))
            .env("PHASE1_CACHE_DIR", self.path("cache"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .output()
            .expect("the program runs")
    }

    /// Results of the latest run.
    pub(crate) fn verdicts(&self) -> BTreeMap<String, Verdict> {
        let arms = fs::read_dir(self.path("runs/latest")).into_iter().flatten();
        arms.filter_map(|arm| {
            let text = fs::read(arm.ok()?.path().join("result.json")).ok()?;
            let result: ArmResult = serde_json::from_slice(&text).expect("a result");
            Some((result.name, result.verdict))
        })
        .collect()
    }

    fn log(&self) -> String {
        let stacks = fs::read_dir(self.path("s")).into_iter().flatten();
        stacks
            .filter_map(|stack| fs::read_to_string(stack.ok()?.path().join("supervisor.log")).ok())
            .collect()
    }

    /// Stops everything, and says what is left all the same.
    fn stop(&self) -> Option<String> {
        let down = printed(&self.phase1(&["down", "--force"]));
        let status = printed(&self.phase1(&["status"]));
        if !status.contains("no stack runs, and none left anything behind") {
            return Some(format!("{down}{status}"));
        }
        still_running(&self.path("s"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.phase1(&["down", "--force"]);
    }
}

/// Processes that carry the state directory in their environment, whatever became of their
/// parents.
fn still_running(state: &Path) -> Option<String> {
    let needle = state.to_string_lossy().into_owned();
    let processes = procfs::process::all_processes().expect("processes");
    let ours: Vec<i32> = processes
        .filter_map(Result::ok)
        .filter(|process| {
            process
                .environ()
                .is_ok_and(|environ| environ.values().any(|v| v.to_string_lossy() == needle))
        })
        .map(|process| process.pid)
        .collect();
    (!ours.is_empty()).then(|| format!("processes are left: {ours:?}"))
}

pub(crate) fn printed(output: &Output) -> String {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{out}{err}")
}

/// All cases on a stack that tells this row's lie.
pub(crate) fn run(row: &Row) -> Told {
    let machine = Machine::new();
    let lie = format!("--sim-faults={}", row.switches);
    // One round of a measurement says as much as seven.
    let mut args = vec!["run", "--repeats=1", "--warm-up=0"];
    for word in row.arms().chain(row.flags.iter().copied()) {
        args.push(word);
    }
    if row.live {
        // The reference answers while it can; what the lie meets afterwards are the workers.
        let honest = machine.phase1(&args);
        assert!(honest.status.success(), "{}", printed(&honest));
        let told = machine.phase1(&["sim", "tell", row.switches]);
        assert!(told.status.success(), "{}", printed(&told));
    } else {
        args.push(&lie);
    }
    if row.again {
        machine.phase1(&args);
    }
    let output = machine.phase1(&args);
    let verdicts = machine.verdicts();
    let left = machine.stop();
    Told {
        verdicts,
        printed: printed(&output),
        log: machine.log(),
        left,
    }
}
