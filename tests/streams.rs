//! What `benches/streams` makes of the outputs of clients: samples of what they wrote, shortened.

#[path = "../benches/streams/outputs.rs"]
mod outputs;

use outputs::{Reported, Stamps, Which, aiperf, compare, guidellm, quantile, vllm};
use proptest::prelude::*;

fn served(number: usize, request_id: Option<&str>, received_ms: u64, writes_ms: &[u64]) -> Stamps {
    Stamps {
        number,
        request_id: request_id.map(str::to_owned),
        received_ns: received_ms * 1_000_000,
        written_ns: writes_ms.iter().map(|ms| ms * 1_000_000).collect(),
        late_ns: vec![number as u64 * 1_000_000; writes_ms.len()],
    }
}

#[test]
fn vllm_is_read() {
    let text = r#"{"completed": 2, "ttfts": [0.2, 0.0, 0.3], "itls": [[0.05, 0.051, 7e-06], [], [0.05]],
        "generated_texts": ["s1 s1 s1 ", "", "s0 s0 "], "errors": ["", "Bad Gateway", ""]}"#;
    let reported = vllm(text).unwrap();
    assert_eq!(reported.len(), 2, "one failed");
    assert_eq!(reported[0].which, Which::Number(1));
    assert!((reported[0].ttft_ms - 200.0).abs() < 1e-9);
    assert_eq!(reported[0].itls_ms.len(), 3);
    assert_eq!(vllm(r#"{"ttfts": []}"#), None);
}

#[test]
fn aiperf_is_read() {
    let line = r#"{"metadata": {"x_request_id": "a-b", "request_start_ns": 1}, "metrics": {"time_to_first_token":
        {"value": 283.5, "unit": "ms"}, "inter_chunk_latency": {"value": [49.1, 50.9], "unit": "ms"}}}"#;
    let failed = r#"{"metadata": {"x_request_id": "c"}, "metrics": {}, "error": {"code": 500}}"#;
    let text = format!("{}\n{failed}\n", line.replace('\n', " "));
    let reported = aiperf(&text).unwrap();
    assert_eq!(
        reported,
        [Reported {
            which: Which::Request("a-b".to_owned()),
            ttft_ms: 283.5,
            itls_ms: vec![49.1, 50.9],
        }]
    );
    assert_eq!(aiperf("{\"cut"), None);
}

#[test]
fn guidellm_is_read() {
    let text = r#"{"benchmarks": [{"requests": {"errored": [], "successful": [{"output": "s7 s7 ", "info":
        {"timings": {"request_start": 100.5, "first_token_iteration": 100.75, "last_token_iteration": 101.0}}}]}}]}"#;
    let reported = guidellm(text).unwrap();
    assert_eq!(reported[0].which, Which::Number(7));
    assert!((reported[0].ttft_ms - 250.0).abs() < 1e-6);
    assert!(reported[0].itls_ms.is_empty());
    assert_eq!(guidellm("{}"), None);
}

#[test]
fn streams_are_compared_one_by_one() {
    let served = [
        served(0, Some("x"), 10, &[210, 260, 310]),
        served(1, None, 15, &[415, 465]),
        served(2, None, 900, &[950]),
    ];
    let reported = [
        // The gap that a client makes of the end of a stream is none of the server's.
        Reported {
            which: Which::Number(1),
            ttft_ms: 401.0,
            itls_ms: vec![48.0, 0.0],
        },
        Reported {
            which: Which::Request("x".to_owned()),
            ttft_ms: 199.5,
            itls_ms: vec![50.0, 50.5],
        },
        Reported {
            which: Which::Number(99),
            ttft_ms: 1.0,
            itls_ms: vec![],
        },
    ];
    let errors = compare(&reported, &served);
    assert_eq!(errors.ttft_ms, [0.5, 1.0]);
    assert_eq!(errors.itl_ms, [0.0, 0.5, 2.0]);
    assert_eq!(errors.skew_ms, 5.0, "stream 2 is not reported");
    assert_eq!(errors.late_ms, [0.0, 0.0, 0.0, 1.0, 1.0]);
}

#[test]
fn only_a_stream_of_the_server_says_which_it_is() {
    for (text, which) in [
        ("s17 s17 ", Some(Which::Number(17))),
        ("", None),
        ("s", None),
        ("17", None),
    ] {
        assert_eq!(Which::of_text(text), which, "{text:?}");
    }
}

proptest! {
    #[test]
    fn a_quantile_is_one_of_the_samples_and_splits_them(
        mut samples in prop::collection::vec(0.0..1e6_f64, 1..200),
        share in 0.0..=1.0_f64,
    ) {
        samples.sort_by(f64::total_cmp);
        let found = quantile(&samples, share).unwrap();
        prop_assert!(samples.contains(&found));
        let below = samples.iter().filter(|sample| **sample <= found).count() as f64;
        prop_assert!(below + 1e-9 >= share * samples.len() as f64);
    }
}
