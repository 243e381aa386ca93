//! Rounds of measurements: each way once in each, in the order of a seeded design.

use super::{Way, addressed, room};
use crate::cases::flow::Flow;
use crate::cases::scene::Scene;
use crate::cases::scene::streamed::Whom;
use crate::cases::seed::{labelled, seed_each};
use crate::cases::takeover::{VICTIM, WITNESS};
use crate::client::Observation;
use crate::evidence::Measured;
use crate::failure::Failure;
use crate::performance::judge;
use crate::performance::order::Order;
use crate::performance::sample::Sample;
use crate::prompt::Prompt;
use crate::telemetry::kvcr::{self, Operation};

/// Length of a measured prompt: its last block is not full, so that a hit leaves something to do.
pub(super) fn length(scene: &Scene<'_>) -> u64 {
    let blocks = scene.config().profile.performance.blocks;
    scene.tokens(u64::from(blocks)) + scene.tokens(1) / 2
}

/// What is measured, and what was.
#[derive(Debug)]
pub(super) struct Rounds {
    order: Order,
    /// One a round: the same for all ways of it, so that nothing differs but the way.
    prompts: Vec<(String, Prompt)>,
    samples: Vec<Sample>,
}

impl Rounds {
    /// As many rounds as the profile says, of these ways.
    pub(super) fn new(scene: &mut Scene<'_>, ways: &[Way]) -> Result<Self, Failure> {
        let performance = &scene.config().profile.performance;
        let order = Order::new(
            ways,
            performance.repeats,
            performance.warm_up,
            performance.seed,
        );
        let prompts = (0..order.rounds.len())
            .map(|round| {
                let label = format!("round{round}");
                let prompt = scene.prompt(&label, length(scene));
                (label, prompt)
            })
            .collect();
        scene.unpinned("how many prompts there are is the run's to say");
        Ok(Self {
            order,
            prompts,
            samples: Vec::new(),
        })
    }

    pub(super) fn count(&self) -> usize {
        self.order.rounds.len()
    }

    /// Asks what is right, before anything is measured.
    pub(super) async fn ask_reference(&self, scene: &mut Scene<'_>) -> Result<(), Failure> {
        scene.reference(&labelled(&self.prompts)).await
    }

    /// Has worker 0 compute the prompt of `round`, and waits until the router knows.
    pub(super) async fn seed_peer(
        &self,
        scene: &mut Scene<'_>,
        round: usize,
    ) -> Result<(), Failure> {
        let known = scene.router_events().await?;
        let (_, salt) = addressed(scene, Way::Peer, round);
        let seen = self.seed(scene, Way::Peer, VICTIM, salt, round).await?;
        let blocks = scene.blocks().full(seen.prompt_tokens);
        scene.router_knows(known, blocks).await
    }

    /// Has worker 0 compute every prompt, and waits until the router knows: its Guard will serve
    /// them.
    pub(super) async fn seed_guarded(&self, scene: &mut Scene<'_>) -> Result<(), Failure> {
        seed_each(scene, &labelled(&self.prompts), VICTIM).await
    }

    /// Has worker 1 compute the prompt of `round`, and pushes it out of the engine's own caches.
    pub(super) async fn seed_local(
        &self,
        scene: &mut Scene<'_>,
        round: usize,
    ) -> Result<(), Failure> {
        let (_, salt) = addressed(scene, Way::Local, round);
        self.seed(scene, Way::Local, WITNESS, salt, round).await?;
        let label = format!("round{round}.filler");
        scene.evict(&label, WITNESS, room::SPARE).await
    }

    async fn seed(
        &self,
        scene: &mut Scene<'_>,
        way: Way,
        worker: usize,
        salt: Option<String>,
        round: usize,
    ) -> Result<Observation, Failure> {
        let (label, prompt) = &self.prompts[round];
        let asked = format!("{label}.{way}.seed");
        let (seen, _) = scene
            .stream(&asked, prompt, Whom::Worker(worker), salt)
            .await?;
        scene.hit(&seen, 0..=0);
        Ok(seen)
    }

