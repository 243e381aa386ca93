//! Over sockets, against a server that sends canned bytes.

use std::sync::atomic::{AtomicUsize, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

use super::*;
use crate::client::failure::RequestFailureKind;
use crate::client::testing::Request;
use crate::client::{Completion, Input, PIN_HEADER};
use crate::failure::Class;

/// Long enough for a starved machine: no test waits for it unless it fails.
const PATIENCE: Duration = Duration::from_secs(60);
/// For a server that does not answer.
const SHORT: Duration = Duration::from_millis(50);

const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
/// A body that ends with its connection.
const OLD_HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n";
const END: &str = "0\r\n\r\n";
const DONE: &str = "data: [DONE]\n\n";

fn token(text: &str) -> String {
    format!("data: {{\"choices\":[{{\"text\":\"{text}\",\"index\":0}}]}}\n\n")
}

/// What ends an answer, in one chunk.
fn last() -> String {
    let last = "data: {\"choices\":[{\"text\":\"!\",\"index\":0,\"finish_reason\":\"length\"}],\"usage\":{\"prompt_tokens\":2,\"completion_tokens\":2}}\n\n";
    chunk(&format!("{last}{DONE}"))
}

/// One HTTP chunk.
fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// What the server does after it has sent its bytes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Then {
    /// Waits for another request.
    Keep,
    /// Closes the connection.
    Close,
    /// Sends nothing more, and reads on.
    Hang,
}

/// What a connection saw.
#[derive(Debug)]
enum Saw {
    Connected,
    Request(Box<Request>),
    /// The client closed it while the server was silent.
    Gone,
}

struct Server {
    url: String,
    saw: mpsc::UnboundedReceiver<Saw>,
    connections: Arc<AtomicUsize>,
}

impl Server {
    /// Answers every request with `bytes`.
    async fn start(bytes: impl Into<Vec<u8>>, then: Then) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (tell, saw) = mpsc::unbounded_channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let (count, bytes) = (Arc::clone(&connections), bytes.into());
        tokio::spawn(async move {
            while let Ok((socket, _)) = listener.accept().await {
                count.fetch_add(1, Ordering::SeqCst);
                let _ = tell.send(Saw::Connected);
                tokio::spawn(talk(socket, bytes.clone(), then, tell.clone()));
            }
        });
        Self {
            url,
            saw,
            connections,
        }
    }

    fn streams(&self, deadline: Duration) -> Streams {
        Streams::new(&self.url, deadline).unwrap()
    }

    fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }
}

async fn talk(mut socket: TcpStream, bytes: Vec<u8>, then: Then, tell: mpsc::UnboundedSender<Saw>) {
    while let Some(request) = Request::read(&mut socket).await {
        let _ = tell.send(Saw::Request(Box::new(request)));
        if socket.write_all(&bytes).await.is_err() {
            break;
        }
        match then {
            Then::Keep => {}
            Then::Close => return,
            Then::Hang => {
                let read = socket.read(&mut [0; 16]).await;
                assert_eq!(read.unwrap_or(0), 0, "nothing is sent twice");
                break;
            }
        }
    }
    let _ = tell.send(Saw::Gone);
}

fn ask() -> Ask {
    Ask::completion(&completion(), "cold")
}

fn completion() -> Completion {
    Completion {
        model: "tiny".into(),
        prompt: Input::Ids(vec![5, 6]),
        max_tokens: 2,
        ignore_eos: true,
        pin: Some(Pin::Worker(u64::MAX)),
        cache_salt: None,
    }
}

/// Asks once. The server lives as long as the runtime.
async fn once(bytes: String, then: Then, deadline: Duration) -> Streamed {
    let server = Server::start(bytes, then).await;
    server.streams(deadline).ask(&ask()).await
}

fn kind(seen: &Streamed) -> RequestFailureKind {
    seen.failure().expect("a failure").kind
}

