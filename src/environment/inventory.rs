//! What is in the cache, and taking it out again.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustix::fs::FlockOperation;

use crate::failure::Failure;

use super::manifest::{self, Manifest, Unreadable};
use super::{lock, log};

/// What an installed thing is.
#[derive(Clone, Copy, Debug, Eq, PartialEq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A locked environment.
    Environment,
    /// A built model.
    Model,
    /// A tool that was brought along.
    Tool,
}

/// Whether it can be used.
#[derive(Clone, Debug, Eq, PartialEq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// It was finished.
    Complete,
    /// It never was.
    Interrupted,
    /// Its manifest cannot be read.
    Damaged,
    /// Somebody is at work on it.
    Installing,
}

/// One thing in the cache.
#[derive(Clone, Debug, Eq, PartialEq, serde::Serialize)]
pub struct Entry {
    /// What it is.
    pub kind: Kind,
    /// `cpu`, `dense-float32`, `uv`.
    pub name: String,
    /// The part of its directory's name after that: key, digest or version.
    pub key: String,
    /// Where it is.
    pub path: PathBuf,
    /// Bytes on disk. Of an environment most are shared with uv's cache.
    pub bytes: u64,
    /// Time since it was made.
    pub age: Duration,
    /// Whether it can be used.
    pub condition: Condition,
    /// Whether something runs from it now.
    pub in_use: bool,
}

/// What a removal did.
#[derive(Debug, Default)]
pub struct Removal {
    /// Gone.
    pub removed: Vec<Entry>,
    /// Still there, and why.
    pub kept: Vec<(Entry, String)>,
}

/// Everything that is installed in `cache`, whatever its key.
pub fn list(cache: &Path) -> Vec<Entry> {
    let places = [
        ("env", Kind::Environment),
        ("model", Kind::Model),
        ("tools", Kind::Tool),
    ];
    let mut entries: Vec<Entry> = places
        .into_iter()
        .flat_map(|(place, kind)| {
            let directories = cache.join(place).read_dir().into_iter().flatten().flatten();
            directories.filter_map(move |found| entry(kind, &found.path()))
        })
        .collect();
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    entries
}

/// Removes what `what` names: `all`, a name (`cpu`), a key or the beginning of one, or
/// `name-key`. What is in use stays.
pub fn remove(cache: &Path, what: &str) -> Result<Removal, Failure> {
    let entries = list(cache);
    let chosen: Vec<Entry> = entries
        .iter()
        .filter(|it| it.named(what))
        .cloned()
        .collect();
    if chosen.is_empty() && what != "all" {
        let names: Vec<String> = entries.iter().map(Entry::full_name).collect();
        return Err(
            Failure::environment(format!("nothing called `{what}` is installed"))
                .expected("`all`, a name, or a key")
                .found(match names.is_empty() {
                    true => format!("nothing in {}", cache.display()),
                    false => names.join(", "),
                })
                .hint("see `kvcr-phase1 env list`"),
        );
    }
    let mut removal = Removal::default();
    for entry in chosen {
        match remove_one(&entry.path) {
            Ok(()) => removal.removed.push(entry),
            Err(why) => removal.kept.push((entry, why)),
        }
    }
    if what == "all" {
        // Copies of embedded files, made again at need.
        let _ = std::fs::remove_dir_all(cache.join("files"));
    }
    Ok(removal)
}

impl Entry {
    /// `cpu-0123456789ab`.
    pub fn full_name(&self) -> String {
        format!("{}-{}", self.name, self.key)
    }

    fn named(&self, what: &str) -> bool {
        let beginning = what.len() >= 4 && self.key.starts_with(what);
        what == "all" || what == self.name || what == self.full_name() || beginning
    }
}

fn remove_one(path: &Path) -> Result<(), String> {
    let exclusive = FlockOperation::NonBlockingLockExclusive;
    let take = |at: PathBuf, busy: &str| match lock::attempt_for_a_second(&at, exclusive) {
        Ok(Some(held)) => Ok((held, at)),
        Ok(None) => Err(busy.to_owned()),
        Err(error) => Err(error.to_string()),
    };
    let install = take(
        lock::install_path(path),
        "it is being installed: wait for that",
    )?;
    let in_use = take(
        lock::use_path(path),
        "a stack runs from it: `kvcr-phase1 down` first",
    )?;
    // The marker first, so that a removal that is interrupted leaves no complete install.
    let _ = std::fs::remove_file(path.join(manifest::FILE));
    std::fs::remove_dir_all(path).map_err(|error| error.to_string())?;
    for (held, at) in [in_use, install] {
        let _ = std::fs::remove_file(at);
        drop(held);
    }
    Ok(())
}

