//! The process's surroundings, behind a trait so that tests can make them up.
//!
//! [`ProcessEnv`] is the only place in the crate that reads environment variables.

use std::ffi::OsString;
use std::path::PathBuf;

/// Where variables come from.
pub trait EnvSource {
    /// The value of one variable.
    fn var(&self, name: &str) -> Option<OsString>;

    /// Every variable.
    fn vars(&self) -> Vec<(OsString, OsString)>;

    /// The current directory.
    fn current_dir(&self) -> PathBuf;

    /// The user's numeric id.
    fn uid(&self) -> u32;

    /// The user's home directory.
    fn home(&self) -> Option<PathBuf> {
        self.var("HOME").map(PathBuf::from)
    }
}

/// This process.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessEnv;

#[expect(
    clippy::disallowed_methods,
    reason = "this is where variables are read"
)]
impl EnvSource for ProcessEnv {
    fn var(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }

    fn vars(&self) -> Vec<(OsString, OsString)> {
        std::env::vars_os().collect()
    }

    fn current_dir(&self) -> PathBuf {
        // A removed directory: relative paths then fail where they are used, with their name.
        std::env::current_dir().unwrap_or_else(|_| PathBuf::from("/"))
    }

    fn uid(&self) -> u32 {
        rustix::process::getuid().as_raw()
    }

    fn home(&self) -> Option<PathBuf> {
        // Knows the user's entry too: what is installed must not end up below /tmp, where
        // anybody could have put it, only because a service has no HOME.
        std::env::home_dir()
    }
}
