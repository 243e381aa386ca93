//! One group of processes as a task: it starts, it is up, it ends.
//!
//! Whatever happens, everything of the group is stopped when the last event comes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::engine::Blueprint;
use crate::failure::Failure;
use crate::launch::local::{self, Local, Place, Started};
use crate::plan::{Group, Plan};
use crate::stack::harm::{Death, Deed, Done};

/// What becomes of a group.
#[derive(Debug)]
pub(super) enum GroupEvent {
    /// Bring-up goes on.
    Step(String),
    /// It is ready.
    Up(Started),
    /// It did not become ready, and is stopped. Last event.
    Failed(Failure),
    /// A process of it died, or it cannot be made whole; the rest is being stopped.
    Died(Failure),
    /// A process ended whose end was permitted.
    Death(Death),
    /// What came of the deed with this ticket.
    Done(u64, Done),
    /// Other processes run now.
    Changed(Started),
    /// It is whole again.
    Whole(Started),
    /// It is stopped. Last event.
    Stopped(Result<(), Failure>),
}

/// What a group that is up is told.
#[derive(Debug)]
enum Command {
    Do(u64, Deed),
    Mend,
}

/// A group that was told to start.
#[derive(Debug)]
pub(super) struct GroupTask {
    stop: Option<oneshot::Sender<()>>,
    commands: mpsc::UnboundedSender<Command>,
    events: mpsc::Receiver<GroupEvent>,
}

impl GroupTask {
    pub(super) fn start(
        blueprint: Arc<dyn Blueprint>,
        plan: Arc<Plan>,
        group: Group,
        place: Place,
        bound: Duration,
    ) -> Self {
        let (sender, events) = mpsc::channel(256);
        let (stop, stopped) = oneshot::channel();
        let (commands, told) = mpsc::unbounded_channel();
        let steps = sender.clone();
        let say = Arc::new(move |text| {
            // Progress is for people: lost if nobody keeps up.
            let _ = steps.try_send(GroupEvent::Step(text));
        });
        let local = Local::new(blueprint, plan, group, place, say);
        tokio::spawn(run(local, bound, stopped, told, sender));
        Self {
            stop: Some(stop),
            commands,
            events,
        }
    }

    /// Has a deed done, once it is up; [`GroupEvent::Done`] with this ticket follows, unless it
    /// ends before.
    pub(super) fn harm(&self, ticket: u64, deed: Deed) {
        // One that has ended says so by itself.
        let _ = self.commands.send(Command::Do(ticket, deed));
    }

    /// Makes it whole; [`GroupEvent::Whole`] or [`GroupEvent::Died`] follows.
    pub(super) fn mend(&self) {
        let _ = self.commands.send(Command::Mend);
    }

    /// Asks it to stop; [`GroupEvent::Stopped`] or [`GroupEvent::Failed`] follows.
    pub(super) fn stop(&mut self) {
        self.stop.take();
    }

    /// The next event. Cancel-safe.
    pub(super) async fn next(&mut self) -> GroupEvent {
        match self.events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    /// Stops it and waits for the end.
    pub(super) async fn end(mut self) -> Result<(), Failure> {
        self.stop();
        while let Some(event) = self.events.recv().await {
            if let GroupEvent::Stopped(result) = event {
                return result;
            }
        }
        Ok(())
    }
}

async fn run(
    mut local: Local,
    bound: Duration,
    mut stop: oneshot::Receiver<()>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    events: mpsc::Sender<GroupEvent>,
) {
    let started = tokio::select! {
        started = local.start(bound) => Some(started),
        // Sent or dropped: both mean stop.
        _ = &mut stop => None,
    };
    match started {
        None => {}
        Some(Err(failure)) => {
            let _ = local.stop().await;
            let _ = events.send(GroupEvent::Failed(failure)).await;
            return;
        }
        Some(Ok(started)) => {
            let _ = events.send(GroupEvent::Up(started)).await;
            live(&mut local, &mut stop, &mut commands, &events).await;
        }
    }
    let result = local.stop().await;
    let _ = events.send(GroupEvent::Stopped(result)).await;
}

/// Until it is stopped, or is not what it was.
async fn live(
    local: &mut Local,
    stop: &mut oneshot::Receiver<()>,
    commands: &mut mpsc::UnboundedReceiver<Command>,
    events: &mpsc::Sender<GroupEvent>,
) {
    loop {
        let event = tokio::select! {
            event = local.next() => match event {
                local::Event::Died(failure) | local::Event::Whole(Err(failure)) => {
                    let _ = events.send(GroupEvent::Died(failure)).await;
                    return;
                }
                local::Event::Death(death) => GroupEvent::Death(death),
                local::Event::Done(ticket, done) => GroupEvent::Done(ticket, done),
                local::Event::Changed(started) => GroupEvent::Changed(started),
                local::Event::Whole(Ok(started)) => GroupEvent::Whole(started),
            },
            Some(command) = commands.recv() => match command {
                Command::Do(ticket, deed) => match local.obey(ticket, deed) {
                    Some(done) => GroupEvent::Done(ticket, done),
                    None => continue,
                },
                Command::Mend => {
                    local.mend();
                    continue;
                }
            },
            // Sent or dropped: both mean stop.
            _ = &mut *stop => return,
        };
        let _ = events.send(event).await;
    }
}
