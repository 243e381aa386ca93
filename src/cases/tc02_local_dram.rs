//! TC-02: what KVCR's own DRAM tier holds is found again, as far as the same engine could reuse it
//! without KVCR: a whole prompt, a shared beginning, and nothing of a prompt it never saw.
//!
//! The expected hit is what the reference engine reuses when it is asked the same prompts in the
//! same order; arithmetic only says which counters must follow from it.

use super::flow::Flow;
use super::scene::{Deltas, Scene};
use super::seed::{BLOCKS, seeded_length};
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::Failure;
use crate::gate::Wants;
use crate::prompt::Prompt;
use crate::stack::protocol::Mode;

mod states;

/// Blocks that prompts with a shared beginning share.
const SHARED: u64 = 5;

/// The case.
pub const CASE: Case = Case {
    id: "tc02",
    title: "local DRAM full flow",
    arms: &[
        Arm {
            name: "tc02::full",
            claim: "a stored prompt comes back from KVCR's own tier as far as the engine can reuse it, to the block and the byte",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: full,
        },
        Arm {
            name: "tc02::partial_prefix",
            claim: "prompts that share a beginning with a stored one hit exactly the whole blocks they share",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: partial_prefix,
        },
        Arm {
            name: "tc02::absent",
            claim: "a prompt that was never stored finds nothing, even if only one token of its first block differs",
            mode: Mode::Exclusive,
            wants: Wants::Any,
            story: absent,
        },
        Arm {
            name: "tc02::seed_prefix",
            claim: "a prefix that was asked for before is found again with the state at its end, and nothing else is delivered",
            mode: Mode::Exclusive,
            wants: Wants::States,
            story: states::seed_prefix,
        },
        Arm {
            name: "tc02::extra_shared_sections",
            claim: "of a prompt that shares more than there is a state for, exactly what can be used is delivered",
            mode: Mode::Exclusive,
            wants: Wants::States,
            story: states::extra_shared_sections,
        },
        Arm {
            name: "tc02::evict_target",
            claim: "each turn of a conversation finds the state of the turn before, although everything was evicted between them",
            mode: Mode::Exclusive,
            wants: Wants::States,
            story: states::evict_target,
        },
    ],
};

/// No worker but the first moved anything.
fn others_are_idle(scene: &mut Scene<'_>, deltas: &Deltas) {
    for worker in 1..scene.workers() {
        let delta = deltas.worker(worker);
        scene.checks(Flow::default().checks(worker, delta, scene.blocks()));
    }
}

fn full<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let prompt = scene.prompt("prompt", seeded_length(scene));
        scene.reference(&[("prompt", &prompt)]).await?;
        let reused = scene.reference_reused("prompt")?;

        let before = scene.counters("before").await?;
        let first = scene.ask("store", &prompt, 0).await?;
        let stored = scene.since(&before, "stored").await?;
        scene.answers_as_reference("prompt", &first);
        scene.hit(&first, 0..=0);
        let flow = Flow::cold(&first, blocks);
        scene.checks(flow.checks(0, stored.worker(0), blocks));

        scene.evict("filler", 0, BLOCKS).await?;
        let before = scene.counters("evicted").await?;
        let again = scene.ask("load", &prompt, 0).await?;
        let loaded = scene.since(&before, "loaded").await?;
        scene.answers_as_reference("prompt", &again);
        scene.hit_as_reused(&again, reused);
        // Nothing new: its own tier holds what the first answer filled.
        let flow = Flow {
            stored: 0,
            ..Flow::delivered(&again, reused, blocks)
        };
        scene.checks(flow.checks(0, loaded.worker(0), blocks));
        others_are_idle(scene, &loaded);
        Ok(())
    })
}

fn partial_prefix<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let length = seeded_length(scene);
        // Around the end of a block: one token short of it, exactly it, one beyond.
        let edges = ["one_short", "exact", "one_over"];
        let pairs: Vec<(&str, Prompt, Prompt, u64)> = edges
            .iter()
            .zip(blocks.boundary(SHARED))
            .map(|(label, shared)| {
                let stored = scene.prompt(label, length);
                let asked = scene.related(&stored, shared, 0, length);
                (*label, stored, asked, shared)
            })
            .collect();
        let questions: Vec<_> = pairs
            .iter()
            .map(|(label, _, asked, _)| (*label, asked))
            .collect();
        scene.reference(&questions).await?;
        let mut reused = Vec::new();
        for (label, stored, asked, _) in &pairs {
            let sequence = [("stored", stored), (*label, asked)];
            reused.push(scene.reference_reuse(&sequence).await?[1]);
        }

        for (label, stored, _, _) in &pairs {
            scene.ask(&format!("{label}.store"), stored, 0).await?;
        }
        scene.evict("filler", 0, 3 * BLOCKS).await?;
        let before = scene.counters("evicted").await?;
        let mut flow = Flow::default();
        for ((label, _, asked, shared), reused) in pairs.iter().zip(&reused) {
            let seen = scene.ask(label, asked, 0).await?;
            scene.answers_as_reference(label, &seen);
            scene.hit_as_reused(&seen, *reused);
            flow += Flow::delivered(&seen, *reused, blocks);
            // Shared blocks are in its own tier already, also where they are no hit because a
            // hybrid model has no state at their end.
            let known = blocks.full(*shared).saturating_sub(blocks.full(*reused));
            flow.stored = flow.stored.saturating_sub(known);
        }
        let loaded = scene.since(&before, "loaded").await?;
        scene.checks(flow.checks(0, loaded.worker(0), blocks));
        others_are_idle(scene, &loaded);
        Ok(())
    })
}

fn absent<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let length = seeded_length(scene);
        let stored = scene.prompt("stored", length);
        let never = scene.prompt("never_stored", length);
        // Shares all but the last token of the first block.
        let near = scene.related(&stored, scene.tokens(1) - 1, 1, length);
        let asked = [("never_stored", &never), ("near", &near)];
        scene.reference(&asked).await?;
        let reused = scene
            .reference_reuse(&[
                ("stored", &stored),
                ("never_stored", &never),
                ("near", &near),
            ])
            .await?;

        scene.ask("store", &stored, 0).await?;
        scene.evict("filler", 0, BLOCKS).await?;
        let before = scene.counters("evicted").await?;
        let mut flow = Flow::default();
        for ((label, prompt), reused) in asked.into_iter().zip(&reused[1..]) {
            let seen = scene.ask(label, prompt, 0).await?;
            scene.answers_as_reference(label, &seen);
            scene.hit(&seen, 0..=0);
            scene.hit_as_reused(&seen, *reused);
            flow += Flow::cold(&seen, blocks);
        }
        let asked = scene.since(&before, "asked").await?;
        scene.checks(flow.checks(0, asked.worker(0), blocks));
        others_are_idle(scene, &asked);
        Ok(())
    })
}
