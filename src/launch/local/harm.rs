//! Blows: signals to what was started here, and to nothing else.
//!
//! A process is found in the tree of the one that this supervisor forked and has not reaped, and
//! is signalled through a pidfd whose start time was checked after it was opened.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;

use rustix::process::{Signal, pidfd_send_signal};

use super::{Child, Local};
use crate::failure::Failure;
use crate::stack::clock::monotonic_ns;
use crate::stack::harm::{Blow, Deed, Done, Part, Struck};
use crate::stack::inventory;
use crate::stack::sweep::{self, Identity};

impl Local {
    /// Does what a lease asks. `None`: the answer comes later, as an event with this ticket.
    pub fn obey(&mut self, ticket: u64, deed: Deed) -> Option<Done> {
        let done = match deed {
            Deed::Strike {
                process,
                part,
                blow,
            } => self.strike(&process, part, blow).map(Done::Struck),
            Deed::Permit { process } => self
                .living(&process)
                .map(|child| child.lot.permitted = true)
                .map(|()| Done::Permitted),
            Deed::Replace { process, changes } => match self.replace(ticket, &process, changes) {
                Ok(()) => return None,
                Err(failure) => Err(failure),
            },
        };
        Some(done.unwrap_or_else(|failure| Done::Failed { failure }))
    }

    pub(super) fn strike(&mut self, name: &str, part: Part, blow: Blow) -> Result<Struck, Failure> {
        let leader = self.living(name)?.identity();
        if self.jobs.clears(name) {
            return Err(Failure::inconclusive(format!("{name} is being replaced"))
                .hint("strike its replacement when it has started"));
        }
        let family = sweep::families(&BTreeSet::from([leader.pid]));
        let meant: BTreeSet<Identity> = match part {
            Part::Whole => family.clone(),
            Part::EngineCore => self.engine_cores(name, leader, &family)?,
        };
        // Each of them is pinned before the first signal.
        let targets: Vec<(Identity, OwnedFd)> = meant
            .into_iter()
            .filter_map(|one| Some((one, one.pidfd().ok()?)))
            .collect();
        let watched = std::mem::take(&mut self.living(name)?.lot.watched);
        let hit: BTreeSet<Identity> = targets.iter().map(|(one, _)| *one).collect();
        // The leader is watched since it was started; each of the others once.
        for one in hit.difference(&watched).filter(|one| **one != leader) {
            self.watch_member(name, *one);
        }
        let child = self.living(name)?;
        child.lot.watched = &watched | &hit;
        if blow == Blow::Kill {
            child.lot.shm.extend(inventory::shm_of(&family));
        }
        let monotonic_ns = child.hit(part, blow, &targets);
        (self.say)(format!("{name}: {blow:?} to {part:?}"));
        Ok(Struck {
            process: name.to_owned(),
            leader,
            hit: targets.into_iter().map(|(one, _)| one).collect(),
            monotonic_ns,
        })
    }

    /// The engine cores of a worker: where one descends from another, the upper one.
    fn engine_cores(
        &self,
        name: &str,
        leader: Identity,
        family: &BTreeSet<Identity>,
    ) -> Result<BTreeSet<Identity>, Failure> {
        let mut titles = Vec::new();
        let mut cores = BTreeSet::new();
        for one in family.iter().filter(|one| **one != leader) {
            let title = one.command_line().unwrap_or_default();
            if self.blueprint.is_engine_core(&title) {
                cores.insert(*one);
            }
            let short: String = title.chars().take(60).collect();
            titles.push(format!("{} ({short})", one.pid));
        }
        for core in cores.clone() {
            let below = sweep::families(&BTreeSet::from([core.pid]));
            cores.retain(|one| *one == core || !below.contains(one));
        }
        if cores.is_empty() {
            return Err(Failure::inconclusive(format!(
                "{name} has no engine core that could be told from its other processes"
            ))
            .expected("a descendant whose command line says that it is one")
            .found(match titles.is_empty() {
                true => "no descendants".to_owned(),
                false => titles.join(", "),
            }));
        }
        Ok(cores)
    }

    pub(super) fn child(&self, name: &str) -> Option<&Child> {
        self.children
            .iter()
            .find(|child| child.process.name == name)
    }

    /// The process of the plan called `name`, dead or alive.
    pub(super) fn child_mut(&mut self, name: &str) -> Result<&mut Child, Failure> {
        let names: Vec<String> = self.members().map(|one| one.name.clone()).collect();
        self.children
            .iter_mut()
            .find(|child| child.process.name == name)
            .ok_or_else(|| {
                Failure::inconclusive(format!("the stack has no process called {name}"))
                    .expected(names.join(", "))
            })
    }

    fn living(&mut self, name: &str) -> Result<&mut Child, Failure> {
        let child = self.child_mut(name)?;
        // Asked of the kernel: the news of its end may still be on its way.
        match child.lot.dead || !matches!(child.leader.ending(), Ok(None)) {
            false => Ok(child),
            true => {
                Err(Failure::inconclusive(format!("{name} is dead already"))
                    .hint("replace it first"))
            }
        }
    }
}

impl Child {
    /// Deals the blow and says when.
    fn hit(&mut self, part: Part, blow: Blow, targets: &[(Identity, OwnedFd)]) -> u64 {
        let signal = match blow {
            Blow::Kill => Signal::KILL,
            Blow::Stop => Signal::STOP,
            Blow::Continue => Signal::CONT,
        };
        // Before the signal: the end must not come first.
        self.lot.permitted = true;
        match blow {
            Blow::Kill => self.lot.struck = true,
            Blow::Stop => self.lot.stopped = true,
            // It did stand still; whether that harmed it is looked at when the lease ends.
            Blow::Continue => {}
        }
        let now = monotonic_ns();
        if part == Part::Whole {
            // Whoever is born meanwhile is of the group, too.
            let _ = self.leader.signal_group(signal);
        }
        for (_, pidfd) in targets {
            // Gone already, at the worst.
            let _ = pidfd_send_signal(pidfd, signal);
        }
        now
    }
}
