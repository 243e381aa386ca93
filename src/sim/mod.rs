//! The simulated stack: frontend, workers, KVCR services and state agent as real processes of
//! this binary, with real bytes, and able to lie.
//!
//! It proves the harness, never the product. It is started by the same plan, launcher and
//! supervisor as the real one; each process parses the command line of the program it stands in
//! for, and has its surfaces.
//!
//! ```text
//! client ─HTTP─► frontend ─/generate─► worker0 ◄─control: blocks as bytes─► worker1
//!                   ▲  ▲                 │ claims            stored, removed
//!                   │  └──── KV events ──┤◄────────────────────────┐
//!                   └── discovery files ─┘   kvcr_service (pool in a file, Guard)   state agent
//! ```
//!
//! - [`model`]: what a block holds and which token follows from the blocks held. Pure.
//! - [`fault`]: the catalogue of lies, and which are told now.
//! - [`settings`]: what every simulated process is told beside its command line.
//! - [`wire`]: what the processes say to one another.
//!
//! What does not belong here: anything that judges. The cases see a stack, and cannot tell which.

pub mod discovery;
pub mod fault;
pub mod kvcr;
pub mod model;
pub mod settings;
pub mod wire;
