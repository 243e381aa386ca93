//! Software that is installed nowhere, and plans with placeholder bindings.

use std::collections::BTreeMap;

use super::{Bindings, Plan, fixed_ports, plan, ports};
use crate::config::Config;
use crate::environment::{Installed, Program};
use crate::failure::Failure;

/// An environment whose paths are the same everywhere.
pub(crate) fn installed() -> Installed {
    Installed {
        key: "0123456789abcdef".into(),
        program: Program::Python("/env/bin/python".into()),
        overlay: Some("/overlay".into()),
        model: "/models/dense".into(),
        model_digest: "feedface".into(),
        etcd: Some("/usr/bin/etcd".into()),
        packages: BTreeMap::new(),
        reads_nested_tiers: false,
    }
}

/// The simulated stack, as if this executable and its model were at the same place everywhere.
pub(crate) fn simulated() -> Installed {
    Installed {
        program: Program::Simulated("/sim/kvcr-phase1".into()),
        overlay: None,
        model: "/models/sim".into(),
        etcd: None,
        ..installed()
    }
}

/// The plan that is hashed and pinned.
pub(crate) fn canonical(config: &Config, installed: &Installed) -> Result<Plan, Failure> {
    let bindings = Bindings::canonical(&ports(config), &fixed_ports(config));
    plan(config, installed, &bindings)
}
