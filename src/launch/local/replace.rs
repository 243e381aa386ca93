//! Starting one process of a group again, and making a harmed group whole.
//!
//! A replacement is a job in two stages, each a task: what is left of the old process goes away
//! (killed, then waited for by pid, so that ports and sockets are free); the new one becomes
//! ready, or ends. Jobs run side by side. Mending makes a job of whatever is dead, changed or
//! stood still, those first that others start after.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};

use super::watch::Meaning;
use super::{Child, Local, Started, probe, too_slow};
use crate::engine::Registered;
use crate::failure::Failure;
use crate::plan::Process;
use crate::stack::clock::monotonic_ns;
use crate::stack::harm::{Blow, Changes, Death, Done, Part, Refusal, Replaced, Replacement};
use crate::stack::inventory;
use crate::stack::process;
use crate::stack::protocol::millis;
use crate::stack::sweep;
use crate::stack::tail;
use crate::stack::wait;

/// From SIGKILL until nothing is left: freeing a device can hold a process in the kernel.
const GONE_WITHIN: Duration = Duration::from_secs(60);
/// A process that stood still is given this long to serve again before it is replaced.
const AWAKE_WITHIN: Duration = Duration::from_secs(60);
/// Of a log that says why a replacement was refused.
const LAST_LINES: usize = 40;
const LAST_BYTES: u64 = 16 * 1024;

/// What happens in a group that is up.
#[derive(Debug)]
pub enum Event {
    /// A process ended that nobody had struck. The group is not what it was.
    Died(Failure),
    /// A process ended whose end was permitted.
    Death(Death),
    /// What came of the deed with this ticket.
    Done(u64, Done),
    /// Other processes run now.
    Changed(Started),
    /// The group is whole again, or cannot be.
    Whole(Result<Started, Failure>),
}

/// Replacements that are under way.
#[derive(Debug, Default)]
pub(super) struct Jobs {
    last: u64,
    under_way: BTreeMap<u64, Job>,
    stages: JoinSet<(u64, Stage)>,
    /// While the group is made whole: processes that are still to be started again.
    mending: Option<BTreeSet<String>>,
    events: VecDeque<Event>,
}

#[derive(Debug)]
struct Job {
    process: Process,
    changes: Changes,
    /// Who waits for it; nobody where it only mends.
    ticket: Option<u64>,
    phase: Phase,
    task: AbortHandle,
    started_ns: u64,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Phase {
    /// The old one goes away.
    Clearing,
    /// The new one comes up.
    Starting,
    /// Nothing was started: it stood still, and is looked at.
    Waking,
}

#[derive(Debug)]
enum Stage {
    Cleared(Result<(), Failure>),
    /// `None`: not in time.
    Ready(Option<Result<Ready, Failure>>),
}

#[derive(Debug)]
struct Ready {
    probes_ns: u64,
    registered: Option<Registered>,
}

impl Jobs {
    /// Ends all of them. What they started stays, for whoever stops the group.
    pub(super) fn abort(&mut self) {
        self.under_way.clear();
        self.stages.abort_all();
        self.mending = None;
    }

    /// Whether the replacement of `name` is coming up.
    pub(super) fn starts(&self, name: &str) -> bool {
        self.phase(name) == Some(Phase::Starting)
    }

    /// Whether `name` is going away to be replaced.
    pub(super) fn clears(&self, name: &str) -> bool {
        self.phase(name) == Some(Phase::Clearing)
    }

    fn next_id(&mut self) -> u64 {
        self.last += 1;
        self.last
    }

    fn phase(&self, name: &str) -> Option<Phase> {
        self.of(name).map(|(_, job)| job.phase)
    }

    fn of(&self, name: &str) -> Option<(u64, &Job)> {
        let mut all = self.under_way.iter();
        all.find(|(_, job)| job.process.name == name)
            .map(|(id, job)| (*id, job))
    }

    fn remove(&mut self, name: &str) -> Option<Job> {
        let id = self.of(name)?.0;
        let job = self.under_way.remove(&id)?;
        job.task.abort();
        Some(job)
    }
}

impl Local {
    /// The next thing that happens while the group is up. Cancel-safe.
    pub async fn next(&mut self) -> Event {
        loop {
            if let Some(event) = self.jobs.events.pop_front() {
                return event;
            }
            tokio::select! {
                Some(exit) = self.exits.1.recv() => match self.take_in(exit) {
                    Meaning::Permitted(death) => self.permitted(death),
                    Meaning::Starting(death) => self.refused(death),
                    Meaning::End(failure) => return Event::Died(failure),
                },
                Some(Ok(failure)) = self.lost.join_next() => return Event::Died(failure),
                Some(done) = self.jobs.stages.join_next() => {
                    // An aborted task is one that nobody waits for.
                    if let Ok((id, stage)) = done {
                        self.staged(id, stage);
                    }
                }
            }
        }
    }

