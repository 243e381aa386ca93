//! Over HTTP, against engines that answer as they are told.

use std::time::Duration;

use serde_json::{Value, json};

use super::sse::reader::{Frame, frames};
use super::testing::{Engine, Front, Script, agent, ask, ask_stream, holds};
use super::*;
use crate::client::{Client, Completion, Input, Pin};
use crate::sim::model::block_hashes;
use crate::sim::wire::{Cache, Owner};

/// Ids that a float or a signed integer would change.
const A: u64 = u64::MAX - 2;
const B: u64 = (1 << 63) + 12_345;

const PIN: &str = "x-dynamo-worker-instance-id";
const PREFILL_PIN: &str = "x-dynamo-prefill-instance-id";

fn prompt_hashes() -> Vec<u64> {
    block_hashes(&[1, 2, 3, 4, 5, 6, 7, 8, 9], 4, None)
}

async fn engine(front: &Front, id: u64) -> Engine {
    Engine::start(
        front.folder.path(),
        id,
        Script::default(),
        |_| {},
        Vec::new(),
    )
    .await
}

/// A front door with engines A and B.
async fn pair(faults: &str) -> (Front, Engine, Engine) {
    let front = Front::start(faults).await;
    let (a, b) = (engine(&front, A).await, engine(&front, B).await);
    registered(&front, &[A, B]).await;
    (front, a, b)
}

async fn registered(front: &Front, ids: &[u64]) {
    for id in ids {
        let line = format!(
            "dynamo_component_router_worker_registered{{dp_rank=\"0\",dynamo_component=\"backend\",dynamo_namespace=\"dynamo\",router_worker_id=\"{id}\""
        );
        front.until(&line).await;
    }
}

fn documents(text: &str) -> (Vec<Value>, Vec<Frame>) {
    let (frames, rest) = frames(text);
    assert_eq!(rest, "");
    let documents = frames
        .iter()
        .filter_map(|frame| serde_json::from_str(frame.data.first()?).ok())
        .collect();
    (documents, frames)
}

#[tokio::test]
async fn our_client_observes_what_the_engine_said() {
    let (front, _a, _b) = pair("").await;
    let client = Client::new(&front.url, Duration::from_secs(20)).unwrap();
    let completion = Completion {
        model: "tiny".into(),
        prompt: Input::Ids(vec![1, 2, 3]),
        max_tokens: 3,
        ignore_eos: true,
        pin: Some(Pin::Worker(B)),
        cache_salt: Some("s".into()),
    };
    let seen = client.complete(&completion, "cold").await.unwrap();
    assert_eq!(seen.tokens, ["10", "11", "12"]);
    assert_eq!(seen.text, crate::sim::model::text(&[10, 11, 12]));
    assert_eq!((seen.served_by, seen.prefilled_by), (Some(B), Some(B)));
    assert_eq!((seen.prompt_tokens, seen.completion_tokens), (3, 3));
    assert_eq!(seen.cached_tokens, Some(0));
    assert_eq!(seen.smallest_top2_gap, Some(0.25));
    assert_eq!(seen.finish_reason, "length");
}

#[tokio::test]
async fn pages_say_who_is_there() {
    let (front, a, _b) = pair("").await;
    let health = front.json("/health").await;
    assert_eq!(health["status"], "healthy");
    let generate = |health: &Value| -> Vec<u64> {
        let instances = health["instances"].as_array().unwrap().clone();
        let of = instances.iter().filter(|i| i["endpoint"] == "generate");
        of.map(|i| i["instance_id"].as_u64().unwrap()).collect()
    };
    assert_eq!(generate(&health), [B, A]);
    assert_eq!(front.json("/live").await["status"], "live");
    assert_eq!(front.json("/v1/models").await["data"][0]["id"], "tiny");
    let sources = "dynamo_component_router_kv_zmq_ingress_sources{dynamo_component=\"backend\",dynamo_namespace=\"dynamo\",state=\"active\",worker_id=\"5eed0f020714e7d\"} 2";
    front.until(sources).await;
    let (status, _) = front.complete(None, &ask()).await;
    assert_eq!(status, 200);
    front
        .until("dynamo_frontend_requests_total{endpoint=\"completions\",error_type=\"\",model=\"tiny\",request_type=\"unary\",status=\"success\"} 1")
        .await;
    drop(a);
    let pinned = ask();
    let delisted = async { while front.complete(Some(A), &pinned).await.0 != 400 {} };
    let waited = tokio::time::timeout(Duration::from_secs(20), delisted);
    waited.await.expect("it is no longer listed");
    assert!(
        !front
            .get("/metrics")
            .await
            .contains(&format!("router_worker_id=\"{A}\""))
    );
    assert_eq!(generate(&front.json("/health").await), [B]);
}

