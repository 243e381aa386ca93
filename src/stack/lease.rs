//! Client side of the shared stack: find or start the supervisor, hold a lease.
//!
//! The connection is the lease: the kernel ends it with this process, whatever kills it. Whoever
//! finds nobody listening takes the lock, binds the socket and hands both to a new supervisor,
//! so there is no moment in which the lock is free or the socket unbound; everyone else connects
//! and waits in the backlog.
//!
//! [`acquire`] blocks: call it outside of any runtime; `cancel` ends the wait. Nothing that a
//! held [`Lease`] offers does. What an exclusive one may do to the stack is in `harm`.

mod harm;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::ended;
use super::harm::{Death, Done};
use super::process::{Placement, Spawn};
use super::protocol::{Ask, Mode, PROTOCOL, StackInfo, Tell, WorkerInfo};
use super::state_dir::{StackDir, StateDir, unusable};
use super::supervisor::{LOG_MAX, SUPERVISE};
use super::tail;
use super::wait::{self, Patience};
use crate::atomic;
use crate::failure::Failure;

/// Longest line of a supervisor: a plan with its environment, many times over.
const LINE_MAX: u64 = 8 * 1024 * 1024;
/// How often a waiting client looks around.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// On top of the supervisor's own limits, whose messages are better than a client's.
const MARGIN: Duration = Duration::from_secs(180);
/// Supervisors that may vanish before they say anything final.
const VANISH_MAX: u32 = 5;

/// Everything needed to start the stack of one fingerprint, by whoever comes first.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct LaunchSpec {
    /// Where locks, sockets and logs are (`Paths::state`).
    pub state_dir: PathBuf,
    /// Hash over everything that makes two stacks different. Letters, digits, `-` and `_`.
    pub fingerprint: String,
    /// Profile name, for people.
    pub profile: String,
    /// Whether it stands in for the product, which everybody is told.
    #[serde(default)]
    pub simulated: bool,
    /// Devices that the stack must have for itself, by any unique name (`GPU-8a6…`).
    pub devices: Vec<String>,
    /// The binary that knows [`SUPERVISE`].
    pub exe: PathBuf,
    /// How long an unused stack stays up.
    pub keep_seconds: u64,
    /// How long an unused reference engine stays up.
    pub reference_keep_seconds: u64,
    /// How long bring-up may take.
    pub bring_up_seconds: u64,
    /// Hard limit of one supervisor's life.
    pub max_lifetime_seconds: u64,
    /// What the supervisor makes its blueprint of. Opaque here.
    pub launch: serde_json::Value,
}

/// Who wants the stack, and how.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct LeaseRequest {
    /// The run it belongs to: a failed bring-up is remembered for one run.
    pub run_id: String,
    /// `tc01::cold`.
    pub case: String,
    /// How it wants the stack.
    pub mode: Mode,
}

/// What happens while a lease is waited for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Progress {
    /// No stack was up: this process starts one.
    Starting,
    /// Bring-up goes on.
    Step {
        /// What was reached.
        text: String,
        /// Milliseconds since bring-up began.
        at_ms: u64,
    },
    /// The lease waits for others.
    Queued {
        /// Cases that hold the stack.
        behind: Vec<String>,
    },
    /// The supervisor went away before it answered; the client begins again.
    Again,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Starting => f.write_str("starting the stack"),
            Self::Step { text, at_ms } => {
                write!(f, "{:>5}.{} s {text}", at_ms / 1000, at_ms / 100 % 10)
            }
            Self::Queued { behind } => write!(f, "waiting for {}", behind.join(", ")),
            Self::Again => f.write_str("the stack went away; asking again"),
        }
    }
}

/// The right to use the stack, until it is dropped.
#[derive(Debug)]
pub struct Lease {
    stack: StackInfo,
    wire: Wire,
    limit: Duration,
    heard: Mutex<Heard>,
}

#[derive(Debug, Default)]
struct Heard {
    broken: Option<Failure>,
    reference: Option<Result<(WorkerInfo, u64), Failure>>,
    deaths: Vec<Death>,
    done: BTreeMap<u64, Done>,
    numbers: u64,
    harmed: BTreeSet<String>,
}

impl Lease {
    /// The running stack.
    pub fn stack(&self) -> &StackInfo {
        &self.stack
    }

