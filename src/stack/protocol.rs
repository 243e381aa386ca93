//! What a client and the supervisor say to each other: one JSON document a line.
//!
//! The connection itself is the lease. Nothing in these messages extends or ends it: only EOF
//! does, whatever killed the client.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::harm::{Death, Deed, Done};
use crate::failure::Failure;
use crate::plan::{Plan, Serves};

/// Bumped when either side would misread the other. Part of the fingerprint.
pub const PROTOCOL: u32 = 3;

/// A duration as messages carry it: whole milliseconds.
#[must_use]
pub fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// How a case wants the stack.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// Side by side with others: judges only what its own responses say.
    Shared,
    /// Alone: reads counters (they are per worker, not per request) or harms a process.
    Exclusive,
}

/// Client to supervisor.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum Ask {
    /// First line of a lease.
    Lease {
        /// [`PROTOCOL`] of the client.
        protocol: u32,
        /// Fingerprint the client computed.
        fingerprint: String,
        /// The run it belongs to: a failed bring-up is remembered for one run.
        run_id: String,
        /// `tc01::cold`.
        case: String,
        /// How it wants the stack.
        mode: Mode,
        /// The client's process, for messages about who holds the stack.
        pid: u32,
    },
    /// On a lease: the reference engine is needed; held until the lease ends.
    Reference,
    /// On an exclusive lease: something is to be done to a process of the stack.
    Harm {
        /// Chosen by the client; [`Tell::Done`] repeats it.
        number: u64,
        /// What.
        deed: Deed,
    },
    /// Instead of a lease: what is going on?
    Status,
    /// Instead of a lease: stop the stack; refused while leases are held unless forced.
    Down {
        /// Stop in spite of leases.
        force: bool,
    },
    /// Instead of a lease, from a stack of another fingerprint that wants the device.
    Evict {
        /// Who asks.
        by: String,
    },
}

/// Supervisor to client.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "say")]
pub enum Tell {
    /// Bring-up goes on.
    Step {
        /// `worker0: waiting for its probes`.
        text: String,
        /// Milliseconds since bring-up began.
        at_ms: u64,
    },
    /// The lease waits for others.
    Queued {
        /// Cases that hold the stack.
        behind: Vec<String>,
    },
    /// The lease is granted.
    Ready {
        /// The running stack.
        stack: Box<StackInfo>,
    },
    /// The reference engine runs.
    ReferenceReady {
        /// Its identity.
        worker: WorkerInfo,
        /// Milliseconds from spawn until a canary completed; 0 if it was running already.
        start_ms: u64,
    },
    /// Bring-up (or the reference's start) failed; the same answer for the rest of the run.
    Failed {
        /// Why.
        failure: Failure,
    },
    /// On a granted lease: the stack is not what it was. The verdict is Inconclusive.
    Broken {
        /// What happened.
        failure: Failure,
    },
    /// What came of [`Ask::Harm`].
    Done {
        /// Of which.
        number: u64,
        /// What.
        done: Box<Done>,
    },
    /// On the lease that permitted it: a process ended.
    Died {
        /// Which, and when.
        death: Death,
    },
    /// Refused: someone holds what the client wants.
    Busy {
        /// Case, run and process of the holder.
        holder: String,
    },
    /// Answer to [`Ask::Status`].
    Status {
        /// What is going on.
        status: Box<Status>,
    },
    /// Answer to [`Ask::Down`] and [`Ask::Evict`]: everything is stopped.
    Stopped,
}

/// A worker that answers.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct WorkerInfo {
    /// Name of its process in the plan.
    pub process: String,
    /// Position in the topology.
    pub index: usize,
    /// Dynamo's instance id: unsigned, 64 bits; a header in decimal, a label in hex.
    pub instance_id: u64,
    /// The model name that routes to it.
    pub served_model: String,
    /// What of a request it does.
    #[serde(default, skip_serializing_if = "Serves::is_whole")]
    pub serves: Serves,
    /// Its Prometheus page.
    pub metrics_url: String,
    /// Milliseconds from spawn until its own probes held.
    pub probes_ms: u64,
    /// Milliseconds from spawn until a pinned canary completed on it.
    pub ready_ms: u64,
}

/// A process as it was spawned. `(pid, start_ticks)` names it for good; a pid alone does not.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ProcessInfo {
    /// Name in the plan.
    pub name: String,
    /// Its pid, also its process group.
    pub pid: u32,
    /// Field 22 of `/proc/<pid>/stat`.
    pub start_ticks: u64,
    /// Where its output goes.
    pub log: PathBuf,
    /// How often its process of the plan was started before, in this generation. A supervisor of
    /// an older version does not say, and has to be found and stopped all the same.
    #[serde(default)]
    pub before: u32,
}

/// A running stack.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct StackInfo {
    /// Which configuration.
    pub fingerprint: String,
    /// Which incarnation; rises with every bring-up, never repeats.
    pub generation: u64,
    /// How often this case has leased this generation before. Prompts are varied by it, so that
    /// a cold prompt is cold on a warm stack.
    pub variant: u64,
    /// What runs, with real ports and paths.
    pub plan: Plan,
    /// Its processes.
    pub processes: Vec<ProcessInfo>,
    /// Its workers, by index.
    pub workers: Vec<WorkerInfo>,
    /// Directory of logs.
    pub logs: PathBuf,
    /// Directory where results of this generation's reference engine are kept.
    pub reference_dir: PathBuf,
    /// Milliseconds from the first spawn until ready.
    pub bring_up_ms: u64,
    /// Named steps of bring-up, each with its end in milliseconds since the first spawn.
    pub steps: Vec<(String, u64)>,
    /// Whether this lease had to wait for the bring-up (false: the stack was warm).
    pub started_for_this_lease: bool,
}

/// What `kvcr-phase1 status` prints.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Status {
    /// `starting`, `ready`, `mending`, `failed`, `stopping`.
    pub state: String,
    /// Which configuration.
    pub fingerprint: String,
    /// Which incarnation.
    pub generation: u64,
    /// Profile name, for people.
    pub profile: String,
    /// Whether it is a simulated stack, which proves nothing of the product.
    #[serde(default)]
    pub simulated: bool,
    /// Supervisor's pid.
    pub supervisor_pid: u32,
    /// Leases held: case, run and pid.
    pub leases: Vec<String>,
    /// Leases that wait.
    pub queued: Vec<String>,
    /// Seconds until an idle stack stops.
    pub idle_stop_in_seconds: Option<u64>,
    /// Processes.
    pub processes: Vec<ProcessInfo>,
    /// Where the front door is.
    pub frontend_url: Option<String>,
    /// Why bring-up failed.
    pub failure: Option<Failure>,
}
