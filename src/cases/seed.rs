//! A worker that holds prompts, and a router that knows it: how every story of peers begins.

use std::time::Instant;

use super::scene::Scene;
use crate::failure::{Class, Failure};
use crate::prompt::Prompt;
use crate::verdict::Check;

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

/// `count` prompts of that length, called `role` and their number.
pub(super) fn lot(scene: &Scene<'_>, role: &str, count: usize) -> Vec<(String, Prompt)> {
    let length = seeded_length(scene);
    let labels = (0..count).map(|number| format!("{role}{number}"));
    labels
        .map(|label| {
            let prompt = scene.prompt(&label, length);
            (label, prompt)
        })
        .collect()
}

/// The same prompts, as they are asked.
pub(super) fn labelled(lot: &[(String, Prompt)]) -> Vec<(&str, &Prompt)> {
    let all = lot.iter();
    all.map(|(label, prompt)| (label.as_str(), prompt))
        .collect()
}

/// [`seed`]s each of them, under its label and `.seed`.
pub(super) async fn seed_each(
    scene: &mut Scene<'_>,
    prompts: &[(&str, &Prompt)],
    worker: usize,
) -> Result<(), Failure> {
    let seeds: Vec<_> = prompts
        .iter()
        .map(|(label, prompt)| (format!("{label}.seed"), *prompt))
        .collect();
    seed(scene, &seeds, worker).await
}

/// Hinted requests of which one has to be served by a peer that was started again: the second was,
/// or none of ten (`docs/findings/guard.md`).
const INTRODUCTIONS: usize = 4;

/// Has `source` serve `target` once, where one of the stack's workers is not the one of its
/// bring-up: the first transfer between two of which one is new is refused, and the next one is
/// not. Leaves the check `name` that it came to a transfer; whether it did, or need not. `role`
/// tells several meetings of one arm apart.
pub(super) async fn meet(
    scene: &mut Scene<'_>,
    name: &str,
    role: &str,
    source: usize,
    target: usize,
) -> Result<bool, Failure> {
    if !scene.has_replacements() {
        return Ok(true);
    }
    scene.expect_lines_of_strangers();
    let began = Instant::now();
    let prompts = lot(
        scene,
        &format!("{role}meeting_worker{source}_"),
        INTRODUCTIONS,
    );
    let mut words = Vec::new();
    let mut served = false;
    // One by one: what a router knew before it took notice of a worker may stay unhinted.
    for (label, prompt) in &prompts {
        seed_each(scene, &[(label, prompt)], source).await?;
        let attempt = scene.attempt(label, prompt, target).await?;
        words.push(attempt.words());
        let seen = attempt.outcome.as_ref().ok();
        served = seen.is_some_and(|seen| seen.cached_tokens.is_some_and(|cached| cached > 0));
        if served {
            break;
        }
    }
    let words = words.join("; ");
    scene.note(format!(
        "a worker was replaced, so worker{source} and worker{target} met first, in {} ms: {words}",
        began.elapsed().as_millis()
    ));
    scene.check(Check::new(
        format!("{name}[{role}worker{source}]"),
        Class::Product,
        served,
        format_args!(
            "one of {INTRODUCTIONS} hinted requests is served by a peer that was replaced"
        ),
        words,
    ));
    Ok(served)
}

/// [`meet`] for stories that can do nothing about it. From then on nothing is forgiven.
pub(super) async fn introduce(
    scene: &mut Scene<'_>,
    role: &str,
    source: usize,
    target: usize,
) -> Result<(), Failure> {
    let met = meet(scene, "peers_meet_again", role, source, target).await;
    met.map(drop)
}
