//! What people are told about a supervisor: `status`, and `state.json` for when it is dead.

use std::time::{Duration, Instant};

use super::connection::ConnId;
use super::{Supervisor, log};
use crate::atomic;
use crate::failure::Failure;
use crate::launch::local::Started;
use crate::stack::protocol::{Status, Tell};

/// What is told to people while, and after, a generation runs.
#[derive(Default)]
pub(super) struct View {
    pub(super) state: &'static str,
    pub(super) generation: u64,
    pub(super) started: Option<Started>,
    pub(super) frontend_url: Option<String>,
    pub(super) failure: Option<Failure>,
}

impl Supervisor<'_> {
    pub(super) fn idle_stop_at(&self, view: &View) -> Option<Instant> {
        // Bring-up goes on when the last client leaves: the next one is seconds away.
        if !["ready", "mending"].contains(&view.state) {
            return None;
        }
        let keep = Duration::from_secs(self.spec.keep_seconds);
        Some(self.desk.idle_since()? + keep)
    }

    fn status(&self, view: &View) -> Status {
        Status {
            state: view.state.to_owned(),
            fingerprint: self.spec.fingerprint.clone(),
            generation: view.generation,
            profile: self.spec.profile.clone(),
            simulated: self.spec.simulated,
            supervisor_pid: std::process::id(),
            leases: self.desk.held(),
            queued: self.desk.waiting(),
            idle_stop_in_seconds: self
                .idle_stop_at(view)
                .map(|at| at.saturating_duration_since(Instant::now()).as_secs()),
            processes: view
                .started
                .iter()
                .flat_map(|started| started.processes.clone())
                .collect(),
            frontend_url: view.frontend_url.clone(),
            failure: view.failure.clone(),
        }
    }

    pub(super) fn tell_status(&mut self, id: ConnId, view: &View) {
        let status = Box::new(self.status(view));
        self.desk.tell(id, Tell::Status { status });
    }

    pub(super) fn write_state(&self, view: &View) {
        log(view.state);
        let text = serde_json::to_vec_pretty(&self.status(view)).unwrap_or_default();
        if let Err(error) = atomic::replace_durably(&self.dir.state(), &text) {
            log(&format!("state.json: {error}"));
        }
    }
}
