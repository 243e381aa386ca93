//! What earlier generations of one stack left behind, and removing exactly that.
//!
//! Only whoever holds the stack's lock may sweep: then no supervisor of it lives, and whatever
//! carries its cookie is nobody's.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use super::cookie::Mark;
use super::inventory::Inventory;
use super::state_dir::StackDir;
use super::sweep::{Identity, Ours};
use crate::failure::Failure;

/// Logs of this many generations are kept.
const KEEP_GENERATIONS: usize = 8;

/// What was removed.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Swept {
    /// Processes that were killed.
    pub processes: usize,
    /// Shared-memory files that were removed.
    pub files: Vec<PathBuf>,
}

impl std::fmt::Display for Swept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} processes killed, {} shared-memory files removed",
            self.processes,
            self.files.len()
        )
    }
}

/// What earlier generations left behind.
#[derive(Debug)]
pub struct Leftovers {
    dir: StackDir,
    ours: Ours,
    inventories: Vec<(PathBuf, Inventory)>,
}

impl Leftovers {
    /// Reads what was written down. `ancestor`: everything that descends from it is ours too.
    pub fn of(dir: &StackDir, fingerprint: &str, ancestor: Option<u32>) -> Self {
        let inventories: Vec<_> = dir
            .generations()
            .into_iter()
            .map(|number| dir.generation(number))
            .filter_map(|path| Some((path.clone(), Inventory::load(&path)?)))
            .collect();
        let known = inventories
            .iter()
            .flat_map(|(_, inventory)| inventory.processes.iter().copied())
            .collect();
        Self {
            dir: dir.clone(),
            ours: Ours {
                mark: Mark {
                    fingerprint: fingerprint.to_owned(),
                    home: dir.path().to_owned(),
                    processes: None,
                },
                known,
                ancestor,
            },
            inventories,
        }
    }

    /// Whether anything is left.
    pub fn any(&self) -> bool {
        !self.inventories.is_empty() || !self.ours.scan().is_empty()
    }

    /// Processes that are left.
    pub fn processes(&self) -> BTreeSet<Identity> {
        self.ours.scan().into_iter().collect()
    }

    /// Removes everything.
    pub async fn sweep(&self) -> Result<Swept, Failure> {
        let processes = self.ours.kill().await?;
        Ok(self.remove_files(processes))
    }

    /// [`Self::sweep`] for code without a runtime.
    pub fn sweep_blocking(&self) -> Result<Swept, Failure> {
        let processes = self.ours.kill_blocking()?;
        Ok(self.remove_files(processes))
    }

    fn remove_files(&self, processes: usize) -> Swept {
        let mut swept = Swept {
            processes,
            files: Vec::new(),
        };
        for (path, inventory) in &self.inventories {
            swept.files.extend(inventory.remove_files());
            let _ = fs::remove_dir_all(path.join("run"));
            Inventory::forget(path);
        }
        let numbers = self.dir.generations();
        for number in numbers.iter().rev().skip(KEEP_GENERATIONS) {
            let _ = fs::remove_dir_all(self.dir.generation(*number));
        }
        swept
    }
}
