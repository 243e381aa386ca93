//! From a command line to a serving engine: everything that takes a port, a file or time.

use std::future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid};
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::net::TcpListener;

use super::engine::{Engine, Parts};
use super::events::Events;
use super::flags::{Flags, Kvcr};
use super::gauges::Gauges;
use super::host::HostTier;
use super::http::{self, System};
use super::meters::Meters;
use super::own::{OwnTier, Surroundings};
use super::page::MetricsPage;
use super::registry::{Identity, Present, Registry};
use super::{death, start};
use crate::sim::discovery::Registered;
use crate::sim::fault::{Fault, Faults};
use crate::sim::kvcr::claim::{Claim, ClaimRequest, claim};
use crate::sim::kvcr::pool::Pool;
use crate::sim::kvcr::source::Source;
use crate::sim::kvcr::target::Target;
use crate::sim::model::Shape;
use crate::sim::settings::Settings;
use crate::sim::wire::Registration;

/// What [`Fault::StartSlow`] adds.
const SLOWER: Duration = Duration::from_secs(2);
/// How long a Guard that hands its pool back may keep the control endpoint.
const HAND_BACK: Duration = Duration::from_secs(2);
const RETRY: Duration = Duration::from_millis(20);

/// The real program's variables that matter here.
#[derive(Clone, Debug)]
pub struct Environment {
    /// `DYN_SYSTEM_PORT`.
    pub system_port: Option<u16>,
    /// `DYN_NAMESPACE`.
    pub namespace: String,
    /// `DYN_FILE_KV`: where engines are listed.
    pub discovery: Option<PathBuf>,
    /// Where shared memory is.
    pub shm: PathBuf,
}

/// The exception that an engine dies of before it serves.
#[derive(Debug, Eq, PartialEq)]
pub struct Failed(pub String);

/// An engine that serves.
pub struct Running {
    /// Gone when dropped: nobody is sent here any more.
    pub registered: Option<Registered>,
    /// Serves KVCR's pool to peers.
    pub source: Option<Source>,
    /// The service's pool.
    pub claim: Option<Claim>,
    /// The engine.
    pub engine: Arc<Engine>,
    /// Its system port.
    pub system: Arc<System>,
}

/// The time as the engine writes it.
pub fn stamp() -> String {
    let now = jiff::Timestamp::now();
    now.strftime("%m-%d %H:%M:%S").to_string()
}

/// Writes a line as the engine core does.
pub fn log(place: &str, message: &str) {
    let now = stamp();
    let pid = getpid().as_raw_nonzero();
    outln!("(EngineCore pid={pid}) INFO {now} {place} {message}");
}

fn runtime_log(level: &str, message: &str) {
    let now = jiff::Timestamp::now();
    outln!("{now:.6} {level} {message}");
}

#[derive(Deserialize)]
struct ModelConfig {
    kvcr_sim: Shape,
}

/// Shape and weights of the model in `folder`.
fn model(folder: &Path) -> Result<(Shape, u64), Failed> {
    let bytes =
        std::fs::read(folder.join("config.json")).map_err(|_| Failed(start::no_model(folder)))?;
    let config: ModelConfig = serde_json::from_slice(&bytes).map_err(|error| {
        Failed(format!(
            "ValueError: {}: no simulated model: {error}",
            folder.display()
        ))
    })?;
    let shape = config.kvcr_sim;
    if shape.vocabulary < 3 || shape.page_bytes(1, 1) == 0 {
        return Err(Failed(
            "ValueError: a simulated model needs pages and three tokens".to_owned(),
        ));
    }
    Ok((shape, first_word(&Sha256::digest(&bytes))))
}

fn first_word(hash: &[u8]) -> u64 {
    hash.iter()
        .take(8)
        .fold(0, |word, byte| word << 8 | u64::from(*byte))
}

/// New with every incarnation; the top bit is set, so that ids which went through a float show.
fn instance_id(settings: &Settings) -> u64 {
    let pid = getpid().as_raw_nonzero();
    let name = format!("{}/{}/{pid}", settings.seed, settings.process);
    first_word(&Sha256::digest(name.as_bytes())) | 1 << 63
}

