//! `result.json`: the verdict of one arm and everything it stands on.
//!
//! Readers outlive writers: fields are only added, and [`SCHEMA`] rises when one changes its
//! meaning.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::host::Host;
use crate::config::Profile;
use crate::config::profile::EngineKind;
use crate::environment::Package;
use crate::failure::Failure;
use crate::stack::protocol::StackInfo;
use crate::verdict::Verdict;

/// Version of this document.
pub const SCHEMA: u32 = 1;

/// One arm's result.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct ArmResult {
    /// [`SCHEMA`].
    pub schema: u32,
    /// `tc01::cold`.
    pub name: String,
    /// What was judged: `vllm`, or `sim` for the simulated stack, which proves the harness and
    /// never the product.
    #[serde(default = "vllm")]
    pub engine: EngineKind,
    /// What the arm claims.
    pub claim: String,
    /// The verdict with its checks.
    pub verdict: Verdict,
    /// What ended the arm before its checks were complete.
    pub failure: Option<Failure>,
    /// Run it belongs to.
    pub run_id: String,
    /// Attempt, from 1.
    pub attempt: u32,
    /// When it began, in UTC.
    pub began: jiff::Timestamp,
    /// Where the time went.
    pub timings: Timings,
    /// Whether a reviewed pin of the reference was found and compared.
    pub pin: Pin,
    /// The command that runs it again.
    pub again: String,
    /// Version of this harness.
    pub harness: String,
    /// Profile with every override applied.
    pub profile: Profile,
    /// Name or path of the profile.
    pub profile_name: String,
    /// Overrides: field and text.
    pub overrides: Vec<(String, String)>,
    /// Key of the environment.
    pub environment: Option<String>,
    /// Digest of the model.
    pub model_digest: Option<String>,
    /// Packages with the hash of their file list.
    pub packages: BTreeMap<String, Package>,
    /// The machine.
    pub host: Host,
    /// The stack: generation, fingerprint, plan with every argv and environment, workers.
    pub stack: Option<StackInfo>,
    /// Requests in order.
    pub requests: Vec<RequestLine>,
    /// Findings in logs and counters that no check of this arm covers.
    pub notes: Vec<String>,
    /// Where this document and its neighbours are.
    pub evidence: PathBuf,
}

/// Results without the field are older than the simulated stack.
fn vllm() -> EngineKind {
    EngineKind::Vllm
}

/// One request, in short; the whole is in `requests/`.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct RequestLine {
    /// Label inside the arm.
    pub label: String,
    /// Process of the worker it was pinned to: `worker0`.
    pub worker: String,
    /// Prompt tokens, as the engine counted them.
    pub prompt_tokens: u64,
    /// Tokens served from any cache.
    pub cached_tokens: Option<u64>,
    /// Milliseconds from sending until the whole response was read.
    pub wall_ms: f64,
}

/// State of the pinned reference.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum Pin {
    /// The arm pins nothing, or did not get that far.
    NotReached,
    /// A pin for this model, engine and device class was compared.
    Compared {
        /// Its file name.
        name: String,
    },
    /// There is none for this model, engine and device class.
    Missing {
        /// The file name it would have.
        name: String,
    },
}

/// Where the time of one arm went, in milliseconds. All waits on the product together with
/// `harness` make `wall`.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Timings {
    /// From the start of the process (or of the arm, if it was not the first in its process)
    /// until the result was written.
    pub wall: f64,
    /// Waiting for the stack to come up, or for other leases.
    pub lease: f64,
    /// Waiting for the reference engine to come up.
    pub reference_start: f64,
    /// Waiting for responses of the stack.
    pub requests: f64,
    /// Waiting for responses of the reference engine.
    pub reference_requests: f64,
    /// Waiting for counters to settle, and for what a Guard says.
    pub settle: f64,
    /// Waiting for killed processes to be started again.
    #[serde(default)]
    pub replacements: f64,
    /// The harness's own: `wall` less all of the above.
    pub harness: f64,
    /// `harness / wall`, 0 to 1.
    pub harness_share: f64,
}

impl Timings {
    /// Completes the sums for a given wall time.
    #[must_use]
    pub fn closed(mut self, wall: f64) -> Self {
        let waited = self.lease
            + self.reference_start
            + self.requests
            + self.reference_requests
            + self.settle
            + self.replacements;
        self.wall = wall;
        self.harness = (wall - waited).max(0.0);
        self.harness_share = if wall > 0.0 { self.harness / wall } else { 0.0 };
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_waiting_is_the_harness() {
        let timings = Timings {
            lease: 60.0,
            requests: 30.0,
            settle: 8.0,
            ..Timings::default()
        }
        .closed(100.0);
        assert!((timings.harness - 2.0).abs() < 1e-9);
        assert!((timings.harness_share - 0.02).abs() < 1e-9);
    }
}
