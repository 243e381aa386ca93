//! Every way in which a request can fail, whole or streamed: its name, its words, its class.

use std::error::Error;

use serde::Serialize;

use crate::failure::{Class, Failure};

/// How much of a body stands in a message, in characters.
const EXCERPT: usize = 300;

/// Why a request gave no observation.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[error("{request}: {kind} (after {wall_ms:.0} ms)")]
pub struct RequestFailure {
    /// What was asked: the label of a completion, or a URL.
    pub request: String,
    /// Milliseconds from sending until it was given up.
    pub wall_ms: f64,
    /// What happened.
    pub kind: RequestFailureKind,
}

/// What happened to a request.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case")]
pub enum RequestFailureKind {
    /// No complete answer within the client's own deadline.
    #[error("no complete response within {seconds} s")]
    Deadline {
        /// The deadline, in seconds.
        seconds: f64,
    },
    /// No connection: refused, unreachable.
    #[error("cannot connect: {0}")]
    Connect(String),
    /// The connection ended before the response did.
    #[error("response cut off after {received} bytes: {why}")]
    Truncated {
        /// Bytes of the body that were read.
        received: usize,
        /// What the HTTP library says.
        why: String,
    },
    /// More than the client reads ([`RESPONSE_LIMIT`](super::transport::RESPONSE_LIMIT)).
    #[error("response of more than {limit} bytes")]
    TooLarge {
        /// The limit, in bytes.
        limit: usize,
    },
    /// A status that is not 2xx, or an error document under one that is.
    #[error("HTTP {status}: {body}")]
    Http {
        /// The status.
        status: u16,
        /// The beginning of the body.
        body: String,
    },
    /// A body that is not JSON (or, for a page, not UTF-8).
    #[error("response is not {wanted}: {body}")]
    NotJson {
        /// `JSON`, `UTF-8`.
        wanted: &'static str,
        /// The beginning of the body.
        body: String,
    },
    /// An answer without a single generated token, whatever its status.
    #[error("HTTP 200 with an empty completion: {body}")]
    EmptyCompletion {
        /// The beginning of the body.
        body: String,
    },
    /// A response that lacks what every supported server sends, or has it in another shape.
    #[error("response has no usable {pointer}: {found}")]
    MissingField {
        /// RFC 6901 pointer.
        pointer: &'static str,
        /// What stands there, or the beginning of the body.
        found: String,
    },
    /// A streamed request, of whose response not even the head came within the deadline.
    #[error("no response head within {seconds} s")]
    NoHead {
        /// The deadline, in seconds.
        seconds: f64,
    },
    /// A stream that began and brought no token within the deadline.
    #[error("the stream began, but no token came within {seconds} s")]
    NoFirstToken {
        /// The deadline, in seconds.
        seconds: f64,
    },
    /// A stream that brought tokens and was not over within the deadline.
    #[error("the stream was not over within {seconds} s: {chunks} chunks with text came")]
    Stalled {
        /// The deadline, in seconds.
        seconds: f64,
        /// Chunks with text until then.
        chunks: usize,
    },
    /// An error that the server tells in a frame of a stream that began with HTTP 200.
    #[error("error frame after HTTP 200: {message}")]
    ErrorFrame {
        /// The server's words.
        message: String,
    },
    /// A stream that ended in order, but for its last frame.
    #[error("the stream ended without `[DONE]` after {chunks} chunks with text")]
    WithoutDone {
        /// Chunks with text.
        chunks: usize,
    },
    /// HTTP 200 with something else than server-sent events.
    #[error("response is no event stream but {content_type}: {body}")]
    NotAStream {
        /// `content-type` of the response.
        content_type: String,
        /// The beginning of the body.
        body: String,
    },
    /// A frame whose data is not JSON (or not UTF-8).
    #[error("frame {frame} is not {wanted}: {data}")]
    FrameNotJson {
        /// Which frame with data, from 1.
        frame: usize,
        /// `JSON`, `UTF-8`.
        wanted: &'static str,
        /// The beginning of its data.
        data: String,
    },
    /// A frame of JSON that is no chunk of a completion as we know it.
    #[error("frame {frame} is no completion chunk ({why}): {data}")]
    FrameShape {
        /// Which frame with data, from 1.
        frame: usize,
        /// What the JSON library says.
        why: String,
        /// The beginning of its data.
        data: String,
    },
}

