//! Where the text of a profile comes from.
//!
//! A checkout's own `env/` comes first, so that an edited or new profile counts without a
//! rebuild; the copy in the binary makes the binary work alone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use include_dir::{Dir, include_dir};

static EMBEDDED: Dir<'static> = include_dir!("$CARGO_MANIFEST_DIR/env");

/// Files under `env/` that are no profiles.
const NOT_PROFILES: &[&str] = &["pins"];

/// The text of a profile.
#[derive(Debug)]
pub(super) struct Source {
    /// How messages call it.
    pub(super) file: String,
    /// Where relative paths in it start.
    pub(super) base: PathBuf,
    /// What is in it.
    pub(super) text: String,
}

/// Finds the profile called `name`: a path if it ends in `.toml` or has a slash in it, else a
/// file under `env/`.
pub(super) fn find(name: &str, root: &Path, here: &Path) -> Result<Source, String> {
    if name.contains('/') || name.ends_with(".toml") {
        let path = here.join(name);
        let text = std::fs::read_to_string(&path)
            .map_err(|error| format!("cannot read the profile {}: {error}", path.display()))?;
        return Ok(Source {
            file: name.to_owned(),
            base: path.parent().unwrap_or(here).to_path_buf(),
            text,
        });
    }
    let folder = root.join("env");
    let file = format!("{name}.toml");
    let embedded = || {
        EMBEDDED
            .get_file(&file)
            .and_then(|file| file.contents_utf8())
            .map(str::to_owned)
    };
    let text = std::fs::read_to_string(folder.join(&file))
        .ok()
        .or_else(embedded)
        .filter(|_| !NOT_PROFILES.contains(&name))
        .ok_or_else(|| {
            let names: Vec<String> = names(&folder).into_iter().collect();
            format!(
                "no profile is called {name:?}; there are {} (or give a path to a .toml file)",
                names.join(", ")
            )
        })?;
    Ok(Source {
        file: format!("env/{file}"),
        base: folder,
        text,
    })
}

/// Names of every profile in `folder` and in the binary.
fn names(folder: &Path) -> BTreeSet<String> {
    let on_disk = std::fs::read_dir(folder)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()));
    let embedded = EMBEDDED.files().map(|file| file.path().to_path_buf());
    on_disk
        .chain(embedded)
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "toml")
        })
        .filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()))
        .filter(|name| !NOT_PROFILES.contains(&name.as_str()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_found_without_a_checkout() {
        let nowhere = Path::new("/nowhere");
        let source = find("cpu", nowhere, nowhere).unwrap();
        assert_eq!(source.file, "env/cpu.toml");
        assert!(source.text.contains("[engine]"));
    }

    #[test]
    fn the_checkout_wins_over_the_binary() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("env")).unwrap();
        std::fs::write(root.path().join("env/cpu.toml"), "edited").unwrap();
        assert_eq!(
            find("cpu", root.path(), root.path()).unwrap().text,
            "edited"
        );
    }

    #[test]
    fn a_path_is_relative_to_the_current_directory() {
        let here = tempfile::tempdir().unwrap();
        std::fs::write(here.path().join("mine.toml"), "x").unwrap();
        let source = find("mine.toml", Path::new("/nowhere"), here.path()).unwrap();
        assert_eq!(
            (source.file.as_str(), source.base.as_path()),
            ("mine.toml", here.path())
        );
    }

    #[test]
    fn a_missing_profile_says_which_there_are() {
        let nowhere = Path::new("/nowhere");
        let why = find("gpu", nowhere, nowhere).unwrap_err();
        assert!(
            why.contains("no profile is called \"gpu\"; there are cpu"),
            "{why}"
        );
        let why = find("gpu.toml", nowhere, nowhere).unwrap_err();
        assert!(why.contains("/nowhere/gpu.toml"), "{why}");
        assert!(find("pins", nowhere, nowhere).is_err());
    }
}
