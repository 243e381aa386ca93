//! The cases, one claim a file, each reading as a story; and what a story may use ([`scene`]).
//!
//! How trials are listed, gated, timed and reported is `harness`'s.

mod flow;
pub mod scene;
mod seed;
mod takeover;
pub mod tc01_generation;
pub mod tc02_local_dram;
pub mod tc03_peer_transfer;
pub mod tc04_guard;
pub mod tc05_performance;
pub mod tc06_recovery;

use crate::engine::BoxFuture;
use crate::failure::Failure;
use crate::gate::Wants;
use crate::stack::protocol::Mode;
use scene::Scene;

/// One claim about the product.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// `tc01`: the first part of every arm's name.
    pub id: &'static str,
    /// A few words.
    pub title: &'static str,
    /// Its situations.
    pub arms: &'static [Arm],
}

/// The story of an arm: asks, observes, and leaves its checks in the scene. An `Err` is what
/// kept it from finishing.
pub type Story = for<'a> fn(&'a mut Scene<'_>) -> BoxFuture<'a, Result<(), Failure>>;

/// One situation inside a case: its own test.
#[derive(Clone, Copy)]
pub struct Arm {
    /// `tc01::cold`. Stable for ever: pins, JUnit histories and shards key on it.
    pub name: &'static str,
    /// What it claims, in one sentence.
    pub claim: &'static str,
    /// How it holds the stack.
    pub mode: Mode,
    /// On which kind of stack it can be told.
    pub wants: Wants,
    /// The story.
    pub story: Story,
}

impl Arm {
    /// The same arm, told on another kind of stack.
    const fn wanting(self, wants: Wants) -> Self {
        Self { wants, ..self }
    }
}

impl std::fmt::Debug for Arm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Arm")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// The cases of the first phase.
pub const PHASE1: &[Case] = &[
    tc01_generation::CASE,
    tc02_local_dram::CASE,
    tc03_peer_transfer::CASE,
    tc04_guard::CASE,
    tc05_performance::CASE,
    tc06_recovery::CASE,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_what_nextest_filters_and_snapshots_can_key_on() {
        let mut seen = std::collections::HashSet::new();
        for case in PHASE1 {
            for arm in case.arms {
                assert!(
                    arm.name.starts_with(&format!("{}::", case.id)),
                    "{}",
                    arm.name
                );
                assert!(
                    arm.name
                        .chars()
                        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "_:".contains(c)),
                    "{}",
                    arm.name
                );
                assert!(seen.insert(arm.name), "{} twice", arm.name);
            }
        }
    }
}
