//! An engine in this process, without HTTP: what it says, what it counts, and each of its lies.

use std::num::NonZeroU32;
use std::time::Duration;

use super::super::events::Events;
use super::super::gauges::Gauges;
use super::super::meters::Meters;
use super::super::registry::tests::identity;
use super::super::registry::{Present, Registry};
use super::*;
use crate::geometry::{Delivery, Geometry};
use crate::sim::discovery::Registered;
use crate::sim::fault::Faults;
use crate::sim::kvcr::pool::Pool;
use crate::sim::kvcr::source::Source;
use crate::sim::settings::Latency;
use crate::sim::wire::{Hint, Registration};
use crate::telemetry::kvcr::{self, CacheSource, Operation, PromptSource, Tier};
use crate::telemetry::{Delta, Page as MetricsPage};

const BLOCK: usize = 8;
const DEVICE: usize = 12;
const HOST: usize = 16;

const QUICK: Latency = Latency {
    start_us: 0,
    prefill_token_us: 0,
    load_block_us: 0,
    transfer_block_us: 0,
    decode_token_us: 0,
    lease_us: 0,
    promotion_us: 0,
};

#[derive(Clone, Copy)]
struct Setup {
    shape: Shape,
    kvcr: bool,
    faults: &'static [&'static str],
}

const DENSE: Setup = Setup {
    shape: Shape::DENSE,
    kvcr: true,
    faults: &[],
};
const HYBRID: Setup = Setup {
    shape: Shape::HYBRID,
    ..DENSE
};
const REFERENCE: Setup = Setup {
    kvcr: false,
    ..DENSE
};

fn lying(faults: &'static [&'static str]) -> Setup {
    Setup { faults, ..DENSE }
}

struct Rig {
    engine: Arc<Engine>,
    registry: Arc<Registry>,
    gauges: Arc<Gauges>,
    control: String,
    _source: Option<Source>,
    _folder: tempfile::TempDir,
}

struct Said {
    tokens: Vec<u32>,
    cached: u64,
    replies: Vec<Reply>,
}

impl Rig {
    async fn new(setup: Setup) -> Self {
        Self::beside(setup, None).await
    }

    /// An engine that finds others in a discovery directory.
    async fn beside(setup: Setup, discovery: Option<PathBuf>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let page_bytes = setup.shape.page_bytes(BLOCK as u32, 4);
        let present = Present {
            tiers: setup.kvcr,
            kvcr: setup.kvcr,
            publisher: true,
        };
        let registry = Arc::new(Registry::new(&identity(), present));
        let meters = Meters::new(registry.clone());
        let gauges = Gauges::new(meters.clone());
        let switches = setup.faults.iter().map(|f| f.parse().unwrap()).collect();
        let faults = Arc::new(Faults::new("worker0", switches, None));
        let around = Surroundings {
            events: Events::new(meters.clone()),
            meters,
            faults: faults.clone(),
            latency: QUICK,
            gauges: gauges.clone(),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let control = listener.local_addr().unwrap().to_string();
        let (mut own, mut host, mut target, mut source) = (None, None, None, None);
        if setup.kvcr {
            let pool = Arc::new(Pool::in_memory(1024, page_bytes));
            let share = || Arc::new(gauges.share());
            let serve = Source::serve(listener, pool.clone(), faults.clone(), share(), QUICK);
            source = Some(serve);
            own = Some(OwnTier::start(pool, around.clone()));
            let bytes = (HOST * page_bytes) as u64;
            host = Some(HostTier::create(folder.path(), "c-w0", bytes, page_bytes).unwrap());
            let (operation, abandon) = (Duration::from_millis(200), Duration::from_millis(400));
            target = Some(Target::new(faults, share(), QUICK, operation, abandon));
        }
        let engine = Engine::new(Parts {
            shape: setup.shape,
            weights: 7,
            block_tokens: BLOCK,
            page_bytes,
            max_model_len: 4096,
            device_blocks: DEVICE,
            prefix_caching: true,
            opportunistic_query: false,
            role: Role::Aggregated,
            host,
            own,
            target,
            peers: discovery.zip(Some(control.clone())),
            address: "127.0.0.1:1".into(),
            around,
        });
        Self {
            engine,
            registry,
            gauges,
            control,
            _source: source,
            _folder: folder,
        }
    }

    async fn request(&self, request: Generate) -> Said {
        let (send, mut receive) = mpsc::channel(64);
        let answer = self.engine.generate(request, send);
        let collect = async {
            let mut replies = Vec::new();
            while let Some(reply) = receive.recv().await {
                replies.push(reply);
            }
            replies
        };
        let ((), replies) = tokio::join!(answer, collect);
        self.settled().await;
        let mut said = Said {
            tokens: Vec::new(),
            cached: u64::MAX,
            replies: Vec::new(),
        };
        for reply in &replies {
            match reply {
                Reply::Token { id, .. } => said.tokens.push(*id),
                Reply::Done { cached_tokens, .. } => said.cached = *cached_tokens,
                Reply::Failed { .. } => {}
            }
        }
        said.replies = replies;
        said
    }

    async fn ask(&self, tokens: &[u32]) -> Said {
        self.request(generate(tokens)).await
    }

    /// More than device and host tier hold, under another salt.
    async fn flood(&self) {
        for filler in 0..4 {
            let tokens: Vec<u32> = (0..8 * BLOCK as u32 + 1)
                .map(|i| 1 + (i + filler * 91) % 900)
                .collect();
            let mut request = generate(&tokens);
            request.cache_salt = Some(format!("filler{filler}"));
            self.request(request).await;
        }
    }

    /// Until nothing is in flight; fills come after the answer.
    async fn settled(&self) {
        let settled = async {
            while self.gauges.in_flight() != 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(2), settled)
            .await
            .expect("operations that end");
    }

    fn page(&self) -> MetricsPage {
        let page = MetricsPage::parse(&self.registry.render());
        assert!(page.problems().is_empty());
        page
    }
}

fn generate(tokens: &[u32]) -> Generate {
    Generate {
        request_id: "r1".into(),
        tokens: tokens.to_vec(),
        cache_salt: None,
        max_tokens: 6,
        hint: None,
        handover: None,
    }
}

fn prompt(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|i| 1 + (i * 13) % 700).collect()
}

