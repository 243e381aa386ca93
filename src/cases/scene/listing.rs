//! Whether the front door still lists a worker that died, and since when it does not.
//!
//! What a listing has to say of a worker that comes up is [`crate::engine::readiness`]'s.

use std::convert::Infallible;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::Value;
use tokio::task::JoinHandle;

use super::{Scene, millis};
use crate::client::Transport;
use crate::engine::readiness::lists_instance;
use crate::failure::{Class, Failure};
use crate::stack::clock::monotonic_ns;
use crate::stack::wait::{self, Look};
use crate::verdict::Check;

/// Between two looks at the listing: times are taken from them.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The most for one look.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// Looks in a row that have to miss a worker before it is gone. One listing without a worker that
/// was there again in the next was seen once in some 50,000 looks.
const MISSED: u32 = 10;

/// A worker that is expected to leave the listing.
#[derive(Debug)]
struct Leaving {
    id: u64,
    /// When the first look of those that missed it was.
    since: u64,
    missed: u32,
}

impl Leaving {
    fn new(id: u64) -> Self {
        let (since, missed) = (0, 0);
        Self { id, since, missed }
    }

    /// Takes what the front door said at `at`; since when the worker is gone, once it is.
    fn look(&mut self, health: &Value, at: u64) -> Look<u64, Infallible> {
        if lists_instance(health, self.id) {
            self.missed = 0;
            return Look::NotYet("listed".to_owned());
        }
        if self.missed == 0 {
            self.since = at;
        }
        self.missed += 1;
        if self.missed < MISSED {
            return Look::NotYet(format!("missed by {} looks", self.missed));
        }
        Look::Ready(self.since)
    }
}

impl Scene<'_> {
    /// Watches until the front door no longer lists `worker` as it is known now; since when
    /// (`CLOCK_MONOTONIC`, ns), or `None` if it lists it to the end.
    ///
    /// # Errors
    /// Environment, without a client.
    pub fn watch_listing(&self, worker: usize) -> Result<JoinHandle<Option<u64>>, Failure> {
        let id = self.worker(worker)?.instance_id;
        let transport = Transport::new(LOOK_DEADLINE)?;
        let url = format!("{}/health", self.stack.plan.frontend_url);
        let bound = self.patience();
        Ok(tokio::spawn(async move {
            let leaving = Mutex::new(Leaving::new(id));
            let gone = wait::until(bound, LOOK_EVERY, || async {
                match transport.get_json(&url).await {
                    Ok(health) => {
                        let at = monotonic_ns();
                        let leaving = leaving.lock();
                        leaving
                            .unwrap_or_else(PoisonError::into_inner)
                            .look(&health, at)
                    }
                    Err(failure) => Look::NotYet(failure.to_string()),
                }
            });
            gone.await.ok()
        }))
    }

    /// Waits until the front door no longer lists a dead worker, which [`Self::watch_listing`]
    /// watched; leaves the check that it does not. Since when.
    ///
    /// # Errors
    /// Inconclusive, if nobody watched to the end.
    pub async fn unlisted(
        &mut self,
        listing: JoinHandle<Option<u64>>,
        what: &str,
    ) -> Result<Option<u64>, Failure> {
        let began = Instant::now();
        let unlisted = listing.await.map_err(|error| {
            Failure::inconclusive("nobody watched the listing to its end").found(error)
        })?;
        self.told.timings.settle += millis(began);
        self.check(Check::new(
            format!("dead_worker_unlisted[{what}]"),
            Class::Product,
            unlisted.is_some(),
            "the front door no longer lists the dead worker",
            if unlisted.is_some() {
                "it does not"
            } else {
                "it still does"
            },
        ));
        Ok(unlisted)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn listing(ids: &[u64]) -> Value {
        let instance = |id: &u64| json!({"endpoint": "generate", "instance_id": id});
        json!({"instances": ids.iter().map(instance).collect::<Vec<_>>()})
    }

    /// What comes of one look after the other, the first at 0.
    fn looks(listings: &[Value]) -> Option<u64> {
        let mut leaving = Leaving::new(7);
        let mut taken = (0..).zip(listings).map(|(at, one)| leaving.look(one, at));
        taken.find_map(|look| match look {
            Look::Ready(at) => Some(at),
            _ => None,
        })
    }

    #[test]
    fn a_worker_is_gone_since_the_first_look_that_missed_it() {
        let mut seen = vec![listing(&[7, 8]); 3];
        seen.extend(vec![listing(&[8]); MISSED as usize]);
        assert_eq!(looks(&seen), Some(3));
        assert_eq!(looks(&seen[..seen.len() - 1]), None);
    }

    #[test]
    fn a_worker_that_one_listing_forgot_is_there() {
        let mut seen = vec![listing(&[7, 8]), listing(&[]), listing(&[7, 8])];
        assert_eq!(looks(&seen), None);
        seen.extend(vec![listing(&[8]); MISSED as usize - 1]);
        seen.push(listing(&[7, 8]));
        assert_eq!(looks(&seen), None);
        seen.extend(vec![listing(&[8, 9]); MISSED as usize]);
        assert_eq!(looks(&seen), Some(3 + u64::from(MISSED)));
    }
}
