//! TC-03: a request that the router hints is served by its peer's memory, to the block and the
//! byte; one that is fresh is cold, and touches no peer.
//!
//! Placement is not believed: every request is pinned, and says who served it. A transfer is
//! claimed by both sides: what the target got is what the source wrote. Whatever else ended on
//! either worker must have ended well.

use super::flow::Flow;
use super::scene::{Deltas, Scene};
use super::seed::{BLOCKS, introduce, labelled, lot, seed, seed_each, seeded_length};
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::gate::Wants;
use crate::prompt::Prompt;
use crate::stack::protocol::Mode;
use crate::telemetry::kvcr;
use crate::verdict::Check;

mod judge;

use judge::Twice;

/// Blocks that a prompt shares with a seeded one where it shares only some.
const SHARED: u64 = 5;
/// Blocks of a long prompt.
const LARGE: u64 = 200;
/// Hinted requests at once.
const AT_ONCE: usize = 8;

/// The case.
pub const CASE: Case = Case {
    id: "tc03",
    title: "request hints and peer transfer",
    arms: &[
        Arm {
            name: "tc03::hinted_and_fresh",
            claim: "of two requests that reach worker 1 together the hinted one is served by worker 0's memory, and the fresh one is cold",
            mode: Mode::Exclusive,
            wants: Wants::Hints,
            story: hinted_and_fresh,
        },
        Arm {
            name: "tc03::partial_prefix_hint",
            claim: "prompts that share a beginning with what a peer holds get exactly the whole blocks they share",
            mode: Mode::Exclusive,
            wants: Wants::Hints,
            story: partial_prefix_hint,
        },
        Arm {
            name: "tc03::both_directions",
            claim: "each of two workers is served by the other's memory",
            mode: Mode::Exclusive,
            wants: Wants::Hints,
            story: both_directions,
        },
        Arm {
            name: "tc03::concurrent",
            claim: "eight hinted requests at once are each served by the peer, and the sums are exact",
            mode: Mode::Exclusive,
            wants: Wants::Hints,
            story: concurrent,
        },
        Arm {
            name: "tc03::twice_at_once",
            claim: "the same hinted prompt twice at once is served by the peer, once or twice, and the sums are exact",
            mode: Mode::Exclusive,
            wants: Wants::Hints,
            story: twice_at_once,
        },
        Arm {
            name: "tc03::no_source",
            claim: "a peer that is hinted and has nothing left says so: the prompt is computed, rightly, and both count it",
            mode: Mode::Exclusive,
            wants: Wants::StaleHints,
            story: no_source,
        },
        Arm {
            name: "tc03::large",
            claim: "a prompt of 200 blocks is served by the peer to the block and the byte",
            mode: Mode::Exclusive,
            wants: Wants::DenseHints,
            story: large,
        },
    ],
};

/// A hint arrived, and the target asked the peer that it names: without that, nothing else that an
/// arm says is about transfers.
fn peer_was_asked(scene: &mut Scene<'_>, deltas: &Deltas, source: usize) {
    let requests = kvcr::requests_of_peers(deltas.worker(source));
    let name = format!("peer_was_asked[worker{source}]");
    scene.check(Check::counter_at_least(name, Class::Product, 1, &requests));
}

fn hinted_and_fresh<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let length = seeded_length(scene);
        let hinted = scene.prompt("hinted", length);
        let fresh = scene.prompt("fresh", length);
        let asked = [("hinted", &hinted), ("fresh", &fresh)];
        scene.reference(&asked).await?;
        let reused = scene.reference_reused("hinted")?;

        introduce(scene, "", 0, 1).await?;
        seed(scene, &[("seed".into(), &hinted)], 0).await?;
        let before = scene.counters("seeded").await?;
        let seen = scene
            .ask_together(&asked.map(|(label, prompt)| (label, prompt, 1)))
            .await?;
        let deltas = scene.outlived(&before, "asked").await?;
        peer_was_asked(scene, &deltas, 0);
        for ((label, _), seen) in asked.iter().zip(&seen) {
            scene.answers_as_reference(label, seen);
        }
        scene.hit_as_reused(&seen[0], reused);
        scene.hit(&seen[1], 0..=0);
        scene.note(format!(
            "the hinted request took {:.0} ms, the fresh one beside it {:.0} ms; the first transfer between two workers connects them",
            seen[0].wall_ms, seen[1].wall_ms
        ));

        let mut target = Flow::fetched(&seen[0], reused, blocks);
        target += Flow::cold(&seen[1], blocks);
        let source = Flow::written(reused, blocks);
        scene.checks(target.checks(1, deltas.worker(1), blocks));
        scene.checks(source.checks(0, deltas.worker(0), blocks));
        Ok(())
    })
}

