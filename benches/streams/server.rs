//! A server that writes streams at known times, and keeps when it did.
//!
//! A process of its own with one thread. Frames are made before the first one is due, so that
//! between a due time and a stamp there is nothing but the timer; the head goes out with the first
//! token, so that requests that come together are stamped together. All times are nanoseconds of
//! `CLOCK_MONOTONIC`.
//!
//! `GET /stamps?itl_ms=50` gives the [`Stamps`] of every stream so far and forgets them; from then
//! on tokens of a stream are that far apart.

use std::io::{IoSliceMut, Write};
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvcr_phase1::stack::clock::monotonic_ns;
use nix::cmsg_space;
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::{TimeSpec, TimeValLike};
use rustix::time::{ClockId, clock_gettime};
use tokio::io::{AsyncWriteExt, Interest};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::LocalSet;
use tokio::time::Instant;

use crate::Problem;
use crate::outputs::Stamps;

/// What the model is called.
pub(crate) const MODEL: &str = "tiny";
/// Tokens of every stream, one to a chunk.
pub(crate) const TOKENS: usize = 40;
/// The first token of a stream comes after this, and a part of [`SPREAD`].
const TTFT: Duration = Duration::from_millis(200);
const SPREAD: Duration = Duration::from_millis(600);

/// What there was, and how it goes on.
#[derive(Default)]
struct State {
    count: usize,
    itl: Duration,
    stamps: Vec<Stamps>,
}

type Served = Rc<Mutex<State>>;

fn state(served: &Served) -> MutexGuard<'_, State> {
    served.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Says its address on standard output, and serves until standard input ends.
pub(crate) fn serve() -> Result<(), Problem> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        let socket = TcpSocket::new_v4()?;
        socket.bind(([127, 0, 0, 1], 0).into())?;
        // Room for all who come at once: whoever finds none tries again a second later.
        let listener = socket.listen(4096)?;
        println!("http://{}", listener.local_addr()?);
        std::io::stdout().flush()?;
        let (end, mut ended) = tokio::sync::oneshot::channel::<()>();
        std::thread::spawn(move || {
            let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
            drop(end);
        });
        let served = Served::default();
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = &mut ended => return Ok(()),
            };
            let (stream, _) = accepted?;
            stream.set_nodelay(true)?;
            setsockopt(&stream, sockopt::ReceiveTimestampns, &true)?;
            let served = Rc::clone(&served);
            // A peer that hangs up is its own affair: what was written until then counts.
            tokio::task::spawn_local(async move { connection(stream, &served).await.ok() });
        }
    })
}

async fn connection(mut stream: TcpStream, served: &Served) -> std::io::Result<()> {
    let mut bytes = Vec::with_capacity(16 << 10);
    loop {
        bytes.clear();
        let received_ns;
        let request = loop {
            let Some(at) = read(&stream, &mut bytes).await? else {
                return Ok(());
            };
            if let Some(request) = Request::whole(&bytes) {
                received_ns = at;
                break request;
            }
        };
        if request.streamed {
            tokens(&mut stream, served, received_ns, &request).await?;
            continue;
        }
        let answer = match request.path.split_once("?itl_ms=") {
            Some((_, itl)) => {
                let mut state = state(served);
                state.itl = Duration::from_millis(itl.parse().unwrap_or(0));
                serde_json::to_string(&std::mem::take(&mut state.stamps))?
            }
            None if request.path == "/v1/models" => format!(
                r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","owned_by":"bench"}}]}}"#
            ),
            None => "{}".to_owned(),
        };
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
        let whole = format!("{head}: {}\r\n\r\n{answer}", answer.len());
        stream.write_all(whole.as_bytes()).await?;
    }
}

