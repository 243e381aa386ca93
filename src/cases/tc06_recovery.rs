//! TC-06: how long it takes until the blocks of a dead worker are served again, and until the
//! worker is back; and what that costs by the blocks that are recovered.
//!
//! The functional verdict is that every kill ends in a Guard hit and a warm replacement. Times are
//! judged only by the budget that the profile says; they are evidence everywhere
//! (`timeline.json`, `cost.json`).

mod cost;
mod judge;

use serde::Serialize;

use super::scene::Scene;
use super::takeover::{
    Held, VICTIM, answered, held_blocks, in_order, knock, recovered, start_again, taken_over_once,
};
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::gate::Wants;
use crate::stack::protocol::Mode;
use crate::timeline::{Moment, Spread, Timeline, spreads};
use crate::verdict::Check;

/// The case.
pub const CASE: Case = Case {
    id: "tc06",
    title: "Guard recovery timing",
    arms: &[
        Arm {
            name: "tc06::recovery",
            claim: "every kill ends in a Guard hit and a warm replacement, within the budget of the profile",
            mode: Mode::Exclusive,
            wants: Wants::Guards,
            story: recovery,
        },
        Arm {
            name: "tc06::cost_curve",
            claim: "a takeover costs no more than in proportion to the blocks that it recovers",
            mode: Mode::Exclusive,
            // It empties a pool by a new service.
            wants: Wants::OwnServices,
            story: cost::curve,
        },
    ],
};

/// What is kept beside the result.
#[derive(Debug, Serialize)]
struct Document<'a> {
    /// In milliseconds after the kill.
    spreads: std::collections::BTreeMap<Moment, Spread>,
    /// Milliseconds that the first request after each kill took.
    stalls_ms: &'a [f64],
    /// `CLOCK_MONOTONIC`, nanoseconds.
    kills: &'a [Timeline],
}

fn recovery<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let kills = scene.config().kills;
        scene.unpinned("how many prompts there are is the run's to say");
        let rounds: Vec<Held> = (0..kills)
            .map(|kill| Held::new(scene, &format!("kill{kill}_"), 1))
            .collect();
        let all: Vec<_> = rounds.iter().flat_map(Held::all).collect();
        scene.reference(&all).await?;

        let mut timelines = Vec::new();
        let mut stalls = Vec::new();
        let mut hits = 0;
        for held in &rounds {
            let (timeline, stall) = one_kill(scene, held).await?;
            hits += u64::from(timeline.moments.contains_key(&Moment::FirstGuardHit));
            timelines.push(timeline);
            stalls.extend(stall);
            // After every kill: what ends the arm early must not take the times with it.
            let document = Document {
                spreads: spreads(&timelines),
                stalls_ms: &stalls,
                kills: &timelines,
            };
            scene.keep("timeline.json", &document)?;
        }
        scene.check(Check::exactly(
            "guard_hits",
            Class::Product,
            "kills that ended in a Guard hit",
            kills as u64,
            hits,
        ));
        let spreads = spreads(&timelines);
        for (moment, spread) in &spreads {
            scene.note(format!("{}: {spread}", moment.words()));
        }
        let profile = &scene.config().profile;
        let checks = [
            judge::budgets(&profile.budget, &timelines),
            judge::stalls(profile.kvcr.operation_timeout_ms, &stalls),
        ];
        if let Some(spread) = Spread::of(&stalls) {
            scene.note(format!(
                "first request after a kill (it waits for a transfer that nobody answers): {spread}"
            ));
        }
        scene.checks(checks.concat());
        Ok(())
    })
}

/// One kill from the seed to the warm replacement; the length of the first request after it.
async fn one_kill(scene: &mut Scene<'_>, held: &Held) -> Result<(Timeline, Option<f64>), Failure> {
    held.seed(scene, VICTIM).await?;
    let round = held.kept[0].0.clone();
    let blocks = held_blocks(scene, VICTIM, &format!("{round}.seeded")).await?;
    let listing = scene.watch_listing(VICTIM)?;
    let kill = scene.kill(VICTIM).await?;
    let mut timeline = Timeline::new(kill.at);
    timeline.reached(Moment::Died, kill.died);

    let knocked = knock(scene, held, &kill.log).await?;
    for (attempt, judged) in &knocked.attempts {
        let Some(judged) = judged else { continue };
        timeline.reached(Moment::FirstResponse, attempt.done_ns);
        if judged.right {
            timeline.reached(Moment::FirstCorrectResponse, attempt.done_ns);
        }
        if judged.right && judged.hit {
            timeline.reached(Moment::FirstGuardHit, attempt.done_ns);
        }
    }
    let stall = knocked
        .attempts
        .first()
        .map(|(attempt, _)| attempt.took_ms());
    if let Some(promotion) = scene.promotion(VICTIM, &kill.log).await? {
        timeline.take(&promotion);
        in_order(scene, VICTIM, &timeline);
        recovered(scene, VICTIM, &promotion, blocks);
    }
    if let Some(replacement) = start_again(scene, VICTIM).await? {
        timeline.reached(Moment::ReplacementStarted, replacement.started_ns);
        timeline.reached(Moment::ReplacementRegistered, replacement.listed_ns);
        timeline.reached(Moment::ReplacementServing, replacement.canary_ns);
        let (label, prompt) = &held.kept[0];
        let attempt = scene.attempt(label, prompt, VICTIM).await?;
        let warm = answered(scene, label, &attempt)?.is_some_and(|judged| judged.hit);
        scene.check(Check::new(
            format!("replacement_is_warm[{label}]"),
            Class::Product,
            warm,
            "the first request of the replacement hits its predecessor's blocks",
            attempt.words(),
        ));
        if warm {
            timeline.reached(Moment::ReplacementWarm, attempt.done_ns);
        }
    }
    let unlisted = scene.unlisted(listing, &round).await?;
    if let Some(at) = unlisted {
        timeline.reached(Moment::Unlisted, at);
    }
    taken_over_once(scene, &kill)?;
    scene.note(format!(
        "{round}, in ms after the kill: {}",
        timeline.line()
    ));
    Ok((timeline, stall))
}
