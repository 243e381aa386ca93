//! Which processes are ours, and making them go away.
//!
//! A process is ours if its environment carries our cookie, if we wrote its `(pid, start time)`
//! down while it was certainly ours (a program may overwrite its own environment: process
//! titles do), or if it descends from the asking supervisor. Nothing is ever chosen by name,
//! and a signal goes through a pidfd whose start time was checked after it was opened.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use procfs::process::{Process, Stat, all_processes};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use super::cookie::Mark;
use super::wait::{self, Look};
use crate::failure::Failure;

/// How long a killed process may take to disappear: freeing a device can hold it in the kernel.
const GONE_WITHIN: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A process for good: a pid alone may be somebody else's tomorrow.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Identity {
    /// Its pid.
    pub pid: u32,
    /// Field 22 of `/proc/<pid>/stat`.
    pub start_ticks: u64,
}

impl Identity {
    /// Whoever has this pid now, unless it is dead.
    pub fn of(pid: u32) -> Option<Self> {
        let stat = Process::new(i32::try_from(pid).ok()?).ok()?.stat().ok()?;
        alive(&stat).then(|| Self::from(&stat))
    }

    /// Whether it still runs.
    pub fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }

    /// Sends `signal` to exactly this process; false if it is gone.
    pub fn signal(self, signal: Signal) -> bool {
        self.pidfd()
            .is_ok_and(|pidfd| pidfd_send_signal(pidfd, signal).is_ok())
    }

    /// A descriptor of exactly this process.
    ///
    /// # Errors
    /// It is gone, or the kernel has no pidfd.
    pub(crate) fn pidfd(self) -> io::Result<OwnedFd> {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        let pidfd = pidfd_open(pid.ok_or(Errno::SRCH)?, PidfdFlags::empty())?;
        // The descriptor is pinned now; if the start time still is the one we know, it is the
        // process we know.
        match self.is_alive() {
            true => Ok(pidfd),
            false => Err(Errno::SRCH.into()),
        }
    }

    /// Its command line, words parted by spaces; a process may have given itself another (a
    /// title).
    pub fn command_line(self) -> Option<String> {
        let process = Process::new(i32::try_from(self.pid).ok()?).ok()?;
        let words = process.cmdline().ok()?;
        self.is_alive().then(|| words.join(" "))
    }
}

impl From<&Stat> for Identity {
    fn from(stat: &Stat) -> Self {
        Self {
            pid: stat.pid.unsigned_abs(),
            start_ticks: stat.starttime,
        }
    }
}

/// A zombie holds nothing but its number, and only its parent can change that.
fn alive(stat: &Stat) -> bool {
    !matches!(stat.state, 'Z' | 'X' | 'x')
}

fn table() -> Vec<(Process, Stat)> {
    let Ok(processes) = all_processes() else {
        return Vec::new();
    };
    processes
        .filter_map(|process| {
            let process = process.ok()?;
            let stat = process.stat().ok()?;
            Some((process, stat))
        })
        .collect()
}

/// The processes with these pids that live, and all that descend from them.
pub fn families(roots: &BTreeSet<u32>) -> BTreeSet<Identity> {
    let table = table();
    let parents: HashMap<i32, i32> = table.iter().map(|(_, s)| (s.pid, s.ppid)).collect();
    table
        .iter()
        .filter(|(_, stat)| alive(stat))
        .map(|(_, stat)| Identity::from(stat))
        .filter(|one| {
            roots.contains(&one.pid) || roots.iter().any(|root| descends(&parents, one.pid, *root))
        })
        .collect()
}

/// What makes a process ours.
#[derive(Clone, Debug)]
pub struct Ours {
    /// Its environment.
    pub mark: Mark,
    /// Or its having been written down.
    pub known: BTreeSet<Identity>,
    /// Or its descending from this process.
    pub ancestor: Option<u32>,
}

