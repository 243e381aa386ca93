//! What a worker's counters must say when blocks flow in a certain way. Pure: a delta in, checks
//! out. A story puts them together; several flows of one worker add up.

use std::ops::AddAssign;

use crate::client::Observation;
use crate::failure::Class;
use crate::geometry::Blocks;
use crate::telemetry::kvcr::{CacheSource, Operation, PromptSource, Tier};
use crate::telemetry::{Counted, Delta, kvcr};
use crate::verdict::Check;

const BYTES_TO_PEER: &str = "bytes_to_peer";

/// Blocks that an engine has filled when it has answered: the prompt's, and those that its own
/// tokens complete. The last token is sampled, and not computed any more.
pub(super) fn filled(seen: &Observation, blocks: Blocks) -> u64 {
    blocks.full((seen.prompt_tokens + seen.completion_tokens).saturating_sub(1))
}

/// How one worker's blocks and tokens must have moved between two pages. Every field is exact.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct Flow {
    /// Prompt tokens that were computed.
    pub(super) computed: u64,
    /// Blocks that the engine still had in its device cache.
    pub(super) kept: u64,
    /// Blocks that KVCR's own tier took in.
    pub(super) stored: u64,
    /// Blocks that KVCR's own tier gave to the engine.
    pub(super) delivered: u64,
    /// Blocks that a peer gave to the engine.
    pub(super) fetched: u64,
    /// Blocks that were written to a peer.
    pub(super) written: u64,
}

impl AddAssign for Flow {
    fn add_assign(&mut self, other: Self) {
        self.computed += other.computed;
        self.kept += other.kept;
        self.stored += other.stored;
        self.delivered += other.delivered;
        self.fetched += other.fetched;
        self.written += other.written;
    }
}

impl Flow {
    /// A request that nothing was found for: all of it is computed, and what it fills is stored.
    pub(super) fn cold(seen: &Observation, blocks: Blocks) -> Self {
        Self::beyond(seen, 0, blocks)
    }

    /// A request of which the device cache still had the first `hit` tokens.
    pub(super) fn kept(seen: &Observation, hit: u64, blocks: Blocks) -> Self {
        Self {
            kept: blocks.full(hit),
            ..Self::beyond(seen, hit, blocks)
        }
    }

    /// A request of which KVCR's own tier gave the first `hit` tokens.
    pub(super) fn delivered(seen: &Observation, hit: u64, blocks: Blocks) -> Self {
        Self {
            delivered: blocks.full(hit),
            ..Self::beyond(seen, hit, blocks)
        }
    }

    /// A request of which a peer gave the first `hit` tokens. A fetched block stays in the
    /// engine's caches; its own tier takes what it computed.
    pub(super) fn fetched(seen: &Observation, hit: u64, blocks: Blocks) -> Self {
        Self {
            fetched: blocks.full(hit),
            ..Self::beyond(seen, hit, blocks)
        }
    }

    /// The other side of [`Self::fetched`].
    pub(super) fn written(hit: u64, blocks: Blocks) -> Self {
        Self {
            written: blocks.full(hit),
            ..Self::default()
        }
    }

    /// An answer may lie about its lengths: what is less than nothing is nothing, and the counters
    /// will not agree.
    fn beyond(seen: &Observation, hit: u64, blocks: Blocks) -> Self {
        Self {
            computed: seen.prompt_tokens.saturating_sub(hit),
            stored: filled(seen, blocks).saturating_sub(blocks.full(hit)),
            ..Self::default()
        }
    }

    /// A check for every counter that has to do with the flow of `worker`.
    pub(super) fn checks(self, worker: usize, delta: &Delta, blocks: Blocks) -> Vec<Check> {
        let outside = self.delivered + self.fetched;
        let claims: [(&str, u64, Counted); 12] = [
            (
                "tokens_computed",
                self.computed,
                kvcr::prompt_tokens(delta, PromptSource::LocalCompute),
            ),
            (
                "tokens_from_device",
                blocks.tokens_of(self.kept),
                kvcr::prompt_tokens(delta, PromptSource::LocalCacheHit),
            ),
            (
                "tokens_from_outside",
                blocks.tokens_of(outside),
                kvcr::prompt_tokens(delta, PromptSource::ExternalKvTransfer),
            ),
            (
                "tokens_from_host_tier",
                0,
                kvcr::cached_tokens(delta, CacheSource::Host),
            ),
            (
                "blocks_stored",
                self.stored,
                kvcr::blocks(delta, Operation::LocalFill),
            ),
            (
                "bytes_stored",
                blocks.bytes_of(self.stored),
                kvcr::write_bytes(delta, Tier::Kvcr),
            ),
            (
                "blocks_delivered",
                self.delivered,
                kvcr::blocks(delta, Operation::LocalDeliver),
            ),
            (
                "blocks_from_peer",
                self.fetched,
                kvcr::blocks(delta, Operation::RemoteDeliver),
            ),
            (
                "blocks_fetched_into_pool",
                0,
                kvcr::blocks(delta, Operation::RemoteFetch),
            ),
            (
                "bytes_delivered",
                blocks.bytes_of(outside),
                kvcr::read_bytes(delta, Tier::Kvcr),
            ),
            (
                "blocks_to_peer",
                self.written,
                kvcr::blocks(delta, Operation::SourceWrite),
            ),
            (
                BYTES_TO_PEER,
                blocks.bytes_of(self.written),
                kvcr::bytes(delta, Operation::SourceWrite),
            ),
        ];
        claims
            .into_iter()
            .map(|(name, expected, counter)| {
                let class = class(name, &counter, expected);
                Check::counter_exactly(format!("{name}[worker{worker}]"), class, expected, &counter)
            })
            .collect()
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
