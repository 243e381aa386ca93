//! Where locks, sockets, generations and logs are.
//!
//! ```text
//! <state>/                          0700, ours
//!   devices/<id>.lock               held by the supervisor that uses the device
//!   ports/<port>.lock               held by the supervisor that uses the port
//!   <first 12 of fingerprint>/
//!     lock                          held by the supervisor for life: its liveness
//!     sock                          one connection is one lease
//!     launch.json  state.json  generation  supervisor.log
//!     g7/logs/<process>.log         kept for the last few generations
//!     g7/inventory.json             what must be gone when the generation is
//!     g7/reference/                 results of this generation's reference engine
//!     g7/run/                       scratch, removed with the generation
//! ```
//!
//! Everything that can be wrong with the directory is said here, in one sentence, before
//! anything starts.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};

use crate::atomic;
use crate::failure::Failure;

/// `sun_path` holds 108 bytes and ends with a zero.
pub const SOCKET_PATH_MAX: usize = 107;

/// What to do about a state directory that cannot be used.
pub const ELSEWHERE: &str = "name another directory: --state-dir DIR or PHASE1_STATE_DIR=DIR";
/// What to do about one whose path is too long.
pub const SHORTER: &str = "name a shorter directory: --state-dir DIR or PHASE1_STATE_DIR=DIR";

/// Characters of the fingerprint that name its directory.
const SHORT: usize = 12;

/// The longest scratch directory that a stack in the state directory `path` may come to have.
#[must_use]
pub fn longest_scratch(path: &Path) -> PathBuf {
    // Generations of one fingerprint are counted up for ever; nobody has seen four digits.
    StackDir(path.join("0".repeat(SHORT))).scratch(9999)
}

/// The directory all stacks of one user share.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StateDir(PathBuf);

impl StateDir {
    /// Creates the directory where it is missing and refuses one that is not safe to use.
    pub fn open(path: &Path) -> Result<Self, Failure> {
        let path = std::path::absolute(path).map_err(|error| unusable(path, &error))?;
        create(&path)?;
        let found = fs::symlink_metadata(&path).map_err(|error| unusable(&path, &error))?;
        let me = rustix::process::geteuid().as_raw();
        if !found.is_dir() || found.uid() != me {
            return Err(Failure::environment(format!(
                "the state directory {} cannot be trusted",
                path.display()
            ))
            .expected(format!("a directory of user {me}"))
            .found(if found.is_dir() {
                format!("a directory of user {}", found.uid())
            } else {
                "something else".to_owned()
            })
            .hint(ELSEWHERE));
        }
        if found.mode() & 0o077 != 0 {
            fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700))
                .map_err(|error| unusable(&path, &error))?;
        }
        Ok(Self(path))
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The directory of one fingerprint, created where it is missing.
    pub fn stack(&self, fingerprint: &str) -> Result<StackDir, Failure> {
        let safe = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        if fingerprint.is_empty() || !fingerprint.bytes().all(safe) {
            return Err(Failure::environment(format!(
                "{fingerprint:?} is not a fingerprint"
            )));
        }
        let dir = StackDir(self.0.join(&fingerprint[..fingerprint.len().min(SHORT)]));
        let length = dir.socket().as_os_str().as_bytes().len();
        if length > SOCKET_PATH_MAX {
            return Err(Failure::environment(format!(
                "the state directory {} is too long for a unix socket",
                self.0.display()
            ))
            .expected(format!("socket paths of at most {SOCKET_PATH_MAX} bytes"))
            .found(format!("{length} bytes"))
            .hint(SHORTER));
        }
        create(&dir.0)?;
        Ok(dir)
    }

    /// Directories of every fingerprint that was ever started here.
    pub fn stacks(&self) -> Vec<StackDir> {
        let Ok(entries) = fs::read_dir(&self.0) else {
            return Vec::new();
        };
        let mut dirs: Vec<_> = entries
            .filter_map(|entry| Some(StackDir(entry.ok()?.path())))
            .filter(|dir| dir.lock().exists())
            .collect();
        dirs.sort_by(|a, b| a.0.cmp(&b.0));
        dirs
    }

    /// The lock file of a device.
    pub fn device_lock(&self, id: &str) -> Result<PathBuf, Failure> {
        let dir = self.0.join("devices");
        create(&dir)?;
        // Device names come from drivers (`GPU-8a6…`, `0000:1b:00.0`): keep them one component.
        let name: String = id
            .chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || "-_.:".contains(c) {
                    c
                } else {
                    '_'
                }
            })
            .collect();
        Ok(dir.join(format!("{name}.lock")))
    }

    /// The directory of port locks.
    pub fn ports(&self) -> Result<PathBuf, Failure> {
        let dir = self.0.join("ports");
        create(&dir)?;
        Ok(dir)
    }
}

