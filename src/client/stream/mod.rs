//! The streaming half of the client: what came, and exactly when.
//!
//! Stamp now, understand later: while a stream runs its task only keeps the bytes with their
//! stamps; afterwards, and as a pure function of them, they become a [`Streamed`]. Times are
//! `CLOCK_MONOTONIC`, taken where a read from the socket returns. `docs/streaming.md` says what
//! each number means.
//!
//! - [`arrivals`]: bytes and stamps, and how they ended.
//! - [`sse`]: bytes become frames. `chunk`: a frame becomes what it says.
//! - [`understand()`]: arrivals become a [`Streamed`]; every failure gets its name.
//! - `door`, `line`, `tap`, `watch`: an address, a connection, a socket that stamps, and the
//!   little that must be known while a stream runs.
//! - [`load`]: many streams at once, on a thread of their own.
//!
//! Like the rest of the client it judges nothing.

pub mod arrivals;
mod ask;
mod chunk;
mod door;
mod line;
pub mod load;
pub mod sse;
mod streamed;
mod tap;
mod understand;
mod watch;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{ACCEPT, CONTENT_TYPE, HOST};

use super::Pin;
use super::transport::RESPONSE_LIMIT;
use crate::failure::Failure;
use crate::stack::clock::monotonic_ns;
use crate::stack::wait;
use arrivals::{Arrivals, Connection, Ending};
pub use ask::{Ask, Chat};
use door::Door;
use line::Line;
pub use streamed::{Counts, Outcome, Streamed, Token, Usage};
pub use understand::understand;
use watch::Watch;

/// Streams from one front door. Cheap to clone; clones share their connections.
#[derive(Clone, Debug)]
pub struct Streams(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    door: Door,
    deadline: Duration,
    limit: usize,
    /// Connections that carry nothing.
    free: Mutex<Vec<Line>>,
}

impl Streams {
    /// Streams from `base_url` (`http://127.0.0.1:8000`), each given up after `deadline`: so long
    /// may connecting take, and so long everything from sending until the end. A machine that
    /// stalls does not use it up ([`wait::within`]).
    ///
    /// # Errors
    /// Environment: that is no address of plain HTTP.
    pub fn new(base_url: &str, deadline: Duration) -> Result<Self, Failure> {
        Ok(Self(Arc::new(Shared {
            door: Door::new(base_url)?,
            deadline,
            limit: RESPONSE_LIMIT,
            free: Mutex::new(Vec::new()),
        })))
    }

    /// Sends `ask` over a connection that is free, or else over a new one, and reads its stream to
    /// the end.
    pub async fn ask(&self, ask: &Ask) -> Streamed {
        understand(ask.label(), &self.arrivals(ask.clone()).await)
    }

    /// The same, not looked into yet.
    pub async fn arrivals(&self, ask: Ask) -> Arrivals {
        match self.open(ask).await {
            Ok(opened) => opened.run().await,
            Err(arrivals) => *arrivals,
        }
    }

    /// Connects and prepares `ask`, so that it can be sent at once and not before
    /// [`Opened::run`].
    ///
    /// # Errors
    /// There is no connection: arrivals that say why.
    pub async fn open(&self, ask: Ask) -> Result<Opened, Box<Arrivals>> {
        let opened = async {
            Ok(Opened {
                streams: self.clone(),
                request: self.0.request(&ask)?,
                line: match self.free().await {
                    Some(line) => line,
                    None => self.connect().await?,
                },
                hang_up: ask.hang_up,
            })
        };
        opened.await.map_err(|why: String| {
            let now = monotonic_ns();
            Box::new(Arrivals {
                sent_ns: now,
                ended_ns: now,
                ending: Ending::NoConnection(why),
                ..Arrivals::none(Connection::default())
            })
        })
    }

    /// Forgets the connections that are free: the next requests make new ones.
    pub fn hang_up(&self) {
        self.0.lines().clear();
    }

    async fn free(&self) -> Option<Line> {
        loop {
            let mut line = self.0.lines().pop()?;
            if line.is_free().await {
                return Some(line);
            }
        }
    }

    async fn connect(&self) -> Result<Line, String> {
        let Shared { door, deadline, .. } = &*self.0;
        let connected = wait::within(*deadline, Line::connect(door)).await;
        connected
            .unwrap_or_else(|| Err(format!("not within {} s", deadline.as_secs_f64())))
            .map_err(|why| format!("{}: {why}", door.authority()))
    }
}

impl Shared {
    fn lines(&self) -> std::sync::MutexGuard<'_, Vec<Line>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn request(&self, ask: &Ask) -> Result<hyper::Request<Full<Bytes>>, String> {
        let mut request = hyper::Request::post(self.door.target(ask.path))
            .header(HOST, self.door.authority())
            .header(CONTENT_TYPE, "application/json")
            .header(ACCEPT, "text/event-stream");
        if let Some((name, id)) = ask.pin.map(Pin::header) {
            request = request.header(name, id);
        }
        let request = request.body(Full::new(ask.body.clone()));
        request.map_err(|error| error.to_string())
    }
}

/// A request whose connection stands: it only has to be sent.
#[derive(Debug)]
pub struct Opened {
    streams: Streams,
    line: Line,
    request: hyper::Request<Full<Bytes>>,
    hang_up: Option<usize>,
}

impl Opened {
    /// Sends it and keeps what comes, until the stream ends or the client has to end it.
    pub async fn run(mut self) -> Arrivals {
        let mut got = self.exchange().await;
        // A server may close a connection that it finds idle just when it is used again. As long
        // as nothing was sent, that is nobody's failure.
        if got.connection.reused
            && matches!(got.ending, Ending::Cut(_))
            && self.line.has_sent_nothing()
            && let Ok(line) = self.streams.connect().await
        {
            self.line = line;
            got = self.exchange().await;
        }
        if got.ending == Ending::End && self.line.is_free().await {
            self.streams.0.lines().push(self.line);
        }
        got
    }

    async fn exchange(&mut self) -> Arrivals {
        let Shared {
            deadline, limit, ..
        } = &*self.streams.0;
        let mut got = Arrivals::none(self.line.connection());
        let mut watch = Watch::new(*limit, self.hang_up);
        let request = self.request.clone();
        let exchange = self.line.exchange(request, &mut watch, &mut got);
        let ending = wait::within(*deadline, exchange).await;
        got.ended_ns = monotonic_ns();
        got.ending = ending.unwrap_or(Ending::Deadline {
            seconds: deadline.as_secs_f64(),
        });
        got
    }
}

#[cfg(test)]
mod tests;
