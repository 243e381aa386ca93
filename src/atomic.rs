//! Files that are whole or absent: written beside their place, then renamed into it.
//!
//! A reader sees the old content or the new, never half of either. What was written is private
//! to the user: evidence and launch descriptions quote the environment of engines.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;
use tempfile::NamedTempFile;

/// Replaces `path` for readers. A power cut may bring the old content back.
pub(crate) fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    beside(path, content)?.persist(path)?;
    Ok(())
}

/// Replaces `path` so that it stays replaced, even after a power cut.
pub(crate) fn replace_durably(path: &Path, content: &[u8]) -> io::Result<()> {
    let file = beside(path, content)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    File::open(folder(path))?.sync_all()
}

/// Makes `path`, unless somebody else was faster: `false`.
pub(crate) fn create(path: &Path, content: &[u8]) -> io::Result<bool> {
    match beside(path, content)?.persist_noclobber(path) {
        Ok(_) => Ok(true),
        Err(error) if error.error.kind() == io::ErrorKind::AlreadyExists => Ok(false),
        Err(error) => Err(error.error),
    }
}

/// A document as these files hold it: indented, with a newline at its end.
pub(crate) fn json(value: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

fn beside(path: &Path, content: &[u8]) -> io::Result<NamedTempFile> {
    let mut file = NamedTempFile::new_in(folder(path))?;
    file.write_all(content)?;
    Ok(file)
}

fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_new_content_is_whole_private_and_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        for write in [replace, replace_durably] {
            write(&path, b"old, and longer").unwrap();
            write(&path, b"new").unwrap();
            assert_eq!(std::fs::read(&path).unwrap(), b"new");
        }
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{mode:o}");
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn the_first_one_to_create_a_file_wins() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert!(create(&path, b"first").unwrap());
        assert!(!create(&path, b"second").unwrap());
        assert_eq!(std::fs::read(&path).unwrap(), b"first");
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn a_link_in_the_way_is_replaced_and_not_followed() {
        let folder = tempfile::tempdir().unwrap();
        let (target, link) = (folder.path().join("target"), folder.path().join("link"));
        std::fs::write(&target, "kept").unwrap();
        std::os::unix::fs::symlink(&target, &link).unwrap();
        replace(&link, b"new").unwrap();
        assert_eq!(std::fs::read(&target).unwrap(), b"kept");
        assert!(!link.is_symlink());
    }
}