    /// Begins to replace `name`; the answer is an event with this ticket.
    pub(super) fn replace(
        &mut self,
        ticket: u64,
        name: &str,
        changes: Changes,
    ) -> Result<(), Failure> {
        if self.jobs.of(name).is_some() {
            return Err(Failure::inconclusive(format!(
                "{name} is being replaced already"
            )));
        }
        let lot = &self.child_mut(name)?.lot;
        if !(lot.dead || lot.struck || lot.stopped) {
            return Err(
                Failure::inconclusive(format!("{name} runs, and nobody struck it"))
                    .expected("a process that is dead or dying")
                    .hint("strike it before it is replaced"),
            );
        }
        // Before anything is touched.
        let process = self.blueprint.changed(&self.plan, name, &changes)?;
        self.clear(process, changes, Some(ticket))
    }

    /// Makes the group whole: [`Event::Whole`] follows. Nobody waits for what was asked before.
    pub fn mend(&mut self) {
        let jobs = self.jobs.under_way.values_mut();
        let mut strange = Vec::new();
        for job in jobs {
            job.ticket = None;
            if !job.changes.is_none() {
                strange.push(job.process.name.clone());
            }
        }
        for name in strange {
            self.jobs.remove(&name);
            if let Ok(child) = self.child_mut(&name) {
                child.lot.disown();
            }
        }
        self.jobs.mending = Some(BTreeSet::new());
        self.mend_on();
    }

    fn permitted(&mut self, death: Death) {
        // It stood still, was continued, and ended all the same.
        if self.jobs.phase(&death.process) == Some(Phase::Waking)
            && self.child(&death.process).is_some_and(|it| it.lot.dead)
        {
            self.jobs.remove(&death.process);
        }
        self.jobs.events.push_back(Event::Death(death));
        self.mend_on();
    }

    /// A replacement ended before it was ready.
    fn refused(&mut self, death: Death) {
        let Some(job) = self.jobs.remove(&death.process) else {
            return;
        };
        let failure = self.explain(&death.process);
        self.jobs.events.push_back(Event::Death(death.clone()));
        let Some(ticket) = job.ticket else {
            return self.give_up(failure);
        };
        let Ok(child) = self.child_mut(&death.process) else {
            return;
        };
        child.lot.disown();
        let refusal = Refusal {
            death,
            started_ns: job.started_ns,
            failure,
            lines: tail::lines(&child.log, LAST_LINES, LAST_BYTES),
            log: child.log.clone(),
        };
        let done = Done::Replaced(Replaced::Refused(Box::new(refusal)));
        self.jobs.events.push_back(Event::Done(ticket, done));
    }

    fn staged(&mut self, id: u64, stage: Stage) {
        let Some(job) = self.jobs.under_way.get(&id) else {
            return;
        };
        let name = job.process.name.clone();
        match stage {
            Stage::Cleared(Ok(())) => {
                if let Err(failure) = self.begin(id) {
                    self.failed(&name, failure);
                }
            }
            Stage::Cleared(Err(failure)) => self.failed(&name, failure),
            Stage::Ready(Some(Ok(ready))) => self.serves(&name, ready),
            // It was told to stand still, and cannot go on: another one can.
            Stage::Ready(_) if job.phase == Phase::Waking => {
                self.jobs.remove(&name);
                if let Ok(child) = self.child_mut(&name) {
                    child.lot.foreign = true;
                }
                self.mend_on();
            }
            Stage::Ready(Some(Err(failure))) => self.failed(&name, failure),
            Stage::Ready(None) => {
                let mut failure = too_slow(self.bound);
                if let Some(child) = self.child(&name) {
                    failure = self.blueprint.explain(&child.process, None, &child.log);
                    failure.found.get_or_insert(child.missing.borrow().clone());
                }
                self.failed(&name, failure);
            }
        }
    }

    /// Neither ready nor ended.
    fn failed(&mut self, name: &str, failure: Failure) {
        let Some(job) = self.jobs.remove(name) else {
            return;
        };
        if let Ok(child) = self.child_mut(name) {
            child.lot.disown();
        }
        match job.ticket {
            Some(ticket) => {
                let done = Done::Failed { failure };
                self.jobs.events.push_back(Event::Done(ticket, done));
            }
            None => self.give_up(failure),
        }
    }

    fn give_up(&mut self, failure: Failure) {
        self.jobs.abort();
        self.jobs.events.push_back(Event::Whole(Err(failure)));
    }