#[tokio::test]
async fn what_cannot_be_served_is_refused_in_the_real_words() {
    let (front, mut a, b) = pair("").await;
    let (status, document) = front.complete(Some(7), &ask()).await;
    assert_eq!(status, 400);
    let refused = json!({"message": "Invalid request", "type": "Bad Request", "code": 400});
    assert_eq!(document, refused);
    let mut body = ask();
    body["model"] = json!("other");
    let (status, document) = front.complete(None, &body).await;
    assert_eq!(
        (status, &document["message"]),
        (404, &json!("Model not found"))
    );
    body = ask();
    body["prompt"] = json!(vec![1; 64]);
    let (status, document) = front.complete(None, &body).await;
    assert_eq!(status, 400);
    let details = json!({"type": "context_length", "limit": 64, "actual": 64});
    assert_eq!(document["details"], details);
    // Registered still, and nobody there.
    a.dies().await;
    let (status, document) = front.complete(Some(A), &ask()).await;
    let message = json!("Service temporarily unavailable");
    assert_eq!((status, &document["message"]), (503, &message));
    for _ in 0..3 {
        let (status, _) = front.complete(None, &ask()).await;
        assert_eq!(status, 200);
    }
    assert_eq!(b.asked().len(), 3);
}

#[tokio::test]
async fn an_engine_that_breaks_off_is_an_error_before_and_after_200() {
    let front = Front::start("").await;
    let script = Script {
        breaks_after: Some(2),
        ..Script::default()
    };
    let _a = Engine::start(front.folder.path(), A, script, |_| {}, Vec::new()).await;
    registered(&front, &[A]).await;
    let (status, document) = front.complete(None, &ask()).await;
    assert_eq!(status, 500);
    assert_eq!(document["message"], "Failed to generate completions");
    let (text, _) = front.stream("/v1/completions", &ask_stream()).await;
    let (documents, frames) = documents(&text);
    assert_eq!(documents.len(), 2);
    let last = frames.last().unwrap();
    assert_eq!(last.event.as_deref(), Some("error"));
    assert!(!text.contains("[DONE]"));
}

#[tokio::test]
async fn a_stream_is_a_chunk_a_token() {
    let (front, _a, _b) = pair("").await;
    let (text, whole) = front.stream("/v1/completions", &ask_stream()).await;
    assert!(whole && text.ends_with("data: [DONE]\n\n"));
    let (chunks, _) = documents(&text);
    assert_eq!(chunks.len(), 5);
    for (chunk, id) in chunks.iter().zip(10..14) {
        assert_eq!(chunk["nvext"]["completion_token_ids"], json!([id]));
        assert_eq!(chunk["usage"], Value::Null);
    }
    let reasons: Vec<&Value> = chunks
        .iter()
        .map(|c| &c["choices"][0]["finish_reason"])
        .collect();
    assert_eq!(reasons[3], "length");
    assert!(reasons[..3].iter().all(|reason| reason.is_null()));
    assert_eq!(chunks[4]["choices"], json!([]));
    assert_eq!(chunks[4]["usage"]["completion_tokens"], 4);
}

