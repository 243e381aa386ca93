//! One connection to a front door, and one exchange over it.
//!
//! The task of a stream drives its own connection: bytes go from the socket to their stamp
//! without a second task that would have to be scheduled in between.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::CONTENT_TYPE;
use tokio::net::TcpStream;

use super::arrivals::{Arrivals, Connection, Ending, Head};
use super::door::Door;
use super::tap::{Stamps, Tap};
use super::watch::{Next, Watch};
use crate::client::failure::chain;
use crate::stack::clock::monotonic_ns;
use crate::stack::wait;

/// After `[DONE]` the end of the body follows at once, unless the server never sends it.
const AFTER_DONE: Duration = Duration::from_millis(500);

/// Pieces for which there is room from the start.
const PIECES: usize = 256;

type Wire = http1::Connection<Tap, Full<Bytes>>;

/// A connection that carries one request after another.
#[derive(Debug)]
pub(super) struct Line {
    sender: SendRequest<Full<Bytes>>,
    /// `None` once the connection is over.
    wire: Option<Wire>,
    stamps: Arc<Stamps>,
    connection: Connection,
}

impl Line {
    /// Connects.
    ///
    /// # Errors
    /// What the system says.
    pub(super) async fn connect(door: &Door) -> Result<Self, String> {
        let began = monotonic_ns();
        let socket = TcpStream::connect((door.host(), door.port()))
            .await
            .map_err(|error| chain(&error))?;
        let connect_ns = monotonic_ns().saturating_sub(began);
        // A request is sent when it is sent.
        socket.set_nodelay(true).map_err(|error| chain(&error))?;
        let stamps = Arc::new(Stamps::default());
        let tap = Tap::new(socket, Arc::clone(&stamps));
        let (sender, wire) = http1::handshake(tap).await.map_err(|e| chain(&e))?;
        Ok(Self {
            sender,
            wire: Some(wire),
            stamps,
            connection: Connection {
                reused: false,
                connect_ns,
            },
        })
    }

    /// What is said of it in an observation.
    pub(super) fn connection(&self) -> Connection {
        self.connection
    }

    /// Whether it can carry another request, as far as this side knows.
    pub(super) async fn is_free(&mut self) -> bool {
        // Gives the runtime a look at the socket: a server that has closed it has said so.
        tokio::task::yield_now().await;
        poll_fn(|context| {
            drive(&mut self.wire, context);
            let ready = matches!(self.sender.poll_ready(context), Poll::Ready(Ok(())));
            Poll::Ready(ready && self.wire.is_some())
        })
        .await
    }

    /// Whether the last exchange ended before anything of its request was written.
    pub(super) fn has_sent_nothing(&self) -> bool {
        self.stamps.written_ns().is_none()
    }

    /// Sends `request`, and puts what comes into `got` until `watch` or the server ends it. What
    /// came stays there if this is dropped.
    pub(super) async fn exchange(
        &mut self,
        request: hyper::Request<Full<Bytes>>,
        watch: &mut Watch,
        got: &mut Arrivals,
    ) -> Ending {
        self.stamps.arm();
        let Self {
            sender,
            wire,
            stamps,
            connection,
        } = self;
        got.connection = *connection;
        got.pieces.reserve(PIECES);
        // Until it is written there is nothing to measure from but now.
        got.sent_ns = monotonic_ns();
        connection.reused = true;
        let mut answer = pin!(sender.send_request(request));
        let response = poll_fn(|context| {
            drive(wire, context);
            let answered = answer.as_mut().poll(context);
            if let Some(sent) = stamps.written_ns() {
                got.sent_ns = sent;
            }
            answered
        });
        let response = match response.await {
            Ok(response) => response,
            Err(error) => return Ending::Cut(chain(&error)),
        };
        let content_type = response.headers().get(CONTENT_TYPE);
        got.head = Some(Head {
            ns: stamps.read_ns(),
            status: response.status().as_u16(),
            content_type: content_type
                .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned()),
        });
        if watch.hangs_up_at_once() {
            return Ending::HungUp;
        }
        let mut body = response.into_body();
        let mut done = false;
        loop {
            let frame = frame(wire, &mut body);
            let frame = match done {
                true => match wait::within(AFTER_DONE, frame).await {
                    Some(frame) => frame,
                    None => return Ending::End,
                },
                false => frame.await,
            };
            let bytes = match frame {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => bytes,
                    // Trailers say nothing of the answer.
                    Err(_) => continue,
                },
                Some(Err(error)) => return Ending::Cut(chain(&error)),
                None => return Ending::End,
            };
            let next = watch.piece(&bytes);
            got.pieces.push((stamps.read_ns(), bytes));
            match next {
                Next::More => done = false,
                Next::Done => done = true,
                Next::TooLarge => {
                    return Ending::TooLarge {
                        limit: watch.limit(),
                    };
                }
                Next::HangUp => return Ending::HungUp,
            }
        }
    }
}

/// Lets the connection read and write.
fn drive(wire: &mut Option<Wire>, context: &mut Context<'_>) {
    if let Some(connection) = wire
        && Pin::new(connection).poll(context).is_ready()
    {
        // Its error, if it has one, is also told to whoever waits for the answer.
        *wire = None;
    }
}

/// The next piece of `body`.
async fn frame(
    wire: &mut Option<Wire>,
    body: &mut Incoming,
) -> Option<Result<hyper::body::Frame<Bytes>, hyper::Error>> {
    poll_fn(|context| {
        drive(wire, context);
        Pin::new(&mut *body).poll_frame(context)
    })
    .await
}
