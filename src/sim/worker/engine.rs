//! The engine: finds what it holds of a prompt, computes the rest, and generates from the bytes
//! it then has. Surfaces are elsewhere ([`super::http`], [`super::events`], [`super::page`]).

use std::collections::{HashMap, HashSet, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::host::HostTier;
use super::lru::Lru;
use super::meters::Ended;
use super::own::{OwnTier, Page, Surroundings, attention};
use super::prefix::Prefix;
use crate::sim::fault::Fault;
use crate::sim::kvcr::target::Target;
use crate::sim::model::{Group, Held, Key, Shape, block_hashes};
use crate::sim::wire::{Cache, Generate, Handover, Reply, Role};

/// What an engine is made of.
pub struct Parts {
    /// Shape of the model.
    pub shape: Shape,
    /// Its weights.
    pub weights: u64,
    /// Tokens of a block.
    pub block_tokens: usize,
    /// Bytes of a page.
    pub page_bytes: usize,
    /// Longest sequence, in tokens.
    pub max_model_len: usize,
    /// Blocks of the device cache.
    pub device_blocks: usize,
    /// Whether prefixes are cached.
    pub prefix_caching: bool,
    /// Whether any block of a hinted request counts as there.
    pub opportunistic_query: bool,
    /// What it is for.
    pub role: Role,
    /// The engine's own host tier.
    pub host: Option<HostTier>,
    /// KVCR's own pool.
    pub own: Option<OwnTier>,
    /// KVCR's way to peers.
    pub target: Option<Target>,
    /// Discovery directory and the own control endpoint: where a peer is found without a hint.
    pub peers: Option<(PathBuf, String)>,
    /// Where a decode engine gets pages from.
    pub address: String,
    /// Counters, lies, latencies, events.
    pub around: Surroundings,
}

/// An engine.
pub struct Engine {
    pub(super) parts: Parts,
    pub(super) device: Mutex<Lru<Page>>,
    /// How often each prefix was asked for.
    visits: Mutex<HashSet<u64>>,
    /// Whose turn it is to ask a peer for a prompt, by its first block.
    turns: Mutex<HashMap<u64, Arc<tokio::sync::Mutex<()>>>>,
    pub(super) handovers: Mutex<VecDeque<(String, Vec<Page>)>>,
    running: Mutex<i64>,
    asked: AtomicBool,
    restarted: AtomicBool,
    pub(super) http: reqwest::Client,
}

/// What is held of a prompt, and whose merit that is.
pub(super) struct Prefilled {
    /// What the next token follows from.
    pub(super) held: Held,
    /// Attention pages of every full block, then the state pages after the last of them.
    pub(super) pages: Vec<Page>,
    /// Pages that this request computed.
    pub(super) computed: Vec<(Key, Page)>,
    /// Whether the same prompt was asked before.
    pub(super) again: bool,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// An engine that holds nothing yet.
    pub fn new(parts: Parts) -> Arc<Self> {
        Arc::new(Self {
            device: Mutex::new(Lru::new(parts.device_blocks)),
            parts,
            visits: Mutex::default(),
            turns: Mutex::default(),
            handovers: Mutex::default(),
            running: Mutex::new(0),
            asked: AtomicBool::new(false),
            restarted: AtomicBool::new(false),
            http: reqwest::Client::new(),
        })
    }

    /// Whether it was ever asked anything.
    pub fn asked(&self) -> bool {
        self.asked.load(Ordering::Relaxed)
    }

    /// The host tier's file stays behind.
    pub fn leak(&self) {
        if let Some(host) = &self.parts.host {
            host.leak();
        }
    }

    /// Takes leave of the machine: nothing stays in `/dev/shm`.
    pub fn close(&self) {
        if let Some(host) = &self.parts.host {
            host.close();
        }
    }

    /// The pages of a prompt that a decode engine comes for, once.
    pub fn take_handover(&self, request_id: &str) -> Option<Vec<Page>> {
        let mut handovers = lock(&self.handovers);
        let at = handovers.iter().position(|(id, _)| id == request_id)?;
        handovers.remove(at).map(|(_, pages)| pages)
    }

    /// Answers one request. Ends early when nobody listens to `replies` any more.
    pub async fn generate(&self, request: Generate, replies: mpsc::Sender<Reply>) {
        self.asked.store(true, Ordering::Relaxed);
        if let Err(message) = self.check(&request) {
            let status = 400;
            drop(replies.send(Reply::Failed { status, message }).await);
            return;
        }
        let meters = &self.parts.around.meters;
        let began = Instant::now();
        let mut ended = Ended {
            prompt: request.tokens.len() as u64,
            max_tokens: u64::from(request.max_tokens),
            ..Ended::default()
        };
        self.running(1);
        let outcome = tokio::select! {
            outcome = self.answer(&request, &replies, began, &mut ended) => outcome,
            () = replies.closed() => None,
        };
        self.running(-1);
        ended.took = began.elapsed();
        ended.aborted = outcome.is_none();
        meters.finished(&ended);
        let cached = ended.device + ended.host + ended.external;
        if cached > 0
            && self.parts.around.faults.on(Fault::CounterReset)
            && !self.restarted.swap(true, Ordering::Relaxed)
        {
            meters.restart();
        }
        if let Some(last) = outcome {
            drop(replies.send(last).await);
        }
    }

    fn check(&self, request: &Generate) -> Result<(), String> {
        let (prompt, limit) = (request.tokens.len(), self.parts.max_model_len);
        let wanted = request.max_tokens as usize;
        if prompt == 0 {
            return Err("The prompt is empty".to_owned());
        }
        if wanted == 0 {
            return Err("max_tokens must be at least 1, got 0.".to_owned());
        }
        if prompt.saturating_add(wanted) > limit {
            return Err(format!(
                "This model's maximum context length is {limit} tokens. However, you requested {wanted} output tokens and your prompt contains {prompt} input tokens."
            ));
        }
        Ok(())
    }

    fn running(&self, by: i64) {
        let mut running = lock(&self.running);
        *running += by;
        self.parts.around.meters.running(*running);
    }

    /// All of an answer but its last line; `None` if the client went away.
    async fn answer(
        &self,
        request: &Generate,
        replies: &mpsc::Sender<Reply>,
        began: Instant,
        ended: &mut Ended,
    ) -> Option<Reply> {
        if self.parts.around.faults.on(Fault::HangsAlone) {
            // It looks for its service ten times a second: whoever asks it once the service is gone
            // is to meet the lie, not to overtake it.
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
        }
        let prefilled = match &request.handover {
            Some(handover) => match self.handed_over(request, handover, ended).await {
                Ok(prefilled) => prefilled,
                Err(message) => {
                    return Some(Reply::Failed {
                        status: 500,
                        message,
                    });
                }
            },
            None => self.prefill(request, replies, ended).await,
        };
        let handover = (self.parts.role == Role::Prefill).then(|| {
            self.keep_for_decode(&request.request_id, prefilled.pages.clone());
            Handover {
                address: self.parts.address.clone(),
                request_id: request.request_id.clone(),
                blocks: (request.tokens.len() / self.parts.block_tokens) as u64,
            }
        });
        let max_tokens = if handover.is_some() {
            1
        } else {
            request.max_tokens
        };
        self.decode(request, prefilled, max_tokens, replies, began, ended)
            .await?;
        Some(Reply::Done {
            finish_reason: "length".to_owned(),
            prompt_tokens: ended.prompt,
            completion_tokens: ended.generated,
            cached_tokens: self.said_to_be_cached(ended),
            handover,
        })
    }

    fn said_to_be_cached(&self, ended: &Ended) -> u64 {
        let faults = &self.parts.around.faults;
        let (cached, block) = (
            ended.device + ended.host + ended.external,
            self.parts.block_tokens as u64,
        );
        if cached == 0 && ended.prompt > block && faults.tell(Fault::FalseHit) {
            return block;
        }
        if cached > 0 && faults.tell(Fault::HitBeyondReference) {
            return cached + block;
        }
        cached
    }

    pub(super) fn nothing_held(&self) -> Held {
        let Parts {
            shape, page_bytes, ..
        } = self.parts;
        let drift = u64::from(self.parts.around.faults.tell(Fault::ModelDrift));
        Held::nothing(self.parts.weights ^ drift, shape, page_bytes)
    }

    pub(super) fn hashes(&self, tokens: &[u32], salt: Option<&str>) -> Vec<u64> {
        let ignored = salt.is_some() && self.parts.around.faults.tell(Fault::SaltIgnored);
        block_hashes(tokens, self.parts.block_tokens, salt.filter(|_| !ignored))
    }

    pub(super) fn state_keys(&self, block: u64) -> impl Iterator<Item = Key> + use<> {
        (0..self.parts.shape.state_groups).map(move |group| Key {
            block,
            group: Group::State(group),
        })
    }

    /// Finds, loads and computes, and puts what is new into the caches in front of KVCR.
    async fn prefill(
        &self,
        request: &Generate,
        replies: &mpsc::Sender<Reply>,
        ended: &mut Ended,
    ) -> Prefilled {
        let Parts {
            block_tokens,
            around,
            ..
        } = &self.parts;
        let tokens = &request.tokens;
        let hashes = self.hashes(tokens, request.cache_salt.as_deref());
        // The last block that the same prompt could reuse from the device.
        let last_reusable = (tokens.len() - 1) / block_tokens;
        let again = self.visit(block_hashes(tokens, tokens.len(), None)[0]);

        let prefix = self.reuse(request, &hashes, replies).await;
        let reused = prefix.blocks();
        ended.device = (prefix.device * block_tokens) as u64;
        ended.host = (prefix.host * block_tokens) as u64;
        ended.external = (prefix.external * block_tokens) as u64;

        let computed_tokens = tokens.len() - reused * block_tokens;
        tokio::time::sleep(around.latency.prefill(computed_tokens as u64)).await;

        let mut held = self.hold(&prefix, tokens);
        if prefix.load_failed && around.faults.tell(Fault::RecomputeWrong) {
            held.take_attention(b"not what was lost");
        }
        let mut pages = prefix.attention;
        let mut states = prefix.states;
        let mut computed = Vec::new();
        let mut before_last = prefix.before_last.filter(|_| reused == hashes.len());
        let all_states = around.faults.on(Fault::StateOverTransfer);
        for (at, block) in tokens.chunks_exact(*block_tokens).enumerate().skip(reused) {
            if at + 1 == hashes.len() {
                before_last = Some(held.clone());
            }
            let mut new = held.compute(block).into_iter().map(Page::from);
            let key = Key::attention(hashes[at]);
            let page = new.next().unwrap_or_default();
            computed.push((key, page.clone()));
            pages.push(page);
            states = new.collect();
            // An engine that is told its block size divides the prompt there, and keeps the state.
            if at + 1 == last_reusable || all_states {
                computed.extend(self.state_keys(hashes[at]).zip(states.iter().cloned()));
            }
        }
        pages.extend(states);
        self.keep(&computed, true);

        let boundary = tokens.len().is_multiple_of(*block_tokens);
        if boundary
            && let Some(before) = before_last
            && around.faults.tell(Fault::BoundaryOffByOne)
        {
            held = before;
        }
        Prefilled {
            held,
            pages,
            computed,
            again,
        }
    }

    /// Waits until nobody else asks a peer for the prompt that begins with `block`: what one fetches
    /// the next finds, as in the real engine.
    pub(super) async fn turn(&self, block: u64) -> tokio::sync::OwnedMutexGuard<()> {
        let turn = {
            let mut turns = lock(&self.turns);
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry(block).or_default())
        };
        turn.lock_owned().await
    }

    /// Whether this was there before; it is now.
    fn visit(&self, what: u64) -> bool {
        !lock(&self.visits).insert(what)
    }

    /// What an engine holds that has loaded `prefix`.
    fn hold(&self, prefix: &Prefix, tokens: &[u32]) -> Held {
        let faults = &self.parts.around.faults;
        let mut held = self.nothing_held();
        for page in &prefix.attention {
            held.take_attention(page);
        }
        if prefix.states.is_empty() || faults.tell(Fault::StatePageMissing) {
            return held;
        }
        let mut states: Vec<Page> = prefix.states.clone();
        if faults.tell(Fault::StateOffByOne) {
            let before = prefix.blocks() - 1;
            let mut recomputed = self.nothing_held();
            states = tokens
                .chunks_exact(self.parts.block_tokens)
                .take(before)
                .map(|block| recomputed.compute(block))
                .last()
                .map(|pages| pages.into_iter().skip(1).map(Page::from).collect())
                .unwrap_or_default();
        }
        for (group, page) in states.iter().enumerate() {
            held.take_state(group, page);
        }
        held
    }

    /// Puts pages into the device cache, and computed ones into the host tier too. The last
    /// block is put in first, so that it goes first: without its beginning a prefix is no use.
    pub(super) fn keep(&self, pages: &[(Key, Page)], computed: bool) {
        let Surroundings { meters, faults, .. } = &self.parts.around;
        if let Some(host) = self.parts.host.as_ref().filter(|_| !pages.is_empty()) {
            // What came from behind the device is there, and is offered all the same.
            let new: Vec<_> = pages
                .iter()
                .filter(|(key, _)| computed && !host.contains(key))
                .collect();
            for (key, page) in new.iter().rev() {
                if let Err(error) = host.put(*key, page) {
                    outln!("ERROR vllm.offloading: host tier: {error}");
                }
            }
            let bytes = new.len() * self.parts.page_bytes;
            meters.offloaded(new.len() as u64, bytes as u64);
        }
        if !self.parts.prefix_caching || pages.is_empty() {
            return;
        }
        let everything = faults.tell(Fault::DeviceNeverEvicts);
        let mut device = lock(&self.device);
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        for (key, page) in pages.iter().rev() {
            if device.get(key).is_none() {
                stored.push(*key);
            }
            if everything {
                device.insert_beyond(*key, page.clone());
            } else if let Some((gone, _)) = device.insert(*key, page.clone())
                && gone != *key
            {
                removed.push(gone);
            }
        }
        stored.retain(|key| device.contains(key));
        let share = device.count() as f64 / self.parts.device_blocks as f64;
        meters.device_usage(share);
        let (stored, removed) = (attention(&stored), attention(&removed));
        self.parts
            .around
            .events
            .publish(Cache::Device, stored, removed);
    }
}

#[cfg(test)]
mod tests;
