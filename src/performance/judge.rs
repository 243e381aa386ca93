//! Samples become words, and checks where the profile says that its devices are dedicated.
//!
//! On a machine that does something else at the same time a time is no promise: there everything is
//! measured, kept and said, and nothing is judged.

use serde::{Deserialize, Serialize};

use super::Arm;
use super::median::{Estimate, LEVEL, Unusable};
use super::ratio::{Effect, Ratio};
use super::sample::{Metric, Sample};
use crate::config::profile::Performance;
use crate::failure::Class;
use crate::verdict::Check;

/// What the samples come to, for evidence.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Report {
    /// The probability with which each interval holds what it is said to hold, each by itself.
    pub level: f64,
    /// What the ends of the intervals follow from.
    pub seed: u64,
    /// Every arm by every metric that was measured of it.
    pub rows: Vec<Row>,
}

/// One arm by one metric.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Row {
    /// What is compared.
    pub metric: Metric,
    /// Of which arm.
    pub arm: Arm,
    /// Milliseconds.
    pub ms: Option<Estimate>,
    /// Divided by [`Arm::Off`], in the rounds that have both.
    pub to_off: Option<Ratio>,
    /// For people.
    pub words: String,
}

impl Report {
    /// Of samples in any order; those of the warm-up do not count.
    #[must_use]
    pub fn of(samples: &[Sample], seed: u64) -> Self {
        let measured = |metric: Metric, arm: Arm| {
            let any = samples.iter().filter(|sample| sample.arm == arm);
            any.filter_map(|sample| metric.of(sample)).next().is_some()
        };
        let rows = Metric::ALL.into_iter().flat_map(|metric| {
            let arms = Arm::ALL.into_iter();
            arms.filter(move |arm| measured(metric, *arm))
                .map(move |arm| Row::of(samples, metric, arm, seed))
        });
        Self {
            level: LEVEL,
            seed,
            rows: rows.collect(),
        }
    }

    /// The row of an arm, if it was measured.
    #[must_use]
    pub fn row(&self, metric: Metric, arm: Arm) -> Option<&Row> {
        let mut rows = self.rows.iter();
        rows.find(|row| row.metric == metric && row.arm == arm)
    }
}

impl Row {
    fn of(samples: &[Sample], metric: Metric, arm: Arm, seed: u64) -> Self {
        let times = metric.rounds(samples, arm);
        let values: Vec<f64> = times.values().copied().collect();
        let base = metric.rounds(samples, Arm::Off);
        let both: Vec<(f64, f64)> = times
            .iter()
            .filter_map(|(round, time)| Some((*time, *base.get(round)?)))
            .collect();
        let ms = Estimate::of(&values, seed);
        let to_off = Ratio::paired(&both, seed);
        let words = words(metric, arm, &ms, &to_off);
        Self {
            metric,
            arm,
            ms: ms.ok(),
            to_off: to_off.ok().filter(|_| arm != Arm::Off),
            words,
        }
    }
}

fn words(
    metric: Metric,
    arm: Arm,
    ms: &Result<Estimate, Unusable>,
    to_off: &Result<Ratio, Unusable>,
) -> String {
    let times = match ms {
        Ok(Estimate {
            count,
            median,
            low,
            high,
            ..
        }) => format!("{median:.2} ms ({low:.2} to {high:.2}) in {count} rounds"),
        Err(Unusable::Value { value: 0.0, .. }) if metric == Metric::Itl => {
            return "most tokens arrived together, with no time between them".to_owned();
        }
        Err(why) => return why.to_string(),
    };
    match to_off {
        _ if arm == Arm::Off => times,
        Ok(ratio) => format!("{times}; {ratio}"),
        Err(Unusable::Nothing) => format!("{times}; no round has off too"),
        Err(why) => format!("{times}; beside off: {why}"),
    }
}

/// What is left of a measurement for a verdict.
#[derive(Clone, Debug, PartialEq)]
pub struct Judged {
    /// For evidence.
    pub report: Report,
    /// One for each limit; none where nothing is judged.
    pub checks: Vec<Check>,
    /// What was measured, in words; and why it is not judged, where it is not.
    pub notes: Vec<String>,
}

