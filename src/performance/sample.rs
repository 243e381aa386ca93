//! One measurement of one arm, and many of them as JSON lines.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::Arm;
use super::median::Unusable;

/// What a streamed request took, and what it did. Times are in milliseconds of one monotonic clock.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Sample {
    /// What was measured.
    pub arm: Arm,
    /// Of which round, from 0; those of the warm-up count too.
    pub round: usize,
    /// At which place of the round, from 0.
    pub position: usize,
    /// Whether it is left out of what is said.
    pub warm_up: bool,
    /// From sending the request until the first token arrived.
    pub ttft_ms: f64,
    /// From each token to the next; none of an answer with one token.
    pub itl_ms: Vec<f64>,
    /// From sending the request until the answer was whole.
    pub end_to_end_ms: f64,
    /// Tokens of the prompt, as the server counts them.
    pub prompt_tokens: u64,
    /// Tokens of the answer, as the server counts them.
    pub tokens: u64,
    /// Tokens of the prompt that came from a cache; absent where the server does not say.
    pub cached_tokens: Option<u64>,
    /// KV blocks that KVCR delivered for it, by its counters; absent where they do not say.
    pub blocks: Option<u64>,
}

/// What is compared between arms.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Time to the first token.
    Ttft,
    /// Time between tokens: the median of one answer's.
    Itl,
    /// Until the answer was whole.
    EndToEnd,
}

impl Metric {
    /// All.
    pub const ALL: [Self; 3] = [Self::Ttft, Self::Itl, Self::EndToEnd];