/// Four blocks and a tail.
fn long() -> Vec<u32> {
    prompt(4 * BLOCK + 3)
}

fn blocks(delta: &Delta, operation: Operation) -> u64 {
    kvcr::blocks(delta, operation).reading.exact().unwrap_or(0)
}

fn prompt_tokens(delta: &Delta, source: PromptSource) -> u64 {
    kvcr::prompt_tokens(delta, source).reading.exact().unwrap()
}

fn page_bytes() -> u64 {
    Shape::DENSE.page_bytes(BLOCK as u32, 4) as u64
}

fn hint(from: &Rig, tokens: &[u32]) -> Generate {
    let mut request = generate(tokens);
    request.hint = Some(Hint {
        source_control_endpoint: from.control.clone(),
        block_hashes: block_hashes(tokens, BLOCK, None),
    });
    request
}

#[tokio::test]
async fn cold_device_host_and_own_tier_say_the_same_and_are_counted_apart() {
    let reference = Rig::new(REFERENCE).await.ask(&long()).await;
    let rig = Rig::new(DENSE).await;
    let start = rig.page();
    let cold = rig.ask(&long()).await;
    let after_cold = rig.page();
    assert_eq!((cold.cached, &cold.tokens), (0, &reference.tokens));
    let delta = Delta::between(&start, &after_cold);
    assert_eq!(prompt_tokens(&delta, PromptSource::LocalCompute), 35);
    assert_eq!(
        blocks(&delta, Operation::LocalFill),
        5,
        "one by generated tokens"
    );
    let written = kvcr::write_bytes(&delta, Tier::Kvcr).reading.exact();
    assert_eq!(written, Some(5 * page_bytes()));

    let device = rig.ask(&long()).await;
    let after_device = rig.page();
    assert_eq!((device.cached, &device.tokens), (32, &reference.tokens));
    let delta = Delta::between(&after_cold, &after_device);
    assert_eq!(prompt_tokens(&delta, PromptSource::LocalCacheHit), 32);
    assert_eq!(blocks(&delta, Operation::LocalFill), 0);

    // One filler: out of the device, still in the host tier.
    let mut filler = generate(&prompt(11 * BLOCK));
    filler.cache_salt = Some("filler".into());
    rig.request(filler).await;
    let before_host = rig.page();
    let host = rig.ask(&long()).await;
    let delta = Delta::between(&before_host, &rig.page());
    assert_eq!((host.cached, &host.tokens), (32, &reference.tokens));
    let by = |source| kvcr::cached_tokens(&delta, source).reading.exact().unwrap();
    assert!(by(CacheSource::Host) > 0);
    assert_eq!(by(CacheSource::ExternalUnspecified), 0);

    rig.flood().await;
    let before_own = rig.page();
    let own = rig.ask(&long()).await;
    let delta = Delta::between(&before_own, &rig.page());
    assert_eq!((own.cached, &own.tokens), (32, &reference.tokens));
    assert_eq!(blocks(&delta, Operation::LocalDeliver), 4);
    assert_eq!(blocks(&delta, Operation::LocalFill), 0);
    let read = kvcr::read_bytes(&delta, Tier::Kvcr).reading.exact();
    assert_eq!(read, Some(4 * page_bytes()));
    let own = kvcr::cached_tokens(&delta, CacheSource::ExternalUnspecified);
    assert_eq!(own.reading.exact(), Some(32));
    assert!(kvcr::invariants(&delta, Some(page_bytes())).is_empty());
}

