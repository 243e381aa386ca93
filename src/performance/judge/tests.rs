use proptest::prelude::*;

use super::super::sample::testing::sample;
use super::*;

/// Seven rounds in which off takes 100 ms and an arm takes this.
fn measured(arm: Arm, times: &[f64]) -> Vec<Sample> {
    let rounds = times.iter().enumerate();
    rounds
        .flat_map(|(round, time)| [sample(Arm::Off, round, 100.0), sample(arm, round, *time)])
        .collect()
}

fn dedicated() -> Performance {
    Performance {
        dedicated: true,
        ..Performance::default()
    }
}

/// The one check of the local arm with this limit.
fn local(times: &[f64], limit: f64) -> Check {
    let performance = Performance {
        local_ttft_ratio_max: Some(limit),
        ..dedicated()
    };
    let mut checks = judge(&measured(Arm::Local, times), &performance).checks;
    assert_eq!(checks.len(), 1);
    checks.remove(0)
}

const FASTER: [f64; 7] = [54.0, 57.0, 58.0, 59.0, 60.0, 62.0, 64.0];

#[test]
fn nothing_is_judged_where_devices_are_shared_and_everything_is_said() {
    let mut performance = Performance {
        local_ttft_ratio_max: Some(0.1),
        peer_ttft_ratio_max: Some(0.2),
        ..Performance::default()
    };
    let judged = judge(&measured(Arm::Local, &FASTER), &performance);
    assert_eq!(judged.checks, []);
    assert_eq!(
        judged.notes[0],
        "performance is not judged: the profile does not say that its devices are dedicated \
         (performance.dedicated, --dedicated), so neither is local_ttft at most 0.1, peer_ttft at \
         most 0.2 of off"
    );
    assert_eq!(
        judged.notes[1..3],
        [
            "time to first token of off: 100.00 ms (100.00 to 100.00) in 7 rounds",
            "time to first token of local: 59.00 ms (54.00 to 64.00) in 7 rounds; faster by 41 % (36 to 46)",
        ]
    );
    performance.local_ttft_ratio_max = None;
    performance.peer_ttft_ratio_max = None;
    let judged = judge(&[], &performance);
    assert!(judged.notes[0].ends_with("(performance.dedicated, --dedicated)"));
    assert_eq!((judged.notes.len(), judged.report.rows.len()), (1, 0));
}

#[test]
fn dedicated_devices_without_a_limit_are_said_to_have_none() {
    let judged = judge(&measured(Arm::Local, &FASTER), &dedicated());
    assert_eq!(judged.checks, []);
    assert!(judged.notes[0].starts_with("performance is not judged: the profile has no limit"));
}

#[test]
fn a_limit_is_held_by_the_end_of_the_interval_and_not_by_its_point() {
    let held = local(&FASTER, 0.64);
    assert!(held.held, "{held}");
    assert_eq!(held.name, "within_ratio[local_ttft]");
    assert_eq!(held.margin.as_deref(), Some("0.000"));
    assert_eq!(
        held.found,
        "0.590 (0.540 to 0.640) in 7 of 7 rounds, faster by 41 % (36 to 46)"
    );
    let inside = local(&FASTER, 0.63);
    assert!(
        !inside.held && inside.class == Class::Inconclusive,
        "{inside}"
    );
    assert_eq!(
        inside.found,
        "0.590 (0.540 to 0.640) in 7 of 7 rounds, which has the limit inside; a difference below 9.3 % cannot be seen with 7 repeats; raise --repeats"
    );
    assert_eq!(inside.margin, None);
}

#[test]
fn a_limit_that_the_whole_interval_exceeds_is_the_products_to_mend() {
    let over = local(&FASTER, 0.53);
    assert!(!over.held && over.class == Class::Product, "{over}");
    assert_eq!(
        over.expected,
        "time to first token of local at most 0.53 of off, by the whole interval (95 %)"
    );
    // Cold may be slower than off, within what its limit says.
    let performance = Performance {
        cold_ttft_ratio_max: Some(1.2),
        ..dedicated()
    };
    let of = |times: &[f64]| {
        judge(&measured(Arm::Cold, times), &performance)
            .checks
            .remove(0)
    };
    assert!(of(&[101.0, 102.0, 103.0, 104.0, 105.0, 106.0, 119.0]).held);
    let slow = of(&[130.0, 131.0, 132.0, 133.0, 134.0, 135.0, 136.0]);
    assert!(!slow.held && slow.class == Class::Product);
    assert!(slow.found.ends_with("slower by 33 % (30 to 36)"), "{slow}");
}

#[test]
fn what_too_few_rounds_say_is_inconclusive_even_when_it_looks_good() {
    let few = local(&FASTER[..5], 0.9);
    assert!(!few.held && few.class == Class::Inconclusive, "{few}");
    assert!(
        few.found.contains("in 5 of 7 rounds; too few to say"),
        "{few}"
    );
}

#[test]
fn an_arm_that_was_not_measured_or_never_beside_off_is_inconclusive() {
    let performance = Performance {
        guard_ttft_ratio_max: Some(0.9),
        ..dedicated()
    };
    let of = |samples: &[Sample]| judge(samples, &performance).checks.remove(0);
    let missing = of(&measured(Arm::Local, &FASTER));
    assert!(!missing.held && missing.class == Class::Inconclusive);
    assert_eq!(missing.found, "nothing was measured");

    let apart: Vec<Sample> = (0..7)
        .flat_map(|round| {
            [
                sample(Arm::Off, round, 9.0),
                sample(Arm::Guard, round + 7, 9.0),
            ]
        })
        .collect();
    let apart = of(&apart);
    assert!(!apart.held && apart.class == Class::Inconclusive);
    assert!(apart.found.ends_with("no round has off too"), "{apart}");
}

#[test]
fn the_warm_up_is_not_judged() {
    let mut samples = measured(Arm::Local, &FASTER);
    let mut slow = measured(Arm::Local, &[5000.0; 3]);
    for sample in &mut slow {
        sample.round += 100;
        sample.warm_up = true;
    }
    let before = Report::of(&samples, 1);
    samples.extend(slow);
    assert_eq!(Report::of(&samples, 1), before);
}

#[test]
fn tokens_that_arrive_together_have_a_time_and_no_ratio() {
    let mut samples = measured(Arm::Local, &FASTER);
    for sample in &mut samples {
        sample.itl_ms = vec![0.0, 0.0, 4.0];
    }
    let report = Report::of(&samples, 1);
    let row = report.row(Metric::Itl, Arm::Local).unwrap();
    assert_eq!((row.ms, row.to_off), (None, None));
    assert_eq!(
        row.words,
        "most tokens arrived together, with no time between them"
    );
}

#[test]
fn a_report_comes_back_from_evidence_as_it_was() {
    let report = Report::of(&measured(Arm::Peer, &FASTER), 1);
    let text = serde_json::to_string(&report).unwrap();
    assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report);
    assert_eq!(report.rows.len(), 6);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Broken, then unknown, then held: a limit that allows more is never worse.
    #[test]
    fn a_wider_limit_never_hurts(times in prop::collection::vec(1.0..300.0, 6..10), limits in (0.01..3.0_f64, 0.01..3.0_f64)) {
        let rank = |limit: f64| {
            let check = local(&times, limit);
            (check.held, check.class == Class::Inconclusive)
        };
        let (small, large) = (limits.0.min(limits.1), limits.0.max(limits.1));
        prop_assert!(rank(small) <= rank(large), "{:?} {:?}", rank(small), rank(large));
    }
}
