//! Text becomes tokens, once a word: the model's own tokenizer looks a word up by spelling the
//! whole vocabulary.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::sim::model;

/// Words that are remembered; a prompt is made of far fewer.
const REMEMBERED: usize = 1 << 16;

/// Remembers words, for each size of vocabulary.
#[derive(Debug, Default)]
pub(super) struct Tokenizer(Mutex<HashMap<(u32, String), u32>>);

impl Tokenizer {
    /// The tokens of `text`, as [`model::tokenize`] gives them.
    pub(super) fn tokens(&self, text: &str, vocabulary: u32) -> Vec<u32> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut tokens = Vec::new();
        for word in text.split_whitespace() {
            let key = (vocabulary, word.to_owned());
            if let Some(token) = known.get(&key) {
                tokens.push(*token);
                continue;
            }
            let found = model::tokenize(word, vocabulary);
            if let ([token], true) = (found.as_slice(), known.len() < REMEMBERED) {
                known.insert(key, *token);
            }
            tokens.extend(found);
        }
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_says_what_the_model_says_again_and_again() {
        let tokenizer = Tokenizer::default();
        let text = format!("a canary {}  and\nanother canary", model::text(&[7, 900]));
        for _ in 0..2 {
            assert_eq!(tokenizer.tokens(&text, 1024), model::tokenize(&text, 1024));
        }
        assert_eq!(tokenizer.tokens(&text, 99), model::tokenize(&text, 99));
    }
}
