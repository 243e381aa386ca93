//! One HTTP exchange with a bound on time and size, and every way it can fail.

use std::error::Error;
use std::time::{Duration, Instant};

use reqwest::header::CONTENT_LENGTH;
use serde::Serialize;

use crate::failure::{Class, Failure};
use crate::stack::wait;

/// Largest response that is read, in bytes. A metrics page of a busy worker has 0.2 MB, a
/// completion a few kB.
pub const RESPONSE_LIMIT: usize = 16 << 20;

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
    /// More than [`RESPONSE_LIMIT`].
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
}

impl RequestFailure {
    /// Who has to act.
    pub fn class(&self) -> Class {
        match &self.kind {
            // The client cannot tell a stack that crashed from one that was stopped: the
            // supervisor watches the processes and says which.
            RequestFailureKind::Connect(_) => Class::Inconclusive,
            // The server is of a version that speaks another dialect.
            RequestFailureKind::MissingField { .. } => Class::Skew,
            RequestFailureKind::Http {
                status: 400 | 404 | 422,
                body,
            } if is_dialect(body) => Class::Skew,
            RequestFailureKind::Deadline { .. }
            | RequestFailureKind::Truncated { .. }
            | RequestFailureKind::TooLarge { .. }
            | RequestFailureKind::Http { .. }
            | RequestFailureKind::NotJson { .. }
            | RequestFailureKind::EmptyCompletion { .. } => Class::Product,
        }
    }

    fn hint(&self) -> Option<&'static str> {
        Some(match &self.kind {
            RequestFailureKind::Deadline { .. } => {
                "look for `No handler found` and KVCR timeouts in the worker's log"
            }
            RequestFailureKind::Connect(_) => "see whether the process behind that port still runs",
            RequestFailureKind::Http { status: 400, body } if body.contains("Invalid request") => {
                "the router does not know the pinned worker: it restarted, or lost its discovery lease"
            }
            RequestFailureKind::Http { status: 503, .. } => {
                "a worker is gone but still listed: see the workers' logs"
            }
            RequestFailureKind::MissingField { .. } => {
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

/// A response that was read to its end.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status, 2xx.
    pub status: u16,
    /// The whole body.
    pub body: Vec<u8>,
    /// Milliseconds from sending until the end of the body.
    pub wall_ms: f64,
}

impl Reply {
    /// The body as text.
    pub fn text(&self) -> Result<&str, RequestFailureKind> {
        std::str::from_utf8(&self.body).map_err(|_| RequestFailureKind::NotJson {
            wanted: "UTF-8",
            body: excerpt(&self.body),
        })
    }

    /// The body as JSON.
    pub fn json(&self) -> Result<serde_json::Value, RequestFailureKind> {
        serde_json::from_slice(&self.body).map_err(|_| RequestFailureKind::NotJson {
            wanted: "JSON",
            body: excerpt(&self.body),
        })
    }
}

/// Connections with a deadline for each exchange. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub struct Transport {
    http: reqwest::Client,
    deadline: Duration,
}

impl Transport {
    /// `deadline` holds for each exchange as a whole: connecting, waiting and reading.
    pub fn new(deadline: Duration) -> Result<Self, Failure> {
        let http = reqwest::Client::builder()
            // The stack is on this host or on one that was named: a proxy from the environment
            // would answer for it.
            .no_proxy()
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|error| {
                Failure::environment("cannot set up an HTTP client").found(chain(&error))
            })?;
        Ok(Self { http, deadline })
    }

    /// A POST to build on.
    pub(crate) fn post(&self, url: &str) -> reqwest::RequestBuilder {
        self.http.post(url)
    }

    /// `GET url`, with the URL as the request's name.
    pub async fn get(&self, url: &str) -> Result<Reply, RequestFailure> {
        self.exchange(self.http.get(url), url).await
    }

    /// `GET url`, read as JSON.
    pub async fn get_json(&self, url: &str) -> Result<serde_json::Value, RequestFailure> {
        let reply = self.get(url).await?;
        reply.json().map_err(|kind| RequestFailure {
            request: url.to_owned(),
            wall_ms: reply.wall_ms,
            kind,
        })
    }

    /// Sends `request` and reads the whole response.
    pub(crate) async fn exchange(
        &self,
        request: reqwest::RequestBuilder,
        name: &str,
    ) -> Result<Reply, RequestFailure> {
        let start = Instant::now();
        // Not by the clock: a process that was stopped meanwhile still reads what has come.
        let outcome = wait::within(self.deadline, read(request))
            .await
            .unwrap_or(Err(RequestFailureKind::Deadline {
                seconds: self.deadline.as_secs_f64(),
            }));
        let wall_ms = start.elapsed().as_secs_f64() * 1e3;
        match outcome {
            Ok((status, body)) => Ok(Reply {
                status,
                body,
                wall_ms,
            }),
            Err(kind) => Err(RequestFailure {
                request: name.to_owned(),
                wall_ms,
                kind,
            }),
        }
    }
}

async fn read(request: reqwest::RequestBuilder) -> Result<(u16, Vec<u8>), RequestFailureKind> {
    let mut response = request.send().await.map_err(|error| {
        if error.is_connect() {
            RequestFailureKind::Connect(chain(&error))
        } else {
            RequestFailureKind::Truncated {
                received: 0,
                why: chain(&error),
            }
        }
    })?;
    let too_large = || RequestFailureKind::TooLarge {
        limit: RESPONSE_LIMIT,
    };
    let status = response.status();
    let announced = response
        .headers()
        .get(CONTENT_LENGTH)
        .and_then(|value| value.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|bytes| bytes > RESPONSE_LIMIT) {
        return Err(too_large());
    }
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if body.len() + chunk.len() > RESPONSE_LIMIT => {
                return Err(too_large());
            }
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => break,
            Err(error) => {
                return Err(RequestFailureKind::Truncated {
                    received: body.len(),
                    why: chain(&error),
                });
            }
        }
    }
    if !status.is_success() {
        return Err(RequestFailureKind::Http {
            status: status.as_u16(),
            body: excerpt(&body),
        });
    }
    Ok((status.as_u16(), body))
}

/// An error with its causes: the library's own message names only the URL.
fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
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
