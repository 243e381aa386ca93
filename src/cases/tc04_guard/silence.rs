//! What is not dead but silent, and what dies beside the workers.

use crate::cases::scene::Scene;
use crate::cases::seed::seeded_length;
use crate::cases::takeover::{
    Held, VICTIM, WITNESS, answered, bring_back, came_up, held_blocks, knock, recovered, warm,
};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::stack::harm::Blow;
use crate::verdict::Check;

pub(super) fn guard_death<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let held = Held::new(scene, "", 1);
        let length = seeded_length(scene);
        let of_ward = scene.prompt("of_ward", length);
        let of_other = scene.prompt("of_other", length);
        let of_new = scene.prompt("of_new", length);
        let fresh = [
            ("of_ward", &of_ward),
            ("of_other", &of_other),
            ("of_new", &of_new),
        ];
        scene
            .reference(&[held.all(), fresh.to_vec()].concat())
            .await?;

        held.seed(scene, VICTIM).await?;
        scene.kill_service(VICTIM).await?;
        // The worker whose Guard is dead may stop or go on; what it answers has to be right.
        let asked = scene.attempt("of_ward", &of_ward, VICTIM).await?;
        let words = asked.words();
        if let Ok(seen) = &asked.outcome {
            scene.answers_as_reference("of_ward", seen);
        }
        let other = scene.attempt("of_other", &of_other, WITNESS).await?;
        answered(scene, "of_other", &other)?;
        let died = scene.has_died(VICTIM)?;
        scene.check(Check::new(
            "ward_serves_or_stops",
            Class::Product,
            died || asked.outcome.is_ok(),
            "a worker without its Guard's service answers, or ends",
            format_args!("{words}, and the worker runs"),
        ));
        scene.note(format!(
            "after the death of its kvcr_service the worker {}: {words}",
            if died { "ended" } else { "went on" }
        ));

        // Whatever it does now, its pool is nobody's: both are started anew.
        let service = scene.replace_service(VICTIM).await?;
        let expected = "a new kvcr_service on the same socket";
        let service = came_up(scene, "service_comes_back", expected, service).is_some();
        scene.kill_whole(VICTIM).await?;
        if bring_back(scene, VICTIM).await?.is_some() && service {
            let seen = scene.ask("of_new", &of_new, VICTIM).await?;
            scene.answers_as_reference("of_new", &seen);
            scene.hit(&seen, 0..=0);
        }
        Ok(())
    })
}

pub(super) fn hung_worker<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let held = Held::new(scene, "", 1);
        scene.reference(&held.all()).await?;

        held.seed(scene, VICTIM).await?;
        let blocks = held_blocks(scene, VICTIM, "seeded").await?;
        match scene.config().profile.kvcr.heartbeat_timeout_ms {
            Some(_) => taken_over_while_silent(scene, &held, blocks).await?,
            None => left_alone_while_silent(scene, &held).await?,
        }
        // One that was stopped for longer than an operation may take serves no peer any more.
        let promoted = scene.has_died(VICTIM)?;
        if !promoted {
            scene.kill_whole(VICTIM).await?;
        }
        if bring_back(scene, VICTIM).await?.is_some() {
            warm(scene, &held.kept, VICTIM, "warm").await?;
        }
        Ok(())
    })
}

/// With a heartbeat the Guard kills who is silent, and takes over.
async fn taken_over_while_silent(
    scene: &mut Scene<'_>,
    held: &Held,
    blocks: Option<u64>,
) -> Result<(), Failure> {
    let (log, _) = scene.strike_core(VICTIM, Blow::Stop).await?;
    if let Some(promotion) = scene.promotion(VICTIM, &log).await? {
        recovered(scene, VICTIM, &promotion, blocks);
        knock(scene, held, &log).await?;
    }
    Ok(())
}

/// Without one nobody takes over from the living: requests for its blocks are computed instead,
/// and it answers again when it goes on.
async fn left_alone_while_silent(scene: &mut Scene<'_>, held: &Held) -> Result<(), Failure> {
    let (log, _) = scene.strike_core(VICTIM, Blow::Stop).await?;
    // It is hinted to the silent worker, and waits until the transfer is given up: longer than
    // a Guard needs that took it for dead.
    let mut words = Vec::new();
    for (label, prompt) in &held.knocks {
        let attempt = scene.attempt(label, prompt, WITNESS).await?;
        answered(scene, label, &attempt)?;
        words.push(attempt.words());
    }
    scene.note(format!("while it was stopped: {}", words.join("; ")));
    let journal = log.journal()?;
    if let Some(strange) = journal.strange() {
        return Err(strange);
    }
    scene.check(Check::exactly(
        "living_worker_not_taken_over",
        Class::Product,
        "promotions of a Guard without heartbeat",
        0,
        journal.promotions().len() as u64,
    ));
    scene.strike_core(VICTIM, Blow::Continue).await?;
    let (label, prompt) = &held.kept[0];
    let attempt = scene
        .attempt(&format!("{label}.continued"), prompt, VICTIM)
        .await?;
    scene.check(Check::new(
        "continued_worker_answers",
        Class::Product,
        attempt.outcome.is_ok(),
        "an answer of the worker that goes on",
        attempt.words(),
    ));
    if let Ok(seen) = &attempt.outcome {
        scene.answers_as_reference(label, seen);
    }
    Ok(())
}
