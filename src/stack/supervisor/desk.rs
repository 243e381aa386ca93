//! The front desk: who is connected, who holds a lease, who waits, and what they are told.
//!
//! It knows nothing of processes. What a client wants that the desk cannot do by itself comes
//! back as an [`Order`].

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use tokio::sync::mpsc;

use super::connection::{ConnId, Event};
use super::log;
use crate::failure::Failure;
use crate::launch::local::Started;
use crate::stack::harm::{Death, Deed, Done};
use crate::stack::protocol::{Ask, Mode, PROTOCOL, StackInfo, Tell};
use crate::stack::queue::Queue;

/// Runs whose failure is remembered. A supervisor rarely meets more than two.
const RUNS_MAX: usize = 32;

/// What the desk cannot do by itself.
#[derive(Debug, PartialEq)]
pub(super) enum Order {
    /// A granted lease wants the reference engine.
    Reference(ConnId),
    /// The exclusive holder wants something done to a process.
    Harm(ConnId, u64, Deed),
    /// Somebody asks what is going on.
    Status(ConnId),
    /// Somebody wants the stack stopped, and may.
    Stop(ConnId, String),
    /// No stack is up, and a lease that may have one wants it.
    Start,
    /// A lease that was granted is over.
    Ended(ConnId),
}

/// What the desk tells those who come.
#[derive(Debug)]
enum Phase {
    Starting {
        last: Option<Tell>,
    },
    Ready(Box<StackInfo>),
    /// Nothing runs: nobody asked yet, or bring-up failed.
    Down,
}

#[derive(Debug)]
struct Conn {
    outbox: mpsc::Sender<Tell>,
    lease: Option<Lease>,
}

#[derive(Clone, Debug)]
struct Lease {
    case: String,
    run_id: String,
    pid: u32,
    mode: Mode,
    /// It came before the stack was ready.
    early: bool,
    behind: Vec<String>,
}

/// The front desk of one supervisor.
#[derive(Debug)]
pub(super) struct Desk {
    fingerprint: String,
    conns: BTreeMap<ConnId, Conn>,
    queue: Queue<ConnId>,
    phase: Phase,
    /// Runs that waited for this bring-up, whether or not they still do.
    runs: BTreeSet<String>,
    failures: BTreeMap<String, Failure>,
    /// Something was done to the stack: nobody gets it before it is whole again.
    harmed: bool,
    variants: BTreeMap<String, u64>,
    idle_since: Instant,
}

impl Desk {
    pub(super) fn new(fingerprint: &str) -> Self {
        Self {
            fingerprint: fingerprint.to_owned(),
            conns: BTreeMap::new(),
            queue: Queue::default(),
            phase: Phase::Down,
            runs: BTreeSet::new(),
            failures: BTreeMap::new(),
            harmed: false,
            variants: BTreeMap::new(),
            idle_since: Instant::now(),
        }
    }

    /// A generation begins.
    pub(super) fn begin(&mut self) {
        self.phase = Phase::Starting { last: None };
        self.harmed = false;
        self.variants.clear();
        self.runs = self
            .queue
            .waiting()
            .filter_map(|id| Some(self.lease(id)?.run_id.clone()))
            .collect();
    }

    /// Takes in what happened on a connection.
    pub(super) fn hear(&mut self, event: Event) -> Option<Order> {
        match event {
            Event::Opened(id, outbox) => {
                self.conns.insert(
                    id,
                    Conn {
                        outbox,
                        lease: None,
                    },
                );
                None
            }
            Event::Said(id, ask) => self.answer(id, ask),
            Event::Closed(id) => self.leave(id),
        }
    }

    fn answer(&mut self, id: ConnId, ask: Ask) -> Option<Order> {
        match ask {
            Ask::Lease {
                protocol,
                fingerprint,
                run_id,
                case,
                mode,
                pid,
            } => {
                if self.lease(id).is_some()
                    || protocol != PROTOCOL
                    || fingerprint != self.fingerprint
                {
                    self.hang_up(id, "not a lease of this stack");
                    return None;
                }
                let lease = Lease {
                    case,
                    run_id,
                    pid,
                    mode,
                    early: !matches!(self.phase, Phase::Ready(_)),
                    behind: Vec::new(),
                };
                self.take_in(id, lease)
            }
            Ask::Reference if self.queue.held().any(|held| held == id) => {
                Some(Order::Reference(id))
            }
            Ask::Reference => {
                self.hang_up(id, "the reference was asked for without a lease");
                None
            }
            Ask::Harm { number, deed } => self.may_harm(id, number, deed),
            Ask::Status => Some(Order::Status(id)),
            Ask::Down { force } => self.may_stop(id, force, "asked to stop".to_owned()),
            Ask::Evict { by } => self.may_stop(id, false, format!("{by} wants the device")),
        }
    }