/// Reads once; when the kernel took the last of it, or `None` at the end. Not when we got round to
/// reading it: of many requests that come together most wait for this process, and that is no
/// error of who sent them.
async fn read(stream: &TcpStream, into: &mut Vec<u8>) -> std::io::Result<Option<u64>> {
    let mut buffer = [0; 16 << 10];
    loop {
        stream.readable().await?;
        let read = stream.try_io(Interest::READABLE, || {
            let mut space = cmsg_space!(TimeSpec);
            let mut slices = [IoSliceMut::new(&mut buffer)];
            let flags = MsgFlags::empty();
            let got = recvmsg::<()>(stream.as_raw_fd(), &mut slices, Some(&mut space), flags)?;
            let mut stamps = got.cmsgs()?.filter_map(|message| match message {
                ControlMessageOwned::ScmTimestampns(at) => Some(at),
                _ => None,
            });
            Ok((got.bytes, stamps.next()))
        });
        match read {
            Ok((0, _)) => return Ok(None),
            Ok((bytes, stamp)) => {
                into.extend_from_slice(&buffer[..bytes]);
                let now = monotonic_ns();
                let waited = stamp.map_or(0, |at| real_ns().saturating_sub(ns(at)));
                return Ok(Some(now.saturating_sub(waited)));
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
}

fn ns(at: TimeSpec) -> u64 {
    u64::try_from(at.num_nanoseconds()).unwrap_or(0)
}

/// The kernel's clock for stamps; only differences of it are used.
fn real_ns() -> u64 {
    let at = clock_gettime(ClockId::Realtime);
    ns(TimeSpec::new(at.tv_sec, at.tv_nsec))
}

/// What has to be known of a request.
struct Request<'a> {
    path: &'a str,
    id: Option<&'a str>,
    streamed: bool,
    chat: bool,
}

impl<'a> Request<'a> {
    /// `None` while some of it is missing.
    fn whole(bytes: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (head, body) = text.split_once("\r\n\r\n")?;
        let header = |wanted: &str| {
            head.lines().find_map(|line| {
                let (name, value) = line.split_once(':')?;
                name.eq_ignore_ascii_case(wanted).then_some(value.trim())
            })
        };
        let length = header("content-length").and_then(|length| length.parse::<usize>().ok());
        if body.len() < length.unwrap_or(0) {
            return None;
        }
        let path = head.split(' ').nth(1)?;
        Some(Self {
            path,
            id: header("x-request-id"),
            streamed: path.ends_with("completions"),
            chat: path.ends_with("/chat/completions"),
        })
    }
}

async fn tokens(
    stream: &mut TcpStream,
    served: &Served,
    received_ns: u64,
    request: &Request<'_>,
) -> std::io::Result<()> {
    let chat = request.chat;
    let began = Instant::now();
    let (number, itl) = {
        let mut state = state(served);
        state.count += 1;
        (state.count - 1, state.itl)
    };
    let first = TTFT + SPREAD.mul_f64((number as f64 * 0.618_033_988_749_895).fract());
    // Every token says the same, so there is one frame to make, whoever waits meanwhile.
    let token = token(number, chat);
    let mut with_head = HEAD.as_bytes().to_vec();
    with_head.extend_from_slice(&token);
    let end = end(number, chat);
    let mut stamps = Stamps {
        number,
        request_id: request.id.map(str::to_owned),
        received_ns,
        written_ns: Vec::with_capacity(TOKENS),
        late_ns: Vec::with_capacity(TOKENS),
    };
    let mut sent = Ok(());
    for place in 0..TOKENS as u32 {
        let due = began + first + itl * place;
        tokio::time::sleep_until(due).await;
        stamps.written_ns.push(monotonic_ns());
        let late = due.elapsed().as_nanos();
        stamps.late_ns.push(u64::try_from(late).unwrap_or(u64::MAX));
        let piece = if place == 0 { &with_head } else { &token };
        sent = stream.write_all(piece).await;
        if sent.is_err() {
            break;
        }
    }
    // Before the end is sent: whoever saw the end may ask for the stamps.
    state(served).stamps.push(stamps);
    sent?;
    stream.write_all(&end).await
}

const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

fn token(number: usize, chat: bool) -> Vec<u8> {
    let choice = match chat {
        true => format!(r#""delta":{{"role":"assistant","content":"s{number} "}}"#),
        false => format!(r#""text":"s{number} ""#),
    };
    chunk(&frame(
        number,
        chat,
        &format!(r#"[{{"index":0,{choice},"finish_reason":null}}]"#),
        "",
    ))
}

fn end(number: usize, chat: bool) -> Vec<u8> {
    let nothing = if chat {
        r#""delta":{}"#
    } else {
        r#""text":"""#
    };
    let total = TOKENS + 16;
    let usage = format!(
        r#","usage":{{"prompt_tokens":16,"completion_tokens":{TOKENS},"total_tokens":{total}}}"#
    );
    let frames = [
        frame(
            number,
            chat,
            &format!(r#"[{{"index":0,{nothing},"finish_reason":"length"}}]"#),
            "",
        ),
        frame(number, chat, "[]", &usage),
        "data: [DONE]\n\n".to_owned(),
    ];
    let mut bytes = chunk(&frames.concat());
    bytes.extend_from_slice(b"0\r\n\r\n");
    bytes
}

fn frame(number: usize, chat: bool, choices: &str, usage: &str) -> String {
    let (id, object) = match chat {
        true => ("chatcmpl", "chat.completion.chunk"),
        false => ("cmpl", "text_completion"),
    };
    format!(
        "data: {{\"id\":\"{id}-{number}\",\"object\":\"{object}\",\"created\":1,\"model\":\"{MODEL}\",\"choices\":{choices}{usage}}}\n\n"
    )
}

fn chunk(data: &str) -> Vec<u8> {
    format!("{:x}\r\n{data}\r\n", data.len()).into_bytes()
}
