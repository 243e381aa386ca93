//! Everything between "a stack is wanted" and the first spawn: leftovers, devices, number,
//! ports, plan.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::taken;
use crate::engine::Blueprint;
use crate::failure::Failure;
use crate::gate::{host, needs};
use crate::launch::local::Place;
use crate::launch::ports::{self, Reserved};
use crate::plan::{Bindings, Plan};
use crate::stack::cookie::Cookie;
use crate::stack::devices::{self, Holder, NotHad};
use crate::stack::inventory::Inventory;
use crate::stack::lease::LaunchSpec;
use crate::stack::leftovers::Leftovers;
use crate::stack::sidecar::{self, Sidecar};
use crate::stack::state_dir::{self, StackDir, StateDir};

/// How long services that somebody else runs may take to be there; those of a plan have as long.
const SIDECARS_WITHIN: Duration = Duration::from_secs(240);

/// Generation that is about to run. Its locks last as long as this value.
pub(super) struct Prepared {
    pub(super) number: u64,
    pub(super) plan: Arc<Plan>,
    pub(super) place: Place,
    pub(super) dir: PathBuf,
    pub(super) inventory: Inventory,
    ports: Reserved,
    _devices: Vec<File>,
}

impl Prepared {
    /// Lets the processes have their ports.
    pub(super) fn release_ports(&mut self) {
        self.ports.release_listeners();
    }
}

/// Removes what earlier generations left, takes the devices and makes the plan.
pub(super) async fn prepare(
    spec: &LaunchSpec,
    dir: &StackDir,
    blueprint: &dyn Blueprint,
    say: impl Fn(String),
) -> Result<Prepared, NotHad> {
    let swept = Leftovers::of(dir, &spec.fingerprint, Some(std::process::id()))
        .sweep()
        .await
        .map_err(NotHad::Failed)?;
    if swept != Default::default() {
        say(format!(
            "swept {} processes and {} shared-memory files of an earlier generation",
            swept.processes,
            swept.files.len()
        ));
    }
    let state = StateDir::open(&spec.state_dir).map_err(NotHad::Failed)?;
    let me = Holder {
        fingerprint: spec.fingerprint.clone(),
        profile: spec.profile.clone(),
        pid: std::process::id(),
        socket: dir.socket(),
    };
    let patience = Duration::from_secs(spec.bring_up_seconds);
    let devices = devices::take(&state, &spec.devices, &me, patience, &say).await?;
    let external = blueprint.external().map_err(NotHad::Failed)?;
    let sidecars = sidecar::await_all(external, patience.min(SIDECARS_WITHIN), &say)
        .await
        .map_err(NotHad::Failed)?;
    match plan(spec, dir, &state, blueprint, devices, sidecars.into()) {
        Ok(prepared) => Ok(prepared),
        Err(failure) => {
            // Nothing ran, but its directory already says that something may be left.
            let _ = Leftovers::of(dir, &spec.fingerprint, None).sweep().await;
            Err(NotHad::Failed(failure))
        }
    }
}

fn plan(
    spec: &LaunchSpec,
    dir: &StackDir,
    state: &StateDir,
    blueprint: &dyn Blueprint,
    devices: Vec<File>,
    sidecars: Arc<[Sidecar]>,
) -> Result<Prepared, Failure> {
    let number = dir.next_generation()?;
    let cookie = Cookie {
        fingerprint: spec.fingerprint.clone(),
        generation: number,
    };
    let generation = dir.generation(number);
    // Before anything can be left behind.
    let mut inventory = Inventory::begin();
    let place = Place {
        cookie: cookie.clone(),
        home: dir.path().to_owned(),
        scratch: dir.scratch(number),
        logs: generation.join("logs"),
        shm_before: Arc::new(inventory.before.clone()),
        sidecars: sidecars.clone(),
    };
    for path in [&place.scratch, &place.logs, &generation.join("reference")] {
        state_dir::create(path)?;
    }
    inventory.save(&generation)?;
    // What a Guard answers on since its first claim is bound, and cannot be moved.
    let bound = sidecars.iter().filter_map(|sidecar| {
        let name = sidecar.external.control_port.clone();
        sidecar.control.map(|port| (name, port))
    });
    let bound: BTreeMap<String, u16> = bound.collect();
    let mut names = blueprint.ports();
    names.retain(|name| !bound.contains_key(name));
    let ports = ports::reserve(&names, &blueprint.fixed_ports(), &state.ports()?)?;
    let plan = blueprint.plan(&Bindings {
        ports: ports.ports.clone().into_iter().chain(bound).collect(),
        scratch: place.scratch.clone(),
        generation: number,
        cookie: cookie.to_string(),
        host_address: host_address(),
    })?;
    taken::check(&plan, &inventory.before)?;
    needs::room(plan.shm_bytes)?;
    for path in &plan.directories {
        state_dir::create(path)?;
    }
    inventory.shm_prefixes.clone_from(&plan.shm_prefixes);
    inventory.save(&generation)?;
    Ok(Prepared {
        number,
        plan: Arc::new(plan),
        place,
        dir: generation,
        inventory,
        ports,
        _devices: devices,
    })
}

/// The address by which others reach this host, if there is one.
fn host_address() -> Option<Ipv4Addr> {
    host::addresses()
        .into_iter()
        .find_map(|address| match address.ip {
            IpAddr::V4(ip) => Some(ip),
            IpAddr::V6(_) => None,
        })
}
