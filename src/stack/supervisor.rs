//! The supervisor: keeps one stack alive and serves leases. One process a fingerprint.
//!
//! It is this binary, executed again with [`SUPERVISE`] as first argument, in a session of its
//! own. It has no policy beyond *start, count, stop*:
//!
//! ```text
//! Starting ──ready──► Ready ──idle, down, evict, a death──► stopping ──► exit
//!    │ failed
//!    └────────► Failed (cached for the run) ──another run──► Starting
//! ```
//!
//! Everything runs on the main thread: the death signal of a child follows the thread that
//! forked it. Whatever can block is a task; the loop here only decides.

mod connection;
mod desk;
mod group;
mod prepare;
mod reference;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use self::connection::{ConnId, Event, accept};
use self::desk::{Desk, Order};
use self::group::{GroupEvent, GroupTask};
use self::prepare::{Prepared, prepare};
use self::reference::Reference;
use super::cookie::Mark;
use super::devices::NotHad;
use super::lease::LaunchSpec;
use super::leftovers::Leftovers;
use super::process;
use super::protocol::{StackInfo, Status, Tell};
use super::state_dir::{StackDir, write_atomic};
use super::sweep::Ours;
use crate::engine::Blueprint;
use crate::failure::Failure;
use crate::launch::local::Started;
use crate::plan::Group;

/// First argument of a supervisor. Hidden: people never type it.
pub const SUPERVISE: &str = "__supervise";

/// A failed supervisor only keeps an answer; there is no stack to keep warm.
const FAILED_KEEP: Duration = Duration::from_secs(60);
/// Freeing a device's memory after its process died.
const DEVICES_WITHIN: Duration = Duration::from_secs(120);
/// A client that does not read its last line in time does not get it.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// The log is started afresh when a new supervisor finds it this large.
pub(super) const LOG_MAX: u64 = 4 * 1024 * 1024;

/// Makes a [`Blueprint`] of what [`LaunchSpec::launch`] holds.
pub type Build<'a> = &'a dyn Fn(&serde_json::Value) -> Result<Box<dyn Blueprint>, Failure>;

/// A line for `supervisor.log`, which is this process's standard error.
fn log(text: &str) {
    // A full disk must not take the stack down.
    let _ = writeln!(io::stderr(), "{:.3} {text}", jiff::Timestamp::now());
}

/// Runs a supervisor; `args` are those after [`SUPERVISE`].
pub fn main(args: impl IntoIterator<Item = OsString>, build: Build<'_>) -> ExitCode {
    match enter(args, build) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log(&format!("cannot supervise: {error}"));
            ExitCode::FAILURE
        }
    }
}

fn enter(args: impl IntoIterator<Item = OsString>, build: Build<'_>) -> io::Result<()> {
    let args: Vec<OsString> = args.into_iter().collect();
    let [dir, lock, listener] = args.as_slice() else {
        return Err(io::Error::other(
            "this is started by the harness, never by hand",
        ));
    };
    let number = |text: &OsString| -> io::Result<RawFd> {
        text.to_str()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| io::Error::other("not a descriptor"))
    };
    // Held until the very end: the lock is this process's liveness.
    let _lock: OwnedFd = process::adopt(number(lock)?)?;
    let listener = UnixListener::from(process::adopt(number(listener)?)?);
    let dir = StackDir::at(dir);
    let spec: LaunchSpec = serde_json::from_slice(&fs::read(dir.launch())?)?;
    process::become_subreaper()?;
    listener.set_nonblocking(true)?;
    // Single-threaded, on the main thread; see above.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let (sender, events) = mpsc::channel(64);
        let supervisor = Supervisor {
            desk: Desk::new(&spec.fingerprint),
            build,
            events,
            door: tokio::spawn(accept(listener, sender)),
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            children: signal(SignalKind::child())?,
            born: Instant::now(),
            spec: Arc::new(spec),
            dir,
        };
        supervisor.run().await;
        io::Result::Ok(())
    })
}

/// Why a stack is stopped.
struct Stop {
    /// Who waits for the word that it is.
    reply: Option<ConnId>,
    why: String,
}

impl Stop {
    fn because(why: impl Into<String>) -> Self {
        Self {
            reply: None,
            why: why.into(),
        }
    }
}

/// How a generation ended.
enum End {
    Stopped(Stop),
    Failed(Failure),
    Busy(String),
}

