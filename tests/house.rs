//! Rules of the house that clippy cannot hold us to.

use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).expect("a source folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
}

/// Files below `src/`, other than `owner`, in which a line of code has `word`.
fn users(word: &str, owner: &str) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut files = Vec::new();
    sources(&root, &mut files);
    files
        .iter()
        .filter(|path| !path.ends_with(owner))
        .filter(|path| {
            let text = std::fs::read_to_string(path).expect("a source file");
            text.lines()
                .any(|line| line.contains(word) && !line.trim_start().starts_with("//"))
        })
        .map(|path| path.display().to_string())
        .collect()
}

#[test]
fn only_snapshot_knows_insta() {
    assert_eq!(users("insta::", "snapshot.rs"), Vec::<String>::new());
}

#[test]
fn only_the_process_module_has_unsafe_code() {
    assert_eq!(users("unsafe {", "stack/process.rs"), Vec::<String>::new());
}

#[test]
fn every_pin_belongs_to_an_arm() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("snapshots/reference");
    let arms: Vec<String> = kvcr_phase1::cases::PHASE1
        .iter()
        .flat_map(|case| case.arms)
        .map(|arm| arm.name.replace("::", "-"))
        .collect();
    for entry in std::fs::read_dir(folder).into_iter().flatten() {
        let name = entry
            .expect("an entry")
            .file_name()
            .into_string()
            .expect("UTF-8");
        let (arm, key) = name.split_once('@').expect("ARM@KEY.snap");
        assert!(
            arms.iter().any(|known| known == arm),
            "{name} belongs to no arm"
        );
        assert!(key.ends_with(".snap"), "{name} is not reviewed");
    }
}
