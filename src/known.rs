//! Defects of the product that are known: checks of an arm that must fail, and why. Pure.
//!
//! A release that is red every night for the same reason hides the next reason. So a profile may
//! name a defect: the arm then passes *because* the check fails, and every report says so. It is
//! strict: a named defect that does not show any more turns the arm red, until it is taken out of
//! the profile. A race shows in some runs only: the name of its check ends with `?`, and it is said
//! where it shows. Nothing but a check of class Product can be excused.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::failure::Class;
use crate::verdict::Check;

/// A check that a defect makes fail.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Shown {
    /// Its name up to its `[`.
    pub name: String,
    /// Not in every run: written with a `?` behind the name.
    pub sometimes: bool,
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        f.write_str(if self.sometimes { "?" } else { "" })
    }
}

/// One defect: `tc03::partial_prefix_hint no_useless_transfer,blocks_to_peer: why`.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Known {
    /// The arm that sees it; with a `*` at its end, every one whose name begins so.
    pub arm: String,
    /// Checks that fail of it.
    pub checks: Vec<Shown>,
    /// What is known, best with where to read on.
    pub because: String,
}

impl Known {
    /// Whether it is named for `arm`.
    #[must_use]
    pub fn is_of(&self, arm: &str) -> bool {
        match self.arm.strip_suffix('*') {
            Some(beginning) => arm.starts_with(beginning),
            None => arm == self.arm,
        }
    }

    fn names(&self, check: &Check) -> bool {
        self.checks.iter().any(|known| known.name == base(check))
    }
}

impl fmt::Display for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let checks: Vec<String> = self.checks.iter().map(ToString::to_string).collect();
        write!(f, "{} {}: {}", self.arm, checks.join(","), self.because)
    }
}

impl FromStr for Known {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("expected `ARM CHECK[?][,CHECK]: WHY`, found {text:?}");
        let text = text.trim();
        let (arm, rest) = text.split_once(' ').ok_or_else(wrong)?;
        let (checks, because) = rest.split_once(": ").ok_or_else(wrong)?;
        let checks: Vec<Shown> = checks
            .split(',')
            .map(|check| {
                let check = check.trim();
                let name = check.strip_suffix('?');
                Shown {
                    sometimes: name.is_some(),
                    name: name.unwrap_or(check).to_owned(),
                }
            })
            .collect();
        let because = because.trim();
        let is_name = |check: &Shown| {
            let good = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            !check.name.is_empty() && check.name.chars().all(good)
        };
        if arm.is_empty() || because.is_empty() || !checks.iter().all(is_name) {
            return Err(wrong());
        }
        Ok(Self {
            arm: arm.to_owned(),
            checks,
            because: because.to_owned(),
        })
    }
}

