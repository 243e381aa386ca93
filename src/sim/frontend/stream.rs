//! A streamed answer on its way to the socket: a body that makes its frames when it is asked for
//! them, and knows when each was handed over.
//!
//! One task a stream: the connection's own polls the body, and the body polls what makes the
//! frames. A client that reads slowly therefore slows down only its own engine.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use axum::body::{Bytes, HttpBody};
use http_body::Frame;
use serde_json::json;
use tokio::sync::mpsc;

use crate::sim::entry;

/// Frames that may wait for the socket.
const WAITING: usize = 32;

/// What makes frames.
type Maker = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A piece of a body.
#[derive(Debug)]
enum Piece {
    /// Bytes, and whether they carry a token.
    Data(Bytes, bool),
    /// The connection breaks here.
    Cut,
}

/// Where frames are put.
#[derive(Debug)]
pub(super) struct Out(mpsc::Sender<Piece>);

/// The client is gone.
#[derive(Debug)]
pub(super) struct Gone;

impl Out {
    /// A frame without a token.
    pub(super) async fn send(&self, frame: Bytes) -> Result<(), Gone> {
        self.0
            .send(Piece::Data(frame, false))
            .await
            .map_err(|_| Gone)
    }

    /// A frame with a token.
    pub(super) async fn token(&self, frame: Bytes) -> Result<(), Gone> {
        self.0
            .send(Piece::Data(frame, true))
            .await
            .map_err(|_| Gone)
    }

    /// Breaks the connection off.
    pub(super) async fn cut(&self) {
        let _ = self.0.send(Piece::Cut).await;
    }
}

/// The body. Its content is written while it is polled.
pub(super) struct Body {
    maker: Option<Maker>,
    pieces: mpsc::Receiver<Piece>,
    log: Option<Stamps>,
    /// Breaks off at the next poll.
    cut: bool,
}

impl Body {
    /// A body that `make` fills; `log` is written when it ends.
    pub(super) fn new<F>(make: impl FnOnce(Out) -> F, log: Option<Stamps>) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, pieces) = mpsc::channel(WAITING);
        Self {
            maker: Some(Box::pin(make(Out(sender)))),
            pieces,
            log,
            cut: false,
        }
    }
}

impl HttpBody for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = self.get_mut();
        if this.cut {
            let why = io::Error::new(io::ErrorKind::ConnectionReset, "cut");
            return Poll::Ready(Some(Err(why)));
        }
        if let Some(maker) = &mut this.maker
            && maker.as_mut().poll(context).is_ready()
        {
            this.maker = None;
        }
        match this.pieces.poll_recv(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Piece::Data(bytes, token))) => {
                if let Some(log) = &mut this.log {
                    log.handed_over(token);
                }
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Poll::Ready(Some(Piece::Cut)) => {
                // What was handed over is written only while the body has nothing to give; an
                // error at once would throw it away.
                this.cut = true;
                context.waker().wake_by_ref();
                Poll::Pending
            }
            Poll::Ready(None) => {
                if let Some(log) = &mut this.log {
                    log.complete = true;
                }
                Poll::Ready(None)
            }
        }
    }
}

/// Nanoseconds of `CLOCK_MONOTONIC`, which every process of a host shares.
pub(super) fn now_ns() -> u64 {
    u64::try_from(entry::nanos(rustix::time::ClockId::Monotonic)).unwrap_or(0)
}

/// The file with the ground truth of streams.
#[derive(Debug)]
pub(super) struct WriteLog(Mutex<File>);

impl WriteLog {
    /// Appends to `path`.
    ///
    /// # Errors
    /// It cannot be opened.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().create(true).append(true).open(path)?;
        Ok(Self(Mutex::new(file)))
    }
}

/// When the frames of one stream were handed over. Writes its line when it is dropped.
#[derive(Debug)]
pub(super) struct Stamps {
    log: Arc<WriteLog>,
    request_id: String,
    model: String,
    received_ns: u64,
    first_byte_ns: Option<u64>,
    token_ns: Vec<u64>,
    complete: bool,
}

impl Stamps {
    /// Of a request that was received at `received_ns`.
    pub(super) fn new(
        log: Arc<WriteLog>,
        request_id: &str,
        model: &str,
        received_ns: u64,
        tokens: u32,
    ) -> Self {
        Self {
            log,
            request_id: request_id.to_owned(),
            model: model.to_owned(),
            received_ns,
            first_byte_ns: None,
            // A request may ask for any number.
            token_ns: Vec::with_capacity(tokens.min(4096) as usize),
            complete: false,
        }
    }

    fn handed_over(&mut self, token: bool) {
        let now = now_ns();
        self.first_byte_ns.get_or_insert(now);
        if token {
            self.token_ns.push(now);
        }
    }
}

impl Drop for Stamps {
    fn drop(&mut self) {
        let mut line = json!({
            "request_id": self.request_id,
            "model": self.model,
            "received_ns": self.received_ns,
            "first_byte_ns": self.first_byte_ns,
            "token_ns": self.token_ns,
            "end_ns": now_ns(),
            "complete": self.complete,
        })
        .to_string();
        line.push('\n');
        let mut file = self.log.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = file.write_all(line.as_bytes()) {
            errln!("write log: {error}");
        }
    }
}