    /// Measures every way of `round`, and checks that each was what it claims; `workers` are those
    /// that live.
    pub(super) async fn measure(
        &mut self,
        scene: &mut Scene<'_>,
        round: usize,
        workers: &[usize],
    ) -> Result<(), Failure> {
        let (label, prompt) = self.prompts[round].clone();
        let reused = scene.reference_reused(&label)?;
        let blocks = scene.blocks();
        let before = scene
            .counters_of(workers, &format!("{label}.before"))
            .await?;
        let (mut target, mut source) = (Flow::default(), Flow::default());
        let first = self.samples.len();
        for (position, way) in self.order.rounds[round]
            .arms
            .clone()
            .into_iter()
            .enumerate()
        {
            let (whom, salt) = addressed(scene, way, round);
            let asked = format!("{label}.{way}");
            let (seen, streamed) = scene.stream(&asked, &prompt, whom, salt).await?;
            scene.answers_as_reference(&label, &seen);
            match way {
                Way::Off | Way::Cold => scene.hit(&seen, 0..=0),
                Way::Local | Way::Peer | Way::Guard => scene.hit_as_reused(&seen, reused),
            }
            match way {
                Way::Off => {}
                Way::Cold => target += Flow::cold(&seen, blocks),
                Way::Local => target += Flow::delivered(&seen, reused, blocks),
                Way::Peer | Way::Guard => target += Flow::fetched(&seen, reused, blocks),
            }
            if way == Way::Peer {
                source += Flow::written(reused, blocks);
            }
            let warm_up = self.order.rounds[round].warm_up;
            let ms = |ns: u64| ns as f64 / 1e6;
            self.samples.push(Sample {
                arm: way,
                round,
                position,
                warm_up,
                ttft_ms: streamed.ttft_ns().map_or(0.0, ms),
                itl_ms: streamed.itls_ns().map(ms).collect(),
                end_to_end_ms: streamed.end_to_end_ns().map_or(0.0, ms),
                prompt_tokens: seen.prompt_tokens,
                tokens: seen.completion_tokens,
                cached_tokens: seen.cached_tokens,
                blocks: None,
            });
        }
        let deltas = scene.since(&before, &label).await?;
        let mut checks = target.checks(WITNESS, deltas.worker(WITNESS), blocks);
        if workers.contains(&VICTIM) {
            checks.extend(source.checks(VICTIM, deltas.worker(VICTIM), blocks));
        }
        for check in &mut checks {
            check.name = format!("{label}.{}", check.name);
        }
        scene.checks(checks);
        for sample in &mut self.samples[first..] {
            // One of each in a round, so what the round's counters say of a kind is its.
            let operation = match sample.arm {
                Way::Off | Way::Cold => continue,
                Way::Local => Operation::LocalDeliver,
                Way::Peer | Way::Guard => Operation::RemoteDeliver,
            };
            sample.blocks = kvcr::blocks(deltas.worker(WITNESS), operation)
                .reading
                .exact();
        }
        Ok(())
    }

    /// Writes down what was measured, says it, and judges it where that is fair.
    pub(super) fn conclude(&self, scene: &mut Scene<'_>) -> Result<(), Failure> {
        let profile = &scene.config().profile;
        let judged = judge::judge(&self.samples, &profile.performance);
        let setting = format!(
            "{}, {} blocks of {} tokens",
            scene.config().profile_name,
            profile.performance.blocks,
            profile.engine.block_tokens
        );
        scene.keep_measured(&Measured {
            order: &self.order,
            samples: &self.samples,
            report: &judged.report,
            setting: &setting,
        })?;
        for note in judged.notes {
            scene.note(note);
        }
        scene.checks(judged.checks);
        Ok(())
    }
}