fn entry(kind: Kind, path: &Path) -> Option<Entry> {
    let file_name = path.file_name()?.to_str()?;
    if file_name.starts_with('.') || !path.is_dir() {
        return None;
    }
    let (name, key) = file_name.rsplit_once('-')?;
    let held = |at: PathBuf| {
        at.exists()
            && matches!(
                lock::attempt(&at, FlockOperation::NonBlockingLockExclusive),
                Ok(None)
            )
    };
    let finished = match kind {
        Kind::Environment => match Manifest::read(path) {
            Ok(_) => Condition::Complete,
            Err(Unreadable::Absent) => Condition::Interrupted,
            Err(Unreadable::Damaged(_)) => Condition::Damaged,
        },
        // Both are renamed into place when they are whole.
        Kind::Model | Kind::Tool => Condition::Complete,
    };
    let condition = match held(lock::install_path(path)) {
        true => Condition::Installing,
        false => finished,
    };
    let made = path.metadata().and_then(|found| found.modified());
    Some(Entry {
        kind,
        name: name.to_owned(),
        key: key.to_owned(),
        bytes: size(path),
        age: made
            .ok()
            .and_then(|made| SystemTime::now().duration_since(made).ok())
            .unwrap_or_default(),
        condition,
        in_use: held(lock::use_path(path)),
        path: path.to_owned(),
    })
}

/// Bytes on disk; a file with two names counts once.
fn size(path: &Path) -> u64 {
    let mut seen = HashSet::new();
    let mut pending = vec![path.to_owned()];
    let mut total = 0;
    while let Some(directory) = pending.pop() {
        for entry in directory.read_dir().into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else {
                continue; // gone since, or not ours to see
            };
            if found.nlink() == 1 || found.is_dir() || seen.insert((found.dev(), found.ino())) {
                total += found.blocks() * 512;
            }
            if found.is_dir() {
                pending.push(entry.path());
            }
        }
    }
    total
}

/// Something runs from an install as long as this lives; removal and repair then refuse.
#[derive(Debug)]
pub struct Hold {
    _locks: Vec<lock::Lock>,
}

impl super::Installed {
    /// Keeps this install and its model from being removed. Held by whoever runs a stack from
    /// it. What lies outside the cache, or in one that cannot be written to, needs no lock.
    pub fn hold(&self) -> Result<Hold, Failure> {
        let python = self.program.python();
        let environment = python.and_then(|python| python.ancestors().nth(3));
        let environment = environment.filter(|directory| {
            Manifest::read(directory).is_ok_and(|manifest| manifest.key == self.key)
        });
        let model = Some(self.model.as_path()).filter(|model| model.join("model.json").exists());
        let mut locks = Vec::new();
        for directory in environment.into_iter().chain(model) {
            let path = lock::use_path(directory);
            match lock::attempt_for_a_second(&path, FlockOperation::NonBlockingLockShared) {
                Ok(Some(held)) => locks.push(held),
                Ok(None) => {
                    return Err(Failure::environment(format!(
                        "{} is being removed or repaired",
                        directory.display()
                    ))
                    .expected("an install that nobody changes")
                    .hint("run this again when that has ended"));
                }
                Err(error) if read_only(&error) => {}
                Err(error) => return Err(lock::unusable(&path, &error.to_string())),
            }
            // A removal may have come in between the look and the lock.
            if !directory.exists() {
                return Err(log::io(
                    "the install was removed",
                    directory,
                    &std::io::ErrorKind::NotFound.into(),
                ));
            }
        }
        Ok(Hold { _locks: locks })
    }
}

fn read_only(error: &std::io::Error) -> bool {
    matches!(
        error.kind(),
        std::io::ErrorKind::ReadOnlyFilesystem | std::io::ErrorKind::PermissionDenied
    )
}