fn partial_prefix_hint<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let length = seeded_length(scene);
        // Around the end of a block: one token short of it, exactly it, one beyond.
        let edges = ["one_short", "exact", "one_over"];
        let pairs: Vec<(&str, Prompt, Prompt)> = edges
            .iter()
            .zip(blocks.boundary(SHARED))
            .map(|(label, shared)| {
                let seeded = scene.prompt(label, length);
                let asked = scene.related(&seeded, shared, 0, length);
                (*label, seeded, asked)
            })
            .collect();
        let questions: Vec<_> = pairs
            .iter()
            .map(|(label, _, asked)| (*label, asked))
            .collect();
        scene.reference(&questions).await?;
        let mut reused = Vec::new();
        for (label, seeded, asked) in &pairs {
            let sequence = [("seeded", seeded), (*label, asked)];
            reused.push(scene.reference_reuse(&sequence).await?[1]);
        }

        let seeded = pairs.iter();
        let seeded: Vec<_> = seeded.map(|(label, seeded, _)| (*label, seeded)).collect();
        introduce(scene, "", 0, 1).await?;
        seed_each(scene, &seeded, 0).await?;
        let before = scene.counters("seeded").await?;
        let (mut target, mut source) = (Flow::default(), Flow::default());
        for ((label, _, asked), reused) in pairs.iter().zip(&reused) {
            let seen = scene.ask(label, asked, 1).await?;
            scene.answers_as_reference(label, &seen);
            scene.hit_as_reused(&seen, *reused);
            target += Flow::fetched(&seen, *reused, blocks);
            source += Flow::written(*reused, blocks);
        }
        let deltas = scene.since(&before, "asked").await?;
        if reused.iter().any(|hit| *hit > 0) {
            peer_was_asked(scene, &deltas, 0);
        }
        scene.checks(target.checks(1, deltas.worker(1), blocks));
        scene.checks(source.checks(0, deltas.worker(0), blocks));
        Ok(())
    })
}

fn both_directions<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let length = seeded_length(scene);
        let prompts =
            ["of_worker0", "of_worker1"].map(|label| (label, scene.prompt(label, length)));
        let asked = [0, 1].map(|at| (prompts[at].0, &prompts[at].1));
        scene.reference(&asked).await?;

        introduce(scene, "", 0, 1).await?;
        introduce(scene, "", 1, 0).await?;
        for (worker, (label, prompt)) in asked.iter().enumerate() {
            seed(scene, &[(format!("{label}.seed"), prompt)], worker).await?;
        }
        let before = scene.counters("seeded").await?;
        let crossed = [(asked[0].0, asked[0].1, 1), (asked[1].0, asked[1].1, 0)];
        let seen = scene.ask_together(&crossed).await?;
        let deltas = scene.since(&before, "asked").await?;
        for source in [0, 1] {
            peer_was_asked(scene, &deltas, source);
        }
        let mut flows = [Flow::default(); 2];
        for ((label, _, target), seen) in crossed.iter().zip(&seen) {
            let reused = scene.reference_reused(label)?;
            scene.answers_as_reference(label, seen);
            scene.hit_as_reused(seen, reused);
            flows[*target] += Flow::fetched(seen, reused, blocks);
            flows[1 - *target] += Flow::written(reused, blocks);
        }
        for (worker, flow) in flows.into_iter().enumerate() {
            scene.checks(flow.checks(worker, deltas.worker(worker), blocks));
        }
        Ok(())
    })
}

fn concurrent<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let prompts = lot(scene, "hinted", AT_ONCE);
        let asked = labelled(&prompts);
        scene.reference(&asked).await?;

        introduce(scene, "", 0, 1).await?;
        seed_each(scene, &asked, 0).await?;
        let before = scene.counters("seeded").await?;
        let at_once: Vec<_> = asked
            .iter()
            .map(|(label, prompt)| (*label, *prompt, 1))
            .collect();
        let seen = scene.ask_together(&at_once).await?;
        let deltas = scene.since(&before, "asked").await?;
        peer_was_asked(scene, &deltas, 0);
        let (mut target, mut source) = (Flow::default(), Flow::default());
        for ((label, _), seen) in asked.iter().zip(&seen) {
            let reused = scene.reference_reused(label)?;
            scene.answers_as_reference(label, seen);
            scene.hit_as_reused(seen, reused);
            target += Flow::fetched(seen, reused, blocks);
            source += Flow::written(reused, blocks);
        }
        scene.checks(target.checks(1, deltas.worker(1), blocks));
        scene.checks(source.checks(0, deltas.worker(0), blocks));
        Ok(())
    })
}

