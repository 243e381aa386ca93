//! The simulated stack as software: this executable, and a model of a few kilobytes.
//!
//! Nothing is installed. The model is written at need, named by what is in it.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::atomic;
use crate::config::Profile;
use crate::failure::Failure;
use crate::hash;
use crate::sim::model::{self as sim, SEMANTICS, Shape};

use super::install::absolute;
use super::model::{self, Model};
use super::program::Program;
use super::progress::Reporter;
use super::{Installed, Package, assets, lock, log};

/// The name of its only package.
pub(crate) const PACKAGE: &str = "sim";

/// Somebody else writes a few kilobytes.
const WRITE_LIMIT: Duration = Duration::from_secs(30);

/// Describes this executable, and writes the model of `profile` if it is missing or damaged.
///
/// # Errors
/// Environment, if this executable cannot be found or the cache cannot be written to.
pub(super) fn simulated(
    profile: &Profile,
    cache: &Path,
    reporter: &mut dyn Reporter,
) -> Result<Installed, Failure> {
    let exe = std::env::current_exe().map_err(|error| {
        Failure::environment("this program does not know its own path").found(error)
    })?;
    let key = key(&exe)
        .map_err(|error| log::io("this program was replaced while it runs", &exe, &error))?;
    let kind = profile.model.build.as_deref().unwrap_or("sim");
    let shape = match kind {
        "sim-hybrid" => Shape::HYBRID,
        _ => Shape::DENSE,
    };
    let model = written(kind, shape, &absolute(cache)?, reporter)?;
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let package = Package {
        version,
        record_sha256: None,
    };
    Ok(Installed {
        key,
        program: Program::Simulated(exe),
        overlay: None,
        model: model.directory,
        model_digest: text_digest(profile, &model.digest),
        etcd: None,
        packages: BTreeMap::from([(PACKAGE.to_owned(), package)]),
        reads_nested_tiers: false,
    })
}

/// Another build is another program, though its version be the same.
fn key(exe: &Path) -> io::Result<String> {
    let found = std::fs::metadata(exe)?;
    let numbers: [u64; 5] = [
        found.dev(),
        found.ino(),
        found.size(),
        found.mtime().unsigned_abs(),
        found.mtime_nsec().unsigned_abs(),
    ];
    let bytes = numbers.map(u64::to_le_bytes);
    Ok(assets::hash(bytes.iter().map(<[u8; 8]>::as_slice)))
}

/// A digest of everything that the model's texts follow from, as the digest of weights is: pages
/// of another size or another seed give other texts.
fn text_digest(profile: &Profile, files: &str) -> String {
    let engine = &profile.engine;
    assets::hash([
        files.as_bytes(),
        engine.dtype.as_bytes(),
        &engine.block_tokens.to_le_bytes(),
        &profile.sim.seed.to_le_bytes(),
        &SEMANTICS.to_le_bytes(),
    ])
}

/// The model's directory, `<cache>/model/<kind>-<digest>`, whole.
fn written(
    kind: &str,
    shape: Shape,
    cache: &Path,
    reporter: &mut dyn Reporter,
) -> Result<Model, Failure> {
    let files = [
        ("config.json", sim::config_json(shape)),
        ("tokenizer.json", sim::tokenizer_json(shape)),
    ]
    .map(|(name, document)| (name, format!("{document:#}\n")));
    let hashes: BTreeMap<String, String> = files
        .iter()
        .map(|(name, text)| ((*name).to_owned(), hash::sha256(text)))
        .collect();
    let digest = model::listing_digest(&hashes);
    let models = cache.join("model");
    let model = Model {
        directory: models.join(format!("{kind}-{}", &digest[..12])),
        digest,
    };
    if model::verify(&model).is_ok() {
        return Ok(model);
    }
    log::create_dir(&models)?;
    let _held = lock::wait_to_install(&model.directory, WRITE_LIMIT, reporter)?;
    if model::verify(&model).is_ok() {
        return Ok(model);
    }
    write(&models, &model, &files, &hashes)
        .map_err(|error| log::io("cannot write the simulated model", &models, &error))?;
    model::verify(&model)?;
    Ok(model)
}

fn write(
    models: &Path,
    model: &Model,
    files: &[(&str, String)],
    hashes: &BTreeMap<String, String>,
) -> io::Result<()> {
    let folder = tempfile::Builder::new()
        .prefix(".sim-")
        .tempdir_in(models)?;
    let at = |name: &str| -> PathBuf { folder.path().join(name) };
    for (name, text) in files {
        std::fs::write(at(name), text)?;
    }
    let manifest = serde_json::json!({
        "schema": model::MANIFEST_SCHEMA,
        "files": hashes,
        "digest": model.digest,
    });
    std::fs::write(at(model::MANIFEST), atomic::json(&manifest)?)?;
    if model.directory.exists() {
        std::fs::remove_dir_all(&model.directory)?;
    }
    std::fs::rename(folder.keep(), &model.directory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::sim;
    use crate::environment::progress::Silent;
    use crate::environment::{ensure, find};

    #[test]
    fn nothing_is_installed_and_the_model_is_written_once() {
        let cache = tempfile::tempdir().unwrap();
        let profile = sim(&[]).profile;
        let first = find(&profile, cache.path()).unwrap();
        assert!(first.program.is_simulated());
        assert!(first.program.path().is_absolute());
        assert_eq!(first.packages[PACKAGE].version, env!("CARGO_PKG_VERSION"));
        let text = std::fs::read_to_string(first.model.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(config, sim::config_json(Shape::DENSE));
        let inode = |path: &Path| std::fs::metadata(path).unwrap().ino();
        let before = inode(&first.model);
        assert_eq!(ensure(&profile, cache.path(), &mut Silent).unwrap(), first);
        assert_eq!(inode(&first.model), before);
        let listed = crate::environment::inventory::list(cache.path());
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].name, "sim");
        let held = first.hold().unwrap();
        assert!(crate::environment::inventory::list(cache.path())[0].in_use);
        drop(held);
    }

    #[test]
    fn a_damaged_model_is_written_again() {
        let cache = tempfile::tempdir().unwrap();
        let profile = sim(&["--model-build", "sim-hybrid"]).profile;
        let model = find(&profile, cache.path()).unwrap().model;
        std::fs::write(model.join("config.json"), "{").unwrap();
        std::fs::write(model.join("more"), "").unwrap();
        assert_eq!(find(&profile, cache.path()).unwrap().model, model);
        assert!(!model.join("more").exists());
        let text = std::fs::read_to_string(model.join("config.json")).unwrap();
        assert!(text.contains("\"state_groups\": 3"), "{text}");
    }

    #[test]
    fn whatever_changes_the_texts_changes_the_digest() {
        let cache = tempfile::tempdir().unwrap();
        let digest = |args: &[&str]| {
            let found = find(&sim(args).profile, cache.path());
            found.unwrap().model_digest
        };
        let base = digest(&[]);
        assert_eq!(digest(&["--workers", "3"]), base);
        for args in [
            ["--sim-seed", "1"],
            ["--dtype", "bfloat16"],
            ["--block-tokens", "128"],
            ["--model-build", "sim-hybrid"],
        ] {
            assert_ne!(digest(&args), base, "{args:?}");
        }
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(find(&sim(&[]).profile, &file).is_err());
    }
}
