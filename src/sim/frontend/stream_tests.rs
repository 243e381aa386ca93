//! The streaming client against the simulated front door, whose own stamps are the truth.

use std::collections::HashMap;
use std::time::Duration;

use serde_json::Value;

use super::testing::{Engine, Front, Script};
use crate::client::stream::load::{self, Shape};
use crate::client::stream::{Ask, Chat, Outcome, Streamed, Streams};
use crate::client::{Client, Completion, Input, Pin, RequestFailureKind};

/// An id that a float or a signed integer would change.
const A: u64 = u64::MAX - 2;

/// No test waits for it unless it fails.
const PATIENCE: Duration = Duration::from_secs(60);

async fn door(faults: &str) -> (Front, Engine) {
    let front = Front::start(faults).await;
    let script = Script {
        cached_tokens: 4,
        ..Script::default()
    };
    let engine = Engine::start(front.folder.path(), A, script, |_| {}, Vec::new()).await;
    let line = format!(
        "dynamo_component_router_worker_registered{{dp_rank=\"0\",dynamo_component=\"backend\",dynamo_namespace=\"dynamo\",router_worker_id=\"{A}\""
    );
    front.until(&line).await;
    (front, engine)
}

fn completion(worker: Option<u64>) -> Completion {
    Completion {
        model: "tiny".into(),
        prompt: Input::Ids(vec![1, 2, 3]),
        max_tokens: 4,
        ignore_eos: true,
        pin: worker.map(Pin::Worker),
        cache_salt: Some("s".into()),
    }
}

async fn streamed(faults: &str, deadline: Duration) -> Streamed {
    let (front, _engine) = door(faults).await;
    let streams = Streams::new(&front.url, deadline).unwrap();
    streams.ask(&Ask::completion(&completion(None), "x")).await
}

#[tokio::test]
async fn a_stream_says_what_a_whole_answer_says() {
    let (front, engine) = door("").await;
    let completion = completion(Some(A));
    let client = Client::new(&front.url, PATIENCE).unwrap();
    let mut whole = client.complete(&completion, "x").await.unwrap();
    let streams = Streams::new(&front.url, PATIENCE).unwrap();
    let seen = streams.ask(&Ask::completion(&completion, "x")).await;
    assert_eq!(seen.outcome, Outcome::Complete);
    assert_eq!(
        (seen.chunks(), seen.usage.unwrap().completion_tokens),
        (4, 4)
    );
    let observed = seen.observation().unwrap();
    (whole.wall_ms, whole.raw) = (observed.wall_ms, observed.raw.clone());
    assert_eq!(observed, whole);
    // The engine was asked the same twice.
    let asked = engine.asked();
    let of = |at: usize| {
        (
            &asked[at].tokens,
            &asked[at].cache_salt,
            asked[at].max_tokens,
        )
    };
    assert_eq!(of(0), of(1));

    let chat = Chat {
        model: "tiny".into(),
        message: "a b".into(),
        max_tokens: 3,
        ignore_eos: true,
        pin: Some(Pin::Worker(A)),
        cache_salt: None,
    };
    let seen = streams.ask(&Ask::chat(&chat, "chat")).await;
    assert_eq!(seen.outcome, Outcome::Complete, "{seen:?}");
    assert_eq!((seen.chunks(), seen.served_by), (3, Some(A)));
    assert!(seen.id.unwrap().starts_with("chatcmpl-"));
    assert!(seen.connection.reused);
}

#[tokio::test]
async fn every_lie_of_a_stream_is_named() {
    let told = |seen: &Streamed| seen.failure().map(|failure| failure.kind);
    for (fault, name) in [
        ("stream_without_done", "the stream ended without `[DONE]`"),
        ("stream_cut", "response cut off"),
        ("stream_error_frame", "error frame after HTTP 200"),
        ("error_after_200", "error frame after HTTP 200"),
        ("empty_completion", "HTTP 200 with an empty completion"),
        (
            "finish_reason_absent",
            "response has no usable /choices/0/finish_reason",
        ),
        ("http_500", "HTTP 500"),
        ("http_503", "HTTP 503"),
        ("not_json", "response is no event stream but text/html"),
    ] {
        let seen = streamed(fault, PATIENCE).await;
        let kind = told(&seen).unwrap_or_else(|| panic!("{fault}: {seen:?}"));
        assert!(kind.to_string().starts_with(name), "{fault}: {kind}");
    }
    let seen = streamed("stream_stalls", Duration::from_millis(200)).await;
    assert!(
        matches!(
            told(&seen),
            Some(RequestFailureKind::Stalled { chunks: 2, .. })
        ),
        "{seen:?}"
    );
    let seen = streamed("never_answers", Duration::from_millis(100)).await;
    assert!(
        matches!(told(&seen), Some(RequestFailureKind::NoHead { .. })),
        "{seen:?}"
    );
    // Lies that only a case can see: the stream itself is in order.
    let seen = streamed("stops_early", PATIENCE).await;
    assert_eq!((told(&seen), seen.chunks()), (None, 2));
    let seen = streamed("token_dropped", PATIENCE).await;
    assert_eq!(
        (
            told(&seen),
            seen.chunks(),
            seen.usage.unwrap().completion_tokens
        ),
        (None, 3, 4)
    );
}

#[tokio::test]
async fn a_disconnect_is_seen_on_the_other_side() {
    let pace = Duration::from_millis(5);
    let front = Front::built_in(pace, None).await;
    let mut endless = completion(None);
    (endless.model, endless.max_tokens) = ("sim".into(), 10_000);
    let ask = Ask::plain_completion(&endless, "x").disconnect_after(3);
    let seen = Streams::new(&front.url, PATIENCE).unwrap().ask(&ask).await;
    assert_eq!(seen.outcome, Outcome::Disconnected);
    assert!((3..100).contains(&seen.chunks()), "{}", seen.chunks());
    front.until("dynamo_frontend_disconnected_clients 1").await;
}

#[tokio::test]
async fn nothing_arrives_before_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("writes.jsonl");
    let front = Front::built_in(Duration::from_millis(2), Some(log.clone())).await;
    let mut asked = completion(None);
    (asked.model, asked.max_tokens, asked.cache_salt) = ("sim".into(), 20, None);
    let asks = vec![Ask::plain_completion(&asked, "x"); 16];
    let sent = load::run(&front.url, PATIENCE, asks, Shape::Burst)
        .await
        .unwrap();
    let text = std::fs::read_to_string(&log).unwrap();
    let truth: HashMap<String, Value> = text
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).unwrap())
        .map(|line| (line["request_id"].as_str().unwrap().to_owned(), line))
        .collect();
    assert_eq!(truth.len(), 16);
    for one in &sent {
        let seen = &one.streamed;
        assert_eq!(seen.outcome, Outcome::Complete, "{seen:?}");
        let truth = &truth[seen.id.as_ref().unwrap()];
        let stamp = |name: &str| truth[name].as_u64().unwrap();
        assert!(seen.sent_ns <= stamp("received_ns"));
        let written: Vec<u64> = serde_json::from_value(truth["token_ns"].clone()).unwrap();
        assert_eq!(seen.tokens.len(), written.len());
        for (token, written) in seen.tokens.iter().zip(written) {
            assert!(token.ns >= written, "{} before {written}", token.ns);
        }
    }
}
