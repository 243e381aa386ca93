//! The OpenAI client. It reports what it saw and judges nothing.

use serde::{Deserialize, Serialize};

/// What to ask for. Greedy, non-streaming.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Completion {
    /// Served model name.
    pub model: String,
    /// The rendered prompt, as text.
    pub prompt: String,
    /// Tokens to generate.
    pub max_tokens: u32,
    /// Pin to this worker (`x-dynamo-worker-instance-id`).
    pub worker: Option<u64>,
}

/// What the client saw of one request.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Observation {
    /// Label of the request inside the case: `cold`, `warm#2`.
    pub label: String,
    /// HTTP status.
    pub status: u16,
    /// Generated text.
    pub text: String,
    /// Generated token ids, or token strings where the server gives no ids.
    pub tokens: Vec<String>,
    /// `stop`, `length`, …
    pub finish_reason: Option<String>,
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// `usage.completion_tokens`.
    pub completion_tokens: u64,
    /// `usage.prompt_tokens_details.cached_tokens`; absent is not zero.
    pub cached_tokens: Option<u64>,
    /// `nvext.worker_id`: who served it.
    pub served_by: Option<u64>,
    /// Smallest gap between the first and second log-probability over the generated tokens.
    pub smallest_top2_gap: Option<f64>,
    /// Milliseconds from sending until the whole response was read.
    pub wall_ms: f64,
    /// The whole response body, for evidence.
    pub raw: serde_json::Value,
}
