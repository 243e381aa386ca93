//! What to ask for, streamed: the same fields as [`Client`](crate::client::Client) sends, and usage
//! in the last chunk.

use hyper::body::Bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::client::{self, Completion, EXTRA_FIELDS, Pin};

/// A chat of one message. Greedy.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Chat {
    /// Served model name.
    pub model: String,
    /// What the user says.
    pub message: String,
    /// Tokens to generate.
    pub max_tokens: u32,
    /// Generate all of `max_tokens`, whatever the model says.
    pub ignore_eos: bool,
    /// Who has to serve it.
    pub pin: Option<Pin>,
    /// Goes into every block hash.
    pub cache_salt: Option<String>,
}

/// One streamed request, ready to be sent. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Ask {
    pub(super) label: String,
    pub(super) path: &'static str,
    pub(super) pin: Option<Pin>,
    pub(super) body: Bytes,
    pub(super) hang_up: Option<usize>,
}

impl Ask {
    /// A completion, with everything that an observation needs: the two best log-probabilities of
    /// each token, its id, and who served it. `label` names it in the observation and in the
    /// failure.
    #[must_use]
    pub fn completion(completion: &Completion, label: &str) -> Self {
        let body = streamed(client::body(completion));
        Self::of("/v1/completions", completion.pin, &body, label)
    }

    /// The same without log-probabilities: what a load generator of the field sends.
    #[must_use]
    pub fn plain_completion(completion: &Completion, label: &str) -> Self {
        let mut body = streamed(client::body(completion));
        if let Value::Object(fields) = &mut body {
            fields.remove("logprobs");
            fields.remove("return_tokens_as_token_ids");
        }
        Self::of("/v1/completions", completion.pin, &body, label)
    }

    /// A chat.
    #[must_use]
    pub fn chat(chat: &Chat, label: &str) -> Self {
        let mut body = json!({
            "model": chat.model,
            "messages": [{"role": "user", "content": chat.message}],
            "max_tokens": chat.max_tokens,
            "temperature": 0,
            "ignore_eos": chat.ignore_eos,
            "nvext": {"extra_fields": EXTRA_FIELDS},
        });
        if let Some(salt) = &chat.cache_salt {
            body["cache_salt"] = json!(salt);
        }
        Self::of("/v1/chat/completions", chat.pin, &streamed(body), label)
    }

    fn of(path: &'static str, pin: Option<Pin>, body: &Value, label: &str) -> Self {
        Self {
            label: label.to_owned(),
            path,
            pin,
            body: body.to_string().into(),
            hang_up: None,
        }
    }

    /// Closes the connection in mid-stream, after `chunks` chunks with text; 0: as soon as the
    /// head has come.
    #[must_use]
    pub fn disconnect_after(mut self, chunks: usize) -> Self {
        self.hang_up = Some(chunks);
        self
    }

    /// Its label.
    #[must_use]
    pub fn label(&self) -> &str {
        &self.label
    }
}

fn streamed(mut body: Value) -> Value {
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Input;

    #[test]
    fn a_streamed_request_differs_from_a_whole_one_by_the_stream_alone() {
        let completion = Completion {
            model: "tiny".into(),
            prompt: Input::Ids(vec![1, 2]),
            max_tokens: 3,
            ignore_eos: true,
            pin: Some(Pin::Worker(u64::MAX)),
            cache_salt: Some("s".into()),
        };
        let read = |ask: &Ask| -> Value { serde_json::from_slice(&ask.body).unwrap() };
        let whole = client::body(&completion);
        let ask = Ask::completion(&completion, "cold");
        let mut sent = read(&ask);
        assert_eq!(sent["stream_options"], json!({"include_usage": true}));
        sent.as_object_mut().unwrap().remove("stream_options");
        assert_eq!(sent["stream"], json!(true));
        sent["stream"] = json!(false);
        assert_eq!(sent, whole);
        assert_eq!(
            (ask.label(), ask.pin),
            ("cold", Some(Pin::Worker(u64::MAX)))
        );

        let mut plain = read(&Ask::plain_completion(&completion, "cold"));
        assert_eq!(plain["logprobs"], Value::Null);
        plain["logprobs"] = json!(2);
        plain["return_tokens_as_token_ids"] = json!(true);
        assert_eq!(plain, read(&ask));

        let chat = Chat {
            model: "tiny".into(),
            message: "hello".into(),
            max_tokens: 3,
            ignore_eos: true,
            pin: None,
            cache_salt: Some("s".into()),
        };
        let sent = read(&Ask::chat(&chat, "chat"));
        assert_eq!(sent["nvext"], whole["nvext"]);
        assert_eq!(sent["cache_salt"], whole["cache_salt"]);
        assert_eq!(sent["messages"][0]["content"], "hello");
    }
}