    /// Makes what is left of a process go away.
    fn clear(
        &mut self,
        process: Process,
        changes: Changes,
        ticket: Option<u64>,
    ) -> Result<(), Failure> {
        let name = process.name.clone();
        let mut ours = self.ours(Some(BTreeSet::from([name.clone()])));
        let before = self.place.shm_before.clone();
        let child = self.child_mut(&name)?;
        let leader = child.identity();
        let mut family = sweep::families(&BTreeSet::from([leader.pid]));
        family.extend(ours.scan());
        child.lot.permitted = true;
        let mut shm = std::mem::take(&mut child.lot.shm);
        shm.extend(inventory::shm_of(&family));
        let exit = child.leader.exit().map_err(|error| {
            Failure::environment(format!("the end of {name} cannot be watched: {error}"))
        })?;
        let _ = child.leader.signal_group(Signal::KILL);
        family.remove(&leader);
        let gone: Vec<_> = family
            .iter()
            .filter_map(|one| process::gone(*one).ok())
            .collect();
        for one in &family {
            one.signal(Signal::KILL);
        }
        ours.known = family;
        let work = async move {
            let ended = wait::within(GONE_WITHIN, async {
                let _ = exit.await;
                for one in gone {
                    let _ = one.await;
                }
            });
            if ended.await.is_none() {
                return Err(Failure::environment("a killed process does not go away")
                    .expected(format!("its end within {} s", GONE_WITHIN.as_secs()))
                    .found(format!("pid {}", leader.pid))
                    .hint("look at its state in /proc; a driver may hold it"));
            }
            // Whoever was born in the meantime.
            ours.kill().await?;
            // It looks at every process of the host: not where deaths are waited for.
            let work = move || inventory::remove_unused(shm.difference(&before).cloned());
            let _ = tokio::task::spawn_blocking(work).await;
            Ok(())
        };
        let id = self.jobs.next_id();
        let task = self
            .jobs
            .stages
            .spawn(async move { (id, Stage::Cleared(work.await)) });
        let job = Job {
            process,
            changes,
            ticket,
            phase: Phase::Clearing,
            task,
            started_ns: 0,
        };
        self.jobs.under_way.insert(id, job);
        Ok(())
    }

    /// Spawns the new one.
    fn begin(&mut self, id: u64) -> Result<(), Failure> {
        let Some(job) = self.jobs.under_way.get(&id) else {
            return Ok(());
        };
        let (name, planned) = (job.process.name.clone(), job.process.clone());
        let foreign = !job.changes.is_none();
        let times = self.child_mut(&name)?.before + 1;
        let process = self.blueprint.renewed(planned, times);
        let (missing, seen) = watch::channel("nothing was looked at yet".to_owned());
        let started_ns = monotonic_ns();
        let mut new = self.spawn(process.clone(), seen, times)?;
        new.lot.foreign = foreign;
        let slot = self.child_mut(&name)?;
        let old = std::mem::replace(slot, new);
        // It has ended: that was waited for.
        let _ = old.leader.reap();
        // Whoever started after the old one may hold on to it: mended with the rest.
        for child in &mut self.children {
            child.lot.foreign |= child.process.after.contains(&name);
        }
        let (bound, probes) = (self.bound, process.ready.clone());
        let task = self.await_ready(id, &name, bound, async move {
            probe::until_all_hold(probes, probe::http(), missing).await;
        });
        if let Some(job) = self.jobs.under_way.get_mut(&id) {
            job.started_ns = started_ns;
            job.phase = Phase::Starting;
            job.task = task;
        }
        self.changed();
        Ok(())
    }

    /// A task that ends when `probes` hold and the router knows the worker.
    fn await_ready(
        &mut self,
        id: u64,
        name: &str,
        bound: Duration,
        probes: impl Future<Output = ()> + Send + 'static,
    ) -> AbortHandle {
        let (blueprint, plan) = (self.blueprint.clone(), self.plan.clone());
        let (say, name) = (self.say.clone(), name.to_owned());
        let worker = plan.workers.iter().any(|worker| worker.process == name);
        self.jobs.stages.spawn(async move {
            let work = async {
                probes.await;
                let probes_ns = monotonic_ns();
                let registered = match worker {
                    true => Some(blueprint.ready_again(&plan, &name, &*say).await?),
                    false => None,
                };
                Ok(Ready {
                    probes_ns,
                    registered,
                })
            };
            (id, Stage::Ready(wait::within(bound, work).await))
        })
    }

