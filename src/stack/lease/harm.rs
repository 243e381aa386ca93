//! What only the exclusive holder of a lease may ask for: blows, permissions, replacements.
//!
//! Every call here ends when the supervisor has answered, or with the reason why it never will:
//! the stack is broken, or the supervisor gone. Whoever drops the future only stops waiting.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{LOOK_EVERY, Lease, MARGIN, too_late};
use crate::failure::Failure;
use crate::stack::harm::{Blow, Changes, Death, Deed, Done, Part, Replaced, Struck};
use crate::stack::protocol::Ask;
use crate::stack::sweep::Identity;
use crate::stack::wait::Patience;

/// The supervisor answers a blow at once; a machine that stands still takes a while.
const AT_ONCE: Duration = Duration::from_secs(60);

impl Lease {
    /// Deals `blow` to `part` of a process of the plan. From then on its end is data
    /// ([`Self::deaths`]), not the end of the stack.
    ///
    /// # Errors
    /// Inconclusive, if the lease is not exclusive, there is no such process or part, or it is
    /// not alive; the stack's failure, if it is broken.
    pub async fn strike(&self, process: &str, part: Part, blow: Blow) -> Result<Struck, Failure> {
        let deed = Deed::Strike {
            process: process.to_owned(),
            part,
            blow,
        };
        match self.ask(deed, AT_ONCE).await? {
            Done::Struck(struck) => Ok(struck),
            other => Err(not_meant(&other)),
        }
    }

    /// Takes the end of `process` for data from now on: it may follow somebody who is struck.
    ///
    /// # Errors
    /// As [`Self::strike`].
    pub async fn permit(&self, process: &str) -> Result<(), Failure> {
        let deed = Deed::Permit {
            process: process.to_owned(),
        };
        match self.ask(deed, AT_ONCE).await? {
            Done::Permitted => Ok(()),
            other => Err(not_meant(&other)),
        }
    }

    /// Starts `process` of the plan again, on the same ports, sockets and owner id except for
    /// `changes`, and waits until it is ready as at bring-up, or until it ends. What is left of
    /// the old one is killed and waited for, by pid. Several can be replaced side by side.
    ///
    /// # Errors
    /// As [`Self::strike`]; Inconclusive also if the process runs and was not struck; Environment
    /// if the replacement neither becomes ready nor ends in time.
    pub async fn replace(&self, process: &str, changes: Changes) -> Result<Replaced, Failure> {
        let deed = Deed::Replace {
            process: process.to_owned(),
            changes,
        };
        match self.ask(deed, self.limit + MARGIN).await? {
            Done::Replaced(replaced) => Ok(replaced),
            other => Err(not_meant(&other)),
        }
    }

    /// Deaths that were permitted and seen since the lease began, in the order in which they
    /// were seen. Does not block.
    pub fn deaths(&self) -> Vec<Death> {
        let mut heard = self.heard();
        self.take_in(&mut heard);
        heard.deaths.clone()
    }

    /// Waits until the supervisor has seen the end of `who`, which [`Self::strike`] returned: one
    /// that was hit, or the leader.
    ///
    /// # Errors
    /// Inconclusive, if it did not end within `bound`; the stack's failure, if it is broken.
    pub async fn death_of(&self, who: Identity, bound: Duration) -> Result<Death, Failure> {
        let mut patience = Patience::new(bound);
        loop {
            let spent = patience.spent();
            let seen = self.deaths().into_iter().find(|death| death.who == who);
            if let Some(death) = seen {
                return Ok(death);
            }
            if let Some(failure) = self.broken() {
                return Err(failure);
            }
            if spent {
                return Err(
                    Failure::inconclusive(format!("process {} did not end", who.pid))
                        .expected(format!("its end within {} s", bound.as_secs())),
                );
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Names of the processes that were struck, permitted to end or replaced on this lease.
    #[must_use]
    pub fn harmed(&self) -> BTreeSet<String> {
        self.heard().harmed.clone()
    }

    async fn ask(&self, deed: Deed, bound: Duration) -> Result<Done, Failure> {
        let number = {
            let mut heard = self.heard();
            heard.harmed.insert(deed.process().to_owned());
            heard.next_number()
        };
        // Where nobody listens any more, what was said last, or that nothing was, is heard below.
        let _ = self.wire.say(&Ask::Harm { number, deed });
        let mut patience = Patience::new(bound);
        loop {
            let spent = patience.spent();
            let answer = {
                let mut heard = self.heard();
                self.take_in(&mut heard);
                let done = heard.done.remove(&number).map(Ok);
                done.or_else(|| heard.broken.clone().map(Err))
            };
            match answer {
                Some(Ok(Done::Failed { failure })) | Some(Err(failure)) => return Err(failure),
                Some(Ok(done)) => return Ok(done),
                None if spent => return Err(too_late(bound, "an answer of the supervisor")),
                None => tokio::time::sleep(LOOK_EVERY).await,
            }
        }
    }
}

fn not_meant(done: &Done) -> Failure {
    Failure::inconclusive("the supervisor answers something else than it was asked")
        .found(format!("{done:?}"))
}
