//! The simulated front door: Dynamo's frontend with its KV router (`dynamo.frontend`), and the
//! same surface over a built-in engine (`serve`).
//!
//! - `request`, `refusal`, `answer`, `sse`: what clients say and are told, in Dynamo's shapes.
//! - `http`: routes; `produce` and `stream`: an answer frame by frame, on its way to the socket.
//! - `fleet`: who is there and what they hold; `router`: where a request goes (pure); `route`:
//!   both put to work; `engine`: one conversation with an engine.
//! - `metrics`, `count`: the page, and what a request adds to it.
//!
//! What does not belong here: what an engine computes. A front door lies only about what it is
//! told ([`Part::Frontend`](crate::sim::fault::Part::Frontend)).

mod answer;
mod count;
mod engine;
mod fleet;
mod http;
mod metrics;
mod produce;
mod refusal;
mod request;
mod route;
mod router;
mod sse;
mod stream;
mod tokenizer;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::serve::ListenerExt;
use clap::Parser;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use self::engine::BuiltIn;
use self::fleet::{Fleet, LOOK};
use self::metrics::Metrics;
use self::stream::WriteLog;
use self::tokenizer::Tokenizer;
use super::discovery::Watch;
use super::entry;
use super::fault::Faults;
use super::model::Shape;
use super::settings::Settings;
use super::wire::{Registration, Role};

/// The front door's own instance id. Nothing is told apart by it: there is one.
const OWN_ID: u64 = 0x05ee_d0f0_2071_4e7d;
/// Its router's.
const ROUTER_ID: u64 = OWN_ID + 1;

/// Flags of the real program, as the plan gives them.
#[derive(Debug, Parser)]
#[command(name = "dynamo.frontend")]
struct Flags {
    #[arg(long, default_value = "127.0.0.1")]
    http_host: String,
    #[arg(long, default_value_t = 8000)]
    http_port: u16,
    /// `kv` is the only mode that is simulated; others route the same.
    #[arg(long, default_value = "kv")]
    router_mode: String,
    #[arg(long)]
    kv_cache_block_size: Option<u32>,
    #[arg(long, default_value_t = 0)]
    router_min_initial_workers: usize,
}

/// Flags of the front door with a built-in engine.
#[derive(Debug, Parser)]
#[command(name = "serve")]
struct ServeFlags {
    #[arg(long)]
    http_port: u16,
    /// Tokens of an answer to a request that does not say.
    #[arg(long, default_value_t = 128)]
    tokens: u32,
    /// Microseconds between two tokens, and before the first. Timers have a millisecond.
    #[arg(long, default_value_t = 10_000)]
    itl_us: u64,
}

/// Everything that requests share.
struct Door {
    faults: Arc<Faults>,
    http: reqwest::Client,
    fleet: Arc<Fleet>,
    metrics: Arc<Metrics>,
    tokenizer: Tokenizer,
    log: Option<Arc<WriteLog>>,
    built_in: Option<BuiltIn>,
    /// Decides between engines that are equal.
    tickets: AtomicUsize,
    /// Instances by their endpoint for peers, in the order in which they were first thought of.
    seen: Mutex<HashMap<String, Vec<u64>>>,
    /// The whole process is to end, now.
    die: Notify,
    began: Instant,
}

impl Door {
    /// Whether `instance` is the second at its endpoint, the fourth, and so on.
    fn came_back(&self, endpoint: &str, instance: u64) -> bool {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let here = seen.entry(endpoint.to_owned()).or_default();
        if !here.contains(&instance) {
            here.push(instance);
        }
        here.iter()
            .position(|id| *id == instance)
            .is_some_and(|place| place % 2 == 1)
    }

    fn new(
        settings: &Settings,
        fleet: Fleet,
        metrics: Arc<Metrics>,
        built_in: Option<BuiltIn>,
    ) -> io::Result<Self> {
        let log = settings.write_log.as_deref().map(WriteLog::open);
        Ok(Self {
            faults: Arc::new(Faults::of(settings)),
            http: reqwest::Client::builder()
                .no_proxy()
                .build()
                .map_err(io::Error::other)?,
            fleet: Arc::new(fleet),
            metrics,
            tokenizer: Tokenizer::default(),
            log: log.transpose()?.map(Arc::new),
            built_in,
            tickets: AtomicUsize::new(0),
            seen: Mutex::default(),
            die: Notify::new(),
            began: Instant::now(),
        })
    }
}

