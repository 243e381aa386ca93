//! KVCR's gauges, of which several parts of one process have a share: what the page shows is
//! the sum.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::meters::Meters;
use crate::sim::kvcr::Telemetry;

const IN_FLIGHT: &str = "in_flight_ops";

/// Sums of gauges.
#[derive(Debug)]
pub struct Gauges {
    meters: Meters,
    sums: Mutex<HashMap<String, i64>>,
}

impl Gauges {
    /// All zero.
    pub fn new(meters: Meters) -> Arc<Self> {
        Arc::new(Self {
            meters,
            sums: Mutex::default(),
        })
    }

    fn change(&self, resource: &str, by: i64) {
        let mut sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let sum = sums.entry(resource.to_owned()).or_default();
        *sum += by;
        self.meters.gauge(resource, *sum);
    }

    /// Operations in flight.
    #[cfg(test)]
    pub(super) fn in_flight(&self) -> i64 {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        sums.get(IN_FLIGHT).copied().unwrap_or(0)
    }

    /// One more operation in flight, until the guard is dropped.
    pub fn begin(self: &Arc<Self>) -> Operation {
        self.change(IN_FLIGHT, 1);
        Operation(self.clone())
    }

    /// The counters of a part that has a share in the gauges.
    pub fn share(self: &Arc<Self>) -> Share {
        Share {
            gauges: self.clone(),
            last: Mutex::default(),
        }
    }
}

/// An operation in flight.
#[derive(Debug)]
pub struct Operation(Arc<Gauges>);

impl Drop for Operation {
    fn drop(&mut self) {
        self.0.change(IN_FLIGHT, -1);
    }
}

/// The view of one part: its gauges are added to the others'.
#[derive(Debug)]
pub struct Share {
    gauges: Arc<Gauges>,
    last: Mutex<HashMap<String, i64>>,
}

impl Telemetry for Share {
    fn ended(&self, scope: &str, result: &str, took: Duration) {
        self.gauges.meters.ended(scope, result, took);
    }

    fn moved(&self, operation: &str, blocks: u64, bytes: Option<u64>) {
        self.gauges.meters.moved(operation, blocks, bytes);
    }

    fn gauge(&self, resource: &str, value: i64) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = last.insert(resource.to_owned(), value).unwrap_or(0);
        self.gauges.change(resource, value - before);
    }
}

#[cfg(test)]
mod tests {
    use super::super::registry::tests::identity;
    use super::super::registry::{Present, Registry};
    use super::*;
    use crate::telemetry::{Page, kvcr};

    #[test]
    fn shares_add_up() {
        let present = Present {
            tiers: true,
            kvcr: true,
            publisher: true,
        };
        let registry = Arc::new(Registry::new(&identity(), present));
        let gauges = Gauges::new(Meters::new(registry.clone()));
        let (source, target) = (gauges.share(), gauges.share());
        source.gauge(IN_FLIGHT, 2);
        target.gauge(IN_FLIGHT, 1);
        let operation = gauges.begin();
        source.gauge(IN_FLIGHT, 0);
        let shown = || kvcr::busy(&Page::parse(&registry.render()));
        assert_eq!(shown(), ["in_flight_ops 2"]);
        drop(operation);
        target.gauge(IN_FLIGHT, 0);
        assert!(shown().is_empty());
    }
}