/// Starts everything. Cancelled at any point, it leaves nothing behind but tasks.
///
/// # Errors
/// The exception that the real engine dies of.
pub async fn boot(
    flags: &Flags,
    settings: &Settings,
    environment: &Environment,
    faults: Arc<Faults>,
) -> Result<Running, Failed> {
    let (shape, weights) = model(&flags.model)?;
    // Without a flag the engine chooses; a hybrid model's block is as long as its state page.
    let default_block = if shape.state_groups > 0 { 256 } else { 16 };
    let block_tokens = flags.block_tokens.unwrap_or(default_block);
    let page_bytes = shape.page_bytes(block_tokens, flags.element_bytes);
    let instance = instance_id(settings);
    let kvcr = flags.tiers.as_ref().and_then(|tiers| tiers.kvcr.as_ref());
    let stated_block = if faults.tell(Fault::GeometryLies) {
        block_tokens.saturating_mul(2)
    } else {
        block_tokens
    };
    let identity = Identity {
        namespace: environment.namespace.clone(),
        model: flags.served_model.clone(),
        instance,
        block_tokens: stated_block,
        // One layer for each group.
        state_page: (shape.state_groups > 0).then_some(page_bytes),
        device_blocks: flags.device_blocks,
    };
    let owner = flags.tiers.as_ref().and_then(|tiers| tiers.owner.clone());
    let present = Present {
        tiers: flags.tiers.is_some(),
        kvcr: kvcr.is_some_and(|kvcr| kvcr.telemetry),
        publisher: owner.is_none(),
    };
    let registry = Arc::new(Registry::new(&identity, present));
    let meters = Meters::new(registry.clone());
    let gauges = Gauges::new(meters.clone());
    let system = Arc::new(System {
        ready: AtomicBool::new(false),
        began: Instant::now(),
        instance,
        direct: owner.is_none(),
        page: MetricsPage::new(registry, faults.clone()),
        engine: OnceLock::new(),
    });
    serve_system(environment.system_port, &system).await;
    announce(flags, stated_block, shape);
    tokio::time::sleep(Duration::from_micros(settings.latency.start_us)).await;
    if faults.tell(Fault::StartSlow) {
        tokio::time::sleep(SLOWER).await;
    }
    if faults.tell(Fault::StartHangs) {
        future::pending::<()>().await;
    }

    let host = match &flags.tiers {
        Some(tiers) => {
            let made = HostTier::create(
                &environment.shm,
                &tiers.engine_id,
                tiers.primary_bytes,
                page_bytes,
            );
            let host = made.map_err(Failed)?;
            let (chunks, behind) = (host.chunks(), usize::from(kvcr.is_some()));
            log(
                "[manager.py:120]",
                &format!(
                    "Created TieringOffloadingManager with primary tier (lru, {chunks} chunks) and {behind} secondary tier(s)"
                ),
            );
            Some(host)
        }
        None => None,
    };
    let events = Events::new(meters.clone());
    let around = Surroundings {
        meters,
        faults: faults.clone(),
        latency: settings.latency,
        events: events.clone(),
        gauges: gauges.clone(),
    };
    let (own, source, claim) = match kvcr {
        Some(kvcr) => pool(kvcr, page_bytes, &around).await?,
        None => (None, None, None),
    };
    let target = kvcr.map(|kvcr| {
        Target::new(
            faults.clone(),
            Arc::new(gauges.share()),
            settings.latency,
            kvcr.operation_timeout,
            kvcr.abandon_timeout,
        )
    });
    let events_address = match flags.events_port {
        Some(port) => {
            let listener = TcpListener::bind(("127.0.0.1", port))
                .await
                .map_err(|_| Failed(start::events_port_taken(port)))?;
            tokio::spawn(events.serve(listener));
            Some(format!("127.0.0.1:{port}"))
        }
        None => None,
    };
    let requests = TcpListener::bind(("127.0.0.1", 0))
        .await
        .and_then(|listener| listener.local_addr().map(|address| (listener, address)));
    let (listener, address) = requests.map_err(|error| Failed(format!("OSError: {error}")))?;
    let control = kvcr
        .filter(|kvcr| own.is_some() && kvcr.hinted)
        .map(|kvcr| kvcr.advertised.clone());
    let engine = Engine::new(Parts {
        shape,
        weights,
        block_tokens: block_tokens as usize,
        page_bytes,
        max_model_len: flags.max_model_len as usize,
        device_blocks: flags.device_blocks,
        prefix_caching: flags.prefix_caching,
        opportunistic_query: kvcr.is_some_and(|kvcr| kvcr.opportunistic_query),
        role: flags.role,
        host,
        own,
        target,
        peers: environment
            .discovery
            .clone()
            .zip(Some(control.clone().unwrap_or_default())),
        address: address.to_string(),
        around,
    });
    drop(system.engine.set(engine.clone()));
    let router = http::requests(engine.clone());
    tokio::spawn(async move { axum::serve(NoDelay(listener), router).await });

    let registration = Registration {
        instance_id: instance,
        namespace: environment.namespace.clone(),
        component: "backend".to_owned(),
        model: flags.served_model.clone(),
        block_tokens,
        max_model_len: flags.max_model_len,
        vocabulary: shape.vocabulary,
        role: flags.role,
        request_address: address.to_string(),
        events_address,
        control,
        owner,
    };
    let registered = match &environment.discovery {
        Some(directory) if !faults.tell(Fault::StartUnregistered) => Some(
            Registered::publish(directory, &registration)
                .map_err(|error| Failed(format!("OSError: {error}: '{}'", directory.display())))?,
        ),
        _ => None,
    };
    runtime_log(
        "INFO",
        "dynamo_runtime::pipeline::network::ingress::shared_tcp_endpoint: Registered endpoint 'dynamo.backend.generate'",
    );
    system.ready.store(true, Ordering::Release);
    Ok(Running {
        registered,
        source,
        claim,
        engine,
        system,
    })
}

