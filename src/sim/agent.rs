//! The simulated `dynamo.kv_state_agent`: which blocks each cache owner has, and where they can
//! be fetched, across the incarnations of the owner's engine.
//!
//! It follows the events of every engine with an owner. When the engine dies the owner's blocks
//! stay, for its Guard answers at the same endpoint; when a replacement registers, its own
//! snapshot counts from then on. No pages pass through here.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::routing::get;
use axum::{Json, Router};
use clap::Parser;
use serde_json::{Map, json};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

use super::discovery::{Registered, Watch};
use super::entry;
use super::fault::{Fault, Faults};
use super::wire::{Cache, KvEvent, Owner, Registration, Role};
use super::worker::registry::query_source;

/// Its component, which no engine has.
pub const COMPONENT: &str = "kv_state_agent";
/// Between two looks at the directory.
const LOOK: Duration = Duration::from_millis(20);
/// Bytes of the longest event.
const LONGEST_EVENT: u64 = 64 << 20;

/// Flags of `dynamo.kv_state_agent`.
#[derive(Clone, Debug, Parser)]
#[command(name = "kv_state_agent")]
struct Options {
    /// Owners that it can keep.
    #[arg(long, default_value_t = 8)]
    max_slots: usize,
}

/// Runs the process; `args` are the real program's. Exit status: 0 stopped, 1 failed, 2 a wrong
/// command line.
#[must_use]
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let name = OsString::from("kv_state_agent");
    let options = match Options::try_parse_from(std::iter::once(name).chain(args)) {
        Ok(options) => options,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(2);
        }
    };
    let given = entry::settings().and_then(|given| {
        let dir = entry::variable("DYN_FILE_KV").ok_or("DYN_FILE_KV is not set")?;
        Ok((given, PathBuf::from(dir)))
    });
    let ((settings, faults), discovery) = match given {
        Ok(given) => given,
        Err(why) => {
            errln!("kv_state_agent: {why}");
            return ExitCode::from(2);
        }
    };
    entry::run("dynamo.kv_state_agent", async move {
        let agent = Agent::new(options.max_slots, faults);
        let lease = Duration::from_micros(settings.latency.lease_us);
        let served = async {
            let stop = entry::asked_to_stop()?;
            let _registered = serve(&agent, &discovery).await?;
            outln!(
                "KV state-agent host started with max_slots={}",
                options.max_slots
            );
            tokio::select! {
                () = stop => Ok(ExitCode::SUCCESS),
                () = agent.follow(Watch::new(&discovery, lease)) => Ok(ExitCode::FAILURE),
            }
        };
        served.await.unwrap_or_else(|error: io::Error| {
            errln!("kv_state_agent: {error}");
            ExitCode::FAILURE
        })
    })
}

/// Answers and registers.
async fn serve(agent: &Arc<Agent>, discovery: &std::path::Path) -> io::Result<Registered> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let registration = Registration {
        instance_id: uuid::Uuid::new_v4().as_u64_pair().0,
        namespace: entry::variable("DYN_NAMESPACE").unwrap_or_else(|| "dynamo".to_owned()),
        component: COMPONENT.to_owned(),
        model: String::new(),
        block_tokens: 0,
        max_model_len: 0,
        vocabulary: 0,
        role: Role::default(),
        request_address: listener.local_addr()?.to_string(),
        events_address: None,
        control: None,
        owner: None,
    };
    answer(agent, listener);
    if let Some(port) = entry::variable("DYN_SYSTEM_PORT") {
        // Like the real one, it goes on without.
        match TcpListener::bind(format!("127.0.0.1:{port}")).await {
            Ok(listener) => answer(agent, listener),
            Err(error) => errln!(
                "ERROR dynamo_runtime::system_status_server: \
                 Failed to bind to address 127.0.0.1:{port}: {error}"
            ),
        }
    }
    Registered::publish(discovery, &registration)
}

fn answer(agent: &Arc<Agent>, listener: TcpListener) {
    let router = Router::new()
        .route("/owners", get(owners))
        .route("/live", get(healthy))
        .route("/health", get(healthy))
        .route("/metrics", get(metrics))
        .with_state(Arc::clone(agent));
    tokio::spawn(async move { axum::serve(listener, router).await });
}

async fn owners(State(agent): State<Arc<Agent>>) -> Json<Vec<Owner>> {
    Json(agent.owners())
}

/// JSON that says it is text, as the real system port does.
async fn healthy(State(agent): State<Arc<Agent>>) -> String {
    let ready = |endpoint: String| (endpoint, json!("ready"));
    let mut endpoints = Map::from_iter(["control", "health"].map(str::to_owned).map(ready));
    for kept in agent.lock().values() {
        endpoints.extend([ready(query_source(kept.instance))]);
    }
    let uptime = agent.began.elapsed();
    json!({
        "status": "ready",
        "uptime": {"secs": uptime.as_secs(), "nanos": uptime.subsec_nanos()},
        "endpoints": endpoints,
    })
    .to_string()
}

