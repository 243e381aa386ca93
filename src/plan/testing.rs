//! Software that is installed nowhere, and plans with placeholder bindings.

use std::collections::BTreeMap;

use super::{Bindings, Plan, fixed_ports, plan, ports};
use crate::config::Config;
use crate::environment::Installed;
use crate::failure::Failure;

/// An environment whose paths are the same everywhere.
pub(crate) fn installed() -> Installed {
    Installed {
        key: "0123456789abcdef".into(),
        python: "/env/bin/python".into(),
        overlay: Some("/overlay".into()),
        model: "/models/dense".into(),
        model_digest: "feedface".into(),
        etcd: Some("/usr/bin/etcd".into()),
        packages: BTreeMap::new(),
    }
}

/// The plan that is hashed and pinned.
pub(crate) fn canonical(config: &Config, installed: &Installed) -> Result<Plan, Failure> {
    let bindings = Bindings::canonical(&ports(config), &fixed_ports(config));
    plan(config, installed, &bindings)
}
