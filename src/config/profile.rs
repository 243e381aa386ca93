//! The profile: an environment as data (`env/*.toml`).
//!
//! Only the shape lives here. Where values come from, and whether they contradict one another,
//! is [`super`]'s.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::known::Known;
use crate::sim::fault::Switch;
use crate::sim::settings::Latency;

/// A whole profile. Unknown fields are refused.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// One line for people.
    pub title: String,
    /// Defects of the product that its arms must see.
    #[serde(default)]
    pub known: Vec<Known>,
    /// Which software runs; the simulated stack has none but this program.
    #[serde(default)]
    pub environment: Environment,
    /// How the engine is launched.
    pub engine: Engine,
    /// What it serves.
    pub model: Model,
    /// How the engine lays out its KV cache, where the model does not say.
    #[serde(default)]
    pub geometry: Geometry,
    /// The KVCR tier.
    pub kvcr: Kvcr,
    /// Shape of the stack.
    pub topology: Topology,
    /// Accelerators.
    #[serde(default)]
    pub devices: Devices,
    /// How processes find each other.
    #[serde(default)]
    pub discovery: Discovery,
    /// Addresses and fixed ports.
    #[serde(default)]
    pub network: Network,
    /// Lifetimes of the shared stack.
    #[serde(default)]
    pub stack: Stack,
    /// Limits of one request.
    #[serde(default)]
    pub request: Request,
    /// What a takeover may take; nothing is judged where it says nothing.
    #[serde(default)]
    pub budget: Budget,
    /// How often performance is measured, and what is promised of it.
    #[serde(default)]
    pub performance: Performance,
    /// How long what TC-02's prompts share is, with a hybrid model.
    #[serde(default)]
    pub tc02: Tc02,
    /// What the simulated stack does beside its command lines; absent for a real one.
    #[serde(default, skip_serializing_if = "Sim::is_default")]
    pub sim: Sim,
}

/// Which software runs: a locked environment of ours, or an interpreter that the user has.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Environment {
    /// Name of a locked environment (`cpu`). Exactly one of `lock` and `python`.
    #[serde(default)]
    pub lock: Option<String>,
    /// An interpreter whose packages are used as they are.
    #[serde(default)]
    pub python: Option<PathBuf>,
    /// Whether our overlay (CPU offload, import alias, idle waits) is put on the import path.
    #[serde(default = "yes")]
    pub overlay: bool,
}

impl Default for Environment {
    fn default() -> Self {
        Self {
            lock: None,
            python: None,
            overlay: yes(),
        }
    }
}

/// Which engine.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// vLLM behind `dynamo.vllm`.
    Vllm,
    /// The simulated stack: processes of this program in place of every real one.
    Sim,
}

impl EngineKind {
    /// Whether it stands in for the product, so that nothing is proven of it.
    #[must_use]
    pub fn is_simulated(self) -> bool {
        self == Self::Sim
    }
}

/// What the engine computes on.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// Host cores.
    Cpu,
    /// NVIDIA devices.
    Cuda,
}

/// How the engine is launched.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Engine {
    /// Which engine.
    pub kind: EngineKind,
    /// What it computes on.
    pub device: DeviceKind,
    /// `float32`, `bfloat16`, …, as the engine spells it.
    pub dtype: String,
    /// Tokens in one KV block.
    pub block_tokens: u32,
    /// Longest sequence, in tokens.
    pub max_model_len: u32,
    /// Blocks in the device cache; the engine decides where absent.
    #[serde(default)]
    pub device_blocks: Option<u32>,
    /// Share of device memory, 0 to 1 (CUDA only).
    #[serde(default)]
    pub gpu_memory_utilization: Option<f64>,
    /// Extra environment of the engine process.
    #[serde(default)]
    pub env: BTreeMap<String, String>,
    /// Extra arguments of the engine process.
    #[serde(default)]
    pub args: Vec<String>,
}

/// What is served.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Model {
    /// A tiny random model that the environment builds: `dense` or `hybrid`; `sim` or `sim-hybrid` for the
    /// simulated stack. Exactly one of `build` and `path`.
    #[serde(default)]
    pub build: Option<String>,
    /// A directory with weights and tokenizer.
    #[serde(default)]
    pub path: Option<PathBuf>,
    /// The name clients ask for.
    pub served_name: String,
}

