//! What the counters of two workers must say where a transfer may go more ways than one. Pure:
//! deltas in, checks out.

use super::super::flow::{Flow, bounded};
use crate::failure::Class;
use crate::geometry::{Bound, Geometry, Pages};
use crate::telemetry::kvcr::{Operation, PromptSource, Tier};
use crate::telemetry::{Delta, kvcr};
use crate::verdict::Check;

/// The target asked once for what the source does not hold. Both count that nothing came of it, once
/// for each request: the source said no, and the target did not wait for somebody who never answers.
///
/// A source that was not asked proves nothing: evidence is missing.
pub(super) fn refused(target: &Delta, source: &Delta) -> Vec<Check> {
    let requests = kvcr::requests_of_peers(source);
    let asked = requests.reading.exact().unwrap_or(0);
    vec![
        Check::counter_exactly("peer_was_asked", Class::Inconclusive, 1, &requests),
        Check::counter_exactly(
            "source_says_that_it_has_nothing",
            Class::Product,
            asked,
            &kvcr::failed_writes(source),
        ),
        Check::counter_exactly(
            "target_counts_that_nothing_came",
            Class::Product,
            asked,
            &kvcr::failed_deliveries(target),
        ),
    ]
}

/// Two equal requests reached the target at once.
#[derive(Clone, Copy, Debug)]
pub(super) struct Twice {
    /// Prompt tokens that both have beyond their hits.
    pub(super) computed: u64,
    /// Tokens that each hits.
    pub(super) hit: u64,
    pub(super) blocks: Geometry,
}

impl Twice {
    /// How often the target fetched the prompt's blocks: once for both, or once for each. Anything
    /// else reads as once, and its checks fail.
    pub(super) fn transfers(self, target: &Delta) -> u64 {
        let fetched = kvcr::blocks(target, Operation::RemoteDeliver);
        let both = self.pages(2).total();
        if fetched.reading.exact() == Some(both) {
            2
        } else {
            1
        }
    }

    /// Pages of so many transfers.
    fn pages(self, transfers: u64) -> Pages {
        let mut pages = Pages::default();
        for _ in 0..transfers {
            pages += self.blocks.pages_of_hit(self.hit);
        }
        pages
    }

    /// Whichever way it went, the target got whole hits, the source wrote exactly those, and the
    /// rest was computed. From which cache the second request took what the first had fetched is
    /// the engine's affair.
    pub(super) fn checks(self, target: &Delta, source: &Delta) -> Vec<Check> {
        let Self {
            computed, blocks, ..
        } = self;
        let transfers = self.transfers(target);
        let pages = self.pages(transfers);
        let moved = blocks.moved(pages);
        let exactly = Bound::Exactly;
        let mut checks: Vec<Check> = [
            (
                "tokens_computed",
                exactly(computed),
                kvcr::prompt_tokens(target, PromptSource::LocalCompute),
            ),
            (
                "blocks_from_peer",
                moved,
                kvcr::blocks(target, Operation::RemoteDeliver),
            ),
            (
                "bytes_delivered",
                blocks.bytes_of(moved),
                kvcr::read_bytes(target, Tier::Kvcr),
            ),
            (
                "blocks_delivered",
                exactly(0),
                kvcr::blocks(target, Operation::LocalDeliver),
            ),
            (
                "blocks_stored",
                exactly(0),
                kvcr::blocks(target, Operation::LocalFill),
            ),
        ]
        .into_iter()
        .map(|(name, expected, counter)| {
            let name = format!("{name}[worker1]");
            bounded(name, Class::Product, expected, &counter)
        })
        .collect();
        checks.push(self.tokens_reused(target));
        let written = Flow {
            written: pages,
            ..Flow::default()
        };
        checks.extend(written.checks(0, source, blocks));
        checks
    }

    fn tokens_reused(self, target: &Delta) -> Check {
        let name = "tokens_reused[worker1]";
        let expected = self.hit.saturating_mul(2);
        let device = kvcr::prompt_tokens(target, PromptSource::LocalCacheHit);
        let outside = kvcr::prompt_tokens(target, PromptSource::ExternalKvTransfer);
        match (device.reading.exact(), outside.reading.exact()) {
            (Some(device), Some(outside)) => {
                let reused = device.saturating_add(outside);
                Check::exactly(name, Class::Product, "tokens", expected, reused)
            }
            (None, _) => Check::counter_exactly(name, Class::Product, expected, &device),
            (_, None) => Check::counter_exactly(name, Class::Product, expected, &outside),
        }
    }
}

#[cfg(test)]
mod tests;
