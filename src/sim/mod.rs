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
//! - [`cli`]: `kvcr-phase1 sim`.
//! - [`model`]: what a block holds and which token follows from the blocks held. Pure.
//! - [`fault`]: the catalogue of lies, and which are told now.
//! - [`settings`]: what every simulated process is told beside its command line.
//! - [`wire`]: what the processes say to one another.
//! - [`worker`]: the engine, `dynamo.vllm`.
//!
//! What does not belong here: anything that judges. The cases see a stack, and cannot tell which.

pub mod agent;
pub mod cli;
pub mod discovery;
mod entry;
pub mod fault;
pub mod frontend;
pub mod kvcr;
pub mod model;
pub mod service;
pub mod settings;
pub mod wire;
pub mod worker;

use std::ffi::OsString;
use std::process::ExitCode;

/// First argument of a process of the simulated stack; the module it stands in for and that
/// module's own arguments follow.
pub const SIMULATE: &str = "__sim";

/// What everything that comes from a simulated stack says.
pub const NOTICE: &str = "simulated stack: proves the harness, never the product";

/// A wrong command line.
const USAGE: u8 = 2;

/// Runs one simulated process; `args` are those after [`SIMULATE`]. The plan starts these, never
/// a person: a module that is not simulated ends with 2.
pub fn main(args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut args = args;
    let module = args.next().unwrap_or_default();
    match module.to_str() {
        Some("dynamo.frontend") => frontend::main(args),
        Some("dynamo.vllm") => worker::main(args),
        Some("dynamo.kv_state_agent") => agent::main(args),
        Some("kvcr.kvcr_service") => service::main(args),
        Some("serve") => frontend::serve(args),
        _ => {
            errln!("sim: {} is not simulated", module.display());
            ExitCode::from(USAGE)
        }
    }
}
