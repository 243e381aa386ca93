//! What a client asks for: bodies and headers as Dynamo 1.6.1 takes and refuses them. Knows no
//! workers.

use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::{Map, Value};

use super::refusal::Refusal;

/// Which of the two surfaces.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// `/v1/completions`.
    Completion,
    /// `/v1/chat/completions`.
    Chat,
}

impl Kind {
    /// Its name in the labels of metrics.
    pub(super) fn endpoint(self) -> &'static str {
        match self {
            Self::Completion => "completions",
            Self::Chat => "chat_completions",
        }
    }
}

/// A prompt before it is tokens.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
pub(super) enum Prompt {
    /// To be tokenized.
    Text(String),
    /// Tokens already.
    Ids(Vec<u32>),
}

/// `nvext.extra_fields` that do something. Unknown names do nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Extras {
    pub(super) worker_id: bool,
    pub(super) timing: bool,
    pub(super) completion_token_ids: bool,
    pub(super) prompt_token_ids: bool,
    pub(super) engine_data: bool,
}

/// Workers that a request names.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Pins {
    /// Who serves it (who decodes, in a disaggregated deployment).
    pub(super) worker: Option<u64>,
    /// Who prefills it.
    pub(super) prefill: Option<u64>,
}

/// A request, understood.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Ask {
    pub(super) kind: Kind,
    pub(super) model: String,
    pub(super) prompt: Prompt,
    /// `None`: the surface's own default.
    pub(super) max_tokens: Option<u32>,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    /// How many candidates a token shows; `None`: no log-probabilities at all.
    pub(super) logprobs: Option<u8>,
    /// Candidates are spelt `token_id:N`.
    pub(super) tokens_as_ids: bool,
    pub(super) salt: Option<String>,
    pub(super) extras: Extras,
    pub(super) pins: Pins,
}

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Nvext {
    greed_sampling: Option<bool>,
    use_raw_prompt: Option<bool>,
    annotations: Option<Vec<String>>,
    backend_instance_id: Option<u64>,
    token_data: Option<Vec<u32>>,
    max_thinking_tokens: Option<u32>,
    cache_salt: Option<String>,
    extra_fields: Option<Vec<String>>,
    metadata_upload: Option<Value>,
    prefill_worker_id: Option<u64>,
    decode_worker_id: Option<u64>,
    dp_rank: Option<u32>,
    prefill_dp_rank: Option<u32>,
    agent_hints: Option<Value>,
    request_timestamp_ms: Option<f64>,
    routing_constraints: Option<Value>,
    router: Option<Value>,
}

