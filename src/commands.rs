//! The commands of `kvcr-phase1`, one function each. Parsing is `main.rs`'s; what the commands
//! stand on is the rest of the crate.

mod services;
mod strike;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use crate::cases::PHASE1;
use crate::config::{Config, UsageError};
use crate::environment::{self, progress};
use crate::evidence::result::ArmResult;
use crate::failure::Failure;
use crate::gate;
use crate::harness::interrupt::{Cause, Interrupt};
use crate::harness::{FAILED, INTERRUPTED, run, software};
use crate::plan;
use crate::record;
use crate::sim::NOTICE;
use crate::stack::admin;
use crate::stack::lease::{self, Lease, LeaseRequest};
use crate::stack::protocol::{Mode, StackInfo, Status};

pub use self::services::{ServicesArgs, services};
pub use self::strike::{StrikeArgs, strike};

/// Seconds that `up --detach` keeps an unused stack.
const DETACHED_KEEP: u64 = 3600;

/// Brings the stack up and holds it until Ctrl-C, or leaves it warm for an hour.
#[must_use]
pub fn up(mut config: Config, detach: bool) -> ExitCode {
    if detach {
        config.profile.stack.keep_seconds = config.profile.stack.keep_seconds.max(DETACHED_KEEP);
    }
    match bring_up(&config, detach) {
        Ok(()) => ExitCode::SUCCESS,
        Err(ended) => ended.exit(),
    }
}

/// Why a command that wants a stack ended without one.
enum Ended {
    Failed(Failure),
    /// By a signal, which is nobody's fault.
    By(Cause),
}

impl From<Failure> for Ended {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl Ended {
    fn exit(self) -> ExitCode {
        match self {
            Self::Failed(failure) => failed(&failure),
            Self::By(Cause::Interrupt) => {
                errln!("interrupted; what was starting is stopped");
                ExitCode::from(INTERRUPTED)
            }
            Self::By(Cause::Terminate) => {
                errln!("terminated while the stack was starting; `kvcr-phase1 down` stops it");
                ExitCode::from(FAILED)
            }
        }
    }
}

/// A leased stack, and what a command that holds one needs.
struct Held {
    prepared: software::Prepared,
    interrupt: Interrupt,
    lease: Lease,
}

/// Brings the stack up for the command `case`.
fn hold(config: &Config, case: &str, mode: Mode) -> Result<Held, Ended> {
    let mut reporter = progress::reporter_of(config.profile.engine.kind.is_simulated());
    let installed = environment::ensure(&config.profile, &config.paths.cache, reporter.as_mut())?;
    let prepared = software::prepare(config, installed)?;
    let spec = &prepared.spec;
    let (state, fingerprint) = (spec.state_dir.clone(), spec.fingerprint.clone());
    let interrupt = Interrupt::install(move || admin::ask_down(&state, &fingerprint));
    let request = LeaseRequest {
        run_id: config.run_id.clone(),
        case: case.into(),
        mode,
    };
    let mut report = |progress: lease::Progress| reporter.step(&progress.to_string());
    let lease = match lease::acquire(spec, &request, &mut report, interrupt.flag()) {
        Ok(lease) => lease,
        Err(failure) => {
            let Some(cause) = interrupt.cause() else {
                return Err(failure.into());
            };
            drop(reporter);
            if cause == Cause::Interrupt {
                let _ = admin::down(&spec.state_dir, Some(&spec.fingerprint), false);
            }
            return Err(Ended::By(cause));
        }
    };
    Ok(Held {
        prepared,
        interrupt,
        lease,
    })
}

/// Writes down the shapes of everything that the stack shows.
#[must_use]
pub fn record(config: &Config, directory: &Path) -> ExitCode {
    match write_down(config, directory) {
        Ok(path) => {
            outln!("{}", path.display());
            ExitCode::SUCCESS
        }
        Err(ended) => ended.exit(),
    }
}

fn write_down(config: &Config, directory: &Path) -> Result<PathBuf, Ended> {
    let held = hold(config, "record", Mode::Exclusive)?;
    if !held.lease.stack().started_for_this_lease {
        return Err(
            Failure::environment("a recording begins with counters that nobody has moved")
                .expected("a stack that starts for it")
                .found("one that was in use before")
                .hint("stop it (`kvcr-phase1 down`), then try again")
                .into(),
        );
    }
    let recording = record::record(
        config,
        held.prepared.installed(),
        held.lease.stack(),
        directory,
    );
    runtime()?.block_on(async {
        tokio::select! {
            done = recording => done.map_err(Ended::Failed),
            cause = held.interrupt.seen() => Err(Ended::By(cause)),
        }
    })
}

fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::environment("no runtime").found(error))
}