    fn take_in(&mut self, id: ConnId, lease: Lease) -> Option<Order> {
        if let Some(failure) = self.failures.get(&lease.run_id).cloned() {
            log(&format!("{}: the same failure as before", describe(&lease)));
            self.tell(id, Tell::Failed { failure });
            // The rest of the run may want the same answer.
            self.idle_since = Instant::now();
            return None;
        }
        log(&format!("{}: waits", describe(&lease)));
        let (mode, run_id) = (lease.mode, lease.run_id.clone());
        self.conns.get_mut(&id)?.lease = Some(lease);
        self.queue.push(id, mode);
        match &self.phase {
            Phase::Starting { last } => {
                let last = last.clone();
                self.runs.insert(run_id);
                if let Some(last) = last {
                    self.tell(id, last);
                }
                None
            }
            Phase::Ready(_) => {
                self.grant();
                None
            }
            Phase::Down => Some(Order::Start),
        }
    }

    /// Only whoever has the stack alone may harm it.
    fn may_harm(&mut self, id: ConnId, number: u64, deed: Deed) -> Option<Order> {
        let alone = self.queue.held().any(|held| held == id)
            && self
                .lease(id)
                .is_some_and(|lease| lease.mode == Mode::Exclusive);
        if alone {
            self.harmed = true;
            return Some(Order::Harm(id, number, deed));
        }
        let failure = Failure::inconclusive("the stack may not be harmed on this lease")
            .expected("a lease that is exclusive, and granted")
            .hint("declare the arm exclusive");
        let done = Box::new(Done::Failed { failure });
        self.tell(id, Tell::Done { number, done });
        None
    }

    fn may_stop(&mut self, id: ConnId, force: bool, why: String) -> Option<Order> {
        let holders = self.leases();
        if force || holders.is_empty() {
            return Some(Order::Stop(id, why));
        }
        self.tell(
            id,
            Tell::Busy {
                holder: holders.join(", "),
            },
        );
        None
    }

    fn leave(&mut self, id: ConnId) -> Option<Order> {
        let lease = self.conns.remove(&id)?.lease;
        let held = self.queue.remove(id);
        if let Some(lease) = &lease {
            log(&format!(
                "{}: {}",
                describe(lease),
                if held { "over" } else { "left the queue" }
            ));
            if self.queue.is_empty() {
                self.idle_since = Instant::now();
            }
        }
        self.grant();
        held.then_some(Order::Ended(id))
    }

    fn grant(&mut self) {
        let Phase::Ready(stack) = &self.phase else {
            return;
        };
        if self.harmed {
            return;
        }
        let stack = stack.clone();
        for id in self.queue.grant() {
            let Some(lease) = self.lease(id).cloned() else {
                continue;
            };
            let count = self.variants.entry(lease.case.clone()).or_default();
            let variant = *count;
            *count += 1;
            log(&format!("{}: granted, variant {variant}", describe(&lease)));
            let stack = Box::new(StackInfo {
                variant,
                started_for_this_lease: lease.early,
                ..(*stack).clone()
            });
            self.tell(id, Tell::Ready { stack });
        }
        let behind: Vec<String> = self
            .queue
            .held()
            .filter_map(|id| Some(self.lease(id)?.case.clone()))
            .collect();
        for id in self.queue.waiting().collect::<Vec<_>>() {
            let Some(lease) = self.conns.get_mut(&id).and_then(|conn| conn.lease.as_mut()) else {
                continue;
            };
            if lease.behind != behind {
                lease.behind.clone_from(&behind);
                let behind = behind.clone();
                self.tell(id, Tell::Queued { behind });
            }
        }
    }

