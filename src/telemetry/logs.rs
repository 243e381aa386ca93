//! Lines of a log that must not go unseen: a worker that stays healthy on its own port while it
//! refuses every peer says so only here.
//!
//! Why a process *failed to start* is the engine's to explain; these are the marks of a stack
//! that runs.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::failure::Class;

/// One mark: all of `words` in one line.
#[derive(Clone, Copy, Debug)]
pub struct Mark {
    /// What must stand in the line, in any order.
    pub words: &'static [&'static str],
    /// Who has to act.
    pub class: Class,
    /// What it means, in a clause.
    pub means: &'static str,
}

/// In order: the first that fits names the line.
pub const MARKS: &[Mark] = &[
    mark(
        &["KVCR source progress stalled"],
        Class::Environment,
        "the source was starved of CPU and refuses all peers until it restarts",
    ),
    mark(
        &["FileStore::keep_alive failed"],
        Class::Environment,
        "the worker lost its discovery lease: the router no longer knows it",
    ),
    mark(
        &["KV cache events are disabled"],
        Class::Environment,
        "the router is never told what KVCR holds, so it never hints",
    ),
    mark(
        &["KVCR start_write layout mismatch"],
        Class::Skew,
        "source and target lay their blocks out differently",
    ),
    mark(
        &["compatibility digest does not match"],
        Class::Skew,
        "worker and KVCR service were built for different layouts",
    ),
    mark(
        &["KVCR Guard", "failed"],
        Class::Product,
        "a Guard failed, and its service stops with it",
    ),
    mark(
        &["KVCR pool recovery disabled"],
        Class::Product,
        "the pool would be cold after a takeover",
    ),
    mark(
        &["KVCR pool has no recovered state to promote"],
        Class::Product,
        "a Guard took over an empty pool",
    ),
    mark(
        &["KVCR operation", "expired"],
        Class::Product,
        "a transfer timed out",
    ),
    mark(
        &["KVCR refusing unresolvable start_write"],
        Class::Product,
        "the source was asked for blocks it does not have",
    ),
    mark(
        &["KVCR start_write"],
        Class::Product,
        "the source could not write to its peer",
    ),
    mark(
        &["KVCR malformed start_write"],
        Class::Product,
        "the source could not read its peer's request",
    ),
    mark(
        &["KVCR control", "failed"],
        Class::Product,
        "control messages between peers are lost",
    ),
    mark(
        &["KVCR control send queue is full"],
        Class::Product,
        "control messages between peers are lost",
    ),
    mark(
        &["KVCR release_pin failed"],
        Class::Product,
        "blocks stay pinned in the engine",
    ),
    mark(
        &["KVCR write_done notification failed"],
        Class::Product,
        "the target was not told that its blocks arrived",
    ),
    mark(
        &["KVCR source acquisition failed"],
        Class::Product,
        "the source could not get hold of its blocks",
    ),
    mark(
        &["NIXL transfer progress failed"],
        Class::Product,
        "the transport failed",
    ),
    mark(
        &["EngineCore encountered a fatal error"],
        Class::Product,
        "the engine core died",
    ),
    mark(
        &["No handler found"],
        Class::Product,
        "a request was routed to an endpoint that is gone, and hangs",
    ),
];

const fn mark(words: &'static [&'static str], class: Class, means: &'static str) -> Mark {
    Mark {
        words,
        class,
        means,
    }
}

/// A line that carries a mark.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct LogFinding {
    /// Who has to act.
    pub class: Class,
    /// What it means.
    pub means: String,
    /// The line, verbatim, cut to 500 characters.
    pub line: String,
}

/// Marked lines of `text`, in order.
pub fn scan(text: &str) -> Vec<LogFinding> {
    text.lines().filter_map(finding).collect()
}

fn finding(line: &str) -> Option<LogFinding> {
    // A request's own text may be logged and may say anything; KVCR's debug lines report what
    // its warnings judge.
    if line.contains("DEBUG") {
        return None;
    }
    let mark = MARKS
        .iter()
        .find(|mark| mark.words.iter().all(|word| line.contains(word)))?;
    Some(LogFinding {
        class: mark.class,
        means: mark.means.to_owned(),
        line: line.chars().take(500).collect(),
    })
}

/// Longest line that is kept while its end is not written yet.
const LONGEST: usize = 1 << 20;

/// Reads what was appended to a log since the last time.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    offset: u64,
    /// The beginning of a line whose end is not written yet.
    partial: Vec<u8>,
}

