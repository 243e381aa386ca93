//! End-to-end tests for KVCR deployed with Dynamo, an engine and NIXL.
//!
//! The data flows one way: a [`config`] becomes a [`plan`], the plan a running stack
//! ([`stack`]), requests become observations ([`client`]), counters become deltas
//! ([`telemetry`]), both become a [`verdict`], and everything that was seen becomes
//! evidence ([`evidence`]). `docs/design.md` draws the whole picture.

// Those panic when nobody reads any more; `terminal` has what does not.
#![warn(clippy::print_stdout, clippy::print_stderr)]

#[macro_use]
mod terminal;

mod atomic;
pub mod cases;
pub mod client;
pub mod commands;
pub mod config;
pub mod engine;
pub mod environment;
pub mod evidence;
pub mod failure;
pub mod gate;
pub mod geometry;
pub mod harness;
mod hash;
pub mod known;
pub mod launch;
pub mod plan;
pub mod prompt;
pub mod record;
pub mod reference;
pub mod sim;
pub mod snapshot;
pub mod stack;
pub mod surface;
pub mod telemetry;
pub mod timeline;
pub mod verdict;
