//! The simulated `kvcr.kvcr_service`: keeps pools for workers, and a Guard for each pool that
//! serves it when its worker dies.
//!
//! - `options`: the real command line.
//! - `holder`: the process that holds a pool.
//! - `asked`: claims in the real service's frames, all of which it refuses.
//! - `guard`: one pool and what becomes of it.
//! - `log`: lines as the real service writes them.
//!
//! Here is the socket: who may claim, and that one failed Guard ends the whole service.

mod asked;
mod guard;
mod holder;
mod log;
mod options;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use rustix::fs::{FlockOperation, flock};
use rustix::process::Pid;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use self::guard::{Broken, Guard};
use self::holder::Holder;
use self::log::{Level, Log};
use self::options::Options;
use super::entry;
use super::fault::{Fault, Faults};
use super::kvcr::claim::{Grant, Say, line};
use super::settings::Latency;

/// How long a client may say nothing.
const IDLE: Duration = Duration::from_secs(30);
/// Bytes of the longest line.
const LONGEST_LINE: u64 = 64 << 10;
/// What every pool's directory begins with.
const PREFIX: &str = "kvcr-";
const OTHER_DIGEST: &str = "KVCR compatibility digest does not match the service";
/// Of the real one; ours has no limit.
const JOURNAL_BYTES: u64 = 104_857_600;

/// Runs the process; `args` are the real program's. Exit status: 0 stopped, 1 failed, 2 a wrong
/// command line.
#[must_use]
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let name = OsString::from("kvcr_service");
    let options = match Options::try_parse_from(std::iter::once(name).chain(args)) {
        Ok(options) => options,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(2);
        }
    };
    let (settings, faults) = match entry::settings() {
        Ok(given) => given,
        Err(why) => {
            errln!("kvcr_service: {why}");
            return ExitCode::from(2);
        }
    };
    let level = options
        .log_level
        .or_else(|| entry::variable("KVCR_LOG_LEVEL")?.parse().ok());
    let log = Log::to_stderr(level.unwrap_or(Level::Info));
    entry::run("kvcr.kvcr_service", async move {
        let ended = match entry::asked_to_stop() {
            Ok(stop) => serve(&options, &faults, settings.latency, &log, stop).await,
            Err(error) => Err(error),
        };
        match ended {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                errln!("OSError: {error}");
                ExitCode::FAILURE
            }
        }
    })
}

/// Serves until `stop` ends or a Guard fails.
///
/// # Errors
/// The service cannot start, or a Guard failed.
async fn serve(
    options: &Options,
    faults: &Arc<Faults>,
    latency: Latency,
    log: &Log,
    stop: impl Future<Output = ()>,
) -> io::Result<()> {
    reclaim(&options.pool_dir, log)?;
    remove_stale(&options.socket_path, log).await?;
    let mut pools = Vec::new();
    let mut guards = Vec::new();
    for index in 0..options.guard_count {
        let pool = OwnedDir::new(&options.pool_dir, index)?;
        guards.push(Guard::new(
            index,
            pool.path.clone(),
            options.pool_bytes(),
            Arc::clone(faults),
            latency,
            log.clone(),
        ));
        pools.push(pool);
    }
    let service = Arc::new(Service {
        guards,
        digest: options.compatibility_digest.clone(),
        heartbeat: options.heartbeat_timeout(),
        faults: Arc::clone(faults),
    });
    let listener = UnixListener::bind(&options.socket_path)?;
    let _socket = Socket(options.socket_path.clone());
    std::fs::set_permissions(&options.socket_path, PermissionsExt::from_mode(0o600))?;
    let text = format!(
        "KVCR service ready: socket={} guards={} pool_sizes_bytes={} journal_bytes={JOURNAL_BYTES}",
        options.socket_path.display(),
        options.guard_count,
        options.pool_sizes(),
    );
    log.info("__main__", &text);

    let accept = || async {
        let (stream, _) = listener.accept().await?;
        let pid = stream.peer_cred()?.pid();
        Ok((stream, pid))
    };
    supervise(&service, accept, log, stop).await
}

/// Attends to everybody whom `accept` lets in, each with the id of its process, until `stop` ends
/// or a Guard fails.
async fn supervise<Accepted>(
    service: &Arc<Service>,
    mut accept: impl FnMut() -> Accepted,
    log: &Log,
    stop: impl Future<Output = ()>,
) -> io::Result<()>
where
    Accepted: Future<Output = io::Result<(UnixStream, Option<i32>)>>,
{
    let mut clients = JoinSet::new();
    tokio::pin!(stop);
    loop {
        tokio::select! {
            () = &mut stop => return Ok(()),
            accepted = accept() => {
                let (stream, pid) = accepted?;
                clients.spawn(attend(Arc::clone(service), stream, pid));
            }
            Some(ended) = clients.join_next() => {
                // A client's task that panicked has lost a pool as well.
                let ended = ended.map_err(io::Error::other)?;
                if let Err(Broken { guard, why }) = ended {
                    log.critical("kvcr.guard", &format!("KVCR Guard {guard} failed"));
                    log.critical("__main__", &format!("KVCR pool {guard} Guard failed"));
                    return Err(io::Error::other(why));
                }
            }
        }
    }
}

struct Service {
    guards: Vec<Guard>,
    digest: String,
    heartbeat: Option<Duration>,
    faults: Arc<Faults>,
}