async fn metrics(State(agent): State<Arc<Agent>>) -> String {
    let owners = agent.owners();
    let blocks: usize = owners.iter().map(|owner| owner.blocks.len()).sum();
    format!(
        "# TYPE dynamo_kv_state_agent_owners gauge\ndynamo_kv_state_agent_owners {}\n\
         # TYPE dynamo_kv_state_agent_blocks gauge\ndynamo_kv_state_agent_blocks {blocks}\n",
        owners.len()
    )
}

struct Agent {
    max_slots: usize,
    faults: Arc<Faults>,
    owners: Mutex<BTreeMap<String, Kept>>,
    /// It is over.
    dies: Notify,
    /// Since when the process runs.
    began: Instant,
}

/// What is known of an owner.
struct Kept {
    /// Which incarnation of its engine said it.
    instance: u64,
    control: String,
    blocks: BTreeSet<u64>,
}

impl Agent {
    fn new(max_slots: usize, faults: Arc<Faults>) -> Arc<Self> {
        Arc::new(Self {
            max_slots,
            faults,
            owners: Mutex::default(),
            dies: Notify::new(),
            began: Instant::now(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Kept>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owners(&self) -> Vec<Owner> {
        let owners = self.lock();
        let each = owners.iter().map(|(owner, kept)| Owner {
            owner: owner.clone(),
            control: kept.control.clone(),
            blocks: kept.blocks.iter().copied().collect(),
        });
        each.collect()
    }

    /// Follows every engine with an owner; ends when the agent dies.
    async fn follow(self: &Arc<Self>, mut watch: Watch) {
        let mut followed: HashMap<u64, JoinHandle<()>> = HashMap::new();
        let mut looks = tokio::time::interval(LOOK);
        loop {
            tokio::select! {
                () = self.dies.notified() => return,
                _ = looks.tick() => {}
            }
            let listed = watch.look();
            followed.retain(|instance, task| {
                let there = listed.iter().any(|one| one.instance_id == *instance);
                if !there {
                    task.abort();
                }
                there
            });
            for one in listed {
                let id = one.instance_id;
                if !followed.contains_key(&id) && self.admit(&one) {
                    followed.insert(id, tokio::spawn(Arc::clone(self).hear(one)));
                }
            }
        }
    }

    /// Whether there is something to follow, and a slot for it. A new incarnation begins with
    /// nothing.
    fn admit(&self, one: &Registration) -> bool {
        let (Some(owner), Some(control), Some(_)) = (&one.owner, &one.control, &one.events_address)
        else {
            return false;
        };
        let mut owners = self.lock();
        if !owners.contains_key(owner) && owners.len() >= self.max_slots {
            return false;
        }
        let kept = Kept {
            instance: one.instance_id,
            control: control.clone(),
            blocks: BTreeSet::new(),
        };
        owners.insert(owner.clone(), kept);
        true
    }

    /// Follows one engine for as long as it is listed.
    async fn hear(self: Arc<Self>, one: Registration) {
        let (Some(owner), Some(address)) = (&one.owner, &one.events_address) else {
            return;
        };
        loop {
            if let Ok(stream) = TcpStream::connect(address).await {
                // A snapshot comes first.
                self.change(owner, one.instance_id, |blocks| blocks.clear());
                let mut stream = BufReader::new(stream);
                while let Some(event) = next(&mut stream).await {
                    self.apply(owner, one.instance_id, &event);
                }
                if self.faults.tell(Fault::AgentForgets) {
                    self.lock().remove(owner);
                    return;
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }

    fn apply(&self, owner: &str, instance: u64, event: &KvEvent) {
        if event.cache == Cache::Kvcr {
            self.change(owner, instance, |blocks| {
                blocks.extend(&event.stored);
                for block in &event.removed {
                    blocks.remove(block);
                }
            });
        }
        if self.faults.tell(Fault::AgentDies) {
            self.dies.notify_one();
        }
    }

    /// Changes what `instance` said of `owner`, unless a later incarnation speaks for it.
    fn change(&self, owner: &str, instance: u64, change: impl FnOnce(&mut BTreeSet<u64>)) {
        let mut owners = self.lock();
        let kept = owners.get_mut(owner);
        if let Some(kept) = kept.filter(|kept| kept.instance == instance) {
            change(&mut kept.blocks);
        }
    }
}

/// The next event; `None` where there will be none any more.
async fn next(stream: &mut BufReader<TcpStream>) -> Option<KvEvent> {
    let mut text = Vec::new();
    let mut bounded = stream.take(LONGEST_EVENT);
    let length = bounded.read_until(b'\n', &mut text).await.ok()?;
    if length == 0 {
        return None;
    }
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use crate::sim::discovery::tests::registration;
    use tokio::io::AsyncWriteExt;

    use super::*;

    /// An engine: its registration, and the events it publishes.
    struct Engine {
        _registered: Registered,
        stream: TcpStream,
    }

    impl Engine {
        async fn new(dir: &std::path::Path, id: u64, owner: &str, control: &str) -> Self {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let registration = Registration {
                events_address: Some(listener.local_addr().unwrap().to_string()),
                control: Some(control.into()),
                owner: Some(owner.into()),
                ..registration(id)
            };
            let registered = Registered::publish(dir, &registration).unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            Self {
                _registered: registered,
                stream,
            }
        }

        async fn say(&mut self, cache: Cache, stored: &[u64], removed: &[u64]) {
            let event = KvEvent {
                cache,
                stored: stored.to_vec(),
                removed: removed.to_vec(),
            };
            let mut text = serde_json::to_vec(&event).unwrap();
            text.push(b'\n');
            self.stream.write_all(&text).await.unwrap();
        }
    }

    struct Running {
        agent: Arc<Agent>,
        folder: tempfile::TempDir,
        ended: JoinHandle<()>,
    }

    impl Running {
        fn new(max_slots: usize, fault: &str) -> Self {
            let folder = tempfile::tempdir().unwrap();
            let switches = fault.split_whitespace().map(|one| one.parse().unwrap());
            let faults = Arc::new(Faults::new("agent", switches.collect(), None));
            let agent = Agent::new(max_slots, faults);
            let watch = Watch::new(folder.path(), Duration::from_millis(10));
            let following = Arc::clone(&agent);
            let ended = tokio::spawn(async move { following.follow(watch).await });
            Self {
                agent,
                folder,
                ended,
            }
        }

        /// Waits until the owners are these: owner, control, blocks.
        async fn knows(&self, expected: &[(&str, &str, &[u64])]) {
            let expected: Vec<Owner> = expected
                .iter()
                .map(|(owner, control, blocks)| Owner {
                    owner: (*owner).into(),
                    control: (*control).into(),
                    blocks: blocks.to_vec(),
                })
                .collect();
            let deadline = tokio::time::Instant::now() + Duration::from_secs(5);
            while self.agent.owners() != expected {
                assert!(
                    tokio::time::Instant::now() < deadline,
                    "{:?}",
                    self.agent.owners()
                );
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    }

    #[tokio::test]
    async fn blocks_outlive_their_engine_until_a_replacement_speaks() {
        let running = Running::new(8, "");
        let dir = running.folder.path();
        let mut engine = Engine::new(dir, 1, "a", "h:1").await;
        engine.say(Cache::Kvcr, &[1, 2, 3], &[]).await;
        engine.say(Cache::Device, &[9], &[]).await;
        engine.say(Cache::Kvcr, &[4], &[1]).await;
        running.knows(&[("a", "h:1", &[2, 3, 4])]).await;
        let mut other = Engine::new(dir, 2, "b", "h:2").await;
        other.say(Cache::Kvcr, &[7], &[]).await;
        drop(engine);
        running
            .knows(&[("a", "h:1", &[2, 3, 4]), ("b", "h:2", &[7])])
            .await;
        let mut replacement = Engine::new(dir, 3, "a", "h:1").await;
        replacement.say(Cache::Kvcr, &[2, 3], &[]).await;
        running
            .knows(&[("a", "h:1", &[2, 3]), ("b", "h:2", &[7])])
            .await;
    }

    #[tokio::test]
    async fn there_are_as_many_slots_as_it_says() {
        let running = Running::new(1, "");
        let mut engine = Engine::new(running.folder.path(), 1, "a", "h:1").await;
        engine.say(Cache::Kvcr, &[1], &[]).await;
        running.knows(&[("a", "h:1", &[1])]).await;
        let text = std::fs::read(running.folder.path().join("1.json")).unwrap();
        let mut second: Registration = serde_json::from_slice(&text).unwrap();
        second.instance_id = 2;
        second.owner = Some("b".into());
        assert!(!running.agent.admit(&second));
        second.owner = Some("a".into());
        assert!(running.agent.admit(&second));
    }

    #[tokio::test]
    async fn an_agent_forgets() {
        let running = Running::new(8, "agent_forgets");
        let mut engine = Engine::new(running.folder.path(), 1, "a", "h:1").await;
        engine.say(Cache::Kvcr, &[1], &[]).await;
        running.knows(&[("a", "h:1", &[1])]).await;
        drop(engine);
        running.knows(&[]).await;
    }

    #[tokio::test]
    async fn an_agent_dies_at_the_first_event() {
        let running = Running::new(8, "agent_dies");
        let mut engine = Engine::new(running.folder.path(), 1, "a", "h:1").await;
        assert!(!running.ended.is_finished());
        engine.say(Cache::Kvcr, &[1], &[]).await;
        running.ended.await.unwrap();
    }

    #[tokio::test]
    async fn its_pages_answer() {
        let running = Running::new(8, "");
        let mut engine = Engine::new(running.folder.path(), 1, "a", "h:1").await;
        engine.say(Cache::Kvcr, &[5], &[]).await;
        running.knows(&[("a", "h:1", &[5])]).await;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        answer(&running.agent, listener);
        let text = async |path: &str| {
            let answer = reqwest::get(format!("{base}{path}")).await.unwrap();
            answer.error_for_status().unwrap().text().await.unwrap()
        };
        let owners: Vec<Owner> = serde_json::from_str(&text("/owners").await).unwrap();
        assert_eq!(owners, running.agent.owners());
        assert!(text("/live").await.contains("ready") && text("/health").await.contains("ready"));
        assert!(text("/metrics").await.contains("_blocks 1\n"));
    }
}
