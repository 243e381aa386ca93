//! One HTTP exchange with a bound on time and size.

use std::time::{Duration, Instant};

use reqwest::header::CONTENT_LENGTH;

use super::failure::{RequestFailure, RequestFailureKind, chain, excerpt};
use crate::failure::Failure;
use crate::stack::wait;

/// Largest response that is read, in bytes. A metrics page of a busy worker has 0.2 MB, a
/// completion a few kB.
pub const RESPONSE_LIMIT: usize = 16 << 20;

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