fn twice_at_once<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let prompt = scene.prompt("prompt", seeded_length(scene));
        scene.reference(&[("prompt", &prompt)]).await?;
        let hit = scene.reference_reused("prompt")?;

        introduce(scene, "", 0, 1).await?;
        seed(scene, &[("seed".into(), &prompt)], 0).await?;
        let before = scene.counters("seeded").await?;
        let seen = scene
            .ask_together(&[("one", &prompt, 1), ("other", &prompt, 1)])
            .await?;
        let deltas = scene.since(&before, "asked").await?;
        peer_was_asked(scene, &deltas, 0);
        let mut both = Flow::default();
        for seen in &seen {
            scene.answers_as_reference("prompt", seen);
            scene.hit_as_reused(seen, hit);
            both += Flow::fetched(seen, hit, blocks);
        }
        scene.check(Check::equal(
            "both_answered_alike",
            Class::Product,
            &seen[0].tokens,
            &seen[1].tokens,
        ));
        let twice = Twice {
            computed: both.computed,
            hit,
            blocks,
        };
        let (target, source) = (deltas.worker(1), deltas.worker(0));
        scene.checks(twice.checks(target, source));
        scene.note(format!(
            "{} of two requests fetched from the peer",
            twice.transfers(target)
        ));
        Ok(())
    })
}

/// The router hints by what a worker's device holds, and a source gives what its host tier or KVCR's
/// own tier holds. So the seed is kept on the device alone: fillers push it out of KVCR's tier, while
/// one more request for it, halfway, keeps it the device's last to go; then they push it out of the
/// host tier, which is smaller than the device. It must still be there at that request: what a host
/// tier has lost and the device has not is stored anew.
fn no_source<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let host = scene.host_blocks(0).await?;
        let own = u64::from(scene.config().profile.kvcr.dram_slots);
        roomy_device(scene, host)?;
        let prompt = scene.prompt("prompt", seeded_length(scene));
        scene.reference(&[("prompt", &prompt)]).await?;
        let hit = scene.reference_reused("prompt")?;

        seed(scene, &[("seed".into(), &prompt)], 0).await?;
        let before = scene.counters("seeded").await?;
        let mut flow = Flow::default();
        let first = own.saturating_sub(host);
        for filler in scene.flood("first", 0, first).await? {
            flow += Flow::cold(&filler, blocks);
        }
        let kept = scene.ask("kept", &prompt, 0).await?;
        scene.hit_as_reused(&kept, hit);
        flow += Flow::kept(&kept, hit, blocks);
        for filler in scene.flood("second", 0, host).await? {
            flow += Flow::cold(&filler, blocks);
        }
        let flooded = scene.since(&before, "flooded").await?;
        scene.checks(flow.checks(0, flooded.worker(0), blocks));

        let before = scene.counters("before").await?;
        let seen = scene.ask("asked", &prompt, 1).await?;
        let deltas = scene.since_refused(&before, "asked").await?;
        scene.answers_as_reference("prompt", &seen);
        scene.hit(&seen, 0..=0);
        let (target, source) = (deltas.worker(1), deltas.worker(0));
        scene.checks(judge::refused(target, source));
        scene.checks(Flow::cold(&seen, blocks).checks(1, target, blocks));
        scene.checks(Flow::default().checks(0, source, blocks));
        scene.note(format!(
            "the refused request took {:.0} ms; a transfer times out after {} ms",
            seen.wall_ms,
            scene.config().profile.kvcr.operation_timeout_ms
        ));
        Ok(())
    })
}

/// The device cache has to hold the seed beside all that the host tier holds; the last block of a
/// filler is not full, and takes a place all the same.
fn roomy_device(scene: &Scene<'_>, host: u64) -> Result<(), Failure> {
    let least = host + BLOCKS + 8;
    let device = scene.device_blocks();
    if device >= least {
        return Ok(());
    }
    Err(
        Failure::environment("the device cache is too small for this arm")
            .expected(format!(
                "engine.device_blocks of at least {least}: more than the host tier holds"
            ))
            .found(device)
            .hint("raise it (--device-blocks), or make the host tier smaller (--primary-bytes)"),
    )
}

fn large<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let prompt = scene.prompt("prompt", scene.tokens(LARGE) + scene.tokens(1) / 2);
        scene.reference(&[("prompt", &prompt)]).await?;
        let hit = scene.reference_reused("prompt")?;

        introduce(scene, "", 0, 1).await?;
        seed(scene, &[("seed".into(), &prompt)], 0).await?;
        let before = scene.counters("seeded").await?;
        let seen = scene.ask("asked", &prompt, 1).await?;
        let deltas = scene.since(&before, "asked").await?;
        peer_was_asked(scene, &deltas, 0);
        scene.answers_as_reference("prompt", &seen);
        scene.hit_as_reused(&seen, hit);
        let target = Flow::fetched(&seen, hit, blocks);
        let source = Flow::written(hit, blocks);
        scene.checks(target.checks(1, deltas.worker(1), blocks));
        scene.checks(source.checks(0, deltas.worker(0), blocks));
        scene.note(format!(
            "{}, {} B, {:.0} ms",
            source.written,
            blocks.bytes_of(blocks.moved(source.written)),
            seen.wall_ms
        ));
        Ok(())
    })
}
