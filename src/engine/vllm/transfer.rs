//! What an engine is told of its KV connectors: `--kv-transfer-config`.
//!
//! A worker of its own has one connector, which offloads; one that hands requests over has another
//! beside it, inside a `MultiConnector`.

use serde_json::{Map, Value, json};

use super::worker::Part;
use crate::config::Config;
use crate::config::profile::DeviceKind;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::plan::guard::Guarded;
use crate::plan::{Bindings, Serves};

/// vLLM offloads only on CUDA-like devices; the overlay brings the same tiering for host memory.
const CPU_SPEC: &str = "CpuTieringOffloadingSpec";
const CPU_SPEC_MODULE: &str = "kvcr_cpu.spec";

/// What Dynamo reads of the tiers itself. Where it looks at the outermost connector only
/// (dynamo#16778), what is inside a `MultiConnector` is said there too.
const READ_BY_DYNAMO: [&str; 3] = [
    "secondary_tiers",
    "self_describing_kv_events",
    "dynamo_state_agent",
];

/// The connectors of `part`; `None` where it has none.
pub(super) fn kv_transfer(
    config: &Config,
    installed: &Installed,
    bindings: &Bindings,
    part: Part,
) -> Result<Option<Value>, Failure> {
    let mut connector = match part {
        Part::Reference => return Ok(None),
        Part::Decode { .. } => nixl(config, "kv_consumer"),
        Part::Core { index, serves } => {
            let guarded = Guarded::of(config, installed, bindings)?;
            let guarded = guarded.map(|all| (all, index));
            let offloading = offloading(config, bindings, part, guarded)?;
            match serves {
                Serves::Whole | Serves::Decode => offloading,
                Serves::Prefill => several(installed, offloading, nixl(config, "kv_producer")),
            }
        }
    };
    // Names the engine's file in /dev/shm, which a kill leaves behind; and no two engines may have
    // the same one. Only the outermost connector may have it: vLLM gives it to those inside.
    connector["engine_id"] = format!("{}-{}", bindings.file_cookie(), part.name()).into();
    Ok(Some(connector))
}

/// Hands a request's blocks from who read the prompt to who decodes.
fn nixl(config: &Config, role: &str) -> Value {
    let mut connector = json!({ "kv_connector": "NixlConnector", "kv_role": role });
    if config.profile.engine.device == DeviceKind::Cpu {
        connector["kv_buffer_device"] = "cpu".into();
    }
    connector
}

fn several(installed: &Installed, offloading: Value, nixl: Value) -> Value {
    let mut extra = Map::new();
    let outside = Some(READ_BY_DYNAMO).filter(|_| !installed.reads_nested_tiers);
    for name in outside.into_iter().flatten() {
        if let Some(said) = offloading["kv_connector_extra_config"].get(name) {
            extra.insert(name.to_owned(), said.clone());
        }
    }
    extra.insert("connectors".to_owned(), json!([offloading, nixl]));
    json!({
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    })
}

fn offloading(
    config: &Config,
    bindings: &Bindings,
    part: Part,
    guarded: Option<(Guarded, usize)>,
) -> Result<Value, Failure> {
    let (profile, kvcr) = (&config.profile, &config.profile.kvcr);
    let mut tier = json!({
        "type": "kvcr",
        "router_capabilities": ["router_hint"],
        "control_host": "127.0.0.1",
        "control_ports": [bindings.port(&part.control_port())?],
        "control_advertise_host": "127.0.0.1",
        "secondary_g2_slots": kvcr.dram_slots,
        "operation_timeout_ms": kvcr.operation_timeout_ms,
        "abandon_timeout_ms": kvcr.abandon_timeout_ms,
        "opportunistic_query": kvcr.opportunistic_query,
        // Off by default; without it the series do not exist and nothing can be proven.
        "enable_telemetry": true,
    });
    if let (Some((guarded, index)), Value::Object(tier)) = (&guarded, &mut tier) {
        // The service's pool takes its place.
        tier.remove("secondary_g2_slots");
        tier.extend(guarded.tier(bindings, *index));
    }
    let spec = match profile.engine.device {
        DeviceKind::Cpu => json!({
            "spec_name": CPU_SPEC,
            "spec_module_path": CPU_SPEC_MODULE,
        }),
        DeviceKind::Cuda => json!({ "spec_name": "TieringOffloadingSpec" }),
    };
    let mut extra = json!({
        "cpu_bytes_to_use": kvcr.primary_bytes,
        "enable_external_pinning": true,
        "self_describing_kv_events": true,
        "secondary_tiers": [tier],
    });
    if let (Value::Object(extra), Value::Object(spec)) = (&mut extra, spec) {
        extra.extend(spec);
    }
    if let Some((guarded, index)) = guarded {
        extra["dynamo_state_agent"] = guarded.state_agent(index);
    }
    Ok(json!({
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }))
}
