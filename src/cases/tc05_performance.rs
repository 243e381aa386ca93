//! TC-05: what a hit is worth. The same prompt is computed by an engine without KVCR (`off`),
//! computed with it (`cold`), loaded from the worker's own tier (`local`), fetched from a peer
//! (`peer`), and fetched from the Guard of a dead peer (`guard`); each is streamed and timed.
//!
//! The functional verdict is that each was what it claims, by its own answer and by the counters of
//! every round, and that all answered alike: nothing is fast that is wrong. Times are judged where
//! the profile says that its devices are dedicated ([`crate::performance::judge`]); they are evidence
//! everywhere.
//!
//! What is measured is the same worker in all arms with KVCR: worker 1. Worker 0 is the peer, and in
//! `tc05::guard` the one that is dead.

mod room;
mod rounds;

use super::scene::Scene;
use super::scene::harm::Kill;
use super::scene::streamed::Whom;
use super::seed::introduce;
use super::takeover::{
    Held, VICTIM, WITNESS, asked_late, bring_back, held_blocks, knock, taken_over, taken_over_once,
};
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::{Class, Failure};
use crate::gate::Wants;
use crate::performance::Arm as Way;
use crate::stack::protocol::Mode;
use crate::verdict::Check;
use rounds::Rounds;

/// The case.
pub const CASE: Case = Case {
    id: "tc05",
    title: "performance arms",
    arms: &[
        Arm {
            name: "tc05::tiers",
            claim: "a prompt that is computed, loaded from the worker's own tier, or fetched from a peer is just that in every round, and answered as without KVCR",
            mode: Mode::Exclusive,
            wants: Wants::DenseHints,
            story: tiers,
        },
        Arm {
            name: "tc05::guard",
            claim: "a prompt that the Guard of a dead peer serves is just that in every round, and answered as without KVCR",
            mode: Mode::Exclusive,
            wants: Wants::Guards,
            story: guard,
        },
    ],
};

fn tiers<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let ways = [Way::Off, Way::Cold, Way::Local, Way::Peer];
        let mut rounds = Rounds::new(scene, &ways)?;
        room::for_local(scene, ways.len() as u64)?;
        rounds.ask_reference(scene).await?;
        introduce(scene, "", VICTIM, WITNESS).await?;
        for round in 0..rounds.count() {
            rounds.seed_peer(scene, round).await?;
            rounds.seed_local(scene, round).await?;
            rounds.measure(scene, round, &[VICTIM, WITNESS]).await?;
        }
        rounds.conclude(scene)
    })
}

/// Deaths of which one has to leave the router with the Guard: it may lose it when it unlists the
/// worker (`docs/findings/guard.md`), and then there is nothing to measure.
const DEATHS: usize = 3;

fn guard<'a>(scene: &'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>> {
    Box::pin(async move {
        let ways = [Way::Off, Way::Cold, Way::Local, Way::Guard];
        let mut rounds = Rounds::new(scene, &ways)?;
        let deaths: Vec<Held> = (0..DEATHS)
            .map(|death| Held::and_late(scene, &format!("death{death}_"), 0))
            .collect();
        room::for_local(scene, ways.len() as u64)?;
        room::for_held(scene, rounds.count() as u64, &deaths)?;
        rounds.ask_reference(scene).await?;
        let beside: Vec<_> = deaths.iter().flat_map(Held::all).collect();
        scene.reference(&beside).await?;

        rounds.seed_guarded(scene).await?;
        for held in &deaths {
            if let Some(kill) = found_without_worker(scene, held).await? {
                for round in 0..rounds.count() {
                    rounds.seed_local(scene, round).await?;
                    rounds.measure(scene, round, &[WITNESS]).await?;
                }
                rounds.conclude(scene)?;
                taken_over_once(scene, &kill)?;
                bring_back(scene, VICTIM).await?;
                return Ok(());
            }
            if bring_back(scene, VICTIM).await?.is_none() {
                break;
            }
        }
        scene.check(Check::new(
            "guard_hinted_after_unlisting",
            Class::Product,
            false,
            format_args!("one of {DEATHS} deaths leaves a Guard that the router hints at"),
            "none did",
        ));
        Ok(())
    })
}

/// Kills worker 0, and waits until the front door lists it no more; the kill, if its Guard is
/// hinted at then.
async fn found_without_worker(scene: &mut Scene<'_>, held: &Held) -> Result<Option<Kill>, Failure> {
    held.seed(scene, VICTIM).await?;
    let round = held.knocks[0].0.clone();
    let blocks = held_blocks(scene, VICTIM, &format!("{round}.seeded")).await?;
    let listing = scene.watch_listing(VICTIM)?;
    let kill = scene.kill(VICTIM).await?;
    if taken_over(scene, &kill, blocks).await?.is_none()
        || !knock(scene, held, &kill.log).await?.hit
    {
        return Ok(None);
    }
    scene.unlisted(listing, &round).await?;
    let (hit, _) = asked_late(scene, &held.late).await?;
    Ok(hit.then_some(kill))
}

/// Who is asked, and under which salt, in one way.
fn addressed(scene: &Scene<'_>, way: Way, round: usize) -> (Whom, Option<String>) {
    let own = || scene.salt_of(&format!("{way}{round}"));
    match way {
        Way::Off => (Whom::Reference, Some(own())),
        Way::Cold | Way::Local => (Whom::Worker(WITNESS), Some(own())),
        // Where a state agent runs, the router hints no request with a salt.
        Way::Peer => (Whom::Worker(WITNESS), scene.is_salted().then(own)),
        Way::Guard => (Whom::Worker(WITNESS), None),
    }
}
