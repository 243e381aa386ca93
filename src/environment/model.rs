//! Models: built here and proven file by file, or a directory of the user's.
//!
//! A built model is named by its digest, which `env/<name>/model-digests.json` pins, so every
//! environment and every machine shares one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use sha2::{Digest, Sha256};

use crate::failure::Failure;
use crate::hash;

use super::assets::{self, Recipe};
use super::child::{self, Ending};
use super::progress::Reporter;
use super::{lock, log, space};

/// The manifest that `build_model.py` writes.
pub(super) const MANIFEST: &str = "model.json";
pub(super) const MANIFEST_SCHEMA: u32 = 1;
const BUILD_LIMIT: Duration = Duration::from_secs(600);

/// A tiny model and its temporary twin.
const SPACE: u64 = 100_000_000;

/// Files of a user's model up to this size are hashed whole; see [`digest`].
const WHOLE: u64 = 16 << 20;
const EDGE: u64 = 1 << 20;

/// Which model.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum ModelRequest {
    /// A tiny random one of ours.
    Build {
        /// `dense`.
        kind: String,
        /// `float32` or `bfloat16`.
        dtype: String,
    },
    /// A directory of the user's.
    Path(PathBuf),
}

/// A model that is where it says.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Model {
    pub(crate) directory: PathBuf,
    pub(crate) digest: String,
}

#[derive(Deserialize)]
struct Manifest {
    schema: u32,
    files: BTreeMap<String, String>,
    digest: String,
}

/// Where the model is, or would be, and the digest it must have.
pub(crate) fn place(
    recipe: &Recipe,
    kind: &str,
    dtype: &str,
    cache: &Path,
) -> Result<Model, Failure> {
    let digests: BTreeMap<String, String> = recipe
        .file(assets::MODEL_DIGESTS)
        .and_then(|text| serde_json::from_slice(text).ok())
        .unwrap_or_default();
    let wanted = format!("{kind}/{dtype}");
    let digest = digests
        .get(&wanted)
        .filter(|digest| digest.len() >= 12 && digest.is_ascii())
        .ok_or_else(|| {
            let known = digests.keys().map(String::as_str).collect::<Vec<_>>();
            Failure::environment(format!("there is no model `{wanted}` to build"))
                .expected(format!("kind/dtype, one of: {}", known.join(", ")))
                .hint("change model.build or engine.dtype in the profile")
        })?;
    Ok(Model {
        directory: cache
            .join("model")
            .join(format!("{kind}-{dtype}-{}", &digest[..12])),
        digest: digest.clone(),
    })
}

/// Finds the model, proven, without building it.
pub(crate) fn locate(
    request: &ModelRequest,
    recipe: &Recipe,
    cache: &Path,
) -> Result<Model, Failure> {
    match request {
        ModelRequest::Path(path) => digest(path),
        ModelRequest::Build { kind, dtype } => {
            let model = place(recipe, kind, dtype, cache)?;
            verify(&model)?;
            Ok(model)
        }
    }
}

/// Finds the model, or builds it with `python`. A damaged one is named and built again.
pub(crate) fn install(
    request: &ModelRequest,
    recipe: &Recipe,
    cache: &Path,
    python: &Path,
    reporter: &mut dyn Reporter,
) -> Result<Model, Failure> {
    let ModelRequest::Build { kind, dtype } = request else {
        return locate(request, recipe, cache);
    };
    let model = place(recipe, kind, dtype, cache)?;
    if verify(&model).is_ok() {
        return Ok(model);
    }
    let models = cache.join("model");
    log::create_dir(&models)?;
    let held = lock::wait_to_install(&model.directory, BUILD_LIMIT, reporter)?;
    match verify(&model) {
        Ok(()) => return Ok(model),
        Err(failure) if model.directory.exists() => reporter.note(&failure.to_string()),
        Err(_) => {}
    }
    space::require("the model", &models, SPACE)?;
    reporter.step(&format!("Building the {kind} model ({dtype})"));
    let files = recipe
        .on_disk(cache)
        .map_err(|error| log::io("cannot write the build script", cache, &error))?;
    let log_path = models.join(format!("{kind}-{dtype}.log"));
    let _ = std::fs::remove_file(&log_path);
    let mut command = child::command(python);
    command
        .arg("-B")
        .arg(files.join(assets::BUILD_MODEL))
        .arg(&model.directory)
        .args(["--kind", kind, "--dtype", dtype])
        .current_dir(&models);
    let ending = child::work(command, BUILD_LIMIT, &log_path, held.file());
    if ending != Ending::Exit(0) {
        return Err(log::explain(
            "the model could not be built",
            &ending,
            &log_path,
        ));
    }
    verify(&model)?;
    Ok(model)
}

