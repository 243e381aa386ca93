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
//! - [`worker`]: the engine, `dynamo.vllm`.
//!
//! What does not belong here: anything that judges. The cases see a stack, and cannot tell which.

pub mod discovery;
pub mod fault;
pub mod kvcr;
pub mod model;
pub mod settings;
pub mod wire;
pub mod worker;

use std::ffi::OsString;
use std::process::ExitCode;

/// First argument of a process of the simulated stack; the module it stands in for and that
/// module's own arguments follow.
pub const SIMULATE: &str = "__sim";

/// A wrong command line.
const USAGE: u8 = 2;

/// Runs one simulated process; `args` are those after [`SIMULATE`]. The plan starts these, never
/// a person: a module that is not simulated ends with 2.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args;
    let module = args.next().unwrap_or_default();
    // One arm a module.
    if module == "dynamo.vllm" {
        return worker::main(args);
    }
    eprintln!("sim: {} is not simulated", module.display());
    ExitCode::from(USAGE)
}
