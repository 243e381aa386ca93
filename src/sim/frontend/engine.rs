//! One conversation with an engine: a request goes out, lines of [`Reply`] come in as they are
//! made. Also the engine that is built in for `serve`.

use std::time::Duration;

use reqwest::{Client, Response};
use tokio::time::Instant;

use crate::sim::model::{Held, Next, Shape};
use crate::sim::wire::{Generate, Registration, Reply};

/// Longest line that is read, in bytes.
const LINE_LIMIT: usize = 1 << 20;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Broken {
    /// Nobody listens there.
    Unreachable,
    /// It broke off, or speaks no sense.
    Cut,
}

/// The engine that is built in: fixed numbers at a fixed pace.
#[derive(Clone, Copy, Debug)]
pub(super) struct BuiltIn {
    /// Tokens of an answer where the request does not say.
    pub(super) tokens: u32,
    /// Between two tokens, and before the first.
    pub(super) pace: Duration,
}

/// An answer on its way.
#[derive(Debug)]
pub(super) enum Lines {
    /// From an engine.
    Remote {
        response: Response,
        /// Bytes that are no whole line yet, from `at` on.
        buffer: Vec<u8>,
        at: usize,
    },
    /// From the one that is built in.
    BuiltIn {
        began: Instant,
        pace: Duration,
        prompt: u64,
        tokens: u32,
        made: u32,
    },
}

/// Sends a request to an engine.
///
/// # Errors
/// [`Broken`].
pub(super) async fn generate(
    http: &Client,
    engine: &Registration,
    built_in: Option<BuiltIn>,
    request: &Generate,
) -> Result<Lines, Broken> {
    if let Some(built_in) = built_in {
        return Ok(Lines::BuiltIn {
            began: Instant::now(),
            pace: built_in.pace,
            prompt: request.tokens.len() as u64,
            tokens: request.max_tokens,
            made: 0,
        });
    }
    let url = format!("http://{}/generate", engine.request_address);
    let response = http.post(url).json(request).send().await;
    match response {
        Ok(response) if response.status().is_success() => Ok(Lines::Remote {
            response,
            buffer: Vec::new(),
            at: 0,
        }),
        Ok(_) => Err(Broken::Cut),
        Err(error) if error.is_connect() => Err(Broken::Unreachable),
        Err(_) => Err(Broken::Cut),
    }
}

impl Lines {
    /// The next line.
    ///
    /// # Errors
    /// [`Broken::Cut`] when the answer ends before it said so, or is no answer.
    pub(super) async fn next(&mut self) -> Result<Reply, Broken> {
        match self {
            Self::Remote {
                response,
                buffer,
                at,
            } => loop {
                if let Some(end) = buffer[*at..].iter().position(|byte| *byte == b'\n') {
                    let line = &buffer[*at..*at + end];
                    let reply = serde_json::from_slice(line).map_err(|_| Broken::Cut);
                    *at += end + 1;
                    return reply;
                }
                buffer.drain(..*at);
                *at = 0;
                match response.chunk().await {
                    Ok(Some(chunk)) if buffer.len() + chunk.len() <= LINE_LIMIT => {
                        buffer.extend_from_slice(&chunk);
                    }
                    Ok(_) | Err(_) => return Err(Broken::Cut),
                }
            },
            Self::BuiltIn {
                began,
                pace,
                prompt,
                tokens,
                made,
            } => {
                if made == tokens {
                    return Ok(Reply::Done {
                        finish_reason: "length".into(),
                        prompt_tokens: *prompt,
                        completion_tokens: u64::from(*made),
                        cached_tokens: 0,
                        handover: None,
                    });
                }
                *made += 1;
                // From the beginning, so that a late token does not delay those after it.
                tokio::time::sleep_until(*began + *pace * *made).await;
                Ok(token(built_in_token(*made)))
            }
        }
    }
}

/// What the built-in engine says at a position: the same in every answer.
fn built_in_token(position: u32) -> Next {
    let shape = Shape::DENSE;
    Held::nothing(0, shape, 0).next(&[position], shape.vocabulary)
}

fn token(next: Next) -> Reply {
    Reply::Token {
        id: next.token,
        logprob: next.logprob,
        runner_up: next.runner_up,
        runner_up_logprob: next.runner_up_logprob,
    }
}
