//! A group of a plan's processes on this host: start, watch, harm, replace, stop.
//!
//! - here: start. Everything that can run side by side does; a process waits only for those it
//!   names in `after`.
//! - `watch`: who ended, and whether that was permitted.
//! - `harm`: blows, dealt only to what was started here.
//! - `replace`: starting one process again, and making a harmed group whole.
//! - `stop`: how all of it ends.

mod harm;
mod replace;
mod stop;
mod watch;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch as state};
use tokio::task::JoinSet;

pub use self::replace::Event;
use self::replace::Jobs;
use self::watch::Exit;
use super::probe;
use crate::engine::Blueprint;
use crate::failure::Failure;
use crate::plan::{Group, Plan, Process};
use crate::stack::cookie::{Cookie, Mark};
use crate::stack::inventory::ShmFile;
use crate::stack::process::{Leader, Placement, Spawn};
use crate::stack::protocol::{ProcessInfo, WorkerInfo, millis};
use crate::stack::sidecar::{self, Sidecar};
use crate::stack::sweep::{Identity, Ours};
use crate::stack::wait::Patience;

/// Where a plan runs and under which mark.
#[derive(Clone, Debug)]
pub struct Place {
    /// Which incarnation of which stack.
    pub cookie: Cookie,
    /// State directory of the stack.
    pub home: PathBuf,
    /// Working directory of the processes.
    pub scratch: PathBuf,
    /// One file a process.
    pub logs: PathBuf,
    /// Shared-memory files that were there before: nobody's to remove.
    pub shm_before: Arc<BTreeSet<ShmFile>>,
    /// Services that the core group needs and somebody else runs.
    pub sidecars: Arc<[Sidecar]>,
}

/// Says how bring-up goes on.
pub type Say = Arc<dyn Fn(String) + Send + Sync>;

/// A group that is up.
#[derive(Clone, Debug)]
pub struct Started {
    /// Its workers, by index.
    pub workers: Vec<WorkerInfo>,
    /// Its processes.
    pub processes: Vec<ProcessInfo>,
    /// From the first spawn until every worker completed a canary.
    pub took: Duration,
}

/// One group of a plan on this host. [`Self::stop`] must be called before it is dropped; what is
/// merely dropped dies with this process.
pub struct Local {
    blueprint: Arc<dyn Blueprint>,
    plan: Arc<Plan>,
    group: Group,
    place: Place,
    say: Say,
    /// How long a start may take.
    bound: Duration,
    children: Vec<Child>,
    /// Those that are ready.
    workers: Vec<WorkerInfo>,
    jobs: Jobs,
    exits: (mpsc::UnboundedSender<Exit>, mpsc::UnboundedReceiver<Exit>),
    /// What ends when a service that somebody else runs does.
    lost: JoinSet<Failure>,
}

struct Child {
    process: Process,
    leader: Leader,
    log: PathBuf,
    spawned: Instant,
    patience: Patience,
    missing: state::Receiver<String>,
    probes_ms: Option<u64>,
    /// How often its process of the plan was started before.
    before: u32,
    lot: Lot,
}

/// What was done to a process that is up, on purpose.
#[derive(Debug, Default)]
struct Lot {
    /// Its end is data.
    permitted: bool,
    /// Part of it was killed.
    struck: bool,
    /// It was told to stand still.
    stopped: bool,
    /// It ended.
    dead: bool,
    /// It is not the process of the plan, never became ready, or was there before what it starts
    /// after.
    foreign: bool,
    /// Who of it was hit before: the end of each is told once.
    watched: BTreeSet<Identity>,
    /// Shared-memory files that it had when it was killed.
    shm: BTreeSet<ShmFile>,
}

impl Lot {
    /// It is not what the plan wants: it may end, and is replaced when the group is made whole.
    fn disown(&mut self) {
        self.permitted = true;
        self.foreign = true;
    }
}

impl Child {
    fn identity(&self) -> Identity {
        self.leader.identity()
    }

    fn info(&self) -> ProcessInfo {
        ProcessInfo {
            name: self.process.name.clone(),
            pid: self.leader.pid(),
            start_ticks: self.leader.start_ticks(),
            log: self.log.clone(),
            before: self.before,
        }
    }
}

