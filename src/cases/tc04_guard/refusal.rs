//! A worker comes back that must not.

use crate::cases::scene::Scene;
use crate::cases::takeover::{
    Held, VICTIM, WITNESS, bring_back, held_blocks, knock, refused, served_by_guard, serves_late,
    taken_over, taken_over_once, warm,
};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::stack::harm::Changes;
use crate::verdict::Check;

/// A digest that no layout has.
const OTHER_DIGEST: &str = "f00df00df00df00df00df00df00df00df00df00df00df00df00df00df00df00d";
/// How a service refuses another layout.
const DIGEST_WORDS: &[&str] = &["KVCR compatibility digest does not match"];
/// How a service refuses a pool that is not to be had.
const CLAIM_WORDS: &[&str] = &[
    "is held by another worker",
    "cannot be moved to",
    "is busy",
    "claimed with another tier configuration",
];

pub(super) fn digest_mismatch<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    let changes = Changes {
        digest: Some(OTHER_DIGEST.to_owned()),
        ..Changes::default()
    };
    Box::pin(refused_then_right(
        scene,
        changes,
        DIGEST_WORDS,
        Class::Skew,
    ))
}

pub(super) fn claim_refused<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    let changes = Changes {
        service_of: Some(WITNESS),
        ..Changes::default()
    };
    Box::pin(async move {
        // The pool that is asked for belongs to somebody, and has to stay theirs.
        let theirs = Held::new(scene, "theirs_", 1);
        scene.reference(&theirs.all()).await?;
        theirs.seed(scene, WITNESS).await?;
        let before = held_blocks(scene, WITNESS, "theirs_before").await?;
        refused_then_right(scene, changes, CLAIM_WORDS, Class::Environment).await?;
        let log = scene.guard_log(WITNESS)?;
        let after = held_blocks(scene, WITNESS, "theirs_after").await?;
        scene.check(Check::new(
            "other_pool_unharmed",
            Class::Product,
            before.is_some() && after >= before,
            format_args!("at least {before:?} blocks"),
            format_args!("{after:?} blocks"),
        ));
        let taken = log.journal()?.promotions().len();
        scene.check(Check::exactly(
            "other_guard_stays_on_standby",
            Class::Product,
            "promotions",
            0,
            taken as u64,
        ));
        Ok(())
    })
}

/// A replacement with `changes` is refused in `words`; the Guard serves on, and the right one gets
/// its pool.
async fn refused_then_right(
    scene: &mut Scene<'_>,
    changes: Changes,
    words: &[&str],
    class: Class,
) -> Result<(), Failure> {
    let held = Held::and_late(scene, "", 2);
    scene.reference(&held.all()).await?;

    held.seed(scene, VICTIM).await?;
    let blocks = held_blocks(scene, VICTIM, "seeded").await?;
    let kill = scene.kill(VICTIM).await?;
    let survived = taken_over(scene, &kill, blocks).await?.is_some();
    if survived {
        knock(scene, &held, &kill.log).await?;
        served_by_guard(scene, &held.kept[..1], "served").await?;
    }
    if let Some(refusal) = refused(scene, changes, words).await? {
        scene.note(format!(
            "the refused replacement took {:.1} s to end",
            refusal
                .death
                .monotonic_ns
                .saturating_sub(refusal.started_ns) as f64
                / 1e9
        ));
        // A person has to be led to the right place: the log of the product alone is not enough.
        let told = refusal.failure.class;
        if told != class {
            scene.note(format!(
                "its log is read as {told}, where {class} was meant: {}",
                refusal.failure
            ));
        }
    }
    if survived {
        serves_late(scene, &held.late, "guard_serves_on").await?;
    }
    if bring_back(scene, VICTIM).await?.is_some() && survived {
        warm(scene, &held.kept[1..], VICTIM, "warm").await?;
        taken_over_once(scene, &kill)?;
    }
    Ok(())
}
