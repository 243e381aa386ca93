//! Services of Guards beside no stack: what `kvcr-phase1 services` runs, as a sidecar would be.
//!
//! They are started, watched and stopped as those of a stack ([`super::local`]), and die with the
//! process that started them, whatever ends it. What that may leave (a socket, a pool) is removed
//! at the next start in the same directory: by the directory's mark in a process's environment, and
//! by names in `/dev/shm` that have the directory in them.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use super::local::{Event, Local, Place, Say};
use crate::engine::{Blueprint, BoxFuture, Registered};
use crate::failure::Failure;
use crate::gate::needs;
use crate::plan::{Bindings, Group, Plan, Process};
use crate::stack::cookie::Cookie;
use crate::stack::harm::Changes;
use crate::stack::inventory::Inventory;
use crate::stack::protocol::WorkerInfo;
use crate::stack::state_dir;
use crate::stack::supervisor::taken;
use crate::stack::sweep::Ours;

/// Of every configuration: whatever ran in a directory before is in the way of what comes.
const MARK: &str = "services";
const LOCK: &str = "services.lock";

/// Services that are to run in a directory.
pub(crate) struct Services {
    /// What to run: services, and nothing that finds anybody.
    pub(crate) plan: Plan,
    /// Where their sockets and logs are.
    pub(crate) directory: PathBuf,
    /// How long they may take to accept.
    pub(crate) bound: Duration,
    /// How they are explained.
    pub(crate) blueprint: Arc<dyn Blueprint>,
}

impl Services {
    /// Runs them until `stop` ends, which is no failure; `ready` is called once all of them accept.
    /// Must be called on a thread that lives as long as they do.
    ///
    /// # Errors
    /// Environment, if they cannot be started here; the cause, if one of them ended.
    pub(crate) async fn run(
        self,
        say: Say,
        ready: impl FnOnce(),
        stop: impl Future<Output = ()>,
    ) -> Result<(), Failure> {
        state_dir::create(&self.directory)?;
        // Held until the end, and by nobody else.
        let _lock = state_dir::try_lock(&self.directory.join(LOCK))?
            .ok_or_else(|| served(&self.directory))?;
        self.sweep(&say).await?;
        for process in &self.plan.processes {
            taken::sockets(process)?;
        }
        needs::room(self.plan.shm_bytes)?;
        let before = Inventory::begin().before;
        for path in &self.plan.directories {
            state_dir::create(path)?;
        }
        let place = Place {
            cookie: cookie(),
            home: self.directory.clone(),
            scratch: self.directory.clone(),
            logs: self.directory.clone(),
            shm_before: Arc::new(before),
            sidecars: Arc::new([]),
        };
        let plan = Arc::new(self.plan.clone());
        let blueprint = Arc::new(Alone(self.blueprint.clone()));
        let mut local = Local::new(blueprint, plan, Group::Core, place, say.clone());
        let served = serve(&mut local, self.bound, ready, stop).await;
        let stopped = local.stop().await;
        let swept = self.sweep(&say).await;
        if swept.is_ok() {
            // Nobody can claim them any more, and a worker that still maps one goes on with it.
            for path in &self.plan.directories {
                let _ = fs::remove_dir_all(path);
            }
        }
        served.and(stopped).and(swept)
    }

    /// Removes what services of this directory left behind.
    async fn sweep(&self, say: &Say) -> Result<(), Failure> {
        let mark = cookie().mark(&self.directory);
        let ours = Ours {
            mark,
            known: Default::default(),
            ancestor: None,
        };
        let killed = ours.kill().await?;
        if killed > 0 {
            say(format!("ended {killed} services that were left behind"));
        }
        let pools = Inventory {
            shm_prefixes: self.plan.shm_prefixes.clone(),
            ..Inventory::default()
        };
        let removed = pools.remove_files();
        for path in self.plan.processes.iter().flat_map(Process::sockets) {
            // A socket that somebody listens on is another's, and said by whoever needs it.
            if std::os::unix::net::UnixStream::connect(path).is_err() {
                let _ = fs::remove_file(path);
            }
        }
        if !removed.is_empty() {
            say(format!("removed {} files of pools", removed.len()));
        }
        Ok(())
    }
}

async fn serve(
    local: &mut Local,
    bound: Duration,
    ready: impl FnOnce(),
    stop: impl Future<Output = ()>,
) -> Result<(), Failure> {
    tokio::pin!(stop);
    tokio::select! {
        started = local.start(bound) => started.map(drop)?,
        () = &mut stop => return Ok(()),
    }
    ready();
    loop {
        tokio::select! {
            event = local.next() => if let Event::Died(failure) = event {
                return Err(failure);
            },
            () = &mut stop => return Ok(()),
        }
    }
}

fn cookie() -> Cookie {
    Cookie {
        fingerprint: MARK.to_owned(),
        generation: 0,
    }
}

fn served(directory: &Path) -> Failure {
    Failure::environment(format!(
        "services run in {} already",
        directory.display()
    ))
    .expected("a directory of their own")
    .hint("stop the other `kvcr-phase1 services`, or name another directory (--external-services)")
}

/// Processes that wait for nobody and register nowhere: what explains them is what explains those
/// of a stack.
struct Alone(Arc<dyn Blueprint>);

impl Blueprint for Alone {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn ports(&self) -> Vec<String> {
        Vec::new()
    }

    fn plan(&self, bindings: &Bindings) -> Result<Plan, Failure> {
        self.0.plan(bindings)
    }

    fn ready<'a>(
        &'a self,
        _plan: &'a Plan,
        _group: Group,
        _say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Vec<WorkerInfo>, Failure>> {
        // Their probes hold, which is all.
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    fn ready_again<'a>(
        &'a self,
        plan: &'a Plan,
        process: &'a str,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Registered, Failure>> {
        self.0.ready_again(plan, process, say)
    }

    fn changed(&self, plan: &Plan, process: &str, changes: &Changes) -> Result<Process, Failure> {
        self.0.changed(plan, process, changes)
    }

    fn is_engine_core(&self, _command_line: &str) -> bool {
        false
    }

    fn explain(&self, process: &Process, ending: Option<&str>, log: &Path) -> Failure {
        self.0.explain(process, ending, log)
    }

    fn devices_released(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(std::future::ready(Ok(())))
    }
}