/// A worker whose system port is taken goes on as if nothing had happened, as the real one does.
async fn serve_system(port: Option<u16>, system: &Arc<System>) {
    let Some(port) = port else { return };
    match TcpListener::bind(("127.0.0.1", port)).await {
        Ok(listener) => {
            let router = http::system(system.clone());
            tokio::spawn(async move { axum::serve(listener, router).await });
        }
        Err(error) => runtime_log(
            "ERROR",
            &format!(
                "dynamo_runtime::system_status_server: Failed to bind to address 127.0.0.1:{port}: Failed to bind to address: {error}"
            ),
        ),
    }
}

fn announce(flags: &Flags, block_tokens: u32, shape: Shape) {
    let blocks = flags.device_blocks;
    log(
        "[model.py:600]",
        &format!("Using max model len {}", flags.max_model_len),
    );
    log(
        "[kv_cache_utils.py:900]",
        &format!("Overriding num_gpu_blocks=4096 with num_gpu_blocks_override={blocks}"),
    );
    if shape.state_groups > 0 {
        let sizes = vec![block_tokens.to_string(); 1 + shape.state_groups as usize];
        log(
            "[kv_cache_utils.py:950]",
            &format!("kv cache group sizes ({})", sizes.join(", ")),
        );
    }
    log(
        "[kv_cache_utils.py:1000]",
        &format!(
            "CPU KV cache size: {} tokens",
            blocks.saturating_mul(block_tokens as usize)
        ),
    );
}

/// KVCR's own pool, in this process or a service's, served at the control endpoint.
async fn pool(
    kvcr: &Kvcr,
    page_bytes: usize,
    around: &Surroundings,
) -> Result<(Option<OwnTier>, Option<Source>, Option<Claim>), Failed> {
    let (pool, claim) = match &kvcr.service {
        Some((socket, digest)) => {
            if kvcr.slots > 0 {
                outln!(
                    "WARNING [manager.py:80] secondary_g2_slots is ignored when kvcr_service_socket_path is configured"
                );
            }
            let request = ClaimRequest {
                digest: digest.clone(),
                control: kvcr.advertised.clone(),
                slots: 0,
                page_bytes,
            };
            let claim = claim(socket, request)
                .await
                .map_err(|error| Failed(format!("kvcr.types.KVCRStartupError: {error}")))?;
            let (forsaken, faults) = (claim.forsaken(), around.faults.clone());
            tokio::spawn(async move {
                forsaken.await;
                if faults.tell(Fault::HangsAlone) {
                    death::by(Signal::STOP);
                }
            });
            (claim.pool.clone(), Some(claim))
        }
        None if kvcr.slots > 0 => (Arc::new(Pool::in_memory(kvcr.slots, page_bytes)), None),
        None => {
            around.meters.pool(0, 0);
            return Ok((None, None, None));
        }
    };
    let listener = bind(&kvcr.listen, claim.is_some()).await?;
    let source = Source::serve(
        listener,
        pool.clone(),
        around.faults.clone(),
        Arc::new(around.gauges.share()),
        around.latency,
    );
    Ok((
        Some(OwnTier::start(pool, around.clone())),
        Some(source),
        claim,
    ))
}

/// Binds the control endpoint. A Guard may need a moment to let go of it.
async fn bind(listen: &str, patient: bool) -> Result<TcpListener, Failed> {
    let deadline = Instant::now() + HAND_BACK;
    loop {
        match TcpListener::bind(listen).await {
            Ok(listener) => return Ok(listener),
            Err(_) if patient && Instant::now() < deadline => tokio::time::sleep(RETRY).await,
            Err(_) => return Err(Failed(start::control_port_taken(listen))),
        }
    }
}

/// Small lines must not wait for one another.
struct NoDelay(TcpListener);

impl axum::serve::Listener for NoDelay {
    type Io = tokio::net::TcpStream;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (stream, address) = axum::serve::Listener::accept(&mut self.0).await;
        // A connection without it is slower, not wrong.
        drop(stream.set_nodelay(true));
        (stream, address)
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.0.local_addr()
    }
}

#[cfg(test)]
mod tests;
