//! Everything that can keep a run from starting, as one table: need, found, what to do.
//!
//! [`report`] is pure. [`examine`] gathers what it judges; it starts nothing that lasts, changes
//! nothing but an empty state directory, and comes back within seconds whatever the machine does.

mod rows;
mod table;

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

use crate::config::{InstaState, Paths, Profile};
use crate::environment::Installed;
use crate::environment::preflight::{Preflight, preflight};
use crate::failure::{Class, Failure};
use crate::plan::External;
use crate::stack::sidecar;
use crate::stack::state_dir::StateDir;

use super::{Facts, host};

/// Raised when a reader of the JSON would misread it.
const SCHEMA: u32 = 1;

/// How a need stands.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Met.
    Met,
    /// Not met: nothing can run, or nothing can be believed.
    Unmet,
    /// Worth knowing; keeps nothing from running.
    Note,
}

/// One row: a need and what there is.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Finding {
    /// Stable name, for machines: `shm`.
    pub name: String,
    /// What is needed.
    pub need: String,
    /// What there is.
    pub found: String,
    /// What to do, unless it is met.
    pub hint: Option<String>,
    /// How it stands.
    pub status: Status,
    /// Who has to act, where it is not met.
    pub class: Option<Class>,
}

/// All rows, and what they come to.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Report {
    /// Version of this document.
    pub schema: u32,
    /// Which profile was examined.
    pub profile: String,
    /// Whether a run can start.
    pub runnable: bool,
    /// Who has to act if not: releases that do not fit come before the machine.
    pub class: Option<Class>,
    /// The rows.
    pub rows: Vec<Finding>,
}

/// What is examined.
#[derive(Clone, Debug)]
pub struct Inputs<'a> {
    /// The profile's name.
    pub profile_name: &'a str,
    /// The profile.
    pub profile: &'a Profile,
    /// Directories.
    pub paths: &'a Paths,
    /// The software, or why there is none.
    pub installed: Result<Installed, Failure>,
    /// What the plan will use of `/dev/shm`.
    pub shm_bytes: u64,
    /// Services that the plan needs and somebody else runs.
    pub external: Vec<External>,
    /// What insta was told.
    pub insta: &'a InstaState,
}

/// Everything that [`report`] judges.
#[derive(Clone, Debug)]
pub struct Examined<'a> {
    /// What was asked about.
    pub inputs: &'a Inputs<'a>,
    /// The machine.
    pub facts: Facts,
    /// What `preflight.py` said; none where there is no software to ask.
    pub preflight: Option<Result<Preflight, Failure>>,
    /// Version of etcd, where it runs.
    pub etcd_version: Option<String>,
    /// Whether the state directory can be written to; the error if not.
    pub state: Result<(), String>,
    /// Whether something could be installed into the cache; the error if not.
    pub cache: Result<(), String>,
    /// The fixed ports that are taken, and by whom; 0 stands for "any".
    pub busy: BTreeMap<u16, String>,
    /// Each service that somebody else runs, and what there is.
    pub sidecars: Vec<(External, Result<String, Failure>)>,
}

/// Looks at everything, and judges it.
pub fn doctor(inputs: &Inputs<'_>) -> Report {
    report(&examine(inputs))
}

/// Looks at everything.
pub fn examine<'a>(inputs: &'a Inputs<'a>) -> Examined<'a> {
    let installed = inputs.installed.as_ref().ok();
    let etcd: Option<PathBuf> = match installed {
        Some(installed) => installed.etcd.clone(),
        None => crate::environment::etcd::find(None, &Default::default())
            .and_then(|choice| choice.program),
    };
    let ports = [Some(0), inputs.profile.network.frontend_port];
    Examined {
        facts: Facts::gather(etcd.as_deref()),
        preflight: installed
            .and_then(|installed| preflight(installed, &inputs.paths.cache).transpose()),
        etcd_version: etcd.as_deref().and_then(crate::environment::etcd::version),
        state: writable(&inputs.paths.state),
        cache: installable(&inputs.paths.cache),
        busy: ports
            .into_iter()
            .flatten()
            .filter_map(|port| Some((port, host::port(port).err()?)))
            .collect(),
        sidecars: inputs
            .external
            .iter()
            .map(|external| (external.clone(), sidecar::examine(external)))
            .collect(),
        inputs,
    }
}

/// Judges it.
pub fn report(examined: &Examined<'_>) -> Report {
    let rows = rows::all(examined);
    let classes = || rows.iter().filter_map(|row| row.class);
    Report {
        schema: SCHEMA,
        profile: examined.inputs.profile_name.to_owned(),
        runnable: rows.iter().all(|row| row.status != Status::Unmet),
        class: classes()
            .find(|class| *class == Class::Skew)
            .or_else(|| classes().next()),
        rows,
    }
}

fn writable(directory: &std::path::Path) -> Result<(), String> {
    let state = StateDir::open(directory).map_err(|failure| match failure.found {
        Some(found) => format!("{}; found {found}", failure.what),
        None => failure.what,
    })?;
    tempfile::tempfile_in(state.path())
        .map(drop)
        .map_err(|error| error.to_string())
}

/// Looks and touches nothing: the cache may not be there yet.
fn installable(directory: &std::path::Path) -> Result<(), String> {
    let nearest = directory.ancestors().find(|path| path.exists());
    let nearest = nearest.ok_or("no part of it exists")?;
    if !nearest.is_dir() {
        return Err(format!("{} is not a directory", nearest.display()));
    }
    rustix::fs::access(nearest, rustix::fs::Access::WRITE_OK)
        .map_err(|error| format!("{}: {error}", nearest.display()))
}

impl Report {
    /// The table for people, `width` columns wide at most.
    pub fn table(&self, width: u16) -> String {
        table::render(self, width)
    }

    /// The document for machines.
    pub fn json(&self) -> String {
        // Plain data: strings, flags and one number. It cannot fail.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests;
