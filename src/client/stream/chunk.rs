//! One frame's data becomes what it says: a chunk of a completion or of a chat, `[DONE]`, or an
//! error. Only what an observation or a timing needs is read; the rest of a document is skipped.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::sse::Frame;
use crate::client::failure::excerpt;

/// What a frame says.
#[derive(Debug)]
pub(super) enum Said<'a> {
    /// A part of the answer.
    Chunk(Box<Chunk<'a>>),
    /// The last frame.
    Done,
    /// The server failed, in these words.
    Error(String),
    /// A comment, which keeps the connection alive.
    Nothing,
    /// Not `JSON`, or not `UTF-8`.
    Garbled(&'static str),
    /// JSON of another shape: what is wrong.
    Other(String),
}

/// A text that is borrowed from its frame where it has no escapes.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Text<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// A part of an answer.
#[derive(Debug, Deserialize)]
pub(super) struct Chunk<'a> {
    /// The answer's id: the same in every chunk.
    #[serde(borrow, default)]
    pub(super) id: Option<Text<'a>>,
    /// Empty in the chunk with the usage.
    #[serde(borrow, default)]
    pub(super) choices: Option<Vec<Choice<'a>>>,
    #[serde(default)]
    pub(super) usage: Option<Usage>,
    #[serde(default)]
    pub(super) nvext: Option<Nvext>,
    #[serde(default)]
    error: Option<Value>,
    #[serde(default)]
    message: Option<Value>,
}

/// What a chunk adds to one choice.
#[derive(Debug, Deserialize)]
pub(super) struct Choice<'a> {
    #[serde(default)]
    pub(super) index: u32,
    /// Of a completion.
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    /// Of a chat.
    #[serde(borrow, default)]
    delta: Option<Delta<'a>>,
    #[serde(borrow, default)]
    pub(super) finish_reason: Option<Text<'a>>,
    #[serde(default)]
    pub(super) logprobs: Option<Logprobs>,
}

#[derive(Debug, Deserialize)]
struct Delta<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Text<'a>>,
    /// The same under the name that vLLM gives it.
    #[serde(borrow, default)]
    reasoning: Option<Text<'a>>,
}

impl Choice<'_> {
    /// New text, and whether the model thinks rather than answers; never empty. A chunk that
    /// carries both tells of its answer.
    pub(super) fn text(&self) -> Option<(&str, bool)> {
        let delta = self.delta.as_ref();
        let candidates = [
            (self.text.as_ref(), false),
            (delta.and_then(|delta| delta.content.as_ref()), false),
            (
                delta.and_then(|delta| delta.reasoning_content.as_ref()),
                true,
            ),
            (delta.and_then(|delta| delta.reasoning.as_ref()), true),
        ];
        candidates.into_iter().find_map(|(text, thinks)| {
            let text = &*text?.0;
            (!text.is_empty()).then_some((text, thinks))
        })
    }
}

/// Log-probabilities beside the tokens of a completion; a chat's have another shape and are
/// skipped.
#[derive(Debug, Deserialize)]
pub(super) struct Logprobs {
    #[serde(default)]
    pub(super) tokens: Option<Vec<String>>,
    #[serde(default)]
    pub(super) top_logprobs: Option<Vec<Option<BTreeMap<String, f64>>>>,
}

/// Tokens as the server counts them.
#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Usage {
    #[serde(default)]
    pub(super) prompt_tokens: Option<u64>,
    #[serde(default)]
    pub(super) completion_tokens: Option<u64>,
    #[serde(default)]
    pub(super) prompt_tokens_details: Option<Details>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
pub(super) struct Details {
    #[serde(default)]
    pub(super) cached_tokens: Option<u64>,
}

/// Dynamo's own part of a document.
#[derive(Debug, Deserialize)]
pub(super) struct Nvext {
    #[serde(default)]
    pub(super) worker_id: Option<Workers>,
    #[serde(default)]
    pub(super) completion_token_ids: Option<Vec<u64>>,
}

/// Who served.
#[derive(Debug, Deserialize)]
pub(super) struct Workers {
    #[serde(default)]
    pub(super) prefill_worker_id: Option<Id>,
    #[serde(default)]
    pub(super) decode_worker_id: Option<Id>,
}

/// An instance id: a number or, where a server protects it from readers that know only floats, a
/// string. A float has already lost digits.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub(super) enum Id {
    /// Exact.
    Number(u64),
    /// Whatever else stands there.
    Other(Value),
}

impl Id {
    /// The id, or what stands there instead.
    pub(super) fn exact(&self) -> Result<u64, String> {
        match self {
            Self::Number(id) => Ok(*id),
            Self::Other(other) => {
                crate::client::parse::unsigned(other).ok_or_else(|| other.to_string())
            }
        }
    }
}

/// What `frame` says.
pub(super) fn read<'a>(frame: &Frame<'a>) -> Said<'a> {
    let data = frame.data.unwrap_or_default();
    if frame.event == Some("error") {
        // Dynamo says why in a comment.
        let words = [frame.data, frame.comment].into_iter().flatten();
        let words = words.map(str::trim).find(|words| !words.is_empty());
        return Said::Error(excerpt(words.unwrap_or("no words").as_bytes()));
    }
    if data.trim().is_empty() {
        return Said::Nothing;
    }
    if data.trim() == "[DONE]" {
        return Said::Done;
    }
    if !frame.is_utf8 {
        return Said::Garbled("UTF-8");
    }
    match serde_json::from_str::<Chunk<'a>>(data) {
        Ok(chunk) => chunk.said(data),
        Err(error) if error.is_data() => Said::Other(error.to_string()),
        Err(_) => Said::Garbled("JSON"),
    }
}

impl<'a> Chunk<'a> {
    /// Whether it brings any text.
    pub(super) fn has_text(&self) -> bool {
        let mut choices = self.choices.iter().flatten();
        choices.any(|choice| choice.text().is_some())
    }

    /// An error is a chunk by its shape too.
    fn said(self, data: &str) -> Said<'a> {
        let refused = self.choices.is_none() && self.message.is_some();
        if self.error.is_some() || refused {
            return Said::Error(excerpt(data.as_bytes()));
        }
        Said::Chunk(Box::new(self))
    }
}