impl Ours {
    /// Processes of ours that run now. Never the caller itself.
    pub fn scan(&self) -> Vec<Identity> {
        let table = table();
        let parents: HashMap<i32, i32> = table.iter().map(|(_, s)| (s.pid, s.ppid)).collect();
        let me = std::process::id();
        table
            .iter()
            .filter(|(_, stat)| alive(stat))
            .map(|(process, stat)| (process, Identity::from(stat)))
            .filter(|(_, identity)| identity.pid != me)
            .filter(|(process, identity)| {
                self.known.contains(identity)
                    || self
                        .ancestor
                        .is_some_and(|root| descends(&parents, identity.pid, root))
                    || process
                        .environ()
                        .is_ok_and(|environ| self.mark.matches(&environ))
            })
            .map(|(_, identity)| identity)
            .collect()
    }

    /// Kills what is ours until nothing is left, and says how many there were.
    pub async fn kill(&self) -> Result<usize, Failure> {
        let mut seen = BTreeSet::new();
        wait::until(GONE_WITHIN, LOOK_EVERY, || {
            let look = self.look(&mut seen);
            async move { look }
        })
        .await
        .map_err(|gave| stuck(&gave))?;
        Ok(seen.len())
    }

    /// [`Self::kill`] for code without a runtime.
    pub fn kill_blocking(&self) -> Result<usize, Failure> {
        let mut seen = BTreeSet::new();
        wait::until_blocking(GONE_WITHIN, LOOK_EVERY, || self.look(&mut seen))
            .map_err(|gave| stuck(&gave))?;
        Ok(seen.len())
    }

    fn look(&self, seen: &mut BTreeSet<Identity>) -> Look<(), std::convert::Infallible> {
        let left = self.scan();
        if left.is_empty() {
            return Look::Ready(());
        }
        for identity in &left {
            seen.insert(*identity);
            identity.signal(Signal::KILL);
        }
        let pids: Vec<_> = left
            .iter()
            .map(|identity| identity.pid.to_string())
            .collect();
        Look::NotYet(format!("still there after SIGKILL: {}", pids.join(", ")))
    }
}

fn stuck(gave: &wait::Gave<std::convert::Infallible>) -> Failure {
    Failure::environment("processes of a stopped stack do not go away")
        .found(gave)
        .hint("look at their state in /proc; a driver may hold them")
}

fn descends(parents: &HashMap<i32, i32>, pid: u32, root: u32) -> bool {
    let (Ok(mut at), Ok(root)) = (i32::try_from(pid), i32::try_from(root)) else {
        return false;
    };
    // The table was read while it changed, so it could hold a cycle: bound the walk.
    for _ in 0..1024 {
        match parents.get(&at) {
            Some(&parent) if parent == root => return true,
            Some(&parent) if parent > 1 => at = parent,
            _ => return false,
        }
    }
    false
}

/// Which of these process groups still have a living member.
pub fn living_groups(groups: &BTreeSet<u32>) -> BTreeSet<u32> {
    table()
        .iter()
        .filter(|(_, stat)| alive(stat))
        .map(|(_, stat)| stat.pgrp.unsigned_abs())
        .filter(|group| groups.contains(group))
        .collect()
}

/// Children of this process that died and are not among `mine`.
pub fn dead_children(mine: &BTreeSet<u32>) -> Vec<u32> {
    let me = i32::try_from(std::process::id()).unwrap_or(0);
    table()
        .iter()
        .filter(|(_, stat)| stat.ppid == me && stat.state == 'Z')
        .map(|(_, stat)| stat.pid.unsigned_abs())
        .filter(|pid| !mine.contains(pid))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recycled_pid_is_not_the_process_that_was_meant() {
        let me = Identity::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        let stranger = Identity {
            start_ticks: me.start_ticks + 1,
            ..me
        };
        assert!(!stranger.is_alive());
        // Were it sent, this test process would die.
        assert!(!stranger.signal(Signal::KILL));
    }

    #[test]
    fn descent_is_followed_and_a_cycle_ends() {
        let parents = HashMap::from([(10, 5), (5, 2), (2, 1), (7, 8), (8, 7)]);
        assert!(descends(&parents, 10, 5));
        assert!(descends(&parents, 10, 2));
        assert!(!descends(&parents, 2, 10));
        assert!(!descends(&parents, 7, 2));
    }
}
