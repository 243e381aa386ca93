//! What a worker's counters must say when blocks flow in a certain way. Pure: a delta in, checks
//! out. A story puts them together; several flows of one worker add up.
//!
//! Counters count pages: with a dense model a page is a block, with a hybrid one a hit stands on
//! state pages too ([`crate::geometry`]). Where the geometry is not configured, pages and bytes are
//! lower bounds, and each check says so.

mod pages;

use std::ops::AddAssign;

use crate::client::Observation;
use crate::failure::Class;
use crate::geometry::pages::NOT_CONFIGURED;
use crate::geometry::{Bound, Geometry, Pages};
use crate::telemetry::kvcr::{CacheSource, Operation, PromptSource, Tier};
use crate::telemetry::{Counted, Delta, kvcr};
use crate::verdict::Check;

const BYTES_TO_PEER: &str = "bytes_to_peer";

/// Blocks that an engine has filled and offloads when it has answered: the prompt's, and those that
/// its own tokens complete. The last token is sampled, and not computed any more. With a hybrid model
/// it offloads the prompt's alone (`docs/findings/hybrid.md`).
fn filled(seen: &Observation, blocks: Geometry) -> u64 {
    if blocks.state_groups.unwrap_or(0) > 0 {
        return blocks.full(seen.prompt_tokens);
    }
    blocks.full((seen.prompt_tokens + seen.completion_tokens).saturating_sub(1))
}

/// How one worker's pages and tokens must have moved between two readings of its counters.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Flow {
    /// Prompt tokens that were computed.
    pub(super) computed: u64,
    /// Prompt tokens that were not computed because pages came from KVCR's own tier or a peer.
    pub(super) outside: u64,
    /// Blocks that the engine still had in its device cache.
    pub(super) kept: u64,
    /// Pages that KVCR's own tier took in: those of new blocks, and of a new checkpoint.
    pub(super) stored: u64,
    /// Pages that KVCR's own tier gave to the engine.
    pub(super) delivered: Pages,
    /// Pages that a peer gave to the engine.
    pub(super) fetched: Pages,
    /// Pages that were written to a peer.
    pub(super) written: Pages,
}

impl AddAssign for Flow {
    fn add_assign(&mut self, other: Self) {
        self.computed += other.computed;
        self.outside += other.outside;
        self.kept += other.kept;
        self.stored += other.stored;
        self.delivered += other.delivered;
        self.fetched += other.fetched;
        self.written += other.written;
    }
}

impl Flow {
    /// A request that nothing was found for: all of it is computed, and what it fills is stored.
    pub(super) fn cold(seen: &Observation, blocks: Geometry) -> Self {
        Self::beyond(seen, 0, blocks)
    }

    /// A request of which the device cache still had the first `hit` tokens.
    pub(super) fn kept(seen: &Observation, hit: u64, blocks: Geometry) -> Self {
        Self {
            kept: blocks.full(hit),
            ..Self::beyond(seen, hit, blocks)
        }
    }

    /// A request of which KVCR's own tier gave the first `hit` tokens.
    pub(super) fn delivered(seen: &Observation, hit: u64, blocks: Geometry) -> Self {
        Self {
            outside: blocks.tokens_of(blocks.full(hit)),
            delivered: blocks.pages_of_hit(hit),
            ..Self::beyond(seen, hit, blocks)
        }
    }

    /// A request of which a peer gave the first `hit` tokens. A fetched block stays in the
    /// engine's caches; its own tier takes what it computed.
    pub(super) fn fetched(seen: &Observation, hit: u64, blocks: Geometry) -> Self {
        Self {
            outside: blocks.tokens_of(blocks.full(hit)),
            fetched: blocks.pages_of_hit(hit),
            ..Self::beyond(seen, hit, blocks)
        }
    }

    /// The other side of [`Self::fetched`].
    pub(super) fn written(hit: u64, blocks: Geometry) -> Self {
        Self {
            written: blocks.pages_of_hit(hit),
            ..Self::default()
        }
    }

    /// An answer may lie about its lengths: what is less than nothing is nothing, and the counters
    /// will not agree.
    fn beyond(seen: &Observation, hit: u64, blocks: Geometry) -> Self {
        Self {
            computed: seen.prompt_tokens.saturating_sub(hit),
            stored: filled(seen, blocks).saturating_sub(blocks.full(hit))
                + blocks.checkpoint(seen.prompt_tokens, hit),
            ..Self::default()
        }
    }