#[derive(Deserialize)]
struct StreamOptions {
    #[serde(default)]
    include_usage: bool,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    #[serde(default)]
    content: Value,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Logprobs {
    Shown(bool),
    Count(u8),
}

#[derive(Deserialize)]
struct Body {
    model: String,
    prompt: Option<Prompt>,
    messages: Option<Vec<Message>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<Logprobs>,
    top_logprobs: Option<u8>,
    return_tokens_as_token_ids: Option<bool>,
    cache_salt: Option<String>,
    nvext: Option<Nvext>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// Accepted without an effect here: a simulated model is greedy and never ends by itself.
const WITHOUT_EFFECT: &[&str] = &[
    "best_of",
    "chat_template_args",
    "chat_template_kwargs",
    "echo",
    "frequency_penalty",
    "ignore_eos",
    "logit_bias",
    "metadata",
    "min_p",
    "min_tokens",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "seed",
    "skip_special_tokens",
    "stop",
    "stop_token_ids",
    "store",
    "suffix",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_p",
    "user",
];

/// Reads a body and the headers that pin.
///
/// # Errors
/// The 400 that Dynamo gives.
pub(super) fn parse(kind: Kind, headers: &HeaderMap, body: &[u8]) -> Result<Ask, Refusal> {
    let body: Body = serde_json::from_slice(body).map_err(|error| {
        Refusal::bad(format!(
            "Failed to deserialize the JSON body into the target type: {error}"
        ))
    })?;
    let unknown: Vec<String> = body
        .rest
        .keys()
        .filter(|name| !WITHOUT_EFFECT.contains(&name.as_str()))
        .map(|name| format!("`{name}`"))
        .collect();
    if !unknown.is_empty() {
        let unknown = unknown.join(", ");
        return Err(Refusal::bad(format!(
            "Validation: Unsupported parameter(s): {unknown}"
        )));
    }
    let prompt = prompt(kind, body.prompt, body.messages)?;
    let max_tokens = body.max_tokens.or(body.max_completion_tokens);
    if max_tokens == Some(0) {
        return Err(Refusal::bad(
            "Validation: max_tokens must be at least 1, got 0".into(),
        ));
    }
    let nvext = body.nvext.unwrap_or_default();
    let logprobs = match (body.logprobs, body.top_logprobs) {
        (Some(Logprobs::Count(count)), _) => Some(count),
        (Some(Logprobs::Shown(true)), count) => Some(count.unwrap_or(0)),
        (Some(Logprobs::Shown(false)) | None, _) => None,
    };
    let asked = |name: &str| {
        let mut fields = nvext.extra_fields.iter().flatten();
        fields.any(|field| field == name)
    };
    let extras = Extras {
        worker_id: asked("worker_id"),
        timing: asked("timing"),
        completion_token_ids: asked("completion_token_ids"),
        prompt_token_ids: asked("prompt_token_ids"),
        engine_data: asked("engine_data"),
    };
    let pins = Pins {
        worker: pin(headers, "x-dynamo-worker-instance-id")?
            .or(nvext.backend_instance_id)
            .or(nvext.decode_worker_id),
        prefill: pin(headers, "x-dynamo-prefill-instance-id")?.or(nvext.prefill_worker_id),
    };
    Ok(Ask {
        kind,
        model: body.model,
        prompt,
        max_tokens,
        stream: body.stream.unwrap_or(false),
        include_usage: body.stream_options.is_some_and(|o| o.include_usage),
        logprobs,
        tokens_as_ids: body.return_tokens_as_token_ids.unwrap_or(false),
        salt: body.cache_salt.or(nvext.cache_salt),
        extras,
        pins,
    })
}

fn prompt(
    kind: Kind,
    prompt: Option<Prompt>,
    messages: Option<Vec<Message>>,
) -> Result<Prompt, Refusal> {
    let missing = |field: &str| {
        Refusal::bad(format!(
            "Failed to deserialize the JSON body into the target type: missing field `{field}`"
        ))
    };
    match kind {
        Kind::Completion => prompt.ok_or_else(|| missing("prompt")),
        Kind::Chat => {
            let messages = messages.ok_or_else(|| missing("messages"))?;
            let mut rendered = String::new();
            for message in &messages {
                rendered += &message.role;
                for part in texts(&message.content) {
                    rendered.push(' ');
                    rendered += part;
                }
                rendered.push('\n');
            }
            Ok(Prompt::Text(rendered + "assistant"))
        }
    }
}

/// The texts of a message's content: a string, or a list of parts.
fn texts(content: &Value) -> Vec<&str> {
    match content {
        Value::String(text) => vec![text],
        Value::Array(parts) => parts
            .iter()
            .filter_map(|part| part.get("text")?.as_str())
            .collect(),
        _ => Vec::new(),
    }
}

fn pin(headers: &HeaderMap, name: &str) -> Result<Option<u64>, Refusal> {
    headers
        .get(name)
        .map(|value| {
            value
                .to_str()
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or_else(|| Refusal::bad("Invalid request".into()))
        })
        .transpose()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(kind: Kind, body: &Value) -> Result<Ask, Refusal> {
        parse(kind, &HeaderMap::new(), body.to_string().as_bytes())
    }

    #[test]
    fn what_our_client_sends_is_understood() {
        let mut headers = HeaderMap::new();
        let id = u64::MAX.to_string();
        headers.insert("x-dynamo-worker-instance-id", id.parse().unwrap());
        let body = json!({"model": "tiny", "prompt": [1, 2], "max_tokens": 3, "temperature": 0,
            "stream": false, "ignore_eos": true, "logprobs": 2, "return_tokens_as_token_ids": true,
            "cache_salt": "s", "nvext": {"extra_fields": ["worker_id", "completion_token_ids", "nonsense"]}});
        let ask = parse(Kind::Completion, &headers, body.to_string().as_bytes()).unwrap();
        assert_eq!(ask.prompt, Prompt::Ids(vec![1, 2]));
        assert_eq!(ask.pins.worker, Some(u64::MAX));
        assert_eq!(ask.salt.as_deref(), Some("s"));
        assert!(ask.tokens_as_ids && ask.extras.worker_id && !ask.extras.timing);
    }

    #[test]
    fn chat_is_rendered_and_its_logprobs_counted() {
        let ask = read(
            Kind::Chat,
            &json!({"model": "m", "logprobs": true, "top_logprobs": 2, "stream": true,
                "stream_options": {"include_usage": true},
                "messages": [{"role": "user", "content": "hello"},
                    {"role": "user", "content": [{"type": "text", "text": "there"}]}]}),
        )
        .unwrap();
        assert_eq!(
            ask.prompt,
            Prompt::Text("user hello\nuser there\nassistant".into())
        );
        assert_eq!(ask.logprobs, Some(2));
        assert!(ask.stream && ask.include_usage);
    }

    #[test]
    fn refusals_are_in_the_real_words() {
        let nvext = json!({"model": "m", "prompt": "x", "nvext": {"ignore_eos": true}});
        let table = [
            (
                nvext,
                "Failed to deserialize the JSON body into the target type: unknown field `ignore_eos`, expected one of `greed_sampling`, `use_raw_prompt`, `annotations`, `backend_instance_id`, `token_data`, `max_thinking_tokens`, `cache_salt`, `extra_fields`, `metadata_upload`, `prefill_worker_id`, `decode_worker_id`, `dp_rank`, `prefill_dp_rank`, `agent_hints`, `request_timestamp_ms`, `routing_constraints`, `router` at line 1 column ",
            ),
            (
                json!({"model": "m", "prompt": "x", "return_token_ids": true}),
                "Validation: Unsupported parameter(s): `return_token_ids`",
            ),
            (
                json!({"prompt": "x"}),
                "Failed to deserialize the JSON body into the target type: missing field `model`",
            ),
        ];
        for (body, words) in table {
            let refusal = read(Kind::Completion, &body).unwrap_err();
            assert_eq!(refusal.status, 400);
            assert!(refusal.message.starts_with(words), "{}", refusal.message);
        }
        let mut headers = HeaderMap::new();
        headers.insert("x-dynamo-worker-instance-id", "x".parse().unwrap());
        let body = br#"{"model":"m","prompt":"x"}"#;
        let refusal = parse(Kind::Completion, &headers, body).unwrap_err();
        assert_eq!(refusal.message, "Invalid request");
    }
}
