//! The parts of a plan that are Dynamo's, whatever the engine: discovery, front door, and the
//! environment that all of its processes share.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use super::{Bindings, ChosenDiscovery, Group, Probe, Process, Role};
use crate::config::Config;
use crate::config::profile::DiscoveryBackend;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::geometry::Geometry;
use crate::stack::state_dir::SHORTER;

/// Name of the front door's port in the bindings.
pub(super) const FRONTEND_PORT: &str = "frontend";
const ETCD_CLIENT_PORT: &str = "etcd-client";
const ETCD_PEER_PORT: &str = "etcd-peer";
const ETCD: &str = "etcd";
const FRONTEND: &str = "frontend";
/// Name of the state agent's system port in the bindings.
pub(super) const STATE_AGENT_PORT: &str = "state-agent-system";
pub(super) const STATE_AGENT: &str = "state-agent";

/// Dynamo's default; only the core workers, and who serves them, may be found by it.
pub(crate) const CORE_NAMESPACE: &str = "dynamo";

/// vLLM makes unix sockets named by a UUID in `$TMPDIR`, and a socket's path may have 107 bytes.
const LONGEST_TMPDIR: usize = 70;
/// The longest scratch directory that leaves room for that.
pub(crate) const LONGEST_SCRATCH: usize = LONGEST_TMPDIR - "/tmp".len();

/// How the processes find each other, decided.
pub(super) enum Discovery<'a> {
    /// An etcd of our own.
    Etcd {
        /// The program.
        program: &'a Path,
        /// Where it answers clients.
        client: u16,
        /// Where it would answer other members.
        peer: u16,
        /// Why etcd.
        reason: String,
    },
    /// Files in the scratch directory.
    File {
        /// Why files.
        reason: String,
    },
}

impl<'a> Discovery<'a> {
    /// etcd where there is one: the file store drops a live worker whose host stalls for longer
    /// than a lease, and never takes it back.
    pub(super) fn choose(
        config: &Config,
        installed: &'a Installed,
        bindings: &Bindings,
    ) -> Result<Self, Failure> {
        let reason = match config.profile.discovery.backend {
            DiscoveryBackend::File => {
                return Ok(Self::File {
                    reason: "the profile says so".to_owned(),
                });
            }
            DiscoveryBackend::Etcd => "the profile says so",
            DiscoveryBackend::Auto => "etcd is installed",
        };
        match (&installed.etcd, config.profile.discovery.backend) {
            (Some(program), _) => Ok(Self::Etcd {
                program,
                client: bindings.port(ETCD_CLIENT_PORT)?,
                peer: bindings.port(ETCD_PEER_PORT)?,
                reason: reason.to_owned(),
            }),
            (None, DiscoveryBackend::Etcd) => {
                Err(Failure::environment("discovery.backend is etcd")
                    .expected("an etcd program")
                    .found("none")
                    .hint("install etcd (Debian: etcd-server), or pass --discovery file"))
            }
            (None, _) => Ok(Self::File {
                reason: "no etcd is installed".to_owned(),
            }),
        }
    }

    /// The choice, for people.
    pub(super) fn chosen(&self) -> ChosenDiscovery {
        let (backend, reason) = match self {
            Self::Etcd { reason, .. } => (ETCD, reason),
            Self::File { reason } => ("file", reason),
        };
        ChosenDiscovery {
            backend: backend.to_owned(),
            reason: reason.clone(),
        }
    }

    /// What must answer before anyone can register.
    pub(super) fn after(&self) -> Vec<String> {
        match self {
            Self::Etcd { .. } => vec![ETCD.to_owned()],
            Self::File { .. } => Vec::new(),
        }
    }

    /// The server, if it takes one.
    pub(super) fn process(&self, bindings: &Bindings) -> Option<Process> {
        let Self::Etcd {
            program,
            client,
            peer,
            ..
        } = self
        else {
            return None;
        };
        let client = format!("http://127.0.0.1:{client}");
        let peer = format!("http://127.0.0.1:{peer}");
        let argv = [
            &program.display().to_string(),
            "--name",
            "kvcr",
            "--data-dir",
            &text(&bindings.scratch.join("etcd")),
            "--listen-client-urls",
            &client,
            "--advertise-client-urls",
            &client,
            "--listen-peer-urls",
            &peer,
            "--initial-advertise-peer-urls",
            &peer,
            "--initial-cluster",
            &format!("kvcr={peer}"),
        ];
        Some(Process {
            name: ETCD.to_owned(),
            role: Role::Discovery,
            group: Group::Core,
            argv: argv.map(str::to_owned).into(),
            env: BTreeMap::from([("PATH".to_owned(), SYSTEM_PATH.to_owned())]),
            after: Vec::new(),
            ready: vec![Probe::HttpJson {
                url: format!("{client}/health"),
                pointer: "/health".to_owned(),
                equals: "true".into(),
            }],
            start_seconds: 60,
            stop_seconds: 10,
        })
    }

    fn add_to(&self, env: &mut BTreeMap<String, String>, scratch: &Path) {
        let (backend, key, value) = match self {
            Self::Etcd { client, .. } => {
                (ETCD, "ETCD_ENDPOINTS", format!("http://127.0.0.1:{client}"))
            }
            Self::File { .. } => ("file", "DYN_FILE_KV", text(&scratch.join("discovery"))),
        };
        env.insert("DYN_DISCOVERY_BACKEND".to_owned(), backend.to_owned());
        env.insert(key.to_owned(), value);
    }
}

