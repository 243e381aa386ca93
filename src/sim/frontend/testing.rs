//! A front door in this process, engines that answer as they are told, and a client.

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpListener;

use super::stream;
use super::*;
use crate::sim::discovery::Registered;
use crate::sim::wire::{Cache, Generate, Handover, KvEvent, Owner, Reply};

/// No test waits for it unless it fails.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const BLOCK: u32 = 4;

/// How an engine answers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Script {
    pub(crate) cached_tokens: u64,
    /// Breaks off after so many tokens.
    pub(crate) breaks_after: Option<u32>,
    /// Gives a handover.
    pub(crate) prefills: bool,
}

/// An engine, its requests, and its registration for as long as it lives.
pub(crate) struct Engine {
    pub(crate) registration: Registration,
    pub(crate) requests: Arc<Mutex<Vec<Generate>>>,
    server: tokio::task::JoinHandle<()>,
    _registered: Registered,
}

impl Engine {
    pub(crate) async fn start(
        folder: &Path,
        id: u64,
        script: Script,
        change: impl FnOnce(&mut Registration),
        events: Vec<KvEvent>,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let mut registration = Registration {
            instance_id: id,
            namespace: "dynamo".into(),
            model: "tiny".into(),
            block_tokens: BLOCK,
            max_model_len: 64,
            control: Some(format!("10.0.0.{}:1", id % 200)),
            request_address: address,
            events_address: Some(serve_events(events).await),
            ..built_in_engine()
        };
        change(&mut registration);
        let requests = Arc::new(Mutex::new(Vec::new()));
        let state = (Arc::clone(&requests), script);
        let routes = Router::new()
            .route("/generate", post(generate))
            .with_state(state);
        let server = tokio::spawn(async move {
            axum::serve(listener, routes).await.unwrap();
        });
        let registered = Registered::publish(folder, &registration).unwrap();
        Self {
            registration,
            requests,
            server,
            _registered: registered,
        }
    }

    /// Nobody listens there any more; it stays registered.
    pub(crate) async fn dies(&mut self) {
        self.server.abort();
        let _ = (&mut self.server).await;
    }

    pub(crate) fn asked(&self) -> Vec<Generate> {
        self.requests.lock().unwrap().clone()
    }
}

type Recorded = (Arc<Mutex<Vec<Generate>>>, Script);

async fn generate(
    State((requests, script)): State<Recorded>,
    Json(request): Json<Generate>,
) -> Body {
    let tokens = if script.prefills {
        1
    } else {
        request.max_tokens
    };
    let mut replies: Vec<Reply> = (0..tokens)
        .map(|at| Reply::Token {
            id: 10 + at,
            logprob: -0.5,
            runner_up: 500,
            runner_up_logprob: -0.75,
        })
        .collect();
    replies.push(Reply::Done {
        finish_reason: "length".into(),
        prompt_tokens: request.tokens.len() as u64,
        completion_tokens: u64::from(tokens),
        cached_tokens: script.cached_tokens,
        handover: script.prefills.then(|| Handover {
            address: "127.0.0.1:9".into(),
            request_id: request.request_id.clone(),
            blocks: 1,
        }),
    });
    requests.lock().unwrap().push(request);
    let breaks_after = script.breaks_after;
    let body = stream::Body::new(
        move |out| async move {
            for (at, reply) in (0u32..).zip(replies) {
                if breaks_after == Some(at) {
                    out.cut().await;
                    return;
                }
                let line = format!("{}\n", serde_json::to_string(&reply).unwrap());
                if out.send(Bytes::from(line)).await.is_err() {
                    return;
                }
            }
        },
        None,
    );
    Body::new(body)
}

/// Sends `events` to everyone who connects, and holds the connection.
async fn serve_events(events: Vec<KvEvent>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            for event in &events {
                let line = format!("{}\n", serde_json::to_string(event).unwrap());
                stream.write_all(line.as_bytes()).await.unwrap();
            }
            held.push(stream);
        }
    });
    address
}

/// Blocks that a cache holds.
pub(crate) fn holds(cache: Cache, stored: &[u64]) -> KvEvent {
    KvEvent {
        cache,
        stored: stored.to_vec(),
        removed: Vec::new(),
    }
}

/// A state agent that knows these owners.
pub(crate) async fn agent(folder: &Path, owners: Vec<Owner>) -> Registered {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let registration = Registration {
        instance_id: 99,
        component: "kv_state_agent".into(),
        model: String::new(),
        request_address: listener.local_addr().unwrap().to_string(),
        ..built_in_engine()
    };
    let routes = Router::new().route("/owners", get(move || async move { Json(owners) }));
    tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    Registered::publish(folder, &registration).unwrap()
}