#[tokio::test]
async fn a_chat_says_its_role_first_and_its_reason_last() {
    let (front, _a, _b) = pair("").await;
    let mut body = ask_stream();
    let object = body.as_object_mut().unwrap();
    object.remove("prompt");
    object["logprobs"] = json!(true);
    object.insert(
        "messages".into(),
        json!([{"role": "user", "content": "hello"}]),
    );
    let (text, _) = front.stream("/v1/chat/completions", &body).await;
    let (chunks, _) = documents(&text);
    assert_eq!(chunks.len(), 4 + 1);
    for (chunk, id) in chunks[..4].iter().zip(10..) {
        let mut delta = json!({"content": crate::sim::model::text(&[id])});
        if id == 10 {
            delta["role"] = json!("assistant");
        }
        assert_eq!(chunk["choices"][0]["delta"], delta);
    }
    assert_eq!(
        chunks[0]["choices"][0]["logprobs"]["content"][0]["token_id"],
        10
    );
    assert_eq!(chunks[3]["choices"][0]["finish_reason"], "length");
    assert_eq!(
        chunks[4]["usage"]["prompt_tokens_details"],
        json!({"cached_tokens": 0})
    );
    body["stream"] = json!(false);
    let response = front
        .post("/v1/chat/completions", None, &body)
        .await
        .unwrap();
    let document: Value = response.json().await.unwrap();
    assert_eq!(document["object"], "chat.completion");
    let message = &document["choices"][0]["message"];
    assert_eq!(
        message["content"],
        crate::sim::model::text(&[10, 11, 12, 13])
    );
}

/// A holds two blocks of the prompt on its device and in KVCR's tier; B nothing.
async fn warm_pair(faults: &str) -> (Front, Engine, Engine) {
    let front = Front::start(faults).await;
    let hashes = prompt_hashes();
    let events = vec![holds(Cache::Device, &hashes), holds(Cache::Kvcr, &hashes)];
    let a = Engine::start(front.folder.path(), A, Script::default(), |_| {}, events).await;
    let b = engine(&front, B).await;
    registered(&front, &[A, B]).await;
    front
        .until("dynamo_component_kv_cache_events_applied{dynamo_component=\"backend\",dynamo_namespace=\"dynamo\",event_type=\"stored\",status=\"ok\",worker_id=\"5eed0f020714e7d\"} 2")
        .await;
    (front, a, b)
}

#[tokio::test]
async fn requests_go_where_their_blocks_are_and_hints_where_they_are_not() {
    let (front, a, b) = warm_pair("").await;
    for _ in 0..2 {
        front.complete(None, &ask()).await;
    }
    assert_eq!((a.asked().len(), b.asked().len()), (2, 0));
    assert!(a.asked().iter().all(|request| request.hint.is_none()));
    front.complete(Some(B), &ask()).await;
    let hint = b.asked()[0].hint.clone().unwrap();
    assert_eq!(
        Some(&hint.source_control_endpoint),
        a.registration.control.as_ref()
    );
    assert_eq!(hint.block_hashes, prompt_hashes());
    let mut salted = ask();
    salted["cache_salt"] = json!("fresh");
    front.complete(Some(B), &salted).await;
    assert_eq!(b.asked()[1].hint, None);
    assert_eq!(b.asked()[1].cache_salt.as_deref(), Some("fresh"));
}

#[tokio::test]
async fn blocks_of_a_dead_owner_are_asked_of_the_state_agent() {
    let front = Front::start("").await;
    let owner = Owner {
        owner: "kvcr-0".into(),
        control: "10.9.9.9:1".into(),
        blocks: prompt_hashes(),
    };
    let _agent = agent(front.folder.path(), vec![owner]).await;
    let b = engine(&front, B).await;
    registered(&front, &[B]).await;
    front.complete(None, &ask()).await;
    let hint = b.asked()[0].hint.clone().unwrap();
    assert_eq!(hint.source_control_endpoint, "10.9.9.9:1");
    let mut salted = ask();
    salted["cache_salt"] = json!("s");
    front.complete(None, &salted).await;
    assert_eq!(b.asked()[1].hint, None);
}

/// As measured on the real router, see docs/findings/router-hints.md.
#[tokio::test]
async fn blocks_that_only_kvcr_holds_are_not_hinted() {
    let front = Front::start("").await;
    let events = vec![holds(Cache::Kvcr, &prompt_hashes())];
    let _a = Engine::start(front.folder.path(), A, Script::default(), |_| {}, events).await;
    let b = engine(&front, B).await;
    registered(&front, &[A, B]).await;
    front
        .until("dynamo_component_kv_cache_events_applied{dynamo_component=\"backend\",dynamo_namespace=\"dynamo\",event_type=\"stored\",status=\"ok\",worker_id=\"5eed0f020714e7d\"} 2")
        .await;
    front.complete(Some(B), &ask()).await;
    assert_eq!(b.asked()[0].hint, None);
}

