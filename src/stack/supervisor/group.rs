//! One group of processes as a task: it starts, it is up, it ends.
//!
//! Whatever happens, everything of the group is stopped when the last event comes.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::engine::Blueprint;
use crate::failure::Failure;
use crate::launch::local::{Local, Place, Started};
use crate::plan::{Group, Plan};

/// What becomes of a group.
#[derive(Debug)]
pub(super) enum GroupEvent {
    /// Bring-up goes on.
    Step(String),
    /// It is ready.
    Up(Started),
    /// It did not become ready, and is stopped. Last event.
    Failed(Failure),
    /// A process of it died; the rest is being stopped.
    Died(Failure),
    /// It is stopped. Last event.
    Stopped(Result<(), Failure>),
}

/// A group that was told to start.
#[derive(Debug)]
pub(super) struct GroupTask {
    stop: Option<oneshot::Sender<()>>,
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
        let steps = sender.clone();
        let say = Arc::new(move |text| {
            // Progress is for people: lost if nobody keeps up.
            let _ = steps.try_send(GroupEvent::Step(text));
        });
        let local = Local::new(blueprint, plan, group, place, say);
        tokio::spawn(run(local, bound, stopped, sender));
        Self {
            stop: Some(stop),
            events,
        }
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
            let death = tokio::select! {
                failure = local.died() => Some(failure),
                _ = &mut stop => None,
            };
            if let Some(failure) = death {
                let _ = events.send(GroupEvent::Died(failure)).await;
            }
        }
    }
    let result = local.stop().await;
    let _ = events.send(GroupEvent::Stopped(result)).await;
}
