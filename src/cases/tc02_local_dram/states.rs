//! TC-02 with a hybrid model: a hit is worth as much as the state at its end.
//!
//! A prefix can be used only as far as the engine kept its state, so what is shared and what can be
//! reused are different lengths here. How far, the KVCR-off engine says; what KVCR delivers must be
//! the pages of that hit: neither fewer (a state is missing) nor more (pages nobody can use,
//! dynamo#16794).

use super::super::flow::Flow;
use super::super::scene::Scene;
use super::super::seed::{BLOCKS, seeded_length};
use super::others_are_idle;
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::prompt::Prompt;
use crate::verdict::Check;

/// Blocks of a shared section.
const SECTION: u64 = 2;

/// What one story asks of one worker.
struct Sequence<'a> {
    /// Asked first, in this order.
    stored: &'a [(&'a str, &'a Prompt)],
    /// Asked after everything was evicted.
    asked: (&'a str, &'a Prompt),
    /// Blocks whose attention pages the tier holds by then beyond the hit, so that they are not
    /// stored again.
    known: u64,
}

/// Stores, evicts, asks: what comes back is what the reference reuses, to the page.
async fn comes_back(scene: &mut Scene<'_>, sequence: Sequence<'_>) -> Result<(), Failure> {
    let blocks = scene.blocks();
    let (label, prompt) = sequence.asked;
    scene.reference(&[(label, prompt)]).await?;
    let all = [sequence.stored, &[sequence.asked]].concat();
    let reused = scene.reference_reuse(&all).await?;
    let hit = reused[all.len() - 1];
    reuses_something(scene, hit);

    let mut stored = 0;
    for (label, prompt) in sequence.stored {
        let seen = scene.ask(label, prompt, 0).await?;
        stored += blocks.full(seen.prompt_tokens);
    }
    scene.evict("filler", 0, stored).await?;
    let before = scene.counters("evicted").await?;
    let seen = scene.ask(label, prompt, 0).await?;
    let deltas = scene.since(&before, "loaded").await?;
    scene.answers_as_reference(label, &seen);
    scene.hit_as_reused(&seen, hit);
    let mut flow = Flow::delivered(&seen, hit, blocks);
    flow.stored = flow.stored.saturating_sub(sequence.known);
    scene.checks(flow.checks(0, deltas.worker(0), blocks));
    others_are_idle(scene, &deltas);
    Ok(())
}

/// A reference that reuses nothing of what it kept a state of has no say in a hybrid hit.
fn reuses_something(scene: &mut Scene<'_>, hit: u64) {
    scene.check(Check::at_least(
        "reference_reuses_a_prefix",
        Class::Inconclusive,
        "tokens",
        1,
        hit,
    ));
}

/// The prefix that is seeded: its length in tokens.
fn prefix(scene: &Scene<'_>) -> u64 {
    scene.tokens(u64::from(scene.config().profile.tc02.seed_prefix))
}

pub(super) fn seed_prefix<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let (prefix, half) = (prefix(scene), scene.tokens(1) / 2);
        let seed = scene.sections(&[("prefix", prefix), ("seed", half)]);
        let own = scene.tokens(BLOCKS) + half;
        let asked = scene.sections(&[("prefix", prefix), ("own", own)]);
        let sequence = Sequence {
            stored: &[("seed", &seed)],
            asked: ("asked", &asked),
            known: 0,
        };
        comes_back(scene, sequence).await
    })
}

pub(super) fn extra_shared_sections<'a>(
    scene: &'a mut Scene<'_>,
) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let (prefix, half) = (prefix(scene), scene.tokens(1) / 2);
        let sections = u64::from(scene.config().profile.tc02.extra_shared_sections);
        let names: Vec<String> = (0..sections).map(|k| format!("shared{k}")).collect();
        let section = scene.tokens(SECTION);
        let mut shared = vec![("prefix", prefix)];
        shared.extend(names.iter().map(|name| (name.as_str(), section)));
        // Long enough that the state which the stored prompt leaves is of no use to the other.
        let tail = scene.tokens(SECTION) + half;
        let with = |name| [&shared[..], &[(name, tail)]].concat();

        let seed = scene.sections(&[("prefix", prefix), ("seed", half)]);
        let stored = scene.sections(&with("stored"));
        let asked = scene.sections(&with("own"));
        let sequence = Sequence {
            stored: &[("seed", &seed), ("stored", &stored)],
            asked: ("asked", &asked),
            known: sections * SECTION,
        };
        comes_back(scene, sequence).await
    })
}

/// A conversation: each turn continues the one before, and between turns everything is evicted.
pub(super) fn evict_target<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let turns = usize::try_from(scene.config().profile.tc02.evict_target).unwrap_or(usize::MAX);
        let mut prompts = vec![(
            "turn0".to_owned(),
            scene.prompt("turn", seeded_length(scene)),
        )];
        for turn in 1..=turns {
            let last = &prompts[turn - 1].1;
            let keep = last.tokens() as u64;
            let next = scene.related(last, keep, 0, keep + scene.tokens(SECTION));
            prompts.push((format!("turn{turn}"), next));
        }
        let asked: Vec<(&str, &Prompt)> = prompts
            .iter()
            .map(|(label, prompt)| (label.as_str(), prompt))
            .collect();
        scene.reference(&asked).await?;
        let reused = scene.reference_reuse(&asked).await?;

        for ((label, prompt), hit) in asked.into_iter().zip(reused) {
            let before = scene.counters(&format!("before_{label}")).await?;
            let seen = scene.ask(label, prompt, 0).await?;
            let deltas = scene.since(&before, label).await?;
            scene.answers_as_reference(label, &seen);
            scene.hit_as_reused(&seen, hit);
            if label != "turn0" {
                reuses_something(scene, hit);
            }
            let flow = Flow::delivered(&seen, hit, blocks);
            scene.checks(flow.checks(0, deltas.worker(0), blocks));
            others_are_idle(scene, &deltas);
            scene
                .evict("filler", 0, blocks.full(seen.prompt_tokens))
                .await?;
        }
        Ok(())
    })
}
