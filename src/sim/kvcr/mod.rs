//! The simulated KVCR: a pool of pages, the transfers between peers, and the claim of a pool that
//! a service keeps.
//!
//! - [`pool`]: pages by key, in memory or in a file that outlives its process.
//! - [`peer`]: the words of the control endpoint.
//! - [`source`]: serves a pool to peers. [`target`]: fetches from them.
//! - [`claim`]: asks a `kvcr_service` for a pool.
//!
//! Operations are counted where they happen, by scope and result as the real ones are; who shows
//! the counters implements [`Telemetry`]. When to fill, fetch or fall back is the worker's
//! business and not here.

pub mod claim;
mod journal;
pub mod peer;
pub mod pool;
pub mod source;
pub mod target;
#[cfg(test)]
mod tests;

use std::time::Duration;

use super::fault::{Fault, Faults, Part};

/// How operations are counted.
pub trait Telemetry: Send + Sync {
    /// An operation of `scope` ended with `result` after `took`.
    fn ended(&self, scope: &str, result: &str, took: Duration);
    /// `operation` moved `blocks`; `bytes` where the real one counts bytes.
    fn moved(&self, operation: &str, blocks: u64, bytes: Option<u64>);
    /// `resource` is at `value` now.
    fn gauge(&self, resource: &str, value: i64);
}

/// Counts nothing: a Guard has no page to show counters on.
#[derive(Clone, Copy, Debug)]
pub struct Uncounted;

impl Telemetry for Uncounted {
    fn ended(&self, _scope: &str, _result: &str, _took: Duration) {}
    fn moved(&self, _operation: &str, _blocks: u64, _bytes: Option<u64>) {}
    fn gauge(&self, _resource: &str, _value: i64) {}
}

/// The faults of one part: a Guard runs an engine's code, and must not tell an engine's lies.
#[derive(Clone, Copy)]
struct Lies<'a> {
    faults: &'a Faults,
    part: Part,
}

impl Lies<'_> {
    fn tell(self, fault: Fault) -> bool {
        fault.entry().part == self.part && self.faults.tell(fault)
    }
}

/// What tests see of the counters.
#[cfg(test)]
mod testing {
    use std::collections::BTreeMap;
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    pub(crate) struct Counted(pub(crate) Mutex<BTreeMap<String, i64>>);

    impl Counted {
        fn add(&self, name: String, value: i64) {
            *self.0.lock().unwrap().entry(name).or_default() += value;
        }

        pub(crate) fn get(&self, name: &str) -> i64 {
            self.0.lock().unwrap().get(name).copied().unwrap_or(0)
        }

        /// Everything that is not zero, a line each.
        pub(crate) fn all(&self) -> Vec<String> {
            let all = self.0.lock().unwrap();
            let moved = all.iter().filter(|(_, value)| **value != 0);
            moved
                .map(|(name, value)| format!("{name} {value}"))
                .collect()
        }
    }

    impl Telemetry for Counted {
        fn ended(&self, scope: &str, result: &str, _took: Duration) {
            self.add(format!("{scope} {result}"), 1);
        }

        fn moved(&self, operation: &str, blocks: u64, bytes: Option<u64>) {
            self.add(format!("{operation} blocks"), blocks as i64);
            if let Some(bytes) = bytes {
                self.add(format!("{operation} bytes"), bytes as i64);
            }
        }

        fn gauge(&self, resource: &str, value: i64) {
            self.0.lock().unwrap().insert(resource.to_owned(), value);
        }
    }
}
