//! What a generation leaves behind if nobody cleans up: processes and shared-memory files.
//!
//! Written down while they are certainly ours (at ready, at each lease's end, before a stop),
//! because a killed engine can no longer be asked. A file under `/dev/shm` is ours if its name
//! starts with one of the plan's prefixes, or if a process of ours had it open and it was born
//! after the generation began (a model that somebody put there before was not). It is removed
//! only if it is still the same file and no living process has it open.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use procfs::process::{FDTarget, MMapPath, Process, all_processes};
use serde::{Deserialize, Serialize};

use super::state_dir::unusable;
use super::sweep::{Identity, Ours};
use crate::atomic;
use crate::failure::Failure;

const SHM: &str = "/dev/shm";

/// A shorter prefix could match a stranger's file by chance.
const PREFIX_MIN: usize = 8;

/// One file, by identity: a name alone may be somebody else's tomorrow.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ShmFile {
    /// Where it is.
    pub path: PathBuf,
    /// Its file system.
    pub dev: u64,
    /// Its number there.
    pub ino: u64,
}

/// What one generation owns outside its own directory.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Inventory {
    /// Files under `/dev/shm` that were there before it began, whoever uses them: not ours. No
    /// time says it, since clocks jump.
    pub before: BTreeSet<ShmFile>,
    /// Prefixes of names under `/dev/shm`.
    pub shm_prefixes: Vec<String>,
    /// Files under `/dev/shm`.
    pub shm: BTreeSet<ShmFile>,
    /// Processes.
    pub processes: BTreeSet<Identity>,
}

impl Inventory {
    /// A generation that begins now.
    pub fn begin() -> Self {
        Self {
            before: everything(),
            ..Self::default()
        }
    }

    /// What was written down in a generation's directory; nothing where there is no such file.
    pub fn load(generation: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(file(generation)).ok()?).ok()
    }

    /// Writes it down, durably.
    pub fn save(&self, generation: &Path) -> Result<(), Failure> {
        let path = file(generation);
        let text = serde_json::to_vec_pretty(self).unwrap_or_default();
        atomic::replace_durably(&path, &text).map_err(|error| unusable(&path, &error))
    }

    /// Says that nothing is left of the generation.
    pub fn forget(generation: &Path) {
        let _ = fs::remove_file(file(generation));
    }

    /// Adds what is ours now.
    pub fn observe(&mut self, ours: &Ours) {
        self.processes = ours.scan().into_iter().collect();
        let used: BTreeSet<(u64, u64)> = self
            .processes
            .iter()
            .filter_map(|identity| open(*identity))
            .flat_map(|process| used_by(&process))
            .collect();
        let new = self.new_ones(named(&used));
        self.shm.extend(new);
    }

    fn new_ones(&self, mut found: BTreeSet<ShmFile>) -> BTreeSet<ShmFile> {
        found.retain(|file| !self.before.contains(file));
        found
    }

    /// Removes files that nobody uses any more; returns those removed.
    pub fn remove_files(&self) -> Vec<PathBuf> {
        let mut doomed: BTreeSet<ShmFile> = self.shm.clone();
        for entry in fs::read_dir(SHM).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let named = |prefix: &String| {
                prefix.len() >= PREFIX_MIN
                    && name
                        .to_str()
                        .is_some_and(|name| name.starts_with(prefix.as_str()))
            };
            if self.shm_prefixes.iter().any(named) {
                collect(&entry.path(), &mut doomed, 0);
            }
        }
        if doomed.is_empty() {
            return Vec::new();
        }
        let used = used_by_anyone();
        let mut removed = Vec::new();
        // Reverse order: what is inside a directory comes before it.
        for file in doomed.into_iter().rev() {
            let found = fs::symlink_metadata(&file.path).ok();
            let same = found
                .as_ref()
                .is_some_and(|found| found.dev() == file.dev && found.ino() == file.ino);
            if !same || used.contains(&(file.dev, file.ino)) || !file.path.starts_with(SHM) {
                continue;
            }
            // A link to a directory is not one.
            let gone = if found.is_some_and(|found| found.is_dir()) {
                fs::remove_dir(&file.path)
            } else {
                fs::remove_file(&file.path)
            };
            if gone.is_ok() {
                removed.push(file.path);
            }
        }
        removed
    }
}

