//! Fetches pages from peers.
//!
//! Counts what the real target counts: `remote_deliver` and `hint_wait` for each fetch, the
//! control messages it sent and handled. Bytes are counted by the source only.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::peer::{self, Answer, Ask, LONGEST_BODY, MOST_KEYS};
use super::{Lies, Telemetry};
use crate::sim::fault::{Fault, Faults, Part};
use crate::sim::model::Key;
use crate::sim::settings::Latency;
use crate::stack::wait::within;

/// What came of a fetch.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Fetched {
    /// Every page, in the order asked for.
    All(Vec<Vec<u8>>),
    /// Some of them.
    Partial(Vec<Option<Vec<u8>>>),
    /// None.
    Failed(Why),
}

/// Why nothing was fetched.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Why {
    /// The source said no, or holds none of the pages.
    Refused(String),
    /// Nothing came within the operation timeout.
    TimedOut,
    /// There is no connection, or it broke.
    Unreachable(String),
}

/// Fetches, and keeps connections to peers.
pub struct Target {
    shared: Arc<Shared>,
}

struct Shared {
    /// Names this target for as long as it lives.
    agent: String,
    faults: Arc<Faults>,
    telemetry: Arc<dyn Telemetry>,
    operation_timeout: Duration,
    abandon_timeout: Duration,
    /// Connections that nobody uses at the moment, by endpoint.
    idle: Mutex<HashMap<String, Vec<TcpStream>>>,
    in_flight: Mutex<i64>,
}

/// One operation that counts as in flight.
struct InFlight(Arc<Shared>);

impl InFlight {
    fn new(shared: &Arc<Shared>) -> Self {
        let in_flight = Self(Arc::clone(shared));
        in_flight.change(1);
        in_flight
    }

    /// Counted and shown as one: of two that end together the earlier number may not be shown last.
    fn change(&self, by: i64) {
        let mut now = self
            .0
            .in_flight
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *now += by;
        self.0.telemetry.gauge("in_flight_ops", *now);
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.change(-1);
    }
}

impl Target {
    /// A target without connections. A fetch is given up after `operation_timeout`; an operation
    /// that settles late is counted `abandon_timeout` after its start.
    #[must_use]
    pub fn new(
        faults: Arc<Faults>,
        telemetry: Arc<dyn Telemetry>,
        // The source lets the time of a transfer pass.
        _latency: Latency,
        operation_timeout: Duration,
        abandon_timeout: Duration,
    ) -> Self {
        let shared = Shared {
            agent: uuid::Uuid::new_v4().to_string(),
            faults,
            telemetry,
            operation_timeout,
            abandon_timeout,
            idle: Mutex::default(),
            in_flight: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Fetches the pages of `keys` from the control endpoint `endpoint`, `HOST:PORT`.
    pub async fn fetch(&self, endpoint: &str, keys: &[Key]) -> Fetched {
        if keys.is_empty() {
            return Fetched::All(Vec::new());
        }
        let shared = &self.shared;
        let in_flight = InFlight::new(shared);
        let started = Instant::now();
        if shared.tell(Fault::SuccessWithoutTransfer) {
            shared.count(started, "success", keys.len());
            return Fetched::Failed(Why::Unreachable("the transfer was lost".to_owned()));
        }
        if shared.tell(Fault::LateSettle) {
            tokio::time::sleep(shared.operation_timeout).await;
            let deadline = started + shared.abandon_timeout;
            tokio::spawn(async move {
                tokio::time::sleep_until(deadline).await;
                in_flight.0.count(started, "failed", 0);
            });
            return Fetched::Failed(Why::TimedOut);
        }
        let overstated = keys.len() > 1 && shared.tell(Fault::PartialAsSuccess);
        let wanted = if overstated {
            &keys[..keys.len() / 2]
        } else {
            keys
        };
        let limit = shared.operation_timeout;
        let mut fetched = within(limit, shared.ask(endpoint, wanted))
            .await
            .unwrap_or(Fetched::Failed(Why::TimedOut));
        let (result, blocks) = match &fetched {
            Fetched::All(pages) => ("success", pages.len()),
            Fetched::Partial(pages) => ("partial", pages.iter().flatten().count()),
            Fetched::Failed(_) => ("failed", 0),
        };
        if overstated && let Fetched::All(pages) = fetched {
            let rest = std::iter::repeat_with(|| None).take(keys.len() - pages.len());
            fetched = Fetched::Partial(pages.into_iter().map(Some).chain(rest).collect());
            shared.count(started, "success", keys.len());
        } else {
            shared.count(started, result, blocks);
        }
        fetched
    }
}

impl Shared {
    fn tell(&self, fault: Fault) -> bool {
        let lies = Lies {
            faults: &self.faults,
            part: Part::Engine,
        };
        lies.tell(fault)
    }

    /// Counts a fetch that ended.
    fn count(&self, started: Instant, result: &str, blocks: usize) {
        let took = started.elapsed();
        self.telemetry.ended("hint_wait", "complete", took);
        self.telemetry.ended("remote_deliver", result, took);
        if blocks > 0 {
            self.telemetry.moved("remote_deliver", blocks as u64, None);
        }
    }

    async fn ask(&self, endpoint: &str, keys: &[Key]) -> Fetched {
        if keys.len() > MOST_KEYS {
            return Fetched::Failed(Why::Refused(format!("{} keys at once", keys.len())));
        }
        // A connection that was kept may have died with its source, and another may listen now:
        // such a failure says nothing yet.
        while let Some(mut stream) = self.take(endpoint) {
            if let Ok(fetched) = self.transfer(&mut stream, keys).await {
                self.keep(endpoint, stream);
                return fetched;
            }
        }
        let fresh = async {
            let mut stream = self.connect(endpoint).await?;
            let fetched = self.transfer(&mut stream, keys).await?;
            self.keep(endpoint, stream);
            Ok(fetched)
        };
        fresh.await.unwrap_or_else(|error: io::Error| {
            self.telemetry
                .ended("control_enqueue", "failed", Duration::ZERO);
            Fetched::Failed(Why::Unreachable(error.to_string()))
        })
    }

    fn take(&self, endpoint: &str) -> Option<TcpStream> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.get_mut(endpoint)?.pop()
    }

    fn keep(&self, endpoint: &str, stream: TcpStream) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.entry(endpoint.to_owned()).or_default().push(stream);
    }

