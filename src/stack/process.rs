//! Fork, exec, groups: the only `unsafe` of the crate.
//!
//! What belongs here: what happens between fork and exec, the descriptors a new process gets,
//! and the handle that makes signalling its group safe. What does not: when a process is ready
//! ([`crate::launch`]), and which processes are ours ([`super::sweep`]).

#![expect(
    unsafe_code,
    reason = "between fork and exec there is no safe way, and an inherited descriptor is a bare number"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::{Errno, FdFlags, fcntl_getfd, fcntl_setfd};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, WaitIdStatus, getpid, getppid,
    kill_process_group, pidfd_open, set_parent_process_death_signal, setpgid, setsid, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::sweep::Identity;

/// Variables that pass from whoever started the stack to its processes, each with its reason.
/// Everything else is dropped: the first test's `LD_LIBRARY_PATH`, `CARGO_*` and `NEXTEST_*`
/// must not decide what later tests talk to.
pub const PASSED: &[(&str, &str)] = &[
    ("PATH", "compilers and tools that engines call"),
    ("HOME", "caches and credentials that engines look up"),
    ("USER", "libraries that name caches after it"),
    ("LOGNAME", "the same, by its other name"),
    ("LANG", "encoding of file names and output"),
    ("LC_ALL", "encoding of file names and output"),
    ("TMPDIR", "machines whose /tmp is too small"),
    ("TZ", "time stamps in engine logs"),
    (
        "RUNNER_TRACKING_ID",
        "GitHub's runner kills what carries it when the job ends: it may reap us",
    ),
];

/// The part of our own environment that may pass on.
#[expect(
    clippy::disallowed_methods,
    reason = "an allow-list of what passes through, not a setting: nothing here changes a plan"
)]
pub fn passed() -> impl Iterator<Item = (&'static str, OsString)> {
    PASSED
        .iter()
        .filter_map(|(name, _)| Some((*name, std::env::var_os(name)?)))
}

/// Where a new process stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Placement {
    /// A process group of its own, that dies with us: everything the supervisor starts.
    Group,
    /// A session of its own, that outlives us: the supervisor. nextest kills a test's process
    /// group on a time-out, and the stack must survive that.
    Session,
}

/// A process to start.
#[derive(Debug)]
pub struct Spawn<'a> {
    /// Absolute path of the program.
    pub program: &'a OsStr,
    /// Its arguments.
    pub args: &'a [OsString],
    /// Its environment, on top of [`PASSED`].
    pub env: &'a BTreeMap<String, String>,
    /// Its working directory.
    pub directory: &'a Path,
    /// Where standard output and error go. Standard input is null.
    pub output: &'a File,
    /// Where it stands.
    pub placement: Placement,
    /// Descriptors it inherits, under the numbers they have here. All others are closed.
    pub keep: &'a [BorrowedFd<'a>],
}

impl Spawn<'_> {
    /// Starts it. With [`Placement::Group`] this must happen on a thread that lives as long as
    /// the process should: the death signal follows the *thread* that forked.
    pub fn spawn(&self) -> io::Result<Leader> {
        let mut command = Command::new(self.program);
        command
            .args(self.args)
            .env_clear()
            .envs(passed())
            .envs(self.env)
            .current_dir(self.directory)
            .stdin(Stdio::null())
            .stdout(Stdio::from(self.output.try_clone()?))
            .stderr(Stdio::from(self.output.try_clone()?));
        let placement = self.placement;
        let parent = getpid();
        let keep: Vec<RawFd> = self.keep.iter().map(AsRawFd::as_raw_fd).collect();
        let between = move || {
            match placement {
                Placement::Group => {
                    setpgid(None, None)?;
                    set_parent_process_death_signal(Some(Signal::KILL))?;
                    // Had the parent died before the line above, no signal would ever come.
                    if getppid() != Some(parent) {
                        return Err(Errno::SRCH.into());
                    }
                }
                Placement::Session => {
                    setsid()?;
                }
            }
            close_on_exec_from(3);
            for &fd in &keep {
                // SAFETY: the parent borrows each descriptor until `spawn` returns, and fork
                // copied the table, so the number is open here.
                fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::empty())?;
            }
            Ok(())
        };
        // SAFETY: `between` only makes system calls on values made before the fork. It neither
        // allocates nor locks, so another thread's lock held at the fork cannot block it.
        unsafe { command.pre_exec(between) };
        let child = command.spawn()?;
        Leader::of(child.id())
    }
}

