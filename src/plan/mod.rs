//! What must run: a pure function of the configuration.
//!
//! Nothing here touches the machine. A plan names every process with its argv, environment,
//! readiness probes and order; ports and directories come in as [`Bindings`], so the same
//! configuration renders the same plan anywhere. Carrying a plan out belongs to `launch` and
//! `stack`; what an engine's argv looks like belongs to `engine`.

mod assemble;
pub(crate) mod changed;
pub(crate) mod dynamo;
pub(crate) mod guard;
mod render;
pub(crate) mod sidecar;
#[cfg(test)]
pub(crate) mod testing;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::sim::settings::{self, Settings};

use assemble::assemble;
pub(crate) use dynamo::LONGEST_SCRATCH;
pub use render::render;
pub use sidecar::External;

/// The plan of this configuration, by its topology.
pub fn plan(config: &Config, installed: &Installed, bindings: &Bindings) -> Result<Plan, Failure> {
    let mut plan = assemble(config, installed, bindings)?;
    if config.profile.engine.kind.is_simulated() {
        tell_settings(config, bindings, &mut plan)?;
    }
    Ok(plan)
}

/// Where a running simulated stack looks for the lies that it is told to tell, see
/// [`Settings::faults_file`].
pub(crate) fn faults_file(scratch: &Path) -> PathBuf {
    scratch.join("faults")
}

/// A simulated process is started as the real one is, and told the rest in one variable.
fn tell_settings(config: &Config, bindings: &Bindings, plan: &mut Plan) -> Result<(), Failure> {
    let sim = &config.profile.sim;
    // A service that runs elsewhere is told by whoever starts it, of the same profile.
    let elsewhere = plan.external.iter().map(|it| it.name.as_str());
    let names: BTreeSet<&str> = plan
        .processes
        .iter()
        .map(|it| it.name.as_str())
        .chain(elsewhere)
        .collect();
    let nobodys = sim
        .faults
        .iter()
        .find(|switch| !names.iter().any(|process| switch.is_told_by(process)));
    if let Some(switch) = nobodys {
        return Err(
            Failure::environment(format!("sim.faults: {switch} would be told by nobody"))
                .expected(format!(
                    "a process of the plan: {}",
                    names.into_iter().collect::<Vec<_>>().join(", ")
                ))
                .hint("correct --sim-faults"),
        );
    }
    for process in &mut plan.processes {
        let faults_file = Some(faults_file(&bindings.scratch));
        let text = settings_of(config, &process.name, faults_file)?;
        process.env.insert(settings::VARIABLE.to_owned(), text);
    }
    Ok(())
}

/// What the simulated process called `name` is told in its one variable.
fn settings_of(
    config: &Config,
    name: &str,
    faults_file: Option<PathBuf>,
) -> Result<String, Failure> {
    let sim = &config.profile.sim;
    let settings = Settings {
        process: name.to_owned(),
        seed: sim.seed,
        latency: sim.latency(),
        faults: sim.faults.clone(),
        faults_file,
        write_log: None,
    };
    serde_json::to_string(&settings).map_err(|error| {
        Failure::environment("the settings of a simulated process cannot be written").found(error)
    })
}

/// Names of the TCP ports that [`plan`] needs in its bindings.
pub fn ports(config: &Config) -> Vec<String> {
    assemble::ports(config)
}

/// Bytes of `/dev/shm` that the stack of `config` takes, whatever software it runs on.
pub fn shm_bytes(config: &Config) -> u64 {
    assemble::shm_bytes(config)
}

/// Ports that must have this number instead of an allocated one.
pub fn fixed_ports(config: &Config) -> Vec<(String, u16)> {
    let frontend = config.profile.network.frontend_port;
    frontend
        .map(|port| (dynamo::FRONTEND_PORT.to_owned(), port))
        .into_iter()
        .collect()
}

/// Everything the plan needs to know that only the machine can say.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Bindings {
    /// One TCP port for each name that the plan asks for.
    pub ports: BTreeMap<String, u16>,
    /// Private directory of this generation: sockets, journals, discovery, caches.
    pub scratch: PathBuf,
    /// Which incarnation of the stack this is.
    pub generation: u64,
    /// `<fingerprint>:<generation>`; stands in the name of every shared-memory file (and `stack`
    /// puts it into the environment of every process), so that a sweep finds exactly ours.
    pub cookie: String,
    /// An address of this host that is not loopback, where it has one.
    #[serde(default)]
    pub host_address: Option<Ipv4Addr>,
}

impl Bindings {
    /// The same for every machine and run: ports counted up from 20000, directories under
    /// `/scratch`. A plan with these is what is hashed and pinned; it is never carried out.
    pub fn canonical(ports: &[String], fixed: &[(String, u16)]) -> Self {
        let mut numbers: BTreeMap<String, u16> = ports.iter().cloned().zip(20_000..).collect();
        numbers.extend(fixed.iter().cloned());
        Self {
            ports: numbers,
            scratch: PathBuf::from("/scratch"),
            generation: 0,
            cookie: "0000000000000000:0".to_owned(),
            // Reserved for documentation: nobody's.
            host_address: Some(Ipv4Addr::new(192, 0, 2, 1)),
        }
    }

