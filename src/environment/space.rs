//! Whether there is room, asked before anything is downloaded.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::failure::Failure;

/// Bytes free for us on the file system that `path` is, or will be, on.
pub(crate) fn free(path: &Path) -> std::io::Result<u64> {
    let status = rustix::fs::statvfs(existing(path))?;
    Ok(status.f_bavail.saturating_mul(status.f_frsize))
}

/// Whether both are on one file system, so that files can be shared between them.
pub(crate) fn together(one: &Path, other: &Path) -> bool {
    let device = |path: &Path| existing(path).metadata().map(|found| found.dev()).ok();
    device(one).is_some() && device(one) == device(other)
}

/// Fails unless `needed` bytes are free at `path`.
pub(crate) fn require(what: &str, path: &Path, needed: u64) -> Result<(), Failure> {
    // A file system that cannot say is not an obstacle: the install will tell.
    let Ok(found) = free(path) else {
        return Ok(());
    };
    if found >= needed {
        return Ok(());
    }
    Err(
        Failure::environment(format!("not enough disk space for {what}"))
            .expected(format!("{} free at {}", bytes(needed), path.display()))
            .found(bytes(found))
            .hint("`kvcr-phase1 env list` shows what can be removed; or name another place: --cache-dir DIR"),
    )
}

/// The nearest ancestor that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors()
        .find(|ancestor| ancestor.exists())
        .unwrap_or(Path::new("/"))
}

/// Bytes for people: `6.6 GB`.
pub fn bytes(number: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if number < 1000 {
        return format!("{number} B");
    }
    let mut value = number as f64;
    let mut unit = "B";
    for larger in UNITS {
        if value < 999.95 {
            break;
        }
        value /= 1000.0;
        unit = larger;
    }
    format!("{value:.1} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn says_what_is_needed_and_what_there_is() {
        let place = tempfile::tempdir().unwrap();
        let future = place.path().join("not/yet");
        assert!(require("x", &future, 1).is_ok());
        let text = require("the `cpu` environment", &future, u64::MAX)
            .unwrap_err()
            .to_string();
        assert!(text.starts_with("Environment: not enough disk space for the `cpu` environment; expected 18446.7 PB free at "), "{text}");
        assert!(together(&future, place.path()));
        assert!(!together(&future, Path::new("/proc")));
    }

    #[test]
    fn bytes_are_readable() {
        let cases = [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (999_999, "1.0 MB"),
            (6_612_345_678, "6.6 GB"),
        ];
        for (number, text) in cases {
            assert_eq!(bytes(number), text);
        }
    }
}
