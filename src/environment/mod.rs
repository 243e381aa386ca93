//! The software under test: locked environments of ours, or an interpreter the user names.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

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
    /// own interpreter, over its packages.
    pub key: String,
    /// The interpreter.
    pub python: PathBuf,
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
}
