//! What a Guard's service logs of a takeover, as events on the clock that every process of the
//! host shares.
//!
//! Pure: text in, a [`Journal`] out. Formats differ between releases of KVCR, and each known one
//! is read: stages with `monotonic_ns` and a `guard_promoted` line (kvcr 0.1.1), that line alone,
//! or only the name of the transfer agent that a promotion makes. A line that speaks of a
//! promotion and cannot be read is kept as such: nobody may take it for silence.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

/// A stage of a promotion that is stamped with the clock.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// The Guard saw that its worker is dead.
    DeathObserved,
    /// The journal was read: the records of the pool are known again.
    RecordsRecovered,
    /// The records were taken over.
    RecordsAdopted,
    /// The Guard answers where the worker did.
    Serving,
}

impl Stage {
    fn of(label: &str) -> Option<Self> {
        Some(match label {
            "death_observed" => Self::DeathObserved,
            "records_recovered" => Self::RecordsRecovered,
            "records_adopted" => Self::RecordsAdopted,
            "serving" => Self::Serving,
            _ => return None,
        })
    }
}

/// Stages of a Guard that stands by: no part of a promotion.
const BEFORE: [&str; 2] = ["core_init_start", "core_init_done"];

/// One thing that a Guard said.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// A worker has the pool; the Guard stands by.
    Attached {
        /// Where worker and Guard answer.
        control: String,
    },
    /// A promotion reached a stage.
    Stage {
        /// Which.
        stage: Stage,
        /// `CLOCK_MONOTONIC`, nanoseconds.
        at: u64,
    },
    /// A promotion is over; the summary.
    Promoted {
        /// Blocks that were found in the pool.
        recovered_blocks: u64,
        /// Milliseconds from the death that was seen until the Guard served.
        promotion_ms: f64,
        /// Milliseconds that reading the journal took; absent where it is not said.
        recovery_ms: Option<f64>,
    },
    /// A transfer agent was made: all that the oldest format says of a promotion.
    Agent,
    /// There was nothing in the pool to serve.
    Cold,
    /// The worker was taken for dead because it was silent.
    Silent,
    /// The Guard failed, and its service stops with it.
    Failed {
        /// The line.
        line: String,
    },
}

/// One takeover, put together from its lines.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Promotion {
    /// When each stage was reached: `CLOCK_MONOTONIC`, nanoseconds.
    pub stages: Vec<(Stage, u64)>,
    /// Blocks that were found in the pool; `None` where the format does not say.
    pub recovered_blocks: Option<u64>,
    /// Milliseconds from the death that was seen until the Guard served.
    pub promotion_ms: Option<f64>,
    /// Milliseconds that reading the journal took.
    pub recovery_ms: Option<f64>,
    /// Whether the summary was written: until then the promotion goes on.
    pub complete: bool,
}

impl Promotion {
    /// When `stage` was reached: `CLOCK_MONOTONIC`, nanoseconds.
    #[must_use]
    pub fn at(&self, stage: Stage) -> Option<u64> {
        let found = self.stages.iter().find(|(reached, _)| *reached == stage);
        found.map(|(_, at)| *at)
    }

    /// When it was over: the summary carries no clock, but says how long everything took.
    #[must_use]
    pub fn promoted_at(&self) -> Option<u64> {
        let ms = self.promotion_ms?;
        let began = self.at(Stage::DeathObserved);
        let by_length = began.map(|began| began.saturating_add(nanos(ms)));
        // A summary that is earlier than its own last stage is rounded: the stage counts.
        by_length.max(self.at(Stage::Serving))
    }
}

fn nanos(ms: f64) -> u64 {
    // Saturates; a negative time is none.
    (ms * 1e6) as u64
}

/// What a stretch of a log says of its Guard.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Journal {
    /// In the order of the lines.
    pub events: Vec<Event>,
    /// Lines that speak of a promotion in a way that nobody here can read.
    pub unread: Vec<String>,
}

