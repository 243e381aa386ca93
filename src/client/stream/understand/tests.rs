//! What chunks mean, and the name of everything that can go wrong.

use hyper::body::Bytes;
use proptest::prelude::*;

use super::*;
use crate::client::stream::arrivals::{Connection, Head};
use crate::failure::Class;

/// A stream as it may have come: one piece a millisecond from 1 ms on, sent at 0.
fn came(pieces: &[&str], ending: Ending) -> Arrivals {
    Arrivals {
        connection: Connection::default(),
        sent_ns: 0,
        head: Some(Head {
            ns: 500_000,
            status: 200,
            content_type: Some("text/event-stream; charset=utf-8".into()),
        }),
        pieces: (1..)
            .zip(pieces)
            .map(|(at, piece)| (at * 1_000_000, Bytes::copy_from_slice(piece.as_bytes())))
            .collect(),
        ended_ns: 99_000_000,
        ending,
    }
}

fn frames(documents: &[&str]) -> Vec<String> {
    let frame = |document: &&str| format!("data: {document}\n\n");
    documents.iter().map(frame).collect()
}

/// Understands one frame a millisecond.
fn ends(documents: &[&str], ending: Ending) -> Streamed {
    let frames = frames(documents);
    let pieces: Vec<&str> = frames.iter().map(String::as_str).collect();
    understand("x", &came(&pieces, ending))
}

fn whole(documents: &[&str]) -> Streamed {
    ends(documents, Ending::End)
}

fn text(text: &str) -> String {
    format!(r#"{{"id":"cmpl-1","choices":[{{"text":"{text}","index":0}}]}}"#)
}

const LAST: &str = r#"{"choices":[{"text":"","index":0,"finish_reason":"length"}]}"#;
const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}}"#;
const DONE: &str = "[DONE]";

#[test]
fn a_completion_is_its_tokens_and_their_times() {
    let seen = whole(&[&text("a"), &text("b"), LAST, USAGE, DONE]);
    assert_eq!(seen.outcome, Outcome::Complete);
    assert_eq!(seen.id.as_deref(), Some("cmpl-1"));
    assert_eq!((seen.text(0), seen.chunks()), ("ab".into(), 2));
    assert_eq!(seen.head_ns, Some(500_000));
    assert_eq!(seen.ttft_ns(), Some(1_000_000));
    assert_eq!(seen.itls_ns().collect::<Vec<_>>(), [1_000_000]);
    assert_eq!(seen.end_to_end_ns(), Some(5_000_000));
    let usage = seen.usage.unwrap();
    assert_eq!(
        (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens
        ),
        (8, 2, Some(4))
    );
    assert_eq!(seen.counts.frames, 5);
    assert_eq!(seen.failure(), None);
}

