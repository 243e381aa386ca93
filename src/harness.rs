//! Cases become trials: listing discipline, gates, signals, exit codes.
//!
//! - `tests/phase1.rs` calls [`main`]: libtest-mimic below `cargo test` and nextest.
//! - `kvcr-phase1 run` calls [`run`]: the same arms, a table for people.
//!
//! Both end in [`arm::Runner::run`], which takes the lease, tells the story and writes the
//! evidence. What a case claims is `cases`'; what a verdict means is `verdict`'s.
//!
//! Exit codes: 0, 101 failures, 2 usage, 3 harness contract (nothing ran, gate drift),
//! 130 interrupted.

pub mod arm;
mod default_profile;
pub mod interrupt;
pub mod run;
pub mod select;
pub mod software;
pub mod table;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use libtest_mimic::{Arguments, Failed, Trial};

use crate::cases::{Arm, Case};
use crate::config::{self, Config, ProcessEnv, UsageError};
use crate::environment::{self, Installed, progress};
use crate::failure::Failure;
use crate::gate::{Decision, needs, store};
use crate::sim::{self, NOTICE};
use crate::snapshot;
use crate::stack::{admin, supervisor};
use arm::Runner;
use interrupt::{Cause, Interrupt};

/// A wrong flag, field, variable or case.
pub const USAGE: u8 = 2;
/// Nothing ran, or what was listed is not what would run.
pub const CONTRACT: u8 = 3;
/// At least one arm did not pass.
pub const FAILED: u8 = 101;
/// Ctrl-C.
pub const INTERRUPTED: u8 = 130;

/// The whole of `tests/phase1.rs`.
pub fn main(cases: &'static [Case]) -> ExitCode {
    let began = Instant::now();
    let mut args = std::env::args_os();
    let program = args.next().unwrap_or_else(|| "phase1".into());
    let args: Vec<OsString> = args.collect();
    let first = args.first();
    if first.is_some_and(|first| first == supervisor::SUPERVISE) {
        return supervisor::main(args.into_iter().skip(1), &software::build);
    }
    if first.is_some_and(|first| first == sim::SIMULATE) {
        return sim::main(args.into_iter().skip(1));
    }
    match trials(cases, program, args, began) {
        Ok(code) => code,
        Err(error) => {
            errln!("error: {error}");
            ExitCode::from(USAGE)
        }
    }
}

fn trials(
    cases: &'static [Case],
    program: OsString,
    args: Vec<OsString>,
    began: Instant,
) -> Result<ExitCode, UsageError> {
    let (own, rest) = config::split_args(args.into_iter())?;
    // libtest-mimic ends the process with its own help, which does not know our flags.
    if rest.iter().any(|arg| arg == "--help" || arg == "-h") {
        outln!("{}\n", config::help_table());
    }
    let mut libtest = Arguments::from_iter(std::iter::once(program).chain(rest));
    // One conversation with the stack at a time; more would only queue for the lease.
    libtest.test_threads.get_or_insert(1);
    let config = default_profile::load(own, &ProcessEnv)?;
    let simulated = config.profile.engine.kind.is_simulated();
    let arms: Vec<&'static Arm> = cases.iter().flat_map(|case| case.arms).collect();
    if let Some(filter) = &libtest.filter {
        select::known(&arms, std::slice::from_ref(filter), libtest.exact)?;
    }
    select::known_requirements(&arms, &config.require)?;
    select::known_defects(&arms, &config.profile.known)?;

    let update = match snapshot::refuse_falsifying(&config.insta) {
        Ok(update) => update,
        Err(failure) => {
            errln!("{failure}");
            return Ok(ExitCode::from(CONTRACT));
        }
    };

    let installed = environment::find(&config.profile, &config.paths.cache);
    let gate = gate(&config, &installed);
    let of_arm = |arm: &Arm| match &gate {
        Decision::Runnable => arm.wants.decide(&config.profile),
        gated @ Decision::Gated { .. } => gated.clone(),
    };
    let decisions: BTreeMap<String, Decision> = arms
        .iter()
        .map(|arm| (arm.name.to_owned(), of_arm(arm)))
        .collect();
    let gates = if config.under_nextest {
        store::of_run(
            &config.paths.state,
            &config.run_id,
            &config.profile_name,
            || decisions.clone(),
        )
        .map(Some)
    } else {
        Ok(None)
    };

    // Only what is about to run needs the software examined: listing has to be quick.
    let prepared = match installed {
        Ok(installed) if !libtest.list => software::prepare(&config, installed),
        Ok(_) => Err(Failure::inconclusive("listing runs nothing")),
        Err(failure) => Err(failure),
    };
    let runner = Arc::new(Runner {
        interrupt: interrupt(&config, &prepared),
        config,
        prepared,
        update,
        began: Mutex::new(Some(began)),
    });

    let runner_under_nextest = runner.config.under_nextest;
    let trials: Vec<Trial> = arms
        .iter()
        .map(|arm| {
            let runner = Arc::clone(&runner);
            let arm: &'static Arm = arm;
            let now = decisions[arm.name].clone();
            let gated = matches!(now, Decision::Gated { .. });
            let required = insisted(&runner.config, arm, &gate);
            let stored = gates.clone();
            let trial = Trial::test(arm.name, move || {
                let failed = |failure: Failure| failed(simulated, &failure);
                if let Some(gates) = stored.map_err(failed)?
                    && let profile = &runner.config.profile_name
                    && let Some(drift) = store::drift(&gates, arm.name, profile, &now)
                {
                    return Err(failed(drift));
                }
                // Reached only where somebody insisted: a required arm, or --run-ignored.
                if let Some(failure) = now.insisted_failure(arm.name, required) {
                    return Err(failed(failure));
                }
                let result = runner
                    .run(arm, progress::reporter_of(simulated).as_mut())
                    .map_err(failed)?;
                arm::message(&result).map_or(Ok(()), |message| Err(message.into()))
            })
            .with_ignored_flag(gated && !required);
            match simulated && !libtest.list && !runner_under_nextest {
                true => marked(trial),
                false => trial,
            }
        })
        .collect();

    let chosen = trials
        .iter()
        .filter(|trial| !libtest.is_filtered_out(trial));
    let (any, selected) = chosen.fold((false, 0), |(_, runnable), trial| {
        (true, runnable + usize::from(!libtest.is_ignored(trial)))
    });
    // nextest reads only the exit code: a name that matches nothing, or was gated since it was
    // listed, would pass.
    if runner.config.under_nextest && libtest.exact && !libtest.list && selected != 1 {
        errln!(
            "harness: --exact {:?} selects {selected} runnable trials, expected 1; {}",
            libtest.filter.as_deref().unwrap_or_default(),
            first_gate(&libtest, &decisions)
        );
        return Ok(ExitCode::from(CONTRACT));
    }
    let list = libtest.list;
    let conclusion = libtest_mimic::run(&libtest, trials);
    if list {
        return Ok(conclusion.exit_code());
    }
    if simulated {
        errln!("harness: {NOTICE}");
    }
    if runner.interrupt.cause() == Some(Cause::Interrupt) {
        stop(&runner);
        return Ok(ExitCode::from(INTERRUPTED));
    }
    if conclusion.num_passed + conclusion.num_failed == 0 {
        match any {
            true => errln!("harness: nothing ran; {}", first_gate(&libtest, &decisions)),
            false => errln!("harness: nothing ran; the filters leave no arm"),
        }
        return Ok(ExitCode::from(CONTRACT));
    }
    Ok(conclusion.exit_code())
}

