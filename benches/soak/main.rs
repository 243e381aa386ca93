//! The same cases again and again on the simulated stack: no flake, nothing left, memory flat.
//!
//! ```sh
//! cargo bench --bench soak                                # 200 runs, every 20th on a new stack
//! cargo bench --bench soak -- --runs 20 --burn            # while all cores are busy
//! cargo bench --bench soak -- --runs 3 --stop 60          # each run is stopped for a minute
//! ```
//!
//! Proves the harness, never the product. Ends at the first run that does not pass, and keeps its
//! evidence. [`watch`] looks at memory and at what is left.

mod watch;

use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::Parser;
use rustix::process::{Pid, Signal, kill_process};

use watch::{Left, supervisor_kib};

/// Why it ended.
type Problem = Box<dyn std::error::Error>;

/// Runs the cases again and again.
#[derive(Debug, Parser)]
struct Args {
    /// How often.
    #[arg(long, default_value_t = 200)]
    runs: u32,
    /// Every so many runs the stack is taken down first.
    #[arg(long, default_value_t = 20)]
    cold_every: u32,
    /// Keep every core busy meanwhile.
    #[arg(long)]
    burn: bool,
    /// Stop each run's process for so many seconds in its middle.
    #[arg(long, default_value_t = 0)]
    stop: u64,
    /// A library to preload into the program alone, with its settings: `LIB NAME=VALUE…`.
    #[arg(long, num_args = 1..)]
    preload: Vec<String>,
    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    let args = Args::parse();
    if !args.bench {
        // `cargo test --all-targets` runs benches too, to see whether they work.
        println!("takes minutes: run it with `cargo bench --bench soak`");
        return ExitCode::SUCCESS;
    }
    match soak(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// Processes that do nothing but count, one a core.
struct Burners(Vec<Child>);

impl Burners {
    fn start() -> Result<Self, Problem> {
        let cores = std::thread::available_parallelism()?.get();
        let burner = || {
            Command::new("/bin/sh")
                .args(["-c", "while :; do :; done"])
                .spawn()
        };
        Ok(Self(
            (0..cores).map(|_| burner()).collect::<Result<_, _>>()?,
        ))
    }
}

impl Drop for Burners {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn soak(args: &Args) -> Result<(), Problem> {
    let files = tempfile::tempdir()?;
    let before = Left::now(files.path())?;
    let _burners = args.burn.then(Burners::start).transpose()?;
    let (mut longest, mut memory) = (Duration::ZERO, Vec::new());
    let began = Instant::now();
    for run in 0..args.runs {
        if run % args.cold_every == 0 {
            phase1(files.path(), args, &["down", "--force"])?.wait()?;
            memory.push(Vec::new());
        }
        let one = Instant::now();
        let mut child = phase1(files.path(), args, &["run"])?;
        if args.stop > 0 {
            freeze(&child, Duration::from_secs(args.stop))?;
        }
        let status = child.wait()?;
        if !status.success() {
            let kept = files.keep();
            return Err(format!("run {run} ended with {status}; see {}", kept.display()).into());
        }
        longest = longest.max(one.elapsed());
        if let (Some(kib), Some(of_stack)) =
            (supervisor_kib(&files.path().join("s"))?, memory.last_mut())
        {
            of_stack.push(kib);
        }
        std::fs::remove_dir_all(files.path().join("runs"))?;
    }
    phase1(files.path(), args, &["down"])?.wait()?;
    let left = Left::now(files.path())?.beyond(&before);
    println!(
        "{} runs in {:.0} s, the longest {:.1} s; supervisor {}; left: {}",
        args.runs,
        began.elapsed().as_secs_f64(),
        longest.as_secs_f64(),
        watch::growth(&memory),
        if left.is_empty() {
            "nothing".to_owned()
        } else {
            left.join(", ")
        }
    );
    if left.is_empty() {
        Ok(())
    } else {
        Err("something is left".into())
    }
}

/// Stops the process in its middle, as a debugger, a laptop's lid or a stalled host would.
#[expect(
    clippy::disallowed_methods,
    reason = "how long a process is stopped is what is tried here, not a state to wait for"
)]
fn freeze(child: &Child, time: Duration) -> Result<(), Problem> {
    std::thread::sleep(Duration::from_millis(900));
    let pid = Pid::from_child(child);
    kill_process(pid, Signal::STOP)?;
    std::thread::sleep(time);
    kill_process(pid, Signal::CONT)?;
    Ok(())
}

/// The program on directories of ours.
fn phase1(files: &std::path::Path, args: &Args, words: &[&str]) -> Result<Child, Problem> {
    let path = |name: &str| -> PathBuf { files.join(name) };
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvcr-phase1"));
    command
        .args(words)
        .env("PHASE1_PROFILE", "sim")
        .env("PHASE1_STATE_DIR", path("s"))
        .env("PHASE1_RUNS_DIR", path("runs"))
        .env("PHASE1_CACHE_DIR", path("cache"))
        .env("TMPDIR", files)
        .stdout(Stdio::null());
    if let Some((library, settings)) = args.preload.split_first() {
        command.env("LD_PRELOAD", library);
        command.envs(
            settings
                .iter()
                .filter_map(|setting| setting.split_once('=')),
        );
    }
    Ok(command.spawn()?)
}
