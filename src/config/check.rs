//! Whether the values of a profile fit together.
//!
//! Each complaint names where the value came from (file and line, variable or flag), the field
//! and the reason. Everything here is a pure function of the profile; what the machine lacks is
//! a gate's to say, not ours.

use super::Profile;
use super::draft::Draft;
use super::profile::{DeviceKind, DiscoveryBackend, EngineKind, TopologyKind};
use crate::engine::vllm::reserved;
use crate::geometry::Geometry;
use crate::performance::median::{FEWEST, LEVEL};
use crate::plan::sidecar;
use crate::stack::state_dir::SOCKET_PATH_MAX;

/// The smallest pool that kvcr_service makes, in bytes.
const PAGE: u64 = 4096;
/// Less is refused by kvcr_service: a worker that is only slow would be killed.
const SHORTEST_HEARTBEAT_MS: u64 = 1000;

/// Every contradiction in `profile`, each with where it came from.
pub(super) fn check(profile: &Profile, draft: &Draft) -> Vec<String> {
    let mut check = Check {
        draft,
        problems: Vec::new(),
    };
    check.texts(profile);
    check.alternatives(profile);
    check.simulation(profile);
    check.devices(profile);
    check.geometry(profile);
    check.guard(profile);
    check.times(profile);
    check.performance(profile);
    check.network(profile);
    check.reserved(profile);
    check.problems
}

struct Check<'a> {
    draft: &'a Draft,
    problems: Vec<String>,
}

