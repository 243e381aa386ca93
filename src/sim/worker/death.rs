//! Ways in which an engine ends that no engine should: signals to itself, exceptions, and
//! processes that it leaves behind.

use rustix::process::{Signal, getpgrp, getpid, kill_process, kill_process_group};

use super::boot::stamp;
use crate::sim::fault::{Fault, Faults};

/// How long a stop may take to reach every thread.
const STOPPING: std::time::Duration = std::time::Duration::from_millis(20);

/// Dies, or stands still, if it is told to. Asked in the middle of an answer.
pub async fn while_generating(faults: &Faults) {
    if faults.tell(Fault::Dies) {
        // All of the worker, as the kernel does it for want of memory or a person by hand.
        if let Err(error) = kill_process_group(getpgrp(), Signal::KILL) {
            outln!("ERROR sim: no signal: {error}");
        }
    }
    if faults.tell(Fault::Hangs) {
        by(Signal::STOP);
        // Nothing may be said before all of it stands still.
        tokio::time::sleep(STOPPING).await;
    }
    if faults.tell(Fault::Crashes) {
        crash("AssertionError: scheduler output does not match the model runner's requests");
    }
}

/// Sends this process a signal. What it does, the kernel does: only a signal that can be handled
/// comes back.
pub fn by(signal: Signal) {
    // The runtime's handler of SIGSEGV takes itself out of the way at the first one.
    for _ in 0..2 {
        if let Err(error) = kill_process(getpid(), signal) {
            outln!("ERROR sim: no signal: {error}");
        }
        if signal == Signal::STOP {
            return;
        }
    }
}

/// The lines of an engine core that dies of `exception`, the cause first and what follows from
/// it last.
pub fn lines(exception: &str) -> String {
    let pid = getpid().as_raw_nonzero();
    let now = stamp();
    let core = format!("(EngineCore pid={pid}) ERROR {now} [core.py:1510]");
    format!(
        "{core} EngineCore failed to start.\n\
         {core} Traceback (most recent call last):\n\
         {core}   File \"/env/vllm/v1/engine/core.py\", line 1495, in run_engine_core\n\
         {core} {exception}\n\
         Traceback (most recent call last):\n\
         \x20 File \"/env/vllm/v1/engine/core.py\", line 1495, in run_engine_core\n\
         {exception}\n\
         Traceback (most recent call last):\n\
         \x20 File \"/env/vllm/v1/engine/utils.py\", line 1431, in wait_for_engine_startup\n\
         RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}"
    )
}

fn crash(exception: &str) {
    let pid = getpid().as_raw_nonzero();
    let now = stamp();
    let core = format!("(EngineCore pid={pid}) ERROR {now} [core.py:1520]");
    outln!(
        "{core} EngineCore encountered a fatal error.\n\
         {core} Traceback (most recent call last):\n\
         {core}   File \"/env/vllm/v1/engine/core.py\", line 1511, in run_busy_loop\n\
         {core} {exception}\n\
         vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause."
    );
    #[expect(
        clippy::disallowed_methods,
        reason = "an engine that crashes puts nothing in order: leaving things behind is the point"
    )]
    std::process::exit(1);
}

/// Starts a process in a session of its own that outlives this one.
pub fn leave_orphan() {
    let spawned = std::process::Command::new("setsid")
        .args(["sleep", "60"])
        .stdin(std::process::Stdio::null())
        .spawn();
    if let Err(error) = spawned {
        outln!("ERROR sim: no orphan: {error}");
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::vllm::marks::explain_text;

    #[test]
    fn the_cause_stands_above_what_follows_from_it() {
        let text = lines("ImportError: cannot import name 'FrameworkDramInput' from 'kvcr.config'");
        let failure = explain_text("worker0", Some("exit code 1"), &text, Path::new("log"));
        assert!(failure.cause.unwrap().contains("FrameworkDramInput"));
    }
}
