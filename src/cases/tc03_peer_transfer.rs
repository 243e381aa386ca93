//! TC-03: a request that the router hints is served by its peer's memory, to the block and the
//! byte; one that is fresh is cold, and touches no peer.
//!
//! Placement is not believed: every request is pinned, and says who served it. A transfer is
//! claimed by both sides: what the target got is what the source wrote. Whatever else ended on
//! either worker must have ended well.

use super::flow::Flow;
use super::scene::Scene;
use super::seed::{seed, seeded_length};
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::Failure;
use crate::gate::Wants;
use crate::prompt::Prompt;
use crate::stack::protocol::Mode;

/// Blocks that a prompt shares with a seeded one where it shares only some.
const SHARED: u64 = 5;
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
            wants: Wants::SaltedHints,
            story: hinted_and_fresh,
        },
        Arm {
            name: "tc03::partial_prefix_hint",
            claim: "a prompt that shares whole blocks with what a peer holds gets exactly those",
            mode: Mode::Exclusive,
            wants: Wants::SaltedHints,
            story: partial_prefix_hint,
        },
        Arm {
            name: "tc03::both_directions",
            claim: "each of two workers is served by the other's memory",
            mode: Mode::Exclusive,
            wants: Wants::SaltedHints,
            story: both_directions,
        },
        Arm {
            name: "tc03::concurrent",
            claim: "eight hinted requests at once are each served by the peer, and the sums are exact",
            mode: Mode::Exclusive,
            wants: Wants::SaltedHints,
            story: concurrent,
        },
    ],
};

fn hinted_and_fresh<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let blocks = scene.blocks();
        let length = seeded_length(scene);
        let hinted = scene.prompt("hinted", length);
        let fresh = scene.prompt("fresh", length);
        let asked = [("hinted", &hinted), ("fresh", &fresh)];
        scene.reference(&asked).await?;
        let reused = scene.reference_reused("hinted")?;

        seed(scene, &[("seed".into(), &hinted)], 0).await?;
        let before = scene.counters("seeded").await?;
        let seen = scene
            .ask_together(&asked.map(|(label, prompt)| (label, prompt, 1)))
            .await?;
        let deltas = scene.outlived(&before, "asked").await?;
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
        let seeded = scene.prompt("seeded", length);
        let asked = scene.related(&seeded, scene.tokens(SHARED) + 1, 0, length);
        scene.reference(&[("asked", &asked)]).await?;
        let reused = scene
            .reference_reuse(&[("seeded", &seeded), ("asked", &asked)])
            .await?;

        seed(scene, &[("seed".into(), &seeded)], 0).await?;
        let before = scene.counters("seeded").await?;
        let seen = scene.ask("asked", &asked, 1).await?;
        let deltas = scene.since(&before, "asked").await?;
        scene.answers_as_reference("asked", &seen);
        scene.hit_as_reused(&seen, reused[1]);

        let target = Flow::fetched(&seen, reused[1], blocks);
        let source = Flow::written(reused[1], blocks);
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

        for (worker, (label, prompt)) in asked.iter().enumerate() {
            seed(scene, &[(format!("{label}.seed"), prompt)], worker).await?;
        }
        let before = scene.counters("seeded").await?;
        let crossed = [(asked[0].0, asked[0].1, 1), (asked[1].0, asked[1].1, 0)];
        let seen = scene.ask_together(&crossed).await?;
        let deltas = scene.since(&before, "asked").await?;
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
        let length = seeded_length(scene);
        let prompts: Vec<(String, Prompt)> = (0..AT_ONCE)
            .map(|number| {
                let label = format!("hinted{number}");
                let prompt = scene.prompt(&label, length);
                (label, prompt)
            })
            .collect();
        let asked: Vec<(&str, &Prompt)> = prompts
            .iter()
            .map(|(label, prompt)| (label.as_str(), prompt))
            .collect();
        scene.reference(&asked).await?;

        let seeds: Vec<_> = prompts
            .iter()
            .map(|(label, prompt)| (format!("{label}.seed"), prompt))
            .collect();
        seed(scene, &seeds, 0).await?;
        let before = scene.counters("seeded").await?;
        let at_once: Vec<_> = asked
            .iter()
            .map(|(label, prompt)| (*label, *prompt, 1))
            .collect();
        let seen = scene.ask_together(&at_once).await?;
        let deltas = scene.since(&before, "asked").await?;
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
