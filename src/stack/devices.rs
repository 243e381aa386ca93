//! One lock a device, so that two stacks never share one by accident.
//!
//! Held by a supervisor while a generation of it lives. Whoever finds it taken asks the holder's
//! supervisor to leave: an idle one stops, a leased one is named to the client and left alone.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

use super::leftovers::Leftovers;
use super::protocol::{Ask, Tell};
use super::state_dir::{StackDir, StateDir, try_lock, unusable};
use super::wait::{self, Gave, Look};
use crate::failure::Failure;

/// Who holds a device; the content of its lock file.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Holder {
    /// Which configuration.
    pub fingerprint: String,
    /// Profile name, for people.
    pub profile: String,
    /// Pid of its supervisor.
    pub pid: u32,
    /// Where its supervisor listens.
    pub socket: PathBuf,
}

/// Why the devices were not had.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum NotHad {
    /// Somebody uses one of them.
    Busy(String),
    /// The machine is in the way.
    Failed(Failure),
}

/// Takes the locks of all `ids`, asking idle holders to leave. They last as long as the files.
pub async fn take(
    state: &StateDir,
    ids: &[String],
    me: &Holder,
    patience: Duration,
    say: impl Fn(String),
) -> Result<Vec<File>, NotHad> {
    // One order for everyone: two stacks that want the same pair cannot block each other.
    let mut ids: Vec<&String> = ids.iter().collect();
    ids.sort();
    ids.dedup();
    let mut locks = Vec::new();
    for id in ids {
        let path = state.device_lock(id).map_err(NotHad::Failed)?;
        let lock = wait::until(patience, Duration::from_millis(50), || {
            look(&path, id, me, &say)
        })
        .await
        .map_err(|gave| match gave {
            Gave::Failed(why) => why,
            Gave::Up { last, .. } => NotHad::Busy(last),
        })?;
        locks.push(lock);
    }
    Ok(locks)
}

async fn look(path: &Path, id: &str, me: &Holder, say: &impl Fn(String)) -> Look<File, NotHad> {
    match try_lock(path) {
        Err(failure) => Look::Failed(NotHad::Failed(failure)),
        Ok(Some(mut file)) => {
            if let Some(last) = read_holder(path)
                && last.fingerprint != me.fingerprint
                && let Err(failure) = sweep_after(&last).await
            {
                return Look::Failed(NotHad::Failed(failure));
            }
            match write_holder(&mut file, me) {
                Ok(()) => Look::Ready(file),
                Err(error) => Look::Failed(NotHad::Failed(unusable(path, &error))),
            }
        }
        Ok(None) => {
            let Some(holder) = read_holder(path) else {
                return Look::NotYet(format!(
                    "device {id} is held by a supervisor that is starting"
                ));
            };
            say(format!(
                "device {id}: held by {} ({})",
                holder.profile, holder.pid
            ));
            match evict(&holder, me).await {
                Some(Tell::Busy { holder: case }) => Look::Failed(NotHad::Busy(format!(
                    "device {id}: {case}, on the stack of {}",
                    holder.profile
                ))),
                // Stopped, or it is just going away by itself: look again.
                _ => Look::NotYet(format!(
                    "device {id} is held by the stack of {} (supervisor {})",
                    holder.profile, holder.pid
                )),
            }
        }
    }
}

/// A supervisor that was killed leaves its lock free and, perhaps, a grandchild on the device.
/// Nobody may ever start its stack again, so whoever takes the device cleans up.
async fn sweep_after(last: &Holder) -> Result<(), Failure> {
    let Some(dir) = last
        .socket
        .parent()
        .filter(|dir| dir.exists())
        .map(StackDir::at)
    else {
        return Ok(());
    };
    // Taken: its supervisor lives and cleans up by itself.
    let Some(_lock) = dir.try_lock()? else {
        return Ok(());
    };
    Leftovers::of(&dir, &last.fingerprint, None).sweep().await?;
    Ok(())
}

fn write_holder(file: &mut File, me: &Holder) -> std::io::Result<()> {
    file.set_len(0)?;
    file.seek(SeekFrom::Start(0))?;
    file.write_all(&serde_json::to_vec(me).unwrap_or_default())
}

fn read_holder(path: &Path) -> Option<Holder> {
    let mut text = String::new();
    File::open(path)
        .ok()?
        .take(64 * 1024)
        .read_to_string(&mut text)
        .ok()?;
    serde_json::from_str(&text).ok()
}

async fn evict(holder: &Holder, me: &Holder) -> Option<Tell> {
    let mut stream = UnixStream::connect(&holder.socket).await.ok()?;
    let ask = Ask::Evict {
        by: format!("{} ({})", me.profile, me.pid),
    };
    let mut line = serde_json::to_vec(&ask).ok()?;
    line.push(b'\n');
    stream.write_all(&line).await.ok()?;
    let mut answer = String::new();
    // No time-out: the answer comes when the other stack is down, and its death is an EOF.
    BufReader::new(stream.take(64 * 1024))
        .read_line(&mut answer)
        .await
        .ok()?;
    serde_json::from_str(&answer).ok()
}
