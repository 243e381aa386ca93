//! What a story may use: ask a worker, ask the reference, read counters, leave checks.
//!
//! Everything a story sees is written to its evidence on the way, and every wait on the product is
//! timed, so that what remains is the harness's own share.

mod counters;
pub mod harm;
mod listing;
mod oracle;
mod requests;
pub mod streamed;

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use super::Arm;
use crate::client::Client;
use crate::client::stream::Streams;
use crate::config::Config;
use crate::config::profile::Tc02;
use crate::evidence::ArmDir;
use crate::evidence::result::{RequestLine, Timings};
use crate::failure::Failure;
use crate::gate::Wants;
use crate::geometry::Geometry;
use crate::plan::Serves;
use crate::prompt::{Key, Prompt, Prompts, Section};
use crate::reference::{Answer, Kept};
use crate::stack::lease::Lease;
use crate::stack::protocol::{ProcessInfo, StackInfo, WorkerInfo};
use crate::telemetry::settle::Settled;
use crate::telemetry::{Delta, Scrape, Scraper, kvcr};
use crate::verdict::Check;

/// The most for one page of counters; a stalled machine answers late, not never.
const SCRAPE_DEADLINE: Duration = Duration::from_secs(60);

/// What a model from elsewhere has to be described with.
const GEOMETRY_FLAGS: &str = "--hit-block-tokens, --ssm-groups and --page-bytes";

/// Everything one arm works with.
#[derive(Debug)]
pub struct Scene<'a> {
    config: &'a Config,
    stack: StackInfo,
    lease: &'a Lease,
    arm: &'static Arm,
    prompts: Prompts,
    blocks: Geometry,
    salt: String,
    client: Client,
    streams: Streams,
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
    /// Why the reference cannot have been pinned, where it cannot.
    pub unpinned: Option<String>,
    /// Processes that were started while the story went on: their logs count too.
    pub started: Vec<ProcessInfo>,
    /// Log lines that have to come: whose, and a word of the line. They are noted, and alarm
    /// nobody.
    pub expected_lines: Vec<(String, String)>,
}

/// Counters of several workers at one moment.
#[derive(Debug)]
pub struct Counters {
    workers: Vec<WorkerInfo>,
    settled: Settled,
    /// Of who decodes for them.
    decode: Option<Scrape>,
}

impl Counters {
    fn indices(&self) -> Vec<usize> {
        self.workers.iter().map(|worker| worker.index).collect()
    }

    /// What a worker's page says of `resource` (`local_g2_allocated_slots`), if it was read.
    #[must_use]
    pub fn state(&self, worker: usize, resource: &str) -> Option<u64> {
        let at = self.indices().iter().position(|index| *index == worker)?;
        kvcr::state(&self.settled.scrapes.get(at)?.page, resource).exact()
    }
}

/// What the counters of several workers did, by index.
#[derive(Debug)]
pub struct Deltas(Vec<(usize, Delta)>);

