//! Arrivals become a [`Streamed`]: a pure function, called when the stream is over.

use super::arrivals::{Arrivals, Ending};
use super::chunk::{self, Chunk, Id, Said};
use super::sse::{Frame, Reader};
use super::streamed::{Counts, Outcome, Streamed, Token, Usage};
use crate::client::failure::{RequestFailureKind, excerpt};
use crate::client::parse::top2_gap;

/// What a stream declares itself as.
const EVENT_STREAM: &str = "text/event-stream";

/// Reads a whole stream. Never fails: what went wrong is its [`Outcome`], and what came until
/// then is kept. Frames behind the first bad one, an error or `[DONE]` are not read.
#[must_use]
pub fn understand(label: &str, arrivals: &Arrivals) -> Streamed {
    let mut reading = Reading::of(label, arrivals);
    if is_stream(arrivals) {
        let mut reader = Reader::default();
        for (ns, bytes) in &arrivals.pieces {
            reader.read(*ns, bytes, |frame| reading.frame(&frame));
        }
        reading.between_frames = reader.is_between_frames();
    }
    reading.finish(arrivals)
}

/// The media type, without its parameters.
fn media_type(arrivals: &Arrivals) -> Option<&str> {
    let value = arrivals.head.as_ref()?.content_type.as_deref()?;
    value.split(';').next().map(str::trim)
}

fn is_ok(arrivals: &Arrivals) -> bool {
    let head = arrivals.head.as_ref();
    head.is_some_and(|head| (200..300).contains(&head.status))
}

fn is_stream(arrivals: &Arrivals) -> bool {
    let kind = media_type(arrivals);
    is_ok(arrivals) && kind.is_some_and(|kind| kind.eq_ignore_ascii_case(EVENT_STREAM))
}

/// The gap between the two best candidates, over all tokens so far.
#[derive(Debug)]
struct Gap {
    smallest: f64,
    /// Tokens that came with two candidates.
    tokens: usize,
}

struct Reading {
    seen: Streamed,
    /// Token strings beside log-probabilities: for servers that give no ids.
    spelled: Vec<String>,
    gap: Gap,
    failure: Option<RequestFailureKind>,
    between_frames: bool,
}

impl Reading {
    fn of(label: &str, arrivals: &Arrivals) -> Self {
        Self {
            seen: Streamed {
                label: label.to_owned(),
                id: None,
                connection: arrivals.connection,
                status: arrivals.head.as_ref().map(|head| head.status),
                sent_ns: arrivals.sent_ns,
                head_ns: arrivals.head.as_ref().map(|head| head.ns),
                tokens: Vec::with_capacity(arrivals.pieces.len()),
                done_ns: None,
                ended_ns: arrivals.ended_ns,
                finish: Default::default(),
                usage: None,
                token_ids: Vec::new(),
                served_by: None,
                prefilled_by: None,
                smallest_top2_gap: None,
                counts: Counts {
                    pieces: arrivals.pieces.len(),
                    bytes: arrivals.bytes(),
                    ..Counts::default()
                },
                outcome: Outcome::Complete,
            },
            spelled: Vec::new(),
            gap: Gap {
                smallest: f64::INFINITY,
                tokens: 0,
            },
            failure: None,
            between_frames: true,
        }
    }

    fn frame(&mut self, frame: &Frame<'_>) {
        if self.failure.is_some() || self.seen.done_ns.is_some() {
            return;
        }
        match frame.data {
            Some(_) => self.seen.counts.frames += 1,
            None if frame.event.is_none() => self.seen.counts.comments += 1,
            None => {}
        }
        let data = || excerpt(frame.data.unwrap_or_default().as_bytes());
        let number = self.seen.counts.frames;
        match chunk::read(frame) {
            Said::Nothing => {}
            Said::Done => self.seen.done_ns = Some(frame.ns),
            Said::Chunk(chunk) => self.chunk(frame.ns, *chunk),
            Said::Error(message) => {
                self.failure = Some(RequestFailureKind::ErrorFrame { message });
            }
            Said::Garbled(wanted) => {
                self.failure = Some(RequestFailureKind::FrameNotJson {
                    frame: number,
                    wanted,
                    data: data(),
                });
            }
            Said::Other(why) => {
                self.failure = Some(RequestFailureKind::FrameShape {
                    frame: number,
                    why,
                    data: data(),
                });
            }
        }
    }

    fn chunk(&mut self, ns: u64, chunk: Chunk<'_>) {
        let seen = &mut self.seen;
        if seen.id.is_none() {
            seen.id = chunk.id.map(|id| id.0.into_owned());
        }
        for choice in chunk.choices.into_iter().flatten() {
            if let Some((text, thinks)) = choice.text() {
                seen.tokens.push(Token {
                    ns,
                    choice: choice.index,
                    text: text.to_owned(),
                    thinks,
                });
            }
            if let Some(logprobs) = choice.logprobs {
                self.spelled.extend(logprobs.tokens.into_iter().flatten());
                for top in logprobs.top_logprobs.into_iter().flatten().flatten() {
                    // A token whose two best candidates share one spelling has only one entry.
                    if let Some(gap) = top2_gap(top.into_values()) {
                        self.gap.smallest = self.gap.smallest.min(gap);
                        self.gap.tokens += 1;
                    }
                }
            }
            if let Some(reason) = choice.finish_reason {
                seen.finish.insert(choice.index, reason.0.into_owned());
            }
        }
        if let Some(usage) = chunk.usage
            && let (Some(prompt_tokens), Some(completion_tokens)) =
                (usage.prompt_tokens, usage.completion_tokens)
        {
            seen.usage = Some(Usage {
                prompt_tokens,
                completion_tokens,
                cached_tokens: usage.prompt_tokens_details.and_then(|d| d.cached_tokens),
            });
        }
        let Some(nvext) = chunk.nvext else {
            return;
        };
        let ids = nvext.completion_token_ids.into_iter().flatten();
        seen.token_ids.extend(ids.map(|id| id.to_string()));
        if let Some(workers) = nvext.worker_id {
            let decode = (
                workers.decode_worker_id,
                "/nvext/worker_id/decode_worker_id",
            );
            let prefill = (
                workers.prefill_worker_id,
                "/nvext/worker_id/prefill_worker_id",
            );
            self.seen.served_by = self.worker(decode).or(self.seen.served_by);
            self.seen.prefilled_by = self.worker(prefill).or(self.seen.prefilled_by);
        }
    }

