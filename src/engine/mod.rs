//! What differs between engines: argv, environment, readiness, metric names, log marks.

pub mod readiness;
pub mod vllm;

use std::future::Future;
use std::path::Path;
use std::pin::Pin;

use crate::failure::Failure;
use crate::plan::{Bindings, External, Group, Plan, Process};
use crate::stack::harm::Changes;
use crate::stack::protocol::WorkerInfo;

/// A boxed future, so that [`Blueprint`] can be a trait object.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// A worker that was started again, and is ready. Times are
/// [`crate::stack::clock::monotonic_ns`].
#[derive(Clone, Debug, PartialEq)]
pub struct Registered {
    /// It, under its new instance id.
    pub worker: WorkerInfo,
    /// The front door lists its instance and its model.
    pub listed_ns: u64,
    /// A canary pinned to it completed.
    pub canary_ns: u64,
}

/// What the supervisor must know of an engine to bring a stack up. Everything else about a
/// configuration stays out of `stack`.
pub trait Blueprint: Send + Sync {
    /// Profile name, for people.
    fn name(&self) -> &str;

    /// Names of the TCP ports that [`Self::plan`] needs in its bindings.
    fn ports(&self) -> Vec<String>;

    /// Ports that must have this number instead of an allocated one.
    fn fixed_ports(&self) -> Vec<(String, u16)> {
        Vec::new()
    }

    /// Services that somebody else runs and that must be there before anything starts.
    ///
    /// # Errors
    /// As [`Self::plan`].
    fn external(&self) -> Result<Vec<External>, Failure> {
        Ok(Vec::new())
    }

    /// The plan for these bindings. Pure.
    fn plan(&self, bindings: &Bindings) -> Result<Plan, Failure>;

    /// Waits until every worker of `group` is known to the router, has completed a pinned canary
    /// and shows its telemetry. The supervisor watches the processes meanwhile and bounds the
    /// time; a failure names the last thing that was missing.
    ///
    /// [`WorkerInfo::ready_ms`] counts from this call; the supervisor adds the time since the
    /// worker's spawn, and fills in [`WorkerInfo::probes_ms`].
    fn ready<'a>(
        &'a self,
        plan: &'a Plan,
        group: Group,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Vec<WorkerInfo>, Failure>>;

    /// Compares what the ready `workers` state of themselves, on their pages and in their `logs`, with
    /// what was configured. Anything else than agreement is a failure of the bring-up.
    fn examine<'a>(
        &'a self,
        _plan: &'a Plan,
        _workers: &'a [WorkerInfo],
        _logs: &'a Path,
        _say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<(), Failure>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// [`Self::ready`] for the one worker whose process of the plan is `process` and was started
    /// again, perhaps [changed](Self::changed).
    fn ready_again<'a>(
        &'a self,
        plan: &'a Plan,
        process: &'a str,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Registered, Failure>>;

    /// `process` of the plan with these changes. Pure.
    ///
    /// # Errors
    /// Inconclusive, if there is no such process or nothing in it that could be changed so.
    fn changed(&self, plan: &Plan, process: &str, changes: &Changes) -> Result<Process, Failure>;

    /// `process`, which was started `_before` times already: what must be new in each. Pure.
    fn renewed(&self, process: Process, _before: u32) -> Process {
        process
    }

    /// Whether a descendant of a worker with this command line (or title) is its engine core.
    fn is_engine_core(&self, command_line: &str) -> bool;

    /// Says why `process` failed to start or died, from its log: the first causal line, and the
    /// class that line belongs to. `ending` is how it ended (`exit code 1`, `signal 9`), or
    /// `None` if it only did not become ready in time.
    fn explain(&self, process: &Process, ending: Option<&str>, log: &Path) -> Failure;

    /// Waits until the devices are back at the memory they had before the stack started.
    fn devices_released(&self) -> BoxFuture<'_, Result<(), Failure>>;
}