/// Marks every descriptor from `first` on to be closed by exec. Closing them here would also
/// close the pipe by which std reports a failed exec.
fn close_on_exec_from(first: RawFd) {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 4;
    // SAFETY: close_range takes three integers and touches no memory of ours.
    let done = unsafe {
        libc::syscall(
            libc::SYS_close_range,
            first as libc::c_uint,
            libc::c_uint::MAX,
            CLOSE_RANGE_CLOEXEC,
        )
    };
    if done != 0 {
        // Linux before 5.11. Descriptors beyond this number would have to be leaked by a shell
        // or runner that opened thousands of them.
        for fd in first..4096 {
            // SAFETY: F_SETFD on a number that is not open fails with EBADF and does nothing.
            unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// Takes over a descriptor that the parent process left open under a number it told us. It is
/// not passed on to children.
pub fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    if fd <= 2 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: borrowed for one call that fails cleanly if the number is not open.
    let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
    let flags = fcntl_getfd(borrowed)?;
    fcntl_setfd(borrowed, flags | FdFlags::CLOEXEC)?;
    // SAFETY: it is open (checked above), and it is ours alone: the parent named it on the
    // command line for this process, whose only call of `adopt` per number is at its start.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// How a process ended.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ending {
    /// It exited.
    Code(i32),
    /// A signal killed it.
    Signal(i32),
}

impl fmt::Display for Ending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code(code) => write!(f, "exit code {code}"),
            Self::Signal(signal) => write!(f, "signal {signal}"),
        }
    }
}

impl Ending {
    fn of(status: &WaitIdStatus) -> Self {
        match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => Self::Code(code),
            (None, signal) => Self::Signal(signal.unwrap_or(0)),
        }
    }
}

/// A child that leads a process group and has not been reaped.
///
/// While it is not reaped, not even as a zombie, its pid and therefore its group's number cannot
/// be given to a stranger. That is what makes [`Self::signal_group`] safe, and why
/// [`Self::reap`] consumes the value.
#[derive(Debug)]
pub struct Leader {
    pid: Pid,
    start_ticks: u64,
    pidfd: OwnedFd,
}

impl Leader {
    fn of(pid: u32) -> io::Result<Self> {
        let pid = i32::try_from(pid)
            .ok()
            .and_then(Pid::from_raw)
            .ok_or(Errno::SRCH)?;
        // Nobody else reaps our children, so the pid still is the child's.
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let start_ticks = procfs::process::Process::new(pid.as_raw_nonzero().get())
            .and_then(|process| process.stat())
            .map_err(io::Error::other)?
            .starttime;
        let leader = Self {
            pid,
            start_ticks,
            pidfd,
        };
        held().insert(leader.pid());
        Ok(leader)
    }

