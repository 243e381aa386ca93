//! The run directory: everything that was seen, written before anything is judged by a snapshot.
//!
//! ```text
//! <runs>/latest -> <run id>
//! <runs>/<run id>/run.json               the verdict table, written by `kvcr-phase1 run`
//! <runs>/<run id>/tc01__cold/result.json the verdict, versions, plan, timings (see [`result`])
//!                            requests/   one JSON a request: what was asked, what came back
//!                            metrics/    raw Prometheus pages, before and after
//!                            logs/       the tail of every process's log
//!                            processes.json
//!                            order.json, samples.jsonl, performance.json, *.svg: see [`Measured`]
//! ```
//!
//! The only module that writes there. What a verdict means is `verdict`'s.

pub mod host;
mod performance;
pub mod result;

use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

pub use performance::Measured;

use crate::atomic;
use crate::failure::Failure;

/// Bytes of each log's end that are kept. Start-up and one arm fit many times over.
const LOG_TAIL_BYTES: u64 = 4 << 20;

/// Evidence of one arm.
#[derive(Clone, Debug)]
pub struct ArmDir {
    path: PathBuf,
}

impl ArmDir {
    /// Creates `<runs>/<run_id>/<case>__<arm>[@attempt]` and points `latest` at the run.
    ///
    /// # Errors
    /// Environment, if the directory cannot be written.
    pub fn create(runs: &Path, run_id: &str, name: &str, attempt: u32) -> Result<Self, Failure> {
        let mut leaf = name.replace("::", "__");
        if attempt > 1 {
            leaf.push_str(&format!("@{attempt}"));
        }
        let run = runs.join(run_id);
        let path = run.join(leaf);
        for part in ["requests", "metrics", "logs"] {
            fs::create_dir_all(path.join(part)).map_err(|error| cannot_write(&path, &error))?;
        }
        point_latest(runs, run_id);
        Ok(Self { path })
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `value` as JSON, whole or not at all.
    ///
    /// # Errors
    /// Environment, if the file cannot be written.
    pub fn json(&self, name: &str, value: &impl Serialize) -> Result<(), Failure> {
        write_json(&self.path.join(name), value)
    }

    /// Writes text: a raw metrics page.
    ///
    /// # Errors
    /// Environment, if the file cannot be written.
    pub fn text(&self, name: &str, text: &str) -> Result<(), Failure> {
        let path = self.path.join(name);
        fs::write(&path, text).map_err(|error| cannot_write(&path, &error))
    }

    /// Keeps the end of every `*.log` below `logs`. A log that cannot be read is named in its
    /// place: a missing file must not cost the others.
    pub fn keep_logs(&self, logs: &Path) {
        let Ok(entries) = fs::read_dir(logs) else {
            return;
        };
        for entry in entries.flatten() {
            let source = entry.path();
            if source.extension().is_some_and(|ending| ending == "log") {
                let target = self.path.join("logs").join(entry.file_name());
                if let Err(error) = copy_tail(&source, &target) {
                    let _ = fs::write(&target, format!("could not be kept: {error}\n"));
                }
            }
        }
    }
}

/// Writes `value` as JSON, whole or not at all: a reader never sees half a document.
///
/// # Errors
/// Environment, if the file cannot be written.
pub fn write_json(path: &Path, value: &impl Serialize) -> Result<(), Failure> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)
        .and_then(|()| atomic::replace(path, &atomic::json(value)?))
        .map_err(|error| cannot_write(path, &error))
}

fn copy_tail(source: &Path, target: &Path) -> std::io::Result<()> {
    let mut from = fs::File::open(source)?;
    let length = from.metadata()?.len();
    let mut to = fs::File::create(target)?;
    if length > LOG_TAIL_BYTES {
        from.seek(SeekFrom::Start(length - LOG_TAIL_BYTES))?;
        writeln!(
            to,
            "[the first {} bytes were left out]",
            length - LOG_TAIL_BYTES
        )?;
    }
    // The log may grow while it is read.
    std::io::copy(&mut from.take(LOG_TAIL_BYTES), &mut to)?;
    Ok(())
}

/// Best effort: a convenience for people must not fail a verdict, and two processes of one run
/// may race for it.
fn point_latest(runs: &Path, run_id: &str) {
    let link = runs.join("latest");
    if fs::read_link(&link).is_ok_and(|target| target == Path::new(run_id)) {
        return;
    }
    let fresh = runs.join(format!(".latest-{}", std::process::id()));
    if std::os::unix::fs::symlink(run_id, &fresh).is_ok() && fs::rename(&fresh, &link).is_err() {
        let _ = fs::remove_file(&fresh);
    }
}

fn cannot_write(path: &Path, error: &dyn std::fmt::Display) -> Failure {
    Failure::environment("evidence cannot be written")
        .expected(format!("a writable {}", path.display()))
        .found(error)
        .hint("set PHASE1_RUNS_DIR to a directory with room")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_run_is_linked_and_a_second_attempt_does_not_overwrite_the_first() {
        let runs = tempfile::tempdir().expect("tempdir");
        let first = ArmDir::create(runs.path(), "run-a", "tc01::cold", 1).expect("first");
        let second = ArmDir::create(runs.path(), "run-b", "tc01::cold", 1).expect("second");
        let again = ArmDir::create(runs.path(), "run-b", "tc01::cold", 2).expect("again");
        assert_ne!(second.path(), again.path());
        assert!(first.path().ends_with("run-a/tc01__cold"));
        assert_eq!(
            fs::read_link(runs.path().join("latest")).expect("link"),
            Path::new("run-b")
        );
    }

    #[test]
    fn a_long_log_keeps_its_end_and_says_so() {
        let folder = tempfile::tempdir().expect("tempdir");
        let logs = folder.path().join("logs");
        fs::create_dir(&logs).expect("logs");
        let mut text = vec![b'x'; LOG_TAIL_BYTES as usize + 10];
        text.extend_from_slice(b"the end");
        fs::write(logs.join("worker0.log"), &text).expect("log");
        let arm = ArmDir::create(folder.path(), "run", "tc01::cold", 1).expect("arm");
        arm.keep_logs(&logs);
        let kept = fs::read_to_string(arm.path().join("logs/worker0.log")).expect("kept");
        assert!(kept.starts_with("[the first 17 bytes were left out]"));
        assert!(kept.ends_with("the end"));
    }

    #[test]
    fn a_runs_directory_that_is_a_file_is_an_environment_failure_with_the_variable_to_set() {
        let file = tempfile::NamedTempFile::new().expect("file");
        let failure = ArmDir::create(file.path(), "run", "tc01::cold", 1).expect_err("a file");
        assert!(failure.to_string().starts_with("Environment: "));
        assert!(failure.to_string().contains("PHASE1_RUNS_DIR"));
    }
}
