//! Checks become a verdict. Pure: no clock, no I/O, no engine names.
//!
//! # Which failing check decides
//!
//! The verdict names the one who has to act *first*; the others' checks stay in it. In order:
//!
//! 1. **A broken stack** (a generation that changed, a supervisor that is gone) makes everything
//!    inconclusive, whatever was compared: the checks did not all see one stack.
//! 2. **Environment**: on a machine that is starved, full or misconfigured, what the product did
//!    wrong is a consequence until the machine is right.
//! 3. **Skew**: versions that cannot work together break promises that neither made.
//! 4. **Product**: a broken promise stands on its own evidence, and is not excused by evidence
//!    that is missing elsewhere. Where it does depend on another check (a text on a reference
//!    that agrees with itself), say so with [`Check::given`]: then it is inconclusive itself.
//! 5. **Inconclusive**: something could not be seen, so nothing is claimed.
//!
//! Only when all of that is empty does a verdict pass, and never without a check.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::failure::{Class, Failure};
use crate::telemetry::{Counted, Reading};

/// One comparison that a case made.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Check {
    /// Stable name in snake case: `text_equals_reference`.
    pub name: String,
    /// Who has to act if it does not hold.
    pub class: Class,
    /// What the case claims, with its unit.
    pub expected: String,
    /// What was seen, with its unit.
    pub found: String,
    /// Whether the claim held.
    pub held: bool,
    /// How far the found value is from the edge of failing, where that is a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub margin: Option<String>,
    /// Why it may fail, where a profile knows the defect (see [`crate::known`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub known: Option<String>,
}

/// What an engine said: its text and, where the server gives them, its tokens.
#[derive(Clone, Copy, Debug)]
pub struct Said<'a> {
    /// The text.
    pub text: &'a str,
    /// Token ids or strings; empty where the server gives none.
    pub tokens: &'a [String],
}

