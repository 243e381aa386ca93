//! The shared stack: one supervisor process, many leases.
//!
//! - [`lease`]: the client side: find or start the supervisor, hold a lease.
//! - [`admin`]: `status` and `down`, for people.
//! - [`supervisor`]: keeps one stack alive and serves leases; one a fingerprint.
//! - [`protocol`]: the lines the two sides exchange.
//! - [`harm`]: what a case may do to the processes of a stack that it leases alone.
//! - [`queue`]: who may use the stack now. Pure.
//! - [`state_dir`]: where locks, sockets and logs are.
//! - [`devices`]: one lock a device, so that two stacks never share one by accident.
//! - [`process`]: fork, exec, groups. The only `unsafe`.
//! - [`cookie`], [`sweep`], [`inventory`], [`leftovers`]: what is ours, and how all of it goes away.
//! - [`sidecar`]: services that somebody else runs.
//! - [`clock`]: the time that every process of the host agrees on.
//! - `tail`: the last lines of a log.
//! - [`wait`]: level-triggered polling.
//!
//! Nothing here knows an engine: a [`crate::engine::Blueprint`] says what to start and when it
//! is ready. Nothing here carries a plan out either; that is [`crate::launch`].

pub mod admin;
pub mod clock;
pub mod cookie;
pub mod deaths;
pub mod devices;
mod ended;
pub mod harm;
pub mod inventory;
pub mod lease;
pub mod leftovers;
pub mod process;
pub mod protocol;
pub mod queue;
pub mod sidecar;
pub mod state_dir;
pub mod supervisor;
pub mod sweep;
pub(crate) mod tail;
pub mod wait;
