//! What one request adds to the counters, and the page of the whole front door.

use std::sync::Arc;
use std::time::Instant;

use super::answer::End;
use super::metrics::{Identity, Metrics};
use super::request::{Ask, Kind};
use super::route::Routed;
use super::{Door, OWN_ID, ROUTER_ID};

/// A request while it runs. Counted as whatever it had come to when it is dropped.
pub(super) struct Count {
    metrics: Arc<Metrics>,
    model: String,
    endpoint: &'static str,
    streamed: bool,
    /// It is a chat: its messages are rendered first.
    rendered: bool,
    input: usize,
    received: Instant,
    worker: Option<u64>,
    first: Option<Instant>,
    last: Option<Instant>,
    /// Seconds between tokens. Handed in at the end, so that a token costs no lock.
    gaps: Vec<f64>,
    tokens: u32,
    outcome: Outcome,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Outcome {
    Running,
    Ended { cached: u64 },
    Failed,
    Disconnected,
}

impl Count {
    /// A request of so many prompt tokens begins.
    pub(super) fn start(door: &Door, ask: &Ask, input: usize, received: Instant) -> Self {
        let count = Self {
            metrics: Arc::clone(&door.metrics),
            model: ask.model.clone(),
            endpoint: ask.kind.endpoint(),
            streamed: ask.stream,
            rendered: ask.kind == Kind::Chat,
            input,
            received,
            worker: None,
            first: None,
            last: None,
            gaps: Vec::new(),
            tokens: 0,
            outcome: Outcome::Running,
        };
        count.metrics.touch(&count.model);
        let started = "dynamo_frontend_requests_started_total";
        let labels = format!(
            "endpoint=\"{}\",model=\"{}\",request_type=\"{}\"",
            count.endpoint,
            count.model,
            count.kind()
        );
        count.metrics.add(started, labels, 1.0);
        count.running(1.0);
        count
    }

    fn kind(&self) -> &'static str {
        if self.streamed { "stream" } else { "unary" }
    }

    fn of_model(&self) -> String {
        format!("model=\"{}\"", self.model)
    }

    fn running(&self, by: f64) {
        for name in [
            "dynamo_frontend_active_requests",
            "dynamo_frontend_inflight_requests",
        ] {
            self.metrics.add(name, self.of_model(), by);
        }
    }

    /// An engine has it.
    pub(super) fn routed(&mut self, routed: &Routed) {
        self.worker = Some(routed.decode);
        // Seen for chats only; a completion whose prompt is text has none.
        if self.rendered {
            let stage = "dynamo_frontend_stage_duration_seconds";
            let took = self.received.elapsed().as_secs_f64();
            let labels = "stage=\"preprocess\"".to_owned();
            self.metrics.observe(stage, labels, &[took]);
        }
        for id in [routed.prefill, routed.decode] {
            self.metrics.touch(&id.to_string());
        }
    }

    /// A token came.
    pub(super) fn token(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        if let Some(last) = self.last {
            self.gaps.push(now.duration_since(last).as_secs_f64());
        }
        self.last = Some(now);
        self.tokens += 1;
    }

    /// The engine came to its end.
    pub(super) fn ends(&mut self, end: &End) {
        let cached = end.cached_tokens.unwrap_or(0);
        self.outcome = Outcome::Ended { cached };
    }

    /// It came to nothing.
    pub(super) fn fails(&mut self) {
        self.outcome = Outcome::Failed;
    }

    /// The client went away.
    pub(super) fn disconnects(&mut self) {
        self.outcome = Outcome::Disconnected;
    }
}

