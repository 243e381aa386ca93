//! `status` and `down`, for people and for the last step of a CI job.

use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::lease::{LaunchSpec, Wire, Word};
use super::leftovers::{Leftovers, Swept};
use super::protocol::{Ask, Status, Tell};
use super::state_dir::{StackDir, StateDir};
use super::wait::{self, Gave, Look, Patience};
use crate::failure::Failure;

/// A supervisor answers a question about itself at once; this is for a starved machine.
const STATUS_WITHIN: Duration = Duration::from_secs(20);
/// Stopping takes the processes' own patience, then the devices'.
const DOWN_WITHIN: Duration = Duration::from_secs(600);

/// What became of one stack.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// It was up and is stopped.
    Stopped,
    /// It is in use, and nobody forced it.
    Busy {
        /// Who uses it.
        holder: String,
    },
    /// Its supervisor was dead; what it left is removed.
    Swept(Swept),
    /// There was nothing.
    Nothing,
    /// It is in the way.
    Failed(Failure),
}

/// One stack and what became of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Downed {
    /// Which configuration.
    pub fingerprint: String,
    /// Profile name.
    pub profile: String,
    /// Whether it stood in for the product.
    pub simulated: bool,
    /// Its directory, with logs.
    pub dir: PathBuf,
    /// What became of it.
    pub outcome: Outcome,
}

impl Downed {
    /// Whether there was nothing to stop.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        self.outcome == Outcome::Nothing
    }

    /// Whether nothing of it is left.
    #[must_use]
    pub fn is_down(&self) -> bool {
        !matches!(self.outcome, Outcome::Busy { .. } | Outcome::Failed(_))
    }
}

impl std::fmt::Display for Downed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let simulated = if self.simulated { ", simulated" } else { "" };
        write!(
            f,
            "{} (profile {}{simulated}): ",
            self.fingerprint, self.profile
        )?;
        match &self.outcome {
            Outcome::Stopped => f.write_str("stopped"),
            Outcome::Busy { holder } => {
                write!(f, "in use by {holder}; --force stops it all the same")
            }
            Outcome::Swept(swept) => write!(f, "its supervisor was dead; {swept}"),
            Outcome::Nothing => f.write_str("was not running"),
            Outcome::Failed(failure) => write!(f, "{failure}"),
        }
    }
}

/// Every stack of this state directory that runs or left something behind. A stack whose
/// supervisor is dead has the state `dead`; `down` removes what it left.
pub fn status(state_dir: &Path) -> Result<Vec<Status>, Failure> {
    if !state_dir.exists() {
        return Ok(Vec::new());
    }
    Ok(StateDir::open(state_dir)?
        .stacks()
        .iter()
        .filter_map(status_of)
        .collect())
}

/// Stops the stack of `fingerprint` (its beginning is enough), or all of them, and removes what
/// dead ones left behind. Without `force`, one that is in use stays.
pub fn down(
    state_dir: &Path,
    fingerprint: Option<&str>,
    force: bool,
) -> Result<Vec<Downed>, Failure> {
    if !state_dir.exists() {
        return Ok(Vec::new());
    }
    let stacks = StateDir::open(state_dir)?.stacks();
    let wanted = stacks
        .iter()
        .filter_map(|dir| Some((dir, spec(dir)?)))
        .filter(|(_, spec)| fingerprint.is_none_or(|wanted| spec.fingerprint.starts_with(wanted)));
    Ok(wanted
        .map(|(dir, spec)| Downed {
            outcome: down_one(dir, &spec, force).unwrap_or_else(Outcome::Failed),
            fingerprint: spec.fingerprint,
            profile: spec.profile,
            simulated: spec.simulated,
            dir: dir.path().to_owned(),
        })
        .collect())
}

