//! The shared stack as its users meet it, with toys for engines.
//!
//! The test binary is also the supervisor (`__supervise`), the toys (`__toy`) and clients in
//! processes of their own (`__client`). Nothing here sleeps to synchronise: a test waits for a
//! state, or for a line that somebody says.

mod behaviour;
mod harm;
mod toy;
mod world;

use std::process::ExitCode;

use kvcr_phase1::stack::supervisor::{self, SUPERVISE};
use libtest_mimic::{Arguments, Trial};

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1);
    match args.next().as_ref().and_then(|arg| arg.to_str()) {
        Some(SUPERVISE) => return supervisor::main(args, &toy::build),
        Some("__toy") => return toy::main(args),
        Some("__client") => return world::client_main(args),
        _ => {}
    }
    let trials = behaviour::ALL
        .iter()
        .chain(harm::ALL)
        .map(|(name, test)| {
            Trial::test(*name, || {
                test();
                Ok(())
            })
        })
        .collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}
