//! The process that holds a pool, by a descriptor that no later process can be mistaken for.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A claimant.
#[derive(Debug)]
pub(super) struct Holder {
    pidfd: AsyncFd<OwnedFd>,
}

impl Holder {
    /// # Errors
    /// There is no such process, or no runtime.
    pub(super) fn open(pid: Pid) -> io::Result<Self> {
        let pidfd = pidfd_open(pid, PidfdFlags::NONBLOCK)?;
        #[expect(
            deprecated,
            reason = "its successor is unsafe; an owned descriptor stays open and the same for as long as it is registered"
        )]
        let pidfd = AsyncFd::with_interest(pidfd, Interest::READABLE)?;
        Ok(Self { pidfd })
    }

    /// Ends when the process has died.
    ///
    /// # Errors
    /// It cannot be watched.
    pub(super) async fn died(&self) -> io::Result<()> {
        // The readiness is left as it is: death is for good.
        self.pidfd.readable().await.map(drop)
    }

    /// Whether it lives now.
    pub(super) fn lives(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.get_ref(), PollFlags::IN)];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // Only a clear answer is a death.
        !matches!(poll(&mut fds, Some(&now)), Ok(1..))
    }

    /// Kills it, so that it cannot write to the pool any more.
    ///
    /// # Errors
    /// It is not ours to kill. That it is dead already is none.
    pub(super) fn fence(&self) -> io::Result<()> {
        match pidfd_send_signal(self.pidfd.get_ref(), Signal::KILL) {
            Err(error) if error != rustix::io::Errno::SRCH => Err(error.into()),
            _ => Ok(()),
        }
    }
}
