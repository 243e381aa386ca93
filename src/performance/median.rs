//! The median of repeated measurements and an interval that holds it.
//!
//! The interval is the percentile bootstrap's, widened to the one that order statistics prove. The
//! bootstrap alone is too narrow where there are few values: of 7 it leaves out the smallest and
//! the largest, and what is between them holds the median in 87.5 % of all cases, not in 95 %.
//! Between the j-th smallest and the j-th largest of n independent values the median lies with a
//! probability that is the binomial distribution's, whatever the values are distributed like.

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};

/// The probability with which an interval has to hold what it is said to hold.
pub const LEVEL: f64 = 0.95;

/// Fewer values have no interval of a median at [`LEVEL`]: `1 - 2 / 2^n` is less.
pub const FEWEST: usize = 6;

/// So many that the ends of an interval no longer depend on the seed.
const RESAMPLES: usize = 10_000;

/// Why nothing follows from measurements.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Unusable {
    /// There are none.
    #[error("nothing was measured")]
    Nothing,
    /// Not a number, endless, negative or zero. A time of zero is a clock that does not resolve it.
    #[error("measurement {at} is {value}, and has to be above 0 and finite")]
    Value {
        /// Which, from 0.
        at: usize,
        /// What it is.
        value: f64,
    },
}

/// A median with its interval, in the unit of the values.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
pub struct Estimate {
    /// How many values.
    pub count: usize,
    /// The middle one; of an even number the mean of the two in the middle.
    pub median: f64,
    /// The lower end of the interval.
    pub low: f64,
    /// The upper end.
    pub high: f64,
    /// The probability, at least, with which the interval holds the median of what was measured. It
    /// is below [`LEVEL`] for fewer than [`FEWEST`] values, where no interval can do better.
    pub level: f64,
}

impl Estimate {
    /// Of `values`, in any order. The same `seed` gives the same interval.
    ///
    /// # Errors
    /// If there are none, or one of them is not above 0 and finite.
    pub fn of(values: &[f64], seed: u64) -> Result<Self, Unusable> {
        Self::resampled(values, seed, RESAMPLES)
    }

    fn resampled(values: &[f64], seed: u64, resamples: usize) -> Result<Self, Unusable> {
        let good = |value: f64| value.is_finite() && value > 0.0;
        if let Some(at) = values.iter().position(|value| !good(*value)) {
            let value = values[at];
            return Err(Unusable::Value { at, value });
        }
        if values.is_empty() {
            return Err(Unusable::Nothing);
        }
        // Sorted first: an interval must not depend on the order in which values came.
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let count = sorted.len();
        let (beyond, level) = order_statistics(count);
        let (low, high) = bootstrap(&sorted, seed, resamples);
        Ok(Self {
            count,
            median: median(&sorted),
            low: low.min(sorted[beyond]),
            high: high.max(sorted[count - 1 - beyond]),
            level,
        })
    }

    /// Whether the interval holds at [`LEVEL`].
    #[must_use]
    pub fn is_sure(&self) -> bool {
        self.level >= LEVEL
    }
}

/// The middle of sorted values, of which there is at least one.
fn median(sorted: &[f64]) -> f64 {
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        1 => sorted[middle],
        _ => between(sorted[middle - 1], sorted[middle]),
    }
}

/// The mean of two. Rounded, it may not leave them: an interval has to hold its median.
fn between(low: f64, high: f64) -> f64 {
    f64::midpoint(low, high).clamp(low, high)
}

/// How many of `count` sorted values can be left out at each end so that what is between holds the
/// median at [`LEVEL`]; and with which probability it does. Leaves out none where that is too much.
fn order_statistics(count: usize) -> (usize, f64) {
    // The logarithm of the probability of no head in `count` throws; powers of two would underflow.
    let mut log = -(count as f64) * std::f64::consts::LN_2;
    let mut outside = 0.0;
    let mut best = None;
    for beyond in 0..count.div_ceil(2) {
        outside += 2.0 * log.exp();
        let level = 1.0 - outside;
        if level < LEVEL {
            return best.unwrap_or((0, level.max(0.0)));
        }
        best = Some((beyond, level));
        log += ((count - beyond) as f64 / (beyond + 1) as f64).ln();
    }
    best.unwrap_or((0, 0.0))
}

