//! What an idle stack costs: the processor time of every process of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::{Duration, Instant};

use kvcr_phase1::stack::admin;
use kvcr_phase1::stack::cookie::Mark;
use kvcr_phase1::stack::state_dir::StateDir;
use kvcr_phase1::stack::sweep::{Identity, Ours};
use kvcr_phase1::stack::wait::{Look, until_blocking};
use procfs::process::Process;

use crate::Problem;

/// What the claim says.
const INTERVAL: Duration = Duration::from_secs(30);
/// The reference engine stays for 20 s after its last use, and takes some to stop.
const UNTIL_IDLE: Duration = Duration::from_secs(80);

/// An idle stack.
pub(crate) struct Idle {
    pub(crate) cores: f64,
    pub(crate) seconds: f64,
    pub(crate) processes: usize,
}

/// Waits until nobody holds the stack and its reference engine is gone, then adds up what its
/// processes use for half a minute.
pub(crate) fn cores(state: &Path, fingerprint: &str) -> Result<Idle, Problem> {
    let supervisor = until_blocking(UNTIL_IDLE, Duration::from_millis(500), || {
        match settled(state, fingerprint) {
            Ok(Some(supervisor)) => Look::Ready(supervisor),
            Ok(None) => Look::NotYet("the stack is in use".to_owned()),
            Err(problem) => Look::Failed(problem),
        }
    })
    .map_err(|gave| gave.to_string())?;
    let stack = ours(state, fingerprint, None, Some(supervisor))?;

    let (before, began) = (used(&stack, supervisor), Instant::now());
    rest();
    let (after, seconds) = (used(&stack, supervisor), began.elapsed().as_secs_f64());
    // A process that began meanwhile counts whole; one that ended does not: a stack at rest has
    // neither.
    let ticks: u64 = after
        .iter()
        .map(|(process, ticks)| ticks.saturating_sub(*before.get(process).unwrap_or(&0)))
        .sum();
    if settled(state, fingerprint)?.is_none() {
        return Err("somebody used the stack while it was measured".into());
    }
    Ok(Idle {
        cores: ticks as f64 / procfs::ticks_per_second() as f64 / seconds,
        seconds,
        processes: after.len(),
    })
}

/// The supervisor's pid, once nobody holds the stack and no reference engine runs.
fn settled(state: &Path, fingerprint: &str) -> Result<Option<u32>, Problem> {
    let all = admin::status(state)?;
    let status = all
        .into_iter()
        .find(|status| status.fingerprint == fingerprint)
        .ok_or("the stack is gone")?;
    let reference = ours(state, fingerprint, Some("reference"), None)?;
    let idle = status.state == "ready"
        && status.leases.is_empty()
        && status.queued.is_empty()
        && reference.scan().is_empty();
    Ok(idle.then_some(status.supervisor_pid))
}

/// How processes of the stack are recognised, or only those of one process of its plan.
fn ours(
    state: &Path,
    fingerprint: &str,
    process: Option<&str>,
    ancestor: Option<u32>,
) -> Result<Ours, Problem> {
    let home = StateDir::open(state)?.stack(fingerprint)?;
    Ok(Ours {
        mark: Mark {
            fingerprint: fingerprint.to_owned(),
            home: home.path().to_owned(),
            processes: process.map(|name| BTreeSet::from([name.to_owned()])),
        },
        known: BTreeSet::new(),
        ancestor,
    })
}

/// Ticks that each process, the supervisor among them, has used since it began.
fn used(stack: &Ours, supervisor: u32) -> BTreeMap<Identity, u64> {
    let all = stack.scan().into_iter().chain(Identity::of(supervisor));
    all.filter_map(|identity| {
        let stat = Process::new(i32::try_from(identity.pid).ok()?)
            .ok()?
            .stat()
            .ok()?;
        Some((identity, stat.utime + stat.stime))
    })
    .collect()
}

#[expect(
    clippy::disallowed_methods,
    reason = "this is the time that is measured"
)]
fn rest() {
    std::thread::sleep(INTERVAL);
}
