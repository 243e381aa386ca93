//! What a stack shows to whoever looks at it from outside, as shapes: which families a metrics
//! page declares, which fields a document has, which frames a stream is made of, which lines a
//! log has. Values that differ from run to run are left out.
//!
//! A [`Recording`] of the real stack is kept as a fixture, and the simulated stack is held to it
//! by [`differences`]. Everything here is pure; asking a stack is `crate::record`'s.
//!
//! - [`page`]: a metrics page.
//! - [`document`]: a JSON document.
//! - [`stream`]: a response that is a stream of events.
//! - [`log`]: the lines of a log that are known.
//! - [`compare`]: two recordings.

pub mod compare;
pub mod document;
pub mod log;
pub mod page;
pub mod stream;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

pub use compare::differences;
use document::Document;
use page::Family;
use stream::Frame;

/// How much of a body is kept beside its shape, in characters.
const EXCERPT: usize = 300;

/// One stack as it was seen once.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Recording {
    /// Profile and variant, for people.
    pub stack: String,
    /// When, for people.
    pub recorded: String,
    /// What ran: distributions and their versions.
    pub versions: BTreeMap<String, String>,
    /// What was asked, and the shape of what came.
    pub surfaces: BTreeMap<String, Surface>,
}

/// The shape of one thing that was looked at.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is")]
pub enum Surface {
    /// A metrics page.
    Page {
        /// Its families, by name.
        families: BTreeMap<String, Family>,
    },
    /// An HTTP response that came whole.
    Response {
        /// The status.
        status: u16,
        /// The media type, without parameters.
        content_type: String,
        /// Its fields, or nothing where it is not JSON.
        document: Document,
        /// The beginning of the body.
        excerpt: String,
    },
    /// An HTTP response that came as server-sent events.
    Stream {
        /// The status.
        status: u16,
        /// The media type, without parameters.
        content_type: String,
        /// Its frames in order, each run of equal ones once.
        frames: Vec<Frame>,
        /// The fields of all its documents together.
        document: Document,
        /// The beginning of the body.
        excerpt: String,
    },
    /// A process's log.
    Log {
        /// The known lines that occur, with the names of their fields.
        lines: BTreeSet<String>,
    },
}

impl Surface {
    /// A metrics page.
    pub fn page(text: &str) -> Self {
        Self::Page {
            families: page::families(text),
        }
    }

    /// An HTTP response.
    pub fn response(status: u16, content_type: &str, body: &str) -> Self {
        let content_type = content_type.split(';').next().unwrap_or("").trim();
        let content_type = content_type.to_ascii_lowercase();
        if content_type == stream::MEDIA_TYPE {
            let (frames, document) = stream::frames(body);
            return Self::Stream {
                status,
                content_type,
                frames,
                document,
                excerpt: excerpt(body),
            };
        }
        let document = serde_json::from_str(body)
            .map(|value| document::fields(&value))
            .unwrap_or_default();
        Self::Response {
            status,
            content_type,
            document,
            excerpt: excerpt(body),
        }
    }

    /// A log.
    pub fn log(text: &str) -> Self {
        Self::Log {
            lines: log::known(text),
        }
    }
}

fn excerpt(body: &str) -> String {
    let mut text: String = body.chars().take(EXCERPT).collect();
    if text.len() < body.len() {
        text.push('…');
    }
    text
}

/// A name with whatever is an identity in it replaced, so that it is the same in every run:
/// numbers, and hexadecimal words of eight digits or more.
pub(crate) fn without_identities(name: &str) -> String {
    let mut out = String::new();
    let mut word = String::new();
    for c in name.chars().chain(['\0']) {
        if c.is_ascii_alphanumeric() {
            word.push(c);
            continue;
        }
        out += if is_identity(&word) { "{id}" } else { &word };
        word.clear();
        if c != '\0' {
            out.push(c);
        }
    }
    out
}

fn is_identity(word: &str) -> bool {
    let number = !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_digit());
    let hex = word.len() >= 8
        && word.bytes().all(|byte| byte.is_ascii_hexdigit())
        && word.bytes().any(|byte| byte.is_ascii_digit());
    number || hex
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_left_out_of_names() {
        for (name, without) in [
            (
                "worker_kv_query_source_42aa22c0a71190a",
                "worker_kv_query_source_{id}",
            ),
            ("token_id:7", "token_id:{id}"),
            ("300230635211004168", "{id}"),
            ("prefill_worker_id", "prefill_worker_id"),
            ("sha256", "sha256"),
            ("deadbeef", "deadbeef"),
            ("", ""),
        ] {
            assert_eq!(without_identities(name), without);
        }
    }

    #[test]
    fn a_response_is_a_document_a_stream_or_neither() {
        let document = Surface::response(200, "application/json; charset=utf-8", r#"{"a":1}"#);
        let Surface::Response {
            document,
            content_type,
            ..
        } = document
        else {
            panic!("{document:?}");
        };
        assert_eq!(content_type, "application/json");
        assert_eq!(document.len(), 1);
        let text = Surface::response(200, "text/plain", "ok");
        assert!(matches!(text, Surface::Response { document, .. } if document.is_empty()));
        let stream = Surface::response(200, "text/event-stream", "data: [DONE]\n\n");
        assert!(matches!(stream, Surface::Stream { .. }));
    }

    #[test]
    fn a_recording_reads_back() {
        let recording = Recording {
            stack: "cpu".into(),
            recorded: "2026-01-01".into(),
            versions: BTreeMap::from([("kvcr".into(), "0.1.1".into())]),
            surfaces: BTreeMap::from([
                (
                    "page".into(),
                    Surface::page("# TYPE a counter\na{b=\"c\"} 1\n"),
                ),
                ("log".into(), Surface::log("nothing")),
                (
                    "stream".into(),
                    Surface::response(200, "text/event-stream", ": hi\n\n"),
                ),
                ("error".into(), Surface::response(404, "", "")),
            ]),
        };
        let text = serde_json::to_string(&recording).unwrap();
        assert_eq!(serde_json::from_str::<Recording>(&text).unwrap(), recording);
    }
}
