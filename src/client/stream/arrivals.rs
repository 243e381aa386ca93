//! What came over the wire and when, before anybody has looked into it.
//!
//! While a stream runs nothing else is kept: bytes and stamps. What they mean is
//! [`super::understand()`]'s, afterwards, so that streams do not disturb each other's stamps.

use hyper::body::Bytes;
use serde::{Deserialize, Serialize};

/// How the connection of a request came to be: never part of a latency.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Connection {
    /// It had carried another request before.
    pub reused: bool,
    /// Nanoseconds from the look-up of the name until the socket was connected; of a reused
    /// connection too, when it was made.
    pub connect_ns: u64,
}

/// The head of a response.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Head {
    /// When its last byte was read: nanoseconds of `CLOCK_MONOTONIC`.
    pub ns: u64,
    /// HTTP status.
    pub status: u16,
    /// `content-type`.
    pub content_type: Option<String>,
}

/// Why no more arrived.
#[derive(Clone, Debug, PartialEq)]
pub enum Ending {
    /// The body ended as HTTP says that it ends; or `[DONE]` came, and then nothing more.
    End,
    /// The connection ended before the body did; what the HTTP library says.
    Cut(String),
    /// The client's own deadline, in seconds.
    Deadline {
        /// Seconds.
        seconds: f64,
    },
    /// More bytes than the client reads.
    TooLarge {
        /// Bytes.
        limit: usize,
    },
    /// The client hung up, as it was told to.
    HungUp,
    /// There was no connection, and nothing was sent.
    NoConnection(String),
}

/// One request's bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct Arrivals {
    /// What carried it.
    pub connection: Connection,
    /// Right before the first byte of the request was handed to the socket: nanoseconds of
    /// `CLOCK_MONOTONIC`.
    pub sent_ns: u64,
    /// `None` if no whole head came.
    pub head: Option<Head>,
    /// Pieces of the body as they were read, each with its stamp: when the read from the socket
    /// returned, in nanoseconds of `CLOCK_MONOTONIC`. Stamps never decrease. Pieces of one read
    /// have the same stamp.
    pub pieces: Vec<(u64, Bytes)>,
    /// When it was over: nanoseconds of `CLOCK_MONOTONIC`.
    pub ended_ns: u64,
    /// How.
    pub ending: Ending,
}

impl Arrivals {
    /// Nothing yet.
    pub(super) fn none(connection: Connection) -> Self {
        Self {
            connection,
            sent_ns: 0,
            head: None,
            pieces: Vec::new(),
            ended_ns: 0,
            ending: Ending::End,
        }
    }

    /// Bytes of the body.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|(_, bytes)| bytes.len()).sum()
    }

    /// The whole body.
    pub(super) fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(self.bytes());
        for (_, bytes) in &self.pieces {
            body.extend_from_slice(bytes);
        }
        body
    }
}
