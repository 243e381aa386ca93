//! Harm: what a story does to the processes of its stack, and how it watches what follows.
//!
//! Only the supervisor signals anything; a story asks it to. Whatever a story leaves dead, the
//! supervisor starts again before the next lease.

use std::time::{Duration, Instant};

use tokio::task::JoinHandle;

use super::{Scene, millis};
use crate::client::{Observation, RequestFailure, RequestFailureKind};
use crate::evidence::Measured;
use crate::failure::{Class, Failure};
use crate::plan::External;
use crate::plan::guard::service_name;
use crate::prompt::Prompt;
use crate::stack::clock::monotonic_ns;
use crate::stack::harm::{Blow, Changes, Death, Part, Replaced, Struck};
use crate::stack::protocol::WorkerInfo;
use crate::stack::tail;
use crate::stack::wait::{self, Gave, Look};
use crate::telemetry::guard::{Event, Journal, Promotion};
use crate::verdict::Check;

/// Between two looks at a log: times are taken from them.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// What a worker says whose peer is gone, or another than it knew.
const OF_PEERS: &[&str] = &[
    "KVCR operation",
    "KVCR control",
    "KVCR start_write setup failed",
    "KVCR start_write submission failed",
    "KVCR start_write failed",
    "KVCR refusing unresolvable start_write",
    "KVCR write_done notification failed",
    "NIXL transfer progress failed",
];

/// The log of a Guard's service from some moment on.
#[derive(Clone, Debug)]
pub struct GuardLog {
    worker: usize,
    from: tail::Mark,
}

impl GuardLog {
    /// What was said since.
    ///
    /// # Errors
    /// Inconclusive, if the log cannot be read, or was rotated or truncated since.
    pub fn journal(&self) -> Result<Journal, Failure> {
        let text = self.from.since().map_err(|error| {
            Failure::inconclusive("the log of the Guard's service cannot be read")
                .expected(self.from.path().display())
                .found(error)
                .hint("a log that is written elsewhere must neither be rotated nor emptied while a case runs")
        })?;
        Ok(Journal::read(&text))
    }
}

/// An engine core that was killed.
#[derive(Clone, Debug)]
pub struct Kill {
    /// Whose it was.
    pub worker: usize,
    /// Right before the signal: `CLOCK_MONOTONIC`, nanoseconds.
    pub at: u64,
    /// When the supervisor saw it end, on the same clock.
    pub died: u64,
    /// What its Guard says from the kill on.
    pub log: GuardLog,
}

/// What came of a request, and when: `CLOCK_MONOTONIC`, nanoseconds.
type Over = (u64, Result<Observation, RequestFailure>);

/// A request that was sent and may fail.
#[derive(Debug)]
pub struct Sent {
    label: String,
    prompt: Prompt,
    target: WorkerInfo,
    sent_ns: u64,
    task: JoinHandle<Result<Over, Failure>>,
}

/// A request that is over, whatever came of it.
#[derive(Debug)]
pub struct Attempt {
    /// Its label.
    pub label: String,
    /// Right before it was sent: `CLOCK_MONOTONIC`, nanoseconds.
    pub sent_ns: u64,
    /// When its answer was read, or its failure known.
    pub done_ns: u64,
    /// What came of it.
    pub outcome: Result<Observation, RequestFailure>,
}

impl Attempt {
    /// Whether nobody answered until the client gave up.
    #[must_use]
    pub fn hung(&self) -> bool {
        let failed = self.outcome.as_ref().err();
        failed.is_some_and(|failure| matches!(failure.kind, RequestFailureKind::Deadline { .. }))
    }

    /// Milliseconds that it took.
    #[must_use]
    pub fn took_ms(&self) -> f64 {
        self.done_ns.saturating_sub(self.sent_ns) as f64 / 1e6
    }

    /// What came of it, in a few words.
    #[must_use]
    pub fn words(&self) -> String {
        match &self.outcome {
            Ok(seen) => format!(
                "{} answered after {:.0} ms, {} of {} tokens cached",
                self.label,
                self.took_ms(),
                seen.cached_tokens.map_or("?".to_owned(), |n| n.to_string()),
                seen.prompt_tokens
            ),
            Err(failure) => format!("{} failed: {}", self.label, failure.kind),
        }
    }
}

