//! Times become checks. Pure.

use crate::config::profile::Budget;
use crate::failure::Class;
use crate::timeline::{Growth, Moment, Timeline};
use crate::verdict::Check;

/// How many operation timeouts a request after a kill may wait out. It is one by the product's
/// rules; a machine that stalls makes it look like more.
const TIMEOUTS: f64 = 3.0;
/// Milliseconds that the request itself may take beside them, and being scheduled.
const BESIDE_MS: f64 = 5000.0;

/// Every time that the profile has a budget for, of the slowest kill: a promise holds each time.
pub(super) fn budgets(budget: &Budget, timelines: &[Timeline]) -> Vec<Check> {
    let promised = [
        (Moment::Promoted, budget.promotion_ms),
        (
            Moment::FirstCorrectResponse,
            budget.first_correct_response_ms,
        ),
        (Moment::FirstGuardHit, budget.first_guard_hit_ms),
        (Moment::ReplacementServing, budget.replacement_serving_ms),
    ];
    let judged = promised
        .into_iter()
        .filter_map(|(moment, limit)| Some((moment, limit?)));
    judged
        .map(|(moment, limit)| within(moment, limit, timelines))
        .collect()
}

fn within(moment: Moment, limit: u64, timelines: &[Timeline]) -> Check {
    let times: Vec<f64> = timelines
        .iter()
        .filter_map(|one| one.after_ms(moment))
        .collect();
    let slowest = times.iter().copied().reduce(f64::max);
    // A kill after which it never happened has a check of its own, but is within no budget.
    let all = times.len() == timelines.len();
    let name = format!("within_budget[{}]", moment.words().replace(' ', "_"));
    let mut check = Check::new(
        name,
        Class::Product,
        all && slowest.is_some_and(|slowest| slowest <= limit as f64),
        format_args!("{} at most {limit} ms after each kill", moment.words()),
        match slowest {
            None => "never".to_owned(),
            Some(slowest) => format!(
                "{slowest:.1} ms at most, in {} of {} kills",
                times.len(),
                timelines.len()
            ),
        },
    );
    check.margin = slowest
        .filter(|slowest| check.held && *slowest <= limit as f64)
        .map(|slowest| format!("{:.1} ms", limit as f64 - slowest));
    check
}

/// The first request after a kill asks a peer that is dead, and is given up after the operation
/// timeout: once, not again and again.
pub(super) fn stalls(operation_timeout_ms: u64, stalls_ms: &[f64]) -> Vec<Check> {
    let limit = operation_timeout_ms as f64 * TIMEOUTS + BESIDE_MS;
    let longest = stalls_ms.iter().copied().reduce(f64::max);
    let Some(longest) = longest else {
        return Vec::new();
    };
    vec![Check::new(
        "stall_is_one_operation_timeout",
        Class::Product,
        longest <= limit,
        format_args!(
            "the first request after a kill waits out kvcr.operation_timeout_ms ({operation_timeout_ms} ms) at most, measured as less than {limit:.0} ms"
        ),
        format_args!("{longest:.0} ms at most"),
    )]
}

/// Whether a takeover costs no more than in proportion to what it recovers.
pub(super) fn cost(growth: &Growth) -> Check {
    let (held, class, found) = match growth {
        Growth::Linear => (true, Class::Product, "no faster".to_owned()),
        Growth::Steeper { stretch, power } => (
            false,
            Class::Product,
            format!(
                "from {} to {} blocks it grows with the power {power:.2}",
                stretch.0, stretch.1
            ),
        ),
        Growth::Unseen => (
            false,
            Class::Inconclusive,
            "too few blocks apart to say; run it on a fresh stack (`kvcr-phase1 down`)".to_owned(),
        ),
    };
    Check::new(
        "cost_linear_in_blocks",
        class,
        held,
        "promotion time grows no faster than recovered blocks",
        found,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kills(times_ms: &[Option<u64>]) -> Vec<Timeline> {
        let kill = |ms: &Option<u64>| {
            let mut timeline = Timeline::new(1_000_000);
            if let Some(ms) = ms {
                timeline.reached(Moment::Promoted, 1_000_000 + ms * 1_000_000);
            }
            timeline
        };
        times_ms.iter().map(kill).collect()
    }

    #[test]
    fn only_what_the_profile_promises_is_judged_and_by_the_slowest() {
        let kills = kills(&[Some(3), Some(20), Some(7)]);
        assert_eq!(budgets(&Budget::default(), &kills), []);
        let held = |limit: u64| {
            let budget = Budget {
                promotion_ms: Some(limit),
                ..Budget::default()
            };
            budgets(&budget, &kills).remove(0)
        };
        assert!(held(20).held);
        assert_eq!(held(30).margin.as_deref(), Some("10.0 ms"));
        let over = held(19);
        assert!(!over.held && over.class == Class::Product);
        assert_eq!(over.found, "20.0 ms at most, in 3 of 3 kills");
    }

    #[test]
    fn what_never_happened_is_within_no_budget() {
        let budget = Budget {
            promotion_ms: Some(1000),
            first_guard_hit_ms: Some(1000),
            ..Budget::default()
        };
        let checks = budgets(&budget, &kills(&[Some(3), None]));
        assert_eq!(checks.len(), 2);
        assert!(checks.iter().all(|check| !check.held));
        assert_eq!(checks[1].name, "within_budget[first_Guard_hit]");
        assert_eq!(checks[1].found, "never");
    }

    #[test]
    fn a_stall_is_bounded_by_the_configured_timeout() {
        assert_eq!(stalls(5000, &[]), []);
        assert!(stalls(5000, &[5070.0, 5200.0])[0].held);
        assert!(!stalls(5000, &[5070.0, 20_001.0])[0].held);
        assert!(!stalls(100, &[5301.0])[0].held);
    }

    #[test]
    fn a_cost_that_cannot_be_seen_is_not_one_that_is_right() {
        assert!(cost(&Growth::Linear).held);
        let steep = cost(&Growth::Steeper {
            stretch: (16.0, 256.0),
            power: 2.0,
        });
        assert!(!steep.held && steep.class == Class::Product);
        assert_eq!(cost(&Growth::Unseen).class, Class::Inconclusive);
    }
}