/// Files right under `/dev/shm` that these processes use now. Not those in a directory there: that
/// is a service's pool, and its to keep also while nobody has it open.
pub(crate) fn shm_of(processes: &BTreeSet<Identity>) -> BTreeSet<ShmFile> {
    let used: BTreeSet<(u64, u64)> = processes
        .iter()
        .filter_map(|identity| open(*identity))
        .flat_map(|process| used_by(&process))
        .collect();
    let mut found = named(&used);
    found.retain(|file| file.path.parent() == Some(Path::new(SHM)));
    found
}

/// Removes those of these files that nobody uses any more; returns them.
pub(crate) fn remove_unused(files: impl IntoIterator<Item = ShmFile>) -> Vec<PathBuf> {
    Inventory {
        shm: files.into_iter().collect(),
        ..Inventory::default()
    }
    .remove_files()
}

fn file(generation: &Path) -> PathBuf {
    generation.join("inventory.json")
}

fn open(identity: Identity) -> Option<Process> {
    let process = Process::new(i32::try_from(identity.pid).ok()?).ok()?;
    let stat = process.stat().ok()?;
    (Identity::from(&stat) == identity).then_some(process)
}

fn collect(path: &Path, into: &mut BTreeSet<ShmFile>, depth: u32) {
    let Ok(found) = fs::symlink_metadata(path) else {
        return;
    };
    into.insert(ShmFile {
        path: path.to_owned(),
        dev: found.dev(),
        ino: found.ino(),
    });
    if found.is_dir() && depth < 8 {
        for entry in fs::read_dir(path).into_iter().flatten().flatten() {
            collect(&entry.path(), into, depth + 1);
        }
    }
}

fn everything() -> BTreeSet<ShmFile> {
    let mut all = BTreeSet::new();
    for entry in fs::read_dir(SHM).into_iter().flatten().flatten() {
        collect(&entry.path(), &mut all, 0);
    }
    all
}

/// Names that these files (device, number) have under `/dev/shm` now. Not the names they were
/// opened by: glibc makes a semaphore under a temporary name and links it to its real one, so a
/// process seems to use a deleted file.
fn named(used: &BTreeSet<(u64, u64)>) -> BTreeSet<ShmFile> {
    let mut all = everything();
    all.retain(|file| used.contains(&(file.dev, file.ino)));
    all
}

/// Files under `/dev/shm` that a process has mapped or open: device and number.
fn used_by(process: &Process) -> Vec<(u64, u64)> {
    let mut files = Vec::new();
    for map in process.maps().into_iter().flatten() {
        if let MMapPath::Path(path) = &map.pathname
            && path.starts_with(SHM)
        {
            let (major, minor) = (map.dev.0.unsigned_abs(), map.dev.1.unsigned_abs());
            files.push((rustix::fs::makedev(major, minor), map.inode));
        }
    }
    for fd in process.fd().into_iter().flatten().flatten() {
        if let FDTarget::Path(path) = &fd.target
            && path.starts_with(SHM)
            // Through the link, so that it is the open file and not whatever has its name now.
            && let Ok(found) = fs::metadata(format!("/proc/{}/fd/{}", process.pid(), fd.fd))
        {
            files.push((found.dev(), found.ino()));
        }
    }
    files
}