    /// The port called `name`.
    pub(crate) fn port(&self, name: &str) -> Result<u16, Failure> {
        self.ports.get(name).copied().ok_or_else(|| {
            Failure::inconclusive("the plan is incomplete")
                .expected(format!("a port called {name} in the bindings"))
                .found(format!("{:?}", self.ports.keys().collect::<Vec<_>>()))
        })
    }

    /// The cookie as a part of file names: `<fingerprint>-g<generation>`.
    pub(crate) fn file_cookie(&self) -> String {
        self.cookie.replace(':', "-g")
    }
}

/// A process group that starts and stops together.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Group {
    /// Always running while the stack is up.
    Core,
    /// The KVCR-off reference engine: started when a case asks, stopped when none needs it.
    Reference,
}

/// What a process is for.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Role {
    /// etcd.
    Discovery,
    /// OpenAI front door with the KV router.
    Frontend,
    /// An engine that serves.
    Worker,
    /// Keeps a worker's KVCR tier beyond the worker's death.
    Service,
    /// Tells the router which blocks outlived which worker.
    StateAgent,
}

/// When a process counts as started.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "kind")]
pub enum Probe {
    /// A TCP connect to `127.0.0.1:port` succeeds.
    Tcp {
        /// Port on the loopback interface.
        port: u16,
    },
    /// A unix-socket connect succeeds. A file alone proves nothing: it may be stale.
    Unix {
        /// Path of the socket.
        path: PathBuf,
    },
    /// `GET url` answers 2xx.
    Http {
        /// Absolute URL.
        url: String,
    },
    /// `GET url` answers 2xx with JSON whose value at `pointer` equals `equals`.
    HttpJson {
        /// Absolute URL.
        url: String,
        /// RFC 6901 pointer.
        pointer: String,
        /// The value that means ready.
        equals: serde_json::Value,
    },
}

/// One operating-system process.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Process {
    /// Unique within the plan, also the stem of its log file: `worker0`.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// When it starts.
    pub group: Group,
    /// Program and arguments. The program is an absolute path.
    pub argv: Vec<String>,
    /// The complete environment, except for what `launch` passes through by allow-list.
    pub env: BTreeMap<String, String>,
    /// Names of processes whose probes must hold before this one is spawned.
    pub after: Vec<String>,
    /// All of these hold: the process is started.
    pub ready: Vec<Probe>,
    /// Seconds from spawn until the probes must hold.
    pub start_seconds: u64,
    /// Seconds between SIGTERM and SIGKILL of the process group.
    pub stop_seconds: u64,
}

impl Process {
    /// Unix sockets that it listens on.
    pub(crate) fn sockets(&self) -> impl Iterator<Item = &Path> {
        self.ready.iter().filter_map(|probe| match probe {
            Probe::Unix { path } => Some(path.as_path()),
            _ => None,
        })
    }
}

/// What of a request an engine does.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Serves {
    /// All of it.
    #[default]
    Whole,
    /// Reads the prompt, and hands over to who decodes.
    Prefill,
    /// Generates from what was handed over.
    Decode,
}

impl Serves {
    /// Whether it is all of a request: what goes without saying.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        *self == Self::Whole
    }
}

/// One serving engine as the cases see it.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct PlannedWorker {
    /// Name of its process.
    pub process: String,
    /// Position in the topology, from 0.
    pub index: usize,
    /// The model name that routes to it.
    pub served_model: String,
    /// Where its Prometheus page is.
    pub metrics_url: String,
    /// Where its own health document is.
    pub health_url: String,
    /// Whether KVCR telemetry must be present on that page.
    pub kvcr: bool,
    /// What of a request it does.
    #[serde(default, skip_serializing_if = "Serves::is_whole")]
    pub serves: Serves,
}

/// Which store the processes find each other in.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct ChosenDiscovery {
    /// `etcd` or `file`.
    pub backend: String,
    /// Why this one.
    pub reason: String,
}

/// What must run.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Plan {
    /// Which shape: `aggregated`, `disagg`.
    pub topology: String,
    /// How the processes find each other.
    pub discovery: ChosenDiscovery,
    /// In start order; `after` refines it.
    pub processes: Vec<Process>,
    /// `http://127.0.0.1:PORT` of the OpenAI front door.
    pub frontend_url: String,
    /// Serving workers of [`Group::Core`], by index: those under test, then who decodes for them.
    pub workers: Vec<PlannedWorker>,
    /// The KVCR-off engine.
    pub reference: Option<PlannedWorker>,
    /// Directories to create (mode 0700) before anything starts.
    pub directories: Vec<PathBuf>,
    /// Glob-free name prefixes under `/dev/shm` that this plan creates.
    pub shm_prefixes: Vec<String>,
    /// Bytes of `/dev/shm` that this plan may use.
    pub shm_bytes: u64,
    /// Services that it needs and somebody else runs.
    #[serde(default)]
    pub external: Vec<External>,
}
