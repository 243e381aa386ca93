//! What the engine does with KVCR off: its answers, and how much of a prompt it can reuse.

use std::time::Instant;

use super::{Scene, millis};
use crate::client::Observation;
use crate::failure::{Class, Failure};
use crate::prompt::Prompt;
use crate::reference::{Answer, Question, Reuse};
use crate::stack::protocol::WorkerInfo;
use crate::verdict::{Check, Said};

impl Scene<'_> {
    /// What the KVCR-off engine answers to each prompt. Asks it twice where this stack has not
    /// asked yet, and checks that it agrees with itself.
    ///
    /// # Errors
    /// The reference could not be started or asked.
    pub async fn reference(&mut self, prompts: &[(&str, &Prompt)]) -> Result<(), Failure> {
        for (label, prompt) in prompts {
            let question = Question {
                label: (*label).to_owned(),
                prompt: (*prompt).clone(),
                max_tokens: self.config.profile.request.max_tokens,
            };
            let answer = match self.kept.find(&question) {
                Some(answer) => answer,
                None => self.ask_reference(&question).await?,
            };
            if answer.is_near_tie() {
                self.told.notes.push(format!(
                    "near tie in the reference of `{label}`: its first and second choice are {:.2e} apart",
                    answer.smallest_top2_gap.unwrap_or_default()
                ));
            }
            self.told.checks.push(answer.self_check(label));
            self.told.answers.insert((*label).to_owned(), answer);
        }
        Ok(())
    }

    async fn ask_reference(&mut self, question: &Question) -> Result<Answer, Failure> {
        let reference = self.reference_engine().await?;
        let began = Instant::now();
        let mut pair = Vec::with_capacity(2);
        for state in ["cold", "warm"] {
            let label = format!("{}.{state}", question.label);
            let salt = self.salt.clone();
            let exchange = self.exchange(&label, &question.prompt, &reference, Some(salt))?;
            pair.push(exchange.carry_out().await);
        }
        self.told.timings.reference_requests += millis(began);
        let [cold, warm] = <[_; 2]>::try_from(pair).expect("two states");
        let answer = Answer::from_pair(&question.prompt, &cold?, &warm?);
        self.kept.keep(question, &answer)?;
        Ok(answer)
    }

    /// Checks that an answer is the reference's, token by token. Where the reference disagreed
    /// with itself nothing can be said, and the check is Inconclusive. Whether it held.
    pub fn answers_as_reference(&mut self, label: &str, seen: &Observation) -> bool {
        let Some(reference) = self.told.answers.get(label) else {
            self.check(Check::new(
                format!("tokens_equal_reference[{}]", seen.label),
                Class::Inconclusive,
                false,
                "an answer of the reference",
                format_args!("none to `{label}`"),
            ));
            return false;
        };
        let expected = Said {
            text: &reference.answer.text,
            tokens: &reference.answer.tokens,
        };
        let found = Said {
            text: &seen.text,
            tokens: &seen.tokens,
        };
        let check = Check::text_equal(
            format!("tokens_equal_reference[{}]", seen.label),
            Class::Product,
            expected,
            found,
        )
        .given(&reference.self_check(label));
        let held = check.held;
        self.check(check);
        held
    }

    /// Tokens the reference itself reused when it was asked `label` again: the most that KVCR may
    /// claim, and the least.
    ///
    /// # Errors
    /// Inconclusive, if it did not say, or reused nothing of a prompt that fills blocks: such a
    /// reference cannot judge a hit.
    pub fn reference_reused(&self, label: &str) -> Result<u64, Failure> {
        let answer = self.told.answers.get(label);
        let prompt = answer.map_or(0, |answer| answer.answer.prompt_tokens);
        let reused = answer.and_then(|answer| answer.reused_tokens);
        let least = u64::from(self.blocks.device_hit(prompt) > 0);
        reused.filter(|reused| *reused >= least).ok_or_else(|| {
            Failure::inconclusive("the reference cannot say how much of a prompt can be reused")
                .expected(format_args!(
                    "tokens of `{label}` that it reused when asked again"
                ))
                .found(reused.map_or("nothing said".to_owned(), |tokens| {
                    format!("{tokens} tokens")
                }))
                .hint("without a prefix cache of its own it cannot judge a hit")
        })
    }

    /// Tokens of each prompt that the KVCR-off engine reuses when it is asked all of them, in
    /// this order and nothing else: what KVCR may claim for the same sequence. Leaves a check that
    /// its text does not depend on what it reuses.
    ///
    /// # Errors
    /// The reference could not be started or asked, or did not say what it reused.
    pub async fn reference_reuse(
        &mut self,
        sequence: &[(&str, &Prompt)],
    ) -> Result<Vec<u64>, Failure> {
        // One that reuses nothing when it is asked the same again has no say here either.
        for (label, _) in sequence {
            if self.told.answers.contains_key(*label) {
                self.reference_reused(label)?;
            }
        }
        let prompts: Vec<&Prompt> = sequence.iter().map(|(_, prompt)| *prompt).collect();
        let key = Reuse::key(&prompts, self.config.profile.request.max_tokens);
        let reuse = match self.kept.find_reuse(&key) {
            Some(reuse) => reuse,
            None => self.ask_reuse(sequence, &key).await?,
        };
        for ((label, _), tokens) in sequence.iter().zip(&reuse.tokens) {
            let Some(answer) = self.told.answers.get(*label) else {
                continue;
            };
            self.told.checks.push(Check::equal(
                format!("reference_agrees_with_itself[{label} in its sequence]"),
                Class::Inconclusive,
                &answer.answer.tokens,
                tokens,
            ));
        }
        let said: Option<Vec<u64>> = reuse.reused.iter().copied().collect();
        said.ok_or_else(|| {
            Failure::inconclusive("the reference does not say how much it reuses")
                .expected("cached tokens in the usage of every answer")
                .found(format_args!("{:?}", reuse.reused))
        })
    }

    async fn ask_reuse(
        &mut self,
        sequence: &[(&str, &Prompt)],
        key: &str,
    ) -> Result<Reuse, Failure> {
        let reference = self.reference_engine().await?;
        let began = Instant::now();
        let mut reuse = Reuse::default();
        for (number, (label, prompt)) in sequence.iter().enumerate() {
            // A salt of its own: whatever the reference was asked before must not count.
            let salt = format!("{}-reuse-{key}", self.salt);
            let label = format!("reuse{number}.{label}");
            let exchange = self.exchange(&label, prompt, &reference, Some(salt))?;
            let seen = exchange.carry_out().await?;
            reuse.reused.push(seen.cached_tokens);
            reuse.tokens.push(seen.tokens);
        }
        self.told.timings.reference_requests += millis(began);
        self.kept.keep_reuse(key, &reuse)?;
        Ok(reuse)
    }

    pub(super) async fn reference_engine(&mut self) -> Result<WorkerInfo, Failure> {
        let began = Instant::now();
        let started = self.lease.reference().await;
        self.told.timings.reference_start += millis(began);
        Ok(started?.0)
    }
}
