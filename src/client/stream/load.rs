//! Many streams: at given times, so many at a time, or all at once.
//!
//! They run on a thread of their own with a runtime of one thread, so that nothing else in this
//! process delays a stamp, and none is looked into before the last one is over.

use std::thread;
use std::time::Duration;

use rand::rngs::ChaCha8Rng;
use rand::{RngExt, SeedableRng};
use serde::{Deserialize, Serialize};
use tokio::runtime;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::arrivals::Arrivals;
use super::{Ask, Streamed, Streams, understand};
use crate::failure::Failure;
use crate::stack::clock::monotonic_ns;

/// When requests of an open loop start, whatever becomes of those before them.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// At even distances.
    Fixed {
        /// Requests a second.
        per_second: f64,
    },
    /// As from many users who know nothing of each other: distances are exponential.
    Poisson {
        /// Requests a second, on average.
        per_second: f64,
        /// Decides the times: the same seed gives the same ones.
        seed: u64,
    },
}

impl Schedule {
    /// When each of `requests` starts, from the beginning of the load; the first at once.
    ///
    /// # Errors
    /// Environment: the rate is not above 0, or no number.
    pub fn times(&self, requests: usize) -> Result<Vec<Duration>, Failure> {
        let (Self::Fixed { per_second } | Self::Poisson { per_second, .. }) = *self;
        if !per_second.is_finite() || per_second <= 0.0 {
            return Err(Failure::environment("a load cannot be scheduled")
                .expected("a rate above 0 requests a second")
                .found(per_second)
                .hint("correct the rate"));
        }
        let mut random = match *self {
            Self::Fixed { .. } => None,
            Self::Poisson { seed, .. } => Some(ChaCha8Rng::seed_from_u64(seed)),
        };
        let mut seconds = 0.0;
        let times = (0..requests).map(|number| {
            let at = match &random {
                // Not summed up: a million distances would add their errors.
                None => number as f64 / per_second,
                Some(_) => seconds,
            };
            if let Some(random) = &mut random {
                seconds += -(1.0 - random.random::<f64>()).ln() / per_second;
            }
            Duration::try_from_secs_f64(at).unwrap_or(Duration::MAX)
        });
        Ok(times.collect())
    }
}

/// How requests follow each other.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Shape {
    /// By a schedule: an open loop never waits for an answer.
    Open(Schedule),
    /// So many at a time: the next starts when one is over.
    Closed {
        /// Streams at a time; 0 counts as 1.
        concurrency: usize,
    },
    /// All at once, when the connections of all stand.
    Burst,
}

/// One stream of a load.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sent {
    /// When it was to start: its time in the schedule, the start of the burst. `None` in a
    /// closed loop. Nanoseconds of `CLOCK_MONOTONIC`.
    pub due_ns: Option<u64>,
    /// When the client began with it: before it connects, where it has to. Nanoseconds of
    /// `CLOCK_MONOTONIC`.
    pub started_ns: u64,
    /// What came.
    pub streamed: Streamed,
}

impl Sent {
    /// How much later than it was due it was begun, in nanoseconds.
    #[must_use]
    pub fn lateness_ns(&self) -> Option<u64> {
        Some(self.started_ns.saturating_sub(self.due_ns?))
    }
}

/// From the first request that was handed to its socket to the last, in nanoseconds: how
/// simultaneous a burst was. Requests without a connection do not count.
#[must_use]
pub fn start_skew_ns(sent: &[Sent]) -> u64 {
    let connected = |one: &&Sent| one.streamed.connection.connect_ns > 0;
    let times = || {
        sent.iter()
            .filter(connected)
            .map(|one| one.streamed.sent_ns)
    };
    let (first, last) = (times().min(), times().max());
    last.unwrap_or(0).saturating_sub(first.unwrap_or(0))
}

/// Sends `asks` to `base_url` in their order, each stream given up after `deadline`; what came, in
/// the same order. If this is dropped, so are the streams.
///
/// # Errors
/// Environment: the address, the rate, or no thread to be had.
pub async fn run(
    base_url: &str,
    deadline: Duration,
    asks: Vec<Ask>,
    shape: Shape,
) -> Result<Vec<Sent>, Failure> {
    let streams = Streams::new(base_url, deadline)?;
    let times = match shape {
        Shape::Open(schedule) => schedule.times(asks.len())?,
        Shape::Closed { .. } | Shape::Burst => Vec::new(),
    };
    let failed =
        |why: &dyn std::fmt::Display| Failure::environment("no thread for the load").found(why);
    let runtime = runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| failed(&error))?;
    let (mut tell, told) = oneshot::channel();
    let work = move || {
        let sent = runtime.block_on(async {
            let load = async {
                match shape {
                    Shape::Open(_) => open(&streams, &asks, &times).await,
                    Shape::Closed { concurrency } => closed(&streams, &asks, concurrency).await,
                    Shape::Burst => burst(&streams, &asks).await,
                }
            };
            tokio::select! {
                raw = load => raw,
                () = tell.closed() => Vec::new(),
            }
        });
        let understood = sent
            .into_iter()
            .filter_map(|(number, raw)| Some(raw.understand(asks.get(number)?)));
        // Nobody waits for it any more, perhaps.
        let _ = tell.send(understood.collect::<Vec<_>>());
    };
    let thread = thread::Builder::new().name("load".into()).spawn(work);
    drop(thread.map_err(|error| failed(&error))?);
    told.await
        .map_err(|_| Failure::inconclusive("the load ended by itself"))
}