/// How the engine lays out its KV cache. Of a model that the environment builds all of it is known;
/// of another one nobody knows but who says it here.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// Tokens of the shortest prefix that can be hit; `engine.block_tokens` where absent. An engine
    /// makes the blocks of a hybrid model longer than it was asked to.
    #[serde(default)]
    pub hit_block_tokens: Option<u32>,
    /// Groups of state pages beside the attention group: 3 for Qwen3.5, 0 for a dense model.
    #[serde(default)]
    pub ssm_groups: Option<u32>,
    /// Bytes of one page: the block of one group, over the group's layers.
    #[serde(default)]
    pub page_bytes: Option<u64>,
}

/// The KVCR tier of a worker.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Kvcr {
    /// Bytes of the engine's own host tier (`0:primary`), which stages KVCR's.
    pub primary_bytes: u64,
    /// Slots (blocks) of KVCR's own DRAM tier (`1:kvcr`).
    pub dram_slots: u32,
    /// Milliseconds until a transfer counts as timed out.
    pub operation_timeout_ms: u64,
    /// Milliseconds until a timed-out transfer settles; at least twice the operation timeout.
    pub abandon_timeout_ms: u64,
    /// Whether a hinted request may ask the source for blocks it is not known to hold.
    #[serde(default)]
    pub opportunistic_query: bool,
    /// Whether a service of its own keeps each worker's tier, so that it outlives the worker.
    #[serde(default)]
    pub guard: bool,
    /// Bytes of a guarded tier; where absent, what `dram_slots` blocks take.
    #[serde(default)]
    pub pool_bytes: Option<u64>,
    /// Milliseconds without a heartbeat after which a Guard kills its worker and takes over; where
    /// absent, it waits for the worker's death.
    #[serde(default)]
    pub heartbeat_timeout_ms: Option<u64>,
}

/// Which shape.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum TopologyKind {
    /// Equal workers that prefill and decode.
    Aggregated,
    /// Workers that prefill, and one more that decodes for all of them.
    Disagg,
}

/// Shape of the stack.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Which shape.
    pub kind: TopologyKind,
    /// How many workers have a KVCR tier; who only decodes is not among them.
    pub workers: usize,
    /// Where somebody else's `kvcr_service`s have their sockets and logs; ours are started by the
    /// stack where absent.
    pub external_services: Option<std::path::PathBuf>,
}

/// Accelerators.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Devices {
    /// Device index of each worker, in order; repeated to share one.
    #[serde(default)]
    pub gpus: Vec<u32>,
}

/// How processes find each other.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DiscoveryBackend {
    /// etcd where there is one, else files; the choice is said.
    #[default]
    Auto,
    /// etcd.
    Etcd,
    /// Dynamo's file store: loses live workers when the host stalls for 10 s.
    File,
}

/// How processes find each other.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Discovery {
    /// Which store.
    #[serde(default)]
    pub backend: DiscoveryBackend,
}

/// Addresses and fixed ports.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Network {
    /// A non-loopback address of this host; found where absent.
    #[serde(default)]
    pub host_address: Option<IpAddr>,
    /// Fixed port of the front door; allocated where absent.
    #[serde(default)]
    pub frontend_port: Option<u16>,
}

/// Lifetimes of the shared stack, in seconds.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stack {
    /// How long an unused stack stays up.
    pub keep_seconds: u64,
    /// How long an unused reference engine stays up.
    pub reference_keep_seconds: u64,
    /// How long bring-up may take.
    pub bring_up_seconds: u64,
    /// Hard limit of one stack's life.
    pub max_lifetime_seconds: u64,
}

impl Default for Stack {
    fn default() -> Self {
        Self {
            keep_seconds: 120,
            reference_keep_seconds: 20,
            bring_up_seconds: 600,
            max_lifetime_seconds: 4 * 3600,
        }
    }
}

/// Limits of one request.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Request {
    /// Seconds until a request is given up.
    pub deadline_seconds: u64,
    /// Tokens to generate.
    pub max_tokens: u32,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            deadline_seconds: 120,
            max_tokens: 16,
        }
    }
}

