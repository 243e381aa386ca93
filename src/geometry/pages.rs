//! Pages: what a hit stands on, what was moved for it, and what is wrong if the two differ. Pure.
//!
//! Counters count pages and do not say of which group. How many there were tells all the same what
//! happened: see [`Geometry::judge`].

use std::fmt;
use std::ops::AddAssign;

use super::Geometry;

/// A count that is known beforehand, to the last one or from below.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Bound {
    /// So many.
    Exactly(u64),
    /// So many or more: the geometry was not configured.
    AtLeast(u64),
}

impl Bound {
    /// The count, or the least that it can be.
    pub fn least(self) -> u64 {
        match self {
            Self::Exactly(count) | Self::AtLeast(count) => count,
        }
    }

    /// Whether `count` is possible.
    pub fn allows(self, count: u64) -> bool {
        match self {
            Self::Exactly(expected) => count == expected,
            Self::AtLeast(least) => count >= least,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exactly(count) => write!(f, "{count}"),
            Self::AtLeast(least) => write!(f, "at least {least} ({NOT_CONFIGURED})"),
        }
    }
}

/// What every lower bound says of itself.
pub const NOT_CONFIGURED: &str = "geometry not configured: a lower bound";

/// Pages by what they hold.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Pages {
    /// Keys and values, one a block.
    pub attention: u64,
    /// States after a block, one a group.
    pub state: u64,
}

impl Pages {
    /// All of them.
    pub fn total(self) -> u64 {
        self.attention + self.state
    }
}

impl AddAssign for Pages {
    fn add_assign(&mut self, other: Self) {
        self.attention += other.attention;
        self.state += other.state;
    }
}

impl fmt::Display for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} attention + {} state pages",
            self.attention, self.state
        )
    }
}

/// What the pages that were moved say of the hits that they were moved for.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Delivery {
    /// What the hits stand on, and nothing else.
    AsNeeded,
    /// So many attention pages too few: the hits are longer than what was moved.
    AttentionMissing(u64),
    /// So many state pages too few: there are hits without a state at their end.
    StateMissing(u64),
    /// So many pages more than the hits could use.
    Useless(u64),
}

impl Geometry {
    /// The pages that a hit of `hit` tokens stands on: every attention page, and the state page at
    /// its end of every state group. Where the groups are not known, none of theirs.
    pub fn pages_of_hit(self, hit: u64) -> Pages {
        let attention = self.full(hit);
        let groups = self.state_groups.filter(|_| attention > 0).unwrap_or(0);
        Pages {
            attention,
            state: u64::from(groups),
        }
    }

    /// What `found` pages say that were moved for hits which stand on `needed`
    /// ([`Self::pages_of_hit`], summed up).
    ///
    /// Where the state groups are not known, more than the attention pages may all be states; only
    /// what was moved for no hit at all is certainly useless.
    pub fn judge(self, needed: Pages, found: u64) -> Delivery {
        let total = needed.total();
        if found < needed.attention {
            Delivery::AttentionMissing(needed.attention - found)
        } else if found < total {
            Delivery::StateMissing(total - found)
        } else if self.moved(needed).allows(found) {
            Delivery::AsNeeded
        } else {
            Delivery::Useless(found - total)
        }
    }

    /// How many pages must be moved for hits that stand on `needed`. No page is moved for none.
    pub fn moved(self, needed: Pages) -> Bound {
        match (self.state_groups, needed.total()) {
            (Some(_), count) => Bound::Exactly(count),
            (None, 0) => Bound::Exactly(0),
            (None, count) => Bound::AtLeast(count),
        }
    }

    /// State pages that a request of `prompt` tokens leaves behind, of which the first `hit` were
    /// found: the state at the last end of a block before the prompt's last token, one page of each
    /// group, unless the hit came with it. An engine that is told its block size (`--block-size`)
    /// divides the prompt there (vLLM 0.32; `docs/findings/hybrid.md`).
    pub fn checkpoint(self, prompt: u64, hit: u64) -> u64 {
        let groups = u64::from(self.state_groups.unwrap_or(0));
        match self.device_hit(prompt) > hit {
            true => groups,
            false => 0,
        }
    }

    /// How many pages are stored where `blocks` pages are new. Where the state groups are not known,
    /// states may be among them.
    pub fn stored(self, blocks: u64) -> Bound {
        match self.state_groups {
            Some(_) => Bound::Exactly(blocks),
            None => Bound::AtLeast(blocks),
        }
    }

    /// Bytes of `pages` pages. A page of unknown size has at least one.
    pub fn bytes_of(self, pages: Bound) -> Bound {
        match (self.page_bytes, pages) {
            (Some(bytes), Bound::Exactly(count)) => Bound::Exactly(count.saturating_mul(bytes)),
            (Some(bytes), Bound::AtLeast(count)) => Bound::AtLeast(count.saturating_mul(bytes)),
            (None, Bound::Exactly(0)) => Bound::Exactly(0),
            (None, pages) => Bound::AtLeast(pages.least()),
        }
    }
}

#[cfg(test)]
mod tests;
