//! The simulated model: what a block holds, and which token follows from the blocks that are
//! held. Pure.
//!
//! Nothing is looked up by the prompt: the next token is a hash over the **bytes** of the pages
//! in use, in their order. A page that is missing, swapped, stale, short or corrupted therefore
//! changes the text, as it does in an engine; and what is computed after a bad page is bad too.
//!
//! ```text
//! block j of attention:   page_j  = stream("kv",    context_{j-1}, tokens of block j)
//!                         context_j = H(context_{j-1}, page_j)
//! state group g:          state_j = stream("state g", H(state_{j-1}), tokens of block j)
//! next token:             H(context_k, H(state_k) of each group, tokens after block k)
//! ```
//!
//! A hybrid model has state groups; a prefix of k blocks can be reused there only with all k
//! attention pages **and** the state page at k of every group.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Version of what follows from what: raised when the same prompt gives another text.
pub const SEMANTICS: u32 = 1;

/// Length of a hash.
pub const HASH: usize = 32;

/// A hash over what came before.
pub type Context = [u8; HASH];

/// Shape of a simulated model, as its `config.json` says it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Shape {
    /// Layers with a KV cache.
    pub layers: u32,
    /// KV heads of each layer.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Groups of state pages beside the attention group; 0 for a dense model.
    #[serde(default)]
    pub state_groups: u32,
    /// Entries of the vocabulary.
    pub vocabulary: u32,
}

impl Shape {
    /// The dense model.
    pub const DENSE: Self = Self {
        layers: 1,
        kv_heads: 1,
        head_dim: 8,
        state_groups: 0,
        vocabulary: 1024,
    };

    /// One attention group and three state groups, as Qwen3.5 has them.
    pub const HYBRID: Self = Self {
        state_groups: 3,
        ..Self::DENSE
    };

    /// Bytes of one page: the keys and values of a block's tokens. State pages are padded to
    /// the same size, as vLLM pads them.
    #[must_use]
    pub fn page_bytes(self, block_tokens: u32, element_bytes: u32) -> usize {
        let elements = self.layers * 2 * self.kv_heads * self.head_dim;
        (elements * block_tokens * element_bytes) as usize
    }
}

/// Which page of a prefix.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub enum Group {
    /// Keys and values of one block: every block of a prefix is needed.
    Attention,
    /// The state after a block: only the last one is needed.
    State(u32),
}

/// Names a page across processes: what its tokens, everything before them and the salt hash to.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Key {
    /// Hash of the prefix that ends with this block.
    pub block: u64,
    /// Which of its pages.
    pub group: Group,
}

impl Key {
    /// The attention page of a block.
    #[must_use]
    pub fn attention(block: u64) -> Self {
        Self {
            block,
            group: Group::Attention,
        }
    }
}

/// Hashes of the prefixes of `tokens` that end with each full block. Two prompts share a hash
/// exactly as far as they share tokens and salt.
#[must_use]
pub fn block_hashes(tokens: &[u32], block_tokens: usize, salt: Option<&str>) -> Vec<u64> {
    let mut parent: Context = digest(b"salt", &[salt.unwrap_or_default().as_bytes()]);
    tokens
        .chunks_exact(block_tokens)
        .map(|block| {
            parent = digest(b"block", &[&parent, &le(block)]);
            u64::from_le_bytes(parent[..8].try_into().expect("eight bytes"))
        })
        .collect()
}

/// What a model holds after some blocks: all that the next block and the next token follow from.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Held {
    weights: Context,
    page_bytes: usize,
    context: Context,
    states: Vec<Context>,
}

impl Held {
    /// Nothing yet. Other `weights` give other pages and other text.
    #[must_use]
    pub fn nothing(weights: u64, shape: Shape, page_bytes: usize) -> Self {
        let weights = digest(b"weights", &[&weights.to_le_bytes()]);
        Self {
            weights,
            page_bytes,
            context: weights,
            states: vec![weights; shape.state_groups as usize],
        }
    }

    /// Computes the pages of the next block, and holds them: attention first, then the groups'.
    pub fn compute(&mut self, tokens: &[u32]) -> Vec<Vec<u8>> {
        let tokens = le(tokens);
        let page = stream(
            self.page_bytes,
            b"kv",
            &[&self.weights, &self.context, &tokens],
        );
        let mut pages = vec![page];
        for (group, state) in (0u32..).zip(&self.states) {
            let parts: [&[u8]; 4] = [&self.weights, &group.to_le_bytes(), state, &tokens];
            pages.push(stream(self.page_bytes, b"state", &parts));
        }
        self.take_attention(&pages[0]);
        for (group, page) in pages[1..].iter().enumerate() {
            self.take_state(group, page);
        }
        pages
    }

    /// Holds an attention page that came from somewhere, whatever is in it.
    pub fn take_attention(&mut self, page: &[u8]) {
        self.context = digest(b"context", &[&self.context, page]);
    }

