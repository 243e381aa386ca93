//! What a simulated process is given when it starts, and how it is told to stop.

use std::future::Future;
use std::io;
use std::process::ExitCode;
use std::sync::Arc;

use rustix::time::{ClockId, clock_gettime};
use tokio::signal::unix::{SignalKind, signal};

use super::fault::Faults;
use super::settings::{Settings, VARIABLE};

/// A variable of this process.
#[expect(
    clippy::disallowed_methods,
    reason = "a simulated process has the variables of the program it stands in for, from its plan; none of them configures the harness"
)]
pub(crate) fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Settings and faults of this process.
///
/// # Errors
/// What is wrong with the settings.
pub(crate) fn settings() -> Result<(Settings, Arc<Faults>), String> {
    let settings = match variable(VARIABLE) {
        Some(text) => Settings::parse(&text)?,
        None => Settings::default(),
    };
    let faults = Arc::new(Faults::of(&settings));
    Ok((settings, faults))
}

/// The first line of every simulated process.
pub(crate) fn announce(module: &str) {
    outln!("kvcr-phase1 sim: {module} (simulated; proves the harness, never the product)");
}

/// Nanoseconds of a clock; of `Monotonic`, every process of a host has the same.
pub(crate) fn nanos(clock: ClockId) -> i64 {
    let now = clock_gettime(clock);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// Runs `process` as `module` on one thread, until it ends. What it gives is the exit code.
pub(crate) fn run(module: &str, process: impl Future<Output = ExitCode>) -> ExitCode {
    announce(module);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    match runtime {
        Ok(runtime) => runtime.block_on(process),
        Err(error) => {
            errln!("{module}: no runtime: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Ends when the process is asked to stop.
///
/// # Errors
/// Signals cannot be watched.
pub(crate) fn asked_to_stop() -> io::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    })
}