impl Journal {
    /// Reads complete lines; a last line without its end is left out.
    #[must_use]
    pub fn read(text: &str) -> Self {
        let complete = text.rfind('\n').map_or("", |end| &text[..end]);
        let mut journal = Self::default();
        for line in complete.lines() {
            match event(line) {
                Some(Ok(event)) => journal.events.push(event),
                Some(Err(Unread)) => journal.unread.push(line.chars().take(500).collect()),
                None => {}
            }
        }
        journal
    }

    /// The takeovers, in order. One that has only begun is among them.
    #[must_use]
    pub fn promotions(&self) -> Vec<Promotion> {
        let mut all: Vec<Promotion> = Vec::new();
        // Releases that say more also make agents while they stand by.
        let says_more = self.events.iter().any(|event| {
            matches!(
                event,
                Event::Attached { .. } | Event::Stage { .. } | Event::Promoted { .. }
            )
        });
        for event in &self.events {
            let going_on = all.pop_if(|last| !last.complete).unwrap_or_default();
            match event {
                Event::Stage { stage, at } => {
                    let mut going_on = going_on;
                    if *stage == Stage::DeathObserved && !going_on.stages.is_empty() {
                        // The one before never ended.
                        all.push(std::mem::take(&mut going_on));
                    }
                    going_on.stages.push((*stage, *at));
                    all.push(going_on);
                }
                Event::Promoted {
                    recovered_blocks,
                    promotion_ms,
                    recovery_ms,
                } => all.push(Promotion {
                    recovered_blocks: Some(*recovered_blocks),
                    promotion_ms: Some(*promotion_ms),
                    recovery_ms: *recovery_ms,
                    complete: true,
                    ..going_on
                }),
                Event::Agent if !says_more => all.push(Promotion {
                    complete: true,
                    ..Promotion::default()
                }),
                _ if going_on != Promotion::default() => all.push(going_on),
                _ => {}
            }
        }
        all
    }

    /// How often something was said that `wanted` fits.
    #[must_use]
    pub fn count(&self, wanted: impl Fn(&Event) -> bool) -> usize {
        self.events.iter().filter(|event| wanted(event)).count()
    }

    /// Why this log cannot be judged, if it cannot: it speaks of promotions in another format.
    #[must_use]
    pub fn strange(&self) -> Option<Failure> {
        let first = self.unread.first()?;
        Some(
            Failure::skew("the Guard speaks of promotions in words nobody here knows")
                .expected("guard_promotion_stage with stage and monotonic_ns; guard_promoted with recovered_blocks and promotion_ms")
                .found(format_args!("{} lines, the first: {first}", self.unread.len()))
                .hint("compare the release of kvcr with the environment's lock; src/telemetry/guard.rs reads these lines"),
        )
    }
}

/// A line that is of ours and cannot be read.
struct Unread;

/// What `line` says; `None` where it is about something else.
fn event(line: &str) -> Option<Result<Event, Unread>> {
    if let Some((_, rest)) = line.split_once("KVCR_EVENT ") {
        let (name, rest) = rest.split_once(' ').unwrap_or((rest, ""));
        let fields = fields(rest);
        return match name {
            "guard_promotion_stage" => stage(&fields),
            "guard_promoted" => Some(promoted(&fields).ok_or(Unread)),
            "primary_attached" => Some(Ok(Event::Attached {
                control: fields
                    .get("control")
                    .copied()
                    .unwrap_or_default()
                    .to_owned(),
            })),
            // A new word for what is judged here must not pass for silence.
            other if other.starts_with("guard_promot") => Some(Err(Unread)),
            _ => None,
        };
    }
    let said = |words: &str| line.contains(words);
    if said("Initialized NIXL agent: KVCR-Guard-") {
        Some(Ok(Event::Agent))
    } else if said("KVCR pool has no recovered state to promote") {
        Some(Ok(Event::Cold))
    } else if said("promoted after heartbeat timeout") {
        Some(Ok(Event::Silent))
    } else if said("KVCR Guard") && said("failed") || said("Guard failed") {
        let line = line.chars().take(500).collect();
        Some(Ok(Event::Failed { line }))
    } else {
        None
    }
}