impl RequestFailure {
    /// Who has to act.
    pub fn class(&self) -> Class {
        match &self.kind {
            // The client cannot tell a stack that crashed from one that was stopped: the
            // supervisor watches the processes and says which.
            RequestFailureKind::Connect(_) => Class::Inconclusive,
            // The server is of a version that speaks another dialect.
            RequestFailureKind::MissingField { .. } | RequestFailureKind::FrameShape { .. } => {
                Class::Skew
            }
            RequestFailureKind::Http {
                status: 400 | 404 | 422,
                body,
            } if is_dialect(body) => Class::Skew,
            RequestFailureKind::Deadline { .. }
            | RequestFailureKind::Truncated { .. }
            | RequestFailureKind::TooLarge { .. }
            | RequestFailureKind::Http { .. }
            | RequestFailureKind::NotJson { .. }
            | RequestFailureKind::EmptyCompletion { .. }
            | RequestFailureKind::NoHead { .. }
            | RequestFailureKind::NoFirstToken { .. }
            | RequestFailureKind::Stalled { .. }
            | RequestFailureKind::ErrorFrame { .. }
            | RequestFailureKind::WithoutDone { .. }
            | RequestFailureKind::NotAStream { .. }
            | RequestFailureKind::FrameNotJson { .. } => Class::Product,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        Some(match &self.kind {
            RequestFailureKind::Deadline { .. }
            | RequestFailureKind::NoHead { .. }
            | RequestFailureKind::NoFirstToken { .. }
            | RequestFailureKind::Stalled { .. } => {
                "look for `No handler found` and KVCR timeouts in the worker's log"
            }
            RequestFailureKind::Connect(_) => "see whether the process behind that port still runs",
            RequestFailureKind::Http { status: 400, body } if body.contains("Invalid request") => {
                "the router does not know the pinned worker: it restarted, or lost its discovery lease"
            }
            RequestFailureKind::Http { status: 503, .. } => {
                "a worker is gone but still listed: see the workers' logs"
            }
            RequestFailureKind::ErrorFrame { .. } | RequestFailureKind::WithoutDone { .. } => {
                "see the logs of the frontend and of the worker that served it"
            }
            RequestFailureKind::MissingField { .. } | RequestFailureKind::FrameShape { .. } => {
                "compare the versions of Dynamo and the engine with the environment's lock"
            }
            RequestFailureKind::Http { .. } if self.class() == Class::Skew => {
                "this server refuses a field of our request: compare its version with the environment's lock"
            }
            _ => return None,
        })
    }
}

/// Whether an error says that our request, not this particular one, cannot be understood.
fn is_dialect(body: &str) -> bool {
    [
        "Unsupported parameter",
        "unknown field",
        "Failed to deserialize",
    ]
    .iter()
    .any(|mark| body.contains(mark))
}

impl From<RequestFailure> for Failure {
    fn from(failure: RequestFailure) -> Self {
        let class = failure.class();
        let hint = failure.hint();
        let found = format!("{} (after {:.0} ms)", failure.kind, failure.wall_ms);
        let mut out = Self::new(class, format!("request `{}` failed", failure.request))
            .expected("a complete, non-empty response")
            .found(found);
        out.hint = hint.map(str::to_owned);
        out
    }
}

/// The beginning of a body, on one line.
pub(crate) fn excerpt(body: &[u8]) -> String {
    // Cut bytes first: a body may have megabytes, a character at most four bytes.
    let head = &body[..body.len().min(4 * EXCERPT)];
    let text = String::from_utf8_lossy(head);
    let mut short: String = text
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .take(EXCERPT)
        .collect();
    if short.len() < body.len() {
        short.push('…');
    }
    short
}

/// An error with its causes: the library's own message names only the URL.
pub(super) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}