/// Tells a stack's supervisor to stop it in spite of leases, and does not wait: for a process that
/// is about to end.
pub fn ask_down(state_dir: &Path, fingerprint: &str) {
    let dir = StateDir::open(state_dir).and_then(|state| state.stack(fingerprint));
    let Ok(dir) = dir else { return };
    if let Ok(Ok(wire)) = UnixStream::connect(dir.socket()).map(Wire::new) {
        let _ = wire.say(&Ask::Down { force: true });
    }
}

fn spec(dir: &StackDir) -> Option<LaunchSpec> {
    serde_json::from_slice(&fs::read(dir.launch()).ok()?).ok()
}

fn ask(dir: &StackDir, ask: &Ask, within: Duration) -> Option<Tell> {
    let wire = Wire::new(UnixStream::connect(dir.socket()).ok()?).ok()?;
    wire.say(ask).ok()?;
    let mut patience = Patience::new(within);
    while !patience.spent() {
        match wire.hear_within(Duration::from_millis(200)) {
            Word::Said(tell) => return Some(tell),
            Word::Nothing => {}
            Word::Gone(_) => return None,
        }
    }
    None
}

fn status_of(dir: &StackDir) -> Option<Status> {
    if let Some(Tell::Status { status }) = ask(dir, &Ask::Status, STATUS_WITHIN) {
        return Some(*status);
    }
    // Its last word about itself, if it had no chance to take it back.
    let last = || serde_json::from_slice::<Status>(&fs::read(dir.state()).ok()?).ok();
    if dir.try_lock().ok()?.is_none() {
        return last();
    }
    let spec = spec(dir)?;
    let leftovers = Leftovers::of(dir, &spec.fingerprint, None);
    if !leftovers.any() {
        return None;
    }
    let mut status = last().unwrap_or_else(|| Status {
        state: String::new(),
        fingerprint: spec.fingerprint.clone(),
        generation: dir.generations().last().copied().unwrap_or(0),
        profile: spec.profile.clone(),
        simulated: spec.simulated,
        supervisor_pid: 0,
        leases: Vec::new(),
        queued: Vec::new(),
        idle_stop_in_seconds: None,
        processes: Vec::new(),
        frontend_url: None,
        failure: None,
    });
    status.state = "dead".to_owned();
    status.idle_stop_in_seconds = None;
    let alive = leftovers.processes();
    status
        .processes
        .retain(|process| alive.iter().any(|found| found.pid == process.pid));
    Some(status)
}

fn down_one(dir: &StackDir, spec: &LaunchSpec, force: bool) -> Result<Outcome, Failure> {
    let mut stopped = false;
    let lock = wait::until_blocking(DOWN_WITHIN, Duration::from_millis(50), || {
        match ask(dir, &Ask::Down { force }, DOWN_WITHIN) {
            Some(Tell::Busy { holder }) => return Look::Failed(Ok(Outcome::Busy { holder })),
            Some(Tell::Stopped) => stopped = true,
            // Dead, or just going away: the lock tells.
            _ => {}
        }
        match dir.try_lock() {
            Ok(Some(lock)) => Look::Ready(lock),
            Ok(None) => Look::NotYet("its supervisor does not exit".to_owned()),
            Err(failure) => Look::Failed(Err(failure)),
        }
    });
    let _lock = match lock {
        Ok(lock) => lock,
        Err(Gave::Failed(outcome)) => return outcome,
        Err(Gave::Up { last, .. }) => {
            return Err(Failure::environment("the stack does not stop").found(last));
        }
    };
    // With the lock in hand nobody else can be starting this stack.
    let leftovers = Leftovers::of(dir, &spec.fingerprint, None);
    let left = leftovers.any();
    let swept = leftovers.sweep_blocking()?;
    let _ = fs::remove_file(dir.socket());
    let _ = fs::remove_file(dir.state());
    Ok(match (stopped, left) {
        (true, _) => Outcome::Stopped,
        (false, true) => Outcome::Swept(swept),
        (false, false) => Outcome::Nothing,
    })
}
