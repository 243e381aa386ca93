//! What a case may do to the processes of the stack that it leases alone, and what it learns.
//!
//! The words only: [`super::lease::Lease`] says them, the supervisor obeys. It signals what it
//! started itself and nothing else; what a blow ends is a *permitted* death, data and not the
//! end of the stack. Whatever a lease leaves dead, stopped or changed, the supervisor puts right
//! before the next one; where it cannot, the generation ends.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::process::Ending;
use super::protocol::{ProcessInfo, WorkerInfo};
use super::sweep::Identity;
use crate::failure::Failure;

/// What of a process of the plan a blow hits.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Part {
    /// All of it: its process group and whatever descends from it.
    Whole,
    /// The engine core of a worker: the child that computes. Its parent, which answers requests,
    /// is not hit; whether and when it follows is the product's doing.
    EngineCore,
}

/// A signal, as a case means it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Blow {
    /// SIGKILL.
    Kill,
    /// SIGSTOP: it hangs, and is not dead.
    Stop,
    /// SIGCONT.
    Continue,
}

/// A blow that was dealt.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Struck {
    /// Name of the process in the plan.
    pub process: String,
    /// The process that leads it, hit or not: its end is the end of the process of the plan.
    pub leader: Identity,
    /// Who got the signal.
    pub hit: Vec<Identity>,
    /// [`super::clock::monotonic_ns`] right before the first signal.
    pub monotonic_ns: u64,
}

/// The end of a process that was hit, or whose end was permitted.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Death {
    /// Name of the process in the plan that it was, or was part of.
    pub process: String,
    /// Who ended.
    pub who: Identity,
    /// How; only a leader's is known: nobody else is a child of the supervisor.
    pub ending: Option<Ending>,
    /// [`super::clock::monotonic_ns`] when the supervisor saw that its pidfd was readable: a little
    /// after the end itself, never before it.
    pub monotonic_ns: u64,
}

/// How a replacement differs from the process of the plan. Nothing by default.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default)]
pub struct Changes {
    /// Another compatibility digest: 64 hexadecimal digits.
    pub digest: Option<String>,
    /// The cache owner id of the worker with this index instead of its own.
    pub owner_of: Option<usize>,
    /// The service (its socket) of the worker with this index instead of its own.
    pub service_of: Option<usize>,
}

impl Changes {
    /// Whether it is the process of the plan.
    #[must_use]
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

/// A process of the plan that was started again and is ready. Times are
/// [`super::clock::monotonic_ns`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Replacement {
    /// It, with its own log file.
    pub process: ProcessInfo,
    /// The worker, under its new instance id; `None` for a process that is none.
    pub worker: Option<WorkerInfo>,
    /// Right before it was spawned: what was left of its predecessor was gone by then.
    pub started_ns: u64,
    /// Its own probes held.
    pub probes_ns: u64,
    /// The front door listed its instance and model; that of a process that is no worker is
    /// `probes_ns`.
    pub listed_ns: u64,
    /// A canary pinned to it completed; that of a process that is no worker is `probes_ns`.
    pub canary_ns: u64,
}

/// A replacement that ended before it was ready, as one that the service refuses does.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Refusal {
    /// Its end.
    pub death: Death,
    /// Right before it was spawned.
    pub started_ns: u64,
    /// What its log says of the cause.
    pub failure: Failure,
    /// The last lines of its own log.
    pub lines: Vec<String>,
    /// That log.
    pub log: PathBuf,
}

/// What became of a replacement.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "became")]
pub enum Replaced {
    /// It serves.
    Serving(Box<Replacement>),
    /// It ended by itself.
    Refused(Box<Refusal>),
}

/// What a lease asks to be done.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "do")]
pub enum Deed {
    /// Deals a blow. Its end is permitted from then on.
    Strike {
        /// Name of the process in the plan.
        process: String,
        /// What of it.
        part: Part,
        /// What is dealt.
        blow: Blow,
    },
    /// The end of this process is data from now on, as if it had been struck: for those that
    /// may follow another's death.
    Permit {
        /// Name of the process in the plan.
        process: String,
    },
    /// Starts a process of the plan again. What is left of the old one is killed first, if its
    /// end was permitted; otherwise it is refused.
    Replace {
        /// Name of the process in the plan.
        process: String,
        /// How it differs from the plan.
        changes: Changes,
    },
}

impl Deed {
    /// Name in the plan of the process that it is done to.
    #[must_use]
    pub fn process(&self) -> &str {
        let (Self::Strike { process, .. }
        | Self::Permit { process }
        | Self::Replace { process, .. }) = self;
        process
    }
}

/// What came of a [`Deed`].
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "done")]
pub enum Done {
    /// Of a strike.
    Struck(Struck),
    /// Of a permission.
    Permitted,
    /// Of a replacement.
    Replaced(Replaced),
    /// It was refused, or went wrong.
    Failed {
        /// Why.
        failure: Failure,
    },
}
