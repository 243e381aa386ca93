//! One generation of the stack: from nothing, through its life, to nothing again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::connection::ConnId;
use super::desk::Order;
use super::group::{GroupEvent, GroupTask};
use super::prepare::{Prepared, prepare};
use super::reference::Reference;
use super::view::View;
use super::{End, Stop, Supervisor, asked_to_end, at, log};
use crate::engine::Blueprint;
use crate::failure::Failure;
use crate::launch::local::Started;
use crate::plan::Group;
use crate::stack::cookie::Mark;
use crate::stack::devices::NotHad;
use crate::stack::ended;
use crate::stack::harm::Done;
use crate::stack::leftovers::Leftovers;
use crate::stack::process;
use crate::stack::protocol::{StackInfo, Tell, millis};
use crate::stack::sweep::Ours;

/// Freeing a device's memory after its process died.
const DEVICES_WITHIN: Duration = Duration::from_secs(120);

impl Supervisor<'_> {
    /// One generation, from nothing to nothing.
    pub(super) async fn generation(&mut self) -> End {
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
                        self.put_down(&why);
                        return Err(End::Stopped(Stop { reply: Some(id), why }));
                    }
                    _ => {}
                },
                why = asked_to_end(&mut self.terminate, &mut self.interrupt) => {
                    self.put_down(why);
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

    /// Somebody stops the stack on purpose: its runs may not bring it up again.
    fn put_down(&mut self, why: &str) {
        let runs = self.desk.put_down(&ended::stopped(why));
        if let Err(failure) = ended::remember(&self.dir, runs) {
            log(&format!("the runs it ends: {failure}"));
        }
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
        // Who asked for a deed, and its number there; a ticket is a position.
        let mut tickets: Vec<(ConnId, u64)> = Vec::new();
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
                    GroupEvent::Death(death) => {
                        log(&format!("permitted: {death:?}"));
                        self.desk.died(&death);
                    }
                    GroupEvent::Done(ticket, done) => {
                        let asked = usize::try_from(ticket).ok().and_then(|at| tickets.get(at));
                        let settled = matches!(done, Done::Replaced(_));
                        if let Some((id, number)) = asked.copied() {
                            let done = Box::new(done);
                            self.desk.tell(id, Tell::Done { number, done });
                        }
                        if settled {
                            self.observe(prepared);
                        }
                    }
                    GroupEvent::Changed(started) => {
                        self.desk.changed(&started);
                        view.started = Some(started);
                    }
                    GroupEvent::Whole(started) => {
                        log("whole again");
                        self.desk.changed(&started);
                        view.started = Some(started);
                        view.state = "ready";
                        self.observe(prepared);
                        self.write_state(view);
                        self.desk.whole();
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
                        if self.desk.harmed() {
                            view.state = "mending";
                            self.write_state(view);
                            core.mend();
                        }
                    }
                    Some(Order::Status(id)) => self.tell_status(id, view),
                    Some(Order::Stop(id, why)) => {
                        self.put_down(&why);
                        return End::Stopped(Stop { reply: Some(id), why });
                    }
                    Some(Order::Harm(id, number, deed)) => {
                        log(&format!("connection {id}: {deed:?}"));
                        tickets.push((id, number));
                        core.harm(tickets.len() as u64 - 1, deed);
                    }
                    Some(Order::Start) | None => {}
                },
                () = at(reference_at) => reference.idle(),
                () = at(idle_at) => return End::Stopped(Stop::because("nobody needs the stack")),
                () = at(Some(life_ends)) => {
                    let why = format!("max_lifetime of {} s is over", self.spec.max_lifetime_seconds);
                    self.desk.broken(&ended::stopped(&why));
                    return End::Stopped(Stop::because(why));
                }
                why = asked_to_end(&mut self.terminate, &mut self.interrupt) => {
                    self.put_down(why);
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
}
