//! Who is there and what they hold: registrations from the discovery directory, and the KV
//! events of every engine. Decides nothing; that is [`super::router`]'s.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::task::AbortHandle;

use super::metrics::{Metrics, Scope};
use super::router::{Known, prefix};
use crate::sim::discovery::Watch;
use crate::sim::wire::{Cache, KvEvent, Registration, Role};

/// How often discovery is looked at, and a lost event source tried again.
pub(super) const LOOK: Duration = Duration::from_millis(50);

/// What a state agent registers as.
pub(super) const AGENT: &str = "kv_state_agent";

/// One registered engine.
#[derive(Debug)]
pub(super) struct Member {
    pub(super) registration: Registration,
    held: Mutex<Held>,
}

#[derive(Debug, Default)]
struct Held {
    device: HashSet<u64>,
    kvcr: HashSet<u64>,
    /// Its event source is connected.
    active: bool,
    /// A request found nobody there.
    unreachable: bool,
}

impl Member {
    fn new(registration: Registration) -> Self {
        Self {
            registration,
            held: Mutex::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the router knows of it for a prompt.
    pub(super) fn known(&self, hashes: &[u64]) -> Known {
        let held = self.held();
        Known {
            device: prefix(&held.device, hashes),
            kvcr: prefix(&held.kvcr, hashes),
            control: self.registration.control.clone(),
            up: !held.unreachable,
        }
    }

    /// A request could not reach it.
    pub(super) fn lost(&self) {
        self.held().unreachable = true;
    }

    fn forget(&self) {
        let mut held = self.held();
        (held.device, held.kvcr) = Default::default();
        (held.active, held.unreachable) = (true, false);
    }

    /// Takes an event; blocks that are new where the metrics count, and those gone.
    ///
    /// A block of an engine with KVCR is counted when it can be hinted at, since a client waits
    /// for the count before it relies on a hint.
    fn apply(&self, event: &KvEvent) -> (usize, usize) {
        let counted = match self.registration.control {
            Some(_) => Cache::Kvcr,
            None => Cache::Device,
        };
        let mut held = self.held();
        let blocks = match event.cache {
            Cache::Device => &mut held.device,
            Cache::Kvcr => &mut held.kvcr,
        };
        blocks.extend(&event.stored);
        for hash in &event.removed {
            blocks.remove(hash);
        }
        if event.cache == counted {
            (event.stored.len(), event.removed.len())
        } else {
            (0, 0)
        }
    }
}

#[derive(Default)]
struct State {
    engines: BTreeMap<u64, (Arc<Member>, Option<AbortHandle>)>,
    agent: Option<Registration>,
    /// Instances that are no longer listed, whatever discovery says.
    hidden: HashSet<u64>,
    /// Cache owners that were ever seen.
    owners: HashSet<String>,
}

/// All engines of all namespaces.
pub(super) struct Fleet {
    state: Mutex<State>,
    watch: Mutex<Option<Watch>>,
    /// A model is listed once so many engines serve it.
    minimum: usize,
    metrics: Arc<Metrics>,
}

impl Fleet {
    /// A fleet that discovery tells of.
    pub(super) fn discovered(watch: Watch, minimum: usize, metrics: Arc<Metrics>) -> Self {
        Self {
            state: Mutex::default(),
            watch: Mutex::new(Some(watch)),
            minimum,
            metrics,
        }
    }

    /// A fleet of one engine that needs no discovery.
    pub(super) fn fixed(engine: Registration, metrics: Arc<Metrics>) -> Self {
        let mut state = State::default();
        let member = Arc::new(Member::new(engine));
        state
            .engines
            .insert(member.registration.instance_id, (member, None));
        Self {
            state: Mutex::new(state),
            watch: Mutex::new(None),
            minimum: 1,
            metrics,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks at discovery now. Must run in a runtime: a new engine's events are followed.
    pub(super) fn look(&self) {
        let listed = {
            let mut watch = self.watch.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(watch) = watch.as_mut() else { return };
            watch.look()
        };
        let mut state = self.state();
        let gone = |id: &u64| !listed.iter().any(|found| found.instance_id == *id);
        let dead: Vec<u64> = state.engines.keys().copied().filter(gone).collect();
        for id in dead {
            if let Some((_, Some(follower))) = state.engines.remove(&id) {
                follower.abort();
            }
            outln!(" WARN dynamo_kv_router::sequences::multi_worker: Removing worker {id}");
        }
        state.agent = None;
        for registration in listed {
            let id = registration.instance_id;
            if registration.component == AGENT {
                state.agent = Some(registration);
            } else if !state.engines.contains_key(&id) {
                outln!(
                    " WARN dynamo_kv_router::sequences::multi_worker: Adding worker WorkerWithDpRank {{ worker_id: {id}, dp_rank: 0 }}"
                );
                state.owners.extend(registration.owner.clone());
                let member = Arc::new(Member::new(registration));
                let follower = member.registration.events_address.clone().map(|address| {
                    let metrics = Arc::clone(&self.metrics);
                    tokio::spawn(follow(address, Arc::clone(&member), metrics)).abort_handle()
                });
                state.engines.insert(id, (member, follower));
            }
        }
    }

    /// Every listed engine.
    pub(super) fn engines(&self) -> Vec<Arc<Member>> {
        let state = self.state();
        state
            .engines
            .iter()
            .filter(|(id, _)| !state.hidden.contains(id))
            .map(|(_, (member, _))| Arc::clone(member))
            .collect()
    }

    /// Engines of a model; empty while it is not listed.
    pub(super) fn of(&self, model: &str) -> Vec<Arc<Member>> {
        let mut engines = self.engines();
        engines.retain(|member| member.registration.model == model);
        if engines.len() < self.minimum {
            engines.clear();
        }
        engines
    }

    /// No longer lists an instance.
    pub(super) fn hide(&self, id: u64) {
        self.state().hidden.insert(id);
    }

    /// Listed models with their engines, for pages.
    pub(super) fn scopes(&self) -> Vec<Scope> {
        let mut scopes: Vec<Scope> = Vec::new();
        for member in self.engines() {
            let found = &member.registration;
            let worker = (found.instance_id, found.role == Role::Prefill);
            let same = |scope: &&mut Scope| {
                scope.model == found.model && scope.namespace == found.namespace
            };
            match scopes.iter_mut().find(same) {
                Some(scope) => scope.workers.push(worker),
                None => scopes.push(Scope {
                    namespace: found.namespace.clone(),
                    model: found.model.clone(),
                    workers: vec![worker],
                }),
            }
        }
        scopes.retain(|scope| scope.workers.len() >= self.minimum);
        scopes
    }

    /// Event sources of a namespace that are connected.
    pub(super) fn sources(&self, namespace: &str) -> usize {
        let engines = self.engines();
        engines
            .iter()
            .filter(|m| m.registration.namespace == namespace && m.held().active)
            .count()
    }

    /// The state agent, where there is one.
    pub(super) fn agent(&self) -> Option<Registration> {
        self.state().agent.clone()
    }

    /// Where to ask for the blocks of owners whose engine is gone: the state agent, when there is
    /// one and an owner without a live engine.
    pub(super) fn agent_for_the_dead(&self) -> Option<String> {
        let state = self.state();
        let agent = state.agent.as_ref()?;
        let live = |owner: &String| {
            state.engines.values().any(|(member, _)| {
                member.registration.owner.as_ref() == Some(owner) && member.held().active
            })
        };
        // A front door that has just started knows no owner that died before.
        let all_live = !state.owners.is_empty() && state.owners.iter().all(live);
        (!all_live).then(|| agent.request_address.clone())
    }
}

/// Follows an engine's events for as long as it is listed.
async fn follow(address: String, member: Arc<Member>, metrics: Arc<Metrics>) {
    const APPLIED: &str = "dynamo_component_kv_cache_events_applied";
    loop {
        if let Ok(stream) = TcpStream::connect(&address).await {
            // A snapshot comes first.
            member.forget();
            let mut lines = BufReader::new(stream).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let Ok(event) = serde_json::from_str::<KvEvent>(&line) else {
                    continue;
                };
                let (stored, removed) = member.apply(&event);
                for (kind, blocks) in [("stored", stored), ("removed", removed)] {
                    if blocks > 0 {
                        let namespace = &member.registration.namespace;
                        metrics.add(APPLIED, applied(namespace, kind), blocks as f64);
                    }
                }
            }
            member.held().active = false;
        }
        tokio::time::sleep(LOOK).await;
    }
}

/// Labels of the events applied, with the mark of the front door's own id.
fn applied(namespace: &str, kind: &str) -> String {
    format!(
        "dynamo_component=\"backend\",dynamo_namespace=\"{namespace}\",event_type=\"{kind}\",status=\"ok\",worker_id=\"{:x}\"",
        super::OWN_ID
    )
}