impl Deltas {
    /// Of one worker.
    ///
    /// # Panics
    /// If it was not among those that were read: a story asks only for those it was given.
    #[must_use]
    pub fn worker(&self, index: usize) -> &Delta {
        let found = self.0.iter().find(|(of, _)| *of == index);
        &found.expect("a worker whose counters were read").1
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
        arm: &'static Arm,
        dir: ArmDir,
    ) -> Result<Self, Failure> {
        let stack = lease.stack().clone();
        let deadline = Duration::from_secs(config.profile.request.deadline_seconds);
        let blocks = Geometry::of(&config.profile);
        let mut told = Told {
            unpinned: unpinned(config, arm, stack.variant),
            ..Told::default()
        };
        if !blocks.is_exact() {
            told.notes.push(format!(
                "pages and bytes are lower bounds; {GEOMETRY_FLAGS} of the model make them exact"
            ));
        }
        Ok(Self {
            told,
            prompts: Prompts::new(model)?,
            blocks,
            // New with every lease: the same prompt is cold again on a warm stack.
            salt: format!(
                "{}-{}-{}-{}",
                config.run_id, stack.generation, arm.name, stack.variant
            ),
            client: Client::new(&stack.plan.frontend_url, deadline)?,
            streams: Streams::new(&stack.plan.frontend_url, deadline)?,
            scraper: Scraper::new(SCRAPE_DEADLINE.min(deadline))?,
            kept: Kept::new(&stack.reference_dir),
            config,
            stack,
            lease,
            arm,
            dir,
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

    /// How the engine lays out its KV cache.
    #[must_use]
    pub fn blocks(&self) -> Geometry {
        self.blocks
    }

    /// Workers under test.
    #[must_use]
    pub fn workers(&self) -> usize {
        let workers = self.stack.workers.iter();
        workers
            .filter(|worker| worker.serves != Serves::Decode)
            .count()
    }

    /// Who decodes for them, where they do not themselves.
    #[must_use]
    pub fn decode(&self) -> Option<&WorkerInfo> {
        let mut workers = self.stack.workers.iter();
        workers.find(|worker| worker.serves == Serves::Decode)
    }

    /// Tokens in `blocks` blocks.
    #[must_use]
    pub fn tokens(&self, blocks: u64) -> u64 {
        self.blocks.tokens_of(blocks)
    }

    /// The prompt called `label` of this arm, `tokens` long: the same in every run, so that its
    /// reference can be pinned. An arm without a salt has another one with every lease of a stack.
    #[must_use]
    pub fn prompt(&self, label: &str, tokens: u64) -> Prompt {
        self.prompts.cold(self.key(label), length(tokens))
    }

    /// A prompt of sections, each a name and its tokens: prompts of one arm share their equal
    /// leading sections, to the token.
    #[must_use]
    pub fn sections(&self, sections: &[(&str, u64)]) -> Prompt {
        let sections: Vec<Section<'_>> = sections
            .iter()
            .map(|(name, tokens)| Section {
                name,
                tokens: length(*tokens),
            })
            .collect();
        self.prompts.sections(self.key("sections"), &sections)
    }

    /// Prompt `number` of a flood that pushes others out of a cache; `label` tells several floods of
    /// one arm apart.
    #[must_use]
    pub fn filler(&self, label: &str, number: u64, tokens: u64) -> Prompt {
        self.prompts.filler(self.key(label), number, length(tokens))
    }

    /// `tokens` tokens, of which the first `keep` are those of `prefix`; `tail` tells several of
    /// them apart.
    #[must_use]
    pub fn related(&self, prefix: &Prompt, keep: u64, tail: u64, tokens: u64) -> Prompt {
        let keep = length(keep).min(prefix.tokens());
        self.prompts
            .extend(prefix, keep, tail, length(tokens).saturating_sub(keep))
    }

    fn key<'k>(&self, label: &'k str) -> Key<'k> {
        Key {
            case: self.arm.name,
            arm: label,
            // Without a salt only another prompt is cold again on a warm stack.
            variant: if self.is_salted() {
                0
            } else {
                self.stack.variant
            },
        }
    }

    /// Whether prompts are the same in every run, and a salt makes them cold. Where the router has
    /// to hint in spite of a state agent there can be none.
    #[must_use]
    pub fn is_salted(&self) -> bool {
        self.arm.wants.salted(&self.config.profile)
    }

    fn asked_salt(&self) -> Option<String> {
        self.is_salted().then(|| self.salt.clone())
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
}

/// Why the arm's reference cannot be compared with a pin, where it cannot.
fn unpinned(config: &Config, arm: &Arm, variant: u64) -> Option<String> {
    if !arm.wants.salted(&config.profile) && variant > 0 {
        return Some("its prompts are new with every lease".to_owned());
    }
    let resized = arm.wants == Wants::States && config.profile.tc02 != Tc02::default();
    resized.then(|| "its prompts have other sizes than what is pinned".to_owned())
}

/// No sequence is longer, so whoever asks for more is refused with this many; but it is not made of
/// a profile's typing error that memory runs out first.
const LONGEST: u64 = 1 << 24;

fn length(tokens: u64) -> usize {
    usize::try_from(tokens.min(LONGEST)).unwrap_or(usize::MAX)
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
