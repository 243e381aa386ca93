//! Pages recorded on the real product (Dynamo 1.6.1, vLLM 0.32.0, KVCR 0.1.1, worker 0 of the `cpu`
//! profile): as they are, every check holds; with one counter made up, the right one goes red.

use std::num::NonZeroU32;

use super::*;
use crate::telemetry::Page;

const BLOCKS: Geometry = Geometry {
    hit_block: NonZeroU32::new(64).unwrap(),
    state_groups: Some(0),
    page_bytes: Some(262_144),
};
/// 8 blocks and 37 tokens.
const LONG: u64 = 549;
const SHORT: u64 = 32;
const HIT: u64 = 512;

#[derive(Clone, Copy)]
struct Recorded {
    before: &'static str,
    after: &'static str,
    judge: fn(&Delta) -> Vec<Check>,
}

const COLD: Recorded = Recorded {
    before: include_str!("../testdata/cold-before.prom"),
    after: include_str!("../testdata/cold-after.prom"),
    judge: |delta| cold(0, delta, SHORT + LONG, Bound::Exactly(8)),
};
const WARM_DEVICE: Recorded = Recorded {
    before: include_str!("../testdata/warm_device-before.prom"),
    after: include_str!("../testdata/warm_device-after.prom"),
    judge: |delta| warm_device(0, delta, HIT),
};
const WARM_TIER: Recorded = Recorded {
    before: include_str!("../testdata/warm_tier-before.prom"),
    after: include_str!("../testdata/warm_tier-after.prom"),
    judge: |delta| warm_tier(delta, BLOCKS, HIT),
};

fn judged(recorded: Recorded, after: &str) -> Vec<Check> {
    let delta = Delta::between(&Page::parse(recorded.before), &Page::parse(after));
    (recorded.judge)(&delta)
}

fn red(checks: &[Check]) -> Vec<(&str, Class)> {
    checks
        .iter()
        .filter(|check| !check.held)
        .map(|check| (check.name.as_str(), check.class))
        .collect()
}

/// The page with `by` added to the sample whose line has all of `words`; a new sample of `by` if
/// there is none.
fn made_up(page: &str, words: &[&str], by: f64) -> String {
    let mut found = false;
    let mut lines: Vec<String> = page
        .lines()
        .map(|line| {
            if line.starts_with('#') || !words.iter().all(|word| line.contains(word)) {
                return line.to_owned();
            }
            found = true;
            let (series, value) = line.rsplit_once(' ').expect("a sample");
            format!("{series} {}", value.parse::<f64>().expect("a value") + by)
        })
        .collect();
    if !found {
        let labels: Vec<&str> = words[1..].to_vec();
        lines.push(format!(
            "{}{{engine=\"0\",{}}} {by}",
            words[0],
            labels.join(",")
        ));
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_recorded_pages_hold() {
    for recorded in [COLD, WARM_DEVICE, WARM_TIER] {
        let checks = judged(recorded, recorded.after);
        assert_eq!(red(&checks), [], "{checks:?}");
    }
}

#[test]
fn every_made_up_counter_turns_the_right_check_red() {
    const BLOCKS_TOTAL: &str = "vllm:kvcr_transfer_blocks_total";
    const SOURCE: &str = "vllm:prompt_tokens_by_source_total";
    const CACHED: &str = "vllm:prompt_tokens_cached_by_source_total";
    const READ: &str = "vllm:kv_offload_tiering_read_bytes_total";
    let table: &[(Recorded, &[&str], f64, &str)] = &[
        (
            COLD,
            &[SOURCE, "source=\"local_compute\""],
            -1.0,
            "every_token_computed[worker0]",
        ),
        (
            COLD,
            &[BLOCKS_TOTAL, "operation=\"local_fill\""],
            -8.0,
            "stored_in_own_tier[worker0]",
        ),
        (
            COLD,
            &[BLOCKS_TOTAL, "operation=\"local_fill\""],
            1.0,
            "stored_in_own_tier[worker0]",
        ),
        (
            COLD,
            &[BLOCKS_TOTAL, "operation=\"local_deliver\""],
            1.0,
            "no_local_deliver[worker0]",
        ),
        (
            COLD,
            &[BLOCKS_TOTAL, "operation=\"remote_deliver\""],
            1.0,
            "no_remote_deliver[worker0]",
        ),
        (
            COLD,
            &[BLOCKS_TOTAL, "operation=\"source_write\""],
            1.0,
            "no_source_write[worker0]",
        ),
        (
            COLD,
            &[SOURCE, "source=\"external_kv_transfer\""],
            64.0,
            "no_external_hit[worker0]",
        ),
        (
            WARM_DEVICE,
            &[SOURCE, "source=\"local_cache_hit\""],
            -64.0,
            "hit_in_device_cache",
        ),
        (
            WARM_DEVICE,
            &[SOURCE, "source=\"local_cache_hit\""],
            1.0,
            "hit_in_device_cache",
        ),
        (
            WARM_DEVICE,
            &[BLOCKS_TOTAL, "operation=\"local_deliver\""],
            8.0,
            "no_local_deliver[worker0]",
        ),
        (
            WARM_TIER,
            &[SOURCE, "source=\"external_kv_transfer\""],
            -64.0,
            "hit_outside_the_engine",
        ),
        (
            WARM_TIER,
            &[CACHED, "source=\"device\""],
            64.0,
            "not_from_the_device",
        ),
        (
            WARM_TIER,
            &[CACHED, "source=\"host\""],
            64.0,
            "not_from_the_host_tier",
        ),
        (
            WARM_TIER,
            &[BLOCKS_TOTAL, "operation=\"local_deliver\""],
            -1.0,
            "delivered_by_own_tier",
        ),
        (
            WARM_TIER,
            &[BLOCKS_TOTAL, "operation=\"local_deliver\""],
            1.0,
            "delivered_by_own_tier",
        ),
        (
            WARM_TIER,
            &[READ, "tier=\"1:kvcr\""],
            -1.0,
            "bytes_of_own_tier",
        ),
        (
            WARM_TIER,
            &[BLOCKS_TOTAL, "operation=\"remote_deliver\""],
            1.0,
            "no_peer_asked",
        ),
    ];
    for (recorded, words, by, expected) in table {
        let checks = judged(*recorded, &made_up(recorded.after, words, *by));
        assert_eq!(
            red(&checks),
            [(*expected, Class::Product)],
            "{words:?} {by:+}"
        );
    }
}

#[test]
fn a_family_that_is_gone_proves_nothing() {
    for recorded in [COLD, WARM_DEVICE, WARM_TIER] {
        let without: String = recorded
            .after
            .lines()
            .filter(|line| !line.contains("kvcr_transfer_blocks"))
            .map(|line| format!("{line}\n"))
            .collect();
        let checks = judged(recorded, &without);
        let red = red(&checks);
        assert!(!red.is_empty());
        assert!(
            red.iter().all(|(_, class)| *class == Class::Inconclusive),
            "{red:?}"
        );
    }
}

#[test]
fn a_worker_that_restarted_in_between_proves_nothing() {
    // Its counters begin again: the page of the end is older than that of the beginning.
    let delta = Delta::between(
        &Page::parse(WARM_TIER.after),
        &Page::parse(WARM_TIER.before),
    );
    let checks = warm_tier(&delta, BLOCKS, HIT);
    assert!(
        checks
            .iter()
            .all(|check| !check.held && check.class == Class::Inconclusive)
    );
}
