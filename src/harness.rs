//! Cases become trials: listing discipline, gates, signals, exit codes.
//!
//! - `tests/phase1.rs` calls [`main`]: libtest-mimic below `cargo test` and nextest.
//! - `kvcr-phase1 run` calls [`run_all`]: the same arms, a table for people.
//!
//! Both end in [`arm::run`], which takes the lease, tells the story and writes the evidence.
//! What a case claims is `cases`'; what a verdict means is `verdict`'s.
//!
//! Exit codes: 0, 101 failures, 2 usage, 3 harness contract (nothing ran, gate drift), 130 interrupted.

pub mod arm;
pub mod interrupt;
pub mod software;
pub mod table;
