//! The words of a control endpoint: frames of a length, a JSON head, and raw pages after it.
//!
//! What comes from the wire is bounded before anything is allocated for it.

use std::io;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::sim::model::Key;

/// Bytes of the longest head: as many keys as fit.
const LONGEST_HEAD: usize = 8 << 20;
/// Bytes of pages in one answer.
pub const LONGEST_BODY: usize = 1 << 30;
/// Pages asked for at once.
pub const MOST_KEYS: usize = 1 << 16;

/// What a target says.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Ask {
    /// Who it is; first on every connection.
    TargetMetadata {
        /// Names the target for as long as it lives.
        agent: String,
    },
    /// It wants these pages.
    StartWrite {
        /// In the order in which they are to come.
        keys: Vec<Key>,
    },
}

/// What a source answers.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It knows the target now.
    TargetMetadataAck,
    /// Pages follow: those that are held, in the order asked for, the whole list `copies` times.
    Written {
        /// For each key whether its page follows.
        held: Vec<bool>,
        /// Bytes of one page.
        page_bytes: usize,
        /// How often the pages follow.
        copies: usize,
    },
    /// It will not write.
    WriteRefused {
        /// Why.
        why: String,
    },
}

/// Sends a head, and nothing after it.
///
/// # Errors
/// The connection is gone.
pub async fn send<T: Serialize>(to: &mut (impl AsyncWrite + Unpin), head: &T) -> io::Result<()> {
    let text = serde_json::to_vec(head)?;
    let length = u32::try_from(text.len()).map_err(io::Error::other)?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&text);
    to.write_all(&frame).await
}

/// Receives a head; `None` where the other side hung up instead.
///
/// # Errors
/// The connection broke within a frame, or what came is no head.
pub async fn receive<T: DeserializeOwned>(
    from: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length).await {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        other => other?,
    };
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST_HEAD {
        return Err(bad(format!("a head of {length} bytes")));
    }
    let mut text = vec![0; length];
    from.read_exact(&mut text).await?;
    serde_json::from_slice(&text)
        .map(Some)
        .map_err(|error| bad(error.to_string()))
}

/// An error about what came from the wire.
pub(super) fn bad(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn heads_come_out_as_they_went_in() {
        let ask = Ask::TargetMetadata { agent: "a".into() };
        let mut wire = Vec::new();
        send(&mut wire, &ask).await.unwrap();
        let mut wire = wire.as_slice();
        assert_eq!(receive::<Ask>(&mut wire).await.unwrap(), Some(ask));
        assert_eq!(receive::<Ask>(&mut wire).await.unwrap(), None);
    }

    #[tokio::test]
    async fn nonsense_is_an_error() {
        for wire in [&b"\xff\xff\xff\xff"[..], b"\x02\0\0\0{]", b"\x08\0\0\0{"] {
            let mut wire = wire;
            assert!(receive::<Ask>(&mut wire).await.is_err());
        }
    }
}
