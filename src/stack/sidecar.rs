//! Services that somebody else runs, seen from the stack that needs them: are they there, may our
//! workers claim their pools, and are they still the same.
//!
//! What is looked at is what a claim of kvcr 0.1.1 needs, no more:
//! - a *connect*: a socket's file alone is a stale one;
//! - one user: the socket and the pool are `0600`;
//! - the service can watch our workers: by the kernel's pidfd of a peer (Linux 6.5), or by a PID
//!   namespace that both share. The service is asked, for only it knows;
//! - the digest that our workers come with, and a pool that no living worker has;
//! - one `/dev/shm`: a worker opens the pool by its path;
//! - a log that we can read, with the lines that a promotion is timed by.
//!
//! `claim` is how it is asked, `watch` what is seen of its end. Nothing here signals anybody.

pub(crate) mod claim;
mod watch;

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{PidfdFlags, getpid, pidfd_open};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;

use self::claim::{Answer, Message};
use super::tail::Mark;
use super::wait::{self, Gave, Look};
use crate::failure::Failure;
use crate::plan::External;
use crate::telemetry::guard::{Event, Journal};

pub(crate) use self::watch::watch;

/// A service that is there answers a question in milliseconds; one that starves, later.
const ANSWER: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// The line of a claim is written before the worker hears of it; who collects it may be late.
const LOGGED: Duration = Duration::from_secs(10);
/// What every pool begins with.
const POOL: &str = "kvcr-";
/// Why a pool cannot be claimed that could, later.
const HELD: &str = "a living worker has its pool";
/// How to start them, for people.
const START: &str = "start them with what `kvcr-phase1 services --print` prints for this profile";

/// A service that our workers may claim a pool of.
#[derive(Clone, Debug)]
pub struct Sidecar {
    /// What was expected.
    pub(crate) external: External,
    /// Port on the loopback interface that it goes on answering on, where it was claimed before.
    pub(crate) control: Option<u16>,
    /// Who it is.
    who: Peer,
    /// Where its log ended before our workers came.
    pub(crate) log: Mark,
}

/// Who listens: the file that was connected to, and the process behind it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Peer {
    /// Device and number of the socket's file.
    file: (u64, u64),
    /// As far as it can be seen from here: 0 in another PID namespace.
    pid: i32,
    uid: u32,
}

/// Waits at most `bound` until each of `services` accepts, and says why our workers could not claim
/// its pool, if so.
///
/// # Errors
/// Environment: which one it is, what it lacks, and what to do.
pub(crate) async fn await_all(
    services: Vec<External>,
    bound: Duration,
    say: &impl Fn(String),
) -> Result<Vec<Sidecar>, Failure> {
    let mut found = Vec::new();
    for service in services {
        let name = service.name.clone();
        let last = RefCell::new(String::new());
        let looked = wait::until(bound, LOOK_EVERY, || async {
            let seen = look(service.clone(), ANSWER.min(bound)).await;
            if let Look::NotYet(missing) = &seen
                && last.replace(missing.clone()) != *missing
            {
                say(format!("waiting for {name}: {missing}"));
            }
            seen
        });
        match looked.await {
            Ok(sidecar) => {
                say(format!("{name}: accepts, and its pool can be claimed"));
                found.push(sidecar);
            }
            Err(Gave::Failed(failure)) => return Err(failure),
            Err(Gave::Up { after, last }) => {
                let expected = format!("a kvcr_service within {} s", after.as_secs());
                return Err(missing(&name, &last).expected(expected));
            }
        }
    }
    Ok(found)
}

/// One look at a service, for people: what there is, or why our workers could not claim its pool.
///
/// # Errors
/// As [`await_all`].
pub(crate) fn examine(external: &External) -> Result<String, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::environment("no runtime").found(error))?;
    match runtime.block_on(look(external.clone(), ANSWER)) {
        Look::Ready(sidecar) => Ok(match sidecar.control {
            None => "accepts; nobody has claimed its pool".to_owned(),
            Some(port) => format!("accepts; its pool was claimed before, by port {port}"),
        }),
        // That may be a worker of ours.
        Look::NotYet(missing) if missing == HELD => Ok(format!("accepts; {missing}")),
        Look::NotYet(why) => Err(missing(&external.name, &why).expected("a kvcr_service")),
        Look::Failed(failure) => Err(failure),
    }
}

fn missing(name: &str, why: &str) -> Failure {
    Failure::environment(format!(
        "{name}, which somebody else runs, does not serve: {why}"
    ))
    .hint(START)
}