impl Check {
    /// A claim that was decided elsewhere.
    pub fn new(
        name: impl Into<String>,
        class: Class,
        held: bool,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Self {
        Self {
            name: name.into(),
            class,
            expected: expected.to_string(),
            found: found.to_string(),
            held,
            margin: None,
            known: None,
        }
    }

    /// Whether it keeps an arm from passing.
    #[must_use]
    pub fn fails(&self) -> bool {
        !self.held && self.known.is_none()
    }

    /// `found` is `expected`.
    pub fn equal<T: PartialEq + fmt::Debug>(
        name: impl Into<String>,
        class: Class,
        expected: &T,
        found: &T,
    ) -> Self {
        let held = expected == found;
        Self::new(
            name,
            class,
            held,
            format_args!("{expected:?}"),
            format_args!("{found:?}"),
        )
    }

    /// A count is exactly `expected`. The unit stands in both texts.
    pub fn exactly(
        name: impl Into<String>,
        class: Class,
        unit: &str,
        expected: u64,
        found: u64,
    ) -> Self {
        let held = expected == found;
        Self::new(
            name,
            class,
            held,
            format_args!("{expected} {unit}"),
            format_args!("{found} {unit}"),
        )
    }

    /// A count is at least `expected`; the margin is what it has beyond.
    pub fn at_least(
        name: impl Into<String>,
        class: Class,
        unit: &str,
        expected: u64,
        found: u64,
    ) -> Self {
        let held = found >= expected;
        let mut check = Self::new(
            name,
            class,
            held,
            format_args!("at least {expected} {unit}"),
            format_args!("{found} {unit}"),
        );
        check.margin = found
            .checked_sub(expected)
            .map(|beyond| format!("{beyond} {unit}"));
        check
    }

    /// Two answers are the same, token for token and letter for letter. What is found names the
    /// first token that differs, both candidates, and the text around it.
    pub fn text_equal(
        name: impl Into<String>,
        class: Class,
        expected: Said<'_>,
        found: Said<'_>,
    ) -> Self {
        let difference = first_difference(expected, found);
        Self::new(
            name,
            class,
            difference.is_none(),
            format_args!("{:?} ({} tokens)", expected.text, expected.tokens.len()),
            difference.unwrap_or_else(|| "the same".into()),
        )
    }

    /// A counter rose by exactly `expected`. See [`Self::counter_at_least`].
    pub fn counter_exactly(
        name: impl Into<String>,
        class: Class,
        expected: u64,
        found: &Counted,
    ) -> Self {
        Self::counter(
            name,
            class,
            format!("{} = {expected}", found.series),
            found,
            |n| n == expected,
        )
    }

    /// A counter rose by at least `expected`. A declared family without the sample has counted
    /// nothing, which is 0. A family that is absent, a restart and a value that cannot be used
    /// are evidence that is missing: the check fails as [`Class::Inconclusive`].
    pub fn counter_at_least(
        name: impl Into<String>,
        class: Class,
        expected: u64,
        found: &Counted,
    ) -> Self {
        let claim = format!("{} ≥ {expected}", found.series);
        let mut check = Self::counter(name, class, claim, found, |n| n >= expected);
        check.margin = found
            .reading
            .exact()
            .and_then(|n| n.checked_sub(expected))
            .map(|beyond| beyond.to_string());
        check
    }

    fn counter(
        name: impl Into<String>,
        class: Class,
        claim: String,
        found: &Counted,
        holds: impl Fn(u64) -> bool,
    ) -> Self {
        let mut text = found.reading.to_string();
        if !found.similar.is_empty() {
            text = format!("{text}; there is {}", found.similar.join(", "));
        }
        match (found.reading.exact(), &found.reading) {
            (Some(count), _) => Self::new(name, class, holds(count), claim, text),
            // Negative or fractional: a counter that lies, which is the product's.
            (None, Reading::Value(_)) => Self::new(name, class, false, claim, text),
            (None, _) => Self::new(name, Class::Inconclusive, false, claim, text),
        }
    }

    /// Makes this check depend on another: if `premise` did not hold and neither does this, it
    /// proves nothing and is inconclusive. A check that holds is left as it is; the premise
    /// itself keeps the verdict from passing.
    #[must_use]
    pub fn given(mut self, premise: &Check) -> Self {
        if !premise.held && !self.held {
            self.class = Class::Inconclusive;
            self.found = format!("{}; but {} did not hold", self.found, premise.name);
        }
        self
    }
}

impl fmt::Display for Check {
    /// One line: class first if it failed, then name, expected, found, margin.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.known {
            _ if self.held => f.write_str("held")?,
            Some(because) => write!(f, "known ({because})")?,
            None => write!(f, "{}", self.class)?,
        }
        write!(
            f,
            ": {}: expected {}, found {}",
            self.name, self.expected, self.found
        )?;
        if let Some(margin) = &self.margin {
            write!(f, " (margin {margin})")?;
        }
        Ok(())
    }
}

impl From<&Failure> for Check {
    /// A failure (of a request, an invariant) as a check that did not hold.
    fn from(failure: &Failure) -> Self {
        let expected = failure.expected.as_deref().unwrap_or("no failure");
        let mut found = failure.what.clone();
        for text in [&failure.found, &failure.cause, &failure.hint]
            .into_iter()
            .flatten()
        {
            found = format!("{found}; {text}");
        }
        Self::new(snake(&failure.what), failure.class, false, expected, found)
    }
}

/// The first words of a clause as a check's name.
fn snake(text: &str) -> String {
    text.split(|c: char| !c.is_ascii_alphanumeric())
        .filter(|word| !word.is_empty())
        .take(8)
        .map(str::to_ascii_lowercase)
        .collect::<Vec<_>>()
        .join("_")
}

/// How many tokens, or characters, stand on each side of a difference.
const CONTEXT: usize = 5;

