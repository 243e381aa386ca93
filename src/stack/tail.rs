//! The end of a log: its last lines, or what was written since some moment.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

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
    fn only_the_last_lines_are_kept() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "one\ntwo\nthree\n").unwrap();
        assert_eq!(lines(log.path(), 2, 1000), ["two", "three"]);
        assert_eq!(lines(log.path(), 9, 7), ["", "three"]);
        assert!(lines(Path::new("/nonexistent"), 2, 1000).is_empty());
    }
}
