//! The mark that every process of a stack carries in its environment.
//!
//! A process group dies with its leader's supervisor only as far as direct children go; a
//! grandchild in a session of its own survives. The environment is inherited by all of them and
//! `/proc/<pid>/environ` shows it to their owner, so it is what a sweep goes by.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// `<fingerprint>:<generation>`.
pub const STACK: &str = "KVCR_PHASE1_STACK";
/// The stack's state directory: two users' or two runtime directories' stacks of one
/// fingerprint are strangers to each other.
pub const HOME: &str = "KVCR_PHASE1_STATE";
/// Name of the plan's process that this one is, or descends from.
pub const PROCESS: &str = "KVCR_PHASE1_PROCESS";

/// Which incarnation of which stack.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Cookie {
    /// Which configuration.
    pub fingerprint: String,
    /// Which incarnation.
    pub generation: u64,
}

impl fmt::Display for Cookie {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.fingerprint, self.generation)
    }
}

/// Not `<fingerprint>:<generation>`.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not a stack cookie")]
pub struct NotACookie;

impl FromStr for Cookie {
    type Err = NotACookie;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (fingerprint, generation) = text.rsplit_once(':').ok_or(NotACookie)?;
        // `parse` alone would take "+7".
        if fingerprint.is_empty() || !generation.bytes().all(|byte| byte.is_ascii_digit()) {
            return Err(NotACookie);
        }
        Ok(Self {
            fingerprint: fingerprint.to_owned(),
            generation: generation.parse().map_err(|_| NotACookie)?,
        })
    }
}

impl Cookie {
    /// The variables that mark `process` of the stack whose state directory is `home`.
    pub fn marks(&self, home: &Path, process: &str) -> BTreeMap<String, String> {
        BTreeMap::from([
            (STACK.to_owned(), self.to_string()),
            (HOME.to_owned(), home.display().to_string()),
            (PROCESS.to_owned(), process.to_owned()),
        ])
    }

    /// What recognises them, of any generation.
    pub fn mark(&self, home: &Path) -> Mark {
        Mark {
            fingerprint: self.fingerprint.clone(),
            home: home.to_owned(),
            processes: None,
        }
    }
}

/// Recognises processes of one stack, of any generation.
#[derive(Clone, Debug)]
pub struct Mark {
    /// Which configuration.
    pub fingerprint: String,
    /// The stack's state directory.
    pub home: PathBuf,
    /// Only descendants of these processes of the plan; everything where absent.
    pub processes: Option<BTreeSet<String>>,
}

impl Mark {
    /// Whether a process with this environment belongs to the stack.
    pub fn matches(&self, environ: &HashMap<OsString, OsString>) -> bool {
        let get = |name: &str| environ.get(&OsString::from(name))?.to_str();
        let ours = get(STACK)
            .and_then(|text| text.parse::<Cookie>().ok())
            .is_some_and(|cookie| cookie.fingerprint == self.fingerprint)
            && get(HOME) == self.home.to_str();
        match &self.processes {
            None => ours,
            Some(names) => ours && get(PROCESS).is_some_and(|name| names.contains(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn environ(pairs: &BTreeMap<String, String>) -> HashMap<OsString, OsString> {
        pairs.iter().map(|(k, v)| (k.into(), v.into())).collect()
    }

    #[test]
    fn only_our_own_fingerprint_and_state_directory_match() {
        let cookie = Cookie {
            fingerprint: "abc".to_owned(),
            generation: 3,
        };
        let mark = |fingerprint: &str, home: &str| Mark {
            fingerprint: fingerprint.to_owned(),
            home: home.into(),
            processes: None,
        };
        let theirs = environ(&cookie.marks(Path::new("/run/a"), "worker0"));
        assert!(mark("abc", "/run/a").matches(&theirs));
        assert!(
            !mark("ab", "/run/a").matches(&theirs),
            "a prefix is not a match"
        );
        assert!(!mark("abcd", "/run/a").matches(&theirs));
        assert!(!mark("abc", "/run/b").matches(&theirs));
        assert!(!mark("abc", "/run/a").matches(&HashMap::new()));
    }

    #[test]
    fn a_group_matches_only_its_own_processes() {
        let cookie = Cookie {
            fingerprint: "abc".to_owned(),
            generation: 3,
        };
        let mark = Mark {
            fingerprint: "abc".to_owned(),
            home: "/run/a".into(),
            processes: Some(BTreeSet::from(["reference".to_owned()])),
        };
        assert!(mark.matches(&environ(&cookie.marks(Path::new("/run/a"), "reference"))));
        assert!(!mark.matches(&environ(&cookie.marks(Path::new("/run/a"), "worker0"))));
    }

    #[test]
    fn what_is_not_a_cookie_is_refused() {
        for text in [
            "",
            ":",
            ":1",
            "abc",
            "abc:",
            "abc:+1",
            "abc:-1",
            "abc:1x",
            "abc:99999999999999999999",
        ] {
            assert_eq!(text.parse::<Cookie>(), Err(NotACookie), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn a_cookie_reads_back(fingerprint in "[a-z0-9:]{1,70}", generation: u64) {
            let cookie = Cookie { fingerprint, generation };
            prop_assert_eq!(cookie.to_string().parse(), Ok(cookie));
        }

        #[test]
        fn any_text_is_read_without_a_panic(text in ".{0,80}") {
            let _ = text.parse::<Cookie>();
        }
    }
}
