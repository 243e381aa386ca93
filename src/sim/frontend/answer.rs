//! Answers, whole and in chunks, in the shapes of Dynamo 1.6.1.

use std::io::Write as _;
use std::time::Instant;

use axum::body::Bytes;
use serde_json::{Map, Value, json};

use super::request::{Ask, Kind};
use super::sse;
use crate::sim::fault::{Fault, Faults};
use crate::sim::model;

/// One generated token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Token {
    pub(super) id: u32,
    pub(super) logprob: f64,
    pub(super) runner_up: u32,
    pub(super) runner_up_logprob: f64,
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) finish_reason: Option<String>,
    pub(super) prompt_tokens: u64,
    pub(super) completion_tokens: u64,
    pub(super) cached_tokens: Option<u64>,
    /// When the first token came.
    pub(super) first: Option<Instant>,
}

impl End {
    /// What the answer says of the end.
    pub(super) fn tell(mut self, faults: &Faults) -> Self {
        if faults.tell(Fault::UsageOff) {
            self.prompt_tokens = self.prompt_tokens.saturating_sub(1);
        }
        if faults.tell(Fault::CachedTokensAbsent) {
            self.cached_tokens = None;
        }
        if faults.tell(Fault::FinishReasonAbsent) {
            self.finish_reason = None;
        }
        self
    }
}

/// The parts of a token's frame that are the same for every token.
#[derive(Debug)]
pub(super) struct Mould {
    /// Until the choice.
    head: String,
    /// Until the token's id, or the end.
    middle: String,
    /// After the id; empty where there is none.
    tail: String,
}

/// What is the same in every document of one answer.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) ask: Ask,
    pub(super) id: String,
    /// Seconds since 1970.
    pub(super) created: u64,
    /// Who prefilled and who decoded, as the answer says it; `None`: it does not.
    pub(super) workers: Option<(u64, u64)>,
    pub(super) prompt: Vec<u32>,
    pub(super) received: Instant,
    /// Milliseconds since 1970.
    pub(super) received_ms: u64,
    pub(super) routed: Instant,
    /// Leading blocks that the router knew of, as a share of the prompt's.
    pub(super) kv_hit_rate: f64,
}

impl Answer {
    /// A whole answer.
    pub(super) fn whole(&self, tokens: &[Token], end: &End) -> Value {
        let ids: Vec<u32> = tokens.iter().map(|token| token.id).collect();
        let text = model::text(&ids);
        let mut choice = match self.ask.kind {
            Kind::Completion => {
                let mut choice = json!({"text": text, "index": 0});
                if self.ask.logprobs.is_some() {
                    choice["logprobs"] = self.logprobs(tokens);
                }
                choice
            }
            Kind::Chat => json!({
                "index": 0,
                "message": {"content": text, "refusal": null, "role": "assistant"},
                "finish_reason": null,
                "logprobs": self.logprobs(tokens),
            }),
        };
        if let Some(reason) = &end.finish_reason {
            choice["finish_reason"] = json!(reason);
        }
        let nvext = self.nvext(tokens, tokens, Some(end));
        self.document(vec![choice], Some(end), nvext, false)
    }

    /// A chunk with a token; `end` with the last one, and `all` that were sent.
    pub(super) fn token(&self, token: Token, all: &[Token], end: Option<&End>) -> Value {
        self.chunk(&[token], all, end)
    }

    /// A chunk that only ends.
    pub(super) fn last(&self, all: &[Token], end: &End) -> Value {
        self.chunk(&[], all, Some(end))
    }

    fn chunk(&self, new: &[Token], all: &[Token], end: Option<&End>) -> Value {
        let reason = end.and_then(|end| end.finish_reason.as_deref());
        // Who speaks is said once.
        let choice = self.choice(new, reason, all.len() == new.len());
        let nvext = self.nvext(new, all, end);
        self.document(vec![choice], None, nvext, true)
    }

    fn choice(&self, new: &[Token], reason: Option<&str>, first: bool) -> Value {
        let ids: Vec<u32> = new.iter().map(|token| token.id).collect();
        let text = model::text(&ids);
        match self.ask.kind {
            Kind::Completion => {
                let mut choice = json!({"text": text, "index": 0});
                if self.ask.logprobs.is_some() {
                    choice["logprobs"] = self.logprobs(new);
                }
                if let Some(reason) = reason {
                    choice["finish_reason"] = json!(reason);
                }
                choice
            }
            Kind::Chat => json!({
                "index": 0,
                "delta": match (new, first) {
                    ([], _) => json!({}),
                    (_, true) => json!({"content": text, "role": "assistant"}),
                    (_, false) => json!({"content": text}),
                },
                "finish_reason": reason,
                "logprobs": if new.is_empty() { Value::Null } else { self.logprobs(new) },
            }),
        }
    }