    /// As in names of fields, checks and files.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Ttft => "ttft",
            Self::Itl => "itl",
            Self::EndToEnd => "end_to_end",
        }
    }

    /// For people.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Ttft => "time to first token",
            Self::Itl => "time between tokens",
            Self::EndToEnd => "time to the end",
        }
    }

    /// Milliseconds of one sample; `None` where it has no such time.
    #[must_use]
    pub fn of(self, sample: &Sample) -> Option<f64> {
        match self {
            Self::Ttft => Some(sample.ttft_ms),
            Self::Itl => middle(&sample.itl_ms),
            Self::EndToEnd => Some(sample.end_to_end_ms),
        }
    }

    /// Milliseconds of an arm by round, without the warm-up. Several requests of one round see the
    /// same moment of the machine: they are one measurement, their median.
    #[must_use]
    pub fn rounds(self, samples: &[Sample], arm: Arm) -> BTreeMap<usize, f64> {
        let mut found: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
        for sample in samples {
            if sample.arm == arm
                && !sample.warm_up
                && let Some(time) = self.of(sample)
            {
                found.entry(sample.round).or_default().push(time);
            }
        }
        found
            .into_iter()
            .filter_map(|(round, times)| Some((round, middle(&times)?)))
            .collect()
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The middle of some times, zero among them too: two tokens may arrive together.
fn middle(times: &[f64]) -> Option<f64> {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    match sorted.len() % 2 {
        1 => Some(upper),
        _ => Some(f64::midpoint(sorted[sorted.len() / 2 - 1], upper)),
    }
}

impl Sample {
    /// What is wrong with its times, if something is.
    fn check(&self) -> Result<(), Unusable> {
        let whole = [self.ttft_ms, self.end_to_end_ms];
        let bad = |value: &f64| !(value.is_finite() && *value > 0.0);
        if let Some(value) = whole.into_iter().find(bad) {
            return Err(Unusable::Value { at: 0, value });
        }
        let bad = |value: &f64| !(value.is_finite() && *value >= 0.0);
        match self.itl_ms.iter().position(bad) {
            Some(at) => Err(Unusable::Value {
                at,
                value: self.itl_ms[at],
            }),
            None => Ok(()),
        }
    }
}

/// A line that is no sample: written or read.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("line {line} is no sample: {why}")]
pub struct NoSample {
    /// From 1.
    pub line: usize,
    /// What is wrong with it.
    pub why: String,
}

/// One line a sample. What is written is what [`read()`] gives back, to the last bit.
///
/// # Errors
/// If a time is not finite, negative, or zero where it cannot be.
pub fn write(samples: &[Sample]) -> Result<String, NoSample> {
    let lines = samples.iter().enumerate().map(|(at, sample)| {
        let wrong = |why: String| NoSample { line: at + 1, why };
        sample.check().map_err(|why| wrong(why.to_string()))?;
        let line = serde_json::to_string(sample).map_err(|why| wrong(why.to_string()))?;
        Ok(line + "\n")
    });
    lines.collect()
}

/// Reads what [`write()`] wrote.
///
/// # Errors
/// At the first line that is no sample.
pub fn read(text: &str) -> Result<Vec<Sample>, NoSample> {
    let samples = text.lines().enumerate().map(|(at, line)| {
        let wrong = |why: String| NoSample { line: at + 1, why };
        let sample: Sample = serde_json::from_str(line).map_err(|why| wrong(why.to_string()))?;
        sample.check().map_err(|why| wrong(why.to_string()))?;
        Ok(sample)
    });
    samples.collect()
}

#[cfg(test)]
pub(super) mod testing {
    use super::*;

    /// A sample of which only what is compared matters.
    pub(in super::super) fn sample(arm: Arm, round: usize, ttft_ms: f64) -> Sample {
        Sample {
            arm,
            round,
            position: 0,
            warm_up: false,
            ttft_ms,
            itl_ms: vec![1.0, 3.0, 2.0],
            end_to_end_ms: ttft_ms + 6.0,
            prompt_tokens: 512,
            tokens: 4,
            cached_tokens: Some(448),
            blocks: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::sample;
    use super::*;

    #[test]
    fn a_line_is_what_people_can_read() {
        let text = write(&[sample(Arm::Local, 2, 12.5)]).unwrap();
        assert_eq!(
            text,
            "{\"arm\":\"local\",\"round\":2,\"position\":0,\"warm_up\":false,\"ttft_ms\":12.5,\
             \"itl_ms\":[1.0,3.0,2.0],\"end_to_end_ms\":18.5,\"prompt_tokens\":512,\"tokens\":4,\
             \"cached_tokens\":448,\"blocks\":null}\n"
        );
    }

    #[test]
    fn what_is_no_time_is_neither_written_nor_read() {
        let good = sample(Arm::Off, 0, 1.0);
        let mut endless = good.clone();
        endless.itl_ms[1] = f64::INFINITY;
        let refused = write(&[good.clone(), endless]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "line 2 is no sample: measurement 1 is inf, and has to be above 0 and finite"
        );
        for ttft_ms in [0.0, -1.0, f64::NAN] {
            let refused = write(&[sample(Arm::Off, 0, ttft_ms)]).unwrap_err();
            assert_eq!(refused.line, 1);
        }
        let text = write(&[good]).unwrap();
        for (from, to) in [
            ("\"ttft_ms\":1.0", "\"ttft_ms\":-1.0"),
            ("}", ""),
            ("off", "on"),
        ] {
            let broken = text.clone() + &text.replace(from, to);
            assert_eq!(read(&broken).unwrap_err().line, 2, "{to}");
        }
        assert_eq!(read("\n").unwrap_err().line, 1);
        assert_eq!(read(""), Ok(Vec::new()));
    }

    #[test]
    fn a_round_is_one_measurement_and_the_warm_up_none() {
        let mut samples: Vec<_> = [30.0, 10.0, 20.0, 500.0]
            .map(|time| sample(Arm::Peer, 1, time))
            .to_vec();
        samples[3].warm_up = true;
        samples.push(sample(Arm::Peer, 4, 7.0));
        samples.push(sample(Arm::Off, 1, 9.0));
        let rounds = Metric::Ttft.rounds(&samples, Arm::Peer);
        assert_eq!(rounds, BTreeMap::from([(1, 20.0), (4, 7.0)]));
        assert_eq!(Metric::Itl.of(&samples[0]), Some(2.0));
        assert_eq!(Metric::EndToEnd.of(&samples[0]), Some(36.0));
        samples[0].itl_ms = vec![1.0, 2.0];
        assert_eq!(Metric::Itl.of(&samples[0]), Some(1.5));
        samples[0].itl_ms.clear();
        assert_eq!(Metric::Itl.of(&samples[0]), None);
    }

    fn any_sample() -> impl Strategy<Value = Sample> {
        let time = || (f64::MIN_POSITIVE..1e12).boxed();
        let gaps = prop::collection::vec(0.0..1e9, 0..6);
        let counts = (
            any::<u64>(),
            any::<u64>(),
            any::<Option<u64>>(),
            any::<Option<u64>>(),
        );
        (
            prop::sample::select(Arm::ALL.to_vec()),
            (any::<usize>(), any::<usize>(), any::<bool>()),
            (time(), gaps, time()),
            counts,
        )
            .prop_map(
                |(arm, (round, position, warm_up), (ttft_ms, itl_ms, end_to_end_ms), counts)| {
                    let (prompt_tokens, tokens, cached_tokens, blocks) = counts;
                    Sample {
                        arm,
                        round,
                        position,
                        warm_up,
                        ttft_ms,
                        itl_ms,
                        end_to_end_ms,
                        prompt_tokens,
                        tokens,
                        cached_tokens,
                        blocks,
                    }
                },
            )
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(samples in prop::collection::vec(any_sample(), 0..6)) {
            let text = write(&samples).unwrap();
            prop_assert_eq!(text.lines().count(), samples.len());
            prop_assert_eq!(read(&text).unwrap(), samples);
        }

        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = read(&text);
        }
    }
}
