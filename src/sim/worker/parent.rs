//! Two processes, as the real engine is: a parent, which the plan starts, and the engine core that
//! computes. Here the core does all of it, and the parent only stands in front: it passes
//! SIGTERM on, and follows its core when that ends.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitCode, ExitStatus};

use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use tokio::signal::unix::{SignalKind, signal};

use super::boot::stamp;
use super::death;
use crate::engine::vllm::ENGINE_CORE;
use crate::sim::SIMULATE;

/// Whether this process was started as an engine core. It then ends with its parent.
pub(super) fn is_core() -> bool {
    let title = std::env::args_os().next();
    let core = title.is_some_and(|title| title == ENGINE_CORE);
    if core && let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        outln!("WARNING sim: an engine core may outlive its parent: {error}");
    }
    core
}

/// Starts the engine core with these arguments, and ends as it does.
pub(super) fn stand_before(args: &[OsString]) -> ExitCode {
    let core = Command::new("/proc/self/exe")
        .arg0(ENGINE_CORE)
        .args([SIMULATE, "dynamo.vllm"])
        .args(args)
        .spawn();
    let ended = core.and_then(|core| {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(follow(core))
    });
    match ended {
        Ok(status) => end(status),
        Err(error) => {
            errln!("OSError: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn follow(mut core: Child) -> io::Result<ExitStatus> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut children = signal(SignalKind::child())?;
    loop {
        // Looked at after the handlers are there: an end before them is seen, too.
        if let Some(status) = core.try_wait()? {
            return Ok(status);
        }
        tokio::select! {
            _ = children.recv() => {}
            _ = terminate.recv() => {
                // It is not reaped yet, so the number is still its own.
                let pid = i32::try_from(core.id()).ok().and_then(Pid::from_raw);
                if let Some(pid) = pid {
                    let _ = kill_process(pid, Signal::TERM);
                }
            }
        }
    }
}

fn end(status: ExitStatus) -> ExitCode {
    match status.signal().and_then(Signal::from_named_raw) {
        None => ExitCode::from(u8::try_from(status.code().unwrap_or(1)).unwrap_or(1)),
        Some(Signal::KILL) => {
            let now = stamp();
            outln!(
                "(APIServer pid={pid}) ERROR {now} [core_client.py:760] Engine core proc EngineCore died unexpectedly, shutting down client.\n\
                 vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
                pid = std::process::id()
            );
            ExitCode::FAILURE
        }
        // A crash of its own is the crash of the worker.
        Some(signal) => {
            death::by(signal);
            ExitCode::FAILURE
        }
    }
}
