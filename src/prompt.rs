//! Prompts of exactly so many tokens, each new to the stack, each reproducible.
//!
//! Prompts are sent as **token ids**, which Dynamo passes to router and worker as they are. So
//! lengths and shared prefixes are exact by construction, for any tokenizer, and no tokenizer
//! has to be linked, pinned and kept equal to the server's. The ids are ordinary words of the
//! served vocabulary, so that a person can read a prompt, and a trained model has something to
//! read too.
//!
//! Every token comes from SHA-256 in counter mode over (case, arm, variant, seed, role, length):
//! the first block, the only one that decides what is shared, is the nonce. Prompts that are to
//! share a prefix are made by [`Prompts::extend`], or of equal leading sections by
//! [`Prompts::sections`]; no others do.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::client::Input;
use crate::failure::Failure;
use crate::hash;

/// Fewer words than this, and any token is taken instead.
const FEWEST_WORDS: usize = 128;

/// A prompt, exact to the token.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Prompt {
    /// What is sent.
    pub ids: Vec<u32>,
    /// The same for people: the tokens' own spelling, put together.
    pub text: String,
    /// SHA-256 over the ids (little-endian, 32 bits each), in hex: what evidence calls it.
    pub sha256: String,
}

impl Prompt {
    /// Its length in tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// As a request sends it.
    pub fn input(&self) -> Input {
        Input::Ids(self.ids.clone())
    }
}

/// Which prompt of a case: equal keys give equal prompts, in any process.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Key<'a> {
    /// `tc01`.
    pub case: &'a str,
    /// `warm`.
    pub arm: &'a str,
    /// How often the arm has run on this stack before: a prompt is cold only once.
    pub variant: u64,
}

/// A part of a prompt that others may have too.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Section<'a> {
    /// Tells it from the other sections of the same key.
    pub name: &'a str,
    /// Its length.
    pub tokens: usize,
}

/// Makes prompts in the vocabulary of one model.
#[derive(Clone, Debug)]
pub struct Prompts {
    /// Ids with their spelling.
    words: Vec<(u32, String)>,
    seed: u64,
}

/// The part of `tokenizer.json` that is needed.
#[derive(Deserialize)]
struct Tokenizer {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    model: Model,
}

#[derive(Deserialize)]
struct AddedToken {
    id: u32,
}

#[derive(Deserialize)]
struct Model {
    vocab: Value,
}

impl Prompts {
    /// Reads the vocabulary from `tokenizer.json` in the model's directory.
    pub fn new(model_dir: &Path) -> Result<Self, Failure> {
        let path = model_dir.join("tokenizer.json");
        let unusable = |why: String| {
            Failure::environment("the model's tokenizer cannot be used")
                .expected(format_args!("a vocabulary in {}", path.display()))
                .found(why)
        };
        let text = std::fs::read(&path).map_err(|error| unusable(error.to_string()))?;
        let tokenizer: Tokenizer =
            serde_json::from_slice(&text).map_err(|error| unusable(error.to_string()))?;
        let added: Vec<u32> = tokenizer
            .added_tokens
            .iter()
            .map(|token| token.id)
            .collect();
        let mut all = vocabulary(&tokenizer.model.vocab);
        all.retain(|(id, _)| !added.contains(id));
        // The order of a JSON object says nothing.
        all.sort();
        let words: Vec<_> = all
            .iter()
            .filter(|(_, token)| is_word(token))
            .cloned()
            .collect();
        let words = if words.len() < FEWEST_WORDS {
            all
        } else {
            words
        };
        if words.len() < 2 {
            return Err(unusable(format!("{} ordinary tokens", words.len())));
        }
        Ok(Self { words, seed: 0 })
    }

    /// The same vocabulary under another seed: all prompts differ.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// A prompt that shares no block with any other. Another length gives another prompt, not a
    /// longer one.
    pub fn cold(&self, key: Key<'_>, tokens: usize) -> Prompt {
        self.make(Vec::new(), &self.stream(key, "cold", 0, tokens), tokens)
    }