    /// Makes sure the reference engine runs, and keeps it until the lease ends. The number is
    /// the milliseconds it took to start, 0 if it was running. Whoever drops the future only
    /// stops waiting: the engine starts all the same.
    pub async fn reference(&self) -> Result<(WorkerInfo, u64), Failure> {
        if let Some(known) = self.reference_so_far() {
            return known;
        }
        self.wire
            .say(&Ask::Reference)
            .map_err(|error| lost(&error.to_string()))?;
        let mut patience = Patience::new(self.limit);
        loop {
            if let Some(known) = self.reference_so_far() {
                return known;
            }
            if patience.spent() {
                return Err(too_late(patience.bound(), "the reference engine"));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// What was said of the reference engine, or what keeps anything from being said. Does not
    /// block.
    fn reference_so_far(&self) -> Option<Result<(WorkerInfo, u64), Failure>> {
        let mut heard = self.heard();
        self.take_in(&mut heard);
        match (&heard.reference, &heard.broken) {
            (Some(known), _) => Some(known.clone()),
            (None, Some(failure)) => Some(Err(failure.clone())),
            (None, None) => None,
        }
    }

    /// Why the stack is not what it was when the lease was granted, if so. Does not block.
    pub fn broken(&self) -> Option<Failure> {
        let mut heard = self.heard();
        self.take_in(&mut heard);
        heard.broken.clone()
    }

    fn take_in(&self, heard: &mut Heard) {
        loop {
            match self.wire.hear_now() {
                Word::Said(tell) => heard.hear(tell),
                Word::Nothing => return,
                Word::Gone(why) => {
                    heard.broken.get_or_insert_with(|| lost(&why));
                    return;
                }
            }
        }
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        // Each field is replaced whole; a panic elsewhere cannot leave half of one.
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Heard {
    fn hear(&mut self, tell: Tell) {
        match tell {
            Tell::Broken { failure } => {
                self.broken.get_or_insert(failure);
            }
            Tell::ReferenceReady { worker, start_ms } => {
                self.reference = Some(Ok((worker, start_ms)));
            }
            Tell::Failed { failure } => self.reference = Some(Err(failure)),
            Tell::Died { death } => self.deaths.push(death),
            Tell::Done { number, done } => {
                self.done.insert(number, *done);
            }
            _ => {}
        }
    }

    fn next_number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }
}

/// Leases the stack of `spec`, starting it if nobody has. Blocks until it is ready and this
/// lease's turn, `cancel` is set, or something is in the way.
pub fn acquire(
    spec: &LaunchSpec,
    request: &LeaseRequest,
    report: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Lease, Failure> {
    let state = StateDir::open(&spec.state_dir)?;
    let dir = state.stack(&spec.fingerprint)?;
    let limit = Duration::from_secs(spec.bring_up_seconds) + MARGIN;
    let mut patience = Patience::new(limit);
    let mut vanished = 0;
    while vanished < VANISH_MAX {
        if let Some(failure) = ended::failure(&dir, &request.run_id) {
            return Err(failure);
        }
        let Some(stream) = connect(spec, &dir, &mut patience, report, cancel)? else {
            return Err(too_late(limit, "an earlier stack to stop"));
        };
        let wire = Wire::new(stream).map_err(|error| unusable(&dir.socket(), &error))?;
        match wait(&wire, spec, request, &mut patience, report, cancel)? {
            Some(stack) => {
                return Ok(Lease {
                    stack,
                    wire,
                    limit,
                    heard: Mutex::default(),
                });
            }
            None => {
                report(Progress::Again);
                vanished += 1;
            }
        }
    }
    Err(
        Failure::environment("the supervisor of the stack ends before it answers")
            .found(format!("{VANISH_MAX} times"))
            .cause(last_line(&dir), dir.log()),
    )
}

/// A connection to the supervisor, which is started if there is none. `None`: out of patience.
fn connect(
    spec: &LaunchSpec,
    dir: &StackDir,
    patience: &mut Patience,
    report: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Option<UnixStream>, Failure> {
    loop {
        match UnixStream::connect(dir.socket()) {
            Ok(stream) => return Ok(Some(stream)),
            Err(error) if nobody_listens(&error) => {}
            Err(error) => return Err(unusable(&dir.socket(), &error)),
        }
        // Taken: somebody is about to bind the socket, or to stop.
        if let Some(lock) = dir.try_lock()? {
            report(Progress::Starting);
            start_supervisor(spec, dir, lock)?;
            continue;
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(interrupted());
        }
        if patience.spent() {
            return Ok(None);
        }
        wait::pause(LOOK_EVERY);
    }
}

fn nobody_listens(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused
    )
}

/// Binds the socket and hands it, with the lock, to a new supervisor.
fn start_supervisor(spec: &LaunchSpec, dir: &StackDir, lock: File) -> Result<(), Failure> {
    let at = |path: PathBuf| move |error: io::Error| unusable(&path, &error);
    match fs::remove_file(dir.socket()) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(unusable(&dir.socket(), &error));
        }
        _ => {}
    }
    let launch = serde_json::to_vec_pretty(spec).map_err(|error| {
        Failure::environment(format!("the launch description is not JSON: {error}"))
    })?;
    atomic::replace_durably(&dir.launch(), &launch).map_err(at(dir.launch()))?;
    let large = fs::metadata(dir.log()).is_ok_and(|found| found.len() > LOG_MAX);
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(dir.log())
        .map_err(at(dir.log()))?;
    if large {
        log.set_len(0).map_err(at(dir.log()))?;
    }
    // Last, because from here on others connect and wait for an answer.
    let listener = UnixListener::bind(dir.socket()).map_err(at(dir.socket()))?;
    let number = |fd: i32| OsString::from(fd.to_string());
    let spawned = Spawn {
        program: spec.exe.as_os_str(),
        args: &[
            SUPERVISE.into(),
            dir.path().into(),
            number(lock.as_raw_fd()),
            number(listener.as_raw_fd()),
        ],
        env: &Default::default(),
        directory: dir.path(),
        output: &log,
        placement: Placement::Session,
        keep: &[lock.as_fd(), listener.as_fd()],
    }
    .spawn();
    match spawned {
        Ok(leader) => {
            // It outlives most of us; where it does not, it must not stay a zombie.
            thread::spawn(move || leader.reap());
            Ok(())
        }
        Err(error) => {
            let _ = fs::remove_file(dir.socket());
            Err(
                Failure::environment(format!("the supervisor cannot be started: {error}"))
                    .expected(format!("{} to be executable", spec.exe.display())),
            )
        }
    }
}

/// Asks for the lease and waits. `None`: the supervisor went away before it gave an answer.
fn wait(
    wire: &Wire,
    spec: &LaunchSpec,
    request: &LeaseRequest,
    patience: &mut Patience,
    report: &mut dyn FnMut(Progress),
    cancel: &AtomicBool,
) -> Result<Option<StackInfo>, Failure> {
    let asked = wire.say(&Ask::Lease {
        protocol: PROTOCOL,
        fingerprint: spec.fingerprint.clone(),
        run_id: request.run_id.clone(),
        case: request.case.clone(),
        mode: request.mode,
        pid: std::process::id(),
    });
    if asked.is_err() {
        return Ok(None);
    }
    loop {
        match wire.hear_within(LOOK_EVERY) {
            Word::Said(Tell::Ready { stack }) => return Ok(Some(*stack)),
            Word::Said(Tell::Failed { failure }) => return Err(failure),
            Word::Said(Tell::Busy { holder }) => {
                return Err(
                    Failure::environment("the device is in use by another stack")
                        .found(holder)
                        .hint("wait for it, or stop it: `kvcr-phase1 down --force`"),
                );
            }
            Word::Said(Tell::Step { text, at_ms }) => report(Progress::Step { text, at_ms }),
            Word::Said(Tell::Queued { behind }) => {
                report(Progress::Queued { behind });
                // Others' work is not bring-up: their own deadlines bound this wait.
                *patience = Patience::new(patience.bound());
            }
            Word::Said(_) | Word::Nothing => {}
            Word::Gone(_) => return Ok(None),
        }
        if cancel.load(Ordering::Relaxed) {
            return Err(interrupted());
        }
        if patience.spent() {
            return Err(too_late(patience.bound(), "the stack"));
        }
    }
}

fn interrupted() -> Failure {
    Failure::inconclusive("interrupted while waiting for the stack")
}

fn too_late(limit: Duration, what: &str) -> Failure {
    Failure::environment(format!("gave up waiting for {what}"))
        .expected(format!("an answer within {} s", limit.as_secs()))
        .hint("`kvcr-phase1 status` says what it does and where its logs are")
}

fn lost(why: &str) -> Failure {
    Failure::inconclusive("the supervisor of the stack is gone").found(why)
}

fn last_line(dir: &StackDir) -> String {
    let last = tail::lines(&dir.log(), 1, 4096).pop();
    last.unwrap_or_else(|| "its log is empty".to_owned())
}

/// A connection whose lines a thread reads, so that nobody ever blocks on a half line.
#[derive(Debug)]
pub(super) struct Wire {
    stream: UnixStream,
    lines: Mutex<Receiver<Result<Tell, String>>>,
}

/// What came over the wire.
#[derive(Debug)]
pub(super) enum Word {
    /// One line.
    Said(Tell),
    /// Nothing so far.
    Nothing,
    /// The other side is gone, and how.
    Gone(String),
}

impl Wire {
    pub(super) fn new(stream: UnixStream) -> io::Result<Self> {
        let reader = stream.try_clone()?;
        // Bounded: a client that does not listen is dropped by the supervisor, not buffered for.
        let (sender, lines) = sync_channel(64);
        thread::Builder::new()
            .name("stack lease".to_owned())
            .spawn(move || read(reader, &sender))?;
        Ok(Self {
            stream,
            lines: Mutex::new(lines),
        })
    }

    pub(super) fn say(&self, ask: &Ask) -> io::Result<()> {
        let mut line = serde_json::to_vec(ask)?;
        line.push(b'\n');
        (&self.stream).write_all(&line)
    }

    pub(super) fn hear_within(&self, time: Duration) -> Word {
        match self.lines().recv_timeout(time) {
            Ok(line) => Word::of(line),
            Err(RecvTimeoutError::Timeout) => Word::Nothing,
            Err(RecvTimeoutError::Disconnected) => {
                Word::Gone("the connection is closed".to_owned())
            }
        }
    }

    fn hear_now(&self) -> Word {
        match self.lines().try_recv() {
            Ok(line) => Word::of(line),
            Err(TryRecvError::Empty) => Word::Nothing,
            Err(TryRecvError::Disconnected) => Word::Gone("the connection is closed".to_owned()),
        }
    }

    fn lines(&self) -> MutexGuard<'_, Receiver<Result<Tell, String>>> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Word {
    fn of(line: Result<Tell, String>) -> Self {
        match line {
            Ok(tell) => Self::Said(tell),
            Err(why) => Self::Gone(why),
        }
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Ends the reader's copy of the descriptor too, which would otherwise keep the lease.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

fn read(stream: UnixStream, lines: &SyncSender<Result<Tell, String>>) {
    let mut reader = BufReader::new(stream);
    loop {
        let mut line = Vec::new();
        let read = (&mut reader).take(LINE_MAX).read_until(b'\n', &mut line);
        let tell = match read {
            Ok(_) if line.last() == Some(&b'\n') => serde_json::from_slice(&line)
                .map_err(|error| format!("not of the protocol: {error}")),
            Ok(0) => return,
            Ok(_) => Err("half a line".to_owned()),
            Err(error) => Err(error.to_string()),
        };
        let last = tell.is_err();
        if lines.send(tell).is_err() || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a client hears when this is all that was ever sent.
    fn heard(sent: &str) -> Vec<Word> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(sent.as_bytes()).unwrap();
        drop(theirs);
        let wire = Wire::new(ours).unwrap();
        let one = || wire.hear_within(Duration::from_secs(60));
        vec![one(), one()]
    }

    #[test]
    fn half_a_line_is_never_taken_for_a_whole_one() {
        let line = serde_json::to_string(&Tell::Queued { behind: vec![] }).unwrap();
        let whole = heard(&format!("{line}\n"));
        assert!(matches!(&whole[..], [Word::Said(_), Word::Gone(_)]));
        let half = heard(&line);
        assert!(matches!(&half[..], [Word::Gone(why), Word::Gone(_)] if why == "half a line"));
    }

    #[test]
    fn nothing_is_believed_after_a_line_that_is_not_of_the_protocol() {
        let line = serde_json::to_string(&Tell::Queued { behind: vec![] }).unwrap();
        let words = heard(&format!("nonsense\n{line}\n"));
        assert!(
            matches!(&words[..], [Word::Gone(_), Word::Gone(_)]),
            "{words:?}"
        );
    }

    #[test]
    fn progress_is_told_in_words() {
        let step = Progress::Step {
            text: "worker0 answers".to_owned(),
            at_ms: 12_345,
        };
        assert_eq!(step.to_string(), "   12.3 s worker0 answers");
        let behind = vec!["a".to_owned(), "b".to_owned()];
        assert_eq!(Progress::Queued { behind }.to_string(), "waiting for a, b");
    }
}
