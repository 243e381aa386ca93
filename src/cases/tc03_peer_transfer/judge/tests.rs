use super::*;
use crate::config::testing::cpu;
use crate::telemetry::Page;

const BLOCK_BYTES: u64 = 262_144;

/// Samples of a page; a family that no sample is given for has counted nothing.
fn page(samples: &[(&str, u64)]) -> Page {
    let mut text: String = [
        "prompt_tokens_by_source_total",
        "prompt_tokens_cached_by_source_total",
        "kvcr_transfer_blocks_total",
        "kvcr_transfer_bytes_total",
        "kv_offload_tiering_read_bytes_total",
        "kv_offload_tiering_write_bytes_total",
    ]
    .map(|name| format!("# TYPE vllm:{name} counter\n"))
    .concat();
    text += "# TYPE vllm:kvcr_duration_seconds histogram\n";
    for (series, value) in samples {
        text += &format!("vllm:{series} {value}\n");
    }
    Page::parse(&text)
}

fn delta(samples: &[(&str, u64)]) -> Delta {
    Delta::between(&page(&[]), &page(samples))
}

fn failed(checks: Vec<Check>) -> Vec<(String, Class)> {
    let failed = checks.into_iter().filter(|check| !check.held);
    failed.map(|check| (check.name, check.class)).collect()
}

fn red(name: &str, class: Class) -> Vec<(String, Class)> {
    vec![(name.to_owned(), class)]
}

const ASKED: (&str, u64) = (
    "kvcr_duration_seconds_count{scope=\"control_start_write\",result=\"handled\"}",
    1,
);
const REFUSED: (&str, u64) = (
    "kvcr_duration_seconds_count{scope=\"source_write\",result=\"failed\"}",
    1,
);
const NOTHING_CAME: (&str, u64) = (
    "kvcr_duration_seconds_count{scope=\"remote_deliver\",result=\"failed\"}",
    1,
);

#[test]
fn a_refusal_that_both_count_passes() {
    let checks = refused(&delta(&[NOTHING_CAME]), &delta(&[ASKED, REFUSED]));
    assert_eq!(failed(checks), []);
}

#[test]
fn a_side_that_does_not_count_it_lies() {
    let silent = refused(&delta(&[NOTHING_CAME]), &delta(&[ASKED]));
    let name = "source_says_that_it_has_nothing";
    assert_eq!(failed(silent), red(name, Class::Product));
    let unheard = refused(&delta(&[]), &delta(&[ASKED, REFUSED]));
    let name = "target_counts_that_nothing_came";
    assert_eq!(failed(unheard), red(name, Class::Product));
    // It failed without having asked.
    let alone = refused(&delta(&[NOTHING_CAME]), &delta(&[]));
    assert!(failed(alone).contains(&(name.to_owned(), Class::Product)));
}

#[test]
fn a_peer_that_was_not_asked_proves_nothing() {
    let checks = refused(&delta(&[]), &delta(&[]));
    assert_eq!(failed(checks), red("peer_was_asked", Class::Inconclusive));
}

fn twice() -> Twice {
    let blocks = Geometry::of(&cpu(&[]).profile);
    assert_eq!(blocks.page_bytes, Some(BLOCK_BYTES));
    Twice {
        computed: 64,
        hit: 512,
        blocks,
    }
}

/// Both sides of `fetched` blocks, of which `written` were written.
fn sides(fetched: u64, written: u64, device: u64, outside: u64) -> (Delta, Delta) {
    let target = delta(&[
        (
            "prompt_tokens_by_source_total{source=\"local_compute\"}",
            64,
        ),
        (
            "prompt_tokens_by_source_total{source=\"local_cache_hit\"}",
            device,
        ),
        (
            "prompt_tokens_by_source_total{source=\"external_kv_transfer\"}",
            outside,
        ),
        (
            "kvcr_transfer_blocks_total{operation=\"remote_deliver\"}",
            fetched,
        ),
        (
            "kv_offload_tiering_read_bytes_total{tier=\"1:kvcr\"}",
            fetched * BLOCK_BYTES,
        ),
    ]);
    let source = delta(&[
        (
            "kvcr_transfer_blocks_total{operation=\"source_write\"}",
            written,
        ),
        (
            "kvcr_transfer_bytes_total{operation=\"source_write\"}",
            written * BLOCK_BYTES,
        ),
    ]);
    (target, source)
}

#[test]
fn one_transfer_and_two_are_both_right() {
    for (blocks, device, outside, transfers) in
        [(8, 512, 512, 1), (8, 0, 1024, 1), (16, 0, 1024, 2)]
    {
        let (target, source) = sides(blocks, blocks, device, outside);
        assert_eq!(failed(twice().checks(&target, &source)), []);
        assert_eq!(twice().transfers(&target), transfers);
    }
}

#[test]
fn sums_that_do_not_agree_fail() {
    let names = |fetched, written, outside| -> Vec<String> {
        let (target, source) = sides(fetched, written, 0, outside);
        let failed = failed(twice().checks(&target, &source));
        failed.into_iter().map(|(name, _)| name).collect()
    };
    assert_eq!(
        names(16, 8, 1024),
        ["blocks_to_peer[worker0]", "bytes_to_peer[worker0]"]
    );
    assert_eq!(
        names(12, 12, 1024),
        [
            "blocks_from_peer[worker1]",
            "bytes_delivered[worker1]",
            "blocks_to_peer[worker0]",
            "bytes_to_peer[worker0]"
        ]
    );
    assert_eq!(names(8, 8, 512), ["tokens_reused[worker1]"]);
}
