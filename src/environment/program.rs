//! What the processes of a stack are started as.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::sim::SIMULATE;

/// The program behind every module of a stack.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// An interpreter: the product.
    Python(PathBuf),
    /// This executable in its place: proves the harness, never the product.
    Simulated(PathBuf),
}

impl Program {
    /// The file that is executed.
    #[must_use]
    pub fn path(&self) -> &Path {
        match self {
            Self::Python(path) | Self::Simulated(path) => path,
        }
    }

    /// The interpreter, if it is one.
    #[must_use]
    pub fn python(&self) -> Option<&Path> {
        match self {
            Self::Python(path) => Some(path),
            Self::Simulated(_) => None,
        }
    }

    /// Whether it stands in for the product.
    #[must_use]
    pub fn is_simulated(&self) -> bool {
        matches!(self, Self::Simulated(_))
    }

    /// The words that start the module `name`; its own arguments follow.
    #[must_use]
    pub fn module(&self, name: &str) -> Vec<String> {
        let flag = match self {
            Self::Python(_) => "-m",
            Self::Simulated(_) => SIMULATE,
        };
        // Paths of ours are UTF-8: configuration refuses others.
        [&self.path().to_string_lossy(), flag, name]
            .map(str::to_owned)
            .into()
    }
}
