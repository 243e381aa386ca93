//! Load generators of others, that the streaming client is measured beside (`benches/streams`).
//!
//! Packages and their programs only: they have no model, no overlay and no etcd, and nothing of a
//! stack runs from them. vLLM's `bench serve` comes with the environment under test.

use std::path::{Path, PathBuf};

use crate::failure::Failure;

use super::assets::Recipe;
use super::child::Search;
use super::install::Installer;
use super::progress::Reporter;

/// What all of them are called together.
pub const ALL: &str = "peers";

/// One of them.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Peer {
    /// NVIDIA's aiperf.
    Aiperf,
    /// The vLLM project's guidellm.
    Guidellm,
}

impl Peer {
    /// Every one.
    pub const EACH: [Self; 2] = [Self::Aiperf, Self::Guidellm];

    /// What its program is called.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Aiperf => "aiperf",
            Self::Guidellm => "guidellm",
        }
    }

    /// What its locked environment is called. One each: together they do not resolve to the
    /// versions that they are tested with.
    fn environment(self) -> &'static str {
        match self {
            Self::Aiperf => "peer-aiperf",
            Self::Guidellm => "peer-guidellm",
        }
    }
}

/// Installs `peer` if it is missing; its program.
///
/// # Errors
/// Environment, with the log of the install.
pub fn install(
    peer: Peer,
    cache: &Path,
    search: &Search,
    reporter: &mut dyn Reporter,
) -> Result<PathBuf, Failure> {
    let recipe = Recipe::embedded(peer.environment())?;
    let installer = Installer::new(cache, search, recipe)?;
    installer.install(reporter)?;
    Ok(installer.programs().join(peer.name()))
}

/// The program of an installed `peer`.
///
/// # Errors
/// Environment, if it is not there or not as it was installed.
pub fn find(peer: Peer, cache: &Path, search: &Search) -> Result<PathBuf, Failure> {
    let recipe = Recipe::embedded(peer.environment())?;
    let installer = Installer::new(cache, search, recipe)?;
    let hint = |failure: Failure| failure.hint("run `kvcr-phase1 env install peers`");
    installer.locate().map_err(hint)?;
    Ok(installer.programs().join(peer.name()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::assets::LOCK;

    #[test]
    fn each_is_locked_to_a_version_with_hashes_and_brings_no_product() {
        for peer in Peer::EACH {
            let recipe = Recipe::embedded(peer.environment()).unwrap();
            let lock = String::from_utf8(recipe.file(LOCK).unwrap().to_vec()).unwrap();
            let line = format!("{}==", peer.name());
            assert!(lock.lines().any(|it| it.starts_with(&line)), "{peer:?}");
            assert!(lock.contains("--hash=sha256:"), "{peer:?}");
            assert!(
                !recipe.is_of_the_product() && !recipe.has_overlay(),
                "{peer:?}"
            );
            assert!(recipe.disk().environment > 0, "{peer:?}");
        }
    }

    #[test]
    fn one_that_is_not_installed_says_how_it_gets_there() {
        let cache = tempfile::tempdir().unwrap();
        let failure = find(Peer::Aiperf, cache.path(), &Search::default()).unwrap_err();
        assert!(
            failure.to_string().contains("env install peers"),
            "{failure}"
        );
    }
}
