use super::*;
use crate::config::testing::cpu;
use crate::telemetry::Page;

fn page(blocks: u64, bytes: Option<u64>) -> Page {
    let mut text = String::from(
        "# TYPE vllm:prompt_tokens_by_source_total counter\n\
         # TYPE vllm:prompt_tokens_cached_by_source_total counter\n\
         # TYPE vllm:kvcr_transfer_blocks_total counter\n\
         # TYPE vllm:kvcr_transfer_bytes_total counter\n\
         # TYPE vllm:kv_offload_tiering_read_bytes_total counter\n\
         # TYPE vllm:kv_offload_tiering_write_bytes_total counter\n",
    );
    text += &format!("vllm:kvcr_transfer_blocks_total{{operation=\"source_write\"}} {blocks}\n");
    if let Some(bytes) = bytes {
        text += &format!("vllm:kvcr_transfer_bytes_total{{operation=\"source_write\"}} {bytes}\n");
    }
    Page::parse(&text)
}

fn blocks() -> Geometry {
    Geometry::of(&cpu(&[]).profile)
}

fn checks(flow: Flow, after: &Page, blocks: Geometry) -> Vec<Check> {
    let delta = Delta::between(&page(0, Some(0)), after);
    flow.checks(0, &delta, blocks)
}

fn failed(flow: Flow, after: &Page) -> Vec<(String, Class)> {
    let checks = checks(flow, after, blocks());
    let failed = checks.into_iter().filter(|check| !check.held);
    failed.map(|check| (check.name, check.class)).collect()
}

const EIGHT: Pages = Pages {
    attention: 8,
    state: 0,
};
const WRITTEN: Flow = Flow {
    computed: 0,
    outside: 0,
    kept: 0,
    stored: 0,
    delivered: Pages {
        attention: 0,
        state: 0,
    },
    fetched: Pages {
        attention: 0,
        state: 0,
    },
    written: EIGHT,
};

#[test]
fn what_flowed_as_claimed_passes() {
    assert_eq!(failed(WRITTEN, &page(8, Some(8 * 262_144))), []);
    assert_eq!(failed(Flow::default(), &page(0, Some(0))), []);
}

#[test]
fn one_block_or_byte_too_many_or_too_few_fails() {
    let wrong = |blocks, bytes| failed(WRITTEN, &page(blocks, Some(bytes)));
    let red = |name: &str| [(name.to_owned(), Class::Product)];
    assert_eq!(wrong(7, 8 * 262_144), red("blocks_to_peer[worker0]"));
    assert_eq!(wrong(9, 8 * 262_144), red("blocks_to_peer[worker0]"));
    assert_eq!(wrong(8, 8 * 262_144 - 1), red("bytes_to_peer[worker0]"));
    let idle = failed(Flow::default(), &page(0, Some(1)));
    assert_eq!(idle, red("bytes_to_peer[worker0]"));
}

#[test]
fn a_source_without_byte_telemetry_is_inconclusive_not_a_mismatch() {
    let bytes = ("bytes_to_peer[worker0]".to_owned(), Class::Inconclusive);
    assert_eq!(failed(WRITTEN, &page(8, Some(0))), [bytes]);
}

fn answer(prompt_tokens: u64, completion_tokens: u64) -> Observation {
    Observation {
        label: "asked".into(),
        status: 200,
        text: String::new(),
        tokens: Vec::new(),
        finish_reason: "length".into(),
        prompt_tokens,
        completion_tokens,
        cached_tokens: None,
        served_by: None,
        prefilled_by: None,
        smallest_top2_gap: None,
        wall_ms: 0.0,
        raw: serde_json::Value::Null,
    }
}

#[test]
fn what_is_beyond_a_hit_is_computed_and_stored() {
    let blocks = blocks();
    // Eight blocks and a half; the answer ends within the ninth, or fills it and more.
    let flow = Flow::fetched(&answer(544, 16), 512, blocks);
    assert_eq!((flow.computed, flow.fetched, flow.stored), (32, EIGHT, 0));
    let flow = Flow::delivered(&answer(544, 100), 320, blocks);
    assert_eq!(
        (flow.computed, flow.delivered.total(), flow.stored),
        (224, 5, 5)
    );
    let flow = Flow::kept(&answer(544, 16), 512, blocks);
    assert_eq!((flow.computed, flow.kept, flow.stored), (32, 8, 0));
    let mut both = Flow::cold(&answer(544, 16), blocks);
    both += Flow::written(512, blocks);
    assert_eq!((both.computed, both.stored, both.written), (544, 8, EIGHT));
}

#[test]
fn an_answer_that_lies_about_its_length_is_no_panic() {
    let blocks = blocks();
    let flow = Flow::fetched(&answer(0, 0), 512, blocks);
    assert_eq!((flow.computed, flow.fetched, flow.stored), (0, EIGHT, 0));
}

#[test]
fn a_hybrid_hit_is_fetched_with_the_states_at_its_end() {
    let hybrid = Geometry::of(&cpu(&["--hit-block-tokens", "256", "--ssm-groups", "3"]).profile);
    let flow = Flow::fetched(&answer(2_700, 16), 2_560, hybrid);
    assert_eq!((flow.computed, flow.outside, flow.stored), (140, 2_560, 0));
    assert_eq!(flow.fetched.total(), 13);
    let other = Flow::written(2_560, hybrid);
    assert_eq!(other.written, flow.fetched);
    let missed = Flow::fetched(&answer(2_700, 16), 0, hybrid);
    assert_eq!(missed, Flow::cold(&answer(2_700, 16), hybrid));
}

#[test]
fn without_a_geometry_pages_and_bytes_are_lower_bounds_and_say_so() {
    let unknown = Geometry::of(&cpu(&["--model-path", "/m"]).profile);
    let words = "(geometry not configured: a lower bound)";
    for (after, red) in [
        (page(8, Some(8)), None),
        // States too, and pages of any size.
        (page(11, Some(11 * 131_072)), None),
        (page(7, Some(7)), Some("blocks_to_peer[worker0]")),
        (page(8, Some(7)), Some("bytes_to_peer[worker0]")),
    ] {
        let checks = checks(WRITTEN, &after, unknown);
        let failed = checks.iter().find(|check| !check.held);
        assert_eq!(failed.map(|check| check.name.as_str()), red);
        let bounds: Vec<&str> = checks
            .iter()
            .filter(|check| check.expected.contains(words))
            .map(|check| check.name.as_str())
            .collect();
        let expected = ["blocks_to_peer", "bytes_to_peer"];
        assert_eq!(bounds, expected.map(|name| format!("{name}[worker0]")));
    }
    // What nobody hit, nobody may be sent.
    let idle = checks(Flow::default(), &page(1, Some(1)), unknown);
    let failed: Vec<_> = idle.iter().filter(|check| !check.held).collect();
    assert_eq!(failed[0].name, "blocks_to_peer[worker0]");
    assert!(
        !failed[0].expected.contains(words),
        "{}",
        failed[0].expected
    );
}