/// One look at one service.
async fn look(external: External, answer: Duration) -> Look<Sidecar, Failure> {
    let (stream, who) = match connect(&external.socket).await {
        Ok(connected) => connected,
        Err(error) => return unconnected(&external, &error),
    };
    let me = rustix::process::geteuid().as_raw();
    if let Some(failure) = wrong_user(&external, who.uid, me) {
        return Look::Failed(failure);
    }
    let log = Mark::now(&external.log);
    let control = match wait::within(answer, ask(stream, &external.digest)).await {
        None => {
            return Look::NotYet(format!(
                "somebody accepts at {}, and does not answer a claim; is it a kvcr_service?",
                external.socket.display()
            ));
        }
        Some(Err(error)) => match error.kind() {
            io::ErrorKind::InvalidData => return Look::Failed(foreign(&external, &error)),
            _ => return Look::NotYet(error.to_string()),
        },
        Some(Ok(answer)) => match understand(&external, answer) {
            Look::Ready(control) => control,
            Look::NotYet(missing) => return Look::NotYet(missing),
            Look::Failed(failure) => return Look::Failed(failure),
        },
    };
    if let Some(failure) = unshared(&external).or_else(|| unreadable(&external)) {
        return Look::Failed(failure);
    }
    Look::Ready(Sidecar {
        external,
        control,
        who,
        log,
    })
}

async fn connect(socket: &Path) -> io::Result<(UnixStream, Peer)> {
    let file = fs::metadata(socket)?;
    let stream = UnixStream::connect(socket).await?;
    let peer = stream.peer_cred()?;
    let who = Peer {
        file: (file.dev(), file.ino()),
        pid: peer.pid().unwrap_or(0),
        uid: peer.uid(),
    };
    Ok((stream, who))
}

/// Why a connect failed. Whoever starts the services may still be about to.
fn unconnected(external: &External, error: &io::Error) -> Look<Sidecar, Failure> {
    let socket = &external.socket;
    let at = socket.display();
    let file = fs::symlink_metadata(socket);
    let why = match error.kind() {
        io::ErrorKind::PermissionDenied => {
            let owner = file.map_or("another".to_owned(), |found| found.uid().to_string());
            return Look::Failed(
                Failure::environment(format!("{}: we may not connect to it", external.name))
                    .expected(format!(
                        "{at} of user {}",
                        rustix::process::geteuid().as_raw()
                    ))
                    .found(format!("of user {owner}"))
                    .hint("run the services and the harness as the same user: kvcr_service makes its socket 0600"),
            );
        }
        io::ErrorKind::NotFound => match socket.parent() {
            Some(directory) if !directory.is_dir() => {
                format!("there is no directory {}", directory.display())
            }
            _ => format!("there is no socket {at}"),
        },
        // Nobody accepts, and there is no room to wait any more.
        io::ErrorKind::WouldBlock => format!("nobody accepts at {at}"),
        _ if file.is_ok_and(|found| !found.file_type().is_socket()) => {
            format!("{at} is no socket")
        }
        io::ErrorKind::ConnectionRefused => {
            format!("nobody listens at {at}, which an ended service left behind")
        }
        _ => format!("{at}: {error}"),
    };
    Look::NotYet(why)
}

/// A worker opens the pool, which is `0600`; the service may have to kill a worker.
fn wrong_user(external: &External, theirs: u32, ours: u32) -> Option<Failure> {
    (theirs != ours && ours != 0).then(|| {
        Failure::environment(format!("{} belongs to another user", external.name))
            .expected(format!("user {ours}, as our workers: the pool is 0600"))
            .found(format!("user {theirs}"))
            .hint("run the services and the harness as the same user (docker: --user)")
    })
}

/// Asks, as a worker would.
async fn ask(mut stream: UnixStream, digest: &str) -> io::Result<Message> {
    let question = claim::question(digest);
    let sent = stream
        .async_io(Interest::WRITABLE, || send_with_self(&stream, &question))
        .await?;
    stream
        .write_all(question.get(sent..).unwrap_or_default())
        .await?;
    let mut header = [0; 4];
    stream
        .read_exact(&mut header)
        .await
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => io::Error::other("it hung up on a claim"),
            _ => error,
        })?;
    let strange = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let length = claim::length(header).ok_or_else(|| strange("what it says is no frame"))?;
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await?;
    let message = claim::read(&body).ok_or_else(|| strange("what it says cannot be read"))?;
    if message == Message::Other {
        // Nothing of it was used.
        stream.write_all(&claim::release()).await?;
        let _ = stream.read(&mut header).await;
    }
    Ok(message)
}