/// What may pass after a worker was killed, in milliseconds. A profile says it where its machine is
/// quiet enough for a time to be a promise.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Budget {
    /// Until its Guard has taken over.
    pub promotion_ms: Option<u64>,
    /// Until a request is answered, and right.
    pub first_correct_response_ms: Option<u64>,
    /// Until a request is served blocks of the dead worker.
    pub first_guard_hit_ms: Option<u64>,
    /// Until a replacement serves.
    pub replacement_serving_ms: Option<u64>,
}

/// How often the arms of TC-05 are measured, and what they may take. A limit is a share of what the
/// engine takes without KVCR: 0.8 is a fifth less.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Performance {
    /// Whether nothing else uses the devices. Nothing is judged where it does.
    pub dedicated: bool,
    /// Rounds that count.
    pub repeats: usize,
    /// Rounds before them that do not.
    pub warm_up: usize,
    /// Whole blocks of a measured prompt.
    pub blocks: u32,
    /// What the order of the arms, and the ends of intervals, follow from.
    pub seed: u64,
    /// Of the time to the first token, with KVCR and nothing to hit.
    pub cold_ttft_ratio_max: Option<f64>,
    /// The same, of a hit in the worker's own tier.
    pub local_ttft_ratio_max: Option<f64>,
    /// The same, of a hit in a peer's.
    pub peer_ttft_ratio_max: Option<f64>,
    /// The same, of a hit that a Guard serves.
    pub guard_ttft_ratio_max: Option<f64>,
}

impl Default for Performance {
    fn default() -> Self {
        Self {
            dedicated: false,
            repeats: 7,
            warm_up: 1,
            blocks: 16,
            seed: 1,
            cold_ttft_ratio_max: None,
            local_ttft_ratio_max: None,
            peer_ttft_ratio_max: None,
            guard_ttft_ratio_max: None,
        }
    }
}

/// What the prompts of TC-02's hybrid arms share.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Tc02 {
    /// Blocks of the prefix that is asked for alone first, so that its state is kept.
    pub seed_prefix: u32,
    /// Sections of two blocks behind that prefix that two prompts share, and no state is kept of.
    pub extra_shared_sections: u32,
    /// Turns of a conversation between which everything is evicted.
    pub evict_target: u32,
}

impl Default for Tc02 {
    fn default() -> Self {
        Self {
            seed_prefix: 3,
            extra_shared_sections: 2,
            evict_target: 2,
        }
    }
}

/// What the simulated stack does beside its command lines. Times are in microseconds.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Sim {
    /// What its weights, and so its texts, follow from.
    pub seed: u64,
    /// Lies from the start.
    pub faults: Vec<Switch>,
    /// See [`Latency::start_us`].
    pub start_us: u64,
    /// See [`Latency::prefill_token_us`].
    pub prefill_token_us: u64,
    /// See [`Latency::load_block_us`].
    pub load_block_us: u64,
    /// See [`Latency::transfer_block_us`].
    pub transfer_block_us: u64,
    /// See [`Latency::decode_token_us`].
    pub decode_token_us: u64,
    /// See [`Latency::lease_us`].
    pub lease_us: u64,
    /// See [`Latency::promotion_us`].
    pub promotion_us: u64,
}

impl Default for Sim {
    fn default() -> Self {
        let Latency {
            start_us,
            prefill_token_us,
            load_block_us,
            transfer_block_us,
            decode_token_us,
            lease_us,
            promotion_us,
        } = Latency::default();
        Self {
            seed: 0,
            faults: Vec::new(),
            start_us,
            prefill_token_us,
            load_block_us,
            transfer_block_us,
            decode_token_us,
            lease_us,
            promotion_us,
        }
    }
}

impl Sim {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// The times, as the simulated processes are told them.
    #[must_use]
    pub fn latency(&self) -> Latency {
        Latency {
            start_us: self.start_us,
            prefill_token_us: self.prefill_token_us,
            load_block_us: self.load_block_us,
            transfer_block_us: self.transfer_block_us,
            decode_token_us: self.decode_token_us,
            lease_us: self.lease_us,
            promotion_us: self.promotion_us,
        }
    }
}

fn yes() -> bool {
    true
}