#[test]
fn the_first_token_is_the_first_text_of_whatever_kind() {
    let chat = |delta: &str| {
        format!(r#"{{"choices":[{{"index":0,"delta":{delta},"finish_reason":null}}]}}"#)
    };
    let role = chat(r#"{"role":"assistant"}"#);
    let empty = chat(r#"{"role":"assistant","content":""}"#);
    let thought = chat(r#"{"reasoning_content":"hm"}"#);
    let vllm = chat(r#"{"reasoning":"so","content":null}"#);
    let says = chat(r#"{"content":"yes"}"#);
    let usage = r#"{"choices":[],"usage":{"prompt_tokens":8,"completion_tokens":3}}"#;
    let stop = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}"#;
    let seen = whole(&[&role, usage, &empty, &thought, &vllm, &says, stop, DONE]);
    assert_eq!(seen.outcome, Outcome::Complete);
    assert_eq!(seen.ttft_ns(), Some(4_000_000));
    let tokens: Vec<_> = seen
        .tokens
        .iter()
        .map(|t| (t.text.as_str(), t.thinks))
        .collect();
    assert_eq!(tokens, [("hm", true), ("so", true), ("yes", false)]);
    assert_eq!(seen.text(0), "yes");
    // Usage that came early is usage, and a later null takes nothing back.
    assert_eq!(seen.usage.unwrap().completion_tokens, 3);
}

#[test]
fn comments_before_the_first_token_are_no_token() {
    let mut pieces = vec![": keep-alive\n\n"; 30];
    let (first, last) = (text("a"), frames(&[LAST, USAGE, DONE]).concat());
    let first = format!("data: {first}\n\n");
    pieces.extend([first.as_str(), &last]);
    let seen = understand("x", &came(&pieces, Ending::End));
    assert_eq!(seen.ttft_ns(), Some(31_000_000));
    assert_eq!((seen.counts.comments, seen.chunks()), (30, 1));
    assert_eq!(seen.outcome, Outcome::Complete);
}

#[test]
fn choices_are_kept_apart() {
    let of =
        |index: u32, text: &str| format!(r#"{{"choices":[{{"index":{index},"text":"{text}"}}]}}"#);
    let ends = r#"{"choices":[{"index":1,"text":"","finish_reason":"stop"},{"index":0,"text":"!","finish_reason":"length"}]}"#;
    let seen = whole(&[
        &of(0, "a"),
        &of(1, "x"),
        &of(1, "y"),
        &of(0, "b"),
        ends,
        USAGE,
        DONE,
    ]);
    assert_eq!((seen.text(0), seen.text(1)), ("ab!".into(), "xy".into()));
    // Of the same choice: x to y, a to b, b to !.
    assert_eq!(
        seen.itls_ns().collect::<Vec<_>>(),
        [1_000_000, 3_000_000, 1_000_000]
    );
    assert_eq!(seen.finish.values().collect::<Vec<_>>(), ["length", "stop"]);
    assert_eq!(seen.outcome, Outcome::Complete);
    let half = whole(&[&of(0, "a"), &of(1, "x"), LAST, USAGE, DONE]);
    assert_eq!(half.failure().unwrap().class(), Class::Skew);
}

#[test]
fn done_may_have_spaces_behind_it() {
    for done in ["[DONE]  ", " [DONE]"] {
        assert_eq!(
            whole(&[&text("a"), LAST, USAGE, done]).outcome,
            Outcome::Complete
        );
    }
}

#[test]
fn what_a_case_needs_is_observed() {
    let chunk = |id: u64, text: &str, second: f64, end: &str| {
        format!(
            r#"{{"id":"cmpl-1","choices":[{{"text":"{text}","index":0,"logprobs":{{"tokens":["token_id:{id}"],"token_logprobs":[-0.5],"top_logprobs":[{{"token_id:{id}":-0.5,"token_id:9":{second}}}],"text_offset":[]}}{end}}}],"nvext":{{"worker_id":{{"prefill_worker_id":"7","prefill_dp_rank":0,"decode_worker_id":18446744073709551615,"decode_dp_rank":0}},"completion_token_ids":[{id}]}}}}"#
        )
    };
    let last = r#","finish_reason":"length""#;
    let seen = whole(&[
        &chunk(10, "a", -0.75, ""),
        &chunk(11, "b", -0.625, last),
        USAGE,
        DONE,
    ]);
    let observed = seen.observation().unwrap();
    assert_eq!(observed.tokens, ["10", "11"]);
    assert_eq!(
        (observed.served_by, observed.prefilled_by),
        (Some(u64::MAX), Some(7))
    );
    assert_eq!(observed.smallest_top2_gap, Some(0.125));
    assert_eq!(
        (observed.text.as_str(), observed.finish_reason.as_str()),
        ("ab", "length")
    );
    assert_eq!(
        (observed.prompt_tokens, observed.cached_tokens),
        (8, Some(4))
    );
    assert_eq!(observed.wall_ms, 4.0);

    // A float has already lost digits.
    let rounded =
        chunk(10, "a", -0.75, last).replace("18446744073709551615", "1.8446744073709552e19");
    let failure = whole(&[&rounded, USAGE, DONE]).failure().unwrap();
    assert!(
        matches!(failure.kind, RequestFailureKind::MissingField { .. }),
        "{failure}"
    );
    // One candidate says no gap; without ids, tokens are spelled.
    let alone = r#"{"choices":[{"text":"a","index":0,"logprobs":{"tokens":["token_id:4"],"top_logprobs":[{"x":-1.0}]},"finish_reason":"length"}]}"#;
    let seen = whole(&[alone, USAGE, DONE]);
    assert_eq!(
        (seen.smallest_top2_gap, seen.token_ids),
        (None, vec!["4".to_owned()])
    );
}

#[test]
fn an_error_after_200_is_one_in_every_form() {
    for frame in [
        "event: error\n: worker died\n\n",
        "event: error\ndata: worker died\n\n",
        "data: {\"error\":{\"message\":\"worker died\",\"code\":500}}\n\n",
        "data: {\"message\":\"worker died\",\"type\":\"Internal\",\"code\":500}\n\n",
    ] {
        let first = format!("data: {}\n\n", text("a"));
        let seen = understand(
            "x",
            &came(&[&first, frame, "data: [DONE]\n\n"], Ending::End),
        );
        let failure = seen.failure().unwrap();
        let RequestFailureKind::ErrorFrame { message } = &failure.kind else {
            panic!("{failure}")
        };
        assert!(message.contains("worker died"), "{message}");
        assert_eq!(failure.class(), Class::Product);
        // What came until then is kept.
        assert_eq!(
            (seen.text(0), seen.ttft_ns()),
            ("a".into(), Some(1_000_000))
        );
    }
}

#[test]
fn every_way_to_fail_has_its_name_and_class() {
    let deadline = || Ending::Deadline { seconds: 3.0 };
    let cut = || Ending::Cut("connection closed".into());
    let a = text("a");
    let table: [(Streamed, &str, Class); 16] = [
        (
            ends(&[], deadline()),
            "the stream began, but no token came within 3 s",
            Class::Product,
        ),
        (
            ends(&[&a], deadline()),
            "the stream was not over within 3 s: 1 chunks with text came",
            Class::Product,
        ),
        (
            ends(&[&a], cut()),
            "response cut off after ",
            Class::Product,
        ),
        (
            ends(&[], cut()),
            "response cut off after 0 bytes: connection closed",
            Class::Product,
        ),
        (
            ends(&[], Ending::End),
            "response cut off after 0 bytes: the body ends before the answer",
            Class::Product,
        ),
        (
            ends(&[&a], Ending::End),
            "response cut off after ",
            Class::Product,
        ),
        (
            understand("x", &came(&["data: {\"cho"], Ending::End)),
            "response cut off after 11 bytes: the body ends within a frame",
            Class::Product,
        ),
        (
            whole(&[&a, LAST, USAGE]),
            "the stream ended without `[DONE]` after 1 chunks with text",
            Class::Product,
        ),
        (
            whole(&[LAST, USAGE]),
            "HTTP 200 with an empty completion: data: ",
            Class::Product,
        ),
        (
            whole(&[DONE]),
            "HTTP 200 with an empty completion: data: [DONE]",
            Class::Product,
        ),
        (
            whole(&[
                &a,
                LAST,
                &USAGE.replace("\"completion_tokens\":2", "\"completion_tokens\":0"),
                DONE,
            ]),
            "HTTP 200 with an empty completion",
            Class::Product,
        ),
        (
            whole(&[&a, "{\"choices\":[{\"te", LAST, DONE]),
            "frame 2 is not JSON: {\"choices\"",
            Class::Product,
        ),
        (
            whole(&["{\"choices\":[{\"text\":7}]}", DONE]),
            "frame 1 is no completion chunk (invalid type",
            Class::Skew,
        ),
        (
            whole(&[&a, USAGE, DONE]),
            "response has no usable /choices/0/finish_reason",
            Class::Skew,
        ),
        (
            whole(&[&a, LAST, DONE]),
            "response has no usable /usage/completion_tokens",
            Class::Skew,
        ),
        (
            ends(&[&a], Ending::TooLarge { limit: 9 }),
            "response of more than 9 bytes",
            Class::Product,
        ),
    ];
    for (seen, words, class) in table {
        let failure = seen.failure().unwrap();
        assert!(
            failure.kind.to_string().starts_with(words),
            "{words}: {failure}"
        );
        assert_eq!(failure.class(), class, "{failure}");
        assert_eq!(seen.observation().unwrap_err(), failure);
        assert_eq!(seen.end_to_end_ns(), None);
    }
}

#[test]
fn heads_fail_before_bodies_do() {
    let with = |change: fn(&mut Arrivals)| {
        let mut arrivals = came(&["sorry, \"logprobs\": unknown field\n"], Ending::End);
        change(&mut arrivals);
        understand("x", &arrivals).failure().unwrap()
    };
    let refused = with(|a| head_of(a, 503, None));
    assert_eq!(
        refused.kind.to_string(),
        "HTTP 503: sorry, \"logprobs\": unknown field "
    );
    assert_eq!(with(|a| head_of(a, 400, None)).class(), Class::Skew);
    let page = with(|a| head_of(a, 200, Some("application/json")));
    assert!(
        page.kind
            .to_string()
            .starts_with("response is no event stream but application/json: sorry")
    );
    let nothing = with(|a| head_of(a, 200, None));
    assert!(
        nothing.kind.to_string().contains("but nothing"),
        "{nothing}"
    );
    let late = with(|a| (a.head, a.ending) = (None, Ending::Deadline { seconds: 2.0 }));
    assert_eq!(late.kind, RequestFailureKind::NoHead { seconds: 2.0 });
    let gone = with(|a| (a.head, a.ending) = (None, Ending::Cut("reset".into())));
    assert!(
        matches!(gone.kind, RequestFailureKind::Truncated { .. }),
        "{gone}"
    );
    let nobody = with(|a| (a.head, a.ending) = (None, Ending::NoConnection("refused".into())));
    assert_eq!(nobody.class(), Class::Inconclusive);
}

fn head_of(arrivals: &mut Arrivals, status: u16, kind: Option<&str>) {
    if let Some(head) = &mut arrivals.head {
        (head.status, head.content_type) = (status, kind.map(str::to_owned));
    }
}

#[test]
fn an_answer_that_came_is_complete_however_its_connection_ends() {
    let documents = [&text("a"), LAST, USAGE, DONE];
    for ending in [
        Ending::Cut("reset".into()),
        Ending::Deadline { seconds: 1.0 },
    ] {
        let seen = ends(&documents, ending);
        assert_eq!(seen.outcome, Outcome::Complete);
        assert_eq!(seen.end_to_end_ns(), Some(4_000_000));
    }
}

#[test]
fn a_client_that_went_is_no_failure_and_no_observation() {
    let seen = ends(&[&text("a")], Ending::HungUp);
    assert_eq!(seen.outcome, Outcome::Disconnected);
    assert_eq!((seen.failure(), seen.end_to_end_ns()), (None, None));
    assert!(seen.observation().is_err());
    assert_eq!(seen.ttft_ns(), Some(1_000_000));
}

#[test]
fn a_frame_that_is_not_utf8_is_the_servers_fault() {
    let mut arrivals = came(&[], Ending::End);
    let bytes = Bytes::from_static(b"data: {\"choices\":[{\"text\":\"\xFF\"}]}\n\n");
    arrivals.pieces.push((1, bytes));
    let failure = understand("x", &arrivals).failure().unwrap();
    assert!(
        failure.kind.to_string().starts_with("frame 1 is not UTF-8"),
        "{failure}"
    );
}

proptest! {
    #[test]
    fn no_cut_changes_what_is_understood(
        texts in proptest::collection::vec("[a-z é\u{1F980}]{0,6}", 1..8),
        cuts in proptest::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let chunks: Vec<String> = texts.iter().map(|word| text(word)).collect();
        let mut documents: Vec<&str> = chunks.iter().map(String::as_str).collect();
        documents.extend([LAST, USAGE, DONE]);
        let body = frames(&documents).concat();
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(body.len() + 1)).collect();
        at.extend([0, body.len()]);
        at.sort_unstable();
        let mut arrivals = came(&[], Ending::End);
        for (ns, pair) in (1..).zip(at.windows(2)) {
            let piece = Bytes::copy_from_slice(&body.as_bytes()[pair[0]..pair[1]]);
            arrivals.pieces.push((ns, piece));
        }
        let seen = understand("x", &arrivals);
        prop_assert_eq!(seen.text(0), texts.concat());
        prop_assert_eq!(seen.counts.frames, documents.len());
        prop_assert!(seen.tokens.is_sorted_by_key(|token| token.ns));
        prop_assert!(seen.done_ns >= seen.tokens.last().map(|token| token.ns));
        let empty = texts.concat().is_empty();
        prop_assert_eq!(seen.outcome == Outcome::Complete, !empty);
    }

    #[test]
    fn nothing_that_comes_panics(pieces in proptest::collection::vec("(data: |event: error|\\{\"choices\":\\[|\\{\"text\":\"a\"|\\}|\\]|\n|\r|: |\\[DONE\\]|.){0,12}", 0..8)) {
        let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
        let _ = understand("x", &came(&pieces, Ending::End));
    }
}
