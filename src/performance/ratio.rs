//! How much longer or shorter an arm takes than the base, in words.
//!
//! Paired by round: each round measures every arm once, so what changes between rounds (a machine
//! that warms up, a neighbour that comes and goes) changes both, and cancels in their ratio. The
//! ratio of two medians would have it twice. What is compared is the median of the rounds' ratios.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::median::{Estimate, FEWEST, LEVEL, Unusable};

/// What repeats say of an arm beside the base.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// The whole interval lies below 1.
    Faster,
    /// The whole interval lies above 1.
    Slower,
    /// The interval has 1 inside: there may be a difference, or none.
    Unseen,
    /// No interval holds a median of so few at the level that is asked for.
    TooFew,
}

/// Times of an arm divided by times of the base: 0.5 is half as long.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Ratio {
    /// The median of the ratios of the rounds, and its interval.
    #[serde(flatten)]
    pub estimate: Estimate,
    /// What it comes to.
    pub effect: Effect,
    /// The smallest difference from 1 that would have been seen: 0.08 is 8 %. With the spread that
    /// these rounds had, an interval around a smaller one has 1 inside. `None` of too few.
    pub detectable: Option<f64>,
}

impl Ratio {
    /// Of rounds: the time of the arm and the time of the base in each.
    ///
    /// # Errors
    /// If there are none, or a time is not above 0 and finite.
    pub fn paired(rounds: &[(f64, f64)], seed: u64) -> Result<Self, Unusable> {
        // The quotient of two endless times may be a number.
        let bad = |(at, (arm, base)): (usize, &(f64, f64))| {
            let good = |time: &&f64| !(time.is_finite() && **time > 0.0);
            let value = [arm, base].into_iter().find(good)?;
            Some(Unusable::Value { at, value: *value })
        };
        if let Some(refused) = rounds.iter().enumerate().find_map(bad) {
            return Err(refused);
        }
        let ratios: Vec<f64> = rounds.iter().map(|(arm, base)| arm / base).collect();
        Ok(Self::of(Estimate::of(&ratios, seed)?))
    }

    fn of(estimate: Estimate) -> Self {
        let Estimate {
            median, low, high, ..
        } = estimate;
        let effect = if !estimate.is_sure() {
            Effect::TooFew
        } else if high < 1.0 {
            Effect::Faster
        } else if low > 1.0 {
            Effect::Slower
        } else {
            Effect::Unseen
        };
        // An effect stretches the interval with its point. One that is slower is seen when the
        // lower end is above 1, one that is faster when the upper end is below: the harder counts.
        let detectable = (median / low - 1.0).max(1.0 - median / high);
        Self {
            estimate,
            effect,
            detectable: Some(detectable).filter(|_| estimate.is_sure()),
        }
    }

    /// The point and the ends: `0.59 (0.54 to 0.64)`.
    #[must_use]
    pub fn numbers(&self) -> String {
        let Estimate {
            median, low, high, ..
        } = self.estimate;
        format!("{median:.3} ({low:.3} to {high:.3})")
    }

    /// What could not have been seen: `a difference below 8 % cannot be seen with 7 repeats`.
    #[must_use]
    pub fn blind(&self) -> String {
        let count = self.estimate.count;
        match self.detectable {
            Some(0.0) => format!("no difference between {count} repeats"),
            Some(difference) => format!(
                "a difference below {} % cannot be seen with {count} repeats",
                percent(difference)
            ),
            None => format!(
                "{count} repeats hold a median to {} %, and {} % need {FEWEST}",
                percent(self.estimate.level),
                percent(LEVEL)
            ),
        }
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Estimate {
            median, low, high, ..
        } = self.estimate;
        let by = |word: &str, [by, least, most]: [f64; 3]| {
            let [by, least, most] = [by, least, most].map(percent);
            format!("{word} by {by} % ({least} to {most})")
        };
        match self.effect {
            Effect::Faster => f.write_str(&by("faster", [1.0 - median, 1.0 - high, 1.0 - low])),
            Effect::Slower => f.write_str(&by("slower", [median - 1.0, low - 1.0, high - 1.0])),
            Effect::Unseen => write!(f, "inside the noise: {}", self.blind()),
            Effect::TooFew => write!(f, "too few to say: {}", self.blind()),
        }
    }
}