/// A front door on a port of its own.
pub(crate) struct Front {
    pub(crate) folder: TempDir,
    pub(crate) url: String,
    pub(crate) ended: tokio::task::JoinHandle<ExitCode>,
    http: reqwest::Client,
}

static PROCESSES: AtomicUsize = AtomicUsize::new(0);

impl Front {
    /// One that tells `faults` (comma-separated).
    pub(crate) async fn start(faults: &str) -> Self {
        let settings = Settings {
            process: format!("frontend{}", PROCESSES.fetch_add(1, Ordering::Relaxed)),
            faults: faults
                .split(',')
                .filter(|fault| !fault.is_empty())
                .map(|fault| fault.parse().unwrap())
                .collect(),
            ..Settings::default()
        };
        Self::with(&settings, None).await
    }

    /// One that answers by itself, a token every `pace`; `log` says when each was written.
    pub(crate) async fn built_in(pace: Duration, log: Option<PathBuf>) -> Self {
        let settings = Settings {
            write_log: log,
            ..Settings::default()
        };
        Self::with(&settings, Some(BuiltIn { tokens: 5, pace })).await
    }

    pub(crate) async fn with(settings: &Settings, built_in: Option<BuiltIn>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let metrics = Arc::new(Metrics::default());
        let fleet = match built_in {
            Some(_) => Fleet::fixed(built_in_engine(), Arc::clone(&metrics)),
            None => Fleet::discovered(
                Watch::new(folder.path(), Duration::from_secs(600)),
                1,
                Arc::clone(&metrics),
            ),
        };
        let door = Arc::new(Door::new(settings, fleet, metrics, built_in).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let ended = tokio::spawn(run(door, listener));
        Self {
            folder,
            url,
            ended,
            http: reqwest::Client::builder().no_proxy().build().unwrap(),
        }
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        let url = format!("{}{path}", self.url);
        self.http
            .get(url)
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
    }

    pub(crate) async fn json(&self, path: &str) -> Value {
        serde_json::from_str(&self.get(path).await).unwrap()
    }

    /// Waits until the page has this line.
    pub(crate) async fn until(&self, line: &str) {
        let waited = tokio::time::timeout(PATIENCE, async {
            while !self
                .get("/metrics")
                .await
                .lines()
                .any(|l| l.starts_with(line))
            {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        waited.await.unwrap_or_else(|_| panic!("never {line}"));
    }

    pub(crate) async fn post(
        &self,
        path: &str,
        pin: Option<(&str, u64)>,
        body: &Value,
    ) -> Result<reqwest::Response, reqwest::Error> {
        let mut request = self.http.post(format!("{}{path}", self.url)).json(body);
        if let Some((header, id)) = pin {
            request = request.header(header, id.to_string());
        }
        request.send().await
    }

    /// A completion: its status and document.
    pub(crate) async fn complete(&self, pin: Option<u64>, body: &Value) -> (u16, Value) {
        let pin = pin.map(|id| ("x-dynamo-worker-instance-id", id));
        let response = self.post("/v1/completions", pin, body).await.unwrap();
        let status = response.status().as_u16();
        (status, response.json().await.unwrap())
    }

    /// A streamed body, as far as it came, and whether it came to its end.
    pub(crate) async fn stream(&self, path: &str, body: &Value) -> (String, bool) {
        let mut response = self.post(path, None, body).await.unwrap();
        let mut bytes = Vec::new();
        loop {
            match response.chunk().await {
                Ok(Some(chunk)) => bytes.extend_from_slice(&chunk),
                Ok(None) => return (String::from_utf8(bytes).unwrap(), true),
                Err(_) => return (String::from_utf8(bytes).unwrap(), false),
            }
        }
    }
}

/// A completion of four tokens, as our client asks for it.
pub(crate) fn ask() -> Value {
    json!({
        "model": "tiny",
        "prompt": [1, 2, 3, 4, 5, 6, 7, 8, 9],
        "max_tokens": 4,
        "temperature": 0,
        "logprobs": 2,
        "return_tokens_as_token_ids": true,
        "nvext": {"extra_fields": ["worker_id", "timing", "completion_token_ids"]},
    })
}

/// The same, streamed, with usage.
pub(crate) fn ask_stream() -> Value {
    let mut body = ask();
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}