/// Proves that the directory holds exactly the files whose digest is `model.digest`.
pub(crate) fn verify(model: &Model) -> Result<(), Failure> {
    let directory = &model.directory;
    let path = directory.join(MANIFEST);
    let damaged = |what: &Path, expected: String, found: String| {
        Failure::environment(format!("the model is damaged: {}", what.display()))
            .expected(expected)
            .found(found)
            .hint("`kvcr-phase1 env install` builds it again")
    };
    let text = std::fs::read(&path).map_err(|error| {
        if directory.exists() {
            return damaged(
                &path,
                "the manifest of a built model".into(),
                error.to_string(),
            );
        }
        Failure::environment("the model is not built")
            .expected(directory.display())
            .found("no such directory")
            .hint("`kvcr-phase1 env install` builds it")
    })?;
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| damaged(&path, "a manifest".into(), error.to_string()))?;
    if manifest.schema != MANIFEST_SCHEMA {
        let found = format!("schema {}", manifest.schema);
        return Err(damaged(&path, format!("schema {MANIFEST_SCHEMA}"), found));
    }
    for (name, expected) in &manifest.files {
        let file = directory.join(name);
        let expected = format!("sha256 {expected}");
        let found = match sha256(&file) {
            Ok((size, hash)) => (size, format!("sha256 {hash}")),
            Err(error) => return Err(damaged(&file, expected, error.to_string())),
        };
        if found.1 != expected {
            let found = format!("{} in {} bytes", found.1, found.0);
            return Err(damaged(&file, expected, found));
        }
    }
    // An engine may read a file that the manifest does not know.
    let entries = directory
        .read_dir()
        .map_err(|error| damaged(directory, "a readable directory".into(), error.to_string()))?;
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != MANIFEST && !manifest.files.contains_key(&name) {
            let expected = "only files that model.json lists".to_owned();
            return Err(damaged(&entry.path(), expected, "this one too".into()));
        }
    }
    let found = listing_digest(&manifest.files);
    if found != manifest.digest || found != model.digest {
        return Err(damaged(
            &path,
            format!("digest {}", model.digest),
            format!("digest {found}"),
        ));
    }
    Ok(())
}

/// The digest of `sha256sum`'s listing of the files, by name.
pub(super) fn listing_digest(files: &BTreeMap<String, String>) -> String {
    let listing: String = files
        .iter()
        .map(|(name, hash)| format!("{hash}  {name}\n"))
        .collect();
    hash::sha256(listing)
}

fn sha256(path: &Path) -> std::io::Result<(u64, String)> {
    let mut hasher = Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut size = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok((size, hash::finish(hasher))),
            count => {
                hasher.update(&buffer[..count]);
                size += count as u64;
            }
        }
    }
}

/// The digest of a user's model. Weights can be hundreds of gigabytes, so of a file above
/// 16 MiB the size and both ends count: enough to tell models apart, and a truncated download
/// from a whole one; not a proof of every byte.
pub(crate) fn digest(directory: &Path) -> Result<Model, Failure> {
    let unusable = |found: String| {
        Failure::environment(format!("cannot use the model at {}", directory.display()))
            .expected("a directory with config.json, weights and tokenizer")
            .found(found)
            .hint("correct model.path in the profile")
    };
    let directory = directory
        .canonicalize()
        .map_err(|error| unusable(error.to_string()))?;
    if !directory.join("config.json").is_file() {
        return Err(unusable("no config.json in it".to_owned()));
    }
    let entries = directory
        .read_dir()
        .map_err(|error| unusable(error.to_string()))?;
    let mut hashes = BTreeMap::new();
    for entry in entries.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if entry.path().is_file() {
            if let Some(cut) = cut_short(&entry.path()) {
                return Err(unusable(format!("{name} is cut short: {cut}")));
            }
            let hash = ends(&entry.path()).map_err(|error| unusable(format!("{name}: {error}")))?;
            hashes.insert(name, hash);
        }
    }
    Ok(Model {
        digest: listing_digest(&hashes),
        directory,
    })
}

/// Whether a `.safetensors` file ends before its header says that it does, as an interrupted
/// download does; an engine would say so a minute later, in its own words. What else is wrong
/// with a file is the engine's to find.
fn cut_short(path: &Path) -> Option<String> {
    if path.extension()? != "safetensors" {
        return None;
    }
    let size = path.metadata().ok()?.len();
    let found = format!("{size} bytes");
    let mut file = File::open(path).ok()?;
    let mut length = [0; 8];
    if file.read_exact(&mut length).is_err() {
        return Some(found);
    }
    let length = u64::from_le_bytes(length);
    let data = length.checked_add(8)?;
    if data > size {
        return Some(found);
    }
    let header: BTreeMap<String, serde_json::Value> =
        serde_json::from_reader(BufReader::new(file.take(length))).ok()?;
    let end = header
        .values()
        .filter_map(|tensor| tensor.get("data_offsets")?.get(1)?.as_u64())
        .max()?;
    let whole = data.checked_add(end)?;
    (size < whole).then(|| format!("{found} of {whole}"))
}