    fn serves(&mut self, name: &str, ready: Ready) {
        let Some(job) = self.jobs.remove(name) else {
            return;
        };
        let Ok(child) = self.child_mut(name) else {
            return;
        };
        let worker = ready.registered.as_ref().map(|registered| {
            let mut worker = registered.worker.clone();
            worker.ready_ms = millis(child.spawned.elapsed());
            worker.probes_ms = ready.probes_ns.saturating_sub(job.started_ns) / 1_000_000;
            worker
        });
        child.lot = super::Lot {
            foreign: !job.changes.is_none(),
            ..super::Lot::default()
        };
        let process = child.info();
        if let Some(worker) = &worker {
            self.workers.retain(|other| other.process != name);
            self.workers.push(worker.clone());
            self.workers.sort_by_key(|worker| worker.index);
        }
        self.changed();
        if let Some(ticket) = job.ticket {
            let registered = ready.registered.as_ref();
            let replacement = Replacement {
                process,
                worker,
                started_ns: job.started_ns,
                probes_ns: ready.probes_ns,
                listed_ns: registered.map_or(ready.probes_ns, |it| it.listed_ns),
                canary_ns: registered.map_or(ready.probes_ns, |it| it.canary_ns),
            };
            let done = Done::Replaced(Replaced::Serving(Box::new(replacement)));
            self.jobs.events.push_back(Event::Done(ticket, done));
        }
        self.mend_on();
    }

    fn changed(&mut self) {
        let started = self.started(Duration::ZERO);
        self.jobs.events.push_back(Event::Changed(started));
    }

    /// The next steps of mending, if it is under way.
    fn mend_on(&mut self) {
        let Some(mut todo) = self.jobs.mending.take() else {
            return;
        };
        todo.extend(self.children.iter().filter_map(|child| {
            let lot = &child.lot;
            let broken = lot.dead || lot.struck || lot.foreign;
            let name = &child.process.name;
            (broken && self.jobs.of(name).is_none()).then(|| name.clone())
        }));
        with_dependents(&mut todo, &self.children);
        match self.mend_step(&mut todo) {
            Ok(()) if todo.is_empty() && self.jobs.under_way.is_empty() => {
                for child in &mut self.children {
                    child.lot.permitted = false;
                }
                let started = self.started(Duration::ZERO);
                self.jobs.events.push_back(Event::Whole(Ok(started)));
            }
            Ok(()) => self.jobs.mending = Some(todo),
            Err(failure) => self.give_up(failure),
        }
    }

    fn mend_step(&mut self, todo: &mut BTreeSet<String>) -> Result<(), Failure> {
        let now: Vec<Process> = self
            .members()
            .filter(|process| todo.contains(&process.name) && self.jobs.of(&process.name).is_none())
            .filter(|process| {
                let mut after = process.after.iter();
                after.all(|name| !todo.contains(name) && self.jobs.of(name).is_none())
            })
            .cloned()
            .collect();
        for process in now {
            todo.remove(&process.name);
            self.clear(process, Changes::default(), None)?;
        }
        let still: Vec<String> = self
            .children
            .iter()
            .filter(|child| child.lot.stopped && !child.lot.dead)
            .map(|child| child.process.name.clone())
            .filter(|name| !todo.contains(name) && self.jobs.of(name).is_none())
            .collect();
        for name in still {
            self.wake(&name)?;
        }
        Ok(())
    }

    /// Continues a process that stands still, and looks whether it serves.
    fn wake(&mut self, name: &str) -> Result<(), Failure> {
        // It may have ended meanwhile; then its death is on its way here.
        let _ = self.strike(name, Part::Whole, Blow::Continue);
        let process = self.child_mut(name)?.process.clone();
        let id = self.jobs.next_id();
        let probes = process.ready.clone();
        let task = self.await_ready(id, name, AWAKE_WITHIN, async move {
            let (missing, _) = watch::channel(String::new());
            probe::until_all_hold(probes, probe::http(), missing).await;
        });
        let job = Job {
            process,
            changes: Changes::default(),
            ticket: None,
            phase: Phase::Waking,
            task,
            started_ns: monotonic_ns(),
        };
        self.jobs.under_way.insert(id, job);
        Ok(())
    }
}

/// Adds those that start after one of `todo`: they may hold on to what is gone.
fn with_dependents(todo: &mut BTreeSet<String>, children: &[Child]) {
    loop {
        let more: Vec<String> = children
            .iter()
            .map(|child| &child.process)
            .filter(|process| !todo.contains(&process.name))
            .filter(|process| process.after.iter().any(|name| todo.contains(name)))
            .map(|process| process.name.clone())
            .collect();
        if more.is_empty() {
            return;
        }
        todo.extend(more);
    }
}
