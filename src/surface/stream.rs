//! The shape of a stream of server-sent events: which frames come in which order.

use serde_json::Value;

use super::document::{self, Document};

/// What such a response declares itself as.
pub const MEDIA_TYPE: &str = "text/event-stream";

/// What a frame is: `comment`, `event NAME`, `text`, `role`, `finish`, `usage`, `empty chunk`,
/// `error`, `[DONE]`, or several of them with a `+`.
pub type Frame = String;

/// The frames of a body in order, each run of equal ones once, and the fields of all documents.
pub fn frames(body: &str) -> (Vec<Frame>, Document) {
    let mut frames: Vec<Frame> = Vec::new();
    let mut all = Document::new();
    let body = body.replace("\r\n", "\n");
    for block in body.split("\n\n").filter(|block| !block.trim().is_empty()) {
        let frame = frame(block, &mut all);
        if frames.last() != Some(&frame) {
            frames.push(frame);
        }
    }
    (frames, all)
}

fn frame(block: &str, all: &mut Document) -> Frame {
    let mut parts: Vec<String> = Vec::new();
    let mut data: Vec<&str> = Vec::new();
    for line in block.lines() {
        match line.split_once(':') {
            Some(("", _)) => parts.push("comment".to_owned()),
            Some(("event", name)) => parts.push(format!("event {}", name.trim())),
            Some(("data", text)) => data.push(text.strip_prefix(' ').unwrap_or(text)),
            Some((field, _)) => parts.push(field.to_owned()),
            None => parts.push(format!("line {line:?}")),
        }
    }
    let data = data.join("\n");
    if data.trim() == "[DONE]" {
        parts.push("[DONE]".to_owned());
    } else if let Ok(value) = serde_json::from_str::<Value>(&data) {
        parts.extend(meaning(&value).into_iter().map(str::to_owned));
        document::merge(all, document::fields(&value));
    } else if !data.is_empty() {
        parts.push("text that is no JSON".to_owned());
    }
    parts.join("+")
}

fn meaning(value: &Value) -> Vec<&'static str> {
    let is = |pointer: &str| value.pointer(pointer).is_some_and(|found| !found.is_null());
    let says = |pointer: &str| {
        let text = value.pointer(pointer).and_then(Value::as_str);
        text.is_some_and(|text| !text.is_empty())
    };
    let mut parts = Vec::new();
    if is("/error") || is("/message") {
        parts.push("error");
    }
    // A token may have no text of its own: whoever carries a choice that is not over goes on.
    if is("/choices/0") && !is("/choices/0/finish_reason") {
        parts.push("text");
    }
    if is("/choices/0/finish_reason") {
        let text = says("/choices/0/text") || says("/choices/0/delta/content");
        parts.push(if text { "text with finish" } else { "finish" });
    }
    if is("/usage") {
        parts.push("usage");
    }
    if parts.is_empty() {
        parts.push("empty chunk");
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_is_its_kinds_of_frames_in_order() {
        let body = concat!(
            ": ping\n\n",
            "data: {\"choices\":[{\"text\":\"a\",\"finish_reason\":null}]}\n\n",
            "data: {\"choices\":[{\"text\":\"b\",\"finish_reason\":null}]}\r\n\r\n",
            "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n",
            "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":1}}\n\n",
            "event: error\ndata: {\"message\":\"x\"}\n\n",
            "data: [DONE]\n\n",
        );
        let (frames, document) = frames(body);
        assert_eq!(
            frames,
            [
                "comment",
                "text",
                "finish",
                "usage",
                "event error+error",
                "[DONE]"
            ]
        );
        assert_eq!(document["/choices[]/finish_reason"], "null|string");
        assert_eq!(document["/usage/prompt_tokens"], "integer");
    }

    #[test]
    fn a_finish_that_brings_text_is_another_frame_than_one_that_does_not() {
        for (choice, kind) in [
            (r#"{"text":"a","finish_reason":"stop"}"#, "text with finish"),
            (
                r#"{"delta":{"content":"a"},"finish_reason":"stop"}"#,
                "text with finish",
            ),
            (r#"{"delta":{},"finish_reason":"stop"}"#, "finish"),
        ] {
            let body = format!("data: {{\"choices\":[{choice}]}}\n\n");
            assert_eq!(frames(&body).0, [kind], "{choice}");
        }
        assert_eq!(frames("data: {\"error\":{}}\n\n").0, ["error"]);
    }

    #[test]
    fn what_is_no_event_is_said() {
        assert_eq!(frames("nonsense").0, ["line \"nonsense\""]);
        assert_eq!(frames("data: x\n\n").0, ["text that is no JSON"]);
        assert!(frames("").0.is_empty());
    }
}