fn used_by_anyone() -> BTreeSet<(u64, u64)> {
    let Ok(processes) = all_processes() else {
        return BTreeSet::new();
    };
    processes
        .flatten()
        .flat_map(|process| used_by(&process))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shm(prefix: &str) -> tempfile::NamedTempFile {
        tempfile::Builder::new()
            .prefix(prefix)
            .tempfile_in(SHM)
            .unwrap()
    }

    #[test]
    fn an_unused_file_of_ours_goes_and_a_strangers_stays() {
        let prefix = format!("phase1-unit-{}-", std::process::id());
        // `keep` closes the descriptor: nobody uses it.
        let ours = shm(&prefix).into_temp_path();
        let strangers = shm("stranger-").into_temp_path();
        let inventory = Inventory {
            shm_prefixes: vec![prefix],
            ..Inventory::begin()
        };
        assert_eq!(inventory.remove_files(), [ours.to_path_buf()]);
        assert!(strangers.exists());
    }

    #[test]
    fn what_was_there_before_is_not_ours_whatever_its_time_says() {
        let before = shm("phase1-before-");
        let inventory = Inventory::begin();
        let after = shm("phase1-after-");
        // As if the clock had been set back: no time may count.
        let long_ago = std::time::SystemTime::UNIX_EPOCH;
        after.as_file().set_modified(long_ago).unwrap();
        let used = used_by(&Process::myself().unwrap()).into_iter().collect();
        let ours = inventory.new_ones(named(&used));
        let ours: Vec<&Path> = ours.iter().map(|file| file.path.as_path()).collect();
        assert!(ours.contains(&after.path()), "{ours:?}");
        assert!(!ours.contains(&before.path()), "{ours:?}");
    }

    #[test]
    fn a_file_that_somebody_has_open_stays() {
        let prefix = format!("phase1-open-{}-", std::process::id());
        let open = shm(&prefix);
        let inventory = Inventory {
            shm_prefixes: vec![prefix],
            ..Inventory::begin()
        };
        assert!(inventory.remove_files().is_empty());
        assert!(open.path().exists());
    }

    #[test]
    fn a_file_that_was_linked_to_another_name_is_found_by_that() {
        let made = shm("phase1-made-");
        let linked = Path::new(SHM).join(format!("phase1-linked-{}", std::process::id()));
        fs::hard_link(made.path(), &linked).unwrap();
        fs::remove_file(made.path()).unwrap();
        let used = used_by(&Process::myself().unwrap()).into_iter().collect();
        let names: Vec<PathBuf> = named(&used).into_iter().map(|file| file.path).collect();
        fs::remove_file(&linked).unwrap();
        assert!(names.contains(&linked), "{names:?}");
    }

    #[test]
    fn what_a_dead_process_used_goes_and_what_lies_in_a_directory_stays() {
        let used = shm("phase1-used-");
        let directory = tempfile::tempdir_in(SHM).unwrap();
        let pool = fs::File::create(directory.path().join("pool")).unwrap();
        let me = Identity::of(std::process::id()).unwrap();
        let mine = shm_of(&BTreeSet::from([me]));
        let paths: Vec<&Path> = mine.iter().map(|file| file.path.as_path()).collect();
        assert!(paths.contains(&used.path()), "{paths:?}");
        assert!(!paths.contains(&directory.path().join("pool").as_path()));
        let only = |file: &&ShmFile| file.path == used.path();
        let only: Vec<ShmFile> = mine.iter().filter(only).cloned().collect();
        assert!(remove_unused(only.clone()).is_empty(), "it is open");
        let used = used.into_temp_path();
        assert_eq!(remove_unused(only), [used.to_path_buf()]);
        drop(pool);
    }

    #[test]
    fn a_name_that_now_means_another_file_stays() {
        let file = shm("phase1-other-").into_temp_path();
        let found = fs::metadata(&file).unwrap();
        let inventory = Inventory {
            shm: BTreeSet::from([ShmFile {
                path: file.to_path_buf(),
                dev: found.dev(),
                ino: found.ino() + 1,
            }]),
            ..Inventory::begin()
        };
        assert!(inventory.remove_files().is_empty());
        assert!(file.exists());
    }

    #[test]
    fn a_prefix_that_is_too_short_matches_nothing() {
        let file = shm("p1x-").into_temp_path();
        let inventory = Inventory {
            shm_prefixes: vec!["p1x-".to_owned(), String::new()],
            ..Inventory::begin()
        };
        assert!(inventory.remove_files().is_empty());
        assert!(file.exists());
    }
}