/// Holds samples against what the profile promises.
#[must_use]
pub fn judge(samples: &[Sample], performance: &Performance) -> Judged {
    let report = Report::of(samples, performance.seed);
    let limits: Vec<Limit> = limits(performance);
    let mut notes = Vec::new();
    if !performance.dedicated {
        notes.push(not_judged(&limits));
    } else if limits.is_empty() {
        notes.push(
            "performance is not judged: the profile has no limit (performance.local_ttft_ratio_max and others)"
                .to_owned(),
        );
    }
    let said = report.rows.iter();
    notes.extend(said.map(|row| format!("{} of {}: {}", row.metric.words(), row.arm, row.words)));
    let judged = limits.iter().filter(|_| performance.dedicated);
    let checks = judged
        .map(|limit| limit.check(&report, performance))
        .collect();
    Judged {
        report,
        checks,
        notes,
    }
}

fn not_judged(limits: &[Limit]) -> String {
    let why = "performance is not judged: the profile does not say that its devices are dedicated (performance.dedicated, --dedicated)";
    if limits.is_empty() {
        return why.to_owned();
    }
    let limits: Vec<String> = limits
        .iter()
        .map(|limit| format!("{}_{} at most {}", limit.arm, limit.metric, limit.most))
        .collect();
    format!("{why}, so neither is {} of off", limits.join(", "))
}

/// The most that an arm may take, as a share of what [`Arm::Off`] takes.
#[derive(Clone, Copy, Debug)]
struct Limit {
    arm: Arm,
    metric: Metric,
    most: f64,
}

fn limits(performance: &Performance) -> Vec<Limit> {
    let promised = [
        (Arm::Cold, performance.cold_ttft_ratio_max),
        (Arm::Local, performance.local_ttft_ratio_max),
        (Arm::Peer, performance.peer_ttft_ratio_max),
        (Arm::Guard, performance.guard_ttft_ratio_max),
    ];
    let judged = promised.into_iter().filter_map(|(arm, most)| {
        Some(Limit {
            arm,
            metric: Metric::Ttft,
            most: most?,
        })
    });
    judged.collect()
}

impl Limit {
    /// Held by the interval and not by its point: a limit inside the interval is neither kept nor
    /// broken by what was seen.
    fn check(&self, report: &Report, performance: &Performance) -> Check {
        let Self { arm, metric, most } = *self;
        let row = report.row(metric, arm);
        let ratio = row.and_then(|row| row.to_off);
        let (held, class, found) = match ratio {
            None => {
                let why = row.map_or("nothing was measured", |row| row.words.as_str());
                (false, Class::Inconclusive, why.to_owned())
            }
            Some(ratio) => {
                let Estimate { low, high, .. } = ratio.estimate;
                let numbers = numbers(&ratio, performance);
                if ratio.effect == Effect::TooFew {
                    let more = format!("{numbers}; {ratio}; say --repeats");
                    (false, Class::Inconclusive, more)
                } else if high <= most {
                    (true, Class::Product, format!("{numbers}, {ratio}"))
                } else if low > most {
                    (false, Class::Product, format!("{numbers}, {ratio}"))
                } else {
                    let blind = ratio.blind();
                    let more =
                        format!("{numbers}, which has the limit inside; {blind}; raise --repeats");
                    (false, Class::Inconclusive, more)
                }
            }
        };
        let expected = format!(
            "{} of {arm} at most {most} of off, by the whole interval ({:.0} %)",
            metric.words(),
            LEVEL * 100.0
        );
        let name = format!("within_ratio[{arm}_{metric}]");
        let mut check = Check::new(name, class, held, expected, found);
        check.margin = ratio
            .filter(|_| held)
            .map(|ratio| format!("{:.3}", most - ratio.estimate.high));
        check
    }
}

/// The ratio, and of how many rounds: a round in which one of both failed has none.
fn numbers(ratio: &Ratio, performance: &Performance) -> String {
    let (count, all) = (ratio.estimate.count, performance.repeats);
    format!("{} in {count} of {all} rounds", ratio.numbers())
}

#[cfg(test)]
mod tests;
