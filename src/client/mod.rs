//! The OpenAI client. It reports what it saw and judges nothing.
//!
//! - [`transport`]: one bounded HTTP exchange.
//! - `failure`: every way in which a request can fail.
//! - `parse`: a response body becomes an [`Observation`].
//! - [`stream`]: the same requests, streamed, with the time of every token.
//!
//! Every request is greedy, and asks for what an oracle needs: who served it
//! (`nvext.worker_id`), the generated token ids, and the two best log-probabilities a token.

mod failure;
pub(crate) mod parse;
pub mod stream;
pub mod transport;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::failure::Failure;
use crate::plan::Serves;
use crate::stack::protocol::WorkerInfo;
pub use failure::{RequestFailure, RequestFailureKind};
pub use transport::Transport;

/// Header that pins a request to one worker, by its instance id in decimal.
pub(crate) const PIN_HEADER: &str = "x-dynamo-worker-instance-id";

/// The same, where who reads the prompt is another than who decodes: there the ordinary one is
/// answered with 500 (dynamo#14661).
pub(crate) const PREFILL_PIN_HEADER: &str = "x-dynamo-prefill-instance-id";

/// Which worker a request has to go to, by its instance id.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pin {
    /// It serves all of the request.
    Worker(u64),
    /// It reads the prompt.
    Prefill(u64),
}

impl Pin {
    /// `worker`, for whatever it does of a request; `None`, if it takes only what is handed to it.
    #[must_use]
    pub fn of(worker: &WorkerInfo) -> Option<Self> {
        Self::new(worker.serves, worker.instance_id)
    }

    /// The instance `id`, which does this of a request.
    #[must_use]
    pub fn new(serves: Serves, id: u64) -> Option<Self> {
        match serves {
            Serves::Whole => Some(Self::Worker(id)),
            Serves::Prefill => Some(Self::Prefill(id)),
            Serves::Decode => None,
        }
    }

    /// The header that says so.
    #[must_use]
    pub fn header(self) -> (&'static str, String) {
        match self {
            Self::Worker(id) => (PIN_HEADER, id.to_string()),
            Self::Prefill(id) => (PREFILL_PIN_HEADER, id.to_string()),
        }
    }
}

/// What every request asks of Dynamo beside the answer.
pub(crate) const EXTRA_FIELDS: [&str; 3] = ["worker_id", "timing", "completion_token_ids"];

/// A prompt as it is sent.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Input {
    /// Text, which the front door tokenizes.
    Text(String),
    /// Token ids, which router and worker see exactly as they are.
    Ids(Vec<u32>),
}

impl From<&str> for Input {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

/// What to ask for. Greedy, non-streaming.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Completion {
    /// Served model name.
    pub model: String,
    /// The rendered prompt.
    pub prompt: Input,
    /// Tokens to generate.
    pub max_tokens: u32,
    /// Generate all of `max_tokens`, whatever the model says: a random model may stop at once.
    pub ignore_eos: bool,
    /// Who has to serve it.
    pub pin: Option<Pin>,
    /// Goes into every block hash: the same prompt under another salt shares nothing with it.
    pub cache_salt: Option<String>,
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
    /// Generated token ids in decimal, or token strings where the server gives no ids.
    pub tokens: Vec<String>,
    /// `stop`, `length`, …
    pub finish_reason: String,
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// `usage.completion_tokens`.
    pub completion_tokens: u64,
    /// `usage.prompt_tokens_details.cached_tokens`; absent is not zero.
    pub cached_tokens: Option<u64>,
    /// `nvext.worker_id.decode_worker_id`: who generated the answer.
    pub served_by: Option<u64>,
    /// `nvext.worker_id.prefill_worker_id`: who read the prompt; the same where one does both.
    pub prefilled_by: Option<u64>,
    /// Smallest gap between the first and second log-probability over the generated tokens;
    /// `None` unless every token came with two.
    pub smallest_top2_gap: Option<f64>,
    /// Milliseconds from sending until the whole response was read.
    pub wall_ms: f64,
    /// The whole response body, for evidence.
    pub raw: serde_json::Value,
}

/// Talks to one front door. Cheap to clone; clones share their connections.
#[derive(Clone, Debug)]
pub struct Client {
    transport: Transport,
    url: String,
}

impl Client {
    /// A client of `base_url` (`http://127.0.0.1:8000`) that gives every request up after
    /// `deadline`: requests of this stack are known to hang for good after worker selection.
    pub fn new(base_url: &str, deadline: Duration) -> Result<Self, Failure> {
        Ok(Self {
            transport: Transport::new(deadline)?,
            url: format!("{}/v1/completions", base_url.trim_end_matches('/')),
        })
    }

    /// Sends one completion and reads the whole answer. `label` names it in the observation and
    /// in the failure.
    pub async fn complete(
        &self,
        completion: &Completion,
        label: &str,
    ) -> Result<Observation, RequestFailure> {
        let mut request = self.transport.post(&self.url).json(&body(completion));
        if let Some((name, id)) = completion.pin.map(Pin::header) {
            request = request.header(name, id);
        }
        let reply = self.transport.exchange(request, label).await?;
        parse::observation(&reply, label).map_err(|kind| RequestFailure {
            request: label.to_owned(),
            wall_ms: reply.wall_ms,
            kind,
        })
    }
}

/// Unknown names in `extra_fields` are ignored by the server, unknown fields are not: everything
/// here was accepted by Dynamo 1.6.1. Token strings may repeat in `top_logprobs` (`\u{fffd}` is
/// many tokens), token ids may not, hence `return_tokens_as_token_ids`.
pub(crate) fn body(completion: &Completion) -> serde_json::Value {
    let mut body = json!({
        "model": completion.model,
        "prompt": completion.prompt,
        "max_tokens": completion.max_tokens,
        "temperature": 0,
        "stream": false,
        "ignore_eos": completion.ignore_eos,
        "logprobs": 2,
        "return_tokens_as_token_ids": true,
        "nvext": {"extra_fields": EXTRA_FIELDS},
    });
    if let Some(salt) = &completion.cache_salt {
        body["cache_salt"] = json!(salt);
    }
    body
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