fn ends(path: &Path) -> std::io::Result<String> {
    let size = path.metadata()?.len();
    if size <= WHOLE {
        return Ok(sha256(path)?.1);
    }
    let mut file = File::open(path)?;
    let mut buffer = vec![0; EDGE as usize];
    let mut hasher = Sha256::new();
    hasher.update(size.to_le_bytes());
    file.read_exact(&mut buffer)?;
    hasher.update(&buffer);
    file.seek(SeekFrom::Start(size - EDGE))?;
    file.read_exact(&mut buffer)?;
    hasher.update(&buffer);
    Ok(hash::finish(hasher))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(directory: &Path) -> Model {
        std::fs::create_dir_all(directory).unwrap();
        let mut files = BTreeMap::new();
        for (name, text) in [("config.json", "{}"), ("model.safetensors", "weights")] {
            std::fs::write(directory.join(name), text).unwrap();
            files.insert(name.to_owned(), hash::sha256(text));
        }
        let digest = listing_digest(&files);
        let manifest = serde_json::json!({"schema": 1, "kind": "dense", "dtype": "float32", "files": files, "digest": digest});
        std::fs::write(directory.join(MANIFEST), manifest.to_string()).unwrap();
        Model {
            directory: directory.to_owned(),
            digest,
        }
    }

    #[test]
    fn a_damaged_model_is_named_file_by_file() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("model");
        let model = built(&directory);
        assert_eq!(verify(&model), Ok(()));

        std::fs::write(directory.join("model.safetensors"), "weigh").unwrap();
        let text = verify(&model).unwrap_err().to_string();
        assert!(
            text.contains("model.safetensors; expected sha256 "),
            "{text}"
        );
        assert!(text.contains("in 5 bytes"), "{text}");

        built(&directory);
        std::fs::write(directory.join("adapter.bin"), "x").unwrap();
        let text = verify(&model).unwrap_err().to_string();
        assert!(
            text.contains("adapter.bin; expected only files that model.json lists"),
            "{text}"
        );

        std::fs::remove_file(directory.join("adapter.bin")).unwrap();
        std::fs::remove_file(directory.join("config.json")).unwrap();
        assert!(
            verify(&model)
                .unwrap_err()
                .to_string()
                .contains("config.json")
        );
        for garbage in ["", "[]", "{\"schema\": 2, \"files\": {}, \"digest\": \"\"}"] {
            std::fs::write(directory.join(MANIFEST), garbage).unwrap();
            assert!(verify(&model).is_err());
        }
        std::fs::remove_dir_all(&directory).unwrap();
        assert!(
            verify(&model)
                .unwrap_err()
                .to_string()
                .contains("is not built")
        );
    }

    #[test]
    fn a_whole_model_with_another_digest_is_not_the_one_wanted() {
        let place = tempfile::tempdir().unwrap();
        let mut model = built(place.path());
        model.digest = "0".repeat(64);
        assert!(verify(&model).is_err());
    }

    #[test]
    fn weights_that_end_early_are_cut_short() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("model.safetensors");
        let header = r#"{"__metadata__":{},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
        let mut whole = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
        whole.extend_from_slice(header.as_bytes());
        whole.extend_from_slice(&[0; 8]);
        let cut = |length: usize| {
            std::fs::write(&path, &whole[..length]).unwrap();
            cut_short(&path)
        };
        assert_eq!(cut(whole.len()), None);
        for length in [0, 7, 8, 20, whole.len() - 9, whole.len() - 1] {
            assert!(cut(length).is_some(), "{length}");
        }
        // Nothing that a header promises may overflow.
        std::fs::write(&path, [0xff; 64]).unwrap();
        assert_eq!(cut_short(&path), None);
    }

    #[test]
    fn a_users_model_is_told_apart_by_size_and_ends() {
        let place = tempfile::tempdir().unwrap();
        assert!(digest(place.path()).is_err());
        std::fs::write(place.path().join("config.json"), "{}").unwrap();
        let weights = place.path().join("model.safetensors");
        let mut content = vec![0_u8; (WHOLE + 10) as usize];
        std::fs::write(&weights, &content).unwrap();
        let first = digest(place.path()).unwrap().digest;
        content.pop();
        std::fs::write(&weights, &content).unwrap();
        let second = digest(place.path()).unwrap().digest;
        *content.last_mut().unwrap() = 1;
        std::fs::write(&weights, &content).unwrap();
        let third = digest(place.path()).unwrap().digest;
        assert!(first != second && second != third);
    }

    #[test]
    fn only_pinned_models_are_built() {
        let recipe = Recipe::embedded("cpu").unwrap();
        let cache = Path::new("/cache");
        let model = place(&recipe, "dense", "float32", cache).unwrap();
        let name = format!("/cache/model/dense-float32-{}", &model.digest[..12]);
        assert_eq!(model.directory, Path::new(&name));
        let text = place(&recipe, "dense", "int4", cache)
            .unwrap_err()
            .to_string();
        assert!(
            text.contains("one of: dense/bfloat16, dense/float32"),
            "{text}"
        );
    }
}