impl Drop for Count {
    fn drop(&mut self) {
        self.running(-1.0);
        let (error, status, cached) = match self.outcome {
            Outcome::Ended { cached } => ("", "success", Some(cached)),
            Outcome::Failed => ("internal", "error", None),
            // A body is dropped by a client that goes away.
            Outcome::Disconnected | Outcome::Running => {
                let name = "dynamo_frontend_disconnected_clients";
                self.metrics.add(name, String::new(), 1.0);
                ("cancelled", "error", None)
            }
        };
        let labels = format!(
            "endpoint=\"{}\",error_type=\"{error}\",model=\"{}\",request_type=\"{}\",status=\"{status}\"",
            self.endpoint,
            self.model,
            self.kind()
        );
        let metrics = &self.metrics;
        metrics.add("dynamo_frontend_requests_total", labels, 1.0);
        let model = || self.of_model();
        let seconds = |to: Instant| to.duration_since(self.received).as_secs_f64();
        let observe = |name, values: &[f64]| metrics.observe(name, model(), values);
        let total = [seconds(Instant::now())];
        observe("dynamo_frontend_request_duration_seconds", &total);
        observe(
            "dynamo_frontend_input_sequence_tokens",
            &[self.input as f64],
        );
        let tokens = f64::from(self.tokens);
        observe("dynamo_frontend_output_sequence_tokens", &[tokens]);
        metrics.add("dynamo_frontend_output_tokens_total", model(), tokens);
        if let Some(cached) = cached {
            observe("dynamo_frontend_cached_tokens", &[cached as f64]);
        }
        if let Some(first) = self.first {
            let ttft = seconds(first);
            observe("dynamo_frontend_time_to_first_token_seconds", &[ttft]);
            observe("dynamo_frontend_inter_token_latency_seconds", &self.gaps);
            if let Some(worker) = self.worker {
                let labels = format!("dp_rank=\"0\",worker_id=\"{worker}\",worker_type=\"decode\"");
                let name = "dynamo_frontend_worker_last_time_to_first_token_seconds";
                metrics.set(name, labels.clone(), ttft);
                let name = "dynamo_frontend_worker_last_input_sequence_tokens";
                metrics.set(name, labels, self.input as f64);
            }
        }
    }
}

const SOURCES: &str = "dynamo_component_router_kv_zmq_ingress_sources";
const REGISTERED: &str = "dynamo_component_router_worker_registered";
const CONTEXT_LENGTH: &str = "dynamo_frontend_model_context_length";
const BLOCK_SIZE: &str = "dynamo_frontend_model_kv_cache_block_size";
const READY: &str = "dynamo_frontend_model_ready";

/// The metrics page now.
pub(super) fn page(door: &Door) -> String {
    // What is gone must not stay on the page.
    for name in [SOURCES, REGISTERED, CONTEXT_LENGTH, BLOCK_SIZE, READY] {
        door.metrics.clear(name);
    }
    let scopes = door.fleet.scopes();
    for scope in &scopes {
        let sources = format!(
            "dynamo_component=\"backend\",dynamo_namespace=\"{}\",state=\"active\",worker_id=\"{OWN_ID:x}\"",
            scope.namespace
        );
        let active = door.fleet.sources(&scope.namespace);
        door.metrics.set(SOURCES, sources, active as f64);
        for (id, prefills) in &scope.workers {
            let kind = if *prefills { "prefill" } else { "decode" };
            let labels = format!(
                "dp_rank=\"0\",dynamo_component=\"backend\",dynamo_namespace=\"{}\",router_worker_id=\"{id}\",worker_id=\"{OWN_ID:x}\",worker_type=\"{kind}\"",
                scope.namespace
            );
            door.metrics.set(REGISTERED, labels, 1.0);
        }
    }
    for member in door.fleet.engines() {
        let found = &member.registration;
        let model = format!("model=\"{}\"", found.model);
        let set = |name, value| door.metrics.set(name, model.clone(), value);
        let length = f64::from(found.max_model_len);
        set(CONTEXT_LENGTH, length);
        let block = f64::from(found.block_tokens);
        set(BLOCK_SIZE, block);
        set(READY, 1.0);
    }
    let uptime = door.began.elapsed().as_secs_f64();
    let own = format!("worker_id=\"{OWN_ID:x}\"");
    door.metrics
        .set("dynamo_component_uptime_seconds", own, uptime);
    let identity = Identity {
        id: OWN_ID,
        router: ROUTER_ID,
    };
    let direct = door.fleet.agent().is_none();
    door.metrics.page(identity, &scopes, direct)
}
