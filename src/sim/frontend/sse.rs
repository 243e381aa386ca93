//! Server-sent events as the front door writes them. How they are read is the client's business.

use axum::body::Bytes;
use serde::Serialize;

/// The frame that ends a stream.
pub(super) const DONE: Bytes = Bytes::from_static(b"data: [DONE]\n\n");

/// A frame with a JSON document.
pub(super) fn data(document: &impl Serialize) -> Bytes {
    let mut frame = Vec::with_capacity(512);
    frame.extend_from_slice(b"data: ");
    // Only maps with keys that are no strings can fail, and we have none.
    if serde_json::to_writer(&mut frame, document).is_err() {
        frame.extend_from_slice(b"null");
    }
    frame.extend_from_slice(b"\n\n");
    frame.into()
}

/// A frame that says an error in a comment, as Dynamo does: it has no data, so that a reader which
/// follows the letter of the standard drops it.
pub(super) fn error(message: &str) -> Bytes {
    format!("event: error\n{}\n", comment_lines(message)).into()
}

/// A comment by itself keeps a connection alive.
#[cfg(test)]
fn comment(text: &str) -> Bytes {
    format!("{}\n", comment_lines(text)).into()
}

fn comment_lines(text: &str) -> String {
    // CR, LF and CRLF all end a line of the format.
    text.split(['\r', '\n'])
        .map(|line| format!(": {line}\n"))
        .collect()
}

#[cfg(test)]
pub(super) mod reader {
    //! The smallest reader that follows the standard, for tests.

    /// One frame.
    #[derive(Clone, Debug, Default, Eq, PartialEq)]
    pub(crate) struct Frame {
        pub(crate) event: Option<String>,
        pub(crate) data: Vec<String>,
        pub(crate) comments: Vec<String>,
    }

    /// Whole frames, and what follows the last of them.
    pub(crate) fn frames(text: &str) -> (Vec<Frame>, String) {
        let mut frames = Vec::new();
        let mut rest = text;
        while let Some((block, after)) = rest.split_once("\n\n") {
            let mut frame = Frame::default();
            for line in block.lines() {
                let (field, value) = line.split_once(':').unwrap_or((line, ""));
                let value = value.strip_prefix(' ').unwrap_or(value).to_owned();
                match field {
                    "" => frame.comments.push(value),
                    "event" => frame.event = Some(value),
                    "data" => frame.data.push(value),
                    _ => {}
                }
            }
            frames.push(frame);
            rest = after;
        }
        (frames, rest.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::{Value, json};

    use super::reader::{Frame, frames};
    use super::*;

    fn text(bytes: &Bytes) -> String {
        String::from_utf8(bytes.to_vec()).unwrap()
    }

    proptest! {
        #[test]
        fn any_text_comes_back(words in prop::collection::vec(".*", 0..5), error_text in ".*") {
            let mut stream = String::new();
            for word in &words {
                stream += &text(&data(&json!({ "text": word })));
                stream += &text(&comment(word));
            }
            stream += &text(&error(&error_text));
            stream += &text(&DONE);
            let (found, rest) = frames(&stream);
            prop_assert_eq!(rest, "");
            prop_assert_eq!(found.len(), 2 * words.len() + 2);
            for (word, pair) in words.iter().zip(found.chunks(2)) {
                let document: Value = serde_json::from_str(&pair[0].data[0]).unwrap();
                prop_assert_eq!(document["text"].as_str(), Some(word.as_str()));
                prop_assert!(pair[1].data.is_empty() && !pair[1].comments.is_empty());
            }
            let last: &[Frame] = &found[2 * words.len()..];
            prop_assert_eq!(last[0].event.as_deref(), Some("error"));
            prop_assert!(last[0].data.is_empty());
            prop_assert_eq!(&last[1].data[0], "[DONE]");
        }
    }
}
