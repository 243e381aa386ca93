//! Whether a process of the stack died, asked right after a request failed.
//!
//! The client and the supervisor learn of a death at about the same time, and a verdict on the
//! failed request alone would blame the product for it. So who lived when the lease began is
//! written down, and where somebody of them is gone the supervisor gets the time to say why.
//! Whom the lease itself harmed does not count: it knows.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;

use super::lease::Lease;
use super::sweep::{self, Identity};
use super::wait::{self, Look};
use crate::failure::Failure;

/// A dying process closes its connections a moment before it counts as dead.
const MOMENT: Duration = Duration::from_millis(500);
/// From a death that was seen until the supervisor has read the log and said so.
const EXPLAINED_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// Who lived when a lease began: the processes of its stack and their descendants, by name in the
/// plan.
#[derive(Clone, Debug)]
pub struct Living(Vec<(String, BTreeSet<Identity>)>);

impl Living {
    /// The processes of a lease's stack as they are now.
    #[must_use]
    pub fn of(lease: &Lease) -> Self {
        let families = lease.stack().processes.iter().map(|process| {
            let family = sweep::families(&BTreeSet::from([process.pid]));
            (process.name.clone(), family)
        });
        Self(families.collect())
    }

    /// Why the stack is not what it was, if it is not; waits only where somebody is missing.
    #[must_use]
    pub fn broken(&self, lease: &Lease) -> Option<Failure> {
        let harmed = lease.harmed();
        let spared: Vec<Identity> = self
            .0
            .iter()
            .filter(|(name, _)| !harmed.contains(name))
            .flat_map(|(_, family)| family)
            .copied()
            .collect();
        let anybody_missing = self.wait(MOMENT, || {
            (lease.broken().is_some() || spared.iter().any(|one| !one.is_alive())).then_some(())
        });
        match anybody_missing {
            Some(()) => self.wait(EXPLAINED_WITHIN, || lease.broken()),
            None => None,
        }
    }

    fn wait<T>(&self, bound: Duration, mut found: impl FnMut() -> Option<T>) -> Option<T> {
        wait::until_blocking(bound, LOOK_EVERY, || match found() {
            Some(value) => Look::<_, Infallible>::Ready(value),
            None => Look::NotYet(String::new()),
        })
        .ok()
    }
}
