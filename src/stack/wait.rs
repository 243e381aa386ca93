//! Level-triggered polling.
//!
//! "Timeouts, timeouts: always wrong! Some too short and some too long." So: look often, at the
//! state itself and never at a change of it, give up late, and say what was missing last.

use std::fmt;
use std::future::Future;
use std::time::{Duration, Instant};

/// One look at the condition.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Look<T, E> {
    /// It holds.
    Ready(T),
    /// It does not hold yet; what is missing, for people.
    NotYet(String),
    /// It will never hold.
    Failed(E),
}

/// Why waiting ended without success.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Gave<E> {
    /// The bound was reached.
    Up {
        /// The bound.
        after: Duration,
        /// What the last look said was missing.
        last: String,
    },
    /// The condition can never hold.
    Failed(E),
}

impl<E: fmt::Display> fmt::Display for Gave<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Up { after, last } => write!(f, "not within {} s: {last}", after.as_secs()),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

/// A budget of time that a stall of the whole machine does not use up.
///
/// A suspended or starved virtual machine makes minutes pass in which nobody could do anything;
/// a plain deadline would then blame the stack. Each [`Self::spent`] therefore counts what
/// passed since the last one, but at most [`Self::STALL`]; poll more often than that.
#[derive(Clone, Debug)]
pub struct Patience {
    bound: Duration,
    left: Duration,
    last: Instant,
}

impl Patience {
    /// The most that one step can count.
    pub const STALL: Duration = Duration::from_secs(2);

    /// Patience for `bound`, from now.
    pub fn new(bound: Duration) -> Self {
        Self {
            bound,
            left: bound,
            last: Instant::now(),
        }
    }

    /// Counts the time since the last call; true when none is left.
    pub fn spent(&mut self) -> bool {
        self.count(Instant::now())
    }

    /// What was counted so far.
    pub fn counted(&self) -> Duration {
        self.bound - self.left
    }

    /// The whole budget.
    pub fn bound(&self) -> Duration {
        self.bound
    }

    fn count(&mut self, now: Instant) -> bool {
        let passed = now.saturating_duration_since(self.last).min(Self::STALL);
        self.last = now;
        self.left = self.left.saturating_sub(passed);
        self.left.is_zero()
    }
}

/// What `work` gives, unless it takes longer than `bound` (see [`Patience`]: a process that is
/// stopped, or a machine that stalls, is no time-out). What is there already always counts.
pub async fn within<T>(bound: Duration, work: impl Future<Output = T>) -> Option<T> {
    let mut patience = Patience::new(bound);
    tokio::pin!(work);
    loop {
        let step = patience.left.min(Patience::STALL / 4);
        if let Ok(done) = tokio::time::timeout(step, &mut work).await {
            return Some(done);
        }
        if patience.spent() {
            return None;
        }
    }
}

/// Looks every `interval` until the condition holds or can never hold, at most for `bound`.
/// There is always one look after the bound was reached.
pub async fn until<T, E, F>(
    bound: Duration,
    interval: Duration,
    mut look: impl FnMut() -> F,
) -> Result<T, Gave<E>>
where
    F: Future<Output = Look<T, E>>,
{
    let mut patience = Patience::new(bound);
    loop {
        let spent = patience.spent();
        match look().await {
            Look::Ready(value) => return Ok(value),
            Look::Failed(error) => return Err(Gave::Failed(error)),
            Look::NotYet(last) if spent => return Err(Gave::Up { after: bound, last }),
            Look::NotYet(_) => tokio::time::sleep(interval).await,
        }
    }
}

/// [`until`] for code without a runtime.
pub fn until_blocking<T, E>(
    bound: Duration,
    interval: Duration,
    mut look: impl FnMut() -> Look<T, E>,
) -> Result<T, Gave<E>> {
    let mut patience = Patience::new(bound);
    loop {
        let spent = patience.spent();
        match look() {
            Look::Ready(value) => return Ok(value),
            Look::Failed(error) => return Err(Gave::Failed(error)),
            Look::NotYet(last) if spent => return Err(Gave::Up { after: bound, last }),
            Look::NotYet(_) => pause(interval),
        }
    }
}

/// Between two looks, in code that blocks: the one place of the crate that sleeps a thread.
#[expect(clippy::disallowed_methods, reason = "the pause between two looks")]
pub(crate) fn pause(interval: Duration) {
    std::thread::sleep(interval);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn giving_up_says_what_was_missing_last() {
        let mut looks = 0;
        let gave = until_blocking::<(), String>(Duration::ZERO, Duration::ZERO, || {
            looks += 1;
            Look::NotYet(format!("look {looks}"))
        })
        .unwrap_err();
        assert_eq!(gave.to_string(), "not within 0 s: look 1");
    }

    #[test]
    fn a_condition_that_can_never_hold_ends_the_wait_at_once() {
        let gave = until_blocking::<(), _>(Duration::MAX, Duration::ZERO, || {
            Look::Failed("exit code 1")
        });
        assert_eq!(gave, Err(Gave::Failed("exit code 1")));
    }

    #[tokio::test]
    async fn work_is_bounded_and_what_is_there_already_counts() {
        use std::future::{pending, ready};
        assert_eq!(
            within(Duration::from_millis(30), pending::<()>()).await,
            None
        );
        assert_eq!(within(Duration::from_secs(60), ready(7)).await, Some(7));
        assert_eq!(within(Duration::ZERO, ready(7)).await, Some(7));
    }

    #[test]
    fn a_stall_of_minutes_counts_as_one_step() {
        let mut patience = Patience::new(Duration::from_secs(10));
        let woken = patience.last + Duration::from_secs(600);
        assert!(!patience.count(woken));
        assert_eq!(patience.left, Duration::from_secs(8));
        for second in 1..8 {
            assert!(
                !patience.count(woken + Duration::from_secs(second)),
                "{second}"
            );
        }
        assert!(patience.count(woken + Duration::from_secs(8)));
    }
}
