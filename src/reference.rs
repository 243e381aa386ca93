//! What the engine answers with KVCR off: the oracle of every text check.
//!
//! The reference is the same build with the same flags, without a KV connector, behind the same
//! front door. It is asked every question twice, cold and then warm, and must agree with itself:
//! where it does not, text checks are Inconclusive, because nobody can say what the right text is.
//! Its answers are kept for the life of one stack, so a warm stack needs it only for new questions.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::client::Observation;
use crate::failure::{Class, Failure};
use crate::hash;
use crate::prompt::Prompt;
use crate::snapshot::PinnedAnswer;
use crate::verdict::Check;

/// Two log-probabilities closer than this are a near tie: another order of summation may swap
/// them. In float32 the sums of a small model differ by less than a thousandth of it.
pub const NEAR_TIE: f64 = 1e-3;

/// What to ask.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// Label inside the arm: `long`.
    pub label: String,
    /// The prompt.
    pub prompt: Prompt,
    /// Tokens to generate.
    pub max_tokens: u32,
}

impl Question {
    /// File stem of its answer: the same question of two arms is asked once.
    #[must_use]
    pub fn key(&self) -> String {
        format!("{}-{}", self.prompt.sha256, self.max_tokens)
    }
}

/// What the reference said, and whether it said it twice.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Answer {
    /// The deterministic part; what a pin holds.
    pub answer: PinnedAnswer,
    /// Tokens that the reference itself reused when asked again: the most that KVCR may claim.
    pub reused_tokens: Option<u64>,
    /// Smallest gap between first and second choice over the generated tokens.
    pub smallest_top2_gap: Option<f64>,
    /// How the second asking differed from the first, if it did.
    pub disagreement: Option<String>,
}

impl Answer {
    /// From the same question asked twice.
    #[must_use]
    pub fn from_pair(prompt: &Prompt, cold: &Observation, warm: &Observation) -> Self {
        let pin = |seen: &Observation| PinnedAnswer {
            prompt_sha256: prompt.sha256.clone(),
            prompt_tokens: seen.prompt_tokens,
            tokens: seen.tokens.clone(),
            text: seen.text.clone(),
            finish_reason: seen.finish_reason.clone(),
        };
        let (first, second) = (pin(cold), pin(warm));
        let disagreement = (first != second).then(|| {
            let split = first
                .tokens
                .iter()
                .zip(&second.tokens)
                .position(|(a, b)| a != b);
            format!(
                "cold {:?}, warm {:?}, first differing token {split:?}",
                first.text, second.text
            )
        });
        let gap = |seen: &Observation| seen.smallest_top2_gap;
        Self {
            answer: first,
            reused_tokens: warm.cached_tokens,
            smallest_top2_gap: match (gap(cold), gap(warm)) {
                (Some(a), Some(b)) => Some(a.min(b)),
                (a, b) => a.or(b),
            },
            disagreement,
        }
    }

    /// The self-check, as a check of the arm.
    #[must_use]
    pub fn self_check(&self, label: &str) -> Check {
        let mut check = Check::new(
            format!("reference_agrees_with_itself[{label}]"),
            Class::Inconclusive,
            self.disagreement.is_none(),
            "the same tokens cold and warm, with KVCR off",
            self.disagreement.as_deref().unwrap_or("the same"),
        );
        check.margin = self
            .smallest_top2_gap
            .map(|gap| format!("smallest gap to the second choice {gap:.4} nat"));
        check
    }

    /// Whether another rounding might change the text.
    #[must_use]
    pub fn is_near_tie(&self) -> bool {
        self.smallest_top2_gap.is_some_and(|gap| gap < NEAR_TIE)
    }
}

/// How much the reference reused of each prompt of a sequence, asked in order under one salt.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Reuse {
    /// Tokens, by position in the sequence; `None` where it did not say.
    pub reused: Vec<Option<u64>>,
    /// What it generated each time.
    pub tokens: Vec<Vec<String>>,
}

impl Reuse {
    /// Names a sequence: equal prompts in equal order.
    #[must_use]
    pub fn key(prompts: &[&Prompt], max_tokens: u32) -> String {
        let all: Vec<&str> = prompts
            .iter()
            .map(|prompt| prompt.sha256.as_str())
            .collect();
        format!("sequence-{}-{max_tokens}", hash::sha256(all.join(" ")))
    }
}

/// Answers kept on disk for the life of one stack.
#[derive(Clone, Debug)]
pub struct Kept {
    folder: PathBuf,
}

impl Kept {
    /// Answers below `folder`.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// The answer to `question`, if the reference of this stack gave one already. An unreadable
    /// file counts as none: the reference is asked again.
    #[must_use]
    pub fn find(&self, question: &Question) -> Option<Answer> {
        let bytes = std::fs::read(self.path(question)).ok()?;
        let answer: Answer = serde_json::from_slice(&bytes).ok()?;
        (answer.answer.prompt_sha256 == question.prompt.sha256).then_some(answer)
    }

    /// Keeps an answer.
    ///
    /// # Errors
    /// Environment, if the directory cannot be written.
    pub fn keep(&self, question: &Question, answer: &Answer) -> Result<(), Failure> {
        crate::evidence::write_json(&self.path(question), answer)
    }

    /// What was reused of the sequence `key`, if the reference of this stack was asked already.
    #[must_use]
    pub fn find_reuse(&self, key: &str) -> Option<Reuse> {
        let bytes = std::fs::read(self.folder.join(format!("{key}.json"))).ok()?;
        serde_json::from_slice(&bytes).ok()
    }

    /// Keeps what was reused.
    ///
    /// # Errors
    /// Environment, if the directory cannot be written.
    pub fn keep_reuse(&self, key: &str, reuse: &Reuse) -> Result<(), Failure> {
        crate::evidence::write_json(&self.folder.join(format!("{key}.json")), reuse)
    }

    fn path(&self, question: &Question) -> PathBuf {
        self.folder.join(format!("{}.json", question.key()))
    }
}