/// Speaks with one client, and watches it for as long as it holds a pool.
async fn attend(service: Arc<Service>, stream: UnixStream, pid: Option<i32>) -> Result<(), Broken> {
    let mut stream = BufReader::new(stream);
    match timeout(IDLE, asked::is_frame(&mut stream)).await {
        Ok(Ok(true)) => {
            let _ = timeout(IDLE, asked::answer(&service, &mut stream, pid)).await;
            return Ok(());
        }
        Ok(Ok(false)) => {}
        _ => return Ok(()),
    }
    let Ok(Some(Say::Claim(request))) = timeout(IDLE, hear(&mut stream)).await else {
        return Ok(());
    };
    let holder = holder(pid);
    let claimed = async {
        let holder = Arc::new(holder?);
        let fits = request.digest == service.digest || service.faults.tell(Fault::DigestIgnored);
        if service.faults.tell(Fault::ClaimDigest) || !fits {
            return Err(OTHER_DIGEST.to_owned());
        }
        let guard = service.guard_for(&request.control).await;
        let grant = guard.claim(&request, &holder).await?;
        Ok((guard, holder, grant))
    };
    match claimed.await {
        Ok((guard, holder, grant)) => {
            // Should it not hear this, its death will still be seen.
            let _ = answer(&mut stream, &grant).await;
            guard.watch(stream, &holder, service.heartbeat).await
        }
        Err(why) => {
            let _ = answer(&mut stream, &Grant::Refused(why)).await;
            Ok(())
        }
    }
}

/// Whoever asks, so that its death is seen.
fn holder(pid: Option<i32>) -> Result<Holder, String> {
    pid.and_then(Pid::from_raw)
        .ok_or(io::ErrorKind::NotFound.into())
        .and_then(Holder::open)
        .map_err(|error| format!("worker pidfd is required without SO_PEERPIDFD: {error}"))
}

impl Service {
    /// The Guard that answers on `control`, else the first that answers nowhere yet.
    async fn guard_for(&self, control: &str) -> &Guard {
        let mut unused = None;
        for guard in &self.guards {
            match guard.control().await {
                Some(own) if own == control => return guard,
                None if unused.is_none() => unused = Some(guard),
                _ => {}
            }
        }
        // It will say why not.
        unused.unwrap_or(&self.guards[0])
    }
}

async fn answer(stream: &mut BufReader<UnixStream>, grant: &Grant) -> io::Result<()> {
    stream.write_all(&line(grant)?).await
}

/// What a client says next; `None` at the end, and for what cannot be understood.
async fn hear(stream: &mut BufReader<UnixStream>) -> Option<Say> {
    let mut text = Vec::new();
    let mut bounded = stream.take(LONGEST_LINE);
    let length = bounded.read_until(b'\n', &mut text).await.ok()?;
    if length == 0 {
        return None;
    }
    serde_json::from_slice(&text).ok()
}

/// Removes what dead services left in `dir`.
fn reclaim(dir: &Path, log: &Log) -> io::Result<()> {
    let entries = std::fs::read_dir(dir).map_err(|error| {
        let text = format!(
            "KVCR pool directory does not exist: {}: {error}",
            dir.display()
        );
        io::Error::new(error.kind(), text)
    })?;
    for path in entries.flatten().map(|entry| entry.path()) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        // As the real one's file: locked by the service whose pool it is.
        let Ok(lock) = File::open(&path) else {
            continue;
        };
        if !name.starts_with(PREFIX) {
            continue;
        }
        if flock(&lock, FlockOperation::NonBlockingLockShared).is_ok() {
            let size = std::fs::metadata(path.join("pool")).map_or(0, |meta| meta.len());
            std::fs::remove_dir_all(&path)?;
            let text = format!(
                "Reclaimed orphaned KVCR pool from a dead instance: {} ({size} bytes)",
                path.display()
            );
            log.warning("__main__", &text);
        } else {
            let text = format!("Leaving KVCR pool still in use: {}", path.display());
            log.info("__main__", &text);
        }
    }
    Ok(())
}

/// A pool's directory, removed with the service.
struct OwnedDir {
    path: PathBuf,
    _lock: File,
}

impl OwnedDir {
    fn new(dir: &Path, index: usize) -> io::Result<Self> {
        let id = uuid::Uuid::new_v4().simple();
        let path = dir.join(format!("{PREFIX}{id}-pool_{index}"));
        std::fs::create_dir(&path)?;
        let lock = File::open(&path)?;
        flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for OwnedDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

/// The socket's file, removed with the service.
struct Socket(PathBuf);

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// Removes a socket that nobody listens on; a live service there is an error.
async fn remove_stale(path: &Path, log: &Log) -> io::Result<()> {
    let there = std::fs::symlink_metadata(path);
    if !there.is_ok_and(|meta| meta.file_type().is_socket()) {
        return Ok(());
    }
    match UnixStream::connect(path).await {
        Ok(_) => {
            let text = format!("another KVCR service is listening on {}", path.display());
            Err(io::Error::new(io::ErrorKind::AddrInUse, text))
        }
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            let text = format!("Removing stale KVCR service socket: {}", path.display());
            log.warning("__main__", &text);
            std::fs::remove_file(path)
        }
        Err(error) => {
            let text = format!(
                "KVCR service socket is not usable: {}: {error}",
                path.display()
            );
            Err(io::Error::new(error.kind(), text))
        }
    }
}
