//! Runs whose stack somebody stopped on purpose.
//!
//! A run asks for the stack once an arm, each time perhaps from another process. Whoever stops
//! the stack under it means the run: its next arm must not bring up what was just taken down.
//! The supervisor that could remember is gone by then, so a file does.

use std::fs;

use super::state_dir::{StackDir, unusable};
use crate::atomic;
use crate::failure::Failure;

/// Runs that are remembered: more than can be under way at once.
const RUNS_MAX: usize = 64;

/// Remembers that the stack of these runs was stopped under them.
pub(super) fn remember(
    dir: &StackDir,
    runs: impl IntoIterator<Item = String>,
) -> Result<(), Failure> {
    let mut all = known(dir);
    for run in runs {
        if !all.contains(&run) {
            all.push(run);
        }
    }
    let surplus = all.len().saturating_sub(RUNS_MAX);
    all.drain(..surplus);
    let path = dir.ended_runs();
    atomic::json(&all)
        .and_then(|text| atomic::replace(&path, &text))
        .map_err(|error| unusable(&path, &error))
}

/// Why `run` may not have this stack again, if so.
pub(super) fn failure(dir: &StackDir, run: &str) -> Option<Failure> {
    known(dir)
        .iter()
        .any(|known| known == run)
        .then(|| stopped("it was stopped earlier in this run"))
}

/// What everyone is told whose stack is stopped on purpose.
pub(super) fn stopped(why: &str) -> Failure {
    Failure::inconclusive("the stack was stopped under this run")
        .found(why)
        .hint("run again to bring it up again")
}

/// A file that cannot be read forbids nothing.
fn known(dir: &StackDir) -> Vec<String> {
    fs::read(dir.ended_runs())
        .ok()
        .and_then(|text| serde_json::from_slice(&text).ok())
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_runs_are_remembered() {
        let folder = tempfile::tempdir().unwrap();
        let dir = StackDir::at(folder.path());
        assert_eq!(failure(&dir, "0"), None);
        for run in 0..RUNS_MAX + 1 {
            remember(&dir, [run.to_string(), run.to_string()]).unwrap();
        }
        assert_eq!(failure(&dir, "0"), None);
        assert!(failure(&dir, "1").is_some());
        assert!(failure(&dir, &RUNS_MAX.to_string()).is_some());
        fs::write(dir.ended_runs(), "nonsense").unwrap();
        assert_eq!(failure(&dir, "1"), None);
    }
}
