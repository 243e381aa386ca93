//! What went wrong, in words a person can act on.
//!
//! Every error that can end a run is a [`Failure`]: a class, what was expected, what was found
//! and what to do next. Usage errors (a wrong flag or field) are [`crate::config::UsageError`]
//! instead: they end the process with exit code 2 before anything runs.

use std::fmt;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Who has to act on a failure.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Evidence is missing, or the reference disagrees with itself.
    Inconclusive,
    /// Machine, driver, port, memory, lease or start-up.
    Environment,
    /// Versions that cannot work together.
    Skew,
    /// KVCR, the router or the engine broke its promise.
    Product,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inconclusive => "Inconclusive",
            Self::Environment => "Environment",
            Self::Skew => "Skew",
            Self::Product => "Product",
        })
    }
}

/// One failure: class first, then expected, found and what to do.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Failure {
    /// Who has to act.
    pub class: Class,
    /// The subject, as a short clause: `worker0 did not become ready`.
    pub what: String,
    /// What should have been there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected: Option<String>,
    /// What was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// The next thing to do, in the imperative.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The first causal line of a log, verbatim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// The file that line came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub log: Option<PathBuf>,
}

impl Failure {
    /// A failure of `class` about `what`; add the rest with the builder methods.
    pub fn new(class: Class, what: impl Into<String>) -> Self {
        Self {
            class,
            what: what.into(),
            expected: None,
            found: None,
            hint: None,
            cause: None,
            log: None,
        }
    }

    /// [`Class::Environment`].
    pub fn environment(what: impl Into<String>) -> Self {
        Self::new(Class::Environment, what)
    }

    /// [`Class::Inconclusive`].
    pub fn inconclusive(what: impl Into<String>) -> Self {
        Self::new(Class::Inconclusive, what)
    }

    /// [`Class::Product`].
    pub fn product(what: impl Into<String>) -> Self {
        Self::new(Class::Product, what)
    }

    /// [`Class::Skew`].
    pub fn skew(what: impl Into<String>) -> Self {
        Self::new(Class::Skew, what)
    }

    /// Says what should have been there.
    #[must_use]
    pub fn expected(mut self, text: impl fmt::Display) -> Self {
        self.expected = Some(text.to_string());
        self
    }

    /// Says what was there.
    #[must_use]
    pub fn found(mut self, text: impl fmt::Display) -> Self {
        self.found = Some(text.to_string());
        self
    }

    /// Says what to do next.
    #[must_use]
    pub fn hint(mut self, text: impl fmt::Display) -> Self {
        self.hint = Some(text.to_string());
        self
    }

    /// Quotes the first causal line and names the file it stands in.
    #[must_use]
    pub fn cause(mut self, line: impl Into<String>, log: impl Into<PathBuf>) -> Self {
        self.cause = Some(line.into());
        self.log = Some(log.into());
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.class, self.what)?;
        if let Some(text) = &self.expected {
            write!(f, "; expected {text}")?;
        }
        if let Some(text) = &self.found {
            write!(f, "; found {text}")?;
        }
        if let Some(text) = &self.cause {
            write!(f, "; first cause: {text}")?;
        }
        if let Some(text) = &self.log {
            write!(f, " ({})", text.display())?;
        }
        if let Some(text) = &self.hint {
            write!(f, "; {text}")?;
        }
        Ok(())
    }
}

impl std::error::Error for Failure {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn class_comes_first_and_the_hint_last() {
        let failure = Failure::environment("/dev/shm is too small")
            .expected("48 MiB free")
            .found("12 MiB")
            .hint("remount it larger");
        assert_eq!(
            failure.to_string(),
            "Environment: /dev/shm is too small; expected 48 MiB free; found 12 MiB; remount it larger"
        );
    }
}