struct Supervisor<'a> {
    spec: Arc<LaunchSpec>,
    dir: StackDir,
    build: Build<'a>,
    desk: Desk,
    events: mpsc::Receiver<Event>,
    door: JoinHandle<()>,
    terminate: Signal,
    interrupt: Signal,
    children: Signal,
    born: Instant,
}

/// What is told to people while, and after, a generation runs.
#[derive(Default)]
struct View {
    state: &'static str,
    generation: u64,
    started: Option<Started>,
    frontend_url: Option<String>,
    failure: Option<Failure>,
}

impl Supervisor<'_> {
    async fn run(mut self) {
        log(&format!(
            "supervisor {} of {} ({})",
            std::process::id(),
            self.spec.profile,
            self.spec.fingerprint
        ));
        let stop = loop {
            match self.generation().await {
                End::Stopped(stop) => break stop,
                End::Busy(holder) => {
                    self.close_door();
                    self.desk.busy(&holder);
                    break Stop::because(format!("busy: {holder}"));
                }
                End::Failed(failure) => {
                    log(&format!("failed: {failure}"));
                    self.desk.failed(&failure);
                    if let Some(stop) = self.while_failed(failure).await {
                        self.close_door();
                        break stop;
                    }
                }
            }
        };
        log(&format!("exit: {}", stop.why));
        let _ = fs::remove_file(self.dir.state());
        if let Some(id) = stop.reply {
            self.desk.tell(id, Tell::Stopped);
        }
        // Lets the last words out. Connections end with this process, the lock after them.
        drop(self.desk);
        let quiet = async { while self.events.recv().await.is_some() {} };
        let _ = tokio::time::timeout(LAST_WORDS, quiet).await;
    }

    /// One generation, from nothing to nothing.
    async fn generation(&mut self) -> End {
        self.desk.begin();
        let mut view = View {
            state: "starting",
            ..View::default()
        };
        self.write_state(&view);
        let blueprint: Arc<dyn Blueprint> = match (self.build)(&self.spec.launch) {
            Ok(blueprint) => blueprint.into(),
            Err(failure) => return End::Failed(failure),
        };
        let mut prepared = match self.prepare(&*blueprint, &view).await {
            Ok(prepared) => prepared,
            Err(end) => {
                if matches!(end, End::Stopped(_)) {
                    self.close_door();
                }
                return end;
            }
        };
        view.generation = prepared.number;
        let began = Instant::now();
        self.desk.step(format!("generation {}", prepared.number), 0);
        prepared.release_ports();
        let mut core = self.start(&blueprint, &prepared, Group::Core);
        let mut reference = Reference::default();
        let end = self
            .alive(
                &blueprint,
                &mut prepared,
                &mut core,
                &mut reference,
                &mut view,
                began,
            )
            .await;
        // New clients find no socket, wait for the lock and start the next supervisor. After a
        // failure it stays: it has the answer.
        if matches!(end, End::Stopped(_)) {
            self.close_door();
        }
        view.state = "stopping";
        self.write_state(&view);
        self.tear_down(&*blueprint, prepared, core, reference).await;
        end
    }

    async fn prepare(&mut self, blueprint: &dyn Blueprint, view: &View) -> Result<Prepared, End> {
        let (spec, dir) = (self.spec.clone(), self.dir.clone());
        let (say, mut steps) = mpsc::unbounded_channel();
        let work = prepare(&spec, &dir, blueprint, |text| {
            let _ = say.send(text);
        });
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done.map_err(|why| match why {
                    NotHad::Busy(holder) => End::Busy(holder),
                    NotHad::Failed(failure) => End::Failed(failure),
                }),
                Some(text) = steps.recv() => self.desk.step(text, 0),
                Some(event) = self.events.recv() => match self.desk.hear(event) {
                    Some(Order::Status(id)) => self.tell_status(id, view),
                    Some(Order::Stop(id, why)) => {
                        return Err(End::Stopped(Stop { reply: Some(id), why }));
                    }
                    _ => {}
                },
                why = asked_to_end(&mut self.terminate, &mut self.interrupt) => {
                    return Err(End::Stopped(Stop::because(why)));
                }
            }
        }
    }

    fn start(
        &self,
        blueprint: &Arc<dyn Blueprint>,
        prepared: &Prepared,
        group: Group,
    ) -> GroupTask {
        GroupTask::start(
            blueprint.clone(),
            prepared.plan.clone(),
            group,
            prepared.place.clone(),
            Duration::from_secs(self.spec.bring_up_seconds),
        )
    }

    /// From the first spawn until something ends the generation.
    async fn alive(
        &mut self,
        blueprint: &Arc<dyn Blueprint>,
        prepared: &mut Prepared,
        core: &mut GroupTask,
        reference: &mut Reference,
        view: &mut View,
        began: Instant,
    ) -> End {
        let mut steps: Vec<(String, u64)> = Vec::new();
        loop {
            let idle_at = self.idle_stop_at(view);
            let reference_at =
                reference.stops_at(Duration::from_secs(self.spec.reference_keep_seconds));
            let life_ends = self.born + Duration::from_secs(self.spec.max_lifetime_seconds);
            tokio::select! {
                event = core.next() => match event {
                    GroupEvent::Step(text) => {
                        let at_ms = millis(began.elapsed());
                        steps.push((text.clone(), at_ms));
                        self.desk.step(text, at_ms);
                    }
                    GroupEvent::Up(started) => {
                        let info = self.stack_info(prepared, &started, std::mem::take(&mut steps));
                        log(&format!("ready after {} ms", info.bring_up_ms));
                        view.state = "ready";
                        view.frontend_url = Some(info.plan.frontend_url.clone());
                        view.started = Some(started);
                        self.observe(prepared);
                        self.write_state(view);
                        self.desk.ready(info);
                    }
                    GroupEvent::Failed(failure) => return End::Failed(failure),
                    GroupEvent::Died(failure) => {
                        log(&format!("broken: {failure}"));
                        self.desk.broken(&failure);
                        return End::Stopped(Stop::because("a process of the stack died"));
                    }
                    GroupEvent::Stopped(_) => {}
                },
                event = reference.next() => {
                    let up = matches!(event, GroupEvent::Up(_));
                    let start = self.reference_group(blueprint, prepared);
                    reference.hear(event, &mut self.desk, start);
                    if up {
                        self.observe(prepared);
                    }
                }
                Some(event) = self.events.recv() => match self.desk.hear(event) {
                    Some(Order::Reference(id)) => {
                        let start = self.reference_group(blueprint, prepared);
                        reference.asked(id, &mut self.desk, start);
                    }
                    Some(Order::Ended(id)) => {
                        reference.ended(id);
                        self.observe(prepared);
                    }
                    Some(Order::Status(id)) => self.tell_status(id, view),
                    Some(Order::Stop(id, why)) => {
                        self.desk.broken(&stopped_on_purpose(&why));
                        return End::Stopped(Stop { reply: Some(id), why });
                    }
                    Some(Order::Retry) | None => {}
                },
                () = at(reference_at) => reference.idle(),
                () = at(idle_at) => return End::Stopped(Stop::because("nobody needs the stack")),
                () = at(Some(life_ends)) => {
                    let why = format!("max_lifetime of {} s is over", self.spec.max_lifetime_seconds);
                    self.desk.broken(&stopped_on_purpose(&why));
                    return End::Stopped(Stop::because(why));
                }
                why = asked_to_end(&mut self.terminate, &mut self.interrupt) => {
                    self.desk.broken(&stopped_on_purpose(why));
                    return End::Stopped(Stop::because(why));
                }
                _ = self.children.recv() => process::reap_orphans(),
            }
        }
    }

    fn reference_group(
        &self,
        blueprint: &Arc<dyn Blueprint>,
        prepared: &Prepared,
    ) -> impl FnOnce() -> Result<GroupTask, Failure> + use<> {
        let parts = prepared.plan.reference.is_some().then(|| {
            (
                blueprint.clone(),
                prepared.plan.clone(),
                prepared.place.clone(),
            )
        });
        let bound = Duration::from_secs(self.spec.bring_up_seconds);
        move || match parts {
            Some((blueprint, plan, place)) => {
                log("reference: starting");
                Ok(GroupTask::start(
                    blueprint,
                    plan,
                    Group::Reference,
                    place,
                    bound,
                ))
            }
            None => Err(Failure::environment("this plan has no reference engine")),
        }
    }

    async fn tear_down(
        &mut self,
        blueprint: &dyn Blueprint,
        mut prepared: Prepared,
        core: GroupTask,
        reference: Reference,
    ) {
        self.observe(&mut prepared);
        let (core, reference) = tokio::join!(core.end(), reference.end());
        for failure in [core, reference].into_iter().filter_map(Result::err) {
            log(&format!("stop: {failure}"));
        }
        let leftovers = Leftovers::of(&self.dir, &self.spec.fingerprint, Some(std::process::id()));
        match leftovers.sweep().await {
            Ok(swept) => log(&format!(
                "swept {} processes, {} shared-memory files",
                swept.processes,
                swept.files.len()
            )),
            Err(failure) => log(&format!("sweep: {failure}")),
        }
        process::reap_orphans();
        match tokio::time::timeout(DEVICES_WITHIN, blueprint.devices_released()).await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => log(&format!("devices: {failure}")),
            Err(_) => log("devices: not back at their baseline in time"),
        }
        // `prepared` ends here, and with it the locks of devices and ports.
    }

    /// Keeps the answer until another run comes, or nobody does.
    async fn while_failed(&mut self, failure: Failure) -> Option<Stop> {
        let view = View {
            state: "failed",
            failure: Some(failure),
            ..View::default()
        };
        self.write_state(&view);
        loop {
            let idle_at = self.idle_stop_at(&view);
            tokio::select! {
                Some(event) = self.events.recv() => match self.desk.hear(event) {
                    Some(Order::Retry) => return None,
                    Some(Order::Status(id)) => self.tell_status(id, &view),
                    Some(Order::Stop(id, why)) => return Some(Stop { reply: Some(id), why }),
                    _ => {}
                },
                () = at(idle_at) => return Some(Stop::because("failed, and nobody asks")),
                why = asked_to_end(&mut self.terminate, &mut self.interrupt) => {
                    return Some(Stop::because(why));
                }
            }
        }
    }

    fn stack_info(
        &self,
        prepared: &Prepared,
        started: &Started,
        steps: Vec<(String, u64)>,
    ) -> StackInfo {
        StackInfo {
            fingerprint: self.spec.fingerprint.clone(),
            generation: prepared.number,
            variant: 0,
            plan: (*prepared.plan).clone(),
            processes: started.processes.clone(),
            workers: started.workers.clone(),
            logs: prepared.place.logs.clone(),
            reference_dir: prepared.dir.join("reference"),
            bring_up_ms: millis(started.took),
            steps,
            started_for_this_lease: false,
        }
    }

    /// Writes down what is ours while it certainly is.
    fn observe(&self, prepared: &mut Prepared) {
        let ours = Ours {
            mark: Mark {
                fingerprint: self.spec.fingerprint.clone(),
                home: self.dir.path().to_owned(),
                processes: None,
            },
            known: BTreeSet::new(),
            ancestor: Some(std::process::id()),
        };
        prepared.inventory.observe(&ours);
        if let Err(failure) = prepared.inventory.save(&prepared.dir) {
            log(&format!("inventory: {failure}"));
        }
    }

    fn idle_stop_at(&self, view: &View) -> Option<Instant> {
        let keep = Duration::from_secs(self.spec.keep_seconds);
        let keep = match view.state {
            "ready" => keep,
            "failed" => keep.min(FAILED_KEEP),
            // Bring-up goes on when the last client leaves: the next one is seconds away.
            _ => return None,
        };
        Some(self.desk.idle_since()? + keep)
    }

    /// From here on new clients find no socket; those in the backlog read EOF.
    fn close_door(&self) {
        let _ = fs::remove_file(self.dir.socket());
        self.door.abort();
    }

    fn status(&self, view: &View) -> Status {
        Status {
            state: view.state.to_owned(),
            fingerprint: self.spec.fingerprint.clone(),
            generation: view.generation,
            profile: self.spec.profile.clone(),
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

    fn tell_status(&mut self, id: ConnId, view: &View) {
        let status = Box::new(self.status(view));
        self.desk.tell(id, Tell::Status { status });
    }

    fn write_state(&self, view: &View) {
        log(view.state);
        write_json(&self.dir.state(), &self.status(view));
    }
}

fn write_json(path: &Path, value: &impl serde::Serialize) {
    let text = serde_json::to_vec_pretty(value).unwrap_or_default();
    if let Err(error) = write_atomic(path, &text) {
        log(&format!("{}: {error}", path.display()));
    }
}

fn stopped_on_purpose(why: &str) -> Failure {
    Failure::inconclusive("the stack was stopped under the lease").found(why)
}

async fn asked_to_end(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

async fn at(when: Option<Instant>) {
    match when {
        Some(when) => tokio::time::sleep_until(when.into()).await,
        None => std::future::pending().await,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