#[tokio::test]
async fn streams_share_a_connection_and_say_so() {
    let answer = [HEAD, &chunk(&token("a")), &last(), END].concat();
    let mut server = Server::start(answer, Then::Keep).await;
    let streams = server.streams(PATIENCE);
    let mut before = 0;
    for reused in [false, true, true] {
        let seen = streams.ask(&ask()).await;
        assert_eq!(seen.outcome, Outcome::Complete, "{seen:?}");
        assert_eq!(seen.text(0), "a!");
        assert_eq!(seen.connection.reused, reused);
        assert!(seen.connection.connect_ns > 0);
        // Time goes forward, whatever the machine does meanwhile.
        let (head, done) = (seen.head_ns.unwrap(), seen.done_ns.unwrap());
        let stamps = [
            before,
            seen.sent_ns,
            head,
            seen.tokens[0].ns,
            done,
            seen.ended_ns,
        ];
        assert!(stamps.is_sorted(), "{stamps:?}");
        before = seen.ended_ns;
    }
    assert_eq!(server.connections(), 1);
    streams.hang_up();
    assert!(!streams.ask(&ask()).await.connection.reused);

    assert!(matches!(server.saw.recv().await, Some(Saw::Connected)));
    let Some(Saw::Request(request)) = server.saw.recv().await else {
        panic!("no request")
    };
    assert!(
        request.head.starts_with("POST /v1/completions HTTP/1.1"),
        "{request:?}"
    );
    let pin = u64::MAX.to_string();
    assert_eq!(request.header(PIN_HEADER), Some(pin.as_str()));
    assert_eq!(request.header("accept"), Some("text/event-stream"));
    let host = server.url.strip_prefix("http://");
    assert_eq!(request.header("host"), host);
    let body: serde_json::Value = serde_json::from_str(&request.body).unwrap();
    assert_eq!(body["stream"], true);
}

#[tokio::test]
async fn a_request_that_is_prepared_is_not_sent_yet() {
    let answer = [HEAD, &last(), END].concat();
    let mut server = Server::start(answer, Then::Keep).await;
    let streams = server.streams(PATIENCE);
    let opened = streams.open(ask()).await.unwrap();
    assert!(matches!(server.saw.recv().await, Some(Saw::Connected)));
    assert!(server.saw.try_recv().is_err());
    let now = monotonic_ns();
    let arrivals = opened.run().await;
    assert!(arrivals.sent_ns >= now);
    assert!(matches!(server.saw.recv().await, Some(Saw::Request(_))));
    assert_eq!(arrivals.ending, Ending::End);
}

#[tokio::test]
async fn a_server_that_ends_too_early_is_cut_off() {
    let half = &token("b")[..20];
    for (bytes, received, text) in [
        (String::new(), 0, ""),
        (HEAD[..30].to_owned(), 0, ""),
        (HEAD.to_owned(), 0, ""),
        (OLD_HEAD.to_owned(), 0, ""),
        (
            [HEAD, &chunk(&token("a")), &chunk(half)].concat(),
            token("a").len() + 20,
            "a",
        ),
        (
            [OLD_HEAD, &token("a"), half].concat(),
            token("a").len() + 20,
            "a",
        ),
        (
            [HEAD, &chunk(&token("a")), END].concat(),
            token("a").len(),
            "a",
        ),
        // In the middle of an HTTP chunk.
        (
            [HEAD, "ff\r\n", &token("a")].concat(),
            token("a").len(),
            "a",
        ),
    ] {
        let seen = once(bytes.clone(), Then::Close, PATIENCE).await;
        let RequestFailureKind::Truncated { received: got, .. } = kind(&seen) else {
            panic!("{bytes:?}: {seen:?}")
        };
        assert_eq!((got, seen.text(0).as_str()), (received, text), "{bytes:?}");
        assert_eq!(seen.failure().unwrap().class(), Class::Product);
    }
}

