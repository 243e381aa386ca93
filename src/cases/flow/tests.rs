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

fn failed(flow: Flow, after: &Page) -> Vec<(String, Class)> {
    let blocks = Blocks::of(&cpu(&[]).profile).unwrap();
    let delta = Delta::between(&page(0, Some(0)), after);
    let checks = flow.checks(0, &delta, blocks);
    let failed = checks.into_iter().filter(|check| !check.held);
    failed.map(|check| (check.name, check.class)).collect()
}

const WRITTEN: Flow = Flow {
    computed: 0,
    stored: 0,
    delivered: 0,
    fetched: 0,
    written: 8,
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