/// The directory of one fingerprint.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct StackDir(PathBuf);

impl StackDir {
    /// A directory that is known to be one; nothing is checked.
    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The directory itself.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Held by the supervisor for life. Never removed: a second file of that name would be a
    /// second lock.
    pub fn lock(&self) -> PathBuf {
        self.0.join("lock")
    }

    /// Where the supervisor listens.
    pub fn socket(&self) -> PathBuf {
        self.0.join("sock")
    }

    /// What the supervisor was started with.
    pub fn launch(&self) -> PathBuf {
        self.0.join("launch.json")
    }

    /// The supervisor's last word about itself.
    pub fn state(&self) -> PathBuf {
        self.0.join("state.json")
    }

    /// Runs whose stack somebody stopped on purpose while they held it or waited for it.
    pub fn ended_runs(&self) -> PathBuf {
        self.0.join("ended-runs.json")
    }

    /// The supervisor's log, which is also its standard output and error.
    pub fn log(&self) -> PathBuf {
        self.0.join("supervisor.log")
    }

    /// Directory of one generation.
    pub fn generation(&self, number: u64) -> PathBuf {
        self.0.join(format!("g{number}"))
    }

    /// Working directory of the processes of one generation.
    pub fn scratch(&self, number: u64) -> PathBuf {
        self.generation(number).join("run")
    }

    /// Generations that left a directory, oldest first.
    pub fn generations(&self) -> Vec<u64> {
        let Ok(entries) = fs::read_dir(&self.0) else {
            return Vec::new();
        };
        let mut numbers: Vec<u64> = entries
            .filter_map(|entry| {
                entry
                    .ok()?
                    .file_name()
                    .to_str()?
                    .strip_prefix('g')?
                    .parse()
                    .ok()
            })
            .collect();
        numbers.sort_unstable();
        numbers
    }

    /// The next generation's number, made durable before it is used: a number that was seen
    /// anywhere never comes back, even after a power cut.
    pub fn next_generation(&self) -> Result<u64, Failure> {
        let file = self.0.join("generation");
        let recorded = fs::read_to_string(&file)
            .ok()
            .and_then(|text| text.trim().parse::<u64>().ok())
            .unwrap_or(0);
        // Should the file be lost, the directories still tell.
        let seen = self.generations().last().copied().unwrap_or(0);
        let next = recorded.max(seen) + 1;
        atomic::replace_durably(&file, format!("{next}\n").as_bytes())
            .map_err(|error| unusable(&file, &error))?;
        Ok(next)
    }

    /// Takes the supervisor's lock if nobody has it.
    pub fn try_lock(&self) -> Result<Option<File>, Failure> {
        try_lock(&self.lock())
    }
}

/// Takes the lock on `path` if nobody has it. It lasts as long as any copy of the descriptor.
pub fn try_lock(path: &Path) -> Result<Option<File>, Failure> {
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|error| unusable(path, &error))?;
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(Some(file)),
            Err(rustix::io::Errno::WOULDBLOCK) => return Ok(None),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(unusable(path, &error.into())),
        }
    }
}

/// Creates a directory (and its parents) that only we may enter.
pub fn create(path: &Path) -> Result<(), Failure> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(|error| unusable(path, &error))
}

/// The one sentence for whatever the file system refuses.
pub fn unusable(path: &Path, error: &io::Error) -> Failure {
    Failure::environment(format!("{} cannot be used: {error}", path.display())).hint(ELSEWHERE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generations_rise_even_when_the_file_is_lost() {
        let temporary = tempfile::tempdir().unwrap();
        let dir = StateDir::open(temporary.path())
            .unwrap()
            .stack("abc")
            .unwrap();
        assert_eq!(dir.next_generation().unwrap(), 1);
        assert_eq!(dir.next_generation().unwrap(), 2);
        fs::create_dir(dir.generation(9)).unwrap();
        fs::remove_file(dir.path().join("generation")).unwrap();
        assert_eq!(dir.next_generation().unwrap(), 10);
    }

    #[test]
    fn a_lock_is_had_once() {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("lock");
        let first = try_lock(&path).unwrap();
        assert!(first.is_some());
        assert!(try_lock(&path).unwrap().is_none());
        drop(first);
        assert!(try_lock(&path).unwrap().is_some());
    }

    #[test]
    fn a_fingerprint_cannot_leave_the_directory() {
        let temporary = tempfile::tempdir().unwrap();
        let state = StateDir::open(temporary.path()).unwrap();
        assert!(state.stack("../escape").is_err());
        assert!(state.stack("").is_err());
        let device = state.device_lock("../GPU 0").unwrap();
        assert_eq!(device.parent().unwrap(), temporary.path().join("devices"));
    }
}