impl Serialize for Known {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Known {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// Excuses the failing checks of `arm` that are known. If the arm came to its end, also checks that
/// of every defect named for it every check shows that always does.
pub fn excuse(checks: &mut Vec<Check>, arm: &str, known: &[Known], complete: bool) {
    for defect in known.iter().filter(|defect| defect.is_of(arm)) {
        for check in checks.iter_mut().filter(|check| defect.names(check)) {
            if check.fails() && check.class == Class::Product {
                check.known = Some(defect.because.clone());
            }
        }
        let shows = |shown: &&Shown| {
            let of_name = |check: &&Check| base(check) == shown.name;
            let mut named = checks.iter().filter(of_name);
            named.any(|check| check.known.is_some())
        };
        let gone: Vec<&str> = defect
            .checks
            .iter()
            .filter(|shown| !shown.sometimes && !shows(shown))
            .map(|shown| shown.name.as_str())
            .collect();
        if complete && !gone.is_empty() {
            checks.push(Check::new(
                format!("known_defect_shows[{}]", gone.join(",")),
                Class::Inconclusive,
                false,
                format_args!("a failing check of each name: {}", defect.because),
                "none fails: if the arm met the defect at all, it is gone; take it out of `known`",
            ));
        }
    }
}

/// The name of a check up to its `[`.
fn base(check: &Check) -> &str {
    check.name.split('[').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::verdict::{Outcome, Verdict};

    fn check(name: &str, class: Class, held: bool) -> Check {
        Check::new(name, class, held, "a", "b")
    }

    fn known() -> Vec<Known> {
        vec![
            "tc03::x no_useless_transfer,blocks: kvcr#1"
                .parse()
                .unwrap(),
        ]
    }

    fn judged(mut checks: Vec<Check>, arm: &str, complete: bool) -> Verdict {
        excuse(&mut checks, arm, &known(), complete);
        Verdict::of(checks)
    }

    #[test]
    fn a_defect_may_be_of_all_arms_that_begin_so() {
        let known: Vec<Known> = vec!["tc03::* blocks?: kvcr#1".parse().unwrap()];
        for (arm, passes) in [("tc03::x", true), ("tc03::", true), ("tc04::x", false)] {
            let mut checks = vec![check("blocks[worker0]", Class::Product, false)];
            excuse(&mut checks, arm, &known, true);
            let outcome = Verdict::of(checks).outcome;
            assert_eq!(outcome == Outcome::Pass, passes, "{arm}");
        }
    }

    #[test]
    fn a_known_defect_that_shows_passes_and_is_said() {
        let checks = vec![
            check("text", Class::Product, true),
            check("no_useless_transfer[worker1]", Class::Product, false),
            check("blocks[worker0]", Class::Product, false),
        ];
        let verdict = judged(checks, "tc03::x", true);
        assert_eq!(verdict.outcome, Outcome::Pass);
        assert!(verdict.failed().is_empty());
        assert_eq!(verdict.to_string(), "Pass: 1 check held, 2 failed as known");
        let line = verdict.checks[1].to_string();
        assert!(
            line.starts_with("known (kvcr#1): no_useless_transfer[worker1]"),
            "{line}"
        );
    }

    #[test]
    fn one_that_is_gone_is_red() {
        let verdict = judged(vec![check("blocks", Class::Product, true)], "tc03::x", true);
        assert_eq!(verdict.outcome, Outcome::Fail(Class::Inconclusive));
        let text = verdict.to_string();
        assert!(text.contains("take it out of `known`"), "{text}");
    }

    /// A profile that names more than what fails would excuse what comes next.
    #[test]
    fn one_that_shows_in_part_only_is_red() {
        let checks = vec![check("no_useless_transfer", Class::Product, false)];
        let verdict = judged(checks, "tc03::x", true);
        assert_eq!(verdict.outcome, Outcome::Fail(Class::Inconclusive));
        let text = verdict.to_string();
        assert!(text.contains("known_defect_shows[blocks]"), "{text}");
    }

    #[test]
    fn a_race_may_show_and_need_not() {
        let race: Vec<Known> = vec!["tc04::x hinted?,blocks: dynamo#2".parse().unwrap()];
        let judged = |hinted: bool, blocks: bool| {
            let mut checks = vec![
                check("hinted", Class::Product, hinted),
                check("blocks", Class::Product, blocks),
            ];
            excuse(&mut checks, "tc04::x", &race, true);
            Verdict::of(checks)
        };
        for hinted in [true, false] {
            assert_eq!(judged(hinted, false).outcome, Outcome::Pass);
            let gone = judged(hinted, true);
            assert_eq!(gone.outcome, Outcome::Fail(Class::Inconclusive));
            assert!(gone.to_string().contains("known_defect_shows[blocks]"));
        }
    }

    #[test]
    fn nothing_else_is_excused() {
        for (name, class, arm) in [
            ("blocks_more", Class::Product, "tc03::x"),
            ("blocks", Class::Environment, "tc03::x"),
            ("blocks", Class::Inconclusive, "tc03::x"),
            ("blocks", Class::Product, "tc03::y"),
        ] {
            let verdict = judged(vec![check(name, class, false)], arm, false);
            assert_eq!(verdict.outcome, Outcome::Fail(class), "{name} {arm}");
        }
    }

    #[test]
    fn an_arm_that_was_cut_short_need_not_show_it() {
        let verdict = judged(vec![check("text", Class::Product, true)], "tc03::x", false);
        assert_eq!(verdict.outcome, Outcome::Pass);
    }

    #[test]
    fn what_is_no_defect_is_refused_in_words() {
        for text in [
            "",
            "tc03::x",
            "tc03::x blocks",
            "tc03::x blocks:",
            "tc03::x Blocks: y",
            "tc03::x ?: y",
            "tc03::x blo?cks: y",
            " a: b",
        ] {
            let why = text.parse::<Known>().unwrap_err();
            assert!(
                why.starts_with("expected `ARM CHECK[?][,CHECK]: WHY`"),
                "{why}"
            );
        }
    }

    proptest! {
        #[test]
        fn it_reads_what_it_writes(arm in "[a-z0-9:_]{1,12}", checks in prop::collection::vec(("[a-z0-9_]{1,8}", any::<bool>()), 1..4), because in "[a-z#:][a-z #:]{0,20}[a-z]") {
            let shown = |(name, sometimes)| Shown { name, sometimes };
            let checks = checks.into_iter().map(shown).collect();
            let known = Known { arm, checks, because };
            prop_assert_eq!(known.to_string().parse::<Known>(), Ok(known));
        }

        #[test]
        fn no_text_panics(text in any::<String>()) {
            let _ = text.parse::<Known>();
        }
    }
}