    /// What surrounds every token in its frame: a stream has a thousand neighbours, and builds
    /// this once.
    pub(super) fn mould(&self) -> Mould {
        const CHOICE: &str = "@choice@";
        const ID: u32 = u32::MAX;
        let token = Token {
            id: ID,
            logprob: 0.0,
            runner_up: 0,
            runner_up_logprob: 0.0,
        };
        let nvext = self.nvext(&[token], &[], None);
        let document = self.document(vec![json!(CHOICE)], None, nvext, true);
        let frame = String::from_utf8_lossy(&sse::data(&document)).into_owned();
        let (head, rest) = frame
            .split_once(&format!("\"{CHOICE}\""))
            .unwrap_or((&frame, ""));
        let ids = format!("\"completion_token_ids\":[{ID}]");
        let (middle, tail) = match rest.rsplit_once(&ids) {
            Some((middle, tail)) => (
                format!("{middle}\"completion_token_ids\":["),
                format!("]{tail}"),
            ),
            None => (rest.to_owned(), String::new()),
        };
        Mould {
            head: head.to_owned(),
            middle,
            tail,
        }
    }

    /// The frame of a token that is neither the first nor the last one.
    pub(super) fn frame(&self, mould: &Mould, token: Token) -> Bytes {
        let mut frame = Vec::with_capacity(mould.head.len() + mould.middle.len() + 256);
        frame.extend_from_slice(mould.head.as_bytes());
        // Writing to memory cannot fail, and spellings are letters, a space and `<|>`.
        let _ = match (self.ask.logprobs, self.ask.kind) {
            (Some(_), _) => write!(frame, "{}", self.choice(&[token], None, false)),
            (None, Kind::Completion) => {
                let text = model::text(&[token.id]);
                write!(frame, "{{\"text\":\"{text}\",\"index\":0}}")
            }
            (None, Kind::Chat) => {
                let text = model::text(&[token.id]);
                write!(
                    frame,
                    "{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"finish_reason\":null,\"logprobs\":null}}"
                )
            }
        };
        frame.extend_from_slice(mould.middle.as_bytes());
        if !mould.tail.is_empty() {
            let _ = write!(frame, "{}", token.id);
            frame.extend_from_slice(mould.tail.as_bytes());
        }
        frame.into()
    }

    /// The chunk with the usage, where it was asked for.
    pub(super) fn usage(&self, end: &End) -> Value {
        self.document(Vec::new(), Some(end), None, true)
    }

    fn document(
        &self,
        choices: Vec<Value>,
        usage: Option<&End>,
        nvext: Option<Value>,
        chunk: bool,
    ) -> Value {
        let chat = self.ask.kind == Kind::Chat;
        let mut document = json!({
            "id": self.id,
            "choices": choices,
            "created": self.created,
            "model": self.ask.model,
        });
        if !chat {
            document["system_fingerprint"] = Value::Null;
        }
        document["object"] = json!(match (chat, chunk) {
            (false, _) => "text_completion",
            (true, false) => "chat.completion",
            (true, true) => "chat.completion.chunk",
        });
        if let Some(end) = usage {
            document["usage"] = self.usage_of(end);
        } else if !chat {
            document["usage"] = Value::Null;
        }
        if let Some(nvext) = nvext {
            document["nvext"] = nvext;
        }
        document
    }

    fn usage_of(&self, end: &End) -> Value {
        let details = match (end.cached_tokens, self.ask.kind) {
            (None, _) => Value::Null,
            (Some(cached), Kind::Completion) => {
                json!({"audio_tokens": null, "cached_tokens": cached})
            }
            (Some(cached), Kind::Chat) => json!({"cached_tokens": cached}),
        };
        json!({
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
            "prompt_tokens_details": details,
        })
    }

    /// `new` are this document's tokens, `all` those of the answer so far.
    fn nvext(&self, new: &[Token], all: &[Token], end: Option<&End>) -> Option<Value> {
        let extras = self.ask.extras;
        let ids = |tokens: &[Token]| tokens.iter().map(|token| token.id).collect::<Vec<_>>();
        let mut nvext = Map::new();
        if let (true, Some((prefill, decode))) = (extras.worker_id, self.workers) {
            let workers = json!({
                "prefill_worker_id": prefill,
                "prefill_dp_rank": 0,
                "decode_worker_id": decode,
                "decode_dp_rank": 0,
            });
            nvext.insert("worker_id".into(), workers);
        }
        if let (true, Some(end)) = (extras.timing, end) {
            nvext.insert("timing".into(), self.timing(end));
        }
        if let (true, Some(end)) = (extras.engine_data, end) {
            let mut data = json!({
                "prompt_token_ids": self.prompt,
                "kv_cache_hit": {
                    "prompt_tokens": end.prompt_tokens,
                    "reused_tokens": end.cached_tokens.unwrap_or(0),
                },
                "completion_token_ids": ids(all),
                "finished": true,
            });
            if self.ask.logprobs.is_some() {
                let logprobs: Vec<f64> = all.iter().map(|token| token.logprob).collect();
                data["completion_logprobs"] = json!(logprobs);
            }
            nvext.insert("engine_data".into(), data);
        }
        if extras.prompt_token_ids && end.is_some() {
            nvext.insert("prompt_token_ids".into(), json!(self.prompt));
        }
        if extras.completion_token_ids && !new.is_empty() {
            nvext.insert("completion_token_ids".into(), json!(ids(new)));
        }
        (!nvext.is_empty()).then_some(Value::Object(nvext))
    }

