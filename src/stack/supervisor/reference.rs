//! The reference engine: started when a lease asks, shared by leases, stopped a while after the
//! last of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use super::connection::ConnId;
use super::desk::Desk;
use super::group::{GroupEvent, GroupTask};
use super::log;
use crate::failure::Failure;
use crate::stack::protocol::{Tell, WorkerInfo, millis};

/// The reference group of one generation.
#[derive(Debug, Default)]
pub(super) struct Reference {
    group: Option<GroupTask>,
    up: Option<WorkerInfo>,
    stopping: bool,
    users: BTreeSet<ConnId>,
    idle_since: Option<Instant>,
    /// By run: six cases fail at once, not in six time-outs.
    failures: BTreeMap<String, Failure>,
}

impl Reference {
    /// A lease asks for it. `start` is called if it has to be started.
    pub(super) fn asked(
        &mut self,
        id: ConnId,
        desk: &mut Desk,
        start: impl FnOnce() -> Result<GroupTask, Failure>,
    ) {
        if let Some(failure) = desk
            .run_of(id)
            .and_then(|run| self.failures.get(run))
            .cloned()
        {
            desk.tell(id, Tell::Failed { failure });
            return;
        }
        self.users.insert(id);
        self.idle_since = None;
        match (&self.group, &self.up) {
            (Some(_), Some(worker)) if !self.stopping => {
                let worker = worker.clone();
                desk.tell(
                    id,
                    Tell::ReferenceReady {
                        worker,
                        start_ms: 0,
                    },
                );
            }
            // Starting: told when it is up. Stopping: started again when it is stopped.
            (Some(_), _) => {}
            (None, _) => self.start(desk, start),
        }
    }

    fn start(&mut self, desk: &mut Desk, start: impl FnOnce() -> Result<GroupTask, Failure>) {
        match start() {
            Ok(group) => self.group = Some(group),
            Err(failure) => self.fail(desk, &failure),
        }
    }

    fn fail(&mut self, desk: &mut Desk, failure: &Failure) {
        for id in std::mem::take(&mut self.users) {
            if let Some(run) = desk.run_of(id) {
                self.failures.insert(run.to_owned(), failure.clone());
            }
            desk.tell(
                id,
                Tell::Failed {
                    failure: failure.clone(),
                },
            );
        }
    }

    /// A lease is over.
    pub(super) fn ended(&mut self, id: ConnId) {
        if self.users.remove(&id) && self.users.is_empty() {
            self.idle_since = Some(Instant::now());
        }
    }

    /// When it should stop if nobody asks again.
    pub(super) fn stops_at(&self, keep: Duration) -> Option<Instant> {
        if self.up.is_none() || self.stopping {
            return None;
        }
        Some(self.idle_since? + keep)
    }

    /// Nobody asked again.
    pub(super) fn idle(&mut self) {
        log("reference: nobody needs it, stopping");
        self.stopping = true;
        if let Some(group) = &mut self.group {
            group.stop();
        }
    }

    /// The next thing that becomes of it. Cancel-safe.
    pub(super) async fn next(&mut self) -> GroupEvent {
        match &mut self.group {
            Some(group) => group.next().await,
            None => std::future::pending().await,
        }
    }

    /// Takes in what became of it.
    pub(super) fn hear(
        &mut self,
        event: GroupEvent,
        desk: &mut Desk,
        start: impl FnOnce() -> Result<GroupTask, Failure>,
    ) {
        match event {
            GroupEvent::Step(text) => {
                log(&text);
                for id in &self.users {
                    desk.tell(
                        *id,
                        Tell::Step {
                            text: text.clone(),
                            at_ms: 0,
                        },
                    );
                }
            }
            GroupEvent::Up(started) => match started.workers.first() {
                Some(worker) => {
                    let start_ms = millis(started.took);
                    log(&format!("reference: ready after {start_ms} ms"));
                    for id in &self.users {
                        let worker = worker.clone();
                        desk.tell(*id, Tell::ReferenceReady { worker, start_ms });
                    }
                    self.up = Some(worker.clone());
                    if self.users.is_empty() {
                        self.idle_since = Some(Instant::now());
                    }
                }
                None => {
                    self.fail(
                        desk,
                        &Failure::environment("the reference group has no worker"),
                    );
                    self.idle();
                }
            },
            GroupEvent::Failed(failure) => {
                log(&format!("reference: {failure}"));
                self.group = None;
                self.fail(desk, &failure);
            }
            GroupEvent::Died(failure) => {
                log(&format!("reference: {failure}"));
                self.up = None;
                self.stopping = true;
                for id in std::mem::take(&mut self.users) {
                    desk.tell(
                        id,
                        Tell::Broken {
                            failure: failure.clone(),
                        },
                    );
                }
            }
            // Nobody may harm it, so nothing of it changes.
            GroupEvent::Death(_)
            | GroupEvent::Done(..)
            | GroupEvent::Changed(_)
            | GroupEvent::Whole(_) => {}
            GroupEvent::Stopped(result) => {
                if let Err(failure) = result {
                    log(&format!("reference: {failure}"));
                }
                self.group = None;
                self.up = None;
                self.stopping = false;
                if !self.users.is_empty() {
                    self.start(desk, start);
                }
            }
        }
    }

    /// Stops it with the stack.
    pub(super) async fn end(self) -> Result<(), Failure> {
        match self.group {
            Some(group) => group.end().await,
            None => Ok(()),
        }
    }
}