    /// Its pid, also its process group.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw_nonzero().get().unsigned_abs()
    }

    /// Field 22 of `/proc/<pid>/stat`.
    pub fn start_ticks(&self) -> u64 {
        self.start_ticks
    }

    /// It, for good.
    pub fn identity(&self) -> Identity {
        Identity {
            pid: self.pid(),
            start_ticks: self.start_ticks,
        }
    }

    /// How it ended, if it has. Does not reap it.
    pub fn ending(&self) -> io::Result<Option<Ending>> {
        ending(self.pidfd.as_fd())
    }

    /// A future that completes when it ends. Must be called within a runtime.
    pub fn exit(&self) -> io::Result<impl Future<Output = io::Result<Ending>> + Send + use<>> {
        let pidfd = polled(self.pidfd.try_clone()?)?;
        Ok(async move {
            loop {
                // A pidfd becomes readable when its process ends.
                let mut guard = pidfd.readable().await?;
                if let Some(ending) = ending(pidfd.get_ref().as_fd())? {
                    return Ok(ending);
                }
                guard.clear_ready();
            }
        })
    }

    /// Sends `signal` to the whole group. A group that is gone is no error.
    pub fn signal_group(&self, signal: Signal) -> io::Result<()> {
        match kill_process_group(self.pid, signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits for the end and releases the pid.
    pub fn reap(self) -> io::Result<Ending> {
        loop {
            match waitid(WaitId::PidFd(self.pidfd.as_fd()), WaitIdOptions::EXITED) {
                Ok(Some(status)) => return Ok(Ending::of(&status)),
                Ok(None) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        held().remove(&self.pid());
    }
}

/// A future that completes when a process ends that is no child of this one: all of its threads,
/// so that whatever it held is free. Must be called within a runtime.
///
/// # Errors
/// It is gone already, or the kernel has no pidfd.
pub fn gone(who: Identity) -> io::Result<impl Future<Output = io::Result<()>> + Send + use<>> {
    let pidfd = polled(who.pidfd()?)?;
    Ok(async move { pidfd.readable().await.map(drop) })
}

fn polled(pidfd: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    // SAFETY: the `AsyncFd` owns the descriptor, so the number stays open and stays the same
    // file until it is deregistered.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

/// How the process behind a pidfd of a child ended, if it has. Does not reap it.
fn ending(pidfd: BorrowedFd<'_>) -> io::Result<Option<Ending>> {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    Ok(waitid(WaitId::PidFd(pidfd), options)?.map(|status| Ending::of(&status)))
}

/// Reaps every dead child that no [`Leader`] holds: orphans that were handed to us as the
/// subreaper. Only for a process whose children all are leaders: the supervisor.
pub fn reap_orphans() {
    let held = held().clone();
    for pid in super::sweep::dead_children(&held) {
        if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
            let _ = waitid(
                WaitId::Pid(pid),
                WaitIdOptions::EXITED | WaitIdOptions::NOHANG,
            );
        }
    }
}

/// Pids that must not be reaped behind their leader's back.
fn held() -> MutexGuard<'static, BTreeSet<u32>> {
    static HELD: Mutex<BTreeSet<u32>> = Mutex::new(BTreeSet::new());
    // A set of numbers has no half-done state to be afraid of.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Orphaned descendants become children of this process instead of init's, so that none of them
/// is out of sight while it lives.
pub fn become_subreaper() -> io::Result<()> {
    Ok(rustix::process::set_child_subreaper(Some(getpid()))?)
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    fn shell(script: &str, output: &File, keep: &[BorrowedFd<'_>]) -> Leader {
        Spawn {
            program: OsStr::new("/bin/sh"),
            args: &["-c".into(), script.into()],
            env: &BTreeMap::from([("PHASE1_UNIT".to_owned(), "yes".to_owned())]),
            directory: Path::new("/"),
            output,
            placement: Placement::Group,
            keep,
        }
        .spawn()
        .unwrap()
    }

    #[test]
    fn only_the_allow_list_and_the_plan_reach_a_child() {
        let output = tempfile::NamedTempFile::new().unwrap();
        let leader = shell("env; ls -l /proc/self/fd", output.as_file(), &[]);
        assert_eq!(leader.reap().unwrap(), Ending::Code(0));
        let text = std::fs::read_to_string(output.path()).unwrap();
        assert!(text.contains("PHASE1_UNIT=yes"), "{text}");
        assert!(!text.contains("CARGO"), "{text}");
    }

    #[test]
    fn a_descriptor_that_is_not_named_is_closed_and_one_that_is_stays() {
        let output = tempfile::tempfile().unwrap();
        let (mut closed, closed_end) = io::pipe().unwrap();
        let (mut kept, kept_end) = io::pipe().unwrap();
        // Not close-on-exec, as something a careless CI shell leaves behind.
        fcntl_setfd(&closed_end, FdFlags::empty()).unwrap();
        // By path: a shell takes only one digit after `>&`.
        let script = format!("echo kept >/dev/fd/{}; sleep 100", kept_end.as_raw_fd());
        let leader = shell(&script, &output, &[kept_end.as_fd()]);
        drop((closed_end, kept_end));
        let mut text = Vec::new();
        closed.read_to_end(&mut text).unwrap();
        let mut word = [0; 4];
        kept.read_exact(&mut word).unwrap();
        assert_eq!(&word, b"kept");
        leader.signal_group(Signal::KILL).unwrap();
        assert_eq!(leader.reap().unwrap(), Ending::Signal(9));
    }

    #[test]
    fn a_program_that_does_not_exist_is_an_error() {
        let output = tempfile::tempfile().unwrap();
        let error = Spawn {
            program: OsStr::new("/nonexistent/program"),
            args: &[],
            env: &BTreeMap::new(),
            directory: Path::new("/"),
            output: &output,
            placement: Placement::Group,
            keep: &[],
        }
        .spawn()
        .unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn adopting_what_is_not_open_is_an_error() {
        assert!(adopt(1).is_err());
        assert!(adopt(1_000_000).is_err());
    }
}
