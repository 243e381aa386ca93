//! What the counters of a worker must say in each arm of TC-01. Pure: a delta in, checks out.

use super::super::flow::bounded;
use crate::failure::Class;
use crate::geometry::{Bound, Geometry};
use crate::telemetry::kvcr::{CacheSource, Operation, PromptSource, Tier};
use crate::telemetry::{Counted, Delta, kvcr};
use crate::verdict::Check;

/// Nothing was found anywhere: every token of `computed` was computed. The positive control: KVCR
/// is on, and took all `stored` full blocks into its own tier.
pub(super) fn cold(worker: usize, delta: &Delta, computed: u64, stored: Bound) -> Vec<Check> {
    let mut checks = vec![
        exactly(
            &format!("every_token_computed[worker{worker}]"),
            computed,
            &kvcr::prompt_tokens(delta, PromptSource::LocalCompute),
        ),
        bounded(
            format!("stored_in_own_tier[worker{worker}]"),
            Class::Product,
            stored,
            &kvcr::blocks(delta, Operation::LocalFill),
        ),
    ];
    checks.extend(nothing_delivered(worker, delta));
    checks
}

/// `hit` tokens came from the device cache, and none from anywhere else.
pub(super) fn warm_device(worker: usize, delta: &Delta, hit: u64) -> Vec<Check> {
    let mut checks = vec![exactly(
        "hit_in_device_cache",
        hit,
        &kvcr::prompt_tokens(delta, PromptSource::LocalCacheHit),
    )];
    checks.extend(nothing_delivered(worker, delta));
    checks
}

/// `hit` tokens came from KVCR's own tier, to the block and the byte, and none from a cache in
/// front of it or from a peer.
pub(super) fn warm_tier(delta: &Delta, blocks: Geometry, hit: u64) -> Vec<Check> {
    let pages = blocks.moved(blocks.pages_of_hit(hit));
    let exactly = Bound::Exactly;
    [
        (
            "hit_outside_the_engine",
            exactly(hit),
            kvcr::prompt_tokens(delta, PromptSource::ExternalKvTransfer),
        ),
        (
            "not_from_the_device",
            exactly(0),
            kvcr::cached_tokens(delta, CacheSource::Device),
        ),
        (
            "not_from_the_host_tier",
            exactly(0),
            kvcr::cached_tokens(delta, CacheSource::Host),
        ),
        (
            "delivered_by_own_tier",
            pages,
            kvcr::blocks(delta, Operation::LocalDeliver),
        ),
        (
            "bytes_of_own_tier",
            blocks.bytes_of(pages),
            kvcr::read_bytes(delta, Tier::Kvcr),
        ),
        (
            "no_peer_asked",
            exactly(0),
            kvcr::blocks(delta, Operation::RemoteDeliver),
        ),
    ]
    .into_iter()
    .map(|(name, expected, counter)| bounded(name, Class::Product, expected, &counter))
    .collect()
}

/// The negative control: no tier and no peer gave anything.
fn nothing_delivered(worker: usize, delta: &Delta) -> Vec<Check> {
    let operations = [
        Operation::LocalDeliver,
        Operation::RemoteDeliver,
        Operation::SourceWrite,
    ];
    let mut checks: Vec<Check> = operations
        .into_iter()
        .map(|operation| {
            let name = format!("no_{}[worker{worker}]", operation.label());
            exactly(&name, 0, &kvcr::blocks(delta, operation))
        })
        .collect();
    checks.push(exactly(
        &format!("no_external_hit[worker{worker}]"),
        0,
        &kvcr::prompt_tokens(delta, PromptSource::ExternalKvTransfer),
    ));
    checks
}

fn exactly(name: &str, expected: u64, counter: &Counted) -> Check {
    Check::counter_exactly(name, Class::Product, expected, counter)
}

#[cfg(test)]
mod tests;