    /// A check for every counter that has to do with the flow of `worker`; with state groups, also
    /// checks that name what is wrong with the pages.
    pub(super) fn checks(self, worker: usize, delta: &Delta, blocks: Geometry) -> Vec<Check> {
        let exactly = Bound::Exactly;
        let mut outside = self.delivered;
        outside += self.fetched;
        // Whoever was asked nothing stores nothing.
        let asked = self.computed + self.outside > 0;
        let stored = if asked {
            blocks.stored(self.stored)
        } else {
            exactly(self.stored)
        };
        let [delivered, fetched, written, outside] =
            [self.delivered, self.fetched, self.written, outside].map(|pages| blocks.moved(pages));
        let claims: [(&str, Bound, Counted); 12] = [
            (
                "tokens_computed",
                exactly(self.computed),
                kvcr::prompt_tokens(delta, PromptSource::LocalCompute),
            ),
            (
                "tokens_from_device",
                exactly(blocks.tokens_of(self.kept)),
                kvcr::prompt_tokens(delta, PromptSource::LocalCacheHit),
            ),
            (
                "tokens_from_outside",
                exactly(self.outside),
                kvcr::prompt_tokens(delta, PromptSource::ExternalKvTransfer),
            ),
            (
                "tokens_from_host_tier",
                exactly(0),
                kvcr::cached_tokens(delta, CacheSource::Host),
            ),
            (
                "blocks_stored",
                stored,
                kvcr::blocks(delta, Operation::LocalFill),
            ),
            (
                "bytes_stored",
                blocks.bytes_of(stored),
                kvcr::write_bytes(delta, Tier::Kvcr),
            ),
            (
                "blocks_delivered",
                delivered,
                kvcr::blocks(delta, Operation::LocalDeliver),
            ),
            (
                "blocks_from_peer",
                fetched,
                kvcr::blocks(delta, Operation::RemoteDeliver),
            ),
            (
                "blocks_fetched_into_pool",
                exactly(0),
                kvcr::blocks(delta, Operation::RemoteFetch),
            ),
            (
                "bytes_delivered",
                blocks.bytes_of(outside),
                kvcr::read_bytes(delta, Tier::Kvcr),
            ),
            (
                "blocks_to_peer",
                written,
                kvcr::blocks(delta, Operation::SourceWrite),
            ),
            (
                BYTES_TO_PEER,
                blocks.bytes_of(written),
                kvcr::bytes(delta, Operation::SourceWrite),
            ),
        ];
        let ways = [
            ("own_tier", self.delivered, Operation::LocalDeliver),
            ("from_peer", self.fetched, Operation::RemoteDeliver),
            ("to_peer", self.written, Operation::SourceWrite),
        ];
        let named = ways.into_iter().flat_map(|(way, needed, operation)| {
            let at = format!("worker{worker}.{way}");
            pages::checks(&at, needed, &kvcr::blocks(delta, operation), blocks)
        });
        let counted = claims.into_iter().map(|(name, expected, counter)| {
            let class = class(name, &counter, expected.least());
            bounded(format!("{name}[worker{worker}]"), class, expected, &counter)
        });
        // What is wrong with the pages is said before how many there were.
        named.chain(counted).collect()
    }
}

/// A check that a counter rose by what `expected` says. One that is only bounded from below says
/// why.
pub(super) fn bounded(
    name: impl Into<String>,
    class: Class,
    expected: Bound,
    counter: &Counted,
) -> Check {
    match expected {
        Bound::Exactly(count) => Check::counter_exactly(name, class, count, counter),
        Bound::AtLeast(least) => {
            let mut check = Check::counter_at_least(name, class, least, counter);
            check.expected = format!("{} ({NOT_CONFIGURED})", check.expected);
            check
        }
    }
}

/// The source's bytes come from NIXL's telemetry, whose errors KVCR swallows: blocks without a
/// single byte are telemetry that is missing, not a mismatch.
fn class(name: &str, counter: &Counted, expected: u64) -> Class {
    let silent = counter.reading.exact() == Some(0);
    if name == BYTES_TO_PEER && expected > 0 && silent {
        Class::Inconclusive
    } else {
        Class::Product
    }
}

#[cfg(test)]
mod tests;
