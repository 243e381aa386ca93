//! Checks become a verdict. Pure: no clock, no I/O, no engine names.

use serde::{Deserialize, Serialize};

use crate::failure::Class;

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
