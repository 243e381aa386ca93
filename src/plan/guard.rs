//! Guards: a `kvcr_service` beside each worker, which keeps the worker's tier in shared memory
//! and serves it when the worker dies, until a replacement takes it back.
//!
//! What a worker must be told so that its tier is guarded is here too, for every engine. The
//! state agent, by which the router learns what outlived whom, is [`super::dynamo`]'s.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use serde_json::{Map, Value, json};

use super::dynamo::text;
use super::{Bindings, Group, Probe, Process, Role, sidecar};
use crate::config::Config;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::geometry::Geometry;
use crate::hash;

/// What a service keeps beside each pool to recover it by: bytes of shared memory, fixed by KVCR.
const JOURNAL_BYTES: u64 = 100 << 20;
/// `--pool-sizes-gb` counts in these.
const GIB: f64 = (1u64 << 30) as f64;

/// What all Guards of a stack have in common.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Guarded {
    address: Ipv4Addr,
    digest: String,
    /// Where the services are that somebody else runs.
    elsewhere: Option<PathBuf>,
}

impl Guarded {
    /// `None` where the profile wants no Guards.
    ///
    /// # Errors
    /// Environment, if this host has no address that the state agent would accept.
    pub(crate) fn of(
        config: &Config,
        installed: &Installed,
        bindings: &Bindings,
    ) -> Result<Option<Self>, Failure> {
        if !config.profile.kvcr.guard {
            return Ok(None);
        }
        let address = match config.profile.network.host_address {
            Some(IpAddr::V4(address)) => Some(address),
            Some(IpAddr::V6(_)) => None,
            // A simulated state agent takes any address, and a simulated stack leaves loopback never.
            None if installed.program.is_simulated() => Some(Ipv4Addr::LOCALHOST),
            None => bindings.host_address,
        };
        let address = address.ok_or_else(|| {
            Failure::environment("Guards need an address of this host for the state agent")
                .expected("a non-loopback IPv4 address")
                .found("none")
                .hint("give the host one, or pass --guard=false")
        })?;
        Ok(Some(Self {
            address,
            digest: digest(config, installed),
            elsewhere: config.profile.topology.external_services.clone(),
        }))
    }

    /// What whoever claims a pool must come with.
    pub(super) fn digest(&self) -> &str {
        &self.digest
    }

    /// Whether the stack starts its services itself.
    pub(super) fn has_services(&self) -> bool {
        self.elsewhere.is_none()
    }

    /// What must have started before worker `index`.
    pub(super) fn after(&self, index: usize) -> Vec<String> {
        let own = self.has_services().then(|| service_name(index));
        [super::dynamo::STATE_AGENT.to_owned()]
            .into_iter()
            .chain(own)
            .collect()
    }

    fn socket(&self, bindings: &Bindings, index: usize) -> PathBuf {
        match &self.elsewhere {
            Some(directory) => sidecar::socket(directory, index),
            None => bindings
                .scratch
                .join(format!("{}.sock", service_name(index))),
        }
    }

    fn pool_dir(&self, bindings: &Bindings, index: usize) -> PathBuf {
        match &self.elsewhere {
            Some(directory) => sidecar::pool_dir(directory, index),
            None => pool_dir(bindings, index),
        }
    }

    /// The service of worker `index`; `env` is what every process of the stack has.
    pub(super) fn service(
        &self,
        config: &Config,
        installed: &Installed,
        bindings: &Bindings,
        index: usize,
        mut env: BTreeMap<String, String>,
    ) -> Process {
        let socket = self.socket(bindings, index);
        let mut argv = installed.program.module("kvcr.kvcr_service");
        let mut option = |flag: &str, value: String| argv.extend([flag.to_owned(), value]);
        option("--socket-path", text(&socket));
        option("--pool-dir", text(&self.pool_dir(bindings, index)));
        option("--guard-count", "1".to_owned());
        option("--pool-sizes-gb", gib(pool_bytes(config)));
        option("--compatibility-digest", self.digest.clone());
        if let Some(time) = config.profile.kvcr.heartbeat_timeout_ms {
            option("--heartbeat-timeout-ms", time.to_string());
        }
        // A promotion's stages are said at this level only, and they are what is timed.
        option("--log-level", "DEBUG".to_owned());
        env.insert("KVCR_LOG_LEVEL".to_owned(), "DEBUG".to_owned());
        Process {
            name: service_name(index),
            role: Role::Service,
            group: Group::Core,
            argv,
            env,
            after: Vec::new(),
            ready: vec![Probe::Unix { path: socket }],
            start_seconds: 240,
            // It waits up to 30 s for a Guard that is in the middle of something.
            stop_seconds: 40,
        }
    }

    /// What the tier of worker `index` is told about its service.
    pub(crate) fn tier(&self, bindings: &Bindings, index: usize) -> Map<String, Value> {
        let mut tier = Map::new();
        let socket = text(&self.socket(bindings, index));
        tier.insert("kvcr_service_socket_path".to_owned(), socket.into());
        tier.insert(
            "compatibility_digest".to_owned(),
            self.digest.clone().into(),
        );
        tier
    }

    /// What the connector of worker `index` is told about the state agent. The owner is the
    /// worker's place in the topology, so that a replacement takes over what is its.
    pub(crate) fn state_agent(&self, index: usize) -> Value {
        let slot = 100 + index;
        json!({
            "raw_advertise_host": self.address,
            "cache_owner_ids": {"0": format!("{:032x}:{:032x}/{index:016x}/{slot:032x}", 1, 2)},
        })
    }
}

/// Name of the process that guards worker `index`.
pub(crate) fn service_name(index: usize) -> String {
    format!("service{index}")
}

