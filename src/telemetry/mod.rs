//! Counters: pages become samples, two pages become a delta, a delta becomes readings.
//!
//! - [`page`]: the Prometheus text format.
//! - [`delta`]: what changed between two pages, and whether that can be said at all.
//! - [`kvcr`]: the series that speak of KVCR and the engine's tiers, by name.
//! - [`mod@settle`]: scraping until the counters stand still.
//! - [`guard`]: what a Guard logs of a takeover.
//! - [`logs`]: the lines of an engine's log that matter.
//!
//! Nothing here judges: a [`Reading`] becomes a check in [`crate::verdict`].

pub mod delta;
pub mod guard;
pub mod kvcr;
pub mod logs;
pub mod page;
pub mod router;
pub mod settle;

use serde::{Deserialize, Serialize};

pub use delta::{Change, Counted, Delta, Record, Restart};
pub use page::{Page, Series};
pub use settle::{How, Scrape, Scraper, Settled, Settling, settle, wait_for};

/// What a page or a delta says of one quantity. Absent, silent and zero are three things:
///
/// - a family that is not declared may be switched off, renamed or misspelt by us: **absent**;
/// - client libraries create a labelled sample at its first event, so a family that is declared
///   (its `# TYPE` line is there) without the sample has counted nothing: **silent**;
/// - a sample of 0 is a **value**.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "is", content = "value")]
pub enum Reading {
    /// The family is not declared on the page: nothing can be said.
    Absent,
    /// The family is declared and has no such sample: nothing was counted yet.
    Silent,
    /// Finite.
    Value(f64),
    /// The process behind the page restarted in between: nothing may be subtracted.
    Restarted(String),
    /// Something was there that cannot be used: a repeated series, NaN, a falling counter.
    Unusable(String),
}

impl Reading {
    /// [`Self::Value`], or [`Self::Unusable`] if it is not finite.
    pub(crate) fn of(value: f64) -> Self {
        if value.is_finite() {
            Self::Value(value)
        } else {
            Self::Unusable(format!("the value is {value}"))
        }
    }

    /// What was counted: the value, or 0 if the family is declared and silent. `None` where
    /// nothing can be said.
    pub fn counted(&self) -> Option<f64> {
        match self {
            Self::Value(value) => Some(*value),
            Self::Silent => Some(0.0),
            Self::Absent | Self::Restarted(_) | Self::Unusable(_) => None,
        }
    }

    /// [`Self::counted`] as an integer: `None` also if it is negative, fractional or beyond
    /// 2⁵³, where a float no longer counts one by one.
    pub fn exact(&self) -> Option<u64> {
        const LAST: f64 = 9_007_199_254_740_992.0;
        let value = self.counted()?;
        (value.fract() == 0.0 && (0.0..=LAST).contains(&value)).then_some(value as u64)
    }
}

impl std::fmt::Display for Reading {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Absent => f.write_str("absent"),
            Self::Silent => f.write_str("no sample yet (the family is declared)"),
            Self::Value(value) => write!(f, "{value}"),
            Self::Restarted(why) => write!(f, "not comparable, the process restarted: {why}"),
            Self::Unusable(why) => write!(f, "unusable: {why}"),
        }
    }
}