/// As measured on the real router, whoever holds the blocks.
#[tokio::test]
async fn a_salted_request_gets_a_hint_only_without_a_state_agent() {
    let mut salted = ask();
    salted["cache_salt"] = json!("s");
    let tokens: Vec<u32> = serde_json::from_value(salted["prompt"].clone()).unwrap();
    let hashes = crate::sim::model::block_hashes(&tokens, 4, Some("s"));
    for with_agent in [false, true] {
        let front = Front::start("").await;
        let events = vec![holds(Cache::Device, &hashes), holds(Cache::Kvcr, &hashes)];
        let folder = front.folder.path();
        let _agent = match with_agent {
            true => Some(agent(folder, Vec::new()).await),
            false => None,
        };
        let _a = Engine::start(folder, A, Script::default(), |_| {}, events).await;
        let b = engine(&front, B).await;
        registered(&front, &[A, B]).await;
        front
            .until("dynamo_component_kv_cache_events_applied{dynamo_component=\"backend\",dynamo_namespace=\"dynamo\",event_type=\"stored\",status=\"ok\",worker_id=\"5eed0f020714e7d\"} 2")
            .await;
        front.complete(Some(B), &salted).await;
        assert_eq!(b.asked()[0].hint.is_some(), !with_agent);
    }
}

#[tokio::test]
async fn a_prefill_engine_hands_over_to_a_decode_engine() {
    let front = Front::start("").await;
    let script = Script {
        cached_tokens: 4,
        prefills: true,
        ..Script::default()
    };
    let role = |role: Role| move |registration: &mut Registration| registration.role = role;
    let folder = front.folder.path();
    let prefill = Engine::start(folder, A, script, role(Role::Prefill), Vec::new()).await;
    let script = Script::default();
    let decode = Engine::start(folder, B, script, role(Role::Decode), Vec::new()).await;
    front
        .until("dynamo_component_router_worker_registered")
        .await;
    registered(&front, &[A, B]).await;
    let pin = Some((PREFILL_PIN, A));
    let response = front.post("/v1/completions", pin, &ask()).await.unwrap();
    let document: Value = response.json().await.unwrap();
    let workers = &document["nvext"]["worker_id"];
    assert_eq!(workers["prefill_worker_id"], json!(A));
    assert_eq!(workers["decode_worker_id"], json!(B));
    assert_eq!(
        document["usage"]["prompt_tokens_details"]["cached_tokens"],
        4
    );
    assert_eq!(prefill.asked().len(), 1);
    let handover = decode.asked()[0].handover.clone().unwrap();
    assert_eq!(handover.request_id, prefill.asked()[0].request_id);
    let (status, document) = front.complete(Some(B), &ask()).await;
    assert_eq!(status, 500);
    let message = document["message"].as_str().unwrap();
    assert!(message.contains("not eligible"), "{message}");
}