/// Whether `arm` may not be gated. `all` means all that a stack of this profile can tell: no stack
/// can tell every arm.
fn insisted(config: &Config, arm: &Arm, machine: &Decision) -> bool {
    let other_stack =
        *machine == Decision::Runnable && arm.wants.decide(&config.profile) != Decision::Runnable;
    let mut names = config.require.clone();
    names.retain(|name| name != "all" || !other_stack);
    needs::required(&names, arm.name)
}

/// Why nothing of what was asked for can run: the first gate among it.
fn first_gate(libtest: &Arguments, decisions: &BTreeMap<String, Decision>) -> Decision {
    let asked = |name: &&String| match &libtest.filter {
        Some(filter) => select::selects(filter, name, libtest.exact),
        None => true,
    };
    let mut chosen = decisions.iter().filter(|(name, _)| asked(name));
    let gated = chosen.find(|(_, decision)| **decision != Decision::Runnable);
    gated.map_or(Decision::Runnable, |(_, decision)| decision.clone())
}

/// The message of a trial that ended early.
fn failed(simulated: bool, failure: &Failure) -> Failed {
    match simulated {
        true => format!("{failure}\n  stack:    {NOTICE}").into(),
        false => failure.into(),
    }
}

/// Marks the trial's line as one of the simulated stack. Not while listing, nor under nextest:
/// there the kind would become part of the name. A filter, `--exact` too, still takes the name
/// alone.
#[expect(
    clippy::disallowed_methods,
    reason = "only in a plain run, in which nobody reads names back"
)]
fn marked(trial: Trial) -> Trial {
    trial.with_kind("sim")
}

/// Whether any arm can run at all: the software is there, and the machine can do what a stack of
/// this profile needs. What an arm wants beside that is its own to say.
fn gate(config: &Config, installed: &Result<Installed, Failure>) -> Decision {
    match installed {
        Ok(installed) => software::machine(config, installed),
        Err(failure) => {
            // One sentence within another: its class and its expectation are the need's.
            let found = match &failure.found {
                Some(found) => format!("{}: {found}", failure.what),
                None => failure.what.clone(),
            };
            Decision::Gated {
                need: match &config.profile.environment.lock {
                    Some(name) => format!("the locked environment `{name}`"),
                    None if config.profile.engine.kind.is_simulated() => {
                        "this program and a place for its simulated model".into()
                    }
                    None => "a Python with the stack installed".into(),
                },
                found,
                hint: failure
                    .hint
                    .clone()
                    .unwrap_or_else(|| "`kvcr-phase1 doctor` says more".into()),
            }
        }
    }
}

/// Listens for signals; on the second Ctrl-C the supervisor is told to stop without us.
fn interrupt(config: &Config, prepared: &Result<software::Prepared, Failure>) -> Interrupt {
    let state = config.paths.state.clone();
    let fingerprint = prepared
        .as_ref()
        .ok()
        .map(|prepared| prepared.spec.fingerprint.clone());
    Interrupt::install(move || {
        if let Some(fingerprint) = &fingerprint {
            admin::ask_down(&state, fingerprint);
        }
    })
}

/// Takes the stack down after Ctrl-C, unless somebody else holds it.
fn stop(runner: &Runner) {
    let Ok(prepared) = &runner.prepared else {
        return;
    };
    let state = &runner.config.paths.state;
    match admin::down(state, Some(&prepared.spec.fingerprint), false) {
        Ok(downed) => {
            for one in downed {
                errln!("{one}");
            }
        }
        Err(failure) => errln!("{failure}"),
    }
}
