//! The binaries as a user types them: what they say, and how they end.
//!
//! Nothing here needs Python, a network or an engine: interpreters and uv are shell scripts that
//! answer as the real ones do, and every directory is private to one test. This binary is also
//! `phase1` when it is called that, so that the contract of `tests/phase1.rs` is tried with the
//! very arguments that cargo and nextest use.

mod commands;
mod interrupted;
mod place;
mod sidecar;
mod simulated;
mod struck;
mod trials;

use std::ffi::OsString;
use std::process::ExitCode;

use kvcr_phase1::sim::SIMULATE;
use kvcr_phase1::stack::supervisor::SUPERVISE;
use libtest_mimic::{Arguments, Trial};

/// A list of tests: one function a behaviour, in the order in which they are read.
macro_rules! promises {
    ($($name:ident),* $(,)?) => {
        pub(crate) const ALL: &[(&str, fn())] = &[$((stringify!($name), $name)),*];
    };
}
pub(crate) use promises;

fn main() -> ExitCode {
    let mut args = std::env::args_os();
    let (name, first) = (args.next(), args.next());
    // As `phase1` it starts itself again, for supervisors and simulated processes.
    let ours = |first: OsString| first == SUPERVISE || first == SIMULATE;
    if name.is_some_and(|name| name == place::PHASE1) || first.is_some_and(ours) {
        return kvcr_phase1::harness::main(kvcr_phase1::cases::PHASE1);
    }
    let trials = [
        ("commands", commands::ALL),
        ("interrupted", interrupted::ALL),
        ("sidecar", sidecar::ALL),
        ("simulated", simulated::ALL),
        ("struck", struck::ALL),
        ("trials", trials::ALL),
    ]
    .into_iter()
    .flat_map(|(module, all)| all.iter().map(move |(name, test)| (module, *name, *test)))
    .map(|(module, name, test)| {
        Trial::test(format!("{module}::{name}"), move || {
            test();
            Ok(())
        })
    })
    .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