impl Local {
    /// Nothing runs yet.
    pub fn new(
        blueprint: Arc<dyn Blueprint>,
        plan: Arc<Plan>,
        group: Group,
        place: Place,
        say: Say,
    ) -> Self {
        Self {
            blueprint,
            plan,
            group,
            place,
            say,
            bound: Duration::ZERO,
            children: Vec::new(),
            workers: Vec::new(),
            jobs: Jobs::default(),
            exits: mpsc::unbounded_channel(),
            lost: JoinSet::new(),
        }
    }

    /// Starts the group and waits until it is ready, at most for `bound`. After an error, and
    /// after being dropped half-way, [`Self::stop`] cleans up.
    pub async fn start(&mut self, bound: Duration) -> Result<Started, Failure> {
        let began = Instant::now();
        self.bound = bound;
        let mut bound = Patience::new(bound);
        if self.group == Group::Core {
            self.lost = sidecar::watch(&self.place.sidecars);
        }
        self.start_processes(&mut bound).await?;
        let asked = Instant::now();
        let mut workers = self.until_ready(&mut bound).await?;
        for worker in &mut workers {
            if let Some(child) = self
                .children
                .iter()
                .find(|child| child.process.name == worker.process)
            {
                worker.probes_ms = child.probes_ms.unwrap_or(0);
                // The blueprint counts from when it was asked; people from the spawn.
                worker.ready_ms += millis(asked - child.spawned);
            }
        }
        workers.sort_by_key(|worker| worker.index);
        self.workers = workers;
        Ok(self.started(began.elapsed()))
    }

    /// What runs now.
    fn started(&self, took: Duration) -> Started {
        Started {
            workers: self.workers.clone(),
            processes: self.children.iter().map(Child::info).collect(),
            took,
        }
    }

    async fn start_processes(&mut self, bound: &mut Patience) -> Result<(), Failure> {
        let mut waiting: Vec<Process> = self.members().cloned().collect();
        let members: BTreeSet<String> = waiting.iter().map(|p| p.name.clone()).collect();
        let mut started: BTreeSet<String> = BTreeSet::new();
        let mut probing: JoinSet<usize> = JoinSet::new();
        let http = probe::http();
        let mut tick = tokio::time::interval(Duration::from_millis(250));
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        while started.len() < members.len() {
            // What another group started is there already.
            let may = |process: &Process| {
                process
                    .after
                    .iter()
                    .all(|name| started.contains(name) || !members.contains(name))
            };
            let (now, later): (Vec<_>, Vec<_>) = waiting.into_iter().partition(may);
            waiting = later;
            for process in now {
                let (missing, seen) = state::channel("nothing was looked at yet".to_owned());
                let probes = process.ready.clone();
                let child = self.spawn(process, seen, 0)?;
                let at = self.children.len();
                self.children.push(child);
                let http = http.clone();
                probing.spawn(async move {
                    probe::until_all_hold(probes, http, missing).await;
                    at
                });
            }
            if probing.is_empty() {
                let names: Vec<_> = waiting.iter().map(|p| p.name.as_str()).collect();
                return Err(
                    Failure::environment("the plan's order has a cycle").found(names.join(", "))
                );
            }
            tokio::select! {
                Some(done) = probing.join_next() => {
                    let Ok(at) = done else { continue };
                    let child = &mut self.children[at];
                    child.probes_ms = Some(millis(child.spawned.elapsed()));
                    (self.say)(format!("{}: probes hold", child.process.name));
                    started.insert(child.process.name.clone());
                }
                Some(exit) = self.exits.1.recv() => return Err(self.explain(&exit.process)),
                Some(Ok(failure)) = self.lost.join_next() => return Err(failure),
                _ = tick.tick() => self.check_patience(bound)?,
            }
        }
        Ok(())
    }

    fn check_patience(&mut self, bound: &mut Patience) -> Result<(), Failure> {
        let over = bound.spent();
        for child in &mut self.children {
            let late = child.patience.spent();
            if child.probes_ms.is_none() && (late || over) {
                let missing = child.missing.borrow().clone();
                let mut failure = self.blueprint.explain(&child.process, None, &child.log);
                failure.found.get_or_insert(missing);
                return Err(failure);
            }
        }
        if over {
            return Err(too_slow(bound.bound()));
        }
        Ok(())
    }

