//! The software under test: locked environments of ours, an interpreter the user names, or this
//! program where the stack is simulated.
//!
//! What belongs here: making software ready to be planned with ([`ensure`], or by hand
//! [`install()`] and [`external()`]), finding it again ([`find`], [`locate`]), listing and removing it ([`inventory`]), and keeping it from
//! being removed while a stack runs from it ([`Installed::hold`]). What does not: whether its
//! parts fit one another and the machine (`gate`), and starting any of it (`stack`).
//!
//! ```text
//! <cache>/env/<name>-<key>/      venv/ overlay/ etcd/ install.log manifest.json (written last)
//! <cache>/model/<kind>-<dtype>-<digest>/    <cache>/model/sim-<digest>/
//! <cache>/tools/uv-<version>/    where PATH has none
//! <cache>/files/<name>-<hash>/   embedded scripts, for running them
//! ```
//!
//! A key is a hash of everything that decides the content, so nothing is ever updated in place:
//! another lock or overlay is another directory.

mod assets;
mod child;
pub mod cli;
mod dynamo;
pub(crate) mod etcd;
mod external;
#[cfg(test)]
mod fakes;
mod install;
pub(crate) mod interpreter;
pub mod inventory;
mod lock;
mod log;
mod manifest;
mod model;
mod of_profile;
mod packages;
pub mod peers;
pub mod preflight;
mod program;
pub mod progress;
pub(crate) mod simulated;
mod space;
mod uv;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use child::Search;
pub use external::external;
pub use install::{Request, finished, install, locate};
pub use inventory::Hold;
pub use model::ModelRequest;
pub use of_profile::{ensure, find};
pub use program::Program;
pub use space::bytes;

/// One Python distribution as it is installed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Package {
    /// Its version.
    pub version: String,
    /// SHA-256 of its `RECORD`, which lists the hash of every file: a version string alone says
    /// too little (KVCR's stayed the same across incompatible commits).
    pub record_sha256: Option<String>,
}

/// Software that is ready to be planned with. Paths are absolute.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Installed {
    /// Hash over the lock, the overlay, the interpreter's version and the platform; for a user's
    /// own interpreter, over its packages; for the simulated stack, over this executable.
    pub key: String,
    /// What its processes are started as.
    pub program: Program,
    /// Our overlay, where it is used.
    pub overlay: Option<PathBuf>,
    /// Directory of the model.
    pub model: PathBuf,
    /// Digest over the model's files.
    pub model_digest: String,
    /// etcd, where there is one.
    pub etcd: Option<PathBuf>,
    /// What is installed, by distribution name.
    pub packages: BTreeMap<String, Package>,
    /// Whether its Dynamo looks for tiers inside a `MultiConnector`; one that does not has to be told
    /// them outside, too.
    #[serde(default)]
    pub reads_nested_tiers: bool,
}