#[tokio::test]
async fn a_prompt_that_ends_with_a_block_gets_it_only_from_behind_the_device() {
    let tokens = prompt(4 * BLOCK);
    for (setup, expected) in [(REFERENCE, 24), (DENSE, 32)] {
        let rig = Rig::new(setup).await;
        let cold = rig.ask(&tokens).await;
        let warm = rig.ask(&tokens).await;
        assert_eq!((cold.cached, warm.cached), (0, expected));
        assert_eq!(cold.tokens, warm.tokens);
    }
}

#[tokio::test]
async fn a_hint_brings_blocks_from_a_peer() {
    let (seeded, asked) = (Rig::new(DENSE).await, Rig::new(DENSE).await);
    let cold = seeded.ask(&long()).await;
    let (source, target) = (seeded.page(), asked.page());
    let warm = asked.request(hint(&seeded, &long())).await;
    assert_eq!((warm.cached, &warm.tokens), (32, &cold.tokens));
    let delta = Delta::between(&target, &asked.page());
    assert_eq!(blocks(&delta, Operation::RemoteDeliver), 4);
    assert!(kvcr::invariants(&delta, Some(page_bytes())).is_empty());
    assert_eq!(kvcr::failures(&delta).unwrap(), []);
    let delta = Delta::between(&source, &seeded.page());
    assert_eq!(blocks(&delta, Operation::SourceWrite), 4);
}

#[tokio::test]
async fn a_hybrid_prefix_can_be_reused_as_far_as_its_state() {
    let reference = Rig::new(Setup {
        kvcr: false,
        ..HYBRID
    })
    .await;
    let rig = Rig::new(HYBRID).await;
    let peer = Rig::new(HYBRID).await;
    let before = rig.page();
    let cold = rig.ask(&long()).await;
    let delta = Delta::between(&before, &rig.page());
    assert_eq!(cold.tokens, reference.ask(&long()).await.tokens);
    assert_eq!((cold.cached, blocks(&delta, Operation::LocalFill)), (0, 7));
    let again = rig.ask(&long()).await;
    assert_eq!((again.cached, &again.tokens), (32, &cold.tokens));
    let hinted = peer.request(hint(&rig, &long())).await;
    assert_eq!((hinted.cached, &hinted.tokens), (32, &cold.tokens));
    rig.flood().await;
    let evicted = rig.ask(&long()).await;
    assert_eq!((evicted.cached, evicted.tokens), (32, cold.tokens));

    // Shared further than there is a state: the attention pages alone are moved for nothing.
    let branch: Vec<u32> = long()[..20].iter().copied().chain(500..520).collect();
    let right = reference.ask(&branch).await;
    let other = Rig::new(HYBRID).await;
    let before = other.page();
    let hinted = other.request(hint(&rig, &branch)).await;
    assert_eq!((hinted.cached, hinted.tokens), (0, right.tokens));
    let delta = Delta::between(&before, &other.page());
    assert!(!kvcr::failures(&delta).unwrap().is_empty());
}

#[tokio::test]
async fn what_cannot_be_answered_is_refused() {
    let rig = Rig::new(DENSE).await;
    for tokens in [vec![], prompt(4096)] {
        let said = rig.ask(&tokens).await;
        assert!(matches!(
            said.replies[..],
            [Reply::Failed { status: 400, .. }]
        ));
    }
}