    fn timing(&self, end: &End) -> Value {
        let ms = |from: Instant, to: Instant| to.duration_since(from).as_secs_f64() * 1e3;
        let first = end.first.unwrap_or(self.routed);
        json!({
            "request_received_ms": self.received_ms,
            "prefill_wait_time_ms": ms(self.received, self.routed),
            "prefill_time_ms": ms(self.routed, first),
            "ttft_ms": ms(self.received, first),
            "total_time_ms": ms(self.received, Instant::now()),
            "kv_hit_rate": self.kv_hit_rate,
            "router_queue_depth": 0,
        })
    }

    fn logprobs(&self, tokens: &[Token]) -> Value {
        let Some(shown) = self.ask.logprobs else {
            return Value::Null;
        };
        let candidates = |token: &Token| {
            let both = [
                (token.id, token.logprob),
                (token.runner_up, token.runner_up_logprob),
            ];
            both.into_iter().take(usize::from(shown))
        };
        if self.ask.kind == Kind::Chat {
            let content: Vec<Value> = tokens
                .iter()
                .map(|token| {
                    let tops: Vec<Value> = candidates(token)
                        .map(|(id, logprob)| self.chat_token(id, logprob))
                        .collect();
                    let mut entry = self.chat_token(token.id, token.logprob);
                    entry["token_id"] = json!(token.id);
                    entry["top_logprobs"] = json!(tops);
                    entry
                })
                .collect();
            return json!({"content": content, "refusal": null});
        }
        let spell = |id| self.spell(id);
        json!({
            "tokens": tokens.iter().map(|token| spell(token.id)).collect::<Vec<_>>(),
            "token_logprobs": tokens.iter().map(|token| single(token.logprob)).collect::<Vec<_>>(),
            "top_logprobs": tokens
                .iter()
                .map(|token| {
                    candidates(token)
                        .map(|(id, logprob)| (spell(id), json!(logprob)))
                        .collect::<Map<_, _>>()
                })
                .collect::<Vec<_>>(),
            "text_offset": [],
        })
    }

    fn chat_token(&self, id: u32, logprob: f64) -> Value {
        let text = self.spell(id);
        json!({"token": text, "logprob": single(logprob), "bytes": text.as_bytes()})
    }

    fn spell(&self, id: u32) -> String {
        if self.ask.tokens_as_ids {
            format!("token_id:{id}")
        } else {
            model::text(&[id])
        }
    }
}

/// A log-probability as the server shows it beside a token: in single precision.
fn single(logprob: f64) -> f64 {
    (logprob as f32).to_string().parse().unwrap_or(logprob)
}

#[cfg(test)]
mod tests {
    use super::super::request::{Extras, Pins, Prompt};
    use super::*;

    #[test]
    fn a_moulded_frame_is_the_frame() {
        let token = Token {
            id: 17,
            logprob: -0.5,
            runner_up: 3,
            runner_up_logprob: -0.75,
        };
        for kind in [Kind::Completion, Kind::Chat] {
            for logprobs in [None, Some(2)] {
                for completion_token_ids in [false, true] {
                    for worker_id in [false, true] {
                        let answer = Answer {
                            ask: Ask {
                                kind,
                                model: "ti\"ny".into(),
                                prompt: Prompt::Ids(vec![1]),
                                max_tokens: None,
                                stream: true,
                                include_usage: false,
                                logprobs,
                                tokens_as_ids: true,
                                salt: None,
                                extras: Extras {
                                    worker_id,
                                    completion_token_ids,
                                    ..Extras::default()
                                },
                                pins: Pins::default(),
                            },
                            id: "cmpl-1".into(),
                            created: 1,
                            workers: Some((1, u64::MAX)),
                            prompt: vec![1],
                            received: Instant::now(),
                            received_ms: 1,
                            routed: Instant::now(),
                            kv_hit_rate: 0.0,
                        };
                        let frame = answer.frame(&answer.mould(), token);
                        let document = answer.token(token, &[token, token], None);
                        assert_eq!(frame, sse::data(&document));
                    }
                }
            }
        }
    }
}