/// Where the service of worker `index` keeps its pool.
pub(super) fn pool_dir(bindings: &Bindings, index: usize) -> PathBuf {
    PathBuf::from(format!("/dev/shm/{}{index}", shm_prefix(bindings)))
}

/// How the names of the pool directories in `/dev/shm` begin.
pub(super) fn shm_prefix(bindings: &Bindings) -> String {
    format!("kvcr_pool_{}-", bindings.file_cookie())
}

/// Bytes of `/dev/shm` that all services of the stack take.
pub(super) fn shm_bytes(config: &Config) -> u64 {
    let elsewhere = config.profile.topology.external_services.is_some();
    if !config.profile.kvcr.guard || elsewhere {
        return 0;
    }
    services_bytes(config)
}

/// Bytes of `/dev/shm` that all services take, whoever runs them.
pub(super) fn services_bytes(config: &Config) -> u64 {
    let workers = config.profile.topology.workers as u64;
    workers.saturating_mul(pool_bytes(config).saturating_add(JOURNAL_BYTES))
}

/// Bytes of one pool.
pub(super) fn pool_bytes(config: &Config) -> u64 {
    let kvcr = &config.profile.kvcr;
    kvcr.pool_bytes.unwrap_or_else(|| {
        // Configuration insists on a size where a block's is not known.
        let block = Geometry::of(&config.profile).page_bytes.unwrap_or(0);
        block.saturating_mul(kvcr.dram_slots.into())
    })
}

/// Every digit: the service rounds down to pages, and a digit too few would cost one.
fn gib(bytes: u64) -> String {
    let text = format!("{:.30}", bytes as f64 / GIB);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Two workers may read each other's blocks only if they lay them out alike: whatever decides the
/// layout is in here.
fn digest(config: &Config, installed: &Installed) -> String {
    let engine = &config.profile.engine;
    let versions: BTreeMap<&str, &str> = installed
        .packages
        .iter()
        .map(|(name, package)| (name.as_str(), package.version.as_str()))
        .collect();
    let layout = json!({
        "model": installed.model_digest,
        "dtype": engine.dtype,
        "block_tokens": engine.block_tokens,
        "packages": versions,
    });
    hash::sha256(layout.to_string())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{canonical, installed};
    use super::super::{fixed_ports, plan, ports, render};
    use super::*;
    use crate::config::testing::cpu;
    use crate::environment::Package;
    use crate::failure::Class;

    #[test]
    fn the_guarded_cpu_profile_is_as_pinned() {
        let plan = canonical(&cpu(&["--guard"]), &installed()).unwrap();
        crate::snapshot::golden("plan/cpu-guard", &render(&plan));
    }

    #[test]
    fn pools_and_journals_are_counted_and_swept() {
        let (bare, guarded) = (cpu(&[]), cpu(&["--guard"]));
        let plan = |config: &Config| canonical(config, &installed()).unwrap();
        let (bare, guarded) = (plan(&bare), plan(&guarded));
        let pools = 2 * (320 * 262_144 + JOURNAL_BYTES);
        assert_eq!(guarded.shm_bytes, bare.shm_bytes + pools);
        let shared: Vec<_> = guarded
            .directories
            .iter()
            .filter_map(|path| path.strip_prefix("/dev/shm").ok()?.to_str())
            .collect();
        assert_eq!(shared.len(), 2);
        for name in shared {
            let swept = |prefix: &String| name.starts_with(prefix.as_str());
            assert!(guarded.shm_prefixes.iter().any(swept), "{name}");
        }
    }

    #[test]
    fn the_reference_knows_no_guard() {
        let plan = canonical(&cpu(&["--guard"]), &installed()).unwrap();
        let bare = canonical(&cpu(&[]), &installed()).unwrap();
        let reference = |plan: &super::super::Plan| {
            let found = plan
                .processes
                .iter()
                .find(|p| p.name == "reference")
                .cloned();
            let mut found = found.unwrap();
            // Only its ports differ.
            found.argv.retain(|arg| !arg.contains("tcp://"));
            found.env.retain(|_, value| !value.starts_with("200"));
            (found.argv, found.env, found.after)
        };
        assert_eq!(reference(&plan), reference(&bare));
    }

    #[test]
    fn without_an_address_nothing_is_planned() {
        let config = cpu(&["--guard"]);
        let mut bindings = Bindings::canonical(&ports(&config), &fixed_ports(&config));
        bindings.host_address = None;
        let failure = plan(&config, &installed(), &bindings).unwrap_err();
        assert_eq!(failure.class, Class::Environment);
        let fixed = cpu(&["--guard", "--host-address", "192.0.2.9"]);
        let text = render(&plan(&fixed, &installed(), &bindings).unwrap());
        assert!(
            text.contains(r#""raw_advertise_host":"192.0.2.9""#),
            "{text}"
        );
    }

    #[test]
    fn the_digest_changes_with_whatever_lays_blocks_out() {
        let of = |flags: &[&str], installed: &Installed| digest(&cpu(flags), installed);
        let base = of(&[], &installed());
        assert_eq!(base.len(), 64);
        assert_ne!(of(&["--dtype", "bfloat16"], &installed()), base);
        assert_ne!(of(&["--block-tokens", "128"], &installed()), base);
        let mut other = installed();
        other.model_digest = "other".into();
        assert_ne!(of(&[], &other), base);
        let mut newer = installed();
        let version = "0.1.2".into();
        let package = Package {
            version,
            record_sha256: None,
        };
        newer.packages.insert("kvcr".into(), package);
        assert_ne!(of(&[], &newer), base);
    }

    #[test]
    fn sizes_are_written_to_the_last_digit() {
        assert_eq!(gib(1 << 28), "0.25");
        assert_eq!(gib(2 << 30), "2");
        assert_eq!(gib(4096), "0.000003814697265625");
    }
}
