//! Whether the caches are large enough for what the story keeps in them.

use super::rounds;
use crate::cases::scene::Scene;
use crate::cases::seed::BLOCKS;
use crate::cases::takeover::Held;
use crate::failure::Failure;

/// Blocks by which a flood is larger than the caches that it empties.
pub(super) const SPARE: u64 = 8;

/// KVCR's tier has to hold what is to be loaded from it beside a whole flood, and what the `ways`
/// of a round add.
pub(super) fn for_local(scene: &Scene<'_>, ways: u64) -> Result<(), Failure> {
    let profile = &scene.config().profile;
    let page = scene.blocks().page_bytes.unwrap_or(u64::MAX);
    let host = profile.kvcr.primary_bytes / page.max(1);
    let flood = scene.device_blocks().max(host) + SPARE;
    // The last block of each of two fillers at the most is not full, and takes no slot.
    fits(
        scene,
        flood + (ways + 1) * each(scene),
        "a flood, and the prompts of a round",
    )
}

/// A pool has to hold every prompt of the dead worker: those of the rounds, and those of `deaths`.
pub(super) fn for_held(scene: &Scene<'_>, rounds: u64, deaths: &[Held]) -> Result<(), Failure> {
    let beside = deaths
        .iter()
        .map(|held| held.all().len() as u64)
        .sum::<u64>();
    let needed = rounds * each(scene) + beside * (BLOCKS + 1);
    fits(scene, needed, "every prompt that the Guard is to serve")
}

/// Blocks of a measured prompt and its answer.
fn each(scene: &Scene<'_>) -> u64 {
    scene.blocks().full(rounds::length(scene)) + 1
}

fn fits(scene: &Scene<'_>, needed: u64, what: &str) -> Result<(), Failure> {
    let slots = u64::from(scene.config().profile.kvcr.dram_slots);
    if needed <= slots {
        return Ok(());
    }
    Err(
        Failure::environment("KVCR's tier is too small for this arm")
            .expected(format!("kvcr.dram_slots of at least {needed}: {what}"))
            .found(slots)
            .hint("raise it (--dram-slots), or measure less (--perf-blocks, --repeats)"),
    )
}