    /// Holds the state page of `group` that came from somewhere, instead of the one before.
    ///
    /// # Panics
    /// If the model has no such group.
    pub fn take_state(&mut self, group: usize, page: &[u8]) {
        self.states[group] = digest(b"after", &[page]);
    }

    /// The token after the held blocks and `tail`, and the runner-up.
    #[must_use]
    pub fn next(&self, tail: &[u32], vocabulary: u32) -> Next {
        let mut hasher = Sha256::new();
        hasher.update(b"next");
        hasher.update(self.context);
        for state in &self.states {
            hasher.update(state);
        }
        hasher.update(le(tail));
        let hash: Context = hasher.finalize().into();
        let word = |at: usize| u64::from_le_bytes(hash[at..at + 8].try_into().expect("8 bytes"));
        // 0 is the end-of-text token; a simulated model never ends by itself.
        let ordinary = u64::from(vocabulary) - 1;
        let first = 1 + word(0) % ordinary;
        let second = 1 + (first - 1 + 1 + word(8) % (ordinary - 1)) % ordinary;
        let gap = 0.05 + (word(16) % 1000) as f64 / 1000.0;
        let top = -0.5 - (word(24) % 1000) as f64 / 1000.0;
        Next {
            token: first as u32,
            logprob: top,
            runner_up: second as u32,
            runner_up_logprob: top - gap,
        }
    }
}

/// A generated token with its runner-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Next {
    /// The likeliest token.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f64,
    /// The second likeliest; never the same.
    pub runner_up: u32,
    /// Its log-probability, at least 0.05 less.
    pub runner_up_logprob: f64,
}

/// The spelling of a token: a word, with the mark of a space before it.
#[must_use]
pub fn spelling(token: u32) -> String {
    if token == 0 {
        return "<|end|>".to_owned();
    }
    // Two consonant-vowel syllables of 14 × 5 are 4,900 words, readable and all different.
    const CONSONANTS: &[u8] = b"bdfghklmnprstv";
    const VOWELS: &[u8] = b"aeiou";
    let mut rest = token as usize - 1;
    let mut word = String::from("Ġ");
    loop {
        for letters in [CONSONANTS, VOWELS] {
            word.push(char::from(letters[rest % letters.len()]));
            rest /= letters.len();
        }
        if rest == 0 {
            return word;
        }
        rest -= 1;
    }
}

/// What tokens read as.
#[must_use]
pub fn text(tokens: &[u32]) -> String {
    tokens
        .iter()
        .map(|token| spelling(*token).replace('Ġ', " "))
        .collect()
}

/// The tokens of a text: known words are themselves, anything else is hashed into the
/// vocabulary.
#[must_use]
pub fn tokenize(text: &str, vocabulary: u32) -> Vec<u32> {
    text.split_whitespace()
        .map(|word| {
            (1..vocabulary)
                .find(|token| spelling(*token).strip_prefix('Ġ') == Some(word))
                .unwrap_or_else(|| {
                    let hash = digest(b"word", &[word.as_bytes()]);
                    1 + u32::from_le_bytes(hash[..4].try_into().expect("4 bytes"))
                        % (vocabulary - 1)
                })
        })
        .collect()
}

/// `config.json` of a simulated model.
#[must_use]
pub fn config_json(shape: Shape) -> Value {
    json!({ "model_type": "kvcr_sim", "kvcr_sim": shape })
}

/// `tokenizer.json` of a simulated model.
#[must_use]
pub fn tokenizer_json(shape: Shape) -> Value {
    let vocab: serde_json::Map<String, Value> = (0..shape.vocabulary)
        .map(|token| (spelling(token), json!(token)))
        .collect();
    json!({
        "version": "1.0",
        "added_tokens": [{"id": 0, "content": spelling(0), "special": true}],
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": spelling(0)},
    })
}

fn le(tokens: &[u32]) -> Vec<u8> {
    tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect()
}

/// Lengths stand before the parts, so that no two lists of parts run together alike.
fn digest(what: &[u8], parts: &[&[u8]]) -> Context {
    let mut hasher = Sha256::new();
    for part in std::iter::once(&what).chain(parts) {
        hasher.update((part.len() as u64).to_le_bytes());
        hasher.update(part);
    }
    hasher.finalize().into()
}

