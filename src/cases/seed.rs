//! A worker that holds prompts, and a router that knows it: how every story of peers begins.

use super::scene::Scene;
use crate::failure::Failure;
use crate::prompt::Prompt;

/// Blocks of a seeded prompt.
pub(super) const BLOCKS: u64 = 8;

/// Length of a seeded prompt: its last block is not full, so that a hit leaves something to do.
pub(super) fn seeded_length(scene: &Scene<'_>) -> u64 {
    scene.tokens(BLOCKS) + scene.tokens(1) / 2
}

/// Has `worker` compute each prompt, and waits until the router knows that it holds them.
pub(super) async fn seed(
    scene: &mut Scene<'_>,
    seeds: &[(String, &Prompt)],
    worker: usize,
) -> Result<(), Failure> {
    let blocks = scene.blocks();
    let known = scene.router_events().await?;
    let mut stored = 0;
    for (label, prompt) in seeds {
        let seen = scene.ask(label, prompt, worker).await?;
        scene.hit(&seen, 0..=0);
        stored += blocks.full(seen.prompt_tokens);
    }
    scene.router_knows(known, stored).await
}
