//! What a story may use: ask a worker, ask the reference, read counters, leave checks.
//!
//! Everything a story sees is written to its evidence on the way, and every wait on the product is
//! timed, so that what remains is the harness's own share.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Client, Completion, Observation};
use crate::config::{Config, Profile};
use crate::evidence::ArmDir;
use crate::evidence::result::{RequestLine, Timings};
use crate::failure::{Class, Failure};
use crate::geometry::Blocks;
use crate::prompt::{Key, Prompt, Prompts};
use crate::reference::{Answer, Kept, Question};
use crate::stack::lease::Lease;
use crate::stack::protocol::{StackInfo, WorkerInfo};
use crate::telemetry::settle::{Settled, Settling, settle};
use crate::telemetry::{Delta, Scraper, kvcr};
use crate::verdict::{Check, Said};

/// Seconds for one page of counters; a stalled machine answers late, not never.
const SCRAPE_DEADLINE: Duration = Duration::from_secs(60);

/// Everything one arm works with.
#[derive(Debug)]
pub struct Scene<'a> {
    config: &'a Config,
    stack: StackInfo,
    lease: &'a Lease,
    arm: &'static str,
    prompts: Prompts,
    blocks: Blocks,
    salt: String,
    client: Client,
    scraper: Scraper,
    kept: Kept,
    dir: ArmDir,
    told: Told,
}

/// What a story has left behind so far.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Waits so far.
    pub timings: Timings,
    /// Checks so far.
    pub checks: Vec<Check>,
    /// Requests so far.
    pub requests: Vec<RequestLine>,
    /// Findings no check covers.
    pub notes: Vec<String>,
    /// Reference answers, by label.
    pub answers: BTreeMap<String, Answer>,
}

/// Counters of every worker at one moment.
#[derive(Debug)]
pub struct Counters(Settled);

/// What the counters of every worker did, by index.
#[derive(Debug)]
pub struct Deltas(Vec<Delta>);

impl Deltas {
    /// Of one worker.
    ///
    /// # Panics
    /// If there is no such worker: a story asks only for those it was given.
    #[must_use]
    pub fn worker(&self, index: usize) -> &Delta {
        &self.0[index]
    }
}

impl<'a> Scene<'a> {
    /// Sets the scene on a leased stack.
    ///
    /// # Errors
    /// Environment, if the model has no usable tokenizer.
    pub fn set(
        config: &'a Config,
        model: &Path,
        lease: &'a Lease,
        arm: &'static str,
        dir: ArmDir,
    ) -> Result<Self, Failure> {
        let stack = lease.stack().clone();
        let deadline = Duration::from_secs(config.profile.request.deadline_seconds);
        Ok(Self {
            prompts: Prompts::new(model)?,
            blocks: blocks(config)?,
            // New with every lease: the same prompt is cold again on a warm stack.
            salt: format!(
                "{}-{}-{arm}-{}",
                config.run_id, stack.generation, stack.variant
            ),
            client: Client::new(&stack.plan.frontend_url, deadline)?,
            scraper: Scraper::new(SCRAPE_DEADLINE)?,
            kept: Kept::new(&stack.reference_dir),
            config,
            stack,
            lease,
            arm,
            dir,
            told: Told::default(),
        })
    }

    /// What the story left behind.
    #[must_use]
    pub fn told(&self) -> &Told {
        &self.told
    }

    /// The running stack.
    #[must_use]
    pub fn stack(&self) -> &StackInfo {
        &self.stack
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> &Config {
        self.config
    }

    /// Geometry of a KV block.
    #[must_use]
    pub fn blocks(&self) -> Blocks {
        self.blocks
    }

    /// Workers under test.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.stack.workers.len()
    }

    /// Tokens in `blocks` blocks.
    #[must_use]
    pub fn tokens(&self, blocks: u64) -> u64 {
        self.blocks.tokens_of(blocks)
    }

