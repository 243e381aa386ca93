//! Steps of the stories in which a worker dies: what it held, who serves it afterwards, and how
//! the stack becomes whole again.
//!
//! Worker 0 is the one that dies and worker 1 the one that lives. What only a Guard can have is
//! proven by place: worker 0 is dead, the prompt was never asked of worker 1, and worker 1 counts
//! blocks that a peer delivered.

use super::flow::Flow;
use super::scene::Scene;
use super::scene::harm::{Attempt, GuardLog, Kill};
use super::seed::{introduce, labelled, lot, meet, seed_each};
use crate::client::Observation;
use crate::failure::{Class, Failure};
use crate::geometry::Geometry;
use crate::prompt::Prompt;
use crate::stack::harm::{Changes, Refusal, Replaced, Replacement};
use crate::telemetry::guard::{Event, Promotion};
use crate::timeline::{Moment, Timeline};
use crate::verdict::Check;

/// The worker that dies.
pub(super) const VICTIM: usize = 0;
/// The worker that lives.
pub(super) const WITNESS: usize = 1;
/// Requests after a kill of which one has to be served by the Guard. It answers at the dead
/// worker's endpoint without knowing its peers: they have to notice, and to make friends again.
const KNOCKS: usize = 3;

/// Requests after the dead worker was unlisted of which one has to be served by the Guard.
const LATE: usize = 3;

/// Prompts that worker 0 holds, by what they are for.
#[derive(Debug)]
pub(super) struct Held {
    /// Tells several lots of one arm apart.
    round: String,
    /// Asked one after the other until the Guard serves one.
    pub(super) knocks: Vec<(String, Prompt)>,
    /// Asked when it does.
    pub(super) kept: Vec<(String, Prompt)>,
    /// Asked one after the other when the dead worker is unlisted: the Guard serves the last one.
    pub(super) late: Vec<(String, Prompt)>,
}

impl Held {
    /// `kept` prompts beside those that knock; `round` tells several lots of one arm apart.
    pub(super) fn new(scene: &Scene<'_>, round: &str, kept: usize) -> Self {
        Self {
            round: round.to_owned(),
            knocks: lot(scene, &format!("{round}knock"), KNOCKS),
            kept: lot(scene, &format!("{round}kept"), kept),
            late: Vec::new(),
        }
    }

