//! What happened after a kill, and when: moments on one clock, their spread over several kills,
//! and what a takeover costs by the blocks that it recovers. Pure arithmetic.
//!
//! Every moment is `CLOCK_MONOTONIC` in nanoseconds, which the harness, the supervisor and a Guard
//! read alike on one host. What a moment means for a verdict is the cases' to say.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::telemetry::guard::{Promotion, Stage};

/// Something that happens once after a kill, in the order in which it should.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Moment {
    /// The supervisor saw the process end.
    Died,
    /// The Guard saw its worker's death.
    DeathObserved,
    /// The Guard had read its journal.
    RecordsRecovered,
    /// The Guard had taken the records over.
    RecordsAdopted,
    /// The Guard answered at the worker's endpoint.
    Serving,
    /// The takeover was over.
    Promoted,
    /// A request sent after the kill was answered.
    FirstResponse,
    /// The answer was the reference's.
    FirstCorrectResponse,
    /// A request was served blocks of the dead worker.
    FirstGuardHit,
    /// The router no longer listed the dead worker.
    Unlisted,
    /// The replacement was spawned.
    ReplacementStarted,
    /// The router listed the replacement.
    ReplacementRegistered,
    /// The replacement answered its canary.
    ReplacementServing,
    /// The replacement answered out of the pool that it took back.
    ReplacementWarm,
}

impl Moment {
    /// All, in order.
    pub const ALL: [Self; 14] = [
        Self::Died,
        Self::DeathObserved,
        Self::RecordsRecovered,
        Self::RecordsAdopted,
        Self::Serving,
        Self::Promoted,
        Self::FirstResponse,
        Self::FirstCorrectResponse,
        Self::FirstGuardHit,
        Self::Unlisted,
        Self::ReplacementStarted,
        Self::ReplacementRegistered,
        Self::ReplacementServing,
        Self::ReplacementWarm,
    ];

    /// For people.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Died => "died",
            Self::DeathObserved => "death observed",
            Self::RecordsRecovered => "records recovered",
            Self::RecordsAdopted => "records adopted",
            Self::Serving => "serving",
            Self::Promoted => "promoted",
            Self::FirstResponse => "first response",
            Self::FirstCorrectResponse => "first correct response",
            Self::FirstGuardHit => "first Guard hit",
            Self::Unlisted => "no longer listed",
            Self::ReplacementStarted => "replacement started",
            Self::ReplacementRegistered => "replacement registered",
            Self::ReplacementServing => "replacement serving",
            Self::ReplacementWarm => "replacement warm",
        }
    }
}

/// What followed one kill.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Timeline {
    /// Right before the signal was sent: `CLOCK_MONOTONIC`, nanoseconds.
    pub killed: u64,
    /// The same clock; what did not happen is absent.
    pub moments: BTreeMap<Moment, u64>,
    /// Blocks that the Guard recovered.
    pub recovered_blocks: Option<u64>,
}

impl Timeline {
    /// Of a kill at `killed`.
    #[must_use]
    pub fn new(killed: u64) -> Self {
        Self {
            killed,
            moments: BTreeMap::new(),
            recovered_blocks: None,
        }
    }

    /// Notes when something happened; only the first time counts.
    pub fn reached(&mut self, moment: Moment, at: u64) {
        self.moments.entry(moment).or_insert(at);
    }

    /// Takes over what a Guard said.
    pub fn take(&mut self, promotion: &Promotion) {
        for (stage, at) in &promotion.stages {
            let moment = match stage {
                Stage::DeathObserved => Moment::DeathObserved,
                Stage::RecordsRecovered => Moment::RecordsRecovered,
                Stage::RecordsAdopted => Moment::RecordsAdopted,
                Stage::Serving => Moment::Serving,
            };
            self.reached(moment, *at);
        }
        if let Some(at) = promotion.promoted_at() {
            self.reached(Moment::Promoted, at);
        }
        self.recovered_blocks = promotion.recovered_blocks;
    }

    /// Milliseconds from the kill; `None` where it did not happen, negative where it happened
    /// before the kill, which nothing can.
    #[must_use]
    pub fn after_ms(&self, moment: Moment) -> Option<f64> {
        let at = *self.moments.get(&moment)?;
        Some(between_ms(self.killed, at))
    }

    /// Moments that a Guard stamped before what they follow: its clock is another one, or its log
    /// lies. Empty where all is well.
    #[must_use]
    pub fn disorder(&self) -> Vec<String> {
        let guard = [
            Moment::DeathObserved,
            Moment::RecordsRecovered,
            Moment::RecordsAdopted,
            Moment::Serving,
            Moment::Promoted,
        ];
        let mut last = ("the kill", self.killed);
        let mut found = Vec::new();
        for moment in guard {
            let Some(at) = self.moments.get(&moment) else {
                continue;
            };
            if *at < last.1 {
                found.push(format!(
                    "{} {:.3} ms before {}",
                    moment.words(),
                    between_ms(*at, last.1),
                    last.0
                ));
            }
            last = (moment.words(), *at);
        }
        found
    }