#[tokio::test]
async fn a_client_that_goes_away_ends_its_request() {
    let rig = Rig::new(DENSE).await;
    let (send, receive) = mpsc::channel(1);
    drop(receive);
    rig.engine.generate(generate(&long()), send).await;
    assert!(rig.registry.render().contains("finished_reason=\"abort\",model=\"tiny\",model_name=\"tiny\",worker_id=\"42aa22c0a711908\"} 1.0"));
}

/// Text of a prompt that comes from where the fault is, and whether it is right.
async fn right_from(faults: &'static [&'static str], flood: bool) -> (bool, u64) {
    let honest = Rig::new(DENSE).await.ask(&long()).await;
    let rig = Rig::new(lying(faults)).await;
    rig.ask(&long()).await;
    if flood {
        rig.flood().await;
    }
    let again = rig.ask(&long()).await;
    (again.tokens == honest.tokens, again.cached)
}

#[tokio::test]
async fn bad_bytes_of_a_tier_change_the_text() {
    for faults in [
        &["corrupt_block"][..],
        &["swap_blocks"],
        &["stale_block"],
        &["truncated_block"],
        &["missing_block"],
        &["recompute_wrong"],
    ] {
        assert!(!right_from(faults, true).await.0, "{faults:?}");
    }
    assert!(!right_from(&["corrupt_device_block"], false).await.0);
    // The host tier has the prompt for as long as its pages were the last ones used.
    let honest = Rig::new(DENSE).await.ask(&prompt(4 * BLOCK)).await;
    let rig = Rig::new(lying(&["corrupt_host_block"])).await;
    rig.ask(&prompt(4 * BLOCK)).await;
    assert_ne!(rig.ask(&prompt(4 * BLOCK)).await.tokens, honest.tokens);
}

#[tokio::test]
async fn hits_that_are_not_what_they_say() {
    for (faults, flood, right) in [
        (&["hit_beyond_reference"][..], false, (true, 40)),
        (&["hit_too_short"], false, (true, 24)),
        (&["hit_too_short"], true, (true, 24)),
        (&["tier_never_hits"], true, (true, 0)),
        (&["fill_lost"], true, (true, 0)),
        (&["fill_silent"], true, (true, 0)),
        (&["fill_failed"], true, (true, 0)),
        (&["deliver_failed"], true, (true, 0)),
        (&["reference_reuses_nothing"], false, (true, 0)),
        (&["device_never_evicts"], true, (true, 32)),
        (&["boundary_off_by_one"], false, (true, 32)),
        (&["model_drift"], false, (false, 32)),
    ] {
        assert_eq!(right_from(faults, flood).await, right, "{faults:?} {flood}");
    }
    let rig = Rig::new(lying(&["false_hit"])).await;
    assert_eq!(rig.ask(&long()).await.cached, 8);
    let rig = Rig::new(lying(&["salt_ignored"])).await;
    let mut salted = generate(&long());
    for (salt, cached) in [("a", 0), ("b", 32)] {
        salted.cache_salt = Some(salt.into());
        assert_eq!(rig.request(salted.clone()).await.cached, cached);
    }
}

#[tokio::test]
async fn the_last_block_of_a_boundary_can_be_forgotten() {
    let tokens = prompt(4 * BLOCK);
    let honest = Rig::new(DENSE).await;
    let rig = Rig::new(lying(&["boundary_off_by_one"])).await;
    for _ in 0..2 {
        assert_ne!(
            honest.ask(&tokens).await.tokens,
            rig.ask(&tokens).await.tokens
        );
    }
}

#[tokio::test]
async fn stores_are_counted_as_they_lie() {
    for (fault, counted, failed) in [
        (&["fill_lost"][..], 5, false),
        (&["fill_silent"], 0, false),
        (&["fill_twice"], 10, false),
        (&["fill_failed"], 0, true),
    ] {
        let rig = Rig::new(lying(fault)).await;
        let before = rig.page();
        rig.ask(&long()).await;
        let delta = Delta::between(&before, &rig.page());
        assert_eq!(blocks(&delta, Operation::LocalFill), counted, "{fault:?}");
        let failures = kvcr::failures(&delta).unwrap_or_default();
        assert_eq!(!failures.is_empty(), failed, "{fault:?}");
    }
}

#[tokio::test]
async fn a_livelocked_load_never_ends() {
    let rig = Rig::new(lying(&["livelocked_load"])).await;
    rig.ask(&long()).await;
    rig.flood().await;
    let (send, mut receive) = mpsc::channel(4);
    let engine = rig.engine.clone();
    let asked = tokio::spawn(async move { engine.generate(generate(&long()), send).await });
    let quiet = tokio::time::timeout(Duration::from_millis(50), receive.recv()).await;
    assert!(quiet.is_err() && !asked.is_finished());
    drop(receive);
    asked.await.unwrap();
}

