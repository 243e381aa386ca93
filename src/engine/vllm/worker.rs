//! One `dynamo.vllm` process, or what stands in for it: its arguments, environment, ports and shared memory.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::transfer::kv_transfer;
use crate::config::Config;
use crate::config::profile::{DeviceKind, EngineKind};
use crate::environment::Installed;
use crate::failure::Failure;
use crate::geometry::Geometry;
use crate::plan::dynamo::CORE_NAMESPACE;
use crate::plan::{Bindings, Group, PlannedWorker, Probe, Process, Role, Serves};

/// The front door looks into every namespace, the router of a model into one.
const REFERENCE_NAMESPACE: &str = "dynamo-reference";

/// Ring buffers between an engine's processes: two files in `/dev/shm` whose names vLLM draws.
/// It refuses to start unless each fits as a whole.
const RING_BYTES: u64 = 251_658_260 + 167_772_180;

/// Which engine of the stack.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Part {
    /// A worker with KVCR.
    Core {
        /// Position in the topology, from 0.
        index: usize,
        /// What of a request it does.
        serves: Serves,
    },
    /// Decodes for those that only prefill.
    Decode {
        /// Position in the topology: behind them.
        index: usize,
    },
    /// The engine without KVCR that answers for it.
    Reference,
}

impl Part {
    pub(super) fn name(self) -> String {
        match self {
            Self::Core { index, .. } | Self::Decode { index } => format!("worker{index}"),
            Self::Reference => "reference".to_owned(),
        }
    }

    /// What of a request it does.
    fn serves(self) -> Serves {
        match self {
            Self::Core { serves, .. } => serves,
            Self::Decode { .. } => Serves::Decode,
            Self::Reference => Serves::Whole,
        }
    }

    /// Its own system page: health and metrics.
    fn system_port(self) -> String {
        format!("{}-system", self.name())
    }

    /// KV events, published to the router.
    fn events_port(self) -> String {
        format!("{}-events", self.name())
    }

    /// KVCR's control endpoint, which peers connect to.
    pub(super) fn control_port(self) -> String {
        format!("{}-control", self.name())
    }

    /// Where who prefilled and who decodes introduce themselves to each other.
    fn side_channel_port(self) -> String {
        format!("{}-side-channel", self.name())
    }
}

/// An engine as the plan has it.
#[derive(Debug)]
pub struct PlannedEngine {
    /// The process.
    pub process: Process,
    /// How the cases see it.
    pub seen: PlannedWorker,
}

/// Names of the ports that `part` needs. Everything else it listens on is ephemeral.
pub fn ports(part: Part) -> Vec<String> {
    let mut names = vec![part.system_port()];
    // Nobody is routed to who decodes by what it holds.
    if part.serves() != Serves::Decode {
        names.push(part.events_port());
    }
    if let Part::Core { .. } = part {
        names.push(part.control_port());
    }
    if !part.serves().is_whole() {
        names.push(part.side_channel_port());
    }
    names
}

/// The port of core worker `index` that its Guard takes over.
pub(crate) fn control_port(index: usize) -> String {
    core(index).control_port()
}

/// Name of the process of core worker `index`.
pub(crate) fn process_name(index: usize) -> String {
    core(index).name()
}

/// Core worker `index`; its names do not depend on what it serves.
fn core(index: usize) -> Part {
    let serves = Serves::Whole;
    Part::Core { index, serves }
}

/// The plan of one engine; `env` is what every process of the stack has.
pub fn plan(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
    part: Part,
    env: BTreeMap<String, String>,
) -> Result<PlannedEngine, Failure> {
    let profile = &config.profile;
    // Not a contradiction of fields: whether a release needs the overlay is preflight's finding,
    // and comes first.
    if on_host_cores(config) && installed.overlay.is_none() {
        return Err(
            Failure::environment("vLLM cannot offload to host memory by itself")
                .expected("the overlay on the import path (environment.overlay)")
                .found("environment.overlay is false")
                .hint("leave it out, or use a profile with a GPU"),
        );
    }
    let system = bindings.port(&part.system_port())?;
    let health_url = format!("http://127.0.0.1:{system}/health");
    let (group, index, served_model) = match part {
        Part::Core { index, .. } | Part::Decode { index } => {
            (Group::Core, index, profile.model.served_name.clone())
        }
        Part::Reference => (
            Group::Reference,
            profile.topology.workers,
            format!("{}-reference", profile.model.served_name),
        ),
    };
    let process = Process {
        name: part.name(),
        role: Role::Worker,
        group,
        argv: argv(config, installed, bindings, part, &served_model)?,
        env: environment(config, bindings, part, env)?,
        after: Vec::new(),
        ready: vec![Probe::HttpJson {
            url: health_url.clone(),
            pointer: "/endpoints/generate".to_owned(),
            equals: "ready".into(),
        }],
        // A minute on a quiet machine. The limit for the whole stack is the profile's; this one
        // is for a worker that hangs alone, so it is well above what a stalling host needs.
        start_seconds: 900,
        // 5 s where nothing is in flight; KVCR's tier waits for its transfers, at the longest
        // until they are abandoned.
        stop_seconds: 20 + profile.kvcr.abandon_timeout_ms.div_ceil(1000),
    };
    let seen = PlannedWorker {
        process: part.name(),
        index,
        served_model,
        metrics_url: format!("http://127.0.0.1:{system}/metrics"),
        health_url,
        kvcr: matches!(part, Part::Core { .. }),
        serves: part.serves(),
    };
    Ok(PlannedEngine { process, seen })
}

