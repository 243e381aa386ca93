//! KVCR behind the engine: its own pool, filled behind the requests' backs and read on a hit.
//! Peers are asked by the engine itself; a pool is served to peers by `sim::kvcr`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::events::Events;
use super::gauges::{Gauges, Operation};
use super::meters::Meters;
use crate::sim::fault::{Fault, Faults};
use crate::sim::kvcr::Telemetry;
use crate::sim::kvcr::pool::Pool;
use crate::sim::model::{Group, Key};
use crate::sim::settings::Latency;
use crate::sim::wire::Cache;

/// A page that is shared between caches.
pub type Page = Arc<[u8]>;

/// Longest wait before a fill: a client that scrapes right after its answer finds it settled.
const FILL_WAIT: Duration = Duration::from_millis(5);

/// Requests whose fills are waited for together.
const BATCH: usize = 256;

/// What the tier needs of its engine.
#[derive(Clone, Debug)]
pub struct Surroundings {
    /// Counts.
    pub meters: Meters,
    /// Lies.
    pub faults: Arc<Faults>,
    /// How long things take.
    pub latency: Latency,
    /// Whom changes are told.
    pub events: Events,
    /// Shared with whoever else starts KVCR's operations.
    pub gauges: Arc<Gauges>,
}

/// KVCR's own pool as the engine sees it.
pub struct OwnTier {
    pool: Arc<Pool>,
    around: Surroundings,
    fills: mpsc::UnboundedSender<Fill>,
}

struct Fill {
    pages: Vec<(Key, Page)>,
    operation: Operation,
}

impl OwnTier {
    /// A tier of `pool`, whatever is in it already. Starts the task that fills it; needs a
    /// runtime.
    pub fn start(pool: Arc<Pool>, around: Surroundings) -> Self {
        let (fills, mut jobs) = mpsc::unbounded_channel::<Fill>();
        around.meters.pool(pool.len(), pool.slots());
        around
            .events
            .publish(Cache::Kvcr, attention(&pool.keys()), Vec::new());
        let (filled, told) = (pool.clone(), around.clone());
        tokio::spawn(async move {
            let mut batch = Vec::new();
            while jobs.recv_many(&mut batch, BATCH).await > 0 {
                let pages: usize = batch.iter().map(|fill: &Fill| fill.pages.len()).sum();
                let wait = told.latency.load(pages as u64).min(FILL_WAIT);
                tokio::time::sleep(wait).await;
                for Fill { pages, operation } in batch.drain(..) {
                    store(&filled, &told, pages);
                    drop(operation);
                }
            }
        });
        Self {
            pool,
            around,
            fills,
        }
    }

    /// Whether a page is there.
    pub fn contains(&self, key: &Key) -> bool {
        self.pool.contains(key)
    }

    /// Stores pages, soon and in order. Those that are there already are left alone.
    pub fn fill(&self, pages: Vec<(Key, Page)>) {
        if !pages.is_empty() {
            let operation = self.around.gauges.begin();
            // The task lives as long as the runtime.
            drop(self.fills.send(Fill { pages, operation }));
        }
    }

    /// Reads pages that are there, counts them, and says what it will of them. `None`: the load
    /// failed, and has been counted so.
    pub fn deliver(&self, keys: &[Key]) -> Option<Vec<Vec<u8>>> {
        let began = Instant::now();
        let _operation = self.around.gauges.begin();
        let Surroundings { meters, faults, .. } = &self.around;
        let fails = faults.tell(Fault::DeliverFailed) || faults.on(Fault::RecomputeWrong);
        let pages: Option<Vec<Vec<u8>>> = keys
            .iter()
            .map(|key| self.pool.get(key).ok().flatten())
            .collect();
        let Some(mut pages) = pages.filter(|_| !fails) else {
            meters.ended("local_deliver", "failed", began.elapsed());
            meters.job_failed(true);
            return None;
        };
        self.lie(keys, &mut pages);
        let bytes = pages.iter().map(Vec::len).sum::<usize>() as u64;
        meters.moved("local_deliver", pages.len() as u64, Some(bytes));
        meters.ended("local_deliver", "success", began.elapsed());
        meters.read_from_kvcr(bytes);
        Some(pages)
    }

    fn lie(&self, keys: &[Key], pages: &mut [Vec<u8>]) {
        let faults = &self.around.faults;
        let Some(first) = pages.first_mut() else {
            return;
        };
        if faults.tell(Fault::CorruptBlock)
            && let Some(byte) = first.first_mut()
        {
            *byte ^= 1;
        }
        if faults.tell(Fault::StaleBlock) {
            let other = self.pool.keys().into_iter().find(|key| *key != keys[0]);
            let other = other.and_then(|key| self.pool.get(&key).ok().flatten());
            *first = other.unwrap_or_else(|| vec![0; first.len()]);
        }
        if faults.tell(Fault::TruncatedBlock) {
            let half = first.len() / 2;
            first[half..].fill(0);
        }
        if faults.tell(Fault::MissingBlock) {
            first.fill(0);
        }
        if pages.len() > 1 && faults.tell(Fault::SwapBlocks) {
            pages.swap(0, 1);
        }
    }
}

/// Block hashes of the attention pages among `keys`.
pub fn attention<'a>(keys: impl IntoIterator<Item = &'a Key>) -> Vec<u64> {
    keys.into_iter()
        .filter(|key| key.group == Group::Attention)
        .map(|key| key.block)
        .collect()
}

fn store(pool: &Pool, around: &Surroundings, pages: Vec<(Key, Page)>) {
    let began = Instant::now();
    let Surroundings {
        meters,
        faults,
        events,
        ..
    } = around;
    let new: Vec<_> = pages
        .into_iter()
        .filter(|(key, _)| !pool.contains(key))
        .collect();
    if new.is_empty() || faults.tell(Fault::FillSilent) {
        return;
    }
    let failed = |took| {
        meters.ended("local_fill", "failed", took);
        meters.job_failed(false);
    };
    if faults.tell(Fault::FillFailed) {
        failed(began.elapsed());
        return;
    }
    let mut removed = Vec::new();
    if !faults.tell(Fault::FillLost) {
        for (key, page) in &new {
            match pool.fill(*key, page) {
                Ok(evicted) => removed.extend(evicted),
                Err(error) => {
                    outln!("WARNING kvcr.local_dram: KVCR local fill failed: {error}");
                    failed(began.elapsed());
                    return;
                }
            }
        }
    }
    let stored = attention(new.iter().map(|(key, _)| key));
    events.publish(Cache::Kvcr, stored, attention(&removed));
    let times = if faults.tell(Fault::FillTwice) { 2 } else { 1 };
    let bytes = new.iter().map(|(_, page)| page.len()).sum::<usize>() as u64;
    meters.written_to_kvcr(bytes);
    meters.pool(pool.len(), pool.slots());
    meters.moved("local_fill", times * new.len() as u64, Some(times * bytes));
    meters.ended("local_fill", "success", began.elapsed());
}
