//! A worker comes back: once, twice, both of them.

use crate::cases::scene::Scene;
use crate::cases::scene::harm::{GuardLog, Kill};
use crate::cases::takeover::{
    Held, VICTIM, WITNESS, bring_back, held_blocks, knock, served_by_guard, serves, taken_over,
    taken_over_once, warm,
};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::telemetry::guard::{Event, Promotion};
use crate::verdict::Check;

/// Prompts that a replacement has to have.
const KEPT: usize = 3;

pub(super) fn replacement<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let held = Held::new(scene, "", KEPT);
        scene.reference(&held.all()).await?;

        held.seed(scene, VICTIM).await?;
        let blocks = held_blocks(scene, VICTIM, "seeded").await?;
        let kill = scene.kill(VICTIM).await?;
        let Some(promotion) = taken_over(scene, &kill, blocks).await? else {
            bring_back(scene, VICTIM).await?;
            return Ok(());
        };
        if bring_back(scene, VICTIM).await?.is_none() {
            return Ok(());
        }
        given_back(scene, VICTIM, &promotion, "given_back").await?;
        warm(scene, &held.kept, VICTIM, "warm").await?;
        stands_by(scene, VICTIM, &kill.log)?;
        taken_over_once(scene, &kill)
    })
}

pub(super) fn second_failure<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let first = Held::new(scene, "first_", 2);
        let second = Held::new(scene, "second_", 2);
        scene
            .reference(&[first.all(), second.all()].concat())
            .await?;

        first.seed(scene, VICTIM).await?;
        let blocks = held_blocks(scene, VICTIM, "seeded").await?;
        let kill = scene.kill(VICTIM).await?;
        let survived = taken_over(scene, &kill, blocks).await?.is_some();
        taken_over_once(scene, &kill)?;
        if bring_back(scene, VICTIM).await?.is_none() || !survived {
            return Ok(());
        }

        second.seed(scene, VICTIM).await?;
        let blocks = held_blocks(scene, VICTIM, "seeded_again").await?;
        let kill = scene.kill(VICTIM).await?;
        if taken_over(scene, &kill, blocks).await?.is_some() {
            knock(scene, &second, &kill.log).await?;
            let kept = [&first.kept[..], &second.kept[..]].concat();
            served_by_guard(scene, &kept, "served").await?;
            taken_over_once(scene, &kill)?;
        }
        bring_back(scene, VICTIM).await?;
        Ok(())
    })
}

pub(super) fn both_die<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let of_victim = Held::new(scene, "zero_", 1);
        let of_witness = Held::new(scene, "one_", 1);
        let nobody = scene.prompt("nobody", scene.tokens(1) / 2);
        scene
            .reference(&[of_victim.all(), of_witness.all(), vec![("nobody", &nobody)]].concat())
            .await?;

        of_victim.seed(scene, VICTIM).await?;
        of_witness.seed(scene, WITNESS).await?;
        let held = [
            held_blocks(scene, VICTIM, "seeded").await?,
            held_blocks(scene, WITNESS, "seeded").await?,
        ];
        let kills: [Kill; 2] = [scene.kill(VICTIM).await?, scene.kill(WITNESS).await?];
        let apart_ms = kills[1].at.saturating_sub(kills[0].at) as f64 / 1e6;
        scene.note(format!("the two were killed {apart_ms:.0} ms apart"));
        let mut survived = true;
        for (kill, held) in kills.iter().zip(held) {
            survived &= taken_over(scene, kill, held).await?.is_some();
        }
        // Nobody is left to answer, and that has to be said.
        let alone = scene.attempt("nobody", &nobody, WITNESS).await?;
        scene.check(Check::new(
            "no_answer_without_workers",
            Class::Product,
            alone.outcome.is_err(),
            "a refusal",
            alone.words(),
        ));

        let listings = [scene.watch_listing(VICTIM)?, scene.watch_listing(WITNESS)?];
        let replaced = scene.replace_both([VICTIM, WITNESS]).await?;
        for (worker, listing) in listings.into_iter().enumerate() {
            scene.unlisted(listing, &format!("worker{worker}")).await?;
        }
        let mut whole = true;
        for (worker, replaced) in [VICTIM, WITNESS].into_iter().zip(replaced) {
            whole &= serves(scene, worker, replaced).is_some();
        }
        if whole && survived {
            warm(scene, &of_victim.kept, VICTIM, "warm0").await?;
            warm(scene, &of_witness.kept, WITNESS, "warm1").await?;
        }
        for kill in &kills {
            taken_over_once(scene, kill)?;
        }
        Ok(())
    })
}

/// Checks that the pool came back with everything that its Guard had recovered.
async fn given_back(
    scene: &mut Scene<'_>,
    worker: usize,
    promotion: &Promotion,
    name: &str,
) -> Result<(), Failure> {
    let found = held_blocks(scene, worker, name).await?;
    let expected = promotion.recovered_blocks;
    scene.check(Check::new(
        format!("pool_given_back[worker{worker}]"),
        match (expected, found) {
            (Some(_), Some(_)) => Class::Product,
            _ => Class::Inconclusive,
        },
        expected.is_some() && found == expected,
        format_args!("{expected:?} blocks, as the Guard recovered"),
        format_args!("{found:?} blocks"),
    ));
    Ok(())
}

/// Checks that a Guard stands behind the replacement: it was attached once since the kill.
fn stands_by(scene: &mut Scene<'_>, worker: usize, log: &GuardLog) -> Result<(), Failure> {
    let journal = log.journal()?;
    let attached = journal.count(|event| matches!(event, Event::Attached { .. })) as u64;
    scene.check(Check::exactly(
        format!("guard_stands_by[worker{worker}]"),
        Class::Product,
        "claims since the kill",
        1,
        attached,
    ));
    Ok(())
}