    async fn until_ready(&mut self, bound: &mut Patience) -> Result<Vec<WorkerInfo>, Failure> {
        let blueprint = self.blueprint.clone();
        let plan = self.plan.clone();
        let say = self.say.clone();
        // What is still missing when time is over.
        let (last, missing) = state::channel(String::new());
        let tell = move |text: String| {
            let _ = last.send(text.clone());
            say(text);
        };
        let logs = self.place.logs.clone();
        let group = self.group;
        let sidecars = self.place.sidecars.clone();
        let ready = async {
            let workers = blueprint.ready(&plan, group, &tell).await?;
            blueprint.examine(&plan, &workers, &logs, &tell).await?;
            if group == Group::Core {
                sidecar::attached(&sidecars, &tell).await?;
            }
            Ok(workers)
        };
        tokio::pin!(ready);
        let mut tick = tokio::time::interval(Duration::from_millis(250));
        loop {
            tokio::select! {
                done = &mut ready => return done,
                Some(exit) = self.exits.1.recv() => return Err(self.explain(&exit.process)),
                Some(Ok(failure)) = self.lost.join_next() => return Err(failure),
                _ = tick.tick() => if bound.spent() {
                    let mut failure = too_slow(bound.bound());
                    let missing = missing.borrow().clone();
                    failure.found = Some(missing).filter(|text| !text.is_empty());
                    // Its directory is kept with the evidence.
                    failure.log = self.children.first().map(|child| child.log.clone());
                    return Err(failure);
                },
            }
        }
    }

    fn members(&self) -> impl Iterator<Item = &Process> {
        self.plan
            .processes
            .iter()
            .filter(|process| process.group == self.group)
    }

    /// Spawns `process`, which was started `before` times already.
    fn spawn(
        &self,
        process: Process,
        missing: state::Receiver<String>,
        before: u32,
    ) -> Result<Child, Failure> {
        // A log of its own: what killed its predecessor must not explain its own end.
        let log = self.place.logs.join(match before {
            0 => format!("{}.log", process.name),
            _ => format!("{}-{}.log", process.name, before + 1),
        });
        let failed = |error: io::Error| {
            Failure::environment(format!("{} cannot be started: {error}", process.name)).expected(
                format!(
                    "{} to be executable",
                    process.argv.first().map_or("", String::as_str)
                ),
            )
        };
        let output = OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)
            .map_err(failed)?;
        let (program, args) = process
            .argv
            .split_first()
            .ok_or_else(|| Failure::environment(format!("{} has no program", process.name)))?;
        let args: Vec<OsString> = args.iter().map(Into::into).collect();
        let mut env = process.env.clone();
        // Python's process titles overwrite the environment that our sweep reads, unless asked
        // not to.
        env.entry("SPT_NOENV".to_owned())
            .or_insert_with(|| "1".to_owned());
        env.extend(self.place.cookie.marks(&self.place.home, &process.name));
        let leader = Spawn {
            program: program.as_ref(),
            args: &args,
            env: &env,
            directory: &self.place.scratch,
            output: &output,
            placement: Placement::Group,
            keep: &[],
        }
        .spawn()
        .map_err(failed)?;
        self.watch_leader(&process.name, &leader).map_err(failed)?;
        (self.say)(format!("{}: started as {}", process.name, leader.pid()));
        let patience = Patience::new(Duration::from_secs(process.start_seconds));
        Ok(Child {
            process,
            leader,
            log,
            spawned: Instant::now(),
            patience,
            missing,
            probes_ms: None,
            before,
            lot: Lot::default(),
        })
    }

    fn ours(&self, processes: Option<BTreeSet<String>>) -> Ours {
        Ours {
            mark: Mark {
                fingerprint: self.place.cookie.fingerprint.clone(),
                home: self.place.home.clone(),
                processes,
            },
            known: BTreeSet::new(),
            ancestor: None,
        }
    }
}

fn too_slow(bound: Duration) -> Failure {
    Failure::environment("the stack did not become ready in time")
        .expected(format!("ready within {} s", bound.as_secs()))
        .hint("look at the logs of what was missing; if it was only slow, raise stack.bring_up_seconds (--bring-up)")
}