fn first_difference(expected: Said<'_>, found: Said<'_>) -> Option<String> {
    if !expected.tokens.is_empty() && !found.tokens.is_empty() {
        let at = differs(expected.tokens, found.tokens);
        if let Some(at) = at {
            let token = |said: Said<'_>| {
                said.tokens
                    .get(at)
                    .map_or("the end".into(), |t| format!("{t:?}"))
            };
            let around = |said: Said<'_>| {
                let end = said.tokens.len().min(at + CONTEXT + 1);
                said.tokens[at.saturating_sub(CONTEXT).min(end)..end].join(" ")
            };
            return Some(format!(
                "token {at} is {} instead of {}, in [{}] instead of [{}]; text {:?}",
                token(found),
                token(expected),
                around(found),
                around(expected),
                found.text,
            ));
        }
    }
    if expected.text == found.text {
        return None;
    }
    let (old, new): (Vec<char>, Vec<char>) = (
        expected.text.chars().collect(),
        found.text.chars().collect(),
    );
    let at = differs(&old, &new).unwrap_or_default();
    let around = |text: &[char]| -> String {
        let end = text.len().min(at + 4 * CONTEXT);
        text[at.saturating_sub(4 * CONTEXT).min(end)..end]
            .iter()
            .collect()
    };
    Some(format!(
        "character {at} differs: {:?} instead of {:?}",
        around(&new),
        around(&old)
    ))
}

/// The first index at which two sequences differ; the shorter one's length if it is a prefix.
fn differs<T: PartialEq>(a: &[T], b: &[T]) -> Option<usize> {
    let shared = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    (shared < a.len() || shared < b.len()).then_some(shared)
}

/// The outcome of one arm.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// Every check held.
    Pass,
    /// At least one did not; the class of the verdict says who has to act.
    Fail(Class),
    /// A need is not met, said before the run.
    Gated,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pass => f.write_str("Pass"),
            Self::Fail(class) => class.fmt(f),
            Self::Gated => f.write_str("Gated"),
        }
    }
}

/// What one arm concluded, and from what.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Verdict {
    /// The conclusion.
    pub outcome: Outcome,
    /// Every comparison, in the order made.
    pub checks: Vec<Check>,
}

/// Position of a class in the order of the module's documentation; the highest decides. Not
/// `Class`'s own order, which sorts reports.
fn severity(class: Class) -> u8 {
    match class {
        Class::Inconclusive => 0,
        Class::Product => 1,
        Class::Skew => 2,
        Class::Environment => 3,
    }
}

impl Verdict {
    /// Folds the checks of one stack.
    pub fn of(mut checks: Vec<Check>) -> Self {
        if checks.is_empty() {
            checks.push(Check::new(
                "something_was_checked",
                Class::Inconclusive,
                false,
                "at least one check",
                "nothing was checked",
            ));
        }
        let worst = checks
            .iter()
            .filter(|check| check.fails())
            .map(|check| check.class)
            .max_by_key(|class| severity(*class));
        Self {
            outcome: worst.map_or(Outcome::Pass, Outcome::Fail),
            checks,
        }
    }

    /// The verdict when the stack under the checks was not one stack: inconclusive, whatever
    /// they say. The checks are kept, after the one that says why.
    pub fn broken(why: &Failure, checks: Vec<Check>) -> Self {
        let first = Check::new(
            "one_stack_throughout",
            Class::Inconclusive,
            false,
            "the same generation from the first request to the last scrape",
            why,
        );
        Self {
            outcome: Outcome::Fail(Class::Inconclusive),
            checks: [vec![first], checks].concat(),
        }
    }

    /// Checks that failed as the profile knows.
    pub fn known(&self) -> Vec<&Check> {
        let known = |check: &&Check| !check.held && check.known.is_some();
        self.checks.iter().filter(known).collect()
    }

    /// Failing checks, the one that decides first; otherwise in the order made.
    pub fn failed(&self) -> Vec<&Check> {
        let mut failed: Vec<_> = self.checks.iter().filter(|check| check.fails()).collect();
        // Stable, and `false` sorts first.
        failed.sort_by_key(|check| {
            let decides = self.outcome == Outcome::Fail(check.class);
            (!decides, std::cmp::Reverse(severity(check.class)))
        });
        failed
    }
}

