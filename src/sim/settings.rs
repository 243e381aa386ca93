//! What every simulated process is told beside its command line: one variable, one JSON document.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::fault::{Switch, parse_file};
use crate::plan::Plan;

/// The variable that holds [`Settings`]. Its absence means defaults and no faults.
pub const VARIABLE: &str = "KVCR_SIM";

/// Seed, latencies and faults of a simulated stack.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Name of this process in the plan: `worker0`, `frontend`, `service1`.
    pub process: String,
    /// Everything that varies follows from it.
    pub seed: u64,
    /// How long things take.
    pub latency: Latency,
    /// Faults from the start.
    pub faults: Vec<Switch>,
    /// A file that replaces `faults` while it exists: one switch a line. Looked at whenever a
    /// fault could be told, so a stack that runs can be told to lie, and to stop.
    pub faults_file: Option<PathBuf>,
    /// Where the frontend writes when it wrote each token of each stream, one JSON line a
    /// stream; the ground truth of the streaming benchmark.
    pub write_log: Option<PathBuf>,
}

impl Settings {
    /// Reads [`VARIABLE`]'s value.
    ///
    /// # Errors
    /// What is wrong with the document.
    pub fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|error| format!("{VARIABLE} is not settings: {error}"))
    }
}

/// The lies that the processes of `plan` tell now: those of a control file, or else of the profile.
/// Empty for a stack that is not simulated.
#[must_use]
pub fn told(plan: &Plan) -> Vec<Switch> {
    let texts = plan
        .processes
        .iter()
        .filter_map(|process| process.env.get(VARIABLE));
    let settings = texts.filter_map(|text| Settings::parse(text).ok()).next();
    let Some(settings) = settings else {
        return Vec::new();
    };
    let file = settings.faults_file.as_ref();
    match file.and_then(|file| std::fs::read_to_string(file).ok()) {
        Some(text) => parse_file(&text).unwrap_or_default(),
        None => settings.faults,
    }
}

/// How long things take, in microseconds. Deterministic: nothing here is drawn.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Latency {
    /// From a worker's start until it is healthy.
    pub start_us: u64,
    /// To compute one prompt token.
    pub prefill_token_us: u64,
    /// To load one block from a tier behind the device.
    pub load_block_us: u64,
    /// To move one block between two processes.
    pub transfer_block_us: u64,
    /// To generate one token.
    pub decode_token_us: u64,
    /// From a worker's death until the router no longer lists it (a lease that expires).
    pub lease_us: u64,
    /// From the death of a claimant until its Guard serves.
    pub promotion_us: u64,
}

impl Default for Latency {
    fn default() -> Self {
        Self {
            start_us: 50_000,
            prefill_token_us: 10,
            load_block_us: 50,
            transfer_block_us: 100,
            decode_token_us: 500,
            lease_us: 300_000,
            promotion_us: 10_000,
        }
    }
}

impl Latency {
    /// What computing `tokens` prompt tokens takes.
    #[must_use]
    pub fn prefill(self, tokens: u64) -> Duration {
        Duration::from_micros(self.prefill_token_us.saturating_mul(tokens))
    }

    /// What loading `blocks` blocks takes.
    #[must_use]
    pub fn load(self, blocks: u64) -> Duration {
        Duration::from_micros(self.load_block_us.saturating_mul(blocks))
    }

    /// What moving `blocks` blocks between processes takes.
    #[must_use]
    pub fn transfer(self, blocks: u64) -> Duration {
        Duration::from_micros(self.transfer_block_us.saturating_mul(blocks))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive_the_variable() {
        let settings = Settings {
            process: "worker1".into(),
            seed: 7,
            faults: vec!["corrupt_block@worker1#2".parse().unwrap()],
            ..Settings::default()
        };
        let text = serde_json::to_string(&settings).unwrap();
        assert_eq!(Settings::parse(&text).unwrap(), settings);
    }

    #[test]
    fn what_a_stack_is_told_can_be_read_from_its_plan() {
        use crate::config::testing::{cpu, sim};
        use crate::plan::testing::{canonical, installed, simulated};
        let lies = |args: &[&str]| told(&canonical(&sim(args), &simulated()).unwrap());
        assert_eq!(lies(&[]), []);
        let lie: Switch = "corrupt_block@worker0".parse().unwrap();
        assert_eq!(lies(&["--sim-faults", "corrupt_block@worker0"]), [lie]);
        assert_eq!(told(&canonical(&cpu(&[]), &installed()).unwrap()), []);
    }

    #[test]
    fn a_typing_error_is_refused_by_name() {
        let error = Settings::parse(r#"{"latencies":{}}"#).unwrap_err();
        assert!(error.contains("latencies"), "{error}");
    }
}