    /// Bring-up goes on.
    pub(super) fn step(&mut self, text: String, at_ms: u64) {
        log(&text);
        let step = Tell::Step { text, at_ms };
        for id in self.queue.waiting().collect::<Vec<_>>() {
            self.tell(id, step.clone());
        }
        if let Phase::Starting { last } = &mut self.phase {
            *last = Some(step);
        }
    }

    /// The stack is up.
    pub(super) fn ready(&mut self, stack: StackInfo) {
        self.phase = Phase::Ready(Box::new(stack));
        self.idle_since = Instant::now();
        self.grant();
    }

    /// Other processes run now.
    pub(super) fn changed(&mut self, started: &Started) {
        if let Phase::Ready(stack) = &mut self.phase {
            stack.processes.clone_from(&started.processes);
            stack.workers.clone_from(&started.workers);
        }
    }

    /// Whether something was done to the stack that nobody has put right.
    pub(super) fn harmed(&self) -> bool {
        self.harmed
    }

    /// The stack is whole again.
    pub(super) fn whole(&mut self) {
        self.harmed = false;
        self.grant();
    }

    /// Tells whoever holds the stack alone of a death that was permitted.
    pub(super) fn died(&mut self, death: &Death) {
        for id in self.queue.held().collect::<Vec<_>>() {
            let death = death.clone();
            self.tell(id, Tell::Died { death });
        }
    }

    /// Bring-up failed, and everything is stopped again.
    pub(super) fn failed(&mut self, failure: &Failure) {
        self.phase = Phase::Down;
        self.idle_since = Instant::now();
        for run in std::mem::take(&mut self.runs) {
            if self.failures.len() >= RUNS_MAX {
                self.failures.pop_first();
            }
            self.failures.insert(run, failure.clone());
        }
        self.answer_waiting(&Tell::Failed {
            failure: failure.clone(),
        });
    }

    /// Somebody else uses the device.
    pub(super) fn busy(&mut self, holder: &str) {
        self.answer_waiting(&Tell::Busy {
            holder: holder.to_owned(),
        });
    }

    fn answer_waiting(&mut self, tell: &Tell) {
        for id in self.queue.waiting().collect::<Vec<_>>() {
            self.tell(id, tell.clone());
            self.queue.remove(id);
            if let Some(conn) = self.conns.get_mut(&id) {
                conn.lease = None;
            }
        }
    }

    /// Somebody stops the stack on purpose. Whoever holds it or waits for it hears of it, and the
    /// runs they belong to come back.
    pub(super) fn put_down(&mut self, failure: &Failure) -> BTreeSet<String> {
        let ids: Vec<ConnId> = self.queue.held().chain(self.queue.waiting()).collect();
        let runs = ids
            .into_iter()
            .filter_map(|id| Some(self.lease(id)?.run_id.clone()))
            .collect();
        self.answer_waiting(&Tell::Failed {
            failure: failure.clone(),
        });
        self.broken(failure);
        runs
    }

    /// The stack is not what it was. Those who wait read EOF and come again.
    pub(super) fn broken(&mut self, failure: &Failure) {
        for id in self.queue.held().collect::<Vec<_>>() {
            self.tell(
                id,
                Tell::Broken {
                    failure: failure.clone(),
                },
            );
        }
        for id in self.queue.waiting().collect::<Vec<_>>() {
            self.queue.remove(id);
            self.conns.remove(&id);
        }
    }

    /// Says something to one client. One that is too far behind is dropped.
    pub(super) fn tell(&mut self, id: ConnId, tell: Tell) {
        let Some(conn) = self.conns.get(&id) else {
            return;
        };
        if let Err(mpsc::error::TrySendError::Full(_)) = conn.outbox.try_send(tell) {
            self.hang_up(id, "does not read");
        }
    }

