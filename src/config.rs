//! Profile, flags and `PHASE1_*` become one validated [`Config`].
//!
//! The only module that reads environment variables.

pub mod profile;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use profile::Profile;

/// A wrong flag, field, variable or case: exit code 2, before anything runs.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

/// Directories that the harness writes to.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Paths {
    /// Locks, sockets, generations: `$XDG_RUNTIME_DIR/kvcr-phase1` or `/tmp/kvcr-phase1-$UID`.
    pub state: PathBuf,
    /// Installed environments and models: `$XDG_CACHE_HOME/kvcr-phase1`.
    pub cache: PathBuf,
    /// Evidence: `<target>/phase1`.
    pub runs: PathBuf,
    /// Package root, where `snapshots/` is.
    pub root: PathBuf,
}

/// Everything a run is configured with.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Config {
    /// Name or path the profile was asked for by.
    pub profile_name: String,
    /// The profile with every override applied.
    pub profile: Profile,
    /// `field=value` of every override, in order, for the replay command.
    pub overrides: Vec<(String, String)>,
    /// Directories.
    pub paths: Paths,
    /// Shared by every process of one run: `NEXTEST_RUN_ID`, or one of our own.
    pub run_id: String,
    /// nextest's attempt number, from 1.
    pub attempt: u32,
    /// Cases that may not be gated (`PHASE1_REQUIRE`): `tc01`, `tc01::cold`, `all`.
    pub require: Vec<String>,
    /// Whether a reference without a pin fails (`PHASE1_STRICT_PINS`).
    pub strict_pins: bool,
}