#[tokio::test]
async fn every_answer_can_lie() {
    let honest =
        |document: &Value| document["nvext"]["completion_token_ids"] == json!([10, 11, 12, 13]);
    type Check = fn(u16, &Value) -> bool;
    let table: [(&str, Check); 12] = [
        ("", |s, d| s == 200 && d["usage"]["prompt_tokens"] == 9),
        ("error_after_200", |s, d| s == 200 && d["code"] == 500),
        ("empty_completion", |s, d| {
            s == 200 && d["choices"][0]["text"] == "" && d["usage"]["completion_tokens"] == 0
        }),
        ("http_500", |s, _| s == 500),
        ("http_503", |s, _| s == 503),
        ("worker_id_absent", |_, d| {
            d["nvext"].get("worker_id").is_none()
        }),
        ("worker_id_rounded", |_, d| {
            d["nvext"]["worker_id"]["decode_worker_id"] == json!(B as f64 as u64)
        }),
        ("usage_off", |_, d| d["usage"]["prompt_tokens"] == 8),
        ("cached_tokens_absent", |_, d| {
            d["usage"]["prompt_tokens_details"].is_null()
        }),
        ("finish_reason_absent", |_, d| {
            d["choices"][0]["finish_reason"].is_null()
        }),
        ("token_dropped", |_, d| {
            d["nvext"]["completion_token_ids"] == json!([10, 12, 13])
        }),
        ("stops_early", |_, d| {
            d["nvext"]["completion_token_ids"] == json!([10, 11])
                && d["choices"][0]["finish_reason"] == "stop"
        }),
    ];
    for (fault, lies) in table {
        let times = if fault.is_empty() {
            String::new()
        } else {
            format!("{fault}#1")
        };
        let (front, _a, _b) = pair(&times).await;
        let (status, document) = front.complete(Some(B), &ask()).await;
        assert!(lies(status, &document), "{fault}: {status} {document}");
        let (status, document) = front.complete(Some(B), &ask()).await;
        assert!(status == 200 && honest(&document), "{fault} was told once");
    }
}

#[tokio::test]
async fn the_wrong_worker_serves_and_says_so_or_not() {
    for (fault, says) in [("wrong_worker", A), ("wrong_worker_hidden", B)] {
        let (front, a, b) = pair(fault).await;
        let (_, document) = front.complete(Some(B), &ask()).await;
        let workers = &document["nvext"]["worker_id"];
        assert_eq!(workers["decode_worker_id"], json!(says));
        assert_eq!(workers["prefill_worker_id"], json!(says));
        assert_eq!((a.asked().len(), b.asked().len()), (1, 0));
    }
}

#[tokio::test]
async fn bodies_break_off_or_are_no_json_or_never_come() {
    let (front, _a, _b) = pair("body_cut#1,not_json@nobody").await;
    let response = front.post("/v1/completions", None, &ask()).await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(response.bytes().await.is_err());

    let (front, _a, _b) = pair("not_json").await;
    let response = front.post("/v1/completions", None, &ask()).await.unwrap();
    assert!(response.text().await.unwrap().starts_with("<html>"));

    let (front, a, _b) = pair("never_answers").await;
    let body = ask();
    let asked = front.post("/v1/completions", Some((PIN, A)), &body);
    let waited = tokio::time::timeout(Duration::from_millis(100), asked).await;
    assert!(waited.is_err() && a.asked().is_empty());
}

#[tokio::test]
async fn streams_lie_in_their_middle() {
    let (front, _a, _b) = pair("stream_without_done").await;
    let (text, whole) = front.stream("/v1/completions", &ask_stream()).await;
    assert!(whole && !text.contains("[DONE]") && text.contains("\"usage\":{"));

    let (front, _a, _b) = pair("stream_cut").await;
    let (text, whole) = front.stream("/v1/completions", &ask_stream()).await;
    assert!(!whole && !frames(&text).1.is_empty(), "{text}");

    let (front, _a, _b) = pair("stream_error_frame").await;
    let (text, _) = front.stream("/v1/completions", &ask_stream()).await;
    let (chunks, frames) = documents(&text);
    assert_eq!(chunks.len(), 2);
    assert_eq!(frames[2].event.as_deref(), Some("error"));

    let (front, _a, _b) = pair("error_after_200").await;
    let (text, _) = front.stream("/v1/completions", &ask_stream()).await;
    assert!(text.starts_with("event: error\n"), "{text}");

    let (front, _a, _b) = pair("stream_stalls").await;
    let mut response = front
        .post("/v1/completions", None, &ask_stream())
        .await
        .unwrap();
    let mut text = String::new();
    let waited = tokio::time::timeout(Duration::from_millis(200), async {
        while let Some(chunk) = response.chunk().await.unwrap() {
            text += std::str::from_utf8(&chunk).unwrap();
        }
    });
    assert!(waited.await.is_err(), "the stream ended");
    assert_eq!(documents(&text).0.len(), 2);

    for (fault, ids) in [
        ("token_dropped", vec![10, 12, 13]),
        ("stops_early", vec![10, 11]),
        ("empty_completion", vec![]),
    ] {
        let (front, _a, _b) = pair(fault).await;
        let (text, _) = front.stream("/v1/completions", &ask_stream()).await;
        let found: Vec<u64> = documents(&text)
            .0
            .iter()
            .filter_map(|chunk| chunk["nvext"]["completion_token_ids"][0].as_u64())
            .collect();
        assert_eq!(found, ids, "{fault}");
        assert!(text.ends_with("data: [DONE]\n\n"));
    }
}

