//! Which arms a filter means, and which one was meant where it means none.

use crate::cases::Arm;
use crate::config::UsageError;
use crate::gate::needs;
use crate::known::Known;

/// Refuses a filter that selects no arm, naming the nearest: a typo must not pass as "nothing
/// failed".
///
/// # Errors
/// Usage, naming the nearest arm or case.
pub fn known(arms: &[&'static Arm], filters: &[String], exact: bool) -> Result<(), UsageError> {
    let cases = if exact { Cases::Out } else { Cases::In };
    for filter in filters {
        if !arms.iter().any(|arm| selects(filter, arm.name, exact)) {
            return Err(unknown(arms, filter, cases));
        }
    }
    Ok(())
}

/// Refuses a known defect of an arm that does not exist: it would excuse nothing, in silence.
///
/// # Errors
/// Usage, naming the nearest arm.
pub fn known_defects(arms: &[&'static Arm], defects: &[Known]) -> Result<(), UsageError> {
    for defect in defects {
        if !arms.iter().any(|arm| defect.is_of(arm.name)) {
            return Err(unknown(arms, &defect.arm, Cases::Out));
        }
    }
    Ok(())
}

/// Refuses a requirement (`PHASE1_REQUIRE`) that no arm has to meet: it would require nothing.
///
/// # Errors
/// Usage, naming the nearest arm or case.
pub fn known_requirements(arms: &[&'static Arm], names: &[String]) -> Result<(), UsageError> {
    for name in names {
        let wanted = std::slice::from_ref(name);
        if !arms.iter().any(|arm| needs::required(wanted, arm.name)) {
            return Err(unknown(arms, name, Cases::In));
        }
    }
    Ok(())
}

/// Whether a whole case can be meant, or only an arm.
#[derive(Clone, Copy, PartialEq)]
enum Cases {
    In,
    Out,
}

fn unknown(arms: &[&'static Arm], name: &str, cases: Cases) -> UsageError {
    UsageError(format!(
        "no arm is called {name:?}; the nearest is {}; there are {}",
        nearest(arms, name, cases),
        arms.iter()
            .map(|arm| arm.name)
            .collect::<Vec<_>>()
            .join(", ")
    ))
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

fn nearest(arms: &[&'static Arm], name: &str, cases: Cases) -> String {
    arms.iter()
        .flat_map(|arm| {
            let case = arm.name.split("::").next().unwrap_or(arm.name);
            [Some(arm.name), (cases == Cases::In).then_some(case)]
        })
        .flatten()
        .min_by_key(|known| strsim::levenshtein(known, name))
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
        // Only a whole name is exact, so the case is no answer.
        let error = known(&all(), &filters(&["tc01"]), true).expect_err("a case");
        assert!(error.to_string().contains("nearest is tc01::"), "{error}");
    }

    #[test]
    fn a_requirement_that_requires_nothing_is_refused() {
        for name in ["all", "tc01", "tc01::cold"] {
            assert!(
                known_requirements(&all(), &filters(&[name])).is_ok(),
                "{name}"
            );
        }
        // A part of a name selects, but does not require.
        for name in ["cold", "tc", "tc01::", "tc01::cold::x", ""] {
            assert!(
                known_requirements(&all(), &filters(&[name])).is_err(),
                "{name}"
            );
        }
        // And `all` requires, but does not select.
        assert!(known(&all(), &filters(&["all"]), false).is_err());
    }

    #[test]
    fn a_case_selects_its_arms_and_an_exact_name_only_itself() {
        assert_eq!(arms(&all(), &filters(&["tc01::warm"])).len(), 2);
        assert!(known(&all(), &filters(&["tc01"]), false).is_ok());
        assert!(known(&all(), &filters(&["tc01"]), true).is_err());
        assert_eq!(arms(&all(), &[]).len(), all().len());
    }
}
