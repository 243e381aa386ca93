//! The marker of a complete install: `manifest.json`, written last.
//!
//! A directory without one was interrupted, whatever it looks like.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::atomic;

use super::Package;
use super::interpreter::Interpreter;

/// Its name.
pub(crate) const FILE: &str = "manifest.json";

/// Raised when an old reader would misread a new manifest; the install is then redone.
pub(crate) const SCHEMA: u32 = 1;

/// What was installed, with what, and how to tell that it still is.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Manifest {
    pub(crate) schema: u32,
    pub(crate) name: String,
    pub(crate) key: String,
    pub(crate) created: jiff::Timestamp,
    /// Version of this program that installed it.
    pub(crate) installed_by: String,
    /// `CPython 3.12.1`.
    pub(crate) interpreter: String,
    /// Its program, which the virtual environment links to.
    pub(crate) base: PathBuf,
    pub(crate) uv: String,
    /// Where etcd is, if it was brought along or found.
    pub(crate) etcd: Option<PathBuf>,
    /// Why it is that one, or none.
    pub(crate) etcd_reason: String,
    pub(crate) site: Vec<PathBuf>,
    /// [`super::packages::stamp`] right after the install.
    pub(crate) stamp: String,
    pub(crate) packages: BTreeMap<String, Package>,
}

impl Manifest {
    /// The manifest in `directory`; the error says why there is none that can be used.
    pub(crate) fn read(directory: &Path) -> Result<Self, Unreadable> {
        let path = directory.join(FILE);
        let text = match std::fs::read(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Unreadable::Absent);
            }
            Err(error) => return Err(Unreadable::Damaged(error.to_string())),
        };
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| Unreadable::Damaged(format!("{FILE} is damaged: {error}")))?;
        if manifest.schema != SCHEMA {
            let found = manifest.schema;
            let why = format!("{FILE} has schema {found}, this program reads {SCHEMA}");
            return Err(Unreadable::Damaged(why));
        }
        Ok(manifest)
    }

    /// The interpreter it was installed with, if that is still there.
    pub(crate) fn interpreter(&self) -> Option<Interpreter> {
        let (implementation, version) = self.interpreter.split_once(' ')?;
        let mut numbers = version.splitn(3, '.').map(str::parse);
        let mut number = || numbers.next()?.ok();
        let version = (number()?, number()?, number()?);
        self.base.exists().then(|| Interpreter {
            implementation: implementation.to_owned(),
            version,
            executable: self.base.clone(),
            site: Vec::new(),
        })
    }

    /// Writes it so that it is whole or absent, even if the machine loses power.
    pub(crate) fn write(&self, directory: &Path) -> io::Result<()> {
        atomic::replace_durably(&directory.join(FILE), &atomic::json(self)?)
    }
}

/// Why a manifest cannot be used.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Unreadable {
    /// There is none: never finished.
    Absent,
    /// There is one, but it cannot be trusted.
    Damaged(String),
}