impl Scene<'_> {
    /// Kills the engine core of `worker`, and waits until the supervisor saw it end. Its Guard's
    /// service may end too: that is for a check to say.
    ///
    /// # Errors
    /// What the supervisor refuses, or a stack that is broken.
    pub async fn kill(&mut self, worker: usize) -> Result<Kill, Failure> {
        let (log, struck) = self.strike_core(worker, Blow::Kill).await?;
        let death = self.death(&struck).await?;
        Ok(Kill {
            worker,
            at: struck.monotonic_ns,
            died: death.monotonic_ns,
            log,
        })
    }

    /// Deals a blow to the engine core of `worker`; what its Guard says from then on.
    ///
    /// # Errors
    /// What the supervisor refuses, or a stack that is broken.
    pub async fn strike_core(
        &mut self,
        worker: usize,
        blow: Blow,
    ) -> Result<(GuardLog, Struck), Failure> {
        let victim = self.worker(worker)?.process;
        self.permit_service(worker).await?;
        let log = self.guard_log(worker)?;
        self.expect_lines_after_harm(worker);
        let struck = self.lease.strike(&victim, Part::EngineCore, blow).await?;
        Ok((log, struck))
    }

    /// Kills the service of `worker`'s Guard, and waits until the supervisor saw it end.
    ///
    /// # Errors
    /// What the supervisor refuses, or a stack that is broken.
    pub async fn kill_service(&mut self, worker: usize) -> Result<Death, Failure> {
        let victim = self.worker(worker)?.process;
        // It may follow; then it must be said, and not end the stack.
        self.lease.permit(&victim).await?;
        self.expect_lines_after_harm(worker);
        let service = service_name(worker);
        let struck = self.lease.strike(&service, Part::Whole, Blow::Kill).await?;
        self.death(&struck).await
    }

    /// Kills what is left of `worker`.
    ///
    /// # Errors
    /// What the supervisor refuses, or a stack that is broken.
    pub async fn kill_whole(&mut self, worker: usize) -> Result<(), Failure> {
        let victim = self.worker(worker)?.process;
        self.permit_service(worker).await?;
        let struck = self.lease.strike(&victim, Part::Whole, Blow::Kill).await?;
        self.death(&struck).await?;
        Ok(())
    }

    async fn death(&self, struck: &Struck) -> Result<Death, Failure> {
        let who = struck.hit.first().copied().unwrap_or(struck.leader);
        self.lease.death_of(who, self.patience()).await
    }

    /// Whether `worker`, as it is known now, ended: the supervisor saw its process go.
    ///
    /// # Errors
    /// Environment, if there is no such worker.
    pub fn has_died(&self, worker: usize) -> Result<bool, Failure> {
        let process = self.worker(worker)?.process;
        Ok(self.is_gone(&process))
    }

    /// The same of the service of its Guard.
    #[must_use]
    pub fn service_has_died(&self, worker: usize) -> bool {
        self.is_gone(&service_name(worker))
    }

    fn is_gone(&self, name: &str) -> bool {
        let known = self.stack.processes.iter().find(|one| one.name == name);
        let deaths = self.lease.deaths();
        known.is_some_and(|known| {
            deaths
                .iter()
                .any(|death| death.process == name && death.who.pid == known.pid)
        })
    }

    /// The log of `worker`'s Guard from now on.
    ///
    /// # Errors
    /// Inconclusive, if there is none.
    pub fn guard_log(&self, worker: usize) -> Result<GuardLog, Failure> {
        let name = service_name(worker);
        let own = self.stack.processes.iter().find(|one| one.name == name);
        let elsewhere = self.external(worker);
        let log = own
            .map(|process| &process.log)
            .or(elsewhere.map(|service| &service.log));
        let log = log.ok_or_else(|| {
            Failure::inconclusive(format!("the stack has no process {name}"))
                .expected("a kvcr_service beside each worker")
        })?;
        Ok(GuardLog {
            worker,
            from: tail::Mark::now(log),
        })
    }

    /// The service of `worker`'s Guard, where somebody else runs it.
    fn external(&self, worker: usize) -> Option<&External> {
        let name = service_name(worker);
        self.stack.plan.external.iter().find(|one| one.name == name)
    }

    /// The service of `worker`'s Guard may end from now on. One that runs elsewhere may not: nobody
    /// here could start it again.
    async fn permit_service(&self, worker: usize) -> Result<(), Failure> {
        match self.external(worker) {
            Some(_) => Ok(()),
            None => self.lease.permit(&service_name(worker)).await,
        }
    }

    /// Waits until a Guard has taken over. Leaves the check that it did; `None` if it did not.
    ///
    /// # Errors
    /// Skew, if it says so in words that nobody knows; Inconclusive, if its log cannot be read.
    pub async fn promotion(
        &mut self,
        worker: usize,
        log: &GuardLog,
    ) -> Result<Option<Promotion>, Failure> {
        let waited = self.wait_for_promotion(log).await?;
        let (promotion, found) = match waited {
            Ok(promotion) => (Some(promotion), "it took over".to_owned()),
            Err(why) => (None, why),
        };
        self.check(Check::new(
            format!("guard_takes_over[worker{worker}]"),
            Class::Product,
            promotion.is_some(),
            "the Guard says that it was promoted",
            found,
        ));
        Ok(promotion)
    }

    /// The same without a check: the promotion, or why there is none.
    ///
    /// # Errors
    /// As [`Self::promotion`].
    pub async fn wait_for_promotion(
        &mut self,
        log: &GuardLog,
    ) -> Result<Result<Promotion, String>, Failure> {
        let began = Instant::now();
        let look = || async {
            let journal = match log.journal() {
                Ok(journal) => journal,
                Err(failure) => return Look::Failed(failure),
            };
            if let Some(strange) = journal.strange() {
                return Look::Failed(strange);
            }
            let promotions = journal.promotions();
            if let Some(done) = promotions.iter().find(|one| one.complete) {
                return Look::Ready(Ok(done.clone()));
            }
            let failed = journal.events.iter().find_map(|event| match event {
                Event::Failed { line } => Some(line.clone()),
                _ => None,
            });
            match (failed, promotions.last()) {
                (Some(line), _) => Look::Ready(Err(line)),
                (None, Some(begun)) => Look::NotYet(format!(
                    "it got as far as {:?}",
                    begun.stages.last().map(|(stage, _)| *stage)
                )),
                (None, None) => Look::NotYet("its log says nothing of a promotion".to_owned()),
            }
        };
        let waited = wait::until(self.patience(), LOOK_EVERY, look).await;
        self.told.timings.settle += millis(began);
        match waited {
            Ok(Err(line)) => {
                // It stops its service, and whoever starts that again must find it stopped.
                let gone = || async {
                    match self.service_has_died(log.worker) {
                        true => Look::<_, Failure>::Ready(()),
                        false => Look::NotYet("its service still runs".to_owned()),
                    }
                };
                let stopped = wait::until(self.patience(), LOOK_EVERY, gone).await;
                Ok(Err(match stopped {
                    Ok(()) => format!("{line}; its service stopped"),
                    Err(gave) => format!("{line}; {gave}"),
                }))
            }
            Ok(done) => Ok(done),
            Err(Gave::Failed(failure)) => Err(failure),
            Err(gave @ Gave::Up { .. }) => Ok(Err(gave.to_string())),
        }
    }

    /// Starts `worker` again. The scene knows it under its new identity from then on.
    ///
    /// # Errors
    /// What the supervisor refuses, or a stack that is broken.
    pub async fn replace(&mut self, worker: usize, changes: Changes) -> Result<Replaced, Failure> {
        let process = self.worker(worker)?.process;
        self.start_again(&process, changes).await
    }

    async fn start_again(&mut self, process: &str, changes: Changes) -> Result<Replaced, Failure> {
        let began = Instant::now();
        let replaced = self.lease.replace(process, changes).await;
        self.told.timings.replacements += millis(began);
        let replaced = replaced?;
        self.know(&replaced);
        Ok(replaced)
    }

    /// The same of two at once.
    ///
    /// # Errors
    /// The first failure in their order.
    pub async fn replace_both(&mut self, workers: [usize; 2]) -> Result<[Replaced; 2], Failure> {
        let one = self.worker(workers[0])?.process;
        let other = self.worker(workers[1])?.process;
        let began = Instant::now();
        let (one, other) = tokio::join!(
            self.lease.replace(&one, Changes::default()),
            self.lease.replace(&other, Changes::default()),
        );
        self.told.timings.replacements += millis(began);
        let both = [one?, other?];
        both.iter().for_each(|replaced| self.know(replaced));
        Ok(both)
    }

    /// Starts the service of `worker`'s Guard again.
    ///
    /// # Errors
    /// What the supervisor refuses, or a stack that is broken.
    pub async fn replace_service(&mut self, worker: usize) -> Result<Replaced, Failure> {
        let service = service_name(worker);
        self.start_again(&service, Changes::default()).await
    }

    fn know(&mut self, replaced: &Replaced) {
        let Replaced::Serving(replacement) = replaced else {
            return;
        };
        let process = &replacement.process;
        self.told.started.push(process.clone());
        if let Some(known) = self
            .stack
            .processes
            .iter_mut()
            .find(|known| known.name == process.name)
        {
            *known = process.clone();
        }
        if let Some(worker) = &replacement.worker
            && let Some(known) = self.stack.workers.get_mut(worker.index)
        {
            *known = worker.clone();
        }
    }

    /// Sends `prompt` to a worker that may be dead by the time it arrives.
    ///
    /// # Errors
    /// Environment, if there is no such worker or the prompt does not fit.
    pub fn send(&mut self, label: &str, prompt: &Prompt, worker: usize) -> Result<Sent, Failure> {
        let target = self.worker(worker)?;
        let exchange = self.exchange(label, prompt, &target, self.asked_salt())?;
        let sent_ns = monotonic_ns();
        let task = tokio::spawn(async move {
            let outcome = exchange.attempt().await?;
            Ok((monotonic_ns(), outcome))
        });
        Ok(Sent {
            label: label.to_owned(),
            prompt: prompt.clone(),
            target,
            sent_ns,
            task,
        })
    }

    /// Waits for what comes of it. An answer is checked as every other.
    ///
    /// # Errors
    /// Environment, if it cannot be written down.
    pub async fn arrived(&mut self, sent: Sent) -> Result<Attempt, Failure> {
        let began = Instant::now();
        let over = sent
            .task
            .await
            .map_err(|error| Failure::inconclusive("a request ended by itself").found(error))?;
        self.told.timings.requests += millis(began);
        let (done_ns, outcome) = over?;
        if let Ok(seen) = &outcome {
            self.served(&sent.label, &sent.prompt, &sent.target, seen);
        }
        let attempt = Attempt {
            label: sent.label,
            sent_ns: sent.sent_ns,
            done_ns,
            outcome,
        };
        self.check(Check::new(
            format!("request_ends[{}]", attempt.label),
            Class::Product,
            !attempt.hung(),
            "an answer, or a refusal",
            attempt.words(),
        ));
        Ok(attempt)
    }

    /// [`Self::send`] and [`Self::arrived`].
    ///
    /// # Errors
    /// As theirs.
    pub async fn attempt(
        &mut self,
        label: &str,
        prompt: &Prompt,
        worker: usize,
    ) -> Result<Attempt, Failure> {
        let sent = self.send(label, prompt, worker)?;
        self.arrived(sent).await
    }

    /// Says why what the reference answers in this arm cannot have been pinned.
    pub fn unpinned(&mut self, why: &str) {
        self.told.unpinned = Some(why.to_owned());
    }

    /// Keeps a document beside the result.
    ///
    /// # Errors
    /// Environment, if it cannot be written.
    pub fn keep(&self, file: &str, document: &impl serde::Serialize) -> Result<(), Failure> {
        self.dir.json(file, document)
    }

    /// Keeps measurements beside the result.
    ///
    /// # Errors
    /// Environment, if they cannot be written; Inconclusive, if one of them is none.
    pub fn keep_measured(&self, measured: &Measured<'_>) -> Result<(), Failure> {
        self.dir.performance(measured)
    }

    /// How long something is waited for that a request may wait for.
    #[must_use]
    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.config.profile.request.deadline_seconds)
    }

    /// Whether a worker of the stack is not the one of its bring-up.
    #[must_use]
    pub fn has_replacements(&self) -> bool {
        self.stack.workers.iter().any(|worker| {
            let processes = self.stack.processes.iter();
            let mut own = processes.filter(|process| process.name == worker.process);
            own.any(|process| process.before > 0)
        })
    }

    /// Workers of which one was started again may refuse each other once, and say so.
    pub fn expect_lines_of_strangers(&mut self) {
        let workers = self.stack.workers.iter();
        let expected = workers
            .map(|worker| (worker.process.clone(), OF_PEERS))
            .collect();
        self.expect_lines(expected);
    }

    /// A worker that was struck complains, and so does whoever was speaking with it. A Guard that
    /// took over refuses a peer that it does not know yet, and the peer introduces itself.
    fn expect_lines_after_harm(&mut self, victim: usize) {
        const OF_GUARD: &[&str] = &[
            "KVCR start_write setup failed",
            "KVCR refusing unresolvable start_write",
        ];
        let workers = self.stack.workers.iter();
        let mut expected: Vec<(String, &[&str])> = workers
            .map(|worker| {
                let words: &[&str] = if worker.index == victim {
                    &[""]
                } else {
                    OF_PEERS
                };
                (worker.process.clone(), words)
            })
            .collect();
        expected.push((service_name(victim), OF_GUARD));
        self.expect_lines(expected);
    }

    fn expect_lines(&mut self, expected: Vec<(String, &[&str])>) {
        for (process, words) in expected {
            for word in words {
                let line = (process.clone(), (*word).to_owned());
                if !self.told.expected_lines.contains(&line) {
                    self.told.expected_lines.push(line);
                }
            }
        }
    }
}