const SYSTEM_PATH: &str = "/usr/local/bin:/usr/bin:/bin";

/// Names of the ports of this module's processes.
pub(super) fn ports(config: &Config) -> Vec<String> {
    let etcd = match config.profile.discovery.backend {
        DiscoveryBackend::File => [].as_slice(),
        DiscoveryBackend::Auto | DiscoveryBackend::Etcd => &[ETCD_CLIENT_PORT, ETCD_PEER_PORT],
    };
    let agent = match config.profile.kvcr.guard {
        true => [STATE_AGENT_PORT].as_slice(),
        false => &[],
    };
    let all = etcd.iter().chain([&FRONTEND_PORT]).chain(agent);
    all.map(|&name| name.to_owned()).collect()
}

/// Directories that [`environment`] points at.
pub(super) fn directories(bindings: &Bindings) -> Vec<PathBuf> {
    ["home", "tmp", "cache", "discovery"]
        .map(|name| bindings.scratch.join(name))
        .into()
}

/// What every process of the stack has in its environment. Home, temporary files and
/// caches are this generation's own: engines leave sockets and compiled code there, and a killed
/// one does not clean up.
pub(super) fn environment(
    installed: &Installed,
    bindings: &Bindings,
    discovery: &Discovery<'_>,
) -> Result<BTreeMap<String, String>, Failure> {
    let scratch = &bindings.scratch;
    let tmp = text(&scratch.join("tmp"));
    if tmp.len() > LONGEST_TMPDIR {
        return Err(
            Failure::environment("the state directory is too deep for unix sockets")
                .expected(format!("at most {LONGEST_TMPDIR} bytes for {tmp}"))
                .found(tmp.len())
                .hint(SHORTER),
        );
    }
    let mut env: BTreeMap<String, String> = [
        ("PATH", SYSTEM_PATH.to_owned()),
        ("HOME", text(&scratch.join("home"))),
        ("TMPDIR", tmp),
        ("XDG_CACHE_HOME", text(&scratch.join("cache"))),
        ("DYN_REQUEST_PLANE", "tcp".to_owned()),
        ("DYN_EVENT_PLANE", "zmq".to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    if installed.program.python().is_some() {
        let python = [
            // Block hashes must agree between processes.
            ("PYTHONHASHSEED", "0"),
            // A dying process must not take its last words along.
            ("PYTHONUNBUFFERED", "1"),
            ("HF_HUB_OFFLINE", "1"),
            ("DO_NOT_TRACK", "1"),
        ];
        env.extend(python.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    if let Some(overlay) = &installed.overlay {
        env.insert("PYTHONPATH".to_owned(), text(overlay));
    }
    discovery.add_to(&mut env, scratch);
    Ok(env)
}

/// The OpenAI front door with the KV router.
pub(super) fn frontend(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
    discovery: &Discovery<'_>,
) -> Result<Process, Failure> {
    let port = bindings.port(FRONTEND_PORT)?;
    let options = [
        "--http-host",
        "127.0.0.1",
        "--http-port",
        &port.to_string(),
        "--router-mode",
        "kv",
        "--kv-cache-block-size",
        &Geometry::of(&config.profile).hit_block.to_string(),
        // One number for every model that this front door serves. The reference has a single
        // worker, so with the number of core workers here it would wait for good. That all core
        // workers are known is checked by a pinned canary on each.
        "--router-min-initial-workers",
        "1",
    ];
    let mut argv = installed.program.module("dynamo.frontend");
    argv.extend(options.map(str::to_owned));
    Ok(Process {
        name: FRONTEND.to_owned(),
        role: Role::Frontend,
        group: Group::Core,
        argv,
        env: environment(installed, bindings, discovery)?,
        after: discovery.after(),
        // It answers with an empty list of instances before any worker is there.
        ready: vec![Probe::Http {
            url: format!("http://127.0.0.1:{port}/health"),
        }],
        start_seconds: 240,
        stop_seconds: 20,
    })
}

/// Keeps, by owner, which blocks can be fetched from where: also those that only a Guard still has.
pub(super) fn state_agent(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
    discovery: &Discovery<'_>,
) -> Result<Process, Failure> {
    let port = bindings.port(STATE_AGENT_PORT)?;
    let mut argv = installed.program.module("dynamo.kv_state_agent");
    let slots = config.profile.topology.workers.to_string();
    argv.extend(["--max-slots".to_owned(), slots]);
    let mut env = environment(installed, bindings, discovery)?;
    for (name, value) in [
        ("DYN_COMPONENT", "kv_state_agent"),
        ("DYN_NAMESPACE", CORE_NAMESPACE),
        ("DYN_SYSTEM_PORT", &port.to_string()),
        ("DYN_HEALTH_CHECK_ENABLED", "false"),
    ] {
        env.insert(name.to_owned(), value.to_owned());
    }
    Ok(Process {
        name: STATE_AGENT.to_owned(),
        role: Role::StateAgent,
        group: Group::Core,
        argv,
        env,
        after: discovery.after(),
        ready: vec![Probe::Http {
            url: format!("http://127.0.0.1:{port}/live"),
        }],
        start_seconds: 240,
        stop_seconds: 20,
    })
}

/// A path as an argument. Paths of ours are UTF-8: configuration refuses others.
pub(crate) fn text(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