/// `length` bytes that follow from the parts.
fn stream(length: usize, what: &[u8], parts: &[&[u8]]) -> Vec<u8> {
    let key = digest(what, parts);
    let mut bytes = Vec::with_capacity(length + HASH);
    for counter in 0u64.. {
        if bytes.len() >= length {
            break;
        }
        let mut hasher = Sha256::new();
        hasher.update(key);
        hasher.update(counter.to_le_bytes());
        bytes.extend_from_slice(&hasher.finalize());
    }
    bytes.truncate(length);
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const BLOCK: usize = 8;
    const PAGE: usize = 512;

    fn prompt(blocks: usize) -> Vec<u32> {
        (0..blocks * BLOCK)
            .map(|i| 1 + (i as u32 * 7) % 900)
            .collect()
    }

    /// Pages of every block, attention first, and what is held after them.
    fn computed(shape: Shape, tokens: &[u32]) -> (Vec<Vec<Vec<u8>>>, Held) {
        let mut held = Held::nothing(1, shape, PAGE);
        let pages = tokens
            .chunks_exact(BLOCK)
            .map(|block| held.compute(block))
            .collect();
        (pages, held)
    }

    /// What is held when `pages` came from a cache instead.
    fn loaded(shape: Shape, pages: &[Vec<Vec<u8>>]) -> Held {
        let mut held = Held::nothing(1, shape, PAGE);
        for block in pages {
            held.take_attention(&block[0]);
        }
        for group in 0..shape.state_groups as usize {
            held.take_state(group, &pages.last().unwrap()[1 + group]);
        }
        held
    }

    #[test]
    fn a_hit_gives_what_computing_gives() {
        for shape in [Shape::DENSE, Shape::HYBRID] {
            let (pages, held) = computed(shape, &prompt(4));
            assert_eq!(loaded(shape, &pages), held);
            assert_eq!(pages[0].len(), 1 + shape.state_groups as usize);
            assert!(pages.iter().flatten().all(|page| page.len() == PAGE));
        }
    }

    #[test]
    fn every_kind_of_bad_page_changes_the_text() {
        for shape in [Shape::DENSE, Shape::HYBRID] {
            let (good, held) = computed(shape, &prompt(4));
            let right = held.next(&[], 1024).token;
            let mut wrong: Vec<Vec<Vec<Vec<u8>>>> = Vec::new();
            for (block, byte) in [(0, 0), (2, PAGE - 1), (3, 17)] {
                let mut pages = good.clone();
                pages[block][0][byte] ^= 1;
                wrong.push(pages);
            }
            let mut swapped = good.clone();
            swapped.swap(1, 2);
            wrong.push(swapped);
            let mut short = good.clone();
            short[1][0][PAGE / 2..].fill(0);
            wrong.push(short);
            wrong.push(good[..3].to_vec());
            if shape.state_groups > 0 {
                let mut stale = good.clone();
                stale[3][2] = good[2][2].clone();
                wrong.push(stale);
            }
            for pages in wrong {
                assert_ne!(loaded(shape, &pages).next(&[], 1024).token, right);
            }
        }
    }

    #[test]
    fn what_is_computed_after_a_bad_page_is_bad() {
        let (mut pages, mut held) = computed(Shape::DENSE, &prompt(2));
        pages[0][0][0] ^= 1;
        let mut poisoned = loaded(Shape::DENSE, &pages);
        assert_ne!(poisoned.compute(&prompt(1)), held.compute(&prompt(1)));
    }

    #[test]
    fn other_weights_speak_otherwise() {
        let next = |weights| {
            Held::nothing(weights, Shape::DENSE, PAGE)
                .next(&[5], 1024)
                .token
        };
        assert_ne!(next(1), next(2));
    }

    #[test]
    fn spellings_are_words_of_their_own() {
        let all: HashSet<String> = (0..1024).map(spelling).collect();
        assert_eq!(all.len(), 1024);
        for token in [1, 70, 71, 1023] {
            let word = spelling(token);
            assert!(word.len() >= 4 && word.starts_with('Ġ'), "{word}");
            assert_eq!(tokenize(&text(&[token]), 1024), [token]);
        }
        assert_eq!(tokenize("canary", 1024).len(), 1);
    }

    proptest! {
        #[test]
        fn hashes_are_shared_exactly_as_far_as_tokens_are(
            tokens in prop::collection::vec(1u32..900, 0..80),
            at in 0usize..80,
        ) {
            let hashes = block_hashes(&tokens, BLOCK, Some("s"));
            prop_assert_eq!(hashes.len(), tokens.len() / BLOCK);
            let mut other = tokens.clone();
            if let Some(token) = other.get_mut(at) {
                *token += 1;
            }
            let others = block_hashes(&other, BLOCK, Some("s"));
            for (index, (a, b)) in hashes.iter().zip(&others).enumerate() {
                let same = at >= tokens.len() || at / BLOCK > index;
                prop_assert_eq!(a == b, same);
            }
            let salted = block_hashes(&tokens, BLOCK, Some("t"));
            prop_assert!(hashes.iter().zip(&salted).all(|(a, b)| a != b));
        }

        #[test]
        fn tokens_are_ordinary_and_never_their_own_runner_up(
            tail in prop::collection::vec(1u32..900, 0..20),
            vocabulary in 3u32..2000,
        ) {
            let next = Held::nothing(3, Shape::DENSE, PAGE).next(&tail, vocabulary);
            prop_assert!((1..vocabulary).contains(&next.token));
            prop_assert!((1..vocabulary).contains(&next.runner_up));
            prop_assert_ne!(next.token, next.runner_up);
            prop_assert!(next.runner_up_logprob < next.logprob - 0.04);
        }
    }
}
