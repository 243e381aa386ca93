//! The engine's two HTTP surfaces: requests from the front door, and the system port with
//! health and metrics.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Instant;

use axum::Json;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use http_body::Frame;
use serde_json::json;
use tokio::sync::mpsc;

use super::engine::Engine;
use super::page::MetricsPage;
use super::registry::query_source;
use crate::sim::wire::{Generate, Reply};

/// Lines that an engine may be ahead of its reader.
const AHEAD: usize = 64;

/// Longest request, in bytes: a prompt of a million tokens.
const LONGEST: usize = 16 << 20;

/// `POST /generate` and `GET /handover/ID`.
pub fn requests(engine: Arc<Engine>) -> Router {
    Router::new()
        .route("/generate", post(generate))
        .route("/handover/{id}", get(handover))
        .layer(DefaultBodyLimit::max(LONGEST))
        .with_state(engine)
}

async fn generate(State(engine): State<Arc<Engine>>, Json(request): Json<Generate>) -> Response {
    let (replies, lines) = mpsc::channel(AHEAD);
    tokio::spawn(async move { engine.generate(request, replies).await });
    let body = Body::new(Lines(lines));
    ([(CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

async fn handover(State(engine): State<Arc<Engine>>, Path(id): Path<String>) -> Response {
    match engine.take_handover(&id) {
        Some(pages) => pages.concat().into_response(),
        None => (StatusCode::NOT_FOUND, "no pages of this request").into_response(),
    }
}

/// Replies as lines. What is ready goes out in one frame.
struct Lines(mpsc::Receiver<Reply>);

impl HttpBody for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let mut text = Vec::new();
        loop {
            match self.0.poll_recv(context) {
                Poll::Ready(Some(reply)) => {
                    // Numbers and strings: there is nothing in a reply that cannot be written.
                    drop(serde_json::to_writer(&mut text, &reply));
                    text.push(b'\n');
                }
                Poll::Ready(None) if text.is_empty() => return Poll::Ready(None),
                Poll::Pending if text.is_empty() => return Poll::Pending,
                _ => return Poll::Ready(Some(Ok(Frame::data(text.into())))),
            }
        }
    }
}

/// What the system port shows.
pub struct System {
    /// Whether the engine serves.
    pub ready: AtomicBool,
    /// Since when the process runs.
    pub began: Instant,
    /// Instance id.
    pub instance: u64,
    /// Whether routers ask it for its blocks: without a state agent.
    pub direct: bool,
    /// The metrics page.
    pub page: MetricsPage,
    /// Set once there is an engine.
    pub engine: std::sync::OnceLock<Arc<Engine>>,
}

/// `/health`, `/live` and `/metrics`.
pub fn system(system: Arc<System>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/live", get(health))
        .route("/metrics", get(metrics))
        .with_state(system)
}

/// JSON that says it is text, as the real system port does.
async fn health(State(system): State<Arc<System>>) -> (StatusCode, String) {
    let ready = system.ready.load(Ordering::Acquire);
    let (status, code, word) = if ready {
        ("ready", StatusCode::OK, "ready")
    } else {
        ("notready", StatusCode::SERVICE_UNAVAILABLE, "notready")
    };
    let uptime = system.began.elapsed();
    let query = system.direct.then(|| query_source(system.instance));
    let endpoints = ["get_perf_metrics", "clear_kv_blocks", "generate"]
        .map(str::to_owned)
        .into_iter()
        .chain(query)
        .map(|endpoint| (endpoint, json!(word)));
    let document = json!({
        "status": status,
        "uptime": {"secs": uptime.as_secs(), "nanos": uptime.subsec_nanos()},
        "endpoints": serde_json::Map::from_iter(endpoints),
    });
    (code, document.to_string())
}

async fn metrics(State(system): State<Arc<System>>) -> Response {
    let asked = system.engine.get().is_some_and(|engine| engine.asked());
    match system.page.render(asked) {
        Some(page) => ([(CONTENT_TYPE, "text/plain; version=0.0.4")], page).into_response(),
        None => (
            StatusCode::INTERNAL_SERVER_ERROR,
            "Failed to encode metrics",
        )
            .into_response(),
    }
}