    async fn connect(&self, endpoint: &str) -> io::Result<TcpStream> {
        if self.tell(Fault::SlowConnect) {
            tokio::time::sleep(self.operation_timeout / 2).await;
        }
        let mut stream = TcpStream::connect(endpoint).await?;
        stream.set_nodelay(true)?;
        let agent = self.agent.clone();
        self.send(&mut stream, &Ask::TargetMetadata { agent })
            .await?;
        match peer::receive(&mut stream).await? {
            Some(Answer::TargetMetadataAck) => {
                self.handled("control_target_metadata_ack");
                Ok(stream)
            }
            other => Err(peer::bad(format!(
                "{other:?} instead of an acknowledgement"
            ))),
        }
    }

    /// Asks and takes what comes. An error means that the connection is of no use any more.
    async fn transfer(&self, stream: &mut TcpStream, keys: &[Key]) -> io::Result<Fetched> {
        let keys_asked = keys.to_vec();
        self.send(stream, &Ask::StartWrite { keys: keys_asked })
            .await?;
        let answer = peer::receive(stream).await?;
        let (held, page_bytes, copies) = match answer {
            Some(Answer::Written {
                held,
                page_bytes,
                copies,
            }) => (held, page_bytes, copies),
            Some(Answer::WriteRefused { why }) => {
                self.handled("control_write_refused");
                return Ok(Fetched::Failed(Why::Refused(why)));
            }
            Some(Answer::TargetMetadataAck) => return Err(peer::bad("no answer".to_owned())),
            None => return Err(io::ErrorKind::UnexpectedEof.into()),
        };
        let count = held.iter().filter(|held| **held).count();
        let bytes = count.checked_mul(page_bytes);
        let total = bytes.and_then(|bytes| bytes.checked_mul(copies));
        if held.len() != keys.len() || total.is_none_or(|total| total > LONGEST_BODY) {
            return Err(peer::bad("an answer to another question".to_owned()));
        }
        self.handled("control_target_metadata_ack");
        let mut pages = Vec::with_capacity(count);
        for copy in 0..copies {
            for _ in 0..count {
                let mut page = vec![0; page_bytes];
                stream.read_exact(&mut page).await?;
                if copy == 0 {
                    pages.push(page);
                }
            }
        }
        Ok(if count == 0 {
            Fetched::Failed(Why::Refused("the source holds none of them".to_owned()))
        } else if count == keys.len() {
            Fetched::All(pages)
        } else {
            let mut pages = pages.into_iter();
            let place = |held| if held { pages.next() } else { None };
            Fetched::Partial(held.into_iter().map(place).collect())
        })
    }

    async fn send(&self, stream: &mut TcpStream, ask: &Ask) -> io::Result<()> {
        peer::send(stream, ask).await?;
        self.telemetry
            .ended("control_enqueue", "success", Duration::ZERO);
        Ok(())
    }

    fn handled(&self, scope: &str) {
        self.telemetry.ended(scope, "handled", Duration::ZERO);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    /// Remembers what was shown last, and takes its time for small numbers.
    #[derive(Debug, Default)]
    struct Shown(AtomicI64);

    impl Telemetry for Shown {
        fn ended(&self, _: &str, _: &str, _: Duration) {}
        fn moved(&self, _: &str, _: u64, _: Option<u64>) {}
        fn gauge(&self, _: &str, value: i64) {
            for _ in 0..1000 / (1 + value) {
                std::hint::spin_loop();
            }
            self.0.store(value, Ordering::Relaxed);
        }
    }

    #[test]
    fn operations_that_end_together_leave_nothing_in_flight() {
        let shown = Arc::new(Shown::default());
        let faults = Arc::new(Faults::new("worker1", Vec::new(), None));
        let target = Target::new(
            faults,
            shown.clone(),
            Latency::default(),
            Duration::from_secs(1),
            Duration::from_secs(1),
        );
        for _ in 0..500 {
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| drop(InFlight::new(&target.shared)));
                }
            });
            assert_eq!(shown.0.load(Ordering::Relaxed), 0);
        }
    }
}