impl Tail {
    /// From the beginning of the file, which need not exist yet.
    pub fn from_start(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            offset: 0,
            partial: Vec::new(),
        }
    }

    /// From the present end of the file: only what is written from now on counts.
    pub fn from_now(path: impl Into<PathBuf>) -> io::Result<Self> {
        let mut tail = Self::from_start(path);
        tail.offset = match std::fs::metadata(&tail.path) {
            Ok(meta) => meta.len(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => 0,
            Err(error) => return Err(error),
        };
        Ok(tail)
    }

    /// Marked lines among those completed since the last call. A file that does not exist has
    /// none; one that shrank was begun anew and is read from its beginning.
    pub fn findings(&mut self) -> io::Result<Vec<LogFinding>> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        if file.metadata()?.len() < self.offset {
            self.offset = 0;
            self.partial.clear();
        }
        file.seek(SeekFrom::Start(self.offset))?;
        let mut found = Vec::new();
        let mut chunk = vec![0; 1 << 16];
        loop {
            let read = file.read(&mut chunk)?;
            if read == 0 {
                return Ok(found);
            }
            self.offset += read as u64;
            self.partial.extend_from_slice(&chunk[..read]);
            if let Some(end) = self.partial.iter().rposition(|byte| *byte == b'\n') {
                let complete: Vec<u8> = self.partial.drain(..=end).collect();
                found.extend(scan(&String::from_utf8_lossy(&complete)));
            } else if self.partial.len() > LONGEST {
                // Not a log line: a dump, or a binary file. Its end is not waited for.
                found.extend(scan(&String::from_utf8_lossy(&self.partial)));
                self.partial.clear();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const STALLED: &str = "(EngineCore pid=7) ERROR 11-30 kvcr.core: KVCR source progress stalled for 2372.0 ms (timeout: 1000 ms); new source writes disabled until restart";

    #[test]
    fn marked_lines_are_found_and_others_are_not() {
        let text = format!(
            "INFO ready\n{STALLED}\nWARNING KVCR start_write layout mismatch op=3 key='x'\n\
             WARNING KVCR start_write setup failed for op=4\n DEBUG KVCR operation 7 expired\n\
             CRITICAL KVCR Guard 0 failed\n"
        );
        let found: Vec<_> = scan(&text).into_iter().map(|f| f.class).collect();
        assert_eq!(
            found,
            [
                Class::Environment,
                Class::Skew,
                Class::Product,
                Class::Product
            ]
        );
    }

    #[test]
    fn every_mark_is_reachable() {
        for mark in MARKS {
            let found = scan(&mark.words.join(" … "));
            assert_eq!(found[0].means, mark.means, "{:?} is shadowed", mark.words);
        }
    }

    #[test]
    fn a_line_is_read_once_and_only_when_it_is_complete() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker0.log");
        let mut tail = Tail::from_start(&path);
        assert_eq!(tail.findings().unwrap(), []);
        let mut file = File::create(&path).unwrap();
        let (head, end) = STALLED.split_at(60);
        write!(file, "one\n{head}").unwrap();
        assert_eq!(tail.findings().unwrap(), []);
        writeln!(file, "{end}").unwrap();
        assert_eq!(tail.findings().unwrap()[0].line, STALLED);
        assert_eq!(tail.findings().unwrap(), []);
        let mut later = Tail::from_now(&path).unwrap();
        assert_eq!(later.findings().unwrap(), []);
        std::fs::write(&path, "No handler found\n").unwrap();
        assert_eq!(
            tail.findings().unwrap().len(),
            1,
            "a file begun anew is read from its start"
        );
    }

    #[test]
    fn a_log_that_is_not_there_yet_is_empty_and_one_that_cannot_be_read_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker0.log");
        let mut tail = Tail::from_now(&path).unwrap();
        std::fs::write(&path, format!("{STALLED}\n")).unwrap();
        assert_eq!(tail.findings().unwrap().len(), 1);
        let below = path.join("no directory");
        assert!(Tail::from_now(&below).is_err());
        assert!(Tail::from_start(&below).findings().is_err());
    }

    #[test]
    fn a_long_line_is_waited_for_and_one_without_end_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker0.log");
        let mut tail = Tail::from_start(&path);
        // Longer than one read: the mark spans two.
        let long = "x".repeat((1 << 16) - 5);
        std::fs::write(&path, format!("{long}No handler found\n")).unwrap();
        assert_eq!(tail.findings().unwrap().len(), 1);
        let endless = format!(
            "INFO ready\nNo handler found{}",
            "x".repeat(LONGEST + (1 << 16))
        );
        std::fs::write(&path, &endless).unwrap();
        assert_eq!(Tail::from_start(&path).findings().unwrap().len(), 1);
    }

    #[test]
    fn bytes_that_are_not_text_do_no_harm() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("worker0.log");
        let mut bytes = vec![0xff; 3 << 20];
        bytes.extend_from_slice(format!("\n{STALLED}\n").as_bytes());
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(Tail::from_start(&path).findings().unwrap().len(), 1);
    }
}
