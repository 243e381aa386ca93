//! A group of a plan's processes on this host: start, watch, stop.
//!
//! Start: everything that can run side by side does; a process waits only for those it names
//! in `after`. Watch: the first death is reported with its cause. Stop: SIGTERM to each process
//! group, SIGKILL when its patience ends, the ones others depend on last; then a sweep for
//! descendants that left their group.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::OpenOptions;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::probe;
use crate::engine::Blueprint;
use crate::failure::{Class, Failure};
use crate::plan::{Group, Plan, Process};
use crate::stack::cookie::{Cookie, Mark};
use crate::stack::process::{Ending, Leader, Placement, Spawn};
use crate::stack::protocol::{ProcessInfo, WorkerInfo, millis};
use crate::stack::sweep::{self, Identity, Ours};
use crate::stack::wait::Patience;

/// After SIGKILL only the kernel can delay the end.
const KILLED_WITHIN: Duration = Duration::from_secs(10);

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
    children: Vec<Child>,
    exits: (mpsc::Sender<usize>, mpsc::Receiver<usize>),
}

struct Child {
    process: Process,
    leader: Leader,
    log: PathBuf,
    spawned: Instant,
    patience: Patience,
    missing: watch::Receiver<String>,
    probes_ms: Option<u64>,
}

impl Child {
    fn info(&self) -> ProcessInfo {
        ProcessInfo {
            name: self.process.name.clone(),
            pid: self.leader.pid(),
            start_ticks: self.leader.start_ticks(),
            log: self.log.clone(),
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
        let count = plan.processes.len().max(1);
        Self {
            blueprint,
            plan,
            group,
            place,
            say,
            children: Vec::new(),
            // One message a process is all there can be.
            exits: mpsc::channel(count),
        }
    }

    /// Starts the group and waits until it is ready, at most for `bound`. After an error, and
    /// after being dropped half-way, [`Self::stop`] cleans up.
    pub async fn start(&mut self, bound: Duration) -> Result<Started, Failure> {
        let began = Instant::now();
        let mut bound = Patience::new(bound);
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
        Ok(Started {
            workers,
            processes: self.children.iter().map(Child::info).collect(),
            took: began.elapsed(),
        })
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
                let (missing, seen) = watch::channel("nothing was looked at yet".to_owned());
                let probes = process.ready.clone();
                let at = self.spawn(process, seen)?;
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
                Some(at) = self.exits.1.recv() => return Err(self.explain_death(at)),
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
        let (last, missing) = watch::channel(String::new());
        let tell = move |text: String| {
            let _ = last.send(text.clone());
            say(text);
        };
        let logs = self.place.logs.clone();
        let group = self.group;
        let ready = async {
            let workers = blueprint.ready(&plan, group, &tell).await?;
            blueprint.examine(&plan, &workers, &logs, &tell).await?;
            Ok(workers)
        };
        tokio::pin!(ready);
        let mut tick = tokio::time::interval(Duration::from_millis(250));
        loop {
            tokio::select! {
                done = &mut ready => return done,
                Some(at) = self.exits.1.recv() => return Err(self.explain_death(at)),
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

    /// Waits until a process of the group dies, and says why. For ever if none does.
    pub async fn died(&mut self) -> Failure {
        match self.exits.1.recv().await {
            Some(at) => self.explain_death(at),
            None => std::future::pending().await,
        }
    }

    fn explain_death(&self, at: usize) -> Failure {
        let child = &self.children[at];
        let ending = child.leader.ending().ok().flatten();
        let text = ending.map(|ending| ending.to_string());
        let failure = self
            .blueprint
            .explain(&child.process, text.as_deref(), &child.log);
        from_outside(failure, &child.process.name, ending)
    }

    fn members(&self) -> impl Iterator<Item = &Process> {
        self.plan
            .processes
            .iter()
            .filter(|process| process.group == self.group)
    }

    fn spawn(
        &mut self,
        process: Process,
        missing: watch::Receiver<String>,
    ) -> Result<usize, Failure> {
        let log = self.place.logs.join(format!("{}.log", process.name));
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
        let at = self.children.len();
        let exit = leader.exit().map_err(failed)?;
        let exits = self.exits.0.clone();
        tokio::spawn(async move {
            if exit.await.is_ok() {
                let _ = exits.send(at).await;
            }
        });
        (self.say)(format!("{}: started as {}", process.name, leader.pid()));
        let patience = Patience::new(Duration::from_secs(process.start_seconds));
        self.children.push(Child {
            process,
            leader,
            log,
            spawned: Instant::now(),
            patience,
            missing,
            probes_ms: None,
        });
        Ok(at)
    }

    /// Stops every process of the group, and everything that descends from them.
    pub async fn stop(&mut self) -> Result<(), Failure> {
        let names: BTreeSet<String> = self.members().map(|p| p.name.clone()).collect();
        // Written down now: a program that hides its environment is found by its number.
        let ours = self.ours(Some(names));
        let mut known: BTreeSet<Identity> = ours.scan().into_iter().collect();
        let mut layers: BTreeMap<usize, Vec<Child>> = BTreeMap::new();
        let depths = depths(self.plan.processes.iter());
        for child in self.children.drain(..) {
            let depth = depths.get(&child.process.name).copied().unwrap_or(0);
            layers.entry(depth).or_default().push(child);
        }
        for (_, layer) in layers.into_iter().rev() {
            stop_side_by_side(&layer).await;
            for child in layer {
                known.insert(Identity {
                    pid: child.leader.pid(),
                    start_ticks: child.leader.start_ticks(),
                });
                // A process that even SIGKILL did not end would hold us here for good; leave it
                // to the sweep, which reports it.
                if child.leader.ending().ok().flatten().is_some() {
                    let _ = child.leader.reap();
                }
            }
        }
        Ours { known, ..ours }.kill().await.map(|_| ())
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

/// SIGTERM to every group, SIGKILL to those that outlive their patience.
async fn stop_side_by_side(layer: &[Child]) {
    let mut groups: BTreeSet<u32> = layer.iter().map(|child| child.leader.pid()).collect();
    for child in layer {
        let _ = child.leader.signal_group(Signal::TERM);
    }
    let mut patience: BTreeMap<u32, (Patience, Patience)> = layer
        .iter()
        .map(|child| {
            let stop = Duration::from_secs(child.process.stop_seconds);
            (
                child.leader.pid(),
                (Patience::new(stop), Patience::new(stop + KILLED_WITHIN)),
            )
        })
        .collect();
    loop {
        groups = sweep::living_groups(&groups);
        if groups.is_empty() {
            return;
        }
        for child in layer
            .iter()
            .filter(|child| groups.contains(&child.leader.pid()))
        {
            let Some((stop, kill)) = patience.get_mut(&child.leader.pid()) else {
                continue;
            };
            if stop.spent() {
                let _ = child.leader.signal_group(Signal::KILL);
            }
            if kill.spent() {
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How long the longest chain of `after` behind each process is.
fn depths<'a>(processes: impl Iterator<Item = &'a Process> + Clone) -> BTreeMap<String, usize> {
    let count = processes.clone().count();
    let mut depths: BTreeMap<String, usize> =
        processes.clone().map(|p| (p.name.clone(), 0)).collect();
    // As many rounds as there are processes: enough for the longest chain, and an end for a cycle.
    for _ in 0..count {
        for process in processes.clone() {
            let behind = process
                .after
                .iter()
                .filter_map(|name| depths.get(name))
                .max();
            if let Some(depth) = behind.map(|depth| (depth + 1).min(count)) {
                depths.insert(process.name.clone(), depth);
            }
        }
    }
    depths
}

/// A process that somebody else killed says nothing about the product.
fn from_outside(mut failure: Failure, name: &str, ending: Option<Ending>) -> Failure {
    if let Some(Ending::Signal(signal @ (2 | 9 | 15))) = ending {
        failure.class = Class::Environment;
        failure.what = format!("{name} was killed by signal {signal} from outside");
        failure
            .hint
            .get_or_insert_with(|| "see `dmesg` for the out-of-memory killer".to_owned());
    }
    failure
}

fn too_slow(bound: Duration) -> Failure {
    Failure::environment("the stack did not become ready in time")
        .expected(format!("ready within {} s", bound.as_secs()))
        .hint("look at the logs of what was missing; if it was only slow, raise stack.bring_up_seconds (--bring-up)")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Role;

    fn process(name: &str, after: &[&str]) -> Process {
        Process {
            name: name.to_owned(),
            role: Role::Worker,
            group: Group::Core,
            argv: Vec::new(),
            env: BTreeMap::new(),
            after: after.iter().map(|name| (*name).to_owned()).collect(),
            ready: Vec::new(),
            start_seconds: 1,
            stop_seconds: 1,
        }
    }

    #[test]
    fn what_others_depend_on_is_deeper_down() {
        let plan = [
            process("worker0", &["frontend", "etcd"]),
            process("frontend", &["etcd"]),
            process("etcd", &[]),
        ];
        let depths = depths(plan.iter());
        assert_eq!(
            (depths["etcd"], depths["frontend"], depths["worker0"]),
            (0, 1, 2)
        );
    }

    #[test]
    fn a_cycle_has_depths_too() {
        let plan = [process("a", &["b"]), process("b", &["a"])];
        assert_eq!(depths(plan.iter()).len(), 2);
    }

    #[test]
    fn a_kill_from_outside_is_the_environments() {
        let blamed = Failure::product("worker0 died");
        let killed = from_outside(blamed.clone(), "worker0", Some(Ending::Signal(9)));
        assert_eq!(killed.class, Class::Environment);
        assert!(killed.what.contains("signal 9 from outside"));
        assert_eq!(
            from_outside(blamed.clone(), "worker0", Some(Ending::Signal(11))),
            blamed
        );
        assert_eq!(
            from_outside(blamed.clone(), "worker0", Some(Ending::Code(1))),
            blamed
        );
    }
}
