//! `kvcr-phase1 run`: the arms in this process, a table for people.

use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use serde::Serialize;

use super::arm::{self, Runner};
use super::interrupt::Cause;
use super::{CONTRACT, FAILED, INTERRUPTED, insisted, select, software, table};
use crate::cases::{Arm, Case, PHASE1};
use crate::config::profile::EngineKind;
use crate::config::{Config, UsageError};
use crate::environment::{self, progress};
use crate::evidence::result::{ArmResult, Pin};
use crate::evidence::write_json;
use crate::failure::Failure;
use crate::gate::Decision;
use crate::sim::NOTICE;
use crate::snapshot;
use crate::terminal;
use crate::verdict::Outcome;

/// The table of a run, as a document.
#[derive(Debug, Serialize)]
struct RunDocument<'a> {
    schema: u32,
    run_id: &'a str,
    profile: &'a str,
    /// `sim`: nothing is proven of the product.
    engine: EngineKind,
    /// Of the whole run, milliseconds.
    wall: f64,
    /// Installing or finding the software, milliseconds.
    software: f64,
    /// The harness's own share of the whole run, 0 to 1; installing software is not its own.
    harness_share: f64,
    arms: Vec<RunRow<'a>>,
    /// Arms that another kind of stack can tell.
    gated: Vec<GatedRow>,
}

/// An arm that a stack of this profile cannot tell.
#[derive(Debug)]
struct Gated {
    name: &'static str,
    decision: Decision,
    /// Somebody asked for this one, by its name.
    insisted: bool,
}

#[derive(Debug, Serialize)]
struct GatedRow {
    name: &'static str,
    reason: String,
}

#[derive(Debug, Serialize)]
struct RunRow<'a> {
    name: &'a str,
    outcome: String,
    reason: Option<String>,
    wall: f64,
    evidence: &'a std::path::Path,
}

/// Runs the arms that `filters` select, installing the software if it is missing.
///
/// # Errors
/// Usage, if a filter selects nothing.
pub fn run(
    cases: &'static [Case],
    config: Config,
    filters: &[String],
    began: Instant,
) -> Result<ExitCode, UsageError> {
    let all: Vec<&'static Arm> = cases.iter().flat_map(|case| case.arms).collect();
    select::known(&all, filters, false)?;
    select::known_requirements(&all, &config.require)?;
    select::known_defects(&all, &config.profile.known)?;
    let update = match snapshot::refuse_falsifying(&config.insta) {
        Ok(update) => update,
        Err(failure) => {
            errln!("{failure}");
            return Ok(ExitCode::from(CONTRACT));
        }
    };
    let engine = config.profile.engine.kind;
    if engine.is_simulated() {
        errln!("{NOTICE}");
    }
    let mut reporter = progress::reporter_of(engine.is_simulated());
    let prepared = environment::ensure(&config.profile, &config.paths.cache, reporter.as_mut())
        .and_then(|installed| software::prepare(&config, installed));
    if prepared.is_ok() {
        reporter.done("the software is ready");
    }
    drop(reporter); // clears its line before others are printed
    let software = began.elapsed().as_secs_f64() * 1000.0;
    if let Ok(prepared) = &prepared
        && let Ok(plan) = prepared.blueprint.canonical_plan()
    {
        errln!(
            "{}discovery: {} ({})",
            table::mark(engine),
            plan.discovery.backend,
            plan.discovery.reason
        );
    }
    let runner = Runner {
        interrupt: super::interrupt(&config, &prepared),
        config,
        prepared,
        update,
        began: Mutex::new(None),
    };

    let mut results: Vec<ArmResult> = Vec::new();
    let (chosen, gated) = told_here(&runner.config, select::arms(&all, filters), filters);
    if let Some(failure) = refused(&gated, chosen.is_empty()) {
        errln!("{failure}");
        return Ok(ExitCode::from(FAILED));
    }
    for arm in &chosen {
        if runner.interrupt.cause().is_some() {
            break;
        }
        match runner.run(arm, progress::reporter_of(engine.is_simulated()).as_mut()) {
            Ok(result) => {
                if let Some(message) = arm::message(&result) {
                    errln!("{}: {message}", table::marked(engine, arm.name));
                }
                if let Some(lost) = lost_between(results.last(), &result) {
                    errln!("{}note: {lost}", table::mark(engine));
                }
                results.push(result);
            }
            Err(failure) => {
                errln!("{}: {failure}", table::marked(engine, arm.name));
                return Ok(ExitCode::from(FAILED));
            }
        }
    }
    conclude(&runner, &results, &gated, began, software);
    if results.len() < chosen.len() {
        let rest: Vec<&str> = chosen[results.len()..].iter().map(|arm| arm.name).collect();
        outln!("{}not run: {}", table::mark(engine), rest.join(", "));
    }
    if runner.interrupt.cause() == Some(Cause::Interrupt) {
        super::stop(&runner);
        return Ok(ExitCode::from(INTERRUPTED));
    }
    let passed = results
        .iter()
        .all(|result| result.verdict.outcome == Outcome::Pass);
    Ok(if passed && !results.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(FAILED)
    })
}

