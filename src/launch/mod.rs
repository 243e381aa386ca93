//! Carrying a plan out: one file for each place it can run.
//!
//! - [`local`]: processes of this host.
//! - [`ports`]: TCP ports that nobody else gets.
//! - [`probe`]: whether a process counts as started.
//! - `services`: Guards' services for a stack that somebody else starts.
//!
//! What must run belongs to [`crate::plan`], how long it lives to [`crate::stack`].

pub mod local;
pub mod ports;
pub mod probe;
pub(crate) mod services;