fn bring_up(config: &Config, detach: bool) -> Result<(), Ended> {
    let Held {
        prepared,
        interrupt,
        lease,
    } = hold(config, "up", Mode::Shared)?;
    let spec = &prepared.spec;
    outln!("{}", describe(lease.stack()));
    if spec.simulated {
        outln!("{NOTICE}");
    }
    if detach {
        outln!(
            "warm for {} s without use; `kvcr-phase1 down` stops it now",
            spec.keep_seconds
        );
        return Ok(());
    }
    outln!("held until Ctrl-C");
    let gone = runtime()?.block_on(async {
        let mut look = tokio::time::interval(std::time::Duration::from_millis(200));
        loop {
            tokio::select! {
                _ = interrupt.seen() => return None,
                _ = look.tick() => if let Some(failure) = lease.broken() { return Some(failure) },
            }
        }
    });
    drop(lease);
    if let Some(failure) = gone {
        return Err(failure.into());
    }
    for downed in admin::down(&spec.state_dir, Some(&spec.fingerprint), false)? {
        outln!("{downed}");
    }
    Ok(())
}

fn describe(stack: &StackInfo) -> String {
    let mut text = format!(
        "generation {} of {} is ready after {:.1} s\n  front door  {}\n  logs        {}",
        stack.generation,
        stack.fingerprint,
        stack.bring_up_ms as f64 / 1000.0,
        stack.plan.frontend_url,
        stack.logs.display(),
    );
    for worker in &stack.workers {
        text += &format!(
            "\n  {:<11} instance {}, {}",
            worker.process, worker.instance_id, worker.metrics_url
        );
    }
    for process in &stack.processes {
        text += &format!("\n  {:<11} pid {}", process.name, process.pid);
    }
    text
}

/// Says what runs and who holds it.
#[must_use]
pub fn status(config: &Config, json: bool) -> ExitCode {
    let stacks = match admin::status(&config.paths.state) {
        Ok(stacks) => stacks,
        Err(failure) => return failed(&failure),
    };
    if json {
        match serde_json::to_string_pretty(&stacks) {
            Ok(text) => outln!("{text}"),
            Err(error) => return failed(&Failure::environment("no JSON").found(error)),
        }
    } else if stacks.is_empty() {
        outln!("no stack runs, and none left anything behind");
    } else {
        for stack in &stacks {
            outln!("{}", describe_status(stack));
        }
    }
    ExitCode::SUCCESS
}

fn describe_status(status: &Status) -> String {
    let mut text = format!(
        "{} (profile {}): {}, generation {}, supervisor {}",
        status.fingerprint, status.profile, status.state, status.generation, status.supervisor_pid
    );
    if status.simulated {
        text += &format!("\n  {NOTICE}");
    }
    if let Some(url) = &status.frontend_url {
        text += &format!("\n  front door  {url}");
    }
    for lease in &status.leases {
        text += &format!("\n  held by     {lease}");
    }
    for lease in &status.queued {
        text += &format!("\n  waiting     {lease}");
    }
    if let Some(seconds) = status.idle_stop_in_seconds {
        text += &format!("\n  stops in    {seconds} s if nobody uses it");
    }
    if let Some(failure) = &status.failure {
        text += &format!("\n  {failure}");
    }
    for process in &status.processes {
        text += &format!(
            "\n  {:<11} pid {}, {}",
            process.name,
            process.pid,
            process.log.display()
        );
    }
    text
}

