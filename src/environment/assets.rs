//! The files under `env/`, embedded, so that the binary can install without its repository.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};
use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::hash;

static ENV: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/env");

/// Complete, hashed requirements.
pub(crate) const LOCK: &str = "requirements.lock";
/// Prints what is installed and whether its parts fit.
pub(crate) const PREFLIGHT: &str = "preflight.py";
/// Writes the tiny random model.
pub(crate) const BUILD_MODEL: &str = "build_model.py";
/// The digests that it must arrive at.
pub(crate) const MODEL_DIGESTS: &str = "model-digests.json";
/// What goes on the engine's import path.
pub(crate) const OVERLAY: &str = "overlay";

/// What an environment is made of: exactly the files that decide what an install contains.
#[derive(Clone, Debug)]
pub(crate) struct Recipe {
    pub(crate) name: String,
    /// By path relative to `env/<name>`.
    pub(crate) files: BTreeMap<String, Cow<'static, [u8]>>,
    pub(crate) pins: Pins,
}

/// `env/pins.toml`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Pins {
    pub(crate) uv: UvPin,
    pub(crate) disk: BTreeMap<String, DiskNeed>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct UvPin {
    pub(crate) minimum: String,
    pub(crate) version: String,
    pub(crate) sha256: Vec<String>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DiskNeed {
    pub(crate) environment: u64,
    pub(crate) uv_cache: u64,
}

impl Recipe {
    /// The embedded environment called `name`.
    pub(crate) fn embedded(name: &str) -> Result<Self, Failure> {
        let known = || {
            ENV.dirs()
                .filter(|dir| dir.get_file(dir.path().join(LOCK)).is_some())
                .map(|dir| dir.path().display().to_string())
                .collect::<Vec<_>>()
                .join(", ")
        };
        let directory = ENV
            .get_dir(name)
            .filter(|dir| dir.get_file(dir.path().join(LOCK)).is_some())
            .ok_or_else(|| {
                Failure::environment(format!("there is no locked environment `{name}`"))
                    .expected(format!("one of: {}", known()))
                    .hint("name one of these, or an interpreter of your own: environment.python")
            })?;
        let mut files = BTreeMap::new();
        collect(directory, directory.path(), &mut files);
        let text = ENV
            .get_file("pins.toml")
            .and_then(|file| file.contents_utf8())
            .unwrap_or_default();
        let pins = toml::from_str(text).map_err(|error| {
            Failure::environment("this binary was built with an unreadable env/pins.toml")
                .found(error.message())
                .hint("build it from a clean checkout")
        })?;
        Ok(Self {
            name: name.to_owned(),
            files,
            pins,
        })
    }

    pub(crate) fn disk(&self) -> DiskNeed {
        self.pins.disk.get(&self.name).copied().unwrap_or_default()
    }

    pub(crate) fn file(&self, name: &str) -> Option<&[u8]> {
        self.files.get(name).map(AsRef::as_ref)
    }

    /// Hash over all files.
    pub(crate) fn digest(&self) -> String {
        hash(
            self.files
                .iter()
                .flat_map(|(name, content)| [name.as_bytes(), content.as_ref()]),
        )
    }

    /// The key of an install: the files, the interpreter's version and the platform. The minor
    /// version is enough: wheels are chosen by nothing finer.
    pub(crate) fn key(&self, version: (u32, u32)) -> String {
        let interpreter = format!("cpython-{}.{}", version.0, version.1);
        let platform = format!("{}-{}", std::env::consts::OS, std::env::consts::ARCH);
        hash([
            self.digest().as_bytes(),
            interpreter.as_bytes(),
            platform.as_bytes(),
        ])
    }

    /// Whether it is of the software under test, with a model and etcd, or of tools only.
    pub(crate) fn is_of_the_product(&self) -> bool {
        self.file(PREFLIGHT).is_some()
    }

    /// Whether there is anything to put on the import path.
    pub(crate) fn has_overlay(&self) -> bool {
        self.overlay().next().is_some()
    }

    fn overlay(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.files
            .iter()
            .filter(|(name, _)| Path::new(name).starts_with(OVERLAY))
            .map(|(name, content)| (name.as_str(), content.as_ref()))
    }

    /// Writes the overlay to `<directory>/overlay`.
    pub(crate) fn write_overlay(&self, directory: &Path) -> io::Result<()> {
        self.overlay()
            .try_for_each(|(name, content)| write(&directory.join(name), content))
    }

    /// The first file of the overlay in `directory` that is not what it should be.
    pub(crate) fn damaged_overlay(&self, directory: &Path) -> Option<PathBuf> {
        self.overlay()
            .map(|(name, content)| (directory.join(name), content))
            .find(|(path, content)| std::fs::read(path).ok().as_deref() != Some(*content))
            .map(|(path, _)| path)
    }

    /// A directory in the cache with all files, for scripts that are run from disk. Named by
    /// their hash and renamed into place, so it is whole or absent.
    pub(crate) fn on_disk(&self, cache: &Path) -> io::Result<PathBuf> {
        let place = cache.join("files");
        let directory = place.join(format!("{}-{}", self.name, &self.digest()[..12]));
        let whole = |directory: &Path| {
            self.files.iter().all(|(name, content)| {
                std::fs::read(directory.join(name)).ok().as_deref() == Some(content.as_ref())
            })
        };
        if whole(&directory) {
            return Ok(directory);
        }
        std::fs::create_dir_all(&place)?;
        let temporary = tempfile::Builder::new()
            .prefix(".new-")
            .tempdir_in(&place)?;
        let fresh = temporary.path().join("files");
        for (name, content) in &self.files {
            write(&fresh.join(name), content)?;
        }
        if directory.exists() {
            // Damaged. Moved away rather than repaired: somebody may be reading it.
            let _ = std::fs::rename(&directory, temporary.path().join("old"));
        }
        match std::fs::rename(&fresh, &directory) {
            Err(_) if whole(&directory) => Ok(directory), // somebody else was faster
            other => other.map(|()| directory),
        }
    }
}

fn collect(from: &Dir<'static>, root: &Path, into: &mut BTreeMap<String, Cow<'static, [u8]>>) {
    for file in from.files() {
        let Ok(name) = file.path().strip_prefix(root) else {
            continue;
        };
        if decides(name) {
            into.insert(name.display().to_string(), file.contents().into());
        }
    }
    for directory in from.dirs() {
        collect(directory, root, into);
    }
}

/// Whether a file decides what an install contains. The others (how the lock is made, notes,
/// bytecode that a run in the checkout left behind) do not, and may not change the key.
fn decides(name: &Path) -> bool {
    let bytecode = name.extension().is_some_and(|extension| extension == "pyc");
    let listed = [LOCK, PREFLIGHT, BUILD_MODEL, MODEL_DIGESTS]
        .iter()
        .any(|known| name == Path::new(known));
    listed || (name.starts_with(OVERLAY) && !bytecode)
}

/// SHA-256 over parts that cannot run into each other.
pub(crate) fn hash<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> String {
    let mut hasher = Sha256::new();
    for part in parts {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hash::finish(hasher)
}

fn write(path: &Path, content: &[u8]) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent)?;
    }
    std::fs::write(path, content)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(files: &[(&str, &str)]) -> Recipe {
        let mut recipe = Recipe::embedded("cpu").unwrap();
        recipe.files = files
            .iter()
            .map(|(name, text)| ((*name).to_owned(), text.as_bytes().to_vec().into()))
            .collect();
        recipe
    }

    #[test]
    fn every_file_and_the_interpreter_change_the_key() {
        let base = recipe(&[(LOCK, "a"), ("overlay/x.py", "b")]);
        let keys = [
            base.key((3, 12)),
            base.key((3, 11)),
            recipe(&[(LOCK, "A"), ("overlay/x.py", "b")]).key((3, 12)),
            recipe(&[(LOCK, "a"), ("overlay/x.py", "B")]).key((3, 12)),
            recipe(&[(LOCK, "a"), ("overlay/y.py", "b")]).key((3, 12)),
            recipe(&[(LOCK, "a")]).key((3, 12)),
            recipe(&[("requirements.loc", "ka"), ("overlay/x.py", "b")]).key((3, 12)),
        ];
        let different: std::collections::BTreeSet<_> = keys.iter().collect();
        assert_eq!(different.len(), keys.len());
        assert_eq!(base.key((3, 12)), keys[0]);
    }

    #[test]
    fn only_files_that_decide_are_in_the_recipe() {
        for name in [
            LOCK,
            PREFLIGHT,
            BUILD_MODEL,
            MODEL_DIGESTS,
            "overlay/a/b.py",
        ] {
            assert!(decides(Path::new(name)), "{name}");
        }
        for name in [
            "relock.sh",
            "requirements.in",
            "overlay/__pycache__/a.pyc",
            "x.pyc",
        ] {
            assert!(!decides(Path::new(name)), "{name}");
        }
    }

    #[test]
    fn the_embedded_environment_is_complete() {
        let recipe = Recipe::embedded("cpu").unwrap();
        assert!(recipe.file(LOCK).is_some_and(|lock| lock.len() > 1000));
        assert!(recipe.disk().environment > 0);
        let hashes = &recipe.pins.uv.sha256;
        assert!(!hashes.is_empty());
        let hexadecimal = |hash: &String| hash.bytes().all(|letter| letter.is_ascii_hexdigit());
        assert!(
            hashes
                .iter()
                .all(|hash| hash.len() == 64 && hexadecimal(hash))
        );
        let failure = Recipe::embedded("cqu").unwrap_err();
        assert!(failure.to_string().contains("one of: cpu"), "{failure}");
    }

    #[test]
    fn files_on_disk_are_repaired() {
        let cache = tempfile::tempdir().unwrap();
        let recipe = recipe(&[(LOCK, "a"), ("overlay/x.py", "b")]);
        let directory = recipe.on_disk(cache.path()).unwrap();
        std::fs::write(directory.join("overlay/x.py"), "broken").unwrap();
        assert!(recipe.damaged_overlay(&directory).is_some());
        assert_eq!(recipe.on_disk(cache.path()).unwrap(), directory);
        assert_eq!(recipe.damaged_overlay(&directory), None);
    }
}