    /// The first `keep` tokens of `prefix` (all, if it has fewer) and `more` new ones. `tail`
    /// tells several extensions of one prefix apart.
    pub fn extend(&self, prefix: &Prompt, keep: usize, tail: u64, more: usize) -> Prompt {
        let kept = prefix.ids[..keep.min(prefix.ids.len())].to_vec();
        let key = Key {
            case: &prefix.sha256,
            arm: "",
            variant: tail,
        };
        let stream = self.stream(key, "tail", kept.len() as u64, more);
        self.make(kept, &stream, more)
    }

    /// A prompt of `sections`, one after the other: `[system][shared 2][own tail]`. A section of the
    /// same key, name and length has the same tokens in every prompt, wherever it stands; so two
    /// prompts share their equal leading sections, to the token. What a block holds depends on all
    /// before it: an equal section behind an unequal one is computed anew.
    pub fn sections(&self, key: Key<'_>, sections: &[Section<'_>]) -> Prompt {
        let mut ids = Vec::new();
        for Section { name, tokens } in sections {
            let stream = self.stream(key, &format!("section {name}"), 0, *tokens);
            self.draw(&mut ids, &stream, *tokens);
        }
        self.finish(ids)
    }

    /// One of many prompts of `tokens` tokens that push others out of a cache.
    pub fn filler(&self, key: Key<'_>, number: u64, tokens: usize) -> Prompt {
        let stream = self.stream(key, "filler", number, tokens);
        self.make(Vec::new(), &stream, tokens)
    }

    /// One prompt of each length, none of them the beginning of another: for lengths around the
    /// end of a block ([`crate::geometry::Geometry::boundary`]).
    pub fn lengths(&self, key: Key<'_>, lengths: &[usize]) -> Vec<Prompt> {
        self.many(key, "length", lengths)
    }

    fn many(&self, key: Key<'_>, role: &str, lengths: &[usize]) -> Vec<Prompt> {
        lengths
            .iter()
            .enumerate()
            .map(|(i, tokens)| {
                self.make(
                    Vec::new(),
                    &self.stream(key, role, i as u64, *tokens),
                    *tokens,
                )
            })
            .collect()
    }

    /// The key of a stream of tokens. Each field is preceded by its length, so that no two lists
    /// of fields are the same bytes.
    fn stream(&self, key: Key<'_>, role: &str, index: u64, tokens: usize) -> [u8; 32] {
        let mut hash = Sha256::new();
        for field in [key.case, key.arm, role] {
            hash.update((field.len() as u64).to_le_bytes());
            hash.update(field.as_bytes());
        }
        for number in [key.variant, self.seed, index, tokens as u64] {
            hash.update(number.to_le_bytes());
        }
        hash.finalize().into()
    }

    fn make(&self, mut ids: Vec<u32>, stream: &[u8; 32], more: usize) -> Prompt {
        self.draw(&mut ids, stream, more);
        self.finish(ids)
    }

    /// `more` tokens of a stream.
    fn draw(&self, ids: &mut Vec<u32>, stream: &[u8; 32], more: usize) {
        let target = ids.len() + more;
        let words = self.words.len() as u64;
        let mut counter = 0_u64;
        while ids.len() < target {
            let mut hash = Sha256::new();
            hash.update(stream);
            hash.update(counter.to_le_bytes());
            counter += 1;
            for draw in hash.finalize().chunks_exact(4).take(target - ids.len()) {
                let draw = u64::from(u32::from_le_bytes([draw[0], draw[1], draw[2], draw[3]]));
                // Scales 32 random bits to an index; a vocabulary is too small for the bias.
                let (id, _) = &self.words[((draw * words) >> 32) as usize];
                ids.push(*id);
            }
        }
    }

    fn finish(&self, ids: Vec<u32>) -> Prompt {
        let mut digest = Sha256::new();
        let mut text = String::new();
        for id in &ids {
            digest.update(id.to_le_bytes());
            if let Ok(at) = self.words.binary_search_by_key(id, |(id, _)| *id) {
                // `Ġ` and `▁` are how vocabularies spell a leading space.
                text.push_str(&self.words[at].1.replace(['Ġ', '▁'], " "));
            }
        }
        Prompt {
            ids,
            text,
            sha256: hash::finish(digest),
        }
    }
}

