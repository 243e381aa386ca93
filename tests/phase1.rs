//! The cases of phase 1, on the shared stack. Everything is `kvcr_phase1::harness`'s.

use std::process::ExitCode;

fn main() -> ExitCode {
    kvcr_phase1::harness::main(kvcr_phase1::cases::PHASE1)
}
