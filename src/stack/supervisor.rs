//! The supervisor: keeps one stack alive and serves leases. One process a fingerprint.
//!
//! It is this binary, executed again with [`SUPERVISE`] as first argument, in a session of its
//! own. It has no policy beyond *start, count, stop*:
//!
//! ```text
//! nothing ──a lease──► Starting ──ready──► Ready ──idle, down, evict, a death──► stopping ──► exit
//!                       ▲     │ failed
//!                       │     ▼
//!           another run └── Failed (remembered for the run)
//! ```
//!
//! `desk` answers clients, `connection` reads and writes their lines, `generation` is one
//! life of the stack, `prepare` what comes before its first spawn, `group` a set of its
//! processes as a task, `taken` what somebody else has, `reference` the KVCR-off engine beside it, `view` what people see.
//!
//! Everything runs on the main thread: the death signal of a child follows the thread that
//! forked it. Whatever can block is a task; the loop here only decides.

mod connection;
mod desk;
mod generation;
mod group;
mod prepare;
mod reference;
pub(crate) mod taken;
mod view;

use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use self::connection::{ConnId, Event, accept};
use self::desk::{Desk, Order};
use self::view::View;
use super::lease::LaunchSpec;
use super::process;
use super::protocol::Tell;
use super::state_dir::StackDir;
use crate::engine::Blueprint;
use crate::failure::Failure;

/// First argument of a supervisor. Hidden: people never type it.
pub const SUPERVISE: &str = "__supervise";

/// How long a supervisor without a stack stays: it only keeps an answer.
const UNWANTED_KEEP: Duration = Duration::from_secs(60);
/// A client that does not read its last line in time does not get it.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// The log is started afresh when a new supervisor finds it this large.
pub(super) const LOG_MAX: u64 = 4 * 1024 * 1024;

/// Makes a [`Blueprint`] of what [`LaunchSpec::launch`] holds.
pub type Build<'a> = &'a dyn Fn(&serde_json::Value) -> Result<Box<dyn Blueprint>, Failure>;

/// A line for `supervisor.log`, which is this process's standard error.
fn log(text: &str) {
    // A full disk must not take the stack down.
    let _ = writeln!(io::stderr(), "{:.3} {text}", jiff::Timestamp::now());
}

/// Runs a supervisor; `args` are those after [`SUPERVISE`].
pub fn main(args: impl IntoIterator<Item = OsString>, build: Build<'_>) -> ExitCode {
    match enter(args, build) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(&format!("cannot supervise: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn enter(args: impl IntoIterator<Item = OsString>, build: Build<'_>) -> io::Result<()> {
    let args: Vec<OsString> = args.into_iter().collect();
    let [dir, lock, listener] = args.as_slice() else {
        return Err(io::Error::other(
            "this is started by the harness, never by hand",
        ));
    };
    let number = |text: &OsString| -> io::Result<RawFd> {
        text.to_str()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| io::Error::other("not a descriptor"))
    };
    // Held until the very end: the lock is this process's liveness.
    let _lock: OwnedFd = process::adopt(number(lock)?)?;
    let listener = UnixListener::from(process::adopt(number(listener)?)?);
    let dir = StackDir::at(dir);
    let spec: LaunchSpec = serde_json::from_slice(&fs::read(dir.launch())?)?;
    process::become_subreaper()?;
    listener.set_nonblocking(true)?;
    // Single-threaded, on the main thread; see above.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let (sender, events) = mpsc::channel(64);
        let supervisor = Supervisor {
            desk: Desk::new(&spec.fingerprint),
            build,
            events,
            door: tokio::spawn(accept(listener, sender)),
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            children: signal(SignalKind::child())?,
            born: Instant::now(),
            spec: Arc::new(spec),
            dir,
        };
        supervisor.run().await;
        io::Result::Ok(())
    })
}

/// Why a stack is stopped.
struct Stop {
    /// Who waits for the word that it is.
    reply: Option<ConnId>,
    why: String,
}

impl Stop {
    fn because(why: impl Into<String>) -> Self {
        Self {
            reply: None,
            why: why.into(),
        }
    }
}

/// How a generation ended.
enum End {
    Stopped(Stop),
    Failed(Failure),
    Busy(String),
}

struct Supervisor<'a> {
    spec: Arc<LaunchSpec>,
    dir: StackDir,
    build: Build<'a>,
    desk: Desk,
    events: mpsc::Receiver<Event>,
    door: JoinHandle<()>,
    terminate: Signal,
    interrupt: Signal,
    children: Signal,
    born: Instant,
}

impl Supervisor<'_> {
    async fn run(mut self) {
        log(&format!(
            "supervisor {} of {} ({})",
            std::process::id(),
            self.spec.profile,
            self.spec.fingerprint
        ));
        let mut failure = None;
        let stop = loop {
            // A failure belongs to the run that asked; so nothing starts before somebody asks.
            if let Some(stop) = self.until_wanted(failure.take()).await {
                break stop;
            }
            match self.generation().await {
                End::Stopped(stop) => break stop,
                End::Busy(holder) => {
                    self.close_door();
                    self.desk.busy(&holder);
                    break Stop::because(format!("busy: {holder}"));
                }
                End::Failed(why) => {
                    log(&format!("failed: {why}"));
                    self.desk.failed(&why);
                    failure = Some(why);
                }
            }
        };
        self.close_door();
        log(&format!("exit: {}", stop.why));
        let _ = fs::remove_file(self.dir.state());
        if let Some(id) = stop.reply {
            self.desk.tell(id, Tell::Stopped);
        }
        // Lets the last words out. Connections end with this process, the lock after them.
        drop(self.desk);
        let quiet = async { while self.events.recv().await.is_some() {} };
        let _ = tokio::time::timeout(LAST_WORDS, quiet).await;
    }
    /// Waits until a lease wants a stack. Meanwhile those whose run has its failure get it.
    async fn until_wanted(&mut self, failure: Option<Failure>) -> Option<Stop> {
        let view = View {
            state: if failure.is_some() {
                "failed"
            } else {
                "starting"
            },
            // The one that failed: its logs are still there.
            generation: match failure {
                Some(_) => self.dir.generations().last().copied().unwrap_or(0),
                None => 0,
            },
            failure,
            ..View::default()
        };
        self.write_state(&view);
        loop {
            let idle_at = self.desk.idle_since().map(|since| since + UNWANTED_KEEP);
            tokio::select! {
                Some(event) = self.events.recv() => match self.desk.hear(event) {
                    Some(Order::Start) => return None,
                    Some(Order::Status(id)) => self.tell_status(id, &view),
                    Some(Order::Stop(id, why)) => return Some(Stop { reply: Some(id), why }),
                    _ => {}
                },
                () = at(idle_at) => return Some(Stop::because("nobody asks")),
                why = asked_to_end(&mut self.terminate, &mut self.interrupt) => {
                    return Some(Stop::because(why));
                }
            }
        }
    }

    /// From here on new clients find no socket; those in the backlog read EOF.
    fn close_door(&self) {
        let _ = fs::remove_file(self.dir.socket());
        self.door.abort();
    }
}

async fn asked_to_end(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}
