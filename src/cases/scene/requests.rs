//! Requests to the stack under test, and what each must say of itself.

use std::ops::RangeInclusive;
use std::time::Instant;

use serde_json::json;
use tokio::task::JoinSet;

use super::{Scene, file_name, millis};
use crate::client::{Client, Completion, Observation, Pin, RequestFailure};
use crate::config::Profile;
use crate::evidence::ArmDir;
use crate::evidence::result::RequestLine;
use crate::failure::{Class, Failure};
use crate::plan::Serves;
use crate::prompt::Prompt;
use crate::stack::protocol::WorkerInfo;
use crate::verdict::Check;

/// One request on its way, with all it needs: several can be under way at once.
pub(super) struct Exchange {
    client: Client,
    dir: ArmDir,
    label: String,
    process: String,
    prompt: Prompt,
    completion: Completion,
}

impl Exchange {
    /// Sends it, and writes down what was asked and answered.
    pub(super) async fn carry_out(self) -> Result<Observation, Failure> {
        self.attempt().await?.map_err(Failure::from)
    }

    /// The same, where a failure is an answer too.
    ///
    /// # Errors
    /// Environment, if it cannot be written down.
    pub(super) async fn attempt(self) -> Result<Result<Observation, RequestFailure>, Failure> {
        let result = self.client.complete(&self.completion, &self.label).await;
        let answered = match &result {
            Ok(seen) => json!({"observation": seen}),
            Err(failure) => json!({"failure": failure.to_string()}),
        };
        let file = format!("requests/{}.json", file_name(&self.process, &self.label));
        let Prompt { text, sha256, .. } = &self.prompt;
        self.dir.json(
            &file,
            &json!({"asked": self.completion, "text": text, "sha256": sha256, "answered": answered}),
        )?;
        Ok(result)
    }
}