/// Ids with their tokens: an object of token to id (BPE, WordPiece), or a list of (token, score)
/// by id (Unigram).
fn vocabulary(vocab: &Value) -> Vec<(u32, String)> {
    match vocab {
        Value::Object(map) => map
            .iter()
            .filter_map(|(token, id)| Some((u32::try_from(id.as_u64()?).ok()?, token.clone())))
            .collect(),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .filter_map(|(id, entry)| {
                Some((u32::try_from(id).ok()?, entry.get(0)?.as_str()?.to_owned()))
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// A whole lower-case word with the space before it.
fn is_word(token: &str) -> bool {
    token
        .strip_prefix(['Ġ', '▁'])
        .is_some_and(|word| word.len() > 1 && word.bytes().all(|b| b.is_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;
    use crate::failure::Class;

    const BLOCK: usize = 64;

    /// 676 words, some tokens that are none, and two special ones.
    fn prompts() -> Prompts {
        let mut vocab = serde_json::Map::new();
        for (i, (a, b)) in (b'a'..=b'z')
            .flat_map(|a| (b'a'..=b'z').map(move |b| (a, b)))
            .enumerate()
        {
            vocab.insert(format!("Ġ{}{}", a as char, b as char), (i + 10).into());
        }
        for (token, id) in [("<end>", 0), ("Ġ1", 3), ("xy", 4), ("Ġspecial", 5)] {
            vocab.insert(token.into(), id.into());
        }
        let json = serde_json::json!({
            "added_tokens": [{"id": 0, "content": "<end>"}, {"id": 5, "content": "Ġspecial"}],
            "model": {"type": "BPE", "vocab": vocab},
        });
        read(&json.to_string()).unwrap()
    }

    fn read(tokenizer: &str) -> Result<Prompts, Failure> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
        Prompts::new(dir.path())
    }

    const KEY: Key<'static> = Key {
        case: "tc01",
        arm: "warm",
        variant: 0,
    };

    #[test]
    fn prompts_are_words_and_the_same_in_every_process() {
        let prompt = prompts().cold(KEY, 6);
        assert!(prompt.ids.iter().all(|id| *id >= 10), "{:?}", prompt.ids);
        assert_eq!(prompt.text.split(' ').count(), 7, "{:?}", prompt.text);
        assert_eq!(prompt, prompts().cold(KEY, 6));
        // Computed by another implementation of the module's documentation. A change here makes
        // a stranger of every pinned reference.
        assert_eq!(prompt.ids, [140, 351, 679, 664, 226, 109]);
        assert_eq!(
            prompt.sha256,
            "c763e6bb56f2f7db0730ee1079bb9f980adb54ac5251b7cf59071546a65aab29"
        );
    }

    #[test]
    fn a_tokenizer_that_is_no_vocabulary_is_the_environments() {
        for bad in [
            "",
            "{}",
            r#"{"model":{"vocab":7}}"#,
            r#"{"model":{"vocab":{"a":0}}}"#,
        ] {
            assert_eq!(read(bad).unwrap_err().class, Class::Environment, "{bad}");
        }
        assert!(Prompts::new(Path::new("/nowhere")).is_err());
        // Too few words: any token that is not special.
        let few = read(r#"{"model":{"vocab":[["a",0.0],["b",0.0]]}}"#).unwrap();
        assert_eq!(few.cold(KEY, 9).tokens(), 9);
    }

    #[test]
    fn fields_do_not_run_into_each_other() {
        let p = prompts();
        let a = p.cold(
            Key {
                case: "ab",
                arm: "c",
                variant: 0,
            },
            64,
        );
        let b = p.cold(
            Key {
                case: "a",
                arm: "bc",
                variant: 0,
            },
            64,
        );
        assert_ne!(a.ids, b.ids);
    }

    #[test]
    fn no_two_prompts_share_their_first_block() {
        let p = prompts();
        let mut all = Vec::new();
        for variant in 0..8 {
            let key = Key { variant, ..KEY };
            all.push(p.cold(key, 512));
            all.push(p.cold(key, 513));
            all.push(p.clone().with_seed(1).cold(key, 512));
            all.extend((0..4).map(|number| p.filler(key, number, 512)));
            all.extend(p.lengths(key, &[511, 512, 513]));
            all.push(p.sections(key, &[section("system", 512)]));
            all.push(p.sections(key, &[section("tail", 512)]));
        }
        let first: HashSet<_> = all.iter().map(|prompt| &prompt.ids[..16]).collect();
        assert_eq!(first.len(), all.len());
        let names: HashSet<_> = all.iter().map(|prompt| &prompt.sha256).collect();
        assert_eq!(names.len(), all.len());
    }

    fn section(name: &str, tokens: usize) -> Section<'_> {
        Section { name, tokens }
    }

    #[test]
    fn equal_sections_are_equal_wherever_they_stand() {
        let p = prompts();
        let system = section("system", 70);
        let [a, b] = ["a", "b"].map(|name| p.sections(KEY, &[system, section(name, 80)]));
        assert_eq!(a.ids[..70], b.ids[..70]);
        assert_ne!(a.ids[70..], b.ids[70..]);
        let behind = p.sections(KEY, &[section("a", 80), system]);
        assert_eq!(behind.ids[80..], a.ids[..70]);
        let other = p.clone().with_seed(1).sections(KEY, &[system]);
        assert_ne!(other.ids, a.ids[..70]);
        assert_eq!(p.sections(KEY, &[]).tokens(), 0);
    }

    proptest! {
        #[test]
        fn a_prompt_of_sections_is_the_sections_one_after_the_other(
            lengths in prop::collection::vec(0_usize..300, 0..5), more in 16_usize..100,
        ) {
            let p = prompts();
            let names: Vec<String> = (0..lengths.len()).map(|k| format!("shared {k}")).collect();
            let shared: Vec<Section<'_>> = names
                .iter()
                .zip(&lengths)
                .map(|(name, tokens)| section(name, *tokens))
                .collect();
            let with = |tail| p.sections(KEY, &[&shared[..], &[section(tail, more)]].concat());
            let (one, other) = (with("one"), with("other"));
            let common = lengths.iter().sum::<usize>();
            prop_assert_eq!(one.tokens(), common + more);
            prop_assert_eq!(&one, &with("one"));
            prop_assert_eq!(&one.ids[..common], &other.ids[..common]);
            prop_assert_ne!(&one.ids[common..], &other.ids[common..]);
        }

        #[test]
        fn lengths_and_shared_prefixes_are_exact(
            tokens in 0_usize..1500, blocks in 0_usize..10, more in 0_usize..300, variant in any::<u64>(), tail in any::<u64>(),
        ) {
            let p = prompts();
            let prompt = p.cold(Key { variant, ..KEY }, tokens);
            prop_assert_eq!(prompt.tokens(), tokens);
            prop_assert_eq!(&prompt, &p.cold(Key { variant, ..KEY }, tokens));
            let keep = (blocks * BLOCK).min(tokens);
            let longer = p.extend(&prompt, blocks * BLOCK, tail, more);
            prop_assert_eq!(longer.tokens(), keep + more);
            prop_assert_eq!(&longer.ids[..keep], &prompt.ids[..keep]);
            if more >= 16 {
                let other = p.extend(&prompt, blocks * BLOCK, tail ^ 1, more);
                prop_assert_ne!(&longer.ids[keep..], &other.ids[keep..]);
            }
        }
    }
}
