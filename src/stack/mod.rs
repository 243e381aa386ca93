//! The shared stack: one supervisor process, many leases.
//!
//! - [`process`]: fork, exec, groups, sweep. The only `unsafe`.
//! - [`supervisor`]: carries a plan out and keeps it alive; one a fingerprint.
//! - [`protocol`]: the lines the two sides exchange.
//! - [`lease`]: the client side.
//! - [`wait`]: level-triggered polling.

pub mod lease;
pub mod process;
pub mod protocol;
pub mod supervisor;
pub mod wait;