/// A worker sends a pidfd of itself along, for kernels that do not give the service one.
fn send_with_self(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    let myself = pidfd_open(getpid(), PidfdFlags::empty())?;
    let descriptors = [myself.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let sent = sendmsg(
        stream,
        &[IoSlice::new(bytes)],
        &mut control,
        SendFlags::NOSIGNAL,
    )?;
    Ok(sent)
}

/// What the answer means for our workers: the port that theirs must be.
fn understand(external: &External, message: Message) -> Look<Option<u16>, Failure> {
    let name = &external.name;
    match Answer::of(&message) {
        Answer::Free => Look::Ready(None),
        Answer::Bound(address) if *address.ip() == Ipv4Addr::LOCALHOST => {
            Look::Ready(Some(address.port()))
        }
        Answer::Bound(address) => Look::Failed(moved(external, address)),
        Answer::Held => Look::NotYet(HELD.to_owned()),
        Answer::Busy(words) => Look::NotYet(words),
        Answer::OtherDigest => Look::Failed(
            Failure::environment(format!("{name} was started for another stack"))
                .expected(format!("--compatibility-digest {}", external.digest))
                .found("another one: its model, layout or releases are not ours")
                .hint(START),
        ),
        Answer::Unwatched(words) => Look::Failed(
            Failure::environment(format!("{name} cannot watch our processes"))
                .expected("Linux 6.5, or one PID namespace for services and workers, with its /proc")
                .found(words)
                .hint("let the containers share a PID namespace (docker: --pid=container:NAME; a pod: shareProcessNamespace), or use a newer kernel"),
        ),
        Answer::Granted => Look::Failed(
            Failure::skew(format!("{name} grants a claim that nobody can be granted"))
                .expected("kvcr 0.1.1")
                .hint("compare its release with the environment's; src/stack/sidecar/claim.rs asks it"),
        ),
        Answer::Strange(words) => Look::Failed(foreign(external, &words)),
    }
}

fn moved(external: &External, address: SocketAddrV4) -> Failure {
    Failure::environment(format!(
        "{} answers for its worker on another address than ours have",
        external.name
    ))
    .expected("127.0.0.1: it was claimed before, and cannot be moved")
    .found(address)
    .hint("start the service again")
}

fn foreign(external: &External, words: &dyn std::fmt::Display) -> Failure {
    Failure::environment(format!(
        "whoever listens on the socket of {} is no kvcr_service that we know",
        external.name
    ))
    .expected("a refusal in the words of kvcr 0.1.1")
    .found(words)
    .hint(
        "see who listens (`ss -xlp`), and compare the release of kvcr there with the environment's",
    )
}

/// A worker opens the pool by its path, and it must be the same file.
fn unshared(external: &External) -> Option<Failure> {
    let directory = &external.pool_dir;
    let failed = |what: &str, found: String| {
        Failure::environment(format!("{}: {what}", external.name))
            .expected(format!("its pool in {}", directory.display()))
            .found(found)
    };
    const SHARED: &str = "give both the same /dev/shm (docker: --ipc=container:NAME; a pod: one emptyDir of medium Memory), and the service this --pool-dir";
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) => {
            return Some(
                failed("its pool cannot be seen from here", error.to_string()).hint(SHARED),
            );
        }
    };
    let mut pools: Vec<_> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(POOL))
        .map(|entry| entry.path())
        .collect();
    pools.sort();
    let mut found = "none there".to_owned();
    for pool in pools {
        let file = match File::open(&pool) {
            Ok(file) => file,
            Err(error) => {
                found = format!("{}: {error}", pool.display());
                continue;
            }
        };
        // Whoever has a pool has it locked; one that can be locked was left behind.
        if flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok() {
            found = format!("{}, which nobody uses", pool.display());
            continue;
        }
        let (kind, bytes) = match file.metadata() {
            Ok(meta) => (meta.is_file(), meta.len()),
            Err(_) => continue,
        };
        if kind && bytes < external.pool_bytes {
            return Some(
                failed("its pool is too small", format!("{bytes} bytes"))
                    .expected(format!("at least {} bytes", external.pool_bytes))
                    .hint(START),
            );
        }
        return None;
    }
    Some(failed("its pool cannot be seen from here", found).hint(SHARED))
}

fn unreadable(external: &External) -> Option<Failure> {
    let error = File::open(&external.log).err()?;
    Some(
        Failure::environment(format!("{}: its log cannot be read", external.name))
            .expected(external.log.display())
            .found(error)
            .hint("redirect what it says to this file: a takeover is timed by these lines"),
    )
}

/// Whether the logs of `sidecars` say what a promotion is timed by: the workers that have just
/// come are in them, or nobody ever will be.
///
/// # Errors
/// Environment, if a log is another one, has another level, or was rotated.
pub(crate) async fn attached(
    sidecars: &[Sidecar],
    say: &(impl Fn(String) + Sync + ?Sized),
) -> Result<(), Failure> {
    attached_within(LOGGED, sidecars, say).await
}

async fn attached_within(
    bound: Duration,
    sidecars: &[Sidecar],
    say: &(impl Fn(String) + Sync + ?Sized),
) -> Result<(), Failure> {
    for sidecar in sidecars {
        let name = &sidecar.external.name;
        let look = || async {
            match sidecar.log.since() {
                Err(error) => Look::Failed(error),
                Ok(text) => match Journal::read(&text).count(is_attached) {
                    0 => Look::NotYet(format!("{} bytes, and no such line", text.len())),
                    _ => Look::Ready(text),
                },
            }
        };
        let failed = |found: String| {
            Failure::environment(format!("the log of {name} does not say who claimed its pool"))
                .expected(format!("primary_attached in {}", sidecar.external.log.display()))
                .found(found)
                .hint("start the service with --log-level DEBUG, and let nobody else write or rotate this file")
        };
        let text = wait::until(bound, LOOK_EVERY, look)
            .await
            .map_err(|gave| failed(gave.to_string()))?;
        if text.contains("stage=handback_done") {
            say(format!(
                "{name}: its Guard still served for a worker of an earlier stack, and gave the pool back"
            ));
        }
    }
    Ok(())
}

fn is_attached(event: &Event) -> bool {
    matches!(event, Event::Attached { .. })
}

#[cfg(test)]
mod tests;