    fn hang_up(&mut self, id: ConnId, why: &str) {
        log(&format!("connection {id}: {why}"));
        // Its lease ends when the connection's task reports the end, as with any other.
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.outbox = mpsc::channel(1).0;
        }
    }

    fn lease(&self, id: ConnId) -> Option<&Lease> {
        self.conns.get(&id)?.lease.as_ref()
    }

    /// The run a lease belongs to.
    pub(super) fn run_of(&self, id: ConnId) -> Option<&str> {
        Some(&self.lease(id)?.run_id)
    }

    /// Since when nobody holds the stack or waits for it.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.queue.is_empty().then_some(self.idle_since)
    }

    /// Everyone who holds the stack or waits for it, for people.
    pub(super) fn leases(&self) -> Vec<String> {
        self.held().into_iter().chain(self.waiting()).collect()
    }

    /// Everyone who holds the stack, for people.
    pub(super) fn held(&self) -> Vec<String> {
        self.queue
            .held()
            .filter_map(|id| self.lease(id).map(describe))
            .collect()
    }

    /// Everyone who waits, for people.
    pub(super) fn waiting(&self) -> Vec<String> {
        self.queue
            .waiting()
            .filter_map(|id| self.lease(id).map(describe))
            .collect()
    }
}

fn describe(lease: &Lease) -> String {
    let mode = match lease.mode {
        Mode::Shared => "shared",
        Mode::Exclusive => "exclusive",
    };
    format!(
        "{} ({mode}, run {}, pid {})",
        lease.case, lease.run_id, lease.pid
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Client(ConnId, mpsc::Receiver<Tell>);

    fn connect(desk: &mut Desk, id: ConnId) -> Client {
        let (outbox, tells) = mpsc::channel(8);
        desk.hear(Event::Opened(id, outbox));
        Client(id, tells)
    }

    fn lease(desk: &mut Desk, client: &Client, run: &str) -> Option<Order> {
        desk.hear(Event::Said(
            client.0,
            Ask::Lease {
                protocol: PROTOCOL,
                fingerprint: "fp".to_owned(),
                run_id: run.to_owned(),
                case: "tc01::cold".to_owned(),
                mode: Mode::Shared,
                pid: 1,
            },
        ))
    }

    #[test]
    fn a_failure_is_remembered_for_its_run_and_another_run_may_retry() {
        let mut desk = Desk::new("fp");
        desk.begin();
        let mut one = connect(&mut desk, 1);
        assert_eq!(lease(&mut desk, &one, "run1"), None);
        let failure = Failure::environment("no");
        desk.failed(&failure);
        assert_eq!(
            one.1.try_recv(),
            Ok(Tell::Failed {
                failure: failure.clone()
            })
        );
        let mut two = connect(&mut desk, 2);
        assert_eq!(lease(&mut desk, &two, "run1"), None);
        assert_eq!(two.1.try_recv(), Ok(Tell::Failed { failure }));
        let three = connect(&mut desk, 3);
        assert_eq!(lease(&mut desk, &three, "run2"), Some(Order::Start));
    }

    #[test]
    fn a_run_that_left_before_the_failure_still_gets_it() {
        let mut desk = Desk::new("fp");
        desk.begin();
        let one = connect(&mut desk, 1);
        lease(&mut desk, &one, "run1");
        desk.hear(Event::Closed(1));
        desk.failed(&Failure::environment("no"));
        let mut two = connect(&mut desk, 2);
        assert_eq!(lease(&mut desk, &two, "run1"), None);
        assert!(matches!(two.1.try_recv(), Ok(Tell::Failed { .. })));
    }

    #[test]
    fn whoever_uses_the_stack_keeps_it_up_unless_forced() {
        let mut desk = Desk::new("fp");
        desk.begin();
        let one = connect(&mut desk, 1);
        lease(&mut desk, &one, "run1");
        assert!(desk.idle_since().is_none());
        let mut two = connect(&mut desk, 2);
        assert_eq!(desk.hear(Event::Said(2, Ask::Down { force: false })), None);
        assert!(
            matches!(two.1.try_recv(), Ok(Tell::Busy { holder }) if holder.contains("tc01::cold"))
        );
        let stop = desk.hear(Event::Said(2, Ask::Down { force: true }));
        assert!(matches!(stop, Some(Order::Stop(2, _))));
        desk.hear(Event::Closed(1));
        assert!(desk.idle_since().is_some());
    }

    #[test]
    fn a_lease_of_another_fingerprint_is_hung_up_on() {
        let mut desk = Desk::new("other");
        let mut one = connect(&mut desk, 1);
        assert_eq!(lease(&mut desk, &one, "run1"), None);
        assert_eq!(
            one.1.try_recv(),
            Err(mpsc::error::TryRecvError::Disconnected)
        );
        assert!(desk.leases().is_empty());
    }
}
