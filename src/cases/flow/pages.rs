//! What is wrong with the pages of hybrid hits, by name. Pure.
//!
//! A count that is off says that something is wrong; these say what: a hit whose state is missing
//! and a transfer that nobody can use are different faults of different parts. Both go back to
//! dynamo#16794.

use crate::failure::Class;
use crate::geometry::{Delivery, Geometry, Pages};
use crate::telemetry::Counted;
use crate::verdict::Check;

/// Two checks for pages that went one way (`at`: `worker1.from_peer`): the states of all hits were
/// among them, and nothing was that no hit stands on. None for a model without state groups, whose
/// counts say it all, and where nobody said whether there are any.
pub(super) fn checks(at: &str, needed: Pages, counter: &Counted, geometry: Geometry) -> Vec<Check> {
    if geometry.state_groups.unwrap_or(0) == 0 {
        return Vec::new();
    }
    let names = ["state_pages_present", "no_useless_transfer"].map(|name| format!("{name}[{at}]"));
    let Some(found) = counter.reading.exact() else {
        let unread = |name| {
            let found = &counter.reading;
            Check::new(name, Class::Inconclusive, false, needed, found)
        };
        return names.map(unread).into();
    };
    let delivery = geometry.judge(needed, found);
    let missing = match delivery {
        Delivery::StateMissing(pages) => {
            Some(format!("{found} pages: {pages} state pages missing"))
        }
        _ => None,
    };
    let useless = match delivery {
        Delivery::Useless(pages) => Some(format!(
            "{found} pages: {pages} that no hit can use (over-transfer)"
        )),
        _ => None,
    };
    let [present, used] = names;
    let check = |name, wrong: Option<String>| {
        let held = wrong.is_none();
        let found = wrong.unwrap_or_else(|| format!("{found} pages"));
        Check::new(name, Class::Product, held, needed, found)
    };
    vec![check(present, missing), check(used, useless)]
}

#[cfg(test)]
mod tests;