#[tokio::test]
async fn peers_are_asked_as_they_should_not_be() {
    let seeded = Rig::new(DENSE).await;
    let cold = seeded.ask(&long()).await;
    let rig = Rig::new(lying(&["hint_ignored"])).await;
    let said = rig.request(hint(&seeded, &long())).await;
    assert_eq!((said.cached, &said.tokens), (0, &cold.tokens));

    let folder = tempfile::tempdir().unwrap();
    let registration = Registration {
        instance_id: 1 << 63,
        namespace: "dynamo".into(),
        component: "backend".into(),
        model: "tiny".into(),
        block_tokens: BLOCK as u32,
        max_model_len: 4096,
        vocabulary: 1024,
        role: Role::Aggregated,
        request_address: String::new(),
        events_address: None,
        control: Some(seeded.control.clone()),
        owner: None,
    };
    let _registered = Registered::publish(folder.path(), &registration).unwrap();
    let rig = Rig::beside(lying(&["fresh_pulls"]), Some(folder.path().into())).await;
    let before = rig.page();
    let said = rig.ask(&long()).await;
    let delta = Delta::between(&before, &rig.page());
    assert_eq!(said.tokens, cold.tokens);
    assert_eq!(blocks(&delta, Operation::RemoteDeliver), 4);
}

#[tokio::test]
async fn states_of_a_hybrid_hit_can_be_wrong() {
    let honest = Rig::new(HYBRID).await.ask(&long()).await;
    for faults in [&["state_page_missing"][..], &["state_off_by_one"]] {
        let rig = Rig::new(Setup { faults, ..HYBRID }).await;
        rig.ask(&long()).await;
        rig.ask(&long()).await;
        let hit = rig.ask(&long()).await;
        assert_eq!(hit.cached, 32);
        assert_ne!(hit.tokens, honest.tokens, "{faults:?}");
    }
}

/// What the pages of a hit say: the harness tells the faults apart by nothing else.
#[tokio::test]
async fn pages_of_a_hybrid_hit_can_be_too_few_or_too_many() {
    let geometry = Geometry {
        hit_block: NonZeroU32::new(8).unwrap(),
        state_groups: Some(3),
        page_bytes: None,
    };
    for (faults, delivered, delivery) in [
        (&[][..], 4 + 3, Delivery::AsNeeded),
        (&["state_page_missing"], 4, Delivery::StateMissing(3)),
        (&["state_over_transfer"], 4 + 4 * 3, Delivery::Useless(9)),
    ] {
        let rig = Rig::new(Setup { faults, ..HYBRID }).await;
        let honest = rig.ask(&long()).await;
        rig.ask(&long()).await;
        rig.flood().await;
        rig.flood().await;
        let before = rig.page();
        let hit = rig.ask(&long()).await;
        let delta = Delta::between(&before, &rig.page());
        let pages = blocks(&delta, Operation::LocalDeliver);
        assert_eq!((hit.cached, pages), (32, delivered), "{faults:?}");
        let needed = geometry.pages_of_hit(hit.cached);
        assert_eq!(geometry.judge(needed, pages), delivery, "{faults:?}");
        let right = hit.tokens == honest.tokens;
        assert_eq!(right, !matches!(delivery, Delivery::StateMissing(_)));
    }
}

#[tokio::test]
async fn a_reference_can_waver_and_be_close() {
    let rig = Rig::new(lying(&["reference_wavers"])).await;
    let first = rig.ask(&long()).await;
    assert_ne!(rig.ask(&long()).await.tokens, first.tokens);
    let rig = Rig::new(lying(&["near_ties"])).await;
    let said = rig.ask(&long()).await;
    assert!(
        matches!(said.replies[0], Reply::Token { logprob, runner_up_logprob, .. }
        if (logprob - runner_up_logprob).abs() < 0.001)
    );
}

#[tokio::test]
async fn counters_restart_after_the_first_cached_request() {
    let rig = Rig::new(lying(&["counter_reset"])).await;
    rig.ask(&long()).await;
    let before = rig.page();
    rig.ask(&long()).await;
    assert!(Delta::between(&before, &rig.page()).restart().is_some());
}
