//! What the machine and the software can do, said before anything runs.
//!
//! What belongs here: needs, thin probes that gather [`Facts`], pure decisions over them
//! ([`decide`], [`doctor::report`]), and keeping decisions for the length of a run ([`store`]).
//! What does not: installing (`environment`), and anything that needs a running stack.
//!
//! - [`facts`]: what is true of this machine. The only I/O of a decision.
//! - [`needs`]: what a case needs, and whether it has it.
//! - [`wants`]: what an arm wants of the profile.
//! - [`skew`]: whether the installed releases can work together.
//! - [`store`]: decisions of one run, and drift from them.
//! - [`doctor`]: all of it as one table.

pub mod cli;
pub mod doctor;
pub mod facts;
mod gpu;
pub(crate) mod host;
pub mod needs;
pub mod skew;
pub mod store;
pub mod wants;

pub use doctor::{Finding, Report, Status};
pub use facts::Facts;
pub use needs::{Decision, Need, decide};
pub use skew::preflight_failure;
pub use wants::Wants;