impl fmt::Display for Verdict {
    /// `Pass: 7 checks held`, or one line for each failing check.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.outcome {
            Outcome::Pass => {
                let known = self.known().len();
                let held = self.checks.len() - known;
                let s = if held == 1 { "" } else { "s" };
                write!(f, "Pass: {held} check{s} held")?;
                match known {
                    0 => Ok(()),
                    _ => write!(f, ", {known} failed as known"),
                }
            }
            Outcome::Gated => f.write_str("Gated"),
            Outcome::Fail(_) => {
                for (i, check) in self.failed().into_iter().enumerate() {
                    if i > 0 {
                        f.write_str("\n")?;
                    }
                    write!(f, "{check}")?;
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CLASSES: [Class; 4] = [
        Class::Inconclusive,
        Class::Product,
        Class::Skew,
        Class::Environment,
    ];

    fn check(class: Class, held: bool) -> Check {
        Check::new("c", class, held, "a", "b")
    }

    fn counted(reading: Reading) -> Counted {
        Counted {
            series: "c_total".into(),
            reading,
            similar: vec!["d_total".into()],
        }
    }

    #[test]
    fn what_is_equal_holds_and_what_differs_does_not() {
        for (found, held) in [(3, true), (4, false)] {
            assert_eq!(Check::equal("c", Class::Product, &3, &found).held, held);
            let exactly = Check::exactly("c", Class::Product, "blocks", 3, found);
            assert_eq!(exactly.held, held);
            assert_eq!(exactly.found, format!("{found} blocks"));
        }
    }

    #[test]
    fn an_outcome_is_named_as_people_say_it() {
        assert_eq!(Outcome::Pass.to_string(), "Pass");
        assert_eq!(Outcome::Fail(Class::Skew).to_string(), "Skew");
        assert_eq!(Outcome::Gated.to_string(), "Gated");
    }

    #[test]
    fn a_difference_is_shown_with_as_much_around_it_as_promised() {
        let names: Vec<String> = (0..20).map(|n| format!("t{n:02}")).collect();
        let mut other = names.clone();
        other[10] = "x".to_owned();
        let said = |tokens| Said { tokens, text: "" };
        let words = first_difference(said(&names), said(&other)).unwrap();
        let around = "[t05 t06 t07 t08 t09 x t11 t12 t13 t14 t15]";
        assert!(words.contains(around), "{words}");
        // One that ends early is named too, whichever of the two it is.
        let short = &names[..19];
        let ends = first_difference(said(&names), said(short)).unwrap();
        assert!(ends.starts_with("token 19 is the end"), "{ends}");
        let goes_on = first_difference(said(short), said(&names)).unwrap();
        assert!(goes_on.contains("instead of the end"), "{goes_on}");

        let text = |text| Said { tokens: &[], text };
        let line: String = ('0'..='z').collect();
        let changed = line.replace('Q', "!");
        let words = first_difference(text(&line), text(&changed)).unwrap();
        let around = format!("{:?}", &changed[13..53]);
        assert!(words.contains(&around), "{around}: {words}");
    }

    #[test]
    fn nothing_checked_is_inconclusive() {
        let verdict = Verdict::of(vec![]);
        assert_eq!(verdict.outcome, Outcome::Fail(Class::Inconclusive));
        assert_eq!(
            verdict.to_string(),
            "Inconclusive: something_was_checked: expected at least one check, found nothing was checked"
        );
    }

    #[test]
    fn who_has_to_act_first_decides() {
        use Class::{Environment, Inconclusive, Product, Skew};
        let table: [(&[Class], Outcome); 6] = [
            (&[], Outcome::Pass),
            (&[Inconclusive], Outcome::Fail(Inconclusive)),
            (&[Inconclusive, Product], Outcome::Fail(Product)),
            (&[Product, Skew], Outcome::Fail(Skew)),
            (&[Skew, Environment, Product], Outcome::Fail(Environment)),
            (&[Product, Product], Outcome::Fail(Product)),
        ];
        for (failing, outcome) in table {
            let checks = [check(Product, true)]
                .into_iter()
                .chain(failing.iter().map(|class| check(*class, false)))
                .collect();
            assert_eq!(Verdict::of(checks).outcome, outcome, "{failing:?}");
        }
    }

    #[test]
    fn a_broken_stack_is_neither_pass_nor_product() {
        let why = Failure::product("worker0 died").found("signal 9");
        for checks in [
            vec![],
            vec![check(Class::Product, true)],
            vec![check(Class::Product, false)],
        ] {
            let verdict = Verdict::broken(&why, checks);
            assert_eq!(verdict.outcome, Outcome::Fail(Class::Inconclusive));
            assert!(
                verdict
                    .to_string()
                    .starts_with("Inconclusive: one_stack_throughout: "),
                "{verdict}"
            );
        }
    }

    #[test]
    fn a_line_begins_with_the_class_and_the_deciding_line_is_first() {
        let verdict = Verdict::of(vec![
            check(Class::Inconclusive, false),
            Check::at_least("blocks_delivered", Class::Product, "blocks", 8, 7),
            check(Class::Product, true),
        ]);
        assert_eq!(
            verdict.to_string(),
            "Product: blocks_delivered: expected at least 8 blocks, found 7 blocks\n\
             Inconclusive: c: expected a, found b"
        );
        let held = Check::at_least("n", Class::Product, "blocks", 8, 10);
        assert_eq!(
            held.to_string(),
            "held: n: expected at least 8 blocks, found 10 blocks (margin 2 blocks)"
        );
    }

    #[test]
    fn counters_know_absent_from_zero() {
        use Class::{Inconclusive, Product};
        let rows = [
            (Reading::Value(8.0), 8, true, Product),
            (Reading::Value(7.0), 8, false, Product),
            (Reading::Value(0.0), 0, true, Product),
            (Reading::Silent, 0, true, Product),
            (Reading::Silent, 8, false, Product),
            (Reading::Absent, 0, false, Inconclusive),
            (Reading::Absent, 8, false, Inconclusive),
            (Reading::Restarted("x".into()), 0, false, Inconclusive),
            (Reading::Unusable("NaN".into()), 0, false, Inconclusive),
            (Reading::Value(7.5), 7, false, Product),
            (Reading::Value(-1.0), 0, false, Product),
        ];
        for (reading, expected, held, class) in rows {
            for check in [
                Check::counter_exactly("n", Product, expected, &counted(reading.clone())),
                Check::counter_at_least("n", Product, expected, &counted(reading.clone())),
            ] {
                assert_eq!((check.held, check.class), (held, class), "{check}");
            }
        }
        let absent = Check::counter_exactly("n", Product, 0, &counted(Reading::Absent));
        assert_eq!(
            absent.to_string(),
            "Inconclusive: n: expected c_total = 0, found absent; there is d_total"
        );
        let more = Check::counter_at_least("n", Product, 8, &counted(Reading::Value(9.0)));
        assert_eq!(more.margin.as_deref(), Some("1"));
        assert!(!Check::counter_exactly("n", Product, 8, &counted(Reading::Value(9.0))).held);
    }

    fn text(a: (&str, &[&str]), b: (&str, &[&str])) -> Check {
        let own = |tokens: &[&str]| tokens.iter().map(|t| (*t).to_owned()).collect::<Vec<_>>();
        let (old, new) = (own(a.1), own(b.1));
        Check::text_equal(
            "text",
            Class::Product,
            Said {
                text: a.0,
                tokens: &old,
            },
            Said {
                text: b.0,
                tokens: &new,
            },
        )
    }

    #[test]
    fn the_first_differing_token_is_named_with_its_surroundings() {
        assert!(text(("ab", &["1", "2"]), ("ab", &["1", "2"])).held);
        let check = text(("abc", &["1", "2", "3"]), ("abd", &["1", "2", "4"]));
        assert_eq!(
            check.found,
            "token 2 is \"4\" instead of \"3\", in [1 2 4] instead of [1 2 3]; text \"abd\""
        );
        let shorter = text(("ab", &["1", "2"]), ("a", &["1"]));
        assert!(
            shorter
                .found
                .starts_with("token 1 is the end instead of \"2\""),
            "{shorter}"
        );
        // Two byte tokens may print the same: the text alone would have passed.
        assert!(!text(("\u{fffd}", &["1"]), ("\u{fffd}", &["2"])).held);
        assert!(!text(("a", &["1"]), ("b", &["1"])).held);
    }

    #[test]
    fn without_tokens_the_text_decides() {
        assert!(text(("ab", &[]), ("ab", &["1"])).held);
        let check = text(("grüße", &[]), ("grüne", &[]));
        assert_eq!(
            check.found,
            "character 3 differs: \"grüne\" instead of \"grüße\""
        );
    }

    #[test]
    fn a_check_without_its_premise_proves_nothing() {
        let sound = Check::new(
            "reference_agrees_with_itself",
            Class::Inconclusive,
            false,
            "",
            "",
        );
        let wrong = check(Class::Product, false).given(&sound);
        assert_eq!(wrong.class, Class::Inconclusive);
        assert!(
            wrong
                .found
                .ends_with("but reference_agrees_with_itself did not hold"),
            "{wrong}"
        );
        assert_eq!(
            check(Class::Product, true).given(&sound),
            check(Class::Product, true)
        );
        let premise = Check {
            held: true,
            ..sound
        };
        assert_eq!(
            check(Class::Product, false).given(&premise).class,
            Class::Product
        );
    }

    #[test]
    fn a_failure_is_a_check_that_did_not_hold() {
        let failure = Failure::skew("request `cold` failed")
            .found("HTTP 400")
            .hint("compare versions");
        let check = Check::from(&failure);
        assert_eq!(
            check.to_string(),
            "Skew: request_cold_failed: expected no failure, found request `cold` failed; HTTP 400; compare versions"
        );
    }

    fn checks() -> impl Strategy<Value = Vec<Check>> {
        let one = (0..CLASSES.len(), any::<bool>()).prop_map(|(i, held)| check(CLASSES[i], held));
        proptest::collection::vec(one, 0..12)
    }

    proptest! {
        #[test]
        fn a_failing_check_never_helps(before in checks(), class in 0..CLASSES.len(), at in any::<prop::sample::Index>()) {
            let rank = |verdict: &Verdict| match verdict.outcome {
                Outcome::Pass | Outcome::Gated => None,
                Outcome::Fail(class) => Some(severity(class)),
            };
            let old = Verdict::of(before.clone());
            let mut after = before.clone();
            after.insert(at.index(before.len() + 1), check(CLASSES[class], false));
            let new = Verdict::of(after);
            prop_assert_ne!(new.outcome, Outcome::Pass);
            prop_assert!(rank(&new) >= rank(&old));
        }

        #[test]
        fn a_held_check_changes_nothing_but_emptiness(before in checks()) {
            prop_assume!(!before.is_empty());
            let mut after = before.clone();
            after.push(check(Class::Product, true));
            prop_assert_eq!(Verdict::of(after).outcome, Verdict::of(before).outcome);
        }

        #[test]
        fn pass_means_every_check_held(all in checks()) {
            let verdict = Verdict::of(all.clone());
            prop_assert_eq!(verdict.outcome == Outcome::Pass, !all.is_empty() && all.iter().all(|c| c.held));
            prop_assert_eq!(verdict.failed().is_empty(), verdict.outcome == Outcome::Pass);
        }

        #[test]
        fn any_two_texts_compare_without_panic(a in any::<String>(), b in any::<String>()) {
            let says = |text| Said { text, tokens: &[] };
            let check = Check::text_equal("t", Class::Product, says(&a), says(&b));
            prop_assert_eq!(check.held, a == b);
        }
    }
}
