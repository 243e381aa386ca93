//! A worker dies, and its blocks do not.

use crate::cases::scene::Scene;
use crate::cases::scene::harm::{Attempt, Sent};
use crate::cases::seed::{labelled, lot, seeded_length};
use crate::cases::takeover::{
    Held, VICTIM, WITNESS, answered, bring_back, held_blocks, knock, served_by_guard, serves_late,
    taken_over, taken_over_once,
};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::verdict::Check;

/// Prompts that the Guard has to serve.
const KEPT: usize = 3;
/// Requests that are with the worker when it dies.
const IN_FLIGHT: usize = 2;

pub(super) fn protection<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let held = Held::and_late(scene, "", KEPT);
        scene.reference(&held.all()).await?;

        held.seed(scene, VICTIM).await?;
        let blocks = held_blocks(scene, VICTIM, "seeded").await?;
        let listing = scene.watch_listing(VICTIM)?;
        let kill = scene.kill(VICTIM).await?;
        if taken_over(scene, &kill, blocks).await?.is_some() {
            knock(scene, &held, &kill.log).await?;
            // From here on only the state agent can tell the router who holds them.
            scene.unlisted(listing, "worker0").await?;
            if serves_late(scene, &held.late, "guard_hinted_after_unlisting").await? {
                served_by_guard(scene, &held.kept, "served").await?;
            }
            taken_over_once(scene, &kill)?;
        }
        bring_back(scene, VICTIM).await?;
        Ok(())
    })
}

pub(super) fn takeover<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let held = Held::new(scene, "", 1);
        let fresh = lot(scene, "in_flight", IN_FLIGHT + 1);
        let late = scene.prompt("too_late", seeded_length(scene));
        let mut all = held.all();
        all.extend(labelled(&fresh));
        all.push(("too_late", &late));
        scene.reference(&all).await?;

        held.seed(scene, VICTIM).await?;
        // The last one is with the worker that lives.
        let mut under_way: Vec<Sent> = Vec::new();
        for (number, (label, prompt)) in fresh.iter().enumerate() {
            let worker = if number < IN_FLIGHT { VICTIM } else { WITNESS };
            under_way.push(scene.send(label, prompt, worker)?);
        }
        let kill = scene.kill(VICTIM).await?;
        // At once: whether or not the Guard is ready yet.
        let knocked = knock(scene, &held, &kill.log).await?;
        let mut lost = Vec::new();
        for (sent, (label, _)) in under_way.into_iter().zip(&fresh) {
            let attempt = scene.arrived(sent).await?;
            let of_the_living = fresh.last().is_some_and(|(last, _)| last == label);
            match &attempt.outcome {
                _ if of_the_living => {
                    answered(scene, label, &attempt)?;
                }
                Ok(seen) => {
                    scene.answers_as_reference(label, seen);
                }
                Err(_) => lost.push(attempt.words()),
            }
        }
        let refused = scene.attempt("too_late", &late, VICTIM).await?;
        refused_or_right(scene, &refused, &mut lost);
        scene.note(format!(
            "{} requests to the dead worker were lost: {}",
            lost.len(),
            lost.join("; ")
        ));
        // Not compared with what was held: whether the requests in flight were stored is open.
        let promotion = scene.promotion(VICTIM, &kill.log).await?;
        if promotion.is_some() && knocked.hit {
            served_by_guard(scene, &held.kept, "served").await?;
            taken_over_once(scene, &kill)?;
        }
        bring_back(scene, VICTIM).await?;
        Ok(())
    })
}

/// A request that was pinned to a worker which is dead may be answered by nobody, or right.
fn refused_or_right(scene: &mut Scene<'_>, attempt: &Attempt, lost: &mut Vec<String>) {
    match &attempt.outcome {
        // Somebody else who answers for it does not say what was asked for.
        Ok(seen) => {
            let words = attempt.words();
            scene.answers_as_reference(&attempt.label, seen);
            scene.check(Check::new(
                "dead_worker_answers_nothing",
                Class::Product,
                false,
                "no answer of a worker that is dead",
                words,
            ));
        }
        Err(_) => lost.push(attempt.words()),
    }
}
