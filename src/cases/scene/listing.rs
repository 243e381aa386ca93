//! Whether the front door still lists a worker that died, and since when it does not.
//!
//! What a listing has to say of a worker that comes up is [`crate::engine::readiness`]'s.

use std::convert::Infallible;
use std::time::{Duration, Instant};

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
            let gone = wait::until(bound, LOOK_EVERY, || async {
                match transport.get_json(&url).await {
                    Ok(health) if !lists_instance(&health, id) => Look::Ready(monotonic_ns()),
                    Ok(_) => Look::<_, Infallible>::NotYet("listed".to_owned()),
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
