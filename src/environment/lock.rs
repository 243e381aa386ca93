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
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{PidfdFlags, Signal};

use crate::failure::Failure;
use crate::stack::wait::pause;

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

impl Drop for Lock {
    fn drop(&mut self) {
        // Said aloud, because closing is not enough while a child that another thread is just
        // starting still has a copy. The children that were given the lock have ended by now.
        let _ = flock(&self.file, FlockOperation::Unlock);
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

/// The same, but looks again for a second: whoever lists what is installed takes each lock for a
/// moment to see whether it is free.
pub(crate) fn attempt_for_a_second(
    path: &Path,
    operation: FlockOperation,
) -> io::Result<Option<Lock>> {
    let started = Instant::now();
    loop {
        let lock = attempt(path, operation)?;
        if lock.is_some() || started.elapsed() > Duration::from_secs(1) {
            return Ok(lock);
        }
        pause(Duration::from_millis(20));
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
    let started = Instant::now();
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
                end_orphans(&path);
                pause(Duration::from_millis(150));
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
        // Its children inherited the lock.
        Ok(pid) => format!("what a killed install (pid {pid}) left running"),
        Err(_) => "another install".to_owned(),
    }
}

fn alive(pid: i32) -> bool {
    rustix::process::Pid::from_raw(pid)
        .is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

/// Ends what a killed install left running: it holds the lock, and what it writes will be wiped.
///
/// Such a process has the lock as its standard input, which nothing but [`super::child::work`]
/// does, and its parent does not have the lock open, which a living installer does. Both are
/// looked at again through a pidfd, so a number that was given away in between is safe.
fn end_orphans(path: &Path) {
    let Ok(lock) = path.metadata() else {
        return;
    };
    for process in procfs::process::all_processes()
        .into_iter()
        .flatten()
        .flatten()
    {
        let Some(pid) = rustix::process::Pid::from_raw(process.pid) else {
            continue;
        };
        if !orphan(process.pid, &lock) {
            continue;
        }
        let Ok(handle) = rustix::process::pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        if orphan(process.pid, &lock) {
            let _ = rustix::process::pidfd_send_signal(handle, Signal::KILL);
        }
    }
}

fn orphan(pid: i32, lock: &Metadata) -> bool {
    let is_lock = |descriptor: &Path| {
        descriptor
            .metadata()
            .is_ok_and(|found| found.ino() == lock.ino() && found.dev() == lock.dev())
    };
    if !is_lock(&PathBuf::from(format!("/proc/{pid}/fd/0"))) {
        return false;
    }
    let parent = procfs::process::Process::new(pid).and_then(|process| process.stat());
    let Ok(parent) = parent.map(|stat| stat.ppid) else {
        return false;
    };
    // A parent that we may not look into could be the installer.
    let Ok(descriptors) = Path::new(&format!("/proc/{parent}/fd")).read_dir() else {
        return false;
    };
    !descriptors.flatten().any(|entry| is_lock(&entry.path()))
}

/// The failure for a place that cannot be locked.
pub(crate) fn unusable(path: &Path, why: &str) -> Failure {
    Failure::environment(format!("cannot lock {}", path.display()))
        .expected("a writable directory on a local file system")
        .found(why)
        .hint("name another cache directory: --cache-dir DIR or PHASE1_CACHE_DIR=DIR")
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