/// Hundredths without an end that says nothing: `41`, `8`, `0.4`.
fn percent(share: f64) -> String {
    let percent = share * 100.0;
    if percent >= 9.95 {
        return format!("{percent:.0}");
    }
    let text = format!("{percent:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rounds of a base that takes 100 and an arm that takes this.
    fn against(arm: &[f64]) -> Ratio {
        let rounds: Vec<_> = arm.iter().map(|time| (*time, 100.0)).collect();
        Ratio::paired(&rounds, 1).unwrap()
    }

    #[test]
    fn each_verdict_in_words() {
        let words = |arm: &[f64]| against(arm).to_string();
        assert_eq!(
            words(&[54.0, 57.0, 58.0, 59.0, 60.0, 62.0, 64.0]),
            "faster by 41 % (36 to 46)"
        );
        assert_eq!(
            words(&[103.0, 104.0, 105.0, 130.0, 131.0, 150.0, 300.0]),
            "slower by 30 % (3 to 200)"
        );
        assert_eq!(
            words(&[93.0, 95.0, 99.0, 100.0, 101.0, 104.0, 106.0]),
            "inside the noise: a difference below 7.5 % cannot be seen with 7 repeats"
        );
        assert_eq!(
            words(&[100.0; 7]),
            "inside the noise: no difference between 7 repeats"
        );
        assert_eq!(
            words(&[50.0; 5]),
            "too few to say: 5 repeats hold a median to 94 %, and 95 % need 6"
        );
        assert_eq!(
            words(&[50.0]),
            "too few to say: 1 repeats hold a median to 0 %, and 95 % need 6"
        );
    }

    #[test]
    fn drift_that_both_share_cancels() {
        // The machine becomes ten times slower while it is measured; the arm always takes 0.9.
        let rounds: Vec<_> = (0..9)
            .map(|round| 100.0 * 1.33_f64.powi(round))
            .map(|base| (0.9 * base, base))
            .collect();
        let ratio = Ratio::paired(&rounds, 1).unwrap();
        assert_eq!(ratio.effect, Effect::Faster);
        assert!((ratio.estimate.median - 0.9).abs() < 1e-9);
    }

    #[test]
    fn one_round_that_contradicts_makes_seven_say_nothing() {
        let mut arm = [60.0; 7];
        assert_eq!(against(&arm).effect, Effect::Faster);
        arm[3] = 101.0;
        assert_eq!(against(&arm).effect, Effect::Unseen);
    }

    #[test]
    fn times_that_are_none_are_refused() {
        assert_eq!(Ratio::paired(&[], 1), Err(Unusable::Nothing));
        for round in [
            (1.0, 0.0),
            (0.0, 1.0),
            (f64::NAN, 1.0),
            (1.0, f64::INFINITY),
            (f64::INFINITY, f64::INFINITY),
            (-1.0, -1.0),
            // Their quotient is not a number that can be written down.
            (f64::MAX, f64::MIN_POSITIVE),
        ] {
            let refused = Ratio::paired(&[(1.0, 1.0), round], 1).unwrap_err();
            assert!(
                matches!(refused, Unusable::Value { at: 1, .. }),
                "{round:?}"
            );
        }
    }

    fn rounds() -> impl Strategy<Value = Vec<(f64, f64)>> {
        prop::collection::vec((0.1..1e4, 0.1..1e4), 1..12)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn neither_unit_nor_order_counts(rounds in rounds(), power in -8..8_i32) {
            let factor = 2_f64.powi(power);
            let mut other: Vec<_> = rounds.iter().map(|(a, b)| (a * factor, b * factor)).collect();
            other.reverse();
            prop_assert_eq!(Ratio::paired(&rounds, 3), Ratio::paired(&other, 3));
        }

        #[test]
        fn an_effect_is_seen_only_beyond_what_is_detectable(rounds in rounds()) {
            let ratio = Ratio::paired(&rounds, 3).unwrap();
            let median = ratio.estimate.median;
            match (ratio.effect, ratio.detectable) {
                (Effect::TooFew, detectable) => prop_assert_eq!(detectable, None),
                // What is beyond the harder direction is beyond both.
                (Effect::Unseen, Some(least)) => {
                    prop_assert!(median - 1.0 <= least + 1e-9 && 1.0 - median <= least + 1e-9);
                }
                (_, Some(least)) => prop_assert!(least >= 0.0),
                (_, None) => prop_assert!(false, "{ratio:?}"),
            }
            prop_assert!(!ratio.to_string().contains("NaN"));
        }
    }
}