    fn worker(&mut self, (id, pointer): (Option<Id>, &'static str)) -> Option<u64> {
        match id?.exact() {
            Ok(id) => Some(id),
            Err(found) => {
                self.failure
                    .get_or_insert(RequestFailureKind::MissingField { pointer, found });
                None
            }
        }
    }

    fn finish(mut self, arrivals: &Arrivals) -> Streamed {
        if self.seen.token_ids.is_empty() {
            let spelled = std::mem::take(&mut self.spelled).into_iter();
            self.seen.token_ids = spelled
                .map(|token| match token.strip_prefix("token_id:") {
                    Some(id) => id.to_owned(),
                    None => token,
                })
                .collect();
        }
        if self.gap.tokens > 0 && self.gap.tokens >= self.seen.token_ids.len() {
            self.seen.smallest_top2_gap = Some(self.gap.smallest);
        }
        self.seen.outcome = self.outcome(arrivals);
        self.seen
    }

    /// What happened, the nearest cause first.
    fn outcome(&mut self, arrivals: &Arrivals) -> Outcome {
        if let Some(failure) = self.failure.take() {
            return Outcome::Failed(failure);
        }
        if self.seen.done_ns.is_some() {
            // However the connection ended after that: the answer is there.
            return self
                .complete(arrivals)
                .map_or(Outcome::Complete, Outcome::Failed);
        }
        match self.unfinished(arrivals) {
            Some(failure) => Outcome::Failed(failure),
            None => Outcome::Disconnected,
        }
    }

    /// What an answer lacks that came down to `[DONE]`.
    fn complete(&self, arrivals: &Arrivals) -> Option<RequestFailureKind> {
        let seen = &self.seen;
        if self.is_empty() {
            return Some(RequestFailureKind::EmptyCompletion {
                body: excerpt(&arrivals.body()),
            });
        }
        let unfinished = seen
            .tokens
            .iter()
            .any(|t| !seen.finish.contains_key(&t.choice));
        let pointer = match (seen.finish.is_empty() || unfinished, seen.usage) {
            (true, _) => "/choices/0/finish_reason",
            (false, None) => "/usage/completion_tokens",
            (false, Some(_)) => return None,
        };
        Some(RequestFailureKind::MissingField {
            pointer,
            found: excerpt(&arrivals.body()),
        })
    }

    /// A token may have no text of its own, so text alone decides nothing.
    fn is_empty(&self) -> bool {
        let counted = self
            .seen
            .usage
            .is_some_and(|usage| usage.completion_tokens == 0);
        counted || (self.seen.tokens.is_empty() && self.seen.token_ids.is_empty())
    }

    /// Why there is no `[DONE]`; `None` if the client went.
    fn unfinished(&self, arrivals: &Arrivals) -> Option<RequestFailureKind> {
        let received = self.seen.counts.bytes;
        let cut = |why: &str| RequestFailureKind::Truncated {
            received,
            why: why.to_owned(),
        };
        if let Ending::NoConnection(why) = &arrivals.ending {
            return Some(RequestFailureKind::Connect(why.clone()));
        }
        let Some(head) = &arrivals.head else {
            return match &arrivals.ending {
                Ending::Deadline { seconds } => {
                    Some(RequestFailureKind::NoHead { seconds: *seconds })
                }
                Ending::HungUp => None,
                Ending::Cut(why) => Some(cut(why)),
                _ => Some(cut("no head of a response")),
            };
        };
        if !is_ok(arrivals) {
            return Some(RequestFailureKind::Http {
                status: head.status,
                body: excerpt(&arrivals.body()),
            });
        }
        if !is_stream(arrivals) {
            return Some(RequestFailureKind::NotAStream {
                content_type: head
                    .content_type
                    .clone()
                    .unwrap_or_else(|| "nothing".into()),
                body: excerpt(&arrivals.body()),
            });
        }
        let chunks = self.seen.chunks();
        match &arrivals.ending {
            Ending::HungUp => None,
            Ending::Deadline { seconds } if self.seen.tokens.is_empty() => {
                Some(RequestFailureKind::NoFirstToken { seconds: *seconds })
            }
            Ending::Deadline { seconds } => Some(RequestFailureKind::Stalled {
                seconds: *seconds,
                chunks,
            }),
            Ending::TooLarge { limit } => Some(RequestFailureKind::TooLarge { limit: *limit }),
            Ending::Cut(why) | Ending::NoConnection(why) => Some(cut(why)),
            Ending::End if !self.between_frames => Some(cut("the body ends within a frame")),
            Ending::End if self.seen.finish.is_empty() => {
                Some(cut("the body ends before the answer does"))
            }
            Ending::End if self.is_empty() => Some(RequestFailureKind::EmptyCompletion {
                body: excerpt(&arrivals.body()),
            }),
            Ending::End => Some(RequestFailureKind::WithoutDone { chunks }),
        }
    }
}

#[cfg(test)]
mod tests;