impl Scene<'_> {
    /// Sends `prompt` to one worker of the stack under test, and checks that this worker served it.
    ///
    /// # Errors
    /// The request's failure, as the class that has to act.
    pub async fn ask(
        &mut self,
        label: &str,
        prompt: &Prompt,
        worker: usize,
    ) -> Result<Observation, Failure> {
        let seen = self.ask_together(&[(label, prompt, worker)]).await?;
        seen.into_iter()
            .next()
            .ok_or_else(|| Failure::inconclusive(format!("`{label}` was not sent")))
    }

    /// Sends all of them at once: each (label, prompt, worker). Answers come in their order.
    ///
    /// # Errors
    /// The first failure in that order; the others' answers are in the evidence.
    pub async fn ask_together(
        &mut self,
        asked: &[(&str, &Prompt, usize)],
    ) -> Result<Vec<Observation>, Failure> {
        let mut targets = Vec::with_capacity(asked.len());
        let mut under_way = JoinSet::new();
        for (at, (label, prompt, worker)) in asked.iter().enumerate() {
            let target = self.worker(*worker)?;
            let exchange = self.exchange(label, prompt, &target, self.asked_salt())?;
            targets.push(target);
            under_way.spawn(async move { (at, exchange.carry_out().await) });
        }
        let began = Instant::now();
        let mut results: Vec<Option<Result<Observation, Failure>>> = vec![None; asked.len()];
        while let Some(done) = under_way.join_next().await {
            let (at, result) = done
                .map_err(|error| Failure::inconclusive("a request ended by itself").found(error))?;
            results[at] = Some(result);
        }
        self.told.timings.requests += millis(began);
        let mut all = Vec::with_capacity(asked.len());
        for ((result, target), (label, prompt, _)) in results.into_iter().zip(targets).zip(asked) {
            let seen = result.ok_or_else(|| {
                Failure::inconclusive(format!("`{label}` has neither an answer nor a failure"))
            })??;
            self.served(label, prompt, &target, &seen);
            all.push(seen);
        }
        Ok(all)
    }

    /// What every answer of the stack under test must say of itself.
    pub(super) fn served(
        &mut self,
        label: &str,
        prompt: &Prompt,
        target: &WorkerInfo,
        seen: &Observation,
    ) {
        self.told.requests.push(RequestLine {
            label: label.to_owned(),
            worker: target.process.clone(),
            prompt_tokens: seen.prompt_tokens,
            cached_tokens: seen.cached_tokens,
            wall_ms: seen.wall_ms,
        });
        let pinned = match target.serves {
            Serves::Whole | Serves::Decode => seen.served_by,
            Serves::Prefill => seen.prefilled_by,
        };
        self.check(Check::equal(
            format!("served_by_pinned_worker[{label}]"),
            Class::Product,
            &Some(target.instance_id),
            &pinned,
        ));
        if let (Serves::Prefill, Some(decode)) = (target.serves, self.decode()) {
            self.check(Check::equal(
                format!("decoded_elsewhere[{label}]"),
                Class::Product,
                &Some(decode.instance_id),
                &seen.served_by,
            ));
        }
        // Token ids arrive as they were sent.
        self.check(Check::exactly(
            format!("prompt_is_counted[{label}]"),
            Class::Product,
            "tokens",
            prompt.tokens() as u64,
            seen.prompt_tokens,
        ));
        // It was asked to ignore the end of the text, so nothing else may end it.
        let wanted = u64::from(self.config.profile.request.max_tokens);
        self.check(Check::equal(
            format!("answer_is_complete[{label}]"),
            Class::Product,
            &("length", wanted, wanted),
            &(
                seen.finish_reason.as_str(),
                seen.completion_tokens,
                seen.tokens.len() as u64,
            ),
        ));
    }

    pub(super) fn exchange(
        &self,
        label: &str,
        prompt: &Prompt,
        target: &WorkerInfo,
        cache_salt: Option<String>,
    ) -> Result<Exchange, Failure> {
        Ok(Exchange {
            client: self.client.clone(),
            dir: self.dir.clone(),
            label: label.to_owned(),
            process: target.process.clone(),
            completion: self.completion(label, prompt, target, cache_salt)?,
            prompt: prompt.clone(),
        })
    }

    /// What is asked of `target`.
    pub(super) fn completion(
        &self,
        label: &str,
        prompt: &Prompt,
        target: &WorkerInfo,
        cache_salt: Option<String>,
    ) -> Result<Completion, Failure> {
        let max_tokens = self.config.profile.request.max_tokens;
        fits(label, prompt, max_tokens, &self.config.profile)?;
        Ok(Completion {
            model: target.served_model.clone(),
            prompt: prompt.input(),
            max_tokens,
            ignore_eos: true,
            pin: Pin::of(target),
            cache_salt,
        })
    }

    /// Checks that the hit which the engine itself reports lies in `range`, in tokens.
    pub fn hit(&mut self, seen: &Observation, range: RangeInclusive<u64>) {
        let name = format!("cached_tokens[{}]", seen.label);
        let (least, most, all) = (range.start(), range.end(), seen.prompt_tokens);
        let expected = if least == most {
            format!("{least} of {all} tokens")
        } else {
            format!("{least} to {most} of {all} tokens")
        };
        self.check(match seen.cached_tokens {
            Some(cached) => Check::new(
                name,
                Class::Product,
                range.contains(&cached),
                expected,
                format_args!("{cached} tokens"),
            ),
            None => Check::new(
                name,
                Class::Inconclusive,
                false,
                expected,
                "no cached_tokens in the usage",
            ),
        });
    }

    /// Checks that the hit is what the engine reused without KVCR, in tokens: not more, and not
    /// less.
    pub fn hit_as_reused(&mut self, seen: &Observation, reused: u64) {
        let class = match seen.cached_tokens {
            Some(_) => Class::Product,
            None => Class::Inconclusive,
        };
        self.check(Check::equal(
            format!("hit_as_reference_reuses[{}]", seen.label),
            class,
            &Some(reused),
            &seen.cached_tokens,
        ));
    }

    /// Pushes everything so far out of worker `index`'s device cache and host tier: sends fillers
    /// until more blocks than either holds have gone through both. Whether that evicted a prompt
    /// is not believed but counted afterwards. `spare` is what the story itself put there; `label` tells
    /// its floods apart.
    ///
    /// # Errors
    /// A filler's failure.
    pub async fn evict(&mut self, label: &str, index: usize, spare: u64) -> Result<(), Failure> {
        let blocks = self.device_blocks().max(self.host_blocks(index).await?) + spare;
        self.flood(label, index, blocks).await?;
        Ok(())
    }

    /// Sends worker `index` fillers that no cache has seen, which fill `blocks` full blocks or a few
    /// more; `label` tells the floods of one story apart. What it answered.
    ///
    /// # Errors
    /// A filler's failure.
    pub async fn flood(
        &mut self,
        label: &str,
        index: usize,
        blocks: u64,
    ) -> Result<Vec<Observation>, Failure> {
        // Half of the longest sequence: long enough to be few, short enough for any device cache.
        let longest = u64::from(self.config.profile.engine.max_model_len) / 2;
        let (count, each) = portions(blocks, self.blocks.full(longest));
        let tokens = self.tokens(each) + self.tokens(1) / 2;
        sendable(blocks, count as u64, tokens)?;
        let mut answers = Vec::new();
        for number in 0..count {
            let prompt = self.filler(label, number as u64, tokens);
            let label = format!("{label}{number}");
            answers.push(self.ask(&label, &prompt, index).await?);
        }
        Ok(answers)
    }

    /// Blocks in a worker's device cache; 0 where the profile leaves that to the engine.
    #[must_use]
    pub fn device_blocks(&self) -> u64 {
        u64::from(self.config.profile.engine.device_blocks.unwrap_or(0))
    }

    /// Pages in a worker's host tier.
    ///
    /// # Errors
    /// Inconclusive, if the size of a page is neither configured nor to be learnt.
    pub async fn host_blocks(&mut self, index: usize) -> Result<u64, Failure> {
        let page = self.page_bytes(index).await?;
        Ok(self.config.profile.kvcr.primary_bytes / page)
    }

    pub(super) fn worker(&self, index: usize) -> Result<WorkerInfo, Failure> {
        self.stack.workers.get(index).cloned().ok_or_else(|| {
            Failure::environment(format!("the arm needs worker {index}"))
                .expected(format!("at least {} workers", index + 1))
                .found(self.stack.workers.len())
                .hint("set topology.workers in the profile")
        })
    }
}

