//! Asks a `kvcr_service` for a pool, and holds it.
//!
//! The claim is the open connection. The service watches the process that made it: its death
//! promotes the Guard, a release said in so many words does not. The words are here too; the
//! service uses them.

use std::io::{self, Write};
use std::os::unix::net::UnixStream as BlockingStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use thiserror::Error;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, timeout};

use super::pool::Pool;

/// How long a service may take to be there.
const CONNECT: Duration = Duration::from_secs(60);
/// Between two attempts.
const RETRY: Duration = Duration::from_millis(20);
/// How long a service may take to answer.
const ANSWER: Duration = Duration::from_secs(30);
/// Between two signs of life.
const BEAT: Duration = Duration::from_millis(50);

/// What a claimant wants.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ClaimRequest {
    /// `compatibility_digest`; must be the service's.
    pub digest: String,
    /// `HOST:PORT` of the claimant's control endpoint, which the Guard takes over.
    pub control: String,
    /// Pages wanted; 0 for as many as the service's pool has room for.
    pub slots: usize,
    /// Bytes of one page.
    pub page_bytes: usize,
}

/// What a claimant says, a line each.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Say {
    /// First.
    Claim(ClaimRequest),
    /// It lives.
    Beat,
    /// It does not need the pool any more.
    Release,
}

/// What a service answers to a claim, in a line.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Grant {
    /// The pool is the claimant's.
    Granted {
        /// Directory of the pool.
        pool: PathBuf,
        /// Pages that it has.
        slots: usize,
    },
    /// It is not.
    Refused(String),
}

/// Why there is no pool.
#[derive(Debug, Error)]
pub enum ClaimError {
    /// Nobody listens.
    #[error("KVCR service at {} is not there: {source}", socket.display())]
    Unreachable {
        /// Where.
        socket: PathBuf,
        /// The last attempt's error.
        source: io::Error,
    },
    /// The service said no, in these words.
    #[error("{0}")]
    Refused(String),
    /// The service broke off or did not answer.
    #[error("KVCR service did not answer a claim: {0}")]
    Unanswered(String),
    /// The pool was granted and cannot be opened.
    #[error("KVCR pool cannot be opened: {0}")]
    Pool(#[source] io::Error),
}

/// A pool that is held until this is dropped.
#[derive(Debug)]
pub struct Claim {
    /// The pool, with whatever was in it.
    pub pool: Arc<Pool>,
    connection: Arc<BlockingStream>,
    beats: JoinHandle<()>,
}

impl Claim {
    /// Ends when the service does not hear this claim any more, or the claim is dropped.
    pub fn forsaken(&self) -> impl Future<Output = ()> + Send + use<> {
        let beats = self.beats.abort_handle();
        async move {
            while !beats.is_finished() {
                tokio::time::sleep(BEAT).await;
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.beats.abort();
        // One that falls over has not released anything.
        if !std::thread::panicking() {
            let _ = say(&self.connection, &Say::Release);
        }
    }
}

/// Asks the service at `socket` for a pool.
///
/// # Errors
/// [`ClaimError`], with the service's words where it refuses.
pub async fn claim(socket: &Path, request: ClaimRequest) -> Result<Claim, ClaimError> {
    let page_bytes = request.page_bytes;
    let mut stream = BufReader::new(connect(socket).await?);
    let unanswered = |error: &dyn std::fmt::Display| ClaimError::Unanswered(error.to_string());
    let answered = async {
        stream.write_all(&line(&Say::Claim(request))?).await?;
        let mut text = String::new();
        stream.read_line(&mut text).await?;
        Ok(serde_json::from_str::<Grant>(&text)?)
    };
    let answer: io::Result<Grant> = timeout(ANSWER, answered)
        .await
        .map_err(|error| unanswered(&error))?;
    let (dir, slots) = match answer.map_err(|error| unanswered(&error))? {
        Grant::Granted { pool, slots } => (pool, slots),
        Grant::Refused(why) => return Err(ClaimError::Refused(why)),
    };
    // Written to without a runtime from now on: what is dropped last may have none.
    let connection = stream.into_inner().into_std().map_err(ClaimError::Pool)?;
    let connection = Arc::new(connection);
    let beats = tokio::spawn(beat(Arc::clone(&connection)));
    let pool = Pool::in_file(&dir, slots, page_bytes).map_err(ClaimError::Pool);
    let pool = pool.inspect_err(|_| beats.abort())?;
    Ok(Claim {
        pool: Arc::new(pool),
        connection,
        beats,
    })
}

async fn connect(socket: &Path) -> Result<UnixStream, ClaimError> {
    let deadline = Instant::now() + CONNECT;
    loop {
        match UnixStream::connect(socket).await {
            Ok(stream) => return Ok(stream),
            Err(source) if Instant::now() >= deadline => {
                let socket = socket.to_owned();
                return Err(ClaimError::Unreachable { socket, source });
            }
            Err(_) => tokio::time::sleep(RETRY).await,
        }
    }
}

async fn beat(connection: Arc<BlockingStream>) {
    let mut beats = tokio::time::interval(BEAT);
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        beats.tick().await;
        match say(&connection, &Say::Beat) {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return,
            _ => {}
        }
    }
}

fn say(mut connection: &BlockingStream, what: &Say) -> io::Result<()> {
    connection.write_all(&line(what)?)
}

/// `what` in a line of its own.
pub(crate) fn line(what: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(what)?;
    line.push(b'\n');
    Ok(line)
}
