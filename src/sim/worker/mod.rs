//! A simulated `python -m dynamo.vllm`: an engine with its caches, tiers, events, metrics and
//! log, behind the real one's command line.
//!
//! ```text
//! http /generate ─► engine ─► prefix: device ─► host ─► own ─► peer     (flags: all of it)
//!                      │         lru      file      sim::kvcr
//!                      ├─► meters ─► registry ─► page ─► http /metrics
//!                      └─► events
//! ```
//!
//! What KVCR itself does is `sim::kvcr`'s; what a prompt reads as and where it goes is the front
//! door's. Every fault is told where the lie happens, never here in one place.

pub mod boot;
pub mod death;
pub mod decode;
pub mod engine;
pub mod events;
pub mod flags;
pub mod gauges;
pub mod host;
pub mod http;
pub mod lru;
pub mod meters;
pub mod own;
pub mod page;
mod parent;
pub mod prefix;
pub mod registry;
pub mod start;

use std::ffi::OsString;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::signal::unix::{Signal, SignalKind, signal};

use super::entry;
use super::fault::{Fault, Faults};
use super::settings::Settings;
use boot::{Environment, Failed};

/// Exit code of a command line that is wrong.
const USAGE: u8 = 2;

/// Runs one engine until it is asked to stop. `args` are those of the real program, without
/// `-m dynamo.vllm`.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.into_iter().collect();
    if !parent::is_core() {
        entry::announce("dynamo.vllm");
        return parent::stand_before(&args);
    }
    let args = args
        .into_iter()
        .map(|arg| arg.to_string_lossy().into_owned());
    let flags = match flags::parse(args) {
        Ok(flags) => flags,
        Err(flags::Refused::Usage(message)) => {
            errln!("{message}");
            return ExitCode::from(USAGE);
        }
        Err(flags::Refused::Config(exception)) => {
            outln!("{}", death::lines(&exception));
            return ExitCode::FAILURE;
        }
    };
    let (settings, faults) = match entry::settings() {
        Ok(given) => given,
        Err(error) => {
            errln!("error: {error}");
            return ExitCode::from(USAGE);
        }
    };
    let environment = Environment {
        system_port: entry::variable("DYN_SYSTEM_PORT").and_then(|port| port.parse().ok()),
        namespace: entry::variable("DYN_NAMESPACE").unwrap_or_else(|| "dynamo".to_owned()),
        discovery: entry::variable("DYN_FILE_KV").map(Into::into),
        shm: "/dev/shm".into(),
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let runtime = match runtime {
        Ok(runtime) => runtime,
        Err(error) => {
            errln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(live(flags, settings, faults, environment));
    // Streams that are still open are cut: a stop does not wait for clients.
    runtime.shutdown_background();
    ExitCode::from(code)
}

async fn live(
    flags: flags::Flags,
    settings: Settings,
    faults: Arc<Faults>,
    environment: Environment,
) -> u8 {
    let mut stop = match signal(SignalKind::terminate()) {
        Ok(stop) => stop,
        Err(error) => {
            errln!("error: {error}");
            return 1;
        }
    };
    let primary = flags.tiers.as_ref().map_or(0, |tiers| tiers.primary_bytes);
    if let Some(ending) = start::told(&faults, flags.events_port, primary) {
        return start::end(&ending);
    }
    let booted = tokio::select! {
        booted = boot::boot(&flags, &settings, &environment, faults.clone()) => booted,
        () = stopped(&mut stop, &faults) => return 0,
    };
    let running = match booted {
        Ok(running) => running,
        Err(Failed(exception)) => {
            outln!("{}", death::lines(&exception));
            return 1;
        }
    };
    if faults.tell(Fault::LeavesOrphan) {
        death::leave_orphan();
    }
    stopped(&mut stop, &faults).await;
    running.system.ready.store(false, Ordering::Release);
    // First of all nobody is sent here any more.
    drop(running.registered);
    if faults.tell(Fault::LeaksShm) {
        running.engine.leak();
    }
    if let Some(source) = running.source {
        source.stop().await;
    }
    drop(running.claim);
    running.engine.close();
    boot::log("[core.py:1600]", "[shutdown] EngineCore stopped");
    0
}

/// Returns when the process is asked to stop and listens.
async fn stopped(stop: &mut Signal, faults: &Faults) {
    loop {
        if stop.recv().await.is_none() || !faults.tell(Fault::IgnoresSigterm) {
            return;
        }
    }
}
