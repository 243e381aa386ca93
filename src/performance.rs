//! Repeated measurements of a request, and what may be said of them. Pure: no clock, no I/O.
//!
//! [`order`] says in which order the arms are measured, [`sample`] is one measurement, [`median`]
//! and [`ratio`] are what many of them come to, [`judge`] holds that against the limits of a
//! profile, and [`plot`] draws it. How a request is timed is `client`'s; whether an arm really was
//! what it claims is its case's.

pub mod judge;
pub mod median;
pub mod order;
pub mod plot;
pub mod ratio;
pub mod sample;

use std::fmt;

use serde::{Deserialize, Serialize};

/// Where the prompt's KV cache comes from.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arm {
    /// Computed by an engine without KVCR: what the others are compared with.
    Off,
    /// Computed by an engine with KVCR.
    Cold,
    /// Loaded from the worker's own KVCR tier.
    Local,
    /// Fetched from a peer's.
    Peer,
    /// Fetched from the Guard of a dead peer.
    Guard,
}

impl Arm {
    /// All, the base first.
    pub const ALL: [Self; 5] = [Self::Off, Self::Cold, Self::Local, Self::Peer, Self::Guard];

    /// As in evidence and in names of fields.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Cold => "cold",
            Self::Local => "local",
            Self::Peer => "peer",
            Self::Guard => "guard",
        }
    }
}

impl fmt::Display for Arm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