/// One stream of a load, not looked into.
struct Raw {
    due_ns: Option<u64>,
    started_ns: u64,
    arrivals: Arrivals,
}

impl Raw {
    async fn of(streams: Streams, ask: Ask, due_ns: Option<u64>) -> Self {
        let started_ns = monotonic_ns();
        Self {
            due_ns,
            started_ns,
            arrivals: streams.arrivals(ask).await,
        }
    }

    fn understand(self, ask: &Ask) -> Sent {
        Sent {
            due_ns: self.due_ns,
            started_ns: self.started_ns,
            streamed: understand(ask.label(), &self.arrivals),
        }
    }
}

/// Streams under way, by their number.
type UnderWay = JoinSet<(usize, Raw)>;

/// All of them, in the order of their numbers.
async fn in_order(mut under_way: UnderWay, mut done: Vec<(usize, Raw)>) -> Vec<(usize, Raw)> {
    while let Some(one) = under_way.join_next().await {
        done.extend(one);
    }
    done.sort_by_key(|(number, _)| *number);
    done
}

async fn open(streams: &Streams, asks: &[Ask], times: &[Duration]) -> Vec<(usize, Raw)> {
    let mut under_way = UnderWay::new();
    let (began, began_ns) = (Instant::now(), monotonic_ns());
    for (number, (ask, at)) in asks.iter().zip(times).enumerate() {
        tokio::time::sleep(at.saturating_sub(began.elapsed())).await;
        let (streams, ask) = (streams.clone(), ask.clone());
        let at_ns = u64::try_from(at.as_nanos()).unwrap_or(u64::MAX);
        let due_ns = began_ns.saturating_add(at_ns);
        under_way.spawn(async move { (number, Raw::of(streams, ask, Some(due_ns)).await) });
    }
    in_order(under_way, Vec::new()).await
}

async fn closed(streams: &Streams, asks: &[Ask], concurrency: usize) -> Vec<(usize, Raw)> {
    let mut under_way = UnderWay::new();
    let mut done = Vec::with_capacity(asks.len());
    for (number, ask) in asks.iter().enumerate() {
        if under_way.len() >= concurrency.max(1) {
            done.extend(under_way.join_next().await.and_then(Result::ok));
        }
        let (streams, ask) = (streams.clone(), ask.clone());
        under_way.spawn(async move { (number, Raw::of(streams, ask, None).await) });
    }
    in_order(under_way, done).await
}

async fn burst(streams: &Streams, asks: &[Ask]) -> Vec<(usize, Raw)> {
    let mut connecting = JoinSet::new();
    for (number, ask) in asks.iter().enumerate() {
        let (streams, ask) = (streams.clone(), ask.clone());
        connecting.spawn(async move {
            let started_ns = monotonic_ns();
            (number, started_ns, streams.open(ask).await)
        });
    }
    let mut standing = Vec::with_capacity(asks.len());
    let mut done = Vec::new();
    while let Some(connected) = connecting.join_next().await {
        match connected {
            Ok((number, _, Ok(opened))) => standing.push((number, opened)),
            Ok((number, started_ns, Err(arrivals))) => {
                let raw = Raw {
                    due_ns: None,
                    started_ns,
                    arrivals: *arrivals,
                };
                done.push((number, raw));
            }
            Err(_) => {}
        }
    }
    standing.sort_by_key(|(number, _)| *number);
    let due_ns = Some(monotonic_ns());
    let mut under_way = UnderWay::new();
    // The runtime has one thread: none of them runs before all of them can.
    for (number, opened) in standing {
        under_way.spawn(async move {
            let started_ns = monotonic_ns();
            let arrivals = opened.run().await;
            let raw = Raw {
                due_ns,
                started_ns,
                arrivals,
            };
            (number, raw)
        });
    }
    in_order(under_way, done).await
}

#[cfg(test)]
mod tests;