fn stage(fields: &HashMap<&str, &str>) -> Option<Result<Event, Unread>> {
    let label = fields.get("stage").copied().unwrap_or_default();
    if BEFORE.contains(&label) {
        return None;
    }
    let at = fields.get("monotonic_ns").and_then(|at| at.parse().ok());
    Some(match (Stage::of(label), at) {
        (Some(stage), Some(at)) => Ok(Event::Stage { stage, at }),
        _ => Err(Unread),
    })
}

fn promoted(fields: &HashMap<&str, &str>) -> Option<Event> {
    let ms = |name: &str| {
        let value: f64 = fields.get(name)?.parse().ok()?;
        (value.is_finite() && value >= 0.0).then_some(value)
    };
    Some(Event::Promoted {
        recovered_blocks: fields.get("recovered_blocks")?.parse().ok()?,
        promotion_ms: ms("promotion_ms")?,
        recovery_ms: ms("recovery_ms"),
    })
}

/// `name=value`, separated by spaces; whatever else stands there is left out.
fn fields(text: &str) -> HashMap<&str, &str> {
    text.split_whitespace()
        .filter_map(|word| word.split_once('='))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::failure::Class;

    const REAL: &str = include_str!("../../tests/fixtures/real/service-promotion.log");

    #[test]
    fn the_recorded_takeover_is_read_whole() {
        let journal = Journal::read(REAL);
        assert_eq!(journal.unread, Vec::<String>::new());
        assert_eq!(
            journal.count(
                |event| matches!(event, Event::Attached { control } if control == "127.0.0.1:21290")
            ),
            1
        );
        let promotions = journal.promotions();
        assert_eq!(promotions.len(), 1);
        let promotion = &promotions[0];
        assert_eq!(promotion.recovered_blocks, Some(391));
        assert_eq!(promotion.promotion_ms, Some(27.738));
        assert_eq!(promotion.recovery_ms, Some(2.963));
        assert_eq!(promotion.at(Stage::DeathObserved), Some(13_090_682_627_624));
        assert_eq!(promotion.at(Stage::Serving), Some(13_090_713_767_619));
        // 27.738 ms after the death is before the last stage, which therefore counts.
        assert_eq!(promotion.promoted_at(), Some(13_090_713_767_619));
        assert!(promotion.complete);
        assert_eq!(journal.strange(), None);
    }

    #[test]
    fn a_promotion_that_goes_on_is_one_that_is_not_complete() {
        let end = REAL.find("INFO:kvcr.guard").unwrap();
        let promotions = Journal::read(&REAL[..end]).promotions();
        assert_eq!(promotions.len(), 1);
        assert!(!promotions[0].complete);
        // Half of the summary is not read as a strange one.
        let half = Journal::read(&REAL[..end + 60]);
        assert!(half.unread.is_empty() && !half.promotions()[0].complete);
    }

    #[test]
    fn every_promotion_counts_for_itself() {
        let line = |stage: &str, at: u64| {
            format!(
                "DEBUG:kvcr.guard:KVCR_EVENT guard_promotion_stage stage={stage} guard=0 monotonic_ns={at}\n"
            )
        };
        let over = |blocks: u64| {
            format!(
                "INFO:kvcr.guard:KVCR_EVENT guard_promoted guard=0 recovered_blocks={blocks} promotion_ms=2.5\n"
            )
        };
        let attached = "DEBUG:kvcr.guard:KVCR_EVENT primary_attached guard=0 pool=pool_0 control=127.0.0.1:1\n";
        let text = [
            attached.to_owned(),
            line("death_observed", 1_000),
            over(3),
            attached.to_owned(),
            line("death_observed", 2_000),
            line("death_observed", 3_000),
            over(4),
            over(4),
        ]
        .concat();
        let promotions = Journal::read(&text).promotions();
        let blocks: Vec<_> = promotions.iter().map(|one| one.recovered_blocks).collect();
        assert_eq!(blocks, [Some(3), None, Some(4), Some(4)]);
        assert_eq!(promotions[0].promoted_at(), Some(2_501_000));
        assert_eq!(promotions[3].promoted_at(), None, "no stage, no clock");
    }

    #[test]
    fn older_releases_say_less_and_are_read_all_the_same() {
        let agent = "2026-11-30 NIXL INFO Initialized NIXL agent: KVCR-Guard-1\n";
        let oldest = Journal::read(agent).promotions();
        assert_eq!(oldest.len(), 1);
        assert_eq!(oldest[0].recovered_blocks, None);
        assert_eq!(oldest[0].promoted_at(), None);
        // One that stands by makes its agent beforehand.
        let newer = format!("{agent}DEBUG KVCR_EVENT primary_attached guard=0 control=x\n");
        assert_eq!(Journal::read(&newer).promotions(), []);
    }

    #[test]
    fn what_speaks_of_a_promotion_and_cannot_be_read_is_skew() {
        for line in [
            "KVCR_EVENT guard_promotion_stage stage=teleported guard=0 monotonic_ns=1",
            "KVCR_EVENT guard_promotion_stage stage=serving guard=0 clock=1",
            "KVCR_EVENT guard_promotion_stage stage=serving monotonic_ns=-1",
            "KVCR_EVENT guard_promoted guard=0 blocks=7",
            "KVCR_EVENT guard_promoted recovered_blocks=7 promotion_ms=NaN",
            "KVCR_EVENT guard_promotion_finished guard=0",
            "KVCR_EVENT guard_promoted",
        ] {
            let journal = Journal::read(&format!("{line}\n"));
            assert_eq!(journal.unread, [line]);
            let failure = journal.strange().unwrap();
            assert_eq!(failure.class, Class::Skew);
            assert!(failure.to_string().contains(line), "{failure}");
        }
    }

    #[test]
    fn what_went_wrong_is_told_apart() {
        let text = "WARNING:kvcr.guard:KVCR pool has no recovered state to promote\n\
                    WARNING:kvcr.guard:KVCR Guard 0 promoted after heartbeat timeout\n\
                    CRITICAL:kvcr.guard:KVCR Guard 0 failed: NIXL_ERR_BACKEND\n\
                    DEBUG:kvcr.progress:KVCR_EVENT progress_startup_stage stage=cleanup agent=a\n";
        let journal = Journal::read(text);
        assert!(
            matches!(
                &journal.events[..],
                [Event::Cold, Event::Silent, Event::Failed { .. }]
            ),
            "{journal:?}"
        );
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(KVCR_EVENT (guard_promoted|guard_promotion_stage|[a-z_]*)? ?[a-z_=0-9. ]*|.*\n?)*") {
            let journal = Journal::read(&text);
            let _ = (journal.promotions(), journal.strange());
        }

        /// Whatever is said, every summary is a promotion, and none is invented.
        #[test]
        fn summaries_and_promotions_are_as_many(said in prop::collection::vec(0_u8..5, 0..30)) {
            let lines = [
                "KVCR_EVENT guard_promotion_stage stage=death_observed monotonic_ns=5",
                "KVCR_EVENT guard_promotion_stage stage=serving monotonic_ns=9",
                "KVCR_EVENT guard_promoted recovered_blocks=1 promotion_ms=1",
                "KVCR_EVENT primary_attached control=a",
                "something else",
            ];
            let text: String = said.iter().map(|at| format!("{}\n", lines[usize::from(*at)])).collect();
            let promotions = Journal::read(&text).promotions();
            let over = said.iter().filter(|at| **at == 2).count();
            prop_assert_eq!(promotions.iter().filter(|one| one.complete).count(), over);
            let began = said.iter().filter(|at| **at == 0).count();
            prop_assert!(promotions.len() <= over + began + 1 + said.iter().filter(|at| **at == 1).count());
        }

        /// A log that is cut anywhere is read as far as it goes, and never as something else.
        #[test]
        fn a_cut_log_is_no_strange_one(cut in 0..REAL.len()) {
            let Some(text) = REAL.get(..cut) else { return Ok(()) };
            let journal = Journal::read(text);
            prop_assert!(journal.unread.is_empty());
            prop_assert!(journal.promotions().len() <= 1);
        }
    }
}