#[tokio::test]
async fn a_server_that_never_ends_meets_the_deadline() {
    let seconds = SHORT.as_secs_f64();
    let seen = once(String::new(), Then::Hang, SHORT).await;
    assert_eq!(kind(&seen), RequestFailureKind::NoHead { seconds });
    let alive = chunk(": alive\n\n");
    let seen = once([HEAD, &alive].concat(), Then::Hang, SHORT).await;
    assert_eq!(kind(&seen), RequestFailureKind::NoFirstToken { seconds });
    assert_eq!(seen.counts.comments, 1);
    let seen = once([HEAD, &chunk(&token("a"))].concat(), Then::Hang, SHORT).await;
    assert_eq!(
        kind(&seen),
        RequestFailureKind::Stalled { seconds, chunks: 1 }
    );
    assert_eq!(seen.text(0), "a");
}

#[tokio::test]
async fn a_server_that_holds_the_connection_after_the_end_holds_nobody() {
    let mut server = Server::start([HEAD, &last()].concat(), Then::Hang).await;
    let streams = server.streams(PATIENCE);
    let seen = streams.ask(&ask()).await;
    assert_eq!(seen.outcome, Outcome::Complete);
    while !matches!(server.saw.recv().await, Some(Saw::Gone)) {}
    assert!(!streams.ask(&ask()).await.connection.reused);
}

#[tokio::test]
async fn a_client_can_go_in_mid_stream() {
    let tokens = [token("a"), token("b"), token("c")].map(|token| chunk(&token));
    let mut server = Server::start([HEAD, &tokens.concat()].concat(), Then::Hang).await;
    let streams = server.streams(PATIENCE);
    for (after, text) in [(2, "ab"), (0, "")] {
        let seen = streams.ask(&ask().disconnect_after(after)).await;
        assert_eq!(seen.outcome, Outcome::Disconnected);
        // What was read along with the last of them is kept too.
        assert!(seen.text(0).starts_with(text), "{seen:?}");
        while !matches!(server.saw.recv().await, Some(Saw::Gone)) {}
    }
}

#[tokio::test]
async fn a_connection_that_was_closed_meanwhile_is_replaced() {
    let answer = [HEAD, &last(), END].concat();
    let server = Server::start(answer, Then::Close).await;
    let streams = server.streams(PATIENCE);
    for number in 1..=3 {
        let seen = streams.ask(&ask()).await;
        assert_eq!(seen.outcome, Outcome::Complete, "{seen:?}");
        assert_eq!(server.connections(), number);
    }
}

#[tokio::test]
async fn answers_that_are_no_streams_are_named() {
    let reply = |head: &str, body: &str| {
        format!(
            "HTTP/1.1 {head}\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    let seen = once(reply("503 X", "worker gone"), Then::Keep, PATIENCE).await;
    let expected = RequestFailureKind::Http {
        status: 503,
        body: "worker gone".into(),
    };
    assert_eq!((kind(&seen), seen.status), (expected, Some(503)));
    let json = reply(
        "200 OK\r\ncontent-type: application/json",
        "{\"error\":\"late\"}",
    );
    let seen = once(json, Then::Keep, PATIENCE).await;
    assert!(
        matches!(kind(&seen), RequestFailureKind::NotAStream { .. }),
        "{seen:?}"
    );
    let seen = once("SSH-2.0-x\r\n".into(), Then::Close, PATIENCE).await;
    assert!(
        matches!(kind(&seen), RequestFailureKind::Truncated { .. }),
        "{seen:?}"
    );
}

#[tokio::test]
async fn a_body_without_end_is_refused() {
    let flood = format!("{HEAD}{}", chunk(&": x\n\n".repeat(4 << 20)));
    let seen = once(flood, Then::Hang, PATIENCE).await;
    assert!(matches!(kind(&seen), RequestFailureKind::TooLarge { .. }));
}

#[tokio::test]
async fn nobody_listens() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let streams = Streams::new(&format!("http://{address}"), PATIENCE).unwrap();
    let failure = streams.ask(&ask()).await.failure().unwrap();
    assert!(
        matches!(&failure.kind, RequestFailureKind::Connect(why) if why.contains(&address.to_string()))
    );
    assert_eq!(failure.class(), Class::Inconclusive);
}
