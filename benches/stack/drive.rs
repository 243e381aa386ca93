//! Runs the binaries as a user does, and reads what they wrote.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvcr_phase1::config::{self, OwnArgs, Paths, ProcessEnv};
use kvcr_phase1::evidence::result::ArmResult;
use kvcr_phase1::stack::protocol::StackInfo;

use crate::Problem;

const COMMAND: &str = env!("CARGO_BIN_EXE_kvcr-phase1");
/// The arm that is run on the warm stack.
const WARM: &str = "tc01::warm_device";

/// The binaries, and where they leave their evidence.
pub(crate) struct Bench {
    phase1: PathBuf,
    pub(crate) paths: Paths,
}

/// What a run from nothing wrote.
pub(crate) struct Cold {
    pub(crate) wall_ms: f64,
    pub(crate) harness_share: f64,
    pub(crate) arms: Vec<ArmResult>,
}

impl Cold {
    /// The stack that all arms ran on.
    pub(crate) fn stack(&self) -> Result<&StackInfo, Problem> {
        let stacks = self.arms.iter().filter_map(|arm| arm.stack.as_ref());
        let first = stacks.clone().next().ok_or("no arm had a stack")?;
        match stacks.clone().all(|one| one.generation == first.generation) {
            true => Ok(first),
            false => Err("the stack was started more than once".into()),
        }
    }
}

impl Bench {
    pub(crate) fn new() -> Result<Self, Problem> {
        let mut paths = config::load(OwnArgs::default(), &ProcessEnv)?.paths;
        paths.runs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("stack-bench");
        if paths.runs.exists() {
            fs::remove_dir_all(&paths.runs)?;
        }
        Ok(Self {
            phase1: phase1()?,
            paths,
        })
    }

    /// Milliseconds of `count` lists, as nextest asks for them.
    pub(crate) fn lists(&self, count: usize) -> Result<Vec<f64>, Problem> {
        let list = || {
            let args = ["--list", "--format", "terse"];
            self.timed(&self.phase1, &args, "list")
        };
        // The first one reads the binary from the disk.
        list()?;
        (0..count).map(|_| Ok(millis(list()?))).collect()
    }

    /// Stops the stack, unless somebody holds it.
    pub(crate) fn down(&self) -> Result<(), Problem> {
        self.timed(Path::new(COMMAND), &["down"], "down").map(drop)
    }

    /// All cases, on a stack that has to be brought up.
    pub(crate) fn cold(&self) -> Result<Cold, Problem> {
        self.timed(Path::new(COMMAND), &["run"], "cold")?;
        let folder = self.paths.runs.join("cold");
        let run: serde_json::Value = serde_json::from_slice(&fs::read(folder.join("run.json"))?)?;
        let number = |name: &str| {
            let value = run.get(name).and_then(serde_json::Value::as_f64);
            value.ok_or_else(|| format!("run.json has no {name}"))
        };
        let mut arms = Vec::new();
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path().join("result.json");
            if path.is_file() {
                arms.push(serde_json::from_slice(&fs::read(path)?)?);
            }
        }
        Ok(Cold {
            wall_ms: number("wall")?,
            harness_share: number("harness_share")?,
            arms,
        })
    }

    /// Milliseconds of `count` arms on the warm `stack` that were not spent waiting for the
    /// product: from spawn to exit, less every wait that the arm wrote down.
    pub(crate) fn warm(&self, count: usize, stack: &StackInfo) -> Result<Vec<f64>, Problem> {
        let arm = |number: usize| -> Result<f64, Problem> {
            let run = format!("warm-{number}");
            let wall = self.timed(&self.phase1, &["--exact", WARM], &run)?;
            let folder = self.paths.runs.join(run).join(WARM.replace("::", "__"));
            let result: ArmResult = serde_json::from_slice(&fs::read(folder.join("result.json"))?)?;
            let same = |found: &StackInfo| found.generation == stack.generation;
            if !result.stack.as_ref().is_some_and(same) {
                return Err("the stack did not stay warm".into());
            }
            let waits = result.timings;
            let waited = waits.lease
                + waits.reference_start
                + waits.requests
                + waits.reference_requests
                + waits.settle;
            Ok(millis(wall) - waited)
        };
        // The first one examines the software for this binary, and reads it from the disk.
        arm(0)?;
        (1..=count).map(arm).collect()
    }

    /// Runs a program to its end, as the run called `run`, and says how long it took.
    fn timed(&self, program: &Path, args: &[&str], run: &str) -> Result<Duration, Problem> {
        let mut command = Command::new(program);
        command
            .args(args)
            .env("PHASE1_RUNS_DIR", &self.paths.runs)
            .env("NEXTEST_RUN_ID", run)
            .stdin(Stdio::null());
        let began = Instant::now();
        let output = command.output()?;
        let took = began.elapsed();
        if output.status.success() {
            return Ok(took);
        }
        let said = [output.stdout, output.stderr].concat();
        Err(format!(
            "{} {}: {}\n{}",
            program.display(),
            args.join(" "),
            output.status,
            String::from_utf8_lossy(&said)
        )
        .into())
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

/// The test binary `phase1`, optimised as the command is. Only cargo knows its name.
fn phase1() -> Result<PathBuf, Problem> {
    let output = Command::new(env!("CARGO"))
        .args(["test", "--release", "--no-run", "--test", "phase1"])
        .args(["--message-format", "json", "--quiet"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .stderr(Stdio::inherit())
        .output()?;
    let messages = String::from_utf8(output.stdout)?;
    let executable = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter(|message| message["target"]["name"] == "phase1")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    executable.ok_or_else(|| "cargo names no executable of the test `phase1`".into())
}
