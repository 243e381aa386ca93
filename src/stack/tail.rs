//! The last lines of a log.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_lines_are_kept() {
        let log = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(log.path(), "one\ntwo\nthree\n").unwrap();
        assert_eq!(lines(log.path(), 2, 1000), ["two", "three"]);
        assert_eq!(lines(log.path(), 9, 7), ["", "three"]);
        assert!(lines(Path::new("/nonexistent"), 2, 1000).is_empty());
    }
}
