//! TC-01: with KVCR on, greedy output is what the same engine gives with KVCR off, whether the
//! prompt is cold, in the device cache, or only in KVCR's own tier.
//!
//! Every arm first asks the reference engine, then the stack under test, and compares token by
//! token. Text alone would pass if nothing were ever cached, so each arm also proves by counters
//! that it really was what it claims.

use super::scene::{Flow, Scene};
use super::{Arm, Case};
use crate::engine::BoxFuture;
use crate::failure::Failure;
use crate::stack::protocol::Mode;

/// The case.
pub const CASE: Case = Case {
    id: "tc01",
    title: "integration generation correctness",
    arms: &[
        Arm {
            name: "tc01::cold",
            claim: "a prompt nobody has seen is computed, not found, and answers as the reference",
            mode: Mode::Exclusive,
            story: cold,
        },
        Arm {
            name: "tc01::warm_device",
            claim: "a repeated prompt hits the device cache and answers as the reference",
            mode: Mode::Exclusive,
            story: warm_device,
        },
        Arm {
            name: "tc01::warm_tier",
            claim: "a prompt evicted from the device and the host tier is served by KVCR's own tier and answers as the reference",
            mode: Mode::Exclusive,
            story: warm_tier,
        },
        Arm {
            name: "tc01::boundary",
            claim: "prompts one token around a block boundary answer as the reference, cold and warm",
            mode: Mode::Exclusive,
            story: boundary,
        },
    ],
};