/// `dynamo.frontend` with the real program's arguments, until SIGTERM.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let flags = match parse::<Flags>(args) {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    entry::announce("dynamo.frontend");
    let settings = match read_settings() {
        Ok(settings) => settings,
        Err(code) => return code,
    };
    let backend = entry::variable("DYN_DISCOVERY_BACKEND").unwrap_or_default();
    let folder = entry::variable("DYN_FILE_KV").map(PathBuf::from);
    let Some(folder) = folder.filter(|_| backend != "etcd") else {
        errln!("Exception: the simulated stack is discovered through files: DYN_FILE_KV");
        return ExitCode::FAILURE;
    };
    outln!(
        " INFO main.async_main: router_mode={} kv_cache_block_size={:?} discovery={}",
        flags.router_mode,
        flags.kv_cache_block_size,
        folder.display()
    );
    let lease = Duration::from_micros(settings.latency.lease_us);
    let metrics = Arc::new(Metrics::default());
    let fleet = Fleet::discovered(
        Watch::new(&folder, lease),
        flags.router_min_initial_workers,
        Arc::clone(&metrics),
    );
    let door = Door::new(&settings, fleet, metrics, None);
    start(door, &flags.http_host, flags.http_port)
}

/// `serve`: the same surface over an engine of fixed timing, without discovery. It is the ground
/// truth of a streaming benchmark.
pub fn serve(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let flags = match parse::<ServeFlags>(args) {
        Ok(flags) => flags,
        Err(code) => return code,
    };
    entry::announce("serve");
    let settings = match read_settings() {
        Ok(settings) => settings,
        Err(code) => return code,
    };
    let built_in = BuiltIn {
        tokens: flags.tokens,
        pace: Duration::from_micros(flags.itl_us),
    };
    let metrics = Arc::new(Metrics::default());
    let fleet = Fleet::fixed(built_in_engine(), Arc::clone(&metrics));
    let door = Door::new(&settings, fleet, metrics, Some(built_in));
    start(door, "127.0.0.1", flags.http_port)
}

/// What the built-in engine would have registered.
fn built_in_engine() -> Registration {
    Registration {
        instance_id: OWN_ID + 2,
        namespace: "dynamo".into(),
        component: "backend".into(),
        model: "sim".into(),
        block_tokens: 64,
        max_model_len: 1 << 20,
        vocabulary: Shape::DENSE.vocabulary,
        role: Role::Aggregated,
        request_address: "127.0.0.1:0".into(),
        events_address: None,
        control: None,
        owner: None,
    }
}

fn parse<F: Parser>(args: impl IntoIterator<Item = OsString>) -> Result<F, ExitCode> {
    let program = OsString::from("dynamo.frontend");
    F::try_parse_from(std::iter::once(program).chain(args)).map_err(|error| {
        let _ = error.print();
        ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
    })
}

fn read_settings() -> Result<Settings, ExitCode> {
    let read = entry::settings().map(|(settings, _)| settings);
    read.map_err(|why| {
        errln!("{why}");
        ExitCode::from(2)
    })
}

fn start(door: io::Result<Door>, host: &str, port: u16) -> ExitCode {
    // One thread is enough for what is mostly waiting, and leaves the other cores to engines.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let (door, runtime) = match (door, runtime) {
        (Ok(door), Ok(runtime)) => (Arc::new(door), runtime),
        (Err(error), _) | (_, Err(error)) => {
            errln!("Exception: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(async {
        let listener = match TcpListener::bind((host, port)).await {
            Ok(listener) => listener,
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                errln!(
                    "Exception: Failed to start HTTP server: port {port} already in use. Use --http-port to specify a different port."
                );
                return ExitCode::FAILURE;
            }
            Err(error) => {
                errln!("Exception: Failed to start HTTP server: {error}");
                return ExitCode::FAILURE;
            }
        };
        outln!(
            " INFO dynamo_llm::http::service::service_v2: Starting HTTP(S) service protocol=\"HTTP\" address=\"{host}:{port}\""
        );
        run(door, listener).await
    });
    // Nobody waits for streams that are under way.
    runtime.shutdown_background();
    code
}

/// Serves until SIGTERM, or until it is to die.
async fn run(door: Arc<Door>, listener: TcpListener) -> ExitCode {
    let stop = match entry::asked_to_stop() {
        Ok(stop) => stop,
        Err(error) => {
            errln!("Exception: {error}");
            return ExitCode::FAILURE;
        }
    };
    door.fleet.look();
    let looking = Arc::clone(&door.fleet);
    let look = tokio::spawn(async move {
        loop {
            tokio::time::sleep(LOOK).await;
            looking.look();
        }
    });
    let routes = http::routes(Arc::clone(&door));
    // Tokens are small and must not wait for one another.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    let served = axum::serve(listener, routes).into_future();
    let code = tokio::select! {
        () = stop => ExitCode::SUCCESS,
        () = door.die.notified() => ExitCode::FAILURE,
        _ = served => ExitCode::FAILURE,
    };
    look.abort();
    code
}

#[cfg(test)]
mod stream_tests;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