    /// The same, and prompts for when the dead worker is unlisted.
    pub(super) fn and_late(scene: &Scene<'_>, round: &str, kept: usize) -> Self {
        Self {
            late: lot(scene, &format!("{round}late"), LATE),
            ..Self::new(scene, round, kept)
        }
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<(&str, &Prompt)> {
        let lots = [&self.knocks, &self.kept, &self.late];
        lots.into_iter().flat_map(|lot| labelled(lot)).collect()
    }

    /// Has `worker` compute them, once it serves the other one as it should: whether its Guard
    /// does as much is the question of every story here, and not whether it ever did.
    pub(super) async fn seed(&self, scene: &mut Scene<'_>, worker: usize) -> Result<(), Failure> {
        let other = if worker == VICTIM { WITNESS } else { VICTIM };
        acquaint(scene, &self.round, worker, other).await?;
        seed_each(scene, &self.all(), worker).await
    }
}

/// Has `source` serve `target` once, where one of them was started again. A router that hints at a
/// worker no more although it lives (`docs/findings/guard.md`) has that said of it, and is given
/// another one in its place: what the arm asks is whether the Guard does as much as the worker did.
async fn acquaint(
    scene: &mut Scene<'_>,
    role: &str,
    source: usize,
    target: usize,
) -> Result<(), Failure> {
    if meet(scene, "router_hints_again", role, source, target).await? {
        return Ok(());
    }
    scene.kill_whole(source).await?;
    if bring_back(scene, source).await?.is_some() {
        introduce(scene, &format!("{role}again_"), source, target).await?;
    }
    Ok(())
}

/// Blocks that `worker`'s pool holds, as KVCR counts them, once nothing moves any more.
pub(super) async fn held_blocks(
    scene: &mut Scene<'_>,
    worker: usize,
    name: &str,
) -> Result<Option<u64>, Failure> {
    let counters = scene.counters_of(&[worker], name).await?;
    Ok(counters.state(worker, "local_g2_allocated_slots"))
}

/// Waits for the takeover that follows `kill`, and checks that nothing was lost: `held` is what
/// the pool held. `None` if there was none.
pub(super) async fn taken_over(
    scene: &mut Scene<'_>,
    kill: &Kill,
    held: Option<u64>,
) -> Result<Option<Promotion>, Failure> {
    let Some(promotion) = scene.promotion(kill.worker, &kill.log).await? else {
        return Ok(None);
    };
    let mut timeline = Timeline::new(kill.at);
    timeline.reached(Moment::Died, kill.died);
    timeline.take(&promotion);
    scene.note(format!("after the kill, in ms: {}", timeline.line()));
    in_order(scene, kill.worker, &timeline);
    recovered(scene, kill.worker, &promotion, held);
    Ok(Some(promotion))
}

/// Checks that the Guard's clock is ours.
pub(super) fn in_order(scene: &mut Scene<'_>, worker: usize, timeline: &Timeline) {
    let disorder = timeline.disorder();
    scene.check(Check::new(
        format!("guard_stages_in_order[worker{worker}]"),
        Class::Inconclusive,
        disorder.is_empty(),
        "every stage after the one before it, on the clock of this host",
        if disorder.is_empty() {
            "so".to_owned()
        } else {
            disorder.join(", ")
        },
    ));
}

/// Checks that the Guard found all that the pool held.
pub(super) fn recovered(
    scene: &mut Scene<'_>,
    worker: usize,
    promotion: &Promotion,
    held: Option<u64>,
) {
    let name = format!("blocks_recovered[worker{worker}]");
    let check = match (held, promotion.recovered_blocks) {
        (Some(held), Some(found)) => Check::exactly(name, Class::Product, "blocks", held, found),
        (held, found) => Check::new(
            name,
            Class::Inconclusive,
            false,
            "what the pool held, and what the Guard recovered",
            format_args!("held {held:?}, recovered {found:?}"),
        ),
    };
    scene.check(check);
}

/// Checks that there was one takeover for the one kill: at the end, when another had its chance.
pub(super) fn taken_over_once(scene: &mut Scene<'_>, kill: &Kill) -> Result<(), Failure> {
    let journal = kill.log.journal()?;
    let count = journal
        .promotions()
        .iter()
        .filter(|promotion| promotion.complete)
        .count() as u64;
    scene.check(Check::exactly(
        format!("one_takeover_a_kill[worker{}]", kill.worker),
        Class::Product,
        "promotions",
        1,
        count,
    ));
    let cold = journal.count(|event| *event == Event::Cold) as u64;
    scene.check(Check::exactly(
        format!("pool_not_cold[worker{}]", kill.worker),
        Class::Product,
        "takeovers of an empty pool",
        0,
        cold,
    ));
    Ok(())
}

/// What came of knocking.
#[derive(Debug)]
pub(super) struct Knocked {
    /// Every request in order, and what its answer was; the last one is the hit, if there is one.
    pub(super) attempts: Vec<(Attempt, Option<Judged>)>,
    /// Whether the last one was served by the Guard.
    pub(super) hit: bool,
}

/// What an answer was.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Judged {
    /// It is the reference's.
    pub(super) right: bool,
    /// It was a hit, as far as the reference could reuse.
    pub(super) hit: bool,
}

/// Asks worker 1 for prompts of the dead worker 0 until the Guard serves one: the first at once,
/// the others when it has taken over. Every answer has to be the reference's; those that came
/// without the Guard are counted.
pub(super) async fn knock(
    scene: &mut Scene<'_>,
    held: &Held,
    log: &GuardLog,
) -> Result<Knocked, Failure> {
    let mut attempts = Vec::new();
    let mut hit = false;
    for (label, prompt) in &held.knocks {
        let attempt = scene.attempt(label, prompt, WITNESS).await?;
        let judged = answered(scene, label, &attempt)?;
        hit = judged.is_some_and(|judged| judged.hit);
        attempts.push((attempt, judged));
        if hit {
            break;
        }
        if attempts.len() == 1 && scene.wait_for_promotion(log).await?.is_err() {
            // Nobody will ever serve it.
            break;
        }
    }
    said(scene, held, &attempts, hit);
    Ok(Knocked { attempts, hit })
}