/// The percentile bootstrap of the median of sorted values.
fn bootstrap(sorted: &[f64], seed: u64, resamples: usize) -> (f64, f64) {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let (count, middle) = (sorted.len(), sorted.len() / 2);
    let mut drawn = vec![0; count];
    let mut medians: Vec<f64> = (0..resamples)
        .map(|_| {
            drawn.fill_with(|| rng.random_range(0..count));
            // Values are sorted, so the median of their indices is the index of the median.
            let (below, at, _) = drawn.select_nth_unstable(middle);
            let upper = sorted[*at];
            match (count % 2, below.iter().max()) {
                (0, Some(lower)) => between(sorted[*lower], upper),
                _ => upper,
            }
        })
        .collect();
    medians.sort_by(f64::total_cmp);
    // Rounded down, so that an interval is rather too wide.
    let beyond = (resamples as f64 * (1.0 - LEVEL) / 2.0) as usize;
    (medians[beyond], medians[resamples - 1 - beyond])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(values: &[f64]) -> Estimate {
        Estimate::resampled(values, 7, 400).unwrap()
    }

    #[test]
    fn nothing_and_what_is_no_time_is_refused() {
        assert_eq!(Estimate::of(&[], 0), Err(Unusable::Nothing));
        for value in [0.0, -0.0, -1.0, f64::NAN, f64::INFINITY] {
            let refused = Estimate::of(&[1.0, value], 0).unwrap_err();
            assert!(matches!(refused, Unusable::Value { at: 1, .. }), "{value}");
        }
        let said = Estimate::of(&[f64::NAN], 0).unwrap_err().to_string();
        assert_eq!(
            said,
            "measurement 0 is NaN, and has to be above 0 and finite"
        );
    }

    #[test]
    fn one_value_is_its_own_median_and_proves_nothing() {
        let one = of(&[3.0]);
        assert_eq!((one.median, one.low, one.high), (3.0, 3.0, 3.0));
        assert_eq!(one.level, 0.0);
        assert!(!one.is_sure());
    }

    #[test]
    fn equal_values_have_no_width() {
        let equal = of(&[0.1; 8]);
        assert_eq!((equal.low, equal.median, equal.high), (0.1, 0.1, 0.1));
        assert!(equal.is_sure());
    }

    #[test]
    fn the_tables_of_the_sign_test() {
        // Left out at each end, and what is between holds; from the binomial distribution.
        for (count, beyond, level) in [
            (1, 0, 0.0),
            (5, 0, 0.9375),
            (6, 0, 0.968_75),
            (7, 0, 0.984_375),
            (8, 0, 0.992_187_5),
            (9, 1, 0.960_937_5),
            (10, 1, 0.978_515_625),
            (20, 5, 0.958_610_5),
        ] {
            let (left_out, holds) = order_statistics(count);
            assert_eq!(left_out, beyond, "{count}");
            assert!((holds - level).abs() < 1e-6, "{count}: {holds}");
        }
        assert!(!of(&[1.0; FEWEST - 1]).is_sure());
        assert!(of(&[1.0; FEWEST]).is_sure());
        // Where powers of two have long underflowed.
        let (left_out, holds) = order_statistics(10_000);
        assert!((4890..4910).contains(&left_out) && holds >= LEVEL);
    }

    #[test]
    fn few_values_are_not_trusted_to_the_bootstrap() {
        let values: Vec<f64> = (1..=7).map(f64::from).collect();
        assert_eq!(bootstrap(&values, 7, RESAMPLES), (2.0, 6.0));
        let estimate = Estimate::of(&values, 7).unwrap();
        assert_eq!((estimate.low, estimate.high), (1.0, 7.0));
    }

    #[test]
    fn the_seed_decides_and_nothing_else() {
        // Even, so that medians lie between the values and the ends depend on the draws.
        let values: Vec<f64> = (0..40).map(|at| 1.07_f64.powi(at)).collect();
        let of = |seed| bootstrap(&values, seed, 50);
        assert_eq!(of(1), of(1));
        assert!((2..20).any(|seed| of(seed) != of(1)));
    }

    /// How often the interval of `count` values holds the median that they were drawn around.
    fn covered(count: usize, draw: impl Fn(&mut ChaCha8Rng) -> f64, truth: f64) -> f64 {
        let mut rng = ChaCha8Rng::seed_from_u64(20);
        let trials = 400;
        let held = (0..trials).filter(|seed| {
            let values: Vec<f64> = (0..count).map(|_| draw(&mut rng)).collect();
            let estimate = Estimate::resampled(&values, *seed, 100).unwrap();
            (estimate.low..=estimate.high).contains(&truth)
        });
        held.count() as f64 / trials as f64
    }

    #[test]
    fn intervals_hold_the_truth_as_often_as_they_say() {
        // Uniform, and one with a long tail as latencies have: the median of 1 / u is 2.
        for count in [6, 7, 25] {
            let uniform = covered(count, |rng| rng.random_range(1.0..3.0), 2.0);
            let tailed = covered(count, |rng| 1.0 / rng.random_range(1e-9..1.0), 2.0);
            assert!(uniform >= 0.93, "{count}: {uniform}");
            assert!(tailed >= 0.93, "{count}: {tailed}");
        }
        // Not by being useless: with many values it is narrow.
        let wide: Vec<f64> = (1..=400).map(f64::from).collect();
        let estimate = of(&wide);
        assert!(estimate.high - estimate.low < 60.0, "{estimate:?}");
    }

    fn times() -> impl Strategy<Value = Vec<f64>> {
        prop::collection::vec(1e-3..1e6, 1..30)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_interval_holds_the_point(values in times(), seed in any::<u64>()) {
            let one = Estimate::resampled(&values, seed, 100).unwrap();
            prop_assert!(one.low <= one.median && one.median <= one.high);
            prop_assert!(values.contains(&one.low) || values.len() > 1);
            prop_assert!((0.0..=1.0).contains(&one.level));
        }

        #[test]
        fn the_order_of_the_values_does_not_count(values in times(), seed in any::<u64>()) {
            let mut other = values.clone();
            other.reverse();
            other.rotate_left(values.len() / 3);
            let of = |values: &[f64]| Estimate::resampled(values, seed, 100).unwrap();
            prop_assert_eq!(of(&values), of(&other));
        }

        /// By a power of two, which a float is multiplied by without rounding.
        #[test]
        fn the_unit_does_not_count(values in times(), power in -20..20_i32) {
            let factor = 2_f64.powi(power);
            let scaled: Vec<f64> = values.iter().map(|value| value * factor).collect();
            let (one, other) = (of(&values), of(&scaled));
            prop_assert_eq!(one.median * factor, other.median);
            prop_assert_eq!(one.low * factor, other.low);
            prop_assert_eq!(one.high * factor, other.high);
        }

        #[test]
        fn the_median_has_as_many_above_as_below(values in times()) {
            let median = of(&values).median;
            let below = values.iter().filter(|value| **value < median).count();
            let above = values.iter().filter(|value| **value > median).count();
            prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
        }
    }
}
