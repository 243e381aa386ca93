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
pub mod frontend;
pub mod kvcr;
pub mod model;
pub mod settings;
pub mod wire;

use std::ffi::OsString;
use std::process::ExitCode;

/// The argument that makes this binary a process of the simulated stack. What follows is a
/// module's name and the arguments that the real program takes.
pub const SIM: &str = "__sim";

/// Runs the simulated module that the first argument names. Exits with 2 for one that is not
/// simulated, as Python does for a module that it cannot find with 1: the two must differ.
pub fn main(args: impl IntoIterator<Item = OsString>) -> ExitCode {
    let mut args = args.into_iter();
    let module = args.next().unwrap_or_default();
    match module.to_str() {
        Some("dynamo.frontend") => frontend::main(args),
        Some("serve") => frontend::serve(args),
        _ => {
            eprintln!("no simulated module {}", module.display());
            ExitCode::from(2)
        }
    }
}