impl Check<'_> {
    fn say(&mut self, path: &str, why: impl std::fmt::Display) {
        let origin = self.draft.origin(path);
        self.problems.push(format!("{origin}: {path}: {why}"));
    }

    fn texts(&mut self, profile: &Profile) {
        if profile.title.trim().is_empty() {
            self.say("title", "must not be empty");
        }
        let served = &profile.model.served_name;
        if served.is_empty() || served.contains(char::is_whitespace) {
            self.say(
                "model.served_name",
                format!("must be a name without spaces, found {served:?}"),
            );
        }
        if let Some(lock) = &profile.environment.lock
            && (lock.is_empty() || lock.contains(['/', '.']))
        {
            self.say(
                "environment.lock",
                format!("must be the name of a folder under env/, found {lock:?}"),
            );
        }
    }

    fn alternatives(&mut self, profile: &Profile) {
        let environment = &profile.environment;
        let software = (
            "environment.lock",
            environment.lock.is_some(),
            "environment.python",
            environment.python.is_some(),
        );
        let model = (
            "model.build",
            profile.model.build.is_some(),
            "model.path",
            profile.model.path.is_some(),
        );
        // The simulated stack is this program: there is nothing to choose.
        let software = Some(software).filter(|_| !profile.engine.kind.is_simulated());
        for (one, has_one, other, has_other) in software.into_iter().chain([model]) {
            match (has_one, has_other) {
                (true, true) => {
                    let there = self.draft.origin(one);
                    self.say(
                        other,
                        format!("excludes {one}, which {there} sets; keep one of them"),
                    );
                }
                (false, false) => self.say(one, format!("missing; say it, or {other}")),
                _ => {}
            }
        }
    }

    /// What only the simulated stack has, and what it has not.
    fn simulation(&mut self, profile: &Profile) {
        let build = profile.model.build.as_deref();
        let simulated = build.is_some_and(|build| build.starts_with("sim"));
        match profile.engine.kind {
            EngineKind::Vllm => {
                for path in self.draft.given_below("sim") {
                    self.say(
                        path,
                        "only the simulated stack has it; use --profile sim (engine.kind sim)",
                    );
                }
                if let (true, Some(build)) = (simulated, build) {
                    self.say(
                        "model.build",
                        format!("{build} is a model of the simulated stack; vllm needs dense or hybrid, or model.path"),
                    );
                }
            }
            EngineKind::Sim => {
                for path in self.draft.given_below("environment") {
                    self.say(
                        path,
                        "the simulated stack is this program, and nothing is installed for it; leave it out (--profile sim does)",
                    );
                }
                if let Some(build) = build.filter(|_| !simulated) {
                    self.say(
                        "model.build",
                        format!("the simulated stack has no weights, found {build}; use sim or sim-hybrid"),
                    );
                }
                if self.draft.given("model.path") {
                    self.say(
                        "model.path",
                        "the simulated stack has no weights; use --model-build sim or sim-hybrid",
                    );
                }
                if profile.engine.device != DeviceKind::Cpu {
                    self.say("engine.device", "the simulated stack uses none but cpu");
                }
                if profile.discovery.backend == DiscoveryBackend::Etcd {
                    self.say(
                        "discovery.backend",
                        "the simulated stack registers in files only; use file",
                    );
                }
            }
        }
    }

    fn devices(&mut self, profile: &Profile) {
        let (engine, workers) = (&profile.engine, profile.topology.workers);
        if workers == 0 {
            self.say("topology.workers", "must be at least 1");
        }
        let gpus = profile.devices.gpus.len();
        match engine.device {
            DeviceKind::Cpu => {
                if gpus != 0 {
                    self.say("devices.gpus", "must be empty when engine.device is cpu");
                }
                if engine.gpu_memory_utilization.is_some() {
                    self.say(
                        "engine.gpu_memory_utilization",
                        "has no meaning when engine.device is cpu",
                    );
                }
            }
            DeviceKind::Cuda => {
                self.say(
                    "engine.device",
                    "cuda is not supported yet; the only device is cpu",
                );
                if gpus != workers {
                    self.say(
                        "devices.gpus",
                        format!("must name one device for each of {workers} workers, found {gpus}"),
                    );
                }
            }
        }
        if let Some(share) = engine.gpu_memory_utilization
            && !(share > 0.0 && share <= 1.0)
        {
            self.say(
                "engine.gpu_memory_utilization",
                format!("must be above 0 and at most 1, found {share}"),
            );
        }
    }

    fn geometry(&mut self, profile: &Profile) {
        let (engine, kvcr) = (&profile.engine, &profile.kvcr);
        let zero = [
            (
                "geometry.hit_block_tokens",
                profile.geometry.hit_block_tokens == Some(0),
            ),
            (
                "geometry.page_bytes",
                profile.geometry.page_bytes == Some(0),
            ),
        ];
        for (path, _) in zero.into_iter().filter(|(_, zero)| *zero) {
            self.say(
                path,
                "must be at least 1; leave it out where it is not known",
            );
        }
        for (path, value) in [
            ("engine.block_tokens", engine.block_tokens),
            ("engine.max_model_len", engine.max_model_len),
            ("kvcr.dram_slots", kvcr.dram_slots),
            ("request.max_tokens", profile.request.max_tokens),
            ("tc02.seed_prefix", profile.tc02.seed_prefix),
            (
                "tc02.extra_shared_sections",
                profile.tc02.extra_shared_sections,
            ),
            ("tc02.evict_target", profile.tc02.evict_target),
            ("performance.blocks", profile.performance.blocks),
        ] {
            if value == 0 {
                self.say(path, "must be at least 1");
            }
        }
        if let Some(blocks) = engine.device_blocks {
            let room = u64::from(blocks) * u64::from(engine.block_tokens);
            if u64::from(engine.max_model_len) > room {
                self.say(
                    "engine.max_model_len",
                    format!(
                        "must fit into the device cache, at most {blocks} blocks x {} tokens = {room}, found {}",
                        engine.block_tokens, engine.max_model_len
                    ),
                );
            }
        }
        if engine.max_model_len > 0 && profile.request.max_tokens >= engine.max_model_len {
            self.say(
                "request.max_tokens",
                format!(
                    "must be less than engine.max_model_len {}, found {}",
                    engine.max_model_len, profile.request.max_tokens
                ),
            );
        }
        if let Some(chunk) = Geometry::of(profile).page_bytes
            && kvcr.primary_bytes < chunk
        {
            self.say(
                "kvcr.primary_bytes",
                format!(
                    "must hold at least one block of {chunk} bytes, found {}",
                    kvcr.primary_bytes
                ),
            );
        }
    }

    fn guard(&mut self, profile: &Profile) {
        let kvcr = &profile.kvcr;
        self.external_services(profile);
        if !kvcr.guard {
            for (path, given) in [
                ("kvcr.pool_bytes", kvcr.pool_bytes),
                ("kvcr.heartbeat_timeout_ms", kvcr.heartbeat_timeout_ms),
            ] {
                if given.is_some() {
                    self.say(path, "has no meaning unless kvcr.guard is true");
                }
            }
            return;
        }
        if profile.network.host_address.is_some_and(|ip| ip.is_ipv6()) {
            self.say(
                "network.host_address",
                "must be an IPv4 address when kvcr.guard is true: KVCR takes no other",
            );
        }
        let block = Geometry::of(profile).page_bytes;
        match (kvcr.pool_bytes, block) {
            (None, None) => self.say(
                "kvcr.pool_bytes",
                "missing; it follows from dram_slots only where geometry.page_bytes is known",
            ),
            (Some(bytes), block) => {
                let least = block.unwrap_or(1).max(PAGE);
                if bytes < least {
                    self.say(
                        "kvcr.pool_bytes",
                        format!("must be at least {least}, found {bytes}"),
                    );
                }
            }
            (None, Some(_)) => {}
        }
        if kvcr
            .heartbeat_timeout_ms
            .is_some_and(|time| time < SHORTEST_HEARTBEAT_MS)
        {
            self.say(
                "kvcr.heartbeat_timeout_ms",
                format!(
                    "must be at least {SHORTEST_HEARTBEAT_MS}; leave it out to wait for death only"
                ),
            );
        }
    }

    fn external_services(&mut self, profile: &Profile) {
        const PATH: &str = "topology.external_services";
        let Some(directory) = &profile.topology.external_services else {
            return;
        };
        if !profile.kvcr.guard {
            let there = self.draft.origin("kvcr.guard");
            self.say(
                PATH,
                format!("has no meaning without Guards, and {there} sets kvcr.guard to false"),
            );
        }
        let last = profile.topology.workers.saturating_sub(1);
        let longest = sidecar::socket(directory, last);
        let length = longest.as_os_str().len();
        if length > SOCKET_PATH_MAX {
            self.say(
                PATH,
                format!(
                    "is too long a path for unix sockets: {} has {length} bytes, and {SOCKET_PATH_MAX} are the most",
                    longest.display()
                ),
            );
        }
    }

    fn times(&mut self, profile: &Profile) {
        let (kvcr, stack) = (&profile.kvcr, &profile.stack);
        for (path, value) in [
            ("kvcr.operation_timeout_ms", kvcr.operation_timeout_ms),
            ("stack.bring_up_seconds", stack.bring_up_seconds),
            ("stack.max_lifetime_seconds", stack.max_lifetime_seconds),
            ("request.deadline_seconds", profile.request.deadline_seconds),
        ] {
            if value == 0 {
                self.say(path, "must be at least 1");
            }
        }
        let least = kvcr.operation_timeout_ms.saturating_mul(2);
        if kvcr.abandon_timeout_ms < least {
            self.say(
                "kvcr.abandon_timeout_ms",
                format!(
                    "must be at least twice operation_timeout_ms, {least}, found {}",
                    kvcr.abandon_timeout_ms
                ),
            );
        }
        if stack.max_lifetime_seconds <= stack.bring_up_seconds && stack.max_lifetime_seconds > 0 {
            self.say(
                "stack.max_lifetime_seconds",
                format!(
                    "must be more than stack.bring_up_seconds {}, found {}",
                    stack.bring_up_seconds, stack.max_lifetime_seconds
                ),
            );
        }
    }

    fn performance(&mut self, profile: &Profile) {
        let performance = &profile.performance;
        match performance.repeats {
            0 => self.say("performance.repeats", "must be at least 1"),
            // Every limit would be inconclusive, after all the time that it took.
            found if performance.dedicated && found < FEWEST => self.say(
                "performance.repeats",
                format!(
                    "must be at least {FEWEST} where performance.dedicated: fewer hold no median to {:.0} %; found {found}",
                    LEVEL * 100.0
                ),
            ),
            _ => {}
        }
        let limits = [
            (
                "performance.cold_ttft_ratio_max",
                performance.cold_ttft_ratio_max,
            ),
            (
                "performance.local_ttft_ratio_max",
                performance.local_ttft_ratio_max,
            ),
            (
                "performance.peer_ttft_ratio_max",
                performance.peer_ttft_ratio_max,
            ),
            (
                "performance.guard_ttft_ratio_max",
                performance.guard_ttft_ratio_max,
            ),
        ];
        for (path, limit) in limits {
            let Some(limit) = limit else { continue };
            if limit <= 0.0 {
                self.say(path, format!("must be above 0, found {limit}"));
            }
            if profile.topology.kind == TopologyKind::Disagg {
                self.say(
                    path,
                    "has no meaning with topology.kind disagg: the engine without KVCR hands nothing over",
                );
            }
        }
    }

    fn network(&mut self, profile: &Profile) {
        if profile.network.frontend_port == Some(0) {
            self.say(
                "network.frontend_port",
                "must not be 0; leave it out to have one allocated",
            );
        }
        if let Some(address) = profile.network.host_address
            && (address.is_loopback() || address.is_unspecified() || address.is_multicast())
        {
            self.say(
                "network.host_address",
                format!("must be an address that other hosts reach, found {address}"),
            );
        }
    }

    fn reserved(&mut self, profile: &Profile) {
        for name in profile.engine.env.keys() {
            if reserved::is_variable(name) {
                self.say(
                    "engine.env",
                    format!("{name} is set by the plan and cannot be changed"),
                );
            }
        }
        for arg in &profile.engine.args {
            if let Some(field) = reserved::argument(arg) {
                self.say(
                    "engine.args",
                    format!("{arg} is set by the plan; change {field} instead"),
                );
            }
        }
    }
}
