//! Which arms a filter means, and which one was meant where it means none.

use crate::cases::Arm;
use crate::config::UsageError;

/// Refuses a filter that selects no arm, naming the nearest: a typo must not pass as "nothing
/// failed". `all` is always known.
///
/// # Errors
/// Usage, naming the nearest arm or case.
pub fn known(arms: &[&'static Arm], filters: &[String], exact: bool) -> Result<(), UsageError> {
    for filter in filters {
        if filter != "all" && !arms.iter().any(|arm| selects(filter, arm.name, exact)) {
            return Err(UsageError(format!(
                "no arm is called {filter:?}; the nearest is {}; there are {}",
                nearest(arms, filter),
                arms.iter()
                    .map(|arm| arm.name)
                    .collect::<Vec<_>>()
                    .join(", ")
            )));
        }
    }
    Ok(())
}

/// Whether `filter` selects `name`, as libtest does: a part of the name, or all of it.
#[must_use]
pub fn selects(filter: &str, name: &str, exact: bool) -> bool {
    if exact {
        name == filter
    } else {
        name.contains(filter)
    }
}

/// Arms that any of `filters` selects; all where there is none.
#[must_use]
pub fn arms(arms: &[&'static Arm], filters: &[String]) -> Vec<&'static Arm> {
    arms.iter()
        .copied()
        .filter(|arm| {
            filters.is_empty()
                || filters
                    .iter()
                    .any(|filter| selects(filter, arm.name, false))
        })
        .collect()
}

fn nearest(arms: &[&'static Arm], filter: &str) -> String {
    arms.iter()
        .flat_map(|arm| {
            let case = arm.name.split("::").next().unwrap_or(arm.name);
            [arm.name, case]
        })
        .min_by_key(|name| strsim::levenshtein(name, filter))
        .unwrap_or("none")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases::PHASE1;

    fn all() -> Vec<&'static Arm> {
        PHASE1.iter().flat_map(|case| case.arms).collect()
    }

    fn filters(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn a_typo_is_a_usage_error_that_names_the_nearest() {
        let error = known(&all(), &filters(&["tc01::clod"]), false).expect_err("a typo");
        assert!(
            error.to_string().contains("nearest is tc01::cold;"),
            "{error}"
        );
        let error = known(&all(), &filters(&["tc1"]), false).expect_err("a typo");
        assert!(error.to_string().contains("nearest is tc01;"), "{error}");
    }

    #[test]
    fn a_case_selects_its_arms_and_an_exact_name_only_itself() {
        assert_eq!(arms(&all(), &filters(&["tc01::warm"])).len(), 2);
        assert!(known(&all(), &filters(&["tc01"]), false).is_ok());
        assert!(known(&all(), &filters(&["tc01"]), true).is_err());
        assert_eq!(arms(&all(), &[]).len(), all().len());
    }
}
