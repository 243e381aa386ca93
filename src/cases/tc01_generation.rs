//! TC-01: with KVCR on, greedy output is what the same engine gives with KVCR off, whether the
//! prompt is cold, in the device cache, or only in KVCR's own tier.
//!
//! Every arm first asks the reference engine, then the stack under test, and compares token by
//! token. Text alone would pass if nothing were ever cached, so each arm also proves by counters
//! that it really was what it claims.

use super::scene::Scene;
use super::{Arm, Case};
use crate::client::Observation;
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::stack::protocol::Mode;
use crate::verdict::Check;

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
            story: cold,
        },
        Arm {
            name: "tc01::warm_device",
            claim: "a repeated prompt hits the device cache and answers as the reference",
            mode: Mode::Exclusive,
            story: warm_device,
        },
        Arm {
            name: "tc01::warm_tier",
            claim: "a prompt evicted from the device and the host tier is served by KVCR's own tier and answers as the reference",
            mode: Mode::Exclusive,
            story: warm_tier,
        },
        Arm {
            name: "tc01::boundary",
            claim: "prompts one token around a block boundary answer as the reference, cold and warm",
            mode: Mode::Exclusive,
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
            hit(scene, &seen, 0..=0);
            stored[worker] += blocks.full(seen.prompt_tokens);
            computed[worker] += seen.prompt_tokens;
        }
        let deltas = scene.since(&before, "after").await?;

        for worker in 0..scene.workers() {
            let delta = deltas.worker(worker);
            scene.checks(judge::cold(worker, delta, computed[worker], stored[worker]));
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
        hit(scene, &first, 0..=0);

        let before = scene.counters("before").await?;
        let again = scene.ask("warm", &prompt, 0).await?;
        let deltas = scene.since(&before, "after").await?;
        scene.answers_as_reference("prompt", &again);
        let expected = scene.blocks().device_hit(again.prompt_tokens);
        hit(scene, &again, expected..=expected);
        as_the_reference_reuses(scene, "prompt", &again);

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
        hit(scene, &first, 0..=0);
        evict(scene).await?;

        let before = scene.counters("before").await?;
        let again = scene.ask("warm", &prompt, 0).await?;
        let deltas = scene.since(&before, "after").await?;
        scene.answers_as_reference("prompt", &again);
        let expected = blocks.device_hit(again.prompt_tokens);
        hit(scene, &again, expected..=expected);
        as_the_reference_reuses(scene, "prompt", &again);

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
            hit(scene, &first, 0..=0);
            let again = scene.ask(&format!("{label}.warm"), prompt, 0).await?;
            scene.answers_as_reference(label, &again);
            // A tier behind the device may also give the block that ends with the last token.
            let least = blocks.device_hit(again.prompt_tokens);
            hit(
                scene,
                &again,
                least..=blocks.offload_hit(again.prompt_tokens),
            );
            if again.cached_tokens != Some(least) {
                scene.note(format!(
                    "`{label}`: {:?} of {} tokens were reported as cached, a KVCR-off engine reuses {least}",
                    again.cached_tokens, again.prompt_tokens
                ));
            }
        }
        scene.since(&before, "after").await?;
        Ok(())
    })
}

/// The hit that the engine itself reports lies in `range`.
fn hit(scene: &mut Scene<'_>, seen: &Observation, range: std::ops::RangeInclusive<u64>) {
    let name = format!("cached_tokens[{}]", seen.label);
    let expected = if range.start() == range.end() {
        format!("{} of {} tokens", range.start(), seen.prompt_tokens)
    } else {
        format!(
            "{} to {} of {} tokens",
            range.start(),
            range.end(),
            seen.prompt_tokens
        )
    };
    scene.check(match seen.cached_tokens {
        Some(cached) => Check::new(
            name,
            Class::Product,
            range.contains(&cached),
            expected,
            format_args!("{cached} tokens"),
        ),
        None => Check::new(
            name,
            Class::Inconclusive,
            false,
            expected,
            "no cached_tokens in the usage",
        ),
    });
}

/// KVCR may not claim more than the same engine reuses without it, nor less.
fn as_the_reference_reuses(scene: &mut Scene<'_>, label: &str, seen: &Observation) {
    let reused = scene.reference_reused(label);
    scene.check(Check::equal(
        format!("hit_as_reference_reuses[{}]", seen.label),
        if reused.is_some() {
            Class::Product
        } else {
            Class::Inconclusive
        },
        &reused,
        &seen.cached_tokens,
    ));
}

/// Sends fillers to worker 0 until more blocks than its device cache and its host tier hold have
/// gone through both. Whether that evicted the prompt is not believed but counted afterwards.
async fn evict(scene: &mut Scene<'_>) -> Result<(), Failure> {
    let blocks = scene.blocks();
    let profile = &scene.config().profile;
    let device = u64::from(profile.engine.device_blocks.unwrap_or(0));
    let host = profile.kvcr.primary_bytes / blocks.bytes;
    // Half of the longest sequence: long enough to be few, short enough for any device cache.
    let filler = blocks.full(u64::from(profile.engine.max_model_len) / 2);
    let count = (device.max(host) + LONG_BLOCKS).div_ceil(filler.max(1));
    let fillers = scene.fillers(
        usize::try_from(count).unwrap_or(usize::MAX),
        scene.tokens(filler) + TAIL,
    );
    for (index, prompt) in fillers.iter().enumerate() {
        scene.ask(&format!("filler{index}"), prompt, 0).await?;
    }
    Ok(())
}
