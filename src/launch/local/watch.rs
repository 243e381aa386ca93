//! Who ended, when, and whether somebody had asked for it.

use std::io;

use super::Local;
use crate::failure::{Class, Failure};
use crate::stack::clock::monotonic_ns;
use crate::stack::harm::Death;
use crate::stack::process::{self, Ending, Leader};
use crate::stack::sweep::Identity;

/// A process that ended.
#[derive(Debug)]
pub(super) struct Exit {
    /// Name in the plan of what it was part of.
    pub(super) process: String,
    who: Identity,
    /// How a leader ended.
    ending: Option<Ending>,
    monotonic_ns: u64,
}

/// What an exit means for the group.
#[derive(Debug)]
pub(super) enum Meaning {
    /// It was asked for.
    Permitted(Death),
    /// A replacement ended before it was ready.
    Starting(Death),
    /// Nobody asked for it: the group is not what it was.
    End(Failure),
}

impl Local {
    /// Has the end of a new leader reported.
    pub(super) fn watch_leader(&self, name: &str, leader: &Leader) -> io::Result<()> {
        let exit = leader.exit()?;
        let exits = self.exits.0.clone();
        let (process, who) = (name.to_owned(), leader.identity());
        tokio::spawn(async move {
            if let Ok(ending) = exit.await {
                let _ = exits.send(Exit {
                    process,
                    who,
                    ending: Some(ending),
                    monotonic_ns: monotonic_ns(),
                });
            }
        });
        Ok(())
    }

    /// Has the end of somebody reported who is about to be hit.
    pub(super) fn watch_member(&self, name: &str, who: Identity) {
        // One that is gone already is not hit either.
        let Ok(gone) = process::gone(who) else { return };
        let exits = self.exits.0.clone();
        let process = name.to_owned();
        tokio::spawn(async move {
            if gone.await.is_ok() {
                let _ = exits.send(Exit {
                    process,
                    who,
                    ending: None,
                    monotonic_ns: monotonic_ns(),
                });
            }
        });
    }

    /// Takes in an end.
    pub(super) fn take_in(&mut self, exit: Exit) -> Meaning {
        let Exit {
            process,
            who,
            ending,
            monotonic_ns,
        } = exit;
        let death = Death {
            process,
            who,
            ending,
            monotonic_ns,
        };
        let starting = self.jobs.starts(&death.process);
        match self
            .children
            .iter_mut()
            .find(|child| child.identity() == who)
        {
            // Somebody of a process that was hit, or the leader of one that was replaced since.
            None => Meaning::Permitted(death),
            Some(child) => {
                child.lot.dead = true;
                if starting {
                    Meaning::Starting(death)
                } else if child.lot.permitted {
                    Meaning::Permitted(death)
                } else {
                    Meaning::End(self.explain(&death.process))
                }
            }
        }
    }

    /// Why the process of this name is not there any more, or not ready.
    pub(super) fn explain(&self, name: &str) -> Failure {
        let Some(child) = self.child(name) else {
            return Failure::inconclusive(format!("{name} ended, and nobody started it"));
        };
        let ending = child.leader.ending().ok().flatten();
        let text = ending.map(|ending| ending.to_string());
        let failure = self
            .blueprint
            .explain(&child.process, text.as_deref(), &child.log);
        from_outside(failure, name, ending)
    }
}

/// A process that somebody else killed says nothing about the product.
fn from_outside(mut failure: Failure, name: &str, ending: Option<Ending>) -> Failure {
    if let Some(Ending::Signal(signal @ (2 | 9 | 15))) = ending {
        failure.class = Class::Environment;
        failure.what = format!("{name} was killed by signal {signal} from outside");
        failure
            .hint
            .get_or_insert_with(|| "see `dmesg` for the out-of-memory killer".to_owned());
    }
    failure
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_from_outside_is_the_environments() {
        let blamed = Failure::product("worker0 died");
        let killed = from_outside(blamed.clone(), "worker0", Some(Ending::Signal(9)));
        assert_eq!(killed.class, Class::Environment);
        assert!(killed.what.contains("signal 9 from outside"));
        assert_eq!(
            from_outside(blamed.clone(), "worker0", Some(Ending::Signal(11))),
            blamed
        );
        assert_eq!(
            from_outside(blamed.clone(), "worker0", Some(Ending::Code(1))),
            blamed
        );
    }
}
