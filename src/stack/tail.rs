//! The end of a log: its last lines, or what was written since some moment.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Bytes before a mark by which the file is known again: more than a line's time and name.
const KNOWN_BY: u64 = 256;

/// The last `most` lines among the last `bytes` bytes of `log`; none where it cannot be read.
pub(crate) fn lines(log: &Path, most: usize, bytes: u64) -> Vec<String> {
    let mut tail = Vec::new();
    if let Ok(mut log) = File::open(log) {
        let length = log.metadata().map_or(0, |found| found.len());
        let _ = log.seek(SeekFrom::Start(length.saturating_sub(bytes)));
        let _ = log.take(bytes).read_to_end(&mut tail);
    }
    let text = String::from_utf8_lossy(&tail);
    let lines: Vec<&str> = text.lines().collect();
    let first = lines.len().saturating_sub(most);
    lines.into_iter().skip(first).map(str::to_owned).collect()
}

/// Where `log` ends now, in bytes; its beginning where it cannot be read.
pub(crate) fn end(log: &Path) -> u64 {
    std::fs::metadata(log).map_or(0, |found| found.len())
}

/// What was written to `log` since it ended at `offset`.
///
/// # Errors
/// It cannot be read.
pub(crate) fn since(log: &Path, offset: u64) -> io::Result<String> {
    let mut log = File::open(log)?;
    log.seek(SeekFrom::Start(offset))?;
    let mut text = Vec::new();
    log.read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// A moment in a log that others write too, or rotate: what came before it is not ours.
#[derive(Clone, Debug)]
pub(crate) struct Mark {
    path: PathBuf,
    offset: u64,
    /// Device and number of the file; `None` where there was none.
    file: Option<(u64, u64)>,
    /// The last bytes before it. A file that was emptied and has grown again has others.
    before: Vec<u8>,
}

impl Mark {
    /// The end of `log` as it is now.
    pub(crate) fn now(log: &Path) -> Self {
        let mut mark = Self {
            path: log.to_owned(),
            offset: 0,
            file: None,
            before: Vec::new(),
        };
        if let Ok(mut file) = File::open(log)
            && let Ok(found) = file.metadata()
        {
            mark.file = Some((found.dev(), found.ino()));
            mark.offset = found.len();
            mark.before = before(&mut file, mark.offset).unwrap_or_default();
        }
        mark
    }

    /// The log.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// What was written since.
    ///
    /// # Errors
    /// The log cannot be read, or is not the one that it was: rotated, or truncated.
    pub(crate) fn since(&self) -> io::Result<String> {
        let mut log = File::open(&self.path)?;
        let found = log.metadata()?;
        if self
            .file
            .is_some_and(|file| file != (found.dev(), found.ino()))
        {
            return Err(io::Error::other(
                "it was rotated: another file has its name now",
            ));
        }
        if found.len() < self.offset || before(&mut log, self.offset)? != self.before {
            return Err(io::Error::other("it was truncated, or written over"));
        }
        drop(log);
        since(&self.path, self.offset)
    }
}

fn before(log: &mut File, offset: u64) -> io::Result<Vec<u8>> {
    let length = offset.min(KNOWN_BY);
    log.seek(SeekFrom::Start(offset - length))?;
    let mut bytes = Vec::new();
    log.take(length).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_written_since_is_all_of_it_and_nothing_before() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "one\n").unwrap();
        let offset = end(log.path());
        std::fs::write(log.path(), "one\ntwo\nth").unwrap();
        assert_eq!(since(log.path(), offset).unwrap(), "two\nth");
        assert_eq!(end(Path::new("/nonexistent")), 0);
        assert!(since(Path::new("/nonexistent"), 0).is_err());
    }

    #[test]
    fn a_log_that_is_not_the_one_it_was_is_said_and_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("a.log");
        // One that is not there yet has all of what comes.
        let early = Mark::now(&log);
        std::fs::write(&log, "an earlier stack\n").unwrap();
        assert_eq!(early.since().unwrap(), "an earlier stack\n");
        let mark = Mark::now(&log);
        assert_eq!(mark.since().unwrap(), "");
        let said = |text: &str| {
            std::fs::write(&log, text).unwrap();
            mark.since().map_err(|error| error.to_string())
        };
        assert_eq!(said("an earlier stack\nours\n").unwrap(), "ours\n");
        assert!(said("").unwrap_err().contains("truncated"));
        // Emptied, and grown beyond the mark since.
        assert!(
            said("another, and longer than before\n")
                .unwrap_err()
                .contains("truncated")
        );
        std::fs::rename(&log, folder.path().join("a.log.1")).unwrap();
        assert!(mark.since().is_err());
        assert!(
            said("an earlier stack\nours\n")
                .unwrap_err()
                .contains("rotated")
        );
    }

    #[test]
    fn only_the_last_lines_are_kept() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "one\ntwo\nthree\n").unwrap();
        assert_eq!(lines(log.path(), 2, 1000), ["two", "three"]);
        assert_eq!(lines(log.path(), 9, 7), ["", "three"]);
        assert!(lines(Path::new("/nonexistent"), 2, 1000).is_empty());
    }
}