/// Checks the answer of a worker that lives: there is one, and it is the reference's. `None`
/// without an answer.
pub(super) fn answered(
    scene: &mut Scene<'_>,
    label: &str,
    attempt: &Attempt,
) -> Result<Option<Judged>, Failure> {
    scene.check(Check::new(
        format!("living_worker_answers[{label}]"),
        Class::Product,
        attempt.outcome.is_ok(),
        "an answer",
        attempt.words(),
    ));
    let Ok(seen) = &attempt.outcome else {
        return Ok(None);
    };
    let right = scene.answers_as_reference(label, seen);
    let reused = scene.reference_reused(label)?;
    // All or nothing: less than the reference reuses is neither a hit nor a cold answer.
    let cached = seen.cached_tokens;
    scene.check(Check::new(
        format!("hit_or_cold[{label}]"),
        if cached.is_some() {
            Class::Product
        } else {
            Class::Inconclusive
        },
        cached == Some(0) || cached == Some(reused),
        format_args!("{reused} tokens cached, or none"),
        format_args!("{cached:?}"),
    ));
    let hit = cached == Some(reused) && reused > 0;
    Ok(Some(Judged { right, hit }))
}

fn said(scene: &mut Scene<'_>, held: &Held, attempts: &[(Attempt, Option<Judged>)], hit: bool) {
    let words: Vec<String> = attempts
        .iter()
        .map(|(attempt, _)| attempt.words())
        .collect();
    scene.note(format!("after the kill: {}", words.join("; ")));
    let round = held.knocks.first().map_or("", |(label, _)| label.as_str());
    scene.check(Check::new(
        format!("guard_serves[{round}]"),
        Class::Product,
        hit,
        format_args!("the Guard serves one of {KNOCKS} prompts that the dead worker held"),
        words.join("; "),
    ));
}

/// Asks worker 1 for what is left, all of which the Guard has to serve: to the token, the block
/// and the byte.
pub(super) async fn served_by_guard(
    scene: &mut Scene<'_>,
    kept: &[(String, Prompt)],
    name: &str,
) -> Result<(), Failure> {
    all_hit(scene, kept, WITNESS, name, "", Flow::fetched).await
}

/// Asks worker 1 for prompts of the dead worker when its lease is over, and only the state agent can
/// tell the router of its Guard, one after the other; whether the Guard served the last one, and what
/// came of each. While it takes notice that the worker is gone, a router hints at nobody for a moment, or
/// still at the Guard that it is about to lose; one that lost it hints at nobody until a worker comes or
/// goes (`docs/findings/guard.md`). So the first of them tell nothing.
pub(super) async fn asked_late(
    scene: &mut Scene<'_>,
    late: &[(String, Prompt)],
) -> Result<(bool, String), Failure> {
    let mut hit = false;
    let mut words = Vec::new();
    for (label, prompt) in late {
        let attempt = scene.attempt(label, prompt, WITNESS).await?;
        hit = answered(scene, label, &attempt)?.is_some_and(|judged| judged.hit);
        words.push(attempt.words());
    }
    let words = words.join("; ");
    scene.note(format!("long after the kill: {words}"));
    Ok((hit, words))
}

/// [`asked_late`], and the check `name` that the Guard served the last one.
pub(super) async fn serves_late(
    scene: &mut Scene<'_>,
    late: &[(String, Prompt)],
    name: &str,
) -> Result<bool, Failure> {
    let (hit, words) = asked_late(scene, late).await?;
    scene.check(Check::new(
        name,
        Class::Product,
        hit,
        format_args!(
            "long after the kill the Guard serves the last of {} prompts that the dead worker held",
            late.len()
        ),
        words,
    ));
    Ok(hit)
}

/// Asks a replacement for what its predecessor held, all of which its own pool has to give.
pub(super) async fn warm(
    scene: &mut Scene<'_>,
    kept: &[(String, Prompt)],
    worker: usize,
    name: &str,
) -> Result<(), Failure> {
    all_hit(scene, kept, worker, name, ".again", Flow::delivered).await
}