/// Stops every stack of this state directory and removes what dead ones left behind.
#[must_use]
pub fn down(config: &Config, force: bool) -> ExitCode {
    match admin::down(&config.paths.state, None, force) {
        Ok(downed) if downed.iter().all(admin::Downed::is_nothing) => {
            outln!("nothing to stop");
            ExitCode::SUCCESS
        }
        Ok(downed) => {
            let all = downed.iter().all(admin::Downed::is_down);
            for one in downed.iter().filter(|one| !one.is_nothing()) {
                outln!("{one}");
            }
            if all {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(failure) => failed(&failure),
    }
}

/// Prints what would be started, with placeholder ports and directories.
#[must_use]
pub fn render(config: &Config, json: bool) -> ExitCode {
    let plan = environment::find(&config.profile, &config.paths.cache).and_then(|installed| {
        crate::engine::vllm::VllmBlueprint::new(config.clone(), installed).canonical_plan()
    });
    match plan {
        Ok(plan) if json => match serde_json::to_string_pretty(&plan) {
            Ok(text) => outln!("{text}"),
            Err(error) => return failed(&Failure::environment("no JSON").found(error)),
        },
        Ok(plan) => {
            if config.profile.engine.kind.is_simulated() {
                outln!("# {NOTICE}");
            }
            out!("{}", plan::render(&plan));
        }
        Err(failure) => return failed(&failure),
    }
    ExitCode::SUCCESS
}

/// Says whether this machine can run the profile.
#[must_use]
pub fn doctor(config: &Config, args: &gate::cli::DoctorArgs) -> ExitCode {
    let installed = environment::find(&config.profile, &config.paths.cache);
    gate::cli::cli(
        args,
        &gate::doctor::Inputs {
            profile_name: &config.profile_name,
            profile: &config.profile,
            paths: &config.paths,
            external: installed
                .as_ref()
                .ok()
                .and_then(|installed| software::external(config, installed).ok())
                .unwrap_or_default(),
            installed,
            shm_bytes: plan::shm_bytes(config),
            insta: &config.insta,
        },
    )
}

/// Runs one arm again: the same profile and overrides, the same prompts.
///
/// # Errors
/// Usage, if there is no such result.
pub fn replay(config: &Config, what: &str, began: Instant) -> Result<ExitCode, UsageError> {
    let (path, result) = recorded(config, what)?;
    errln!("replaying {} of {}", result.name, path.display());
    // The profile as it was resolved then, not as its file reads now.
    let again = Config {
        profile_name: result.profile_name,
        profile: result.profile,
        overrides: result.overrides,
        ..config.clone()
    };
    run::run(PHASE1, again, std::slice::from_ref(&result.name), began)
}

/// `RUN/CASE`: `latest/tc01::cold`, or a path to a `result.json` or its directory.
fn recorded(config: &Config, what: &str) -> Result<(PathBuf, ArmResult), UsageError> {
    let direct = PathBuf::from(what);
    let path = if direct.is_dir() {
        direct.join("result.json")
    } else if direct.is_file() {
        direct
    } else {
        let (run, arm) = what.split_once('/').ok_or_else(|| {
            UsageError(format!(
                "{what:?} is no RUN/CASE; for example latest/tc01::cold"
            ))
        })?;
        config
            .paths
            .runs
            .join(run)
            .join(arm.replace("::", "__"))
            .join("result.json")
    };
    let text = std::fs::read_to_string(&path).map_err(|error| {
        let others = neighbours(&path);
        UsageError(match others.is_empty() {
            true => format!("no result at {}: {error}", path.display()),
            false => format!("no result at {}; there are {others}", path.display()),
        })
    })?;
    let result = serde_json::from_str(&text).map_err(|error| {
        UsageError(format!(
            "{} is not a result this version can read: {error}",
            path.display()
        ))
    })?;
    Ok((path, result))
}

/// Arms that the run of a missing result did record.
fn neighbours(result: &Path) -> String {
    let run = result.parent().and_then(Path::parent);
    let arms = run
        .and_then(|run| run.read_dir().ok())
        .into_iter()
        .flatten();
    let mut names: Vec<String> = arms
        .flatten()
        .filter(|arm| arm.path().join("result.json").is_file())
        .map(|arm| arm.file_name().to_string_lossy().replace("__", "::"))
        .collect();
    names.sort();
    names.join(", ")
}

fn failed(failure: &Failure) -> ExitCode {
    errln!("{failure}");
    ExitCode::from(FAILED)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(simulated: bool) -> String {
        let status = serde_json::json!({
            "state": "ready", "fingerprint": "abcd", "generation": 3, "profile": "mine.toml",
            "simulated": simulated, "supervisor_pid": 1, "leases": [], "queued": [],
            "idle_stop_in_seconds": null, "frontend_url": null, "failure": null, "processes": [],
        });
        describe_status(&serde_json::from_value(status).unwrap())
    }

    #[test]
    fn the_status_of_a_simulated_stack_says_so_whatever_its_profile_is_called() {
        assert!(status(true).contains(NOTICE));
        assert!(!status(false).contains(NOTICE));
    }
}
