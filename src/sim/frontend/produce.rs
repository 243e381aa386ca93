//! What a streamed answer says, frame by frame.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Bytes;

use super::answer::{Answer, End, Token};
use super::count::Count;
use super::engine::Lines;
use super::refusal::Refusal;
use super::sse;
use super::stream::{Gone, Out};
use crate::sim::fault::{Fault, Faults};
use crate::sim::wire::Reply;

/// What the front door knows of an answer's end before it comes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ending {
    /// Half of the tokens were asked for, and it is to look as if the model had stopped.
    pub(super) stops_early: bool,
    /// What the prefill engine found, where it is another.
    pub(super) cached_tokens: Option<u64>,
}

impl Ending {
    /// The end that an engine tells of; `None` for a line that is no end.
    pub(super) fn end(self, done: Reply, first: Option<Instant>) -> Option<End> {
        let Reply::Done {
            finish_reason,
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            ..
        } = done
        else {
            return None;
        };
        Some(End {
            finish_reason: Some(if self.stops_early {
                "stop".to_owned()
            } else {
                finish_reason
            }),
            prompt_tokens,
            completion_tokens,
            cached_tokens: Some(self.cached_tokens.unwrap_or(cached_tokens)),
            first,
        })
    }
}

/// Which of `tokens` is lost when one is: neither the first nor the last, if there are three.
pub(super) fn lost(tokens: u32) -> u32 {
    tokens.saturating_sub(1) / 2
}

/// A streamed answer.
pub(super) struct Stream {
    pub(super) faults: Arc<Faults>,
    pub(super) answer: Answer,
    pub(super) lines: Lines,
    pub(super) max_tokens: u32,
    pub(super) ending: Ending,
    pub(super) count: Count,
}

/// Why a stream ends before its end.
enum Broken {
    /// Nobody reads it any more.
    Gone,
    /// The engine failed.
    Engine(String),
    /// A lie, told in full.
    Told,
}

impl From<Gone> for Broken {
    fn from(Gone: Gone) -> Self {
        Self::Gone
    }
}

/// Lies of one stream, and the token after which they are told.
#[derive(Default)]
struct Lies {
    half: u32,
    cut: bool,
    stalls: bool,
    error: bool,
    lost: Option<u32>,
}

impl Stream {
    /// Writes it.
    pub(super) async fn run(mut self, out: Out) {
        match self.frames(&out).await {
            Ok(()) | Err(Broken::Told) => {}
            Err(Broken::Gone) => self.count.disconnects(),
            Err(Broken::Engine(message)) => {
                self.count.fails();
                let _ = out.send(sse::error(&message)).await;
            }
        }
    }

    async fn frames(&mut self, out: &Out) -> Result<(), Broken> {
        if self.faults.tell(Fault::ErrorAfter200) {
            self.count.fails();
            out.send(sse::error(&Refusal::failed().message)).await?;
            return Err(Broken::Told);
        }
        let empty = self.faults.tell(Fault::EmptyCompletion);
        let lies = self.lies();
        let mould = self.answer.mould();
        let mut sent: Vec<Token> = Vec::new();
        let mut seen = 0;
        let mut first = None;
        // The end, and whether a chunk has said it already.
        let (end, said) = loop {
            let (id, logprob, runner_up, runner_up_logprob) = match self.lines.next().await {
                Ok(Reply::Token {
                    id,
                    logprob,
                    runner_up,
                    runner_up_logprob,
                }) => (id, logprob, runner_up, runner_up_logprob),
                Ok(Reply::Failed { message, .. }) => return Err(Broken::Engine(message)),
                Ok(done @ Reply::Done { .. }) => {
                    let end = self.ending.end(done, first).ok_or_else(cut_off)?;
                    break (self.finish(end, empty), false);
                }
                Err(_) => return Err(cut_off()),
            };
            first.get_or_insert_with(Instant::now);
            self.count.token();
            seen += 1;
            let token = Token {
                id,
                logprob,
                runner_up,
                runner_up_logprob,
            };
            let dropped = empty || lies.lost == Some(seen - 1);
            if !dropped {
                sent.push(token);
            }
            // The finish reason stands in the chunk of its last token.
            if seen == self.max_tokens {
                let done = match self.lines.next().await {
                    Ok(Reply::Failed { message, .. }) => return Err(Broken::Engine(message)),
                    Ok(done) => self.ending.end(done, first),
                    Err(_) => None,
                };
                let end = self.finish(done.ok_or_else(cut_off)?, empty);
                if dropped {
                    out.send(sse::data(&self.answer.last(&sent, &end))).await?;
                } else {
                    let frame = sse::data(&self.answer.token(token, &sent, Some(&end)));
                    self.hand_over(out, frame, seen, &lies).await?;
                }
                break (end, true);
            }
            if !dropped {
                let frame = match sent.as_slice() {
                    [_] => sse::data(&self.answer.token(token, &sent, None)),
                    _ => self.answer.frame(&mould, token),
                };
                self.hand_over(out, frame, seen, &lies).await?;
            }
        };
        if !said {
            out.send(sse::data(&self.answer.last(&sent, &end))).await?;
        }
        if self.answer.ask.include_usage {
            out.send(sse::data(&self.answer.usage(&end))).await?;
        }
        if !self.faults.tell(Fault::StreamWithoutDone) {
            out.send(sse::DONE).await?;
        }
        Ok(())
    }

    fn lies(&self) -> Lies {
        Lies {
            half: (self.max_tokens / 2).max(1),
            cut: self.faults.tell(Fault::StreamCut),
            stalls: self.faults.tell(Fault::StreamStalls),
            error: self.faults.tell(Fault::StreamErrorFrame),
            lost: self
                .faults
                .tell(Fault::TokenDropped)
                .then(|| lost(self.max_tokens)),
        }
    }

    fn finish(&mut self, mut end: End, empty: bool) -> End {
        self.count.ends(&end);
        if empty {
            (end.completion_tokens, end.finish_reason) = (0, Some("stop".into()));
        }
        end.tell(&self.faults)
    }

    /// Sends a token's frame, and what is told in the middle.
    async fn hand_over(
        &mut self,
        out: &Out,
        frame: Bytes,
        seen: u32,
        lies: &Lies,
    ) -> Result<(), Broken> {
        if seen == lies.half && lies.cut {
            out.send(frame.slice(..frame.len() / 2)).await?;
            out.cut().await;
            return Err(Broken::Told);
        }
        out.token(frame).await?;
        if seen == lies.half && lies.stalls {
            // Until the client gives up and drops the body.
            std::future::pending::<()>().await;
        }
        if seen == lies.half && lies.error {
            self.count.fails();
            out.send(sse::error(&Refusal::failed().message)).await?;
            out.send(sse::DONE).await?;
            return Err(Broken::Told);
        }
        Ok(())
    }
}

/// What Dynamo says when an engine's stream ends in its middle.
fn cut_off() -> Broken {
    Broken::Engine("Stream ended before generation completed".to_owned())
}
