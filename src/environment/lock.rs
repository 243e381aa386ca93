//! Who may touch an installed thing: locks that end with the process that holds them.
//!
//! Two files stand beside the directory `<place>/<name>` that they guard, never in it, because
//! it may be wiped:
//! - `.<name>.install`: exclusive; held by the one that installs, repairs or removes.
//! - `.<name>.use`: shared; held by everything that runs from the directory. Exclusive for
//!   a moment by whoever wants to wipe it.
//!
//! Both are `flock`s, so a crash leaves nothing stale. A lock belongs to the open file, which a
//! child can inherit ([`super::child::work`]).

use std::fs::{File, Metadata};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::failure::Failure;

use super::progress::Reporter;

/// A lock that is held until this is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Lock {
    /// The open file, for a child that must keep the lock as long as it lives.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Writes who holds it, for the message that others print while they wait.
    fn sign(&mut self) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.seek(SeekFrom::Start(0))?;
        write!(self.file, "{}", std::process::id())?;
        self.file.flush()
    }
}

/// The lock of those who change `directory`.
pub(crate) fn install_path(directory: &Path) -> PathBuf {
    beside(directory, "install")
}

/// The lock of those who run from `directory`.
pub(crate) fn use_path(directory: &Path) -> PathBuf {
    beside(directory, "use")
}

fn beside(directory: &Path, what: &str) -> PathBuf {
    let name = directory.file_name().unwrap_or_default().to_string_lossy();
    directory.with_file_name(format!(".{name}.{what}"))
}

/// Takes a lock if nobody holds it in the way; `None` if somebody does.
pub(crate) fn attempt(path: &Path, operation: FlockOperation) -> io::Result<Option<Lock>> {
    loop {
        let file = open(path)?;
        match flock(&file, operation) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => return Ok(None),
            Err(Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        // A removal deletes lock files. A lock on a deleted file excludes nobody: begin again.
        if same(&file.metadata()?, path) {
            return Ok(Some(Lock { file }));
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    match File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
    {
        // A cache baked into a read-only image can still be used: a lock needs no writing.
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied
            ) && path.exists() =>
        {
            File::open(path)
        }
        other => other,
    }
}

fn same(held: &Metadata, path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|now| now.ino() == held.ino() && now.dev() == held.dev())
}

/// Takes the install lock, waiting for whoever has it, and saying so.
pub(crate) fn wait_to_install(
    directory: &Path,
    limit: Duration,
    reporter: &mut dyn Reporter,
) -> Result<Lock, Failure> {
    let path = install_path(directory);
    let started = std::time::Instant::now();
    loop {
        match attempt(&path, FlockOperation::NonBlockingLockExclusive) {
            Ok(Some(mut lock)) => {
                lock.sign()
                    .map_err(|error| unusable(&path, &error.to_string()))?;
                return Ok(lock);
            }
            Ok(None) if started.elapsed() >= limit => {
                return Err(Failure::environment(format!(
                    "another install holds {}",
                    path.display()
                ))
                .expected(format!("its end within {} s", limit.as_secs()))
                .found(waiting_for(&path))
                .hint("look at what that process does, or stop it, and run this again"));
            }
            Ok(None) => {
                reporter.step(&format!("Waiting for {}", waiting_for(&path)));
                std::thread::sleep(Duration::from_millis(150));
            }
            Err(error) => return Err(unusable(&path, &error.to_string())),
        }
    }
}

fn waiting_for(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(path) {
        let _ = file.take(32).read_to_string(&mut text);
    }
    match text.trim().parse::<i32>() {
        Ok(pid) if alive(pid) => format!("another install (pid {pid})"),
        // Its children inherited the lock and still write.
        Ok(pid) => format!("what a killed install (pid {pid}) left running"),
        Err(_) => "another install".to_owned(),
    }
}

fn alive(pid: i32) -> bool {
    rustix::process::Pid::from_raw(pid)
        .is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

/// The failure for a place that cannot be locked.
pub(crate) fn unusable(path: &Path, why: &str) -> Failure {
    Failure::environment(format!("cannot lock {}", path.display()))
        .expected("a writable directory on a local file system")
        .found(why)
        .hint("name another cache directory: --cache DIR or PHASE1_CACHE=DIR")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::progress::Silent;

    #[test]
    fn users_share_and_whoever_wipes_excludes_them() {
        let place = tempfile::tempdir().unwrap();
        let path = use_path(&place.path().join("cpu"));
        let one = attempt(&path, FlockOperation::NonBlockingLockShared).unwrap();
        let two = attempt(&path, FlockOperation::NonBlockingLockShared).unwrap();
        assert!(one.is_some() && two.is_some());
        let wiping = || attempt(&path, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(wiping().is_none());
        drop((one, two));
        assert!(wiping().is_some());
    }

    #[test]
    fn a_lock_on_a_deleted_file_is_taken_again() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("lock");
        let old = attempt(&path, FlockOperation::NonBlockingLockExclusive).unwrap();
        std::fs::remove_file(&path).unwrap();
        let new = attempt(&path, FlockOperation::NonBlockingLockExclusive).unwrap();
        assert!(old.is_some() && new.is_some());
        assert!(path.exists());
    }

    #[test]
    fn waiting_ends_with_a_reason() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("cpu");
        let held = wait_to_install(&directory, Duration::ZERO, &mut Silent).unwrap();
        let failure =
            wait_to_install(&directory, Duration::from_millis(200), &mut Silent).unwrap_err();
        let pid = std::process::id();
        assert_eq!(failure.found, Some(format!("another install (pid {pid})")));
        drop(held);
        assert!(wait_to_install(&directory, Duration::ZERO, &mut Silent).is_ok());
    }
}
