//! Helper programs that run for a moment and answer: `python -c`, `uv`, `dpkg-deb`, `preflight.py`.
//!
//! What belongs here: running one of them with a deadline, and reading what it said. What does
//! not: anything that outlives a call. A stack's processes belong to `stack::process`.
//!
//! Output goes to files, never to pipes: a grandchild that keeps a pipe open would make us wait
//! for it however short the deadline is.
//!
//! The user's environment is inherited on purpose. Where packages come from is theirs to say
//! (`UV_*` and `PIP_*` variables, proxies, certificates), and only the tools know all of those.
//! Variables that would change *what* is installed, or which modules an interpreter sees, are
//! taken out ([`MISLEADING`]).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::stack::wait::pause;

/// Variables that would make an install differ from its lock, or hide it behind other modules.
const MISLEADING: &[&str] = &[
    "PYTHONHOME",
    "PYTHONPATH",
    "PYTHONSTARTUP",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PIP_CONSTRAINT",
    "PIP_PREFIX",
    "PIP_REQUIREMENT",
    "PIP_REQUIRE_VIRTUALENV",
    "PIP_TARGET",
    "PIP_USER",
    "UV_BUILD_CONSTRAINT",
    "UV_CONSTRAINT",
    "UV_EXCLUDE_NEWER",
    "UV_OVERRIDE",
    "UV_PROJECT_ENVIRONMENT",
    "UV_PYTHON",
    "UV_SYSTEM_PYTHON",
    "UV_WORKING_DIRECTORY",
];

/// More than any of these programs prints on purpose.
const READ_LIMIT: u64 = 8 << 20;

/// How one ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Ending {
    /// It exited with this status.
    Exit(i32),
    /// A signal killed it.
    Signal(i32),
    /// It did not end in time, and was killed.
    TimedOut(Duration),
    /// It could not be started.
    NotStarted(String),
}

impl std::fmt::Display for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exit(status) => write!(f, "exit status {status}"),
            Self::Signal(number) => write!(f, "signal {number}"),
            Self::TimedOut(limit) => write!(f, "no answer within {} s", limit.as_secs_f64()),
            Self::NotStarted(why) => write!(f, "could not be started: {why}"),
        }
    }
}

/// What one said, and how it ended.
#[derive(Clone, Debug)]
pub(crate) struct Answer {
    pub(crate) ending: Ending,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    pub(crate) fn ok(&self) -> bool {
        self.ending == Ending::Exit(0)
    }

    /// One line that says why it is no use: how it ended, and the last thing it complained of.
    pub(crate) fn complaint(&self) -> String {
        let said = [&self.stderr, &self.stdout]
            .into_iter()
            .find_map(|text| text.lines().rev().find(|line| !line.trim().is_empty()));
        match said {
            Some(line) => format!("{} ({})", self.ending, line.trim()),
            None => self.ending.to_string(),
        }
    }
}

/// A command with the user's environment, less what would mislead it.
pub(crate) fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for name in MISLEADING {
        command.env_remove(name);
    }
    command
}

/// Asks a question: runs `command` in a process group of its own, kills that group at the
/// deadline, and returns what was said. For programs that answer in seconds.
pub(crate) fn ask(mut command: Command, limit: Duration) -> Answer {
    let files = tempfile::tempfile().and_then(|out| Ok((out, tempfile::tempfile()?)));
    let started = files.and_then(|(out, err)| {
        command
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(err.try_clone()?)
            .process_group(0);
        Ok((command.spawn()?, out, err))
    });
    let (mut child, out, err) = match started {
        Ok(started) => started,
        Err(error) => {
            return Answer {
                ending: Ending::NotStarted(error.to_string()),
                stdout: String::new(),
                stderr: String::new(),
            };
        }
    };
    let group = Pid::from_child(&child);
    let ending = wait(&mut child, limit, || {
        // The group still exists: its leader is our child and has not been waited for.
        let _ = kill_process_group(group, Signal::KILL);
    });
    Answer {
        ending,
        stdout: read(out),
        stderr: read(err),
    }
}