/// Asks `worker` for all of `kept`, each of which has to hit as the reference reuses it; `from` says
/// where the pages of a hit come from.
async fn all_hit(
    scene: &mut Scene<'_>,
    kept: &[(String, Prompt)],
    worker: usize,
    name: &str,
    suffix: &str,
    from: fn(&Observation, u64, Geometry) -> Flow,
) -> Result<(), Failure> {
    let blocks = scene.blocks();
    let before = scene
        .counters_of(&[worker], &format!("{name}_before"))
        .await?;
    let mut flow = Flow::default();
    for (label, prompt) in kept {
        let asked = format!("{label}{suffix}");
        let seen = scene.ask(&asked, prompt, worker).await?;
        let reused = scene.reference_reused(label)?;
        scene.answers_as_reference(label, &seen);
        scene.hit_as_reused(&seen, reused);
        flow += from(&seen, reused, blocks);
    }
    let deltas = scene.since(&before, name).await?;
    scene.checks(flow.checks(worker, deltas.worker(worker), blocks));
    Ok(())
}

/// Starts `worker` again as the plan has it, and waits until the front door lists its predecessor no
/// more: a replacement may be faster than a lease, and while both are listed the router sends peers
/// to the one that is dead. Leaves the check that it serves; `None` if it does not.
pub(super) async fn bring_back(
    scene: &mut Scene<'_>,
    worker: usize,
) -> Result<Option<Replacement>, Failure> {
    let listing = scene.watch_listing(worker)?;
    let replacement = start_again(scene, worker).await?;
    scene.unlisted(listing, &format!("worker{worker}")).await?;
    Ok(replacement)
}

/// The same without waiting for its predecessor.
pub(super) async fn start_again(
    scene: &mut Scene<'_>,
    worker: usize,
) -> Result<Option<Replacement>, Failure> {
    if scene.service_has_died(worker) {
        scene.note(format!(
            "the service of worker{worker}'s Guard died, and is started anew"
        ));
        scene.replace_service(worker).await?;
    }
    let replaced = scene.replace(worker, Changes::default()).await?;
    Ok(serves(scene, worker, replaced))
}

/// Leaves the check that a replacement of `worker` serves.
pub(super) fn serves(
    scene: &mut Scene<'_>,
    worker: usize,
    replaced: Replaced,
) -> Option<Replacement> {
    let name = format!("replacement_serves[worker{worker}]");
    came_up(scene, &name, "it serves", replaced)
}

/// Leaves the check `name` that what was started again serves.
pub(super) fn came_up(
    scene: &mut Scene<'_>,
    name: &str,
    expected: &str,
    replaced: Replaced,
) -> Option<Replacement> {
    let (serving, found) = match replaced {
        Replaced::Serving(replacement) => (Some(*replacement), "it serves".to_owned()),
        Replaced::Refused(refusal) => (None, refusal.failure.to_string()),
    };
    let held = serving.is_some();
    scene.check(Check::new(name, Class::Product, held, expected, found));
    serving
}

/// Starts worker 0 in a way that its service has to refuse, and checks that it was: before it
/// served, and in one of these `words`.
pub(super) async fn refused(
    scene: &mut Scene<'_>,
    changes: Changes,
    words: &[&str],
) -> Result<Option<Refusal>, Failure> {
    let replaced = scene.replace(VICTIM, changes).await?;
    let (held, found, refusal) = match replaced {
        Replaced::Serving(replacement) => (
            false,
            format!("it serves as process {}", replacement.process.pid),
            None,
        ),
        Replaced::Refused(refusal) => {
            let text = format!("{} {}", refusal.failure, refusal.lines.join("\n"));
            let line = words.iter().find(|word| text.contains(*word));
            let found = match line {
                Some(word) => format!("{word:?}"),
                None => format!("it ended without these words: {}", refusal.failure),
            };
            (line.is_some(), found, Some(*refusal))
        }
    };
    scene.check(Check::new(
        "replacement_refused_in_words",
        Class::Product,
        held,
        format_args!("refused with one of {words:?}"),
        found,
    ));
    Ok(refusal)
}