    /// One line for people: every moment with its milliseconds after the kill.
    #[must_use]
    pub fn line(&self) -> String {
        let mut parts: Vec<String> = Moment::ALL
            .into_iter()
            .filter_map(|moment| {
                let ms = self.after_ms(moment)?;
                Some(format!("{} {ms:.1}", moment.words()))
            })
            .collect();
        if let Some(blocks) = self.recovered_blocks {
            parts.push(format!("{blocks} blocks recovered"));
        }
        parts.join(", ")
    }
}

fn between_ms(from: u64, to: u64) -> f64 {
    let ms = from.abs_diff(to) as f64 / 1e6;
    if to < from { -ms } else { ms }
}

/// Smallest, middle and largest of a few numbers.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Spread {
    /// How many there were.
    pub count: usize,
    /// The smallest.
    pub min: f64,
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The largest.
    pub max: f64,
}

impl Spread {
    /// `None` of nothing, or if one of them is no number.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.iter().any(|value| value.is_nan()) {
            return None;
        }
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            1 => sorted[middle],
            _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
        };
        Some(Self {
            count: sorted.len(),
            min,
            median,
            max,
        })
    }
}

impl std::fmt::Display for Spread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            count,
            min,
            median,
            max,
        } = self;
        write!(
            f,
            "{min:.1} / {median:.1} / {max:.1} ms (min / median / max of {count})"
        )
    }
}

/// The spread of each moment over several kills, in milliseconds after the kill.
#[must_use]
pub fn spreads(timelines: &[Timeline]) -> BTreeMap<Moment, Spread> {
    Moment::ALL
        .into_iter()
        .filter_map(|moment| {
            let times: Vec<f64> = timelines
                .iter()
                .filter_map(|timeline| timeline.after_ms(moment))
                .collect();
            Some((moment, Spread::of(&times)?))
        })
        .collect()
}

/// A straight line through measured points, by least squares.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Fit {
    /// What nothing costs.
    pub intercept: f64,
    /// What one more costs.
    pub slope: f64,
    /// The largest distance of a point from the line.
    pub residual: f64,
}

impl Fit {
    /// `None` where no line follows: fewer than two different abscissae, or no numbers.
    #[must_use]
    pub fn of(points: &[(f64, f64)]) -> Option<Self> {
        if points.iter().any(|(x, y)| !x.is_finite() || !y.is_finite()) {
            return None;
        }
        let count = points.len() as f64;
        let mean_x = points.iter().map(|(x, _)| x).sum::<f64>() / count;
        let mean_y = points.iter().map(|(_, y)| y).sum::<f64>() / count;
        // Around the means: the sums of squares themselves would cancel.
        let spread: f64 = points.iter().map(|(x, _)| (x - mean_x).powi(2)).sum();
        let together: f64 = points
            .iter()
            .map(|(x, y)| (x - mean_x) * (y - mean_y))
            .sum();
        let slope = together / spread;
        if points.len() < 2 || !slope.is_finite() {
            return None;
        }
        let intercept = mean_y - slope * mean_x;
        let distance = |(x, y): &(f64, f64)| (y - intercept - slope * x).abs();
        let residual = points.iter().map(distance).fold(0.0, f64::max);
        Some(Self {
            intercept,
            slope,
            residual,
        })
    }
}

/// How a cost grows with what it is paid for.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "growth")]
pub enum Growth {
    /// No faster than in proportion.
    Linear,
    /// Faster: this stretch says so.
    Steeper {
        /// From how many, to how many, and the power of the growth between them.
        stretch: (f64, f64),
        /// 1 is in proportion.
        power: f64,
    },
    /// The points are too few or too close together to say.
    Unseen,
}

/// The largest count has to be this many times the smallest.
const RANGE: f64 = 4.0;
/// In proportion is 1; a fixed cost beside it makes it less, noise a little more.
const STEEP: f64 = 1.5;

/// Whether a cost (`y`) grows no faster than in proportion to `x`. A fixed cost beside it is
/// allowed. Between any two points, what lies within `noise` of proportion says nothing: it is
/// what the measurement itself may be wrong by, in the unit of `y`.
///
/// A line through points of which one is far out fits a parabola too, so the power of the growth
/// between neighbours decides, and not the distance from a line.
#[must_use]
pub fn growth(points: &[(f64, f64)], noise: f64) -> Growth {
    let mut sorted: Vec<(f64, f64)> = points
        .iter()
        .copied()
        .filter(|(x, y)| x.is_finite() && y.is_finite() && *x > 0.0 && *y >= 0.0)
        .collect();
    sorted.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let (Some(first), Some(last)) = (sorted.first(), sorted.last()) else {
        return Growth::Unseen;
    };
    if sorted.len() < 3 || last.0 < RANGE * first.0 {
        return Growth::Unseen;
    }
    for (at, (x, y)) in sorted.iter().enumerate() {
        for (further, cost) in &sorted[at + 1..] {
            let proportional = y * further / x;
            if further / x < 2.0 || *cost <= proportional + noise {
                continue;
            }
            // A cost of nothing would make any growth endless.
            let power =
                (cost / y.max(noise / 10.0).max(f64::MIN_POSITIVE)).ln() / (further / x).ln();
            if power > STEEP {
                return Growth::Steeper {
                    stretch: (*x, *further),
                    power,
                };
            }
        }
    }
    Growth::Linear
}

#[cfg(test)]
mod tests;