/// Does work: runs `command` in our own process group, so that Ctrl-C reaches it too, with both
/// outputs appended to `log`. `holding` is a lock that the child inherits (as its standard
/// input, which none of these programs reads): if we are killed, the lock stays taken until the
/// child has ended too, so nobody works in a directory that something still writes to.
pub(crate) fn work(mut command: Command, limit: Duration, log: &Path, holding: &File) -> Ending {
    let started = (|| {
        let file = File::options().create(true).append(true).open(log)?;
        command
            .stdin(holding.try_clone()?)
            .stdout(file.try_clone()?)
            .stderr(file);
        command.spawn()
    })();
    match started {
        Ok(mut child) => {
            let pid = Pid::from_child(&child);
            wait(&mut child, limit, || {
                let _ = rustix::process::kill_process(pid, Signal::KILL);
            })
        }
        Err(error) => Ending::NotStarted(error.to_string()),
    }
}

fn wait(child: &mut Child, limit: Duration, kill: impl FnOnce()) -> Ending {
    let started = Instant::now();
    let mut wait = Duration::from_millis(2);
    loop {
        match child.try_wait() {
            Ok(Some(status)) => return ending(status),
            Ok(None) if started.elapsed() >= limit => {
                kill();
                let _ = child.wait();
                return Ending::TimedOut(limit);
            }
            Ok(None) => pause(wait),
            Err(error) => return Ending::NotStarted(error.to_string()),
        }
        wait = (wait * 2).min(Duration::from_millis(50));
    }
}

fn ending(status: ExitStatus) -> Ending {
    match (status.code(), status.signal()) {
        (Some(code), _) => Ending::Exit(code),
        (None, signal) => Ending::Signal(signal.unwrap_or_default()),
    }
}

fn read(mut file: File) -> String {
    let mut bytes = Vec::new();
    if file.seek(SeekFrom::Start(0)).is_ok() {
        let _ = file.take(READ_LIMIT).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Where programs are looked for.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// Directories of programs instead of `PATH`, for tests.
    pub path: Option<std::ffi::OsString>,
    /// The home directory instead of the user's, for tests.
    pub home: Option<PathBuf>,
}

impl Search {
    /// Every executable called `name`, in the order of `PATH`.
    pub(crate) fn all(&self, name: &str) -> Vec<PathBuf> {
        match &self.path {
            Some(path) => which::which_in_all(name, Some(path), "/")
                .map(Iterator::collect)
                .unwrap_or_default(),
            None => which::which_all(name)
                .map(Iterator::collect)
                .unwrap_or_default(),
        }
    }

    /// The first executable called `name`.
    pub(crate) fn first(&self, name: &str) -> Option<PathBuf> {
        self.all(name).into_iter().next()
    }

    /// The home directory.
    pub(crate) fn home(&self) -> Option<PathBuf> {
        self.home.clone().or_else(std::env::home_dir)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = command("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_grandchild_that_keeps_the_output_open_does_not_keep_us() {
        let started = Instant::now();
        let answer = ask(shell("sleep 30 & echo done"), Duration::from_secs(10));
        assert!(answer.ok());
        assert_eq!(answer.stdout, "done\n");
        assert!(started.elapsed() < Duration::from_secs(9));
    }

    #[test]
    fn a_program_that_hangs_is_killed_with_its_children() {
        let answer = ask(
            shell("echo $$; sleep 60 & wait"),
            Duration::from_millis(200),
        );
        assert!(matches!(answer.ending, Ending::TimedOut(_)));
        assert!(answer.complaint().starts_with("no answer within 0.2 s"));
    }

    #[test]
    fn a_program_that_is_not_there_is_an_answer_too() {
        let answer = ask(command("/nonexistent/program"), Duration::from_secs(1));
        assert!(matches!(answer.ending, Ending::NotStarted(_)));
    }

    #[test]
    fn the_complaint_is_the_last_line_of_stderr() {
        let answer = ask(
            shell("echo out; echo first >&2; echo 'last  ' >&2; exit 3"),
            Duration::from_secs(10),
        );
        assert_eq!(answer.complaint(), "exit status 3 (last)");
    }
}
