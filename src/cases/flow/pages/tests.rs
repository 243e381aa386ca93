use super::*;
use crate::config::testing::cpu;
use crate::telemetry::kvcr::{self, Operation};
use crate::telemetry::{Delta, Page};

fn geometry(groups: &str) -> Geometry {
    Geometry::of(&cpu(&["--hit-block-tokens", "256", "--ssm-groups", groups]).profile)
}

/// Checks after a hit of `hit` tokens for which `delivered` pages came.
fn after(hit: u64, delivered: u64, geometry: Geometry) -> Vec<Check> {
    let page = |pages: u64| {
        Page::parse(&format!(
            "# TYPE vllm:kvcr_transfer_blocks_total counter\n\
             vllm:kvcr_transfer_blocks_total{{operation=\"remote_deliver\"}} {pages}\n"
        ))
    };
    let delta = Delta::between(&page(0), &page(delivered));
    let counter = kvcr::blocks(&delta, Operation::RemoteDeliver);
    checks(
        "worker1.from_peer",
        geometry.pages_of_hit(hit),
        &counter,
        geometry,
    )
}

/// Names of the checks that did not hold.
fn red(hit: u64, delivered: u64) -> Vec<String> {
    let checks = after(hit, delivered, geometry("3"));
    let failed = checks.into_iter().filter(|check| !check.held);
    failed.map(|check| check.name).collect()
}

const MISSING: &str = "state_pages_present[worker1.from_peer]";
const USELESS: &str = "no_useless_transfer[worker1.from_peer]";

#[test]
fn missing_states_and_useless_pages_are_told_apart() {
    assert_eq!(red(2_560, 13), [""; 0]);
    assert_eq!(red(0, 0), [""; 0]);
    for delivered in 10..13 {
        assert_eq!(red(2_560, delivered), [MISSING], "{delivered}");
    }
    for delivered in [14, 23, 40] {
        assert_eq!(red(2_560, delivered), [USELESS], "{delivered}");
    }
    for delivered in 1..=13 {
        assert_eq!(red(0, delivered), [USELESS], "{delivered}");
    }
    // Attention pages are missing: the counts say so, and of the states nothing is known.
    for delivered in 0..10 {
        assert_eq!(red(2_560, delivered), [""; 0], "{delivered}");
    }
}

#[test]
fn the_words_name_the_fault() {
    let missing = &after(2_560, 10, geometry("3"))[0];
    assert_eq!(missing.expected, "10 attention + 3 state pages");
    assert_eq!(missing.found, "10 pages: 3 state pages missing");
    let useless = &after(0, 11, geometry("3"))[1];
    assert_eq!(
        useless.found,
        "11 pages: 11 that no hit can use (over-transfer)"
    );
}

#[test]
fn one_group_needs_no_names() {
    assert!(after(2_560, 0, geometry("0")).is_empty());
    let unknown = Geometry::of(&cpu(&["--model-path", "/m"]).profile);
    assert!(after(2_560, 0, unknown).is_empty());
}

#[test]
fn a_count_that_is_not_there_is_missing_evidence() {
    let empty = Page::parse("");
    let counter = kvcr::blocks(&Delta::between(&empty, &empty), Operation::RemoteDeliver);
    let geometry = geometry("3");
    let checks = checks(
        "worker1.from_peer",
        geometry.pages_of_hit(2_560),
        &counter,
        geometry,
    );
    assert_eq!(checks.len(), 2);
    for check in checks {
        assert_eq!((check.held, check.class), (false, Class::Inconclusive));
    }
}
