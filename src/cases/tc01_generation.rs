//! TC-01: with KVCR on, greedy output is what the same engine gives with KVCR off, whether the
//! prompt is cold, in the device cache, or only in KVCR's own tier.
//!
//! Every arm first asks the reference engine, then the stack under test, and compares token by
//! token. Text alone would pass if nothing were ever cached, so each arm also proves by counters
//! that it really was what it claims.

use super::flow::Flow;
use super::scene::Scene;
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::Failure;
use crate::gate::Wants;
use crate::stack::protocol::Mode;

mod judge;

/// Blocks of the prompts that have to be long.
const LONG_BLOCKS: u64 = 8;
/// Tokens beyond the last full block: a hit must leave them to be computed.
const TAIL: u64 = 37;

/// The case.
pub const CASE: Case = Case {
    id: "tc01",
    title: "integration generation correctness",
    arms: &[
        Arm {
            name: "tc01::cold",
            claim: "a prompt nobody has seen is computed, not found, and answers as the reference",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: cold,
        },
        Arm {
            name: "tc01::warm_device",
            claim: "a repeated prompt hits the device cache and answers as the reference",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: warm_device,
        },
        Arm {
            name: "tc01::warm_tier",
            claim: "a prompt evicted from the device and the host tier is served by KVCR's own tier and answers as the reference",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: warm_tier,
        },
        Arm {
            name: "tc01::boundary",
            claim: "prompts one token around a block boundary answer as the reference, cold and warm",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: boundary,
        },
    ],
};

fn cold<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let short = scene.prompt("short", scene.tokens(1) / 2);
        let long = scene.prompt("long", scene.tokens(LONG_BLOCKS) + TAIL);
        let other = scene.prompt("other_worker", scene.tokens(LONG_BLOCKS) + TAIL);
        scene
            .reference(&[("short", &short), ("long", &long), ("other_worker", &other)])
            .await?;

        let asked = [
            ("short", &short, 0),
            ("long", &long, 0),
            ("other_worker", &other, 1),
        ];
        let mut stored = vec![0; scene.workers()];
        let mut computed = vec![0; scene.workers()];
        let before = scene.counters("before").await?;
        for (label, prompt, worker) in asked {
            let seen = scene.ask(label, prompt, worker).await?;
            scene.answers_as_reference(label, &seen);
            scene.hit(&seen, 0..=0);
            stored[worker] += Flow::cold(&seen, blocks).stored;
            computed[worker] += seen.prompt_tokens;
        }
        let deltas = scene.since(&before, "after").await?;

        for worker in 0..scene.workers() {
            let delta = deltas.worker(worker);
            scene.checks(judge::cold(
                worker,
                delta,
                computed[worker],
                blocks.stored(stored[worker]),
            ));
        }
        Ok(())
    })
}

fn warm_device<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let prompt = scene.prompt("prompt", scene.tokens(LONG_BLOCKS) + TAIL);
        scene.reference(&[("prompt", &prompt)]).await?;

        let first = scene.ask("cold", &prompt, 0).await?;
        scene.answers_as_reference("prompt", &first);
        scene.hit(&first, 0..=0);

        let before = scene.counters("before").await?;
        let again = scene.ask("warm", &prompt, 0).await?;
        let deltas = scene.since(&before, "after").await?;
        scene.answers_as_reference("prompt", &again);
        let expected = scene.blocks().device_hit(again.prompt_tokens);
        scene.hit(&again, expected..=expected);
        let reused = scene.reference_reused("prompt")?;
        scene.hit_as_reused(&again, reused);

        let delta = deltas.worker(0);
        scene.checks(judge::warm_device(0, delta, expected));
        Ok(())
    })
}

fn warm_tier<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let prompt = scene.prompt("prompt", scene.tokens(LONG_BLOCKS) + TAIL);
        scene.reference(&[("prompt", &prompt)]).await?;

        let first = scene.ask("cold", &prompt, 0).await?;
        scene.answers_as_reference("prompt", &first);
        scene.hit(&first, 0..=0);
        scene.evict("filler", 0, LONG_BLOCKS).await?;

        let before = scene.counters("before").await?;
        let again = scene.ask("warm", &prompt, 0).await?;
        let deltas = scene.since(&before, "after").await?;
        scene.answers_as_reference("prompt", &again);
        let expected = blocks.device_hit(again.prompt_tokens);
        scene.hit(&again, expected..=expected);
        let reused = scene.reference_reused("prompt")?;
        scene.hit_as_reused(&again, reused);

        let delta = deltas.worker(0);
        scene.checks(judge::warm_tier(delta, blocks, expected));
        Ok(())
    })
}

fn boundary<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let lengths = blocks.boundary(LONG_BLOCKS);
        let labels = ["one_short", "exact", "one_over"];
        let prompts: Vec<_> = labels
            .iter()
            .zip(lengths)
            .map(|(label, tokens)| (*label, scene.prompt(label, tokens)))
            .collect();
        let asked: Vec<_> = prompts
            .iter()
            .map(|(label, prompt)| (*label, prompt))
            .collect();
        scene.reference(&asked).await?;

        let before = scene.counters("before").await?;
        for (label, prompt) in &prompts {
            let first = scene.ask(&format!("{label}.cold"), prompt, 0).await?;
            scene.answers_as_reference(label, &first);
            scene.hit(&first, 0..=0);
            let again = scene.ask(&format!("{label}.warm"), prompt, 0).await?;
            scene.answers_as_reference(label, &again);
            // A tier behind the device may also give the block that ends with the last token.
            let least = blocks.device_hit(again.prompt_tokens);
            scene.hit(&again, least..=blocks.offload_hit(again.prompt_tokens));
            if let Some(cached) = again.cached_tokens
                && cached != least
            {
                scene.note(format!(
                    "`{label}`: {cached} of {} tokens were reported as cached, a KVCR-off engine reuses {least}",
                    again.prompt_tokens
                ));
            }
        }
        scene.since(&before, "after").await?;
        Ok(())
    })
}
