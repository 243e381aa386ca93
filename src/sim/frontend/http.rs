//! The routes: pages, and requests from their bytes to their answer.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Method, StatusCode, Uri, header};
use axum::response::{Html, IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::{Value, json};

use super::Door;
use super::answer::{Answer, End, Token};
use super::count::Count;
use super::engine::Lines;
use super::fleet::AGENT;
use super::produce::{Ending, Stream};
use super::refusal::Refusal;
use super::request::{self, Ask, Kind, Prompt};
use super::route::{Request, Routed};
use super::stream::{self, Stamps, now_ns};
use crate::sim::fault::Fault;
use crate::sim::wire::Reply;

/// Largest request that is read, in bytes: Dynamo's own limit is of this order.
const BODY_LIMIT: usize = 45 << 20;

/// Tokens of a completion that does not say how many.
const DEFAULT_TOKENS: u32 = 16;

/// All routes.
pub(super) fn routes(door: Arc<Door>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/live", get(live))
        .route("/metrics", get(metrics))
        .route("/v1/models", get(models))
        .route("/v1/completions", post(completion))
        .route("/v1/chat/completions", post(chat))
        .fallback(no_route)
        .layer(DefaultBodyLimit::max(BODY_LIMIT))
        .with_state(door)
}

async fn no_route(method: Method, uri: Uri) -> Response {
    let message = format!("Route not found: {method} {}", uri.path());
    Refusal::engine(404, message).into_response()
}

async fn live() -> Json<Value> {
    Json(json!({"status": "live", "message": "Service is live"}))
}

async fn health(State(door): State<Arc<Door>>) -> Json<Value> {
    let mut endpoints = Vec::new();
    let mut instances = Vec::new();
    let agent = door.fleet.agent();
    let engines = door.fleet.engines();
    let found = engines.iter().map(|member| &member.registration);
    for found in found.chain(&agent) {
        let (id, namespace) = (found.instance_id, &found.namespace);
        // Blocks are asked of whoever knows them.
        let query = format!("worker_kv_query_source_{id:x}");
        let served: &[&str] = match (found.component == AGENT, &agent) {
            (true, _) => &["control", "health", &query],
            (false, Some(_)) => &["clear_kv_blocks", "generate", "get_perf_metrics"],
            (false, None) => &["clear_kv_blocks", "generate", "get_perf_metrics", &query],
        };
        for endpoint in served {
            endpoints.push(format!("dyn://{namespace}.{}.{endpoint}", found.component));
            instances.push(json!({
                "namespace": namespace,
                "component": found.component,
                "endpoint": endpoint,
                "instance_id": id,
                "transport": {"tcp": format!(
                    "{}/{id:x}/{namespace}/{}/{endpoint}", found.request_address, found.component
                )},
                "device_type": "cuda",
                "request_plane_codec": "msgpack",
            }));
        }
    }
    endpoints.sort();
    endpoints.dedup();
    Json(json!({"status": "healthy", "endpoints": endpoints, "instances": instances}))
}

async fn metrics(State(door): State<Arc<Door>>) -> Response {
    let text = super::count::page(&door);
    let kind = "text/plain; version=0.0.4";
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

async fn models(State(door): State<Arc<Door>>) -> Json<Value> {
    let mut models: BTreeMap<String, u32> = BTreeMap::new();
    if !door.faults.tell(Fault::ModelMissing) {
        for scope in door.fleet.scopes() {
            let engines = door.fleet.of(&scope.model);
            let longest = engines.iter().map(|m| m.registration.max_model_len).min();
            models.insert(scope.model, longest.unwrap_or(0));
        }
    }
    let created = seconds_since_1970();
    let data: Vec<Value> = models
        .iter()
        .map(|(id, longest)| {
            json!({
                "id": id, "object": "model", "created": created, "owned_by": "nvidia",
                "context_window": longest,
            })
        })
        .collect();
    Json(json!({"object": "list", "data": data}))
}

async fn completion(State(door): State<Arc<Door>>, headers: HeaderMap, body: Bytes) -> Response {
    answer(&door, Kind::Completion, &headers, &body).await
}

async fn chat(State(door): State<Arc<Door>>, headers: HeaderMap, body: Bytes) -> Response {
    answer(&door, Kind::Chat, &headers, &body).await
}

async fn answer(door: &Arc<Door>, kind: Kind, headers: &HeaderMap, body: &[u8]) -> Response {
    let received = Received {
        at: Instant::now(),
        ns: now_ns(),
    };
    if door.faults.tell(Fault::FrontendDies) {
        door.die.notify_one();
        std::future::pending::<()>().await;
    }
    if door.faults.tell(Fault::NeverAnswers) {
        std::future::pending::<()>().await;
    }
    if door.faults.tell(Fault::Http500) {
        return Refusal::failed().into_response();
    }
    if door.faults.tell(Fault::Http503) {
        return Refusal::unavailable().into_response();
    }
    if door.faults.tell(Fault::NotJson) {
        return Html("<html><body><h1>Bad gateway</h1></body></html>\n").into_response();
    }
    let answered = async {
        let ask = request::parse(kind, headers, body)?;
        serve(door, ask, received).await
    };
    answered.await.unwrap_or_else(Refusal::into_response)
}

#[derive(Clone, Copy)]
struct Received {
    at: Instant,
    ns: u64,
}

async fn serve(door: &Arc<Door>, ask: Ask, received: Received) -> Result<Response, Refusal> {
    let mut members = door.fleet.of(&ask.model);
    if members.is_empty() {
        // It may have registered since the last look.
        door.fleet.look();
        members = door.fleet.of(&ask.model);
    }
    if door.faults.tell(Fault::ModelMissing) {
        members.clear();
    }
    let pins = [ask.pins.worker, ask.pins.prefill];
    let listed = |id: u64| members.iter().any(|m| m.registration.instance_id == id);
    if !members.is_empty() && !pins.into_iter().flatten().all(listed) {
        door.fleet.look();
        members = door.fleet.of(&ask.model);
    }
    let Some(registration) = members.first().map(|m| m.registration.clone()) else {
        return Err(Refusal::no_model());
    };
    let tokens = match &ask.prompt {
        Prompt::Ids(ids) => ids.clone(),
        Prompt::Text(text) => door.tokenizer.tokens(text, registration.vocabulary),
    };
    let longest = registration.max_model_len;
    check(&tokens, longest, registration.vocabulary)?;
    let room = longest - tokens.len() as u32;
    let default = match ask.kind {
        _ if door.built_in.is_some() => door.built_in.map_or(0, |engine| engine.tokens),
        Kind::Completion => DEFAULT_TOKENS,
        Kind::Chat => room,
    };
    let mut max_tokens = ask.max_tokens.unwrap_or(default).min(room);
    let stops_early = door.faults.tell(Fault::StopsEarly);
    if stops_early {
        max_tokens = (max_tokens / 2).max(1);
    }
    let uuid = uuid::Uuid::new_v4();
    let id = match ask.kind {
        Kind::Completion => format!("cmpl-{uuid}"),
        Kind::Chat => format!("chatcmpl-{uuid}"),
    };
    let mut count = Count::start(door, &ask, tokens.len(), received.at);
    let request = Request {
        id: &id,
        ask: &ask,
        tokens: &tokens,
        max_tokens,
        members: &members,
    };
    let routed = request.route(door).await.inspect_err(|_| count.fails())?;
    let blocks = tokens
        .len()
        .div_ceil((registration.block_tokens as usize).max(1));
    let answer = Answer {
        id,
        created: seconds_since_1970(),
        workers: workers(door, &routed),
        kv_hit_rate: routed.overlap as f64 / blocks.max(1) as f64,
        prompt: tokens,
        received: received.at,
        received_ms: since_1970().as_millis() as u64,
        routed: Instant::now(),
        ask,
    };
    count.routed(&routed);
    let ending = Ending {
        stops_early,
        cached_tokens: routed.cached_tokens,
    };
    if answer.ask.stream {
        let model = &answer.ask.model;
        let log = door.log.clone();
        let log = log.map(|log| Stamps::new(log, &answer.id, model, received.ns, max_tokens));
        let stream = Stream {
            faults: Arc::clone(&door.faults),
            answer,
            lines: routed.lines,
            max_tokens,
            ending,
            count,
        };
        let body = stream::Body::new(|out| stream.run(out), log);
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        return Ok((headers, Body::new(body)).into_response());
    }
    let whole = whole(door, &answer, routed.lines, max_tokens, ending, &mut count).await;
    let document = whole.inspect_err(|_| count.fails())?;
    if door.faults.tell(Fault::BodyCut) {
        return Ok(cut(document.to_string()));
    }
    Ok(Json(document).into_response())
}

/// Refuses what vLLM refuses.
fn check(tokens: &[u32], longest: u32, vocabulary: u32) -> Result<(), Refusal> {
    if tokens.is_empty() {
        return Err(Refusal::bad("The prompt cannot be empty".into()));
    }
    // Room for one token to generate.
    if tokens.len() >= longest as usize {
        return Err(Refusal::too_long(longest, tokens.len()));
    }
    if let Some(token) = tokens.iter().find(|token| **token >= vocabulary) {
        return Err(Refusal::bad(format!(
            "Token id {token} is out of vocabulary"
        )));
    }
    Ok(())
}

/// Who the answer says served it.
fn workers(door: &Door, routed: &Routed) -> Option<(u64, u64)> {
    if door.faults.tell(Fault::WorkerIdAbsent) {
        return None;
    }
    let (mut prefill, mut decode) = (routed.prefill, routed.decode);
    if let Some(pinned) = routed.pretended {
        if prefill == decode {
            decode = pinned;
        }
        prefill = pinned;
    }
    if door.faults.tell(Fault::WorkerIdRounded) {
        (prefill, decode) = (prefill as f64 as u64, decode as f64 as u64);
    }
    Some((prefill, decode))
}

/// Reads an answer to its end.
async fn whole(
    door: &Door,
    answer: &Answer,
    mut lines: Lines,
    max_tokens: u32,
    ending: Ending,
    count: &mut Count,
) -> Result<Value, Refusal> {
    let mut tokens: Vec<Token> = Vec::new();
    let mut first = None;
    let end = loop {
        match lines.next().await {
            Ok(Reply::Token {
                id,
                logprob,
                runner_up,
                runner_up_logprob,
            }) => {
                first.get_or_insert_with(Instant::now);
                count.token();
                tokens.push(Token {
                    id,
                    logprob,
                    runner_up,
                    runner_up_logprob,
                });
            }
            Ok(Reply::Failed { status, message }) => return Err(Refusal::engine(status, message)),
            Ok(done @ Reply::Done { .. }) => break ending.end(done, first),
            Err(_) => return Err(Refusal::failed()),
        }
    };
    let Some(mut end) = end else {
        return Err(Refusal::failed());
    };
    count.ends(&end);
    if door.faults.tell(Fault::ErrorAfter200) {
        return Ok(Refusal::failed().document());
    }
    if door.faults.tell(Fault::EmptyCompletion) {
        tokens.clear();
        (end.completion_tokens, end.finish_reason) = (0, Some("stop".into()));
    }
    if !tokens.is_empty() && door.faults.tell(Fault::TokenDropped) {
        let lost = super::produce::lost(max_tokens) as usize;
        tokens.remove(lost.min(tokens.len() - 1));
    }
    let end: End = end.tell(&door.faults);
    Ok(answer.whole(&tokens, &end))
}

/// Announces a whole document and breaks off half way.
fn cut(document: String) -> Response {
    let length = document.len();
    let half = Bytes::from(document).slice(..length / 2);
    let body = stream::Body::new(
        |out| async move {
            if out.send(half).await.is_ok() {
                out.cut().await;
            }
        },
        None,
    );
    Response::builder()
        .status(StatusCode::OK)
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONTENT_LENGTH, length)
        .body(Body::new(body))
        .unwrap_or_else(|_| Refusal::failed().into_response())
}

/// Only shown; nothing is decided by it.
fn since_1970() -> std::time::Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

fn seconds_since_1970() -> u64 {
    since_1970().as_secs()
}
