use proptest::prelude::*;

use super::*;
use crate::telemetry::guard::Journal;

const REAL: &str = include_str!("../../tests/fixtures/real/service-promotion.log");

fn recorded(killed: u64) -> Timeline {
    let mut timeline = Timeline::new(killed);
    timeline.take(&Journal::read(REAL).promotions()[0]);
    timeline
}

#[test]
fn a_recorded_takeover_is_told_in_milliseconds_after_the_kill() {
    let mut timeline = recorded(13_090_680_627_624);
    assert_eq!(timeline.after_ms(Moment::DeathObserved), Some(2.0));
    assert_eq!(timeline.recovered_blocks, Some(391));
    assert_eq!(timeline.disorder(), Vec::<String>::new());
    timeline.reached(Moment::FirstResponse, 13_095_680_627_624);
    timeline.reached(Moment::FirstResponse, 13_099_680_627_624);
    assert_eq!(timeline.after_ms(Moment::FirstResponse), Some(5000.0));
    assert_eq!(timeline.after_ms(Moment::FirstGuardHit), None);
    assert_eq!(
        timeline.line(),
        "death observed 2.0, records recovered 8.1, records adopted 27.3, serving 33.1, promoted 33.1, first response 5000.0, 391 blocks recovered"
    );
}

#[test]
fn a_guard_with_another_clock_is_said() {
    let timeline = recorded(13_090_690_627_624);
    assert_eq!(timeline.after_ms(Moment::DeathObserved), Some(-8.0));
    assert_eq!(
        timeline.disorder(),
        ["death observed 8.000 ms before the kill"]
    );
}

#[test]
fn moments_are_listed_in_their_order() {
    assert!(Moment::ALL.is_sorted());
    let all: std::collections::BTreeSet<_> = Moment::ALL.into_iter().collect();
    assert_eq!(all.len(), Moment::ALL.len());
}

#[test]
fn the_middle_is_the_middle() {
    let spread = |values: &[f64]| Spread::of(values).map(|s| (s.min, s.median, s.max, s.count));
    assert_eq!(spread(&[3.0, 1.0, 2.0]), Some((1.0, 2.0, 3.0, 3)));
    assert_eq!(spread(&[4.0, 1.0]), Some((1.0, 2.5, 4.0, 2)));
    assert_eq!(spread(&[]), None);
    assert_eq!(spread(&[f64::NAN, 1.0]), None);
    let text = Spread::of(&[3.0, 1.0, 2.0]).unwrap().to_string();
    assert_eq!(text, "1.0 / 2.0 / 3.0 ms (min / median / max of 3)");
    let kills = [recorded(13_090_680_627_624), Timeline::new(0)];
    assert_eq!(spreads(&kills)[&Moment::DeathObserved].count, 1);
}

#[test]
fn a_line_needs_two_places() {
    assert_eq!(Fit::of(&[]), None);
    assert_eq!(Fit::of(&[(1.0, 2.0)]), None);
    assert_eq!(Fit::of(&[(1.0, 2.0), (1.0, 3.0)]), None);
    assert_eq!(Fit::of(&[(1.0, f64::NAN), (2.0, 3.0)]), None);
}

#[test]
fn a_parabola_is_no_line_and_a_fixed_cost_is_one() {
    let xs = [16.0, 256.0, 4096.0];
    let points = |cost: fn(f64) -> f64| xs.map(|x| (x, cost(x)));
    assert_eq!(growth(&points(|x| 20.0 + 0.1 * x), 1.0), Growth::Linear);
    assert_eq!(growth(&points(|_| 3.0), 1.0), Growth::Linear);
    assert!(matches!(
        growth(&points(|x| 1e-4 * x * x), 1.0),
        Growth::Steeper { .. }
    ));
    // The same within what the clock may be wrong by.
    assert_eq!(growth(&points(|x| 1e-4 * x * x), 1e6), Growth::Linear);
}

#[test]
fn points_that_lie_together_say_nothing() {
    assert_eq!(growth(&[], 1.0), Growth::Unseen);
    let close = [(100.0, 1.0), (150.0, 2.0), (390.0, 3.0)];
    assert_eq!(growth(&close, 0.1), Growth::Unseen);
    assert_eq!(growth(&[(1.0, 1.0), (100.0, 2.0)], 0.1), Growth::Unseen);
}

proptest! {
    #[test]
    fn the_spread_is_in_order_and_does_not_depend_on_it(
        values in prop::collection::vec(-1e9..1e9_f64, 1..20),
    ) {
        let spread = Spread::of(&values).unwrap();
        prop_assert!(spread.min <= spread.median && spread.median <= spread.max);
        let below = values.iter().filter(|value| **value < spread.median).count();
        let above = values.iter().filter(|value| **value > spread.median).count();
        prop_assert!(below <= values.len() / 2 && above <= values.len() / 2);
        let backwards: Vec<f64> = values.iter().rev().copied().collect();
        prop_assert_eq!(Spread::of(&backwards), Some(spread));
    }

    #[test]
    fn points_on_a_line_give_it_back(
        intercept in -1e3..1e3_f64, slope in -1e2..1e2_f64,
        xs in prop::collection::btree_set(0_u32..10_000, 2..12),
    ) {
        let points: Vec<(f64, f64)> = xs.iter().map(|x| (f64::from(*x), intercept + slope * f64::from(*x))).collect();
        let fit = Fit::of(&points).unwrap();
        let scale = 1.0 + intercept.abs() + slope.abs() * 1e4;
        prop_assert!((fit.slope - slope).abs() < 1e-6 * scale, "{:?}", fit);
        prop_assert!((fit.intercept - intercept).abs() < 1e-6 * scale, "{:?}", fit);
        prop_assert!(fit.residual < 1e-6 * scale);
    }

    /// Least squares: no other line is nearer.
    #[test]
    fn no_line_beside_it_is_nearer(
        points in prop::collection::vec((0.0..1e3_f64, -1e3..1e3_f64), 3..10),
        aside in -10.0..10.0_f64, tilt in -1.0..1.0_f64,
    ) {
        let Some(fit) = Fit::of(&points) else { return Ok(()) };
        let squares = |a: f64, b: f64| points.iter().map(|(x, y)| (y - a - b * x).powi(2)).sum::<f64>();
        let best = squares(fit.intercept, fit.slope);
        let other = squares(fit.intercept + aside, fit.slope + tilt);
        prop_assert!(best <= other * (1.0 + 1e-9) + 1e-6, "{best} {other}");
    }

    #[test]
    fn what_is_linear_is_never_called_steeper(
        fixed in 0.0..1e3_f64, each in 0.0..10.0_f64, noise in 0.001..100.0_f64,
        xs in prop::collection::btree_set(1_u32..10_000, 3..12),
    ) {
        let points: Vec<(f64, f64)> = xs.iter().map(|x| (f64::from(*x), fixed + each * f64::from(*x))).collect();
        let steeper = matches!(growth(&points, noise), Growth::Steeper { .. });
        prop_assert!(!steeper);
    }

    #[test]
    fn a_timeline_counts_from_its_kill(killed in 0_u64..1 << 60, later in 0_u64..1 << 40) {
        let mut timeline = Timeline::new(killed);
        timeline.reached(Moment::Serving, killed + later);
        let ms = timeline.after_ms(Moment::Serving).unwrap();
        prop_assert!((ms - later as f64 / 1e6).abs() < 1e-3);
        prop_assert!(timeline.disorder().is_empty());
    }
}