    /// The prompt called `label` of this arm: the same in every run, so that its reference can be
    /// pinned. `tokens` long.
    #[must_use]
    pub fn prompt(&self, label: &str, tokens: u64) -> Prompt {
        self.prompts.cold(self.key(label), length(tokens))
    }

    /// `count` prompts of `tokens` tokens that push others out of a cache.
    #[must_use]
    pub fn fillers(&self, count: usize, tokens: u64) -> Vec<Prompt> {
        self.prompts
            .fillers(self.key("filler"), count, length(tokens))
    }

    fn key<'k>(&self, label: &'k str) -> Key<'k> {
        Key {
            case: self.arm,
            arm: label,
            variant: 0,
        }
    }

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
        let target = self.worker(worker)?;
        let began = Instant::now();
        let result = self
            .send(label, prompt, &target, Some(self.salt.clone()))
            .await;
        self.told.timings.requests += millis(began);
        let seen = result?;
        self.told.requests.push(RequestLine {
            label: label.to_owned(),
            worker: target.process.clone(),
            prompt_tokens: seen.prompt_tokens,
            cached_tokens: seen.cached_tokens,
            wall_ms: seen.wall_ms,
        });
        self.check(Check::equal(
            format!("served_by_pinned_worker[{label}]"),
            Class::Product,
            &Some(target.instance_id),
            &seen.served_by,
        ));
        Ok(seen)
    }

    async fn send(
        &self,
        label: &str,
        prompt: &Prompt,
        target: &WorkerInfo,
        cache_salt: Option<String>,
    ) -> Result<Observation, Failure> {
        let max_tokens = self.config.profile.request.max_tokens;
        fits(label, prompt, max_tokens, &self.config.profile)?;
        let completion = Completion {
            model: target.served_model.clone(),
            prompt: prompt.input(),
            max_tokens,
            ignore_eos: true,
            worker: Some(target.instance_id),
            cache_salt,
        };
        let result = self.client.complete(&completion, label).await;
        let answered = match &result {
            Ok(seen) => json!({"observation": seen}),
            Err(failure) => json!({"failure": failure.to_string()}),
        };
        self.dir.json(
            &format!("requests/{}.json", file_name(&target.process, label)),
            &json!({"asked": completion, "text": prompt.text, "sha256": prompt.sha256, "answered": answered}),
        )?;
        result.map_err(Failure::from)
    }

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
        let began = Instant::now();
        let started = self.lease.reference().await;
        self.told.timings.reference_start += millis(began);
        let (reference, _) = started?;

        let began = Instant::now();
        let salt = Some(self.salt.clone());
        let mut pair = Vec::with_capacity(2);
        for state in ["cold", "warm"] {
            let label = format!("{}.{state}", question.label);
            pair.push(
                self.send(&label, &question.prompt, &reference, salt.clone())
                    .await,
            );
        }
        self.told.timings.reference_requests += millis(began);
        let [cold, warm] = <[_; 2]>::try_from(pair).expect("two states");
        let answer = Answer::from_pair(&question.prompt, &cold?, &warm?);
        self.kept.keep(question, &answer)?;
        Ok(answer)
    }

    /// Checks that an answer is the reference's, token by token. Where the reference disagreed
    /// with itself nothing can be said, and the check is Inconclusive.
    pub fn answers_as_reference(&mut self, label: &str, seen: &Observation) {
        let Some(reference) = self.told.answers.get(label) else {
            self.check(Check::new(
                format!("tokens_equal_reference[{}]", seen.label),
                Class::Inconclusive,
                false,
                "an answer of the reference",
                format_args!("none to `{label}`"),
            ));
            return;
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
        self.check(check);
    }

    /// Tokens the reference itself reused when it was asked again.
    #[must_use]
    pub fn reference_reused(&self, label: &str) -> Option<u64> {
        self.told.answers.get(label)?.reused_tokens
    }

    /// Reads every worker's counters once they stand still, and keeps the raw pages under `name`.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn counters(&mut self, name: &str) -> Result<Counters, Failure> {
        let urls: Vec<String> = self
            .stack
            .workers
            .iter()
            .map(|worker| worker.metrics_url.clone())
            .collect();
        let settling = Settling::idle(self.config.profile.kvcr.abandon_timeout_ms);
        let began = Instant::now();
        let settled = settle(&self.scraper, &urls, settling).await;
        self.told.timings.settle += millis(began);
        let settled = settled?;
        for (worker, scrape) in self.stack.workers.iter().zip(&settled.scrapes) {
            let file = format!("metrics/{}.prom", file_name(&worker.process, name));
            self.dir.text(&file, &scrape.raw)?;
        }
        Ok(Counters(settled))
    }

    /// What the counters did since `before`; leaves a check for every invariant that broke.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn since(&mut self, before: &Counters, name: &str) -> Result<Deltas, Failure> {
        let after = self.counters(name).await?;
        let deltas: Vec<Delta> = before
            .0
            .scrapes
            .iter()
            .zip(&after.0.scrapes)
            .map(|(before, after)| Delta::between(&before.page, &after.page))
            .collect();
        for (worker, delta) in self.stack.workers.clone().iter().zip(&deltas) {
            for failure in kvcr::invariants(delta, Some(self.blocks.bytes)) {
                let mut check = Check::from(&failure);
                check.name = format!("{}[{}.{name}]", check.name, worker.process);
                self.check(check);
            }
            self.no_bad_endings(&worker.process, name, delta);
        }
        Ok(Deltas(deltas))
    }

    /// No transfer ended other than well.
    fn no_bad_endings(&mut self, process: &str, name: &str, delta: &Delta) {
        let check_name = format!("no_failed_transfer[{process}.{name}]");
        let check = match kvcr::failures(delta) {
            Ok(bad) if bad.is_empty() => {
                Check::new(check_name, Class::Product, true, "none failed", "none")
            }
            Ok(bad) => {
                let list: Vec<String> = bad.iter().map(ToString::to_string).collect();
                Check::new(
                    check_name,
                    Class::Product,
                    false,
                    "none failed",
                    list.join(", "),
                )
            }
            Err(reading) => Check::new(
                check_name,
                Class::Inconclusive,
                false,
                "a readable count",
                reading,
            ),
        };
        self.check(check);
    }

    /// Leaves a check.
    pub fn check(&mut self, check: Check) {
        self.told.checks.push(check);
    }

    /// Leaves several.
    pub fn checks(&mut self, checks: Vec<Check>) {
        self.told.checks.extend(checks);
    }

    /// Leaves a finding that no check covers.
    pub fn note(&mut self, text: impl Into<String>) {
        self.told.notes.push(text.into());
    }

    fn worker(&self, index: usize) -> Result<WorkerInfo, Failure> {
        self.stack.workers.get(index).cloned().ok_or_else(|| {
            Failure::environment(format!("the arm needs worker {index}"))
                .expected(format!("at least {} workers", index + 1))
                .found(self.stack.workers.len())
                .hint("set topology.workers in the profile")
        })
    }
}

fn blocks(config: &Config) -> Result<Blocks, Failure> {
    Blocks::of(&config.profile).ok_or_else(|| {
        let model = &config.profile.model;
        Failure::inconclusive("the size of a KV block is not known")
            .expected("a model that the environment builds: its shape is known")
            .found(match &model.path {
                Some(path) => path.display().to_string(),
                None => format!("model.build = {:?}", model.build.as_deref().unwrap_or("")),
            })
            .hint("use `--model-build dense`")
    })
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

fn length(tokens: u64) -> usize {
    usize::try_from(tokens).unwrap_or(usize::MAX)
}

fn millis(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1000.0
}

fn file_name(process: &str, label: &str) -> String {
    format!("{process}-{label}")
        .chars()
        .map(|c| {
            if c.is_ascii_alphanumeric() || "-_.".contains(c) {
                c
            } else {
                '_'
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::cpu;

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
