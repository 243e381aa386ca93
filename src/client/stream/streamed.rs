//! What the client saw of one stream.

use std::collections::BTreeMap;

use serde::Serialize;

use super::arrivals::Connection;
use crate::client::Observation;
use crate::client::failure::{RequestFailure, RequestFailureKind};

/// One chunk that brought text: a token, or several that the server sent together. How many
/// tokens there were only [`Usage`] says.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Token {
    /// When the bytes that completed its frame were read: nanoseconds of `CLOCK_MONOTONIC`.
    pub ns: u64,
    /// Which choice it belongs to.
    pub choice: u32,
    /// Never empty.
    pub text: String,
    /// It came as `reasoning_content`: the model thinks.
    pub thinks: bool,
}

/// Tokens as the server counts them.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Usage {
    /// `usage.prompt_tokens`.
    pub prompt_tokens: u64,
    /// `usage.completion_tokens`.
    pub completion_tokens: u64,
    /// `usage.prompt_tokens_details.cached_tokens`; absent is not zero.
    pub cached_tokens: Option<u64>,
}

/// What came, counted.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Counts {
    /// Frames with data, `[DONE]` among them.
    pub frames: usize,
    /// Frames that are only comments.
    pub comments: usize,
    /// Pieces in which the body came.
    pub pieces: usize,
    /// Bytes of the body.
    pub bytes: usize,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// All of it came, down to `[DONE]`.
    Complete,
    /// The client went in mid-stream, as it was told to.
    Disconnected,
    /// Something else happened; what came until then is kept.
    Failed(RequestFailureKind),
}

/// One stream, understood. All times are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Streamed {
    /// Label of the request inside the case: `cold`, `warm#2`.
    pub label: String,
    /// The server's id of the answer: `cmpl-…`.
    pub id: Option<String>,
    /// What carried it. Connecting is no part of any latency here.
    pub connection: Connection,
    /// HTTP status.
    pub status: Option<u16>,
    /// Right before the first byte of the request was handed to the socket.
    pub sent_ns: u64,
    /// When the head of the response was read.
    pub head_ns: Option<u64>,
    /// Every chunk with text, in the order of arrival; stamps never decrease.
    pub tokens: Vec<Token>,
    /// When `[DONE]` was read.
    pub done_ns: Option<u64>,
    /// When the client was done with it, for whatever reason.
    pub ended_ns: u64,
    /// `finish_reason` of each choice that has one.
    pub finish: BTreeMap<u32, String>,
    /// As the server counts; `None` until it says so.
    pub usage: Option<Usage>,
    /// Generated token ids in decimal, or token strings where the server gives no ids; of all
    /// choices, in the order of arrival.
    pub token_ids: Vec<String>,
    /// `nvext.worker_id.decode_worker_id`: who generated the answer.
    pub served_by: Option<u64>,
    /// `nvext.worker_id.prefill_worker_id`: who read the prompt.
    pub prefilled_by: Option<u64>,
    /// Smallest gap between the first and second log-probability over the generated tokens;
    /// `None` unless every token came with two.
    pub smallest_top2_gap: Option<f64>,
    /// What came, counted.
    pub counts: Counts,
    /// How it ended.
    pub outcome: Outcome,
}

impl Streamed {
    /// Time to the first token, in nanoseconds: from sending until the first chunk with text.
    /// `None` if none came.
    #[must_use]
    pub fn ttft_ns(&self) -> Option<u64> {
        let first = self.tokens.first()?;
        Some(first.ns.saturating_sub(self.sent_ns))
    }

    /// Inter-token latencies, in nanoseconds: from each chunk with text to the next one of the
    /// same choice, in the order of arrival. Chunks that came in one read have 0 between them.
    pub fn itls_ns(&self) -> impl Iterator<Item = u64> {
        let mut last: BTreeMap<u32, u64> = BTreeMap::new();
        self.tokens.iter().filter_map(move |token| {
            let before = last.insert(token.choice, token.ns)?;
            Some(token.ns.saturating_sub(before))
        })
    }

    /// End-to-end latency of a complete stream, in nanoseconds: from sending until `[DONE]`.
    #[must_use]
    pub fn end_to_end_ns(&self) -> Option<u64> {
        match self.outcome {
            Outcome::Complete => Some(self.done_ns?.saturating_sub(self.sent_ns)),
            _ => None,
        }
    }

    /// Chunks with text: beside `usage.completion_tokens`, because a server may put several
    /// tokens into one, and a token may have no text.
    #[must_use]
    pub fn chunks(&self) -> usize {
        self.tokens.len()
    }

    /// The answer of one choice, without what the model thought.
    #[must_use]
    pub fn text(&self, choice: u32) -> String {
        let answer = self.tokens.iter();
        let answer = answer.filter(|token| token.choice == choice && !token.thinks);
        answer.map(|token| token.text.as_str()).collect()
    }

    /// What went wrong, if something did.
    #[must_use]
    pub fn failure(&self) -> Option<RequestFailure> {
        match &self.outcome {
            Outcome::Complete | Outcome::Disconnected => None,
            Outcome::Failed(kind) => Some(RequestFailure {
                request: self.label.clone(),
                wall_ms: ms(self.ended_ns.saturating_sub(self.sent_ns)),
                kind: kind.clone(),
            }),
        }
    }

    /// The same as an observation, which a case can judge as one of a request that was not
    /// streamed.
    ///
    /// # Errors
    /// It is not complete, or lacks what every supported server sends.
    pub fn observation(&self) -> Result<Observation, RequestFailure> {
        if let Some(failure) = self.failure() {
            return Err(failure);
        }
        let end_to_end_ns = self.end_to_end_ns();
        let (Some(usage), Some(finish), Some(wall)) =
            (self.usage, self.finish.get(&0), end_to_end_ns)
        else {
            return Err(RequestFailure {
                request: self.label.clone(),
                wall_ms: ms(self.ended_ns.saturating_sub(self.sent_ns)),
                kind: RequestFailureKind::Truncated {
                    received: self.counts.bytes,
                    why: "the client hung up".into(),
                },
            });
        };
        Ok(Observation {
            label: self.label.clone(),
            status: self.status.unwrap_or_default(),
            text: self.text(0),
            tokens: self.token_ids.clone(),
            finish_reason: finish.clone(),
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            served_by: self.served_by,
            prefilled_by: self.prefilled_by,
            smallest_top2_gap: self.smallest_top2_gap,
            wall_ms: ms(wall),
            raw: serde_json::to_value(self).unwrap_or_default(),
        })
    }
}

fn ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}