fn argv(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
    part: Part,
    served_model: &str,
) -> Result<Vec<String>, Failure> {
    let engine = &config.profile.engine;
    let mut argv = installed.program.module("dynamo.vllm");
    let mut option = |flag: &str, value: String| argv.extend([flag.to_owned(), value]);
    option("--model", installed.model.to_string_lossy().into_owned());
    option("--served-model-name", served_model.to_owned());
    option("--dtype", engine.dtype.clone());
    option("--block-size", engine.block_tokens.to_string());
    option("--max-model-len", engine.max_model_len.to_string());
    if let Some(blocks) = engine.device_blocks {
        option("--num-gpu-blocks-override", blocks.to_string());
    }
    match part.serves() {
        Serves::Whole => {}
        Serves::Prefill => option("--disaggregation-mode", "prefill".to_owned()),
        Serves::Decode => option("--disaggregation-mode", "decode".to_owned()),
    }
    if part.serves() != Serves::Decode {
        let events = bindings.port(&part.events_port())?;
        option("--kv-events-config", kv_events(events).to_string());
    }
    if let Some(transfer) = kv_transfer(config, installed, bindings, part)? {
        option("--kv-transfer-config", transfer.to_string());
    }
    argv.push(match part.serves() {
        Serves::Whole | Serves::Prefill => "--enable-prefix-caching".to_owned(),
        // With a cache of its own it would answer from what it was handed before, and the blocks of
        // the request that is judged would not be looked at.
        Serves::Decode => "--no-enable-prefix-caching".to_owned(),
    });
    argv.push("--enforce-eager".to_owned());
    argv.extend(engine.args.iter().cloned());
    Ok(argv)
}

fn environment(
    config: &Config,
    bindings: &Bindings,
    part: Part,
    mut env: BTreeMap<String, String>,
) -> Result<BTreeMap<String, String>, Failure> {
    let system_port = bindings.port(&part.system_port())?;
    let mut set = |name: &str, value: &str| env.insert(name.to_owned(), value.to_owned());
    set("DYN_SYSTEM_PORT", &system_port.to_string());
    set(
        "DYN_NAMESPACE",
        match part {
            Part::Core { .. } | Part::Decode { .. } => CORE_NAMESPACE,
            Part::Reference => REFERENCE_NAMESPACE,
        },
    );
    // Nobody is in flight when we stop. With the default of 5 s a stop of the whole group leaves
    // the worker registered until its lease ends, and a stop of the leader alone has the engine
    // killed before it removes its file from /dev/shm.
    set("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", "0");
    if config.profile.engine.kind == EngineKind::Vllm {
        set("VLLM_NO_USAGE_STATS", "1");
    }
    if on_host_cores(config) {
        // GiB of device cache where `device_blocks` does not say less.
        set("VLLM_CPU_KVCACHE_SPACE", "1");
        // Several engines share the cores, so none may claim its own.
        set("VLLM_CPU_OMP_THREADS_BIND", "nobind");
        set("OMP_NUM_THREADS", "1");
        // The engine runs eagerly, but its log-probabilities are compiled at the first request
        // that wants them: 27 to 50 s of both cores, for a function that takes microseconds.
        set("TORCHDYNAMO_DISABLE", "1");
    }
    if !part.serves().is_whole() {
        let port = bindings.port(&part.side_channel_port())?;
        set("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1");
        set("VLLM_NIXL_SIDE_CHANNEL_PORT", &port.to_string());
    }
    env.extend(config.profile.engine.env.clone());
    Ok(env)
}

/// vLLM itself computes on host cores, with what that takes.
fn on_host_cores(config: &Config) -> bool {
    let engine = &config.profile.engine;
    engine.kind == EngineKind::Vllm && engine.device == DeviceKind::Cpu
}

fn kv_events(port: u16) -> Value {
    json!({
        "publisher": "zmq",
        "topic": "kv-events",
        // Dynamo derives where to connect from a wildcard only.
        "endpoint": format!("tcp://*:{port}"),
        "enable_kv_cache_events": true,
    })
}

/// How the names of this stack's files in `/dev/shm` begin. The ring buffers' names are not ours
/// to choose.
pub fn shm_prefix(bindings: &Bindings) -> String {
    format!("vllm_offload_{}-", bindings.file_cookie())
}

/// Bytes of `/dev/shm` that `part` takes. KVCR's own tier is anonymous memory.
pub fn shm_bytes(config: &Config, part: Part) -> u64 {
    let primary = config.profile.kvcr.primary_bytes;
    let rings = match config.profile.engine.kind {
        EngineKind::Vllm => RING_BYTES,
        EngineKind::Sim => 0,
    };
    match part {
        // vLLM uses whole blocks only.
        Part::Core { .. } => {
            let block = Geometry::of(&config.profile).page_bytes.unwrap_or(1).max(1);
            rings.saturating_add(primary / block * block)
        }
        Part::Decode { .. } | Part::Reference => rings,
    }
}
