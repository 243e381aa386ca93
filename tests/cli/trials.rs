//! The contract of the test binary `phase1` with cargo, nextest and CI, where nothing is
//! installed: every arm is gated, and nothing may pass quietly.

use kvcr_phase1::cases::PHASE1;

use crate::place::{Place, Typed};
use crate::promises;

promises![
    a_list_is_exactly_the_arms,
    the_ignored_are_those_that_are_gated,
    an_exact_name_that_is_gated_ends_with_3,
    a_run_in_which_nothing_ran_ends_with_3_and_the_reason,
    filters_that_leave_nothing_are_not_blamed_on_the_machine,
    what_is_required_fails_with_the_gates_reason,
    a_requirement_that_requires_nothing_is_a_usage_error,
    what_is_ignored_and_run_all_the_same_says_why_it_cannot,
    a_name_that_no_arm_has_names_the_nearest,
    a_flag_that_nobody_has_names_the_nearest_of_both_kinds,
    help_lists_both_kinds_of_flags,
    a_gate_that_moved_since_it_was_listed_is_a_failure,
    a_told_insta_may_not_hide_a_difference,
];

/// The test binary, of which somebody wants the product, that is not there.
fn product(place: &Place, args: &[&str]) -> Typed {
    place.phase1(args).var("PHASE1_PROFILE", "cpu")
}

fn arms() -> Vec<&'static str> {
    let arms = PHASE1.iter().flat_map(|case| case.arms);
    arms.map(|arm| arm.name).collect()
}

fn terse() -> String {
    let lines = arms().into_iter().map(|name| format!("{name}: test\n"));
    lines.collect()
}

fn a_list_is_exactly_the_arms() {
    let list = Place::with_python()
        .phase1(&["--list", "--format", "terse"])
        .said();
    assert_eq!(list.code, Some(0), "{list:?}");
    assert_eq!(list.out, terse());
}

fn the_ignored_are_those_that_are_gated() {
    let place = Place::with_python();
    let list = product(&place, &["--list", "--format", "terse", "--ignored"]).said();
    assert_eq!(list.out, terse(), "without an environment that is all");
}

fn an_exact_name_that_is_gated_ends_with_3() {
    let place = Place::with_python();
    let said = product(&place, &["--exact", "tc01::cold", "--nocapture"])
        .under_nextest("r")
        .said();
    said.fails(
        3,
        &[
            r#"--exact "tc01::cold" selects 0 runnable trials"#,
            "needs the locked environment `cpu`",
        ],
    );
}

fn a_run_in_which_nothing_ran_ends_with_3_and_the_reason() {
    let place = Place::with_python();
    product(&place, &[]).said().fails(
        3,
        &[
            "nothing ran; needs the locked environment `cpu`; found the `cpu` environment is not installed",
            "`kvcr-phase1 env install cpu`",
        ],
    );
    // With another reason there is another thing to do.
    let bare = product(&Place::bare(), &[]).said();
    bare.fails(3, &["nothing ran; ", "found no suitable Python", "apt-get"]);
    assert!(!bare.err.contains("env install"), "{bare:?}");
}

fn filters_that_leave_nothing_are_not_blamed_on_the_machine() {
    let said = Place::with_python().phase1(&["--skip", "tc0"]).said();
    said.fails(3, &["nothing ran; the filters leave no arm"]);
}

fn what_is_required_fails_with_the_gates_reason() {
    for required in ["all", "tc01", "tc01::cold"] {
        let place = Place::with_python();
        let said = place.phase1(&[]).var("PHASE1_REQUIRE", required).said();
        assert_eq!(said.code, Some(101), "{said:?}");
        let line = "Environment: tc01::cold is required (PHASE1_REQUIRE) and cannot run here; \
                    expected the locked environment `cpu`; found ";
        assert!(
            said.out.lines().any(|found| found.starts_with(line)),
            "{said:?}"
        );
        let failed = said.out.matches("is required").count();
        let all = arms();
        let expected = all
            .iter()
            .filter(|arm| required == "all" || arm.starts_with(required));
        assert_eq!(failed, expected.count(), "{said:?}");
    }
}

fn a_requirement_that_requires_nothing_is_a_usage_error() {
    let place = Place::with_python();
    // `cold` would select an arm as a filter; as a requirement it would silently hold for none.
    for name in ["tc09", "cold"] {
        place
            .phase1(&[])
            .var("PHASE1_REQUIRE", name)
            .said()
            .fails(2, &["no arm is called", "the nearest is tc01"]);
    }
}

fn what_is_ignored_and_run_all_the_same_says_why_it_cannot() {
    let place = Place::with_python();
    let said = product(&place, &["--ignored", "--exact", "tc01::cold"]).said();
    assert_eq!(said.code, Some(101), "{said:?}");
    assert!(
        said.out
            .contains("Environment: tc01::cold cannot run here; expected the locked environment"),
        "{said:?}"
    );
}

fn a_name_that_no_arm_has_names_the_nearest() {
    let place = Place::with_python();
    let said = |args: &[&str]| place.phase1(args).said();
    said(&["tc01::clod"]).fails(
        2,
        &["no arm is called \"tc01::clod\"; the nearest is tc01::cold"],
    );
    said(&["--exact", "tc01"]).fails(2, &["the nearest is tc01::"]);
    said(&["all"]).fails(2, &["no arm is called \"all\""]);
}

fn a_flag_that_nobody_has_names_the_nearest_of_both_kinds() {
    let place = Place::with_python();
    place
        .phase1(&["--lits", "--device-bloks", "4"])
        .said()
        .fails(
            2,
            &["the nearest is --list", "the nearest is --device-blocks"],
        );
}

fn help_lists_both_kinds_of_flags() {
    let said = Place::bare().phase1(&["--help"]).said();
    said.succeeds(&["--device-blocks", "PHASE1_DEVICE_BLOCKS", "--exact"]);
}

fn a_gate_that_moved_since_it_was_listed_is_a_failure() {
    let place = Place::with_python();
    let list = place
        .phase1(&["--list", "--format", "terse"])
        .var("PHASE1_PYTHON", "/nowhere/python")
        .under_nextest("r");
    assert_eq!(list.said().code, Some(0));
    let said = place
        .phase1(&["--exact", "tc01::cold", "--ignored"])
        .var("PHASE1_PROFILE", "cpu")
        .under_nextest("r")
        .said();
    assert_eq!(said.code, Some(101), "{said:?}");
    assert!(
        said.out.contains("Environment: gate drift: tc01::cold"),
        "{said:?}"
    );
}

fn a_told_insta_may_not_hide_a_difference() {
    let place = Place::with_python();
    for (name, value) in [("INSTA_FORCE_PASS", "1"), ("INSTA_UPDATE", "always")] {
        place.phase1(&[]).var(name, value).said().fails(3, &[name]);
        place
            .phase1(&["--list"])
            .var(name, value)
            .said()
            .fails(3, &[name]);
    }
}