#[tokio::test]
async fn hints_are_left_out_or_name_the_dead() {
    let (front, _a, b) = warm_pair("hint_missing").await;
    front.complete(Some(B), &ask()).await;
    assert_eq!(b.asked()[0].hint, None);
    let (front, _a, b) = warm_pair("hint_dead_peer").await;
    front.complete(Some(B), &ask()).await;
    let hint = b.asked()[0].hint.clone().unwrap();
    assert_eq!(hint.source_control_endpoint, "127.0.0.1:1");
}

#[tokio::test]
async fn what_is_listed_can_vanish() {
    let (front, _a, _b) = pair("registration_lost#1").await;
    assert_eq!(front.complete(Some(B), &ask()).await.0, 200);
    assert_eq!(front.complete(Some(B), &ask()).await.0, 400);
    assert_eq!(front.complete(Some(A), &ask()).await.0, 200);
    assert!(!front.get("/health").await.contains(&B.to_string()));

    let (front, _a, _b) = pair("model_missing").await;
    assert_eq!(front.json("/v1/models").await["data"], json!([]));
    assert_eq!(front.complete(None, &ask()).await.0, 404);
    assert_eq!(front.json("/health").await["status"], "healthy");
}

#[tokio::test]
async fn the_front_door_can_die() {
    let (mut front, _a, _b) = pair("frontend_dies").await;
    let ended = std::mem::replace(&mut front.ended, tokio::spawn(async { ExitCode::SUCCESS }));
    let body = ask();
    let asked = front.post("/v1/completions", None, &body);
    tokio::select! {
        code = ended => assert_eq!(format!("{:?}", code.unwrap()), format!("{:?}", ExitCode::FAILURE)),
        answer = asked => panic!("{answer:?}"),
    }
}

#[tokio::test]
async fn the_write_log_knows_when_each_token_left() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("writes.jsonl");
    let pace = Duration::from_millis(5);
    let front = Front::built_in(pace, Some(log.clone())).await;
    let body = json!({"model": "sim", "prompt": "a b c", "stream": true});
    let (text, whole) = front.stream("/v1/completions", &body).await;
    assert!(whole);
    let id = documents(&text).0[0]["id"].clone();
    let line: Value = serde_json::from_str(std::fs::read_to_string(&log).unwrap().trim()).unwrap();
    assert_eq!(line["request_id"], id);
    assert_eq!(line["complete"], true);
    let times: Vec<u64> = serde_json::from_value(line["token_ns"].clone()).unwrap();
    assert_eq!(times.len(), 5);
    assert!(times.is_sorted(), "{times:?}");
    // A host may delay a token, and never hastens one.
    let received = line["received_ns"].as_u64().unwrap();
    for (after, time) in (1..).zip(&times) {
        assert!(
            time - received >= after * 5_000_000,
            "{times:?} from {received}"
        );
    }
}

/// Too heavy for every run: `cargo test --lib sim::frontend -- --ignored`.
#[tokio::test]
#[ignore = "a load test"]
async fn a_thousand_streams_at_once() {
    let front = Arc::new(Front::built_in(Duration::from_millis(20), None).await);
    let body = json!({"model": "sim", "prompt": "a b c", "stream": true, "max_tokens": 50});
    let began = Instant::now();
    let streams: Vec<_> = (0..1000)
        .map(|_| {
            let (front, body) = (Arc::clone(&front), body.clone());
            tokio::spawn(async move { front.stream("/v1/completions", &body).await })
        })
        .collect();
    for stream in streams {
        let (text, whole) = stream.await.unwrap();
        assert!(whole && text.ends_with("data: [DONE]\n\n"));
        assert_eq!(text.matches("data: {").count(), 50);
    }
    outln!("1,000 streams of 50 tokens: {:?}", began.elapsed());
}