/// Tokens that a flood may have: an hour of prefill on a fast device.
const FLOOD: u64 = 100_000_000;

/// Caches that would take hours to go through are the profile's fault.
fn sendable(blocks: u64, count: u64, tokens: u64) -> Result<(), Failure> {
    let all = count.saturating_mul(tokens);
    if all <= FLOOD {
        return Ok(());
    }
    Err(
        Failure::environment(format!("caches of {blocks} blocks cannot be gone through"))
            .expected(format!("at most {FLOOD} tokens of fillers"))
            .found(format!("{all} tokens"))
            .hint("make them smaller: --device-blocks, --primary-bytes, --dram-slots"),
    )
}

/// How many fillers of how many blocks fill `blocks` blocks, none longer than `longest`: as few as
/// can be, and all alike, so that little is sent in vain.
fn portions(blocks: u64, longest: u64) -> (usize, u64) {
    let longest = longest.max(1);
    let count = blocks.div_ceil(longest);
    let each = blocks.div_ceil(count.max(1));
    (usize::try_from(count).unwrap_or(usize::MAX), each)
}

/// A prompt that the engine must refuse is the profile's fault, not the product's.
fn fits(label: &str, prompt: &Prompt, answer: u32, profile: &Profile) -> Result<(), Failure> {
    let (wanted, room) = (
        prompt.tokens() + answer as usize,
        profile.engine.max_model_len,
    );
    if wanted <= room as usize {
        return Ok(());
    }
    Err(
        Failure::environment(format!("prompt `{label}` does not fit into a sequence"))
            .expected(format!("engine.max_model_len of at least {wanted}"))
            .found(room)
            .hint("raise it (--max-model-len), or use smaller blocks (--block-tokens)"),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::testing::cpu;

    #[test]
    fn caches_without_end_are_the_profiles_fault() {
        assert_eq!(sendable(204, 3, 5_024), Ok(()));
        let text = sendable(u64::from(u32::MAX), 134_217_728, 2_080)
            .unwrap_err()
            .to_string();
        assert!(
            text.starts_with("Environment: caches of 4294967295 blocks"),
            "{text}"
        );
    }

    #[test]
    fn a_flood_is_few_fillers_and_all_alike() {
        assert_eq!(portions(232, 100), (3, 78));
        assert_eq!(portions(204, 100), (3, 68));
        assert_eq!(portions(100, 100), (1, 100));
        assert_eq!(portions(0, 100), (0, 0));
        assert_eq!(portions(3, 0), (3, 1));
    }

    proptest! {
        #[test]
        fn a_flood_fills_what_it_is_for(blocks in 0_u64..10_000, longest in 1_u64..500) {
            let (count, each) = portions(blocks, longest);
            let filled = count as u64 * each;
            prop_assert!(each <= longest);
            prop_assert!(filled >= blocks && filled < blocks + count.max(1) as u64);
        }
    }

    #[test]
    fn a_prompt_that_is_too_long_is_the_profiles_fault() {
        let profile = cpu(&["--max-model-len", "100", "--max-tokens", "16"]).profile;
        let prompt = |tokens: usize| Prompt {
            ids: vec![7; tokens],
            text: String::new(),
            sha256: String::new(),
        };
        assert_eq!(fits("long", &prompt(84), 16, &profile), Ok(()));
        let text = fits("long", &prompt(85), 16, &profile)
            .unwrap_err()
            .to_string();
        assert!(
            text.starts_with("Environment: prompt `long` does not fit"),
            "{text}"
        );
        assert!(text.contains("at least 101; found 100;"), "{text}");
    }
}
