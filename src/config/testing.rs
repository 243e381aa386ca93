//! A made-up process environment and ready configurations, for tests of other modules too.

use std::ffi::OsString;
use std::path::PathBuf;

use super::{Config, EnvSource, OwnArgs, UsageError, load, split_args};

/// Variables and a current directory that a test made up. The user's id is 7.
pub(crate) struct FakeEnv {
    vars: Vec<(OsString, OsString)>,
    cwd: PathBuf,
}

impl FakeEnv {
    pub(crate) fn new<const N: usize>(vars: [(&str, &str); N]) -> Self {
        let vars = vars.map(|(name, value)| (name.into(), value.into()));
        Self {
            vars: vars.into(),
            cwd: PathBuf::from("/"),
        }
    }

    pub(crate) fn var_set(mut self, name: &str, value: &str) -> Self {
        self.vars.push((name.into(), value.into()));
        self
    }

    pub(crate) fn cwd(mut self, cwd: impl Into<PathBuf>) -> Self {
        self.cwd = cwd.into();
        self
    }
}

impl EnvSource for FakeEnv {
    fn var(&self, name: &str) -> Option<OsString> {
        let found = self.vars.iter().find(|(other, _)| other == name);
        found.map(|(_, value)| value.clone())
    }

    fn vars(&self) -> Vec<(OsString, OsString)> {
        self.vars.clone()
    }

    fn current_dir(&self) -> PathBuf {
        self.cwd.clone()
    }

    fn uid(&self) -> u32 {
        7
    }
}

/// Our flags out of `args`, none of which is anyone else's.
pub(crate) fn own(args: &[&str]) -> Result<OwnArgs, UsageError> {
    split_args(args.iter().map(OsString::from)).map(|(own, _)| own)
}

/// The `sim` profile with these flags and nothing from the environment.
pub(crate) fn sim(args: &[&str]) -> Config {
    cpu(&[&["--profile", "sim"], args].concat())
}

/// The `cpu` profile with these flags and nothing from the environment.
pub(crate) fn cpu(args: &[&str]) -> Config {
    load(own(args).unwrap(), &FakeEnv::new([])).unwrap()
}