/// That the stack of the arm before ended while nobody held it: no arm can be blamed for it, and
/// nobody would hear of it.
fn lost_between(before: Option<&ArmResult>, now: &ArmResult) -> Option<String> {
    let (before, stack) = (before?, now.stack.as_ref()?);
    let earlier = before.stack.as_ref()?;
    let unnoticed = before.failure.is_none() && earlier.generation != stack.generation;
    unnoticed.then(|| {
        format!(
            "the stack ended between {} and {} (generation {}, then {}); its supervisor.log says why",
            before.name, now.name, earlier.generation, stack.generation
        )
    })
}

/// The arms that a stack of this profile can tell, and the others with the reason.
fn told_here(
    config: &Config,
    chosen: Vec<&'static Arm>,
    filters: &[String],
) -> (Vec<&'static Arm>, Vec<Gated>) {
    let mut gated = Vec::new();
    let mut here = Vec::new();
    for arm in chosen {
        match arm.wants.decide(&config.profile) {
            Decision::Runnable => here.push(arm),
            decision @ Decision::Gated { .. } => gated.push(Gated {
                name: arm.name,
                insisted: filters.iter().any(|filter| filter == arm.name)
                    || insisted(config, arm, &Decision::Runnable),
                decision,
            }),
        }
    }
    (here, gated)
}

/// Somebody named an arm, or nothing but arms, that this stack cannot tell.
fn refused(gated: &[Gated], nothing_else: bool) -> Option<Failure> {
    let named = gated.iter().find(|one| one.insisted);
    let one = named.or_else(|| gated.first().filter(|_| nothing_else))?;
    one.decision.insisted_failure(one.name, false)
}

/// A case whose arms are all among `names` goes by its own name.
fn whole<'a>(names: &[&'a str]) -> Vec<&'a str> {
    let mut short: Vec<&str> = Vec::new();
    for name in names {
        let id = name.split("::").next().unwrap_or(name);
        let mut arms = PHASE1
            .iter()
            .filter(|case| case.id == id)
            .flat_map(|case| case.arms);
        let said = match arms.all(|arm| names.contains(&arm.name)) {
            true => id,
            false => name,
        };
        if short.last() != Some(&said) {
            short.push(said);
        }
    }
    short
}

/// One line for each reason, with the arms that it keeps out.
fn gated_lines(gated: &[Gated]) -> Vec<String> {
    let mut reasons: Vec<(String, Vec<&str>)> = Vec::new();
    for one in gated {
        let reason = one.decision.to_string();
        match reasons.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, names)) => names.push(one.name),
            None => reasons.push((reason, vec![one.name])),
        }
    }
    reasons
        .into_iter()
        .map(|(reason, names)| format!("gated: {}: {reason}", whole(&names).join(", ")))
        .collect()
}

fn conclude(
    runner: &Runner,
    results: &[ArmResult],
    gated: &[Gated],
    began: Instant,
    software: f64,
) {
    outln!("{}", table::verdicts(results, terminal::columns()));
    for result in results {
        if let Pin::Missing { name } = &result.pin {
            outln!(
                "{}: no pinned reference {name}.snap (see CONTRIBUTING.md)",
                table::marked(result.engine, &result.name)
            );
        }
        for note in &result.notes {
            let name = table::marked(result.engine, &result.name);
            outln!("{name}: note: {note}");
        }
    }
    for line in gated_lines(gated) {
        outln!("{}{line}", table::mark(runner.config.profile.engine.kind));
    }
    let wall = began.elapsed().as_secs_f64() * 1000.0;
    let own: f64 = results.iter().map(|result| result.timings.harness).sum();
    let document = RunDocument {
        schema: 1,
        run_id: &runner.config.run_id,
        profile: &runner.config.profile_name,
        engine: runner.config.profile.engine.kind,
        wall,
        software,
        harness_share: if wall > 0.0 { own / wall } else { 0.0 },
        arms: results
            .iter()
            .map(|result| RunRow {
                name: &result.name,
                outcome: result.verdict.outcome.to_string(),
                reason: table::reason(result),
                wall: result.timings.wall,
                evidence: &result.evidence,
            })
            .collect(),
        gated: gated
            .iter()
            .map(|one| GatedRow {
                name: one.name,
                reason: one.decision.to_string(),
            })
            .collect(),
    };
    let folder = runner.config.paths.runs.join(&runner.config.run_id);
    if let Err(failure) = write_json(&folder.join("run.json"), &document) {
        errln!("{failure}");
    }
    let mark = table::mark(runner.config.profile.engine.kind);
    outln!("{mark}evidence: {}", folder.display());
    let up = results.last().is_some_and(|result| result.stack.is_some());
    if up && runner.interrupt.cause().is_none() {
        outln!(
            "{mark}the stack stays warm for {} s; `kvcr-phase1 down` stops it now",
            runner.config.profile.stack.keep_seconds
        );
    }
    if runner.config.profile.engine.kind.is_simulated() {
        outln!("{NOTICE}");
    }
}
