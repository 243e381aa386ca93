//! The command line of `python -m dynamo.vllm`, as far as the plans use it.
//!
//! What the real program refuses is refused in its words; what it accepts and a simulated engine
//! has no use for is read and dropped. Nothing here opens a file.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;

use crate::sim::wire::Role;

/// Flags with a value that means nothing to a simulated engine.
const WITH_VALUE: [&str; 8] = [
    "--gpu-memory-utilization",
    "--distributed-executor-backend",
    "--tensor-parallel-size",
    "--max-num-seqs",
    "--max-num-batched-tokens",
    "--seed",
    "--shutdown-timeout",
    "--kv-cache-dtype",
];

/// Switches that mean nothing to a simulated engine.
const SWITCHES: [&str; 4] = [
    "--enforce-eager",
    "--disable-hybrid-kv-cache-manager",
    "--no-enable-chunked-prefill",
    "--language-model-only",
];

/// Blocks of the device cache where nobody says how many.
const DEVICE_BLOCKS: usize = 4096;

/// What an engine is told by its arguments.
#[derive(Clone, Debug, PartialEq)]
pub struct Flags {
    /// Directory of the model.
    pub model: PathBuf,
    /// Name that clients ask for.
    pub served_model: String,
    /// Bytes of one element of a page.
    pub element_bytes: u32,
    /// Tokens of a block; `None` where the engine chooses.
    pub block_tokens: Option<u32>,
    /// Longest sequence, in tokens.
    pub max_model_len: u32,
    /// Blocks of the device cache.
    pub device_blocks: usize,
    /// Whether prefixes are cached at all.
    pub prefix_caching: bool,
    /// Port of the KV events, if they are published.
    pub events_port: Option<u16>,
    /// What the engine is for.
    pub role: Role,
    /// The tiers behind the device; `None`: KVCR is off.
    pub tiers: Option<Tiers>,
}

/// The offloading connector's part of `--kv-transfer-config`.
#[derive(Clone, Debug, PartialEq)]
pub struct Tiers {
    /// Stands in the name of the engine's file in `/dev/shm`.
    pub engine_id: String,
    /// Bytes of the engine's own host tier.
    pub primary_bytes: u64,
    /// KVCR behind it.
    pub kvcr: Option<Kvcr>,
    /// Cache owner id, where a state agent is used.
    pub owner: Option<String>,
}

/// The tier of type `kvcr`.
#[derive(Clone, Debug, PartialEq)]
pub struct Kvcr {
    /// `HOST:PORT` to listen on.
    pub listen: String,
    /// `HOST:PORT` that a Guard tells peers.
    pub advertised: String,
    /// Whether the router is told that address too.
    pub hinted: bool,
    /// Pages of a pool in this process; 0 where a service holds it.
    pub slots: usize,
    /// Socket and digest of the service that holds the pool.
    pub service: Option<(PathBuf, String)>,
    /// When a transfer is given up.
    pub operation_timeout: Duration,
    /// When a transfer that was given up is settled.
    pub abandon_timeout: Duration,
    /// Whether any block of a hinted request counts as there.
    pub opportunistic_query: bool,
    /// Whether KVCR has series on the metrics page.
    pub telemetry: bool,
}

/// Why there is no engine.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Refused {
    /// As argparse says it; exit code 2.
    Usage(String),
    /// The exception that the engine dies of; exit code 1.
    Config(String),
}

fn usage(message: String) -> Refused {
    Refused::Usage(format!(
        "usage: __main__.py [-h] [--model MODEL] [--served-model-name NAME] ...\n\
         __main__.py: error: {message}"
    ))
}

fn invalid(message: &str) -> Refused {
    Refused::Config(format!("ValueError: {message}"))
}

/// Reads the arguments after `dynamo.vllm`.
///
/// # Errors
/// What the real program would say, see [`Refused`].
pub fn parse(args: impl IntoIterator<Item = String>) -> Result<Flags, Refused> {
    let mut flags = Flags {
        model: PathBuf::new(),
        served_model: String::new(),
        element_bytes: 2,
        block_tokens: None,
        max_model_len: 4096,
        device_blocks: DEVICE_BLOCKS,
        prefix_caching: true,
        events_port: None,
        role: Role::Aggregated,
        tiers: None,
    };
    let mut unknown: Vec<String> = Vec::new();
    let mut args = args.into_iter();
    while let Some(arg) = args.next() {
        let (flag, inline) = match arg.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => {
                (flag.to_owned(), Some(value.to_owned()))
            }
            _ => (arg, None),
        };
        let mut value = || {
            inline
                .clone()
                .or_else(|| args.next())
                .ok_or_else(|| usage(format!("argument {flag}: expected one argument")))
        };
        match flag.as_str() {
            "--model" => flags.model = value()?.into(),
            "--served-model-name" => flags.served_model = value()?,
            "--dtype" => flags.element_bytes = element_bytes(&value()?)?,
            "--block-size" => flags.block_tokens = Some(number(&flag, &value()?)?),
            "--max-model-len" => flags.max_model_len = number(&flag, &value()?)?,
            "--num-gpu-blocks-override" => {
                flags.device_blocks = number::<u32>(&flag, &value()?)? as usize;
            }
            "--kv-events-config" => flags.events_port = events(&json(&flag, &value()?)?)?,
            "--kv-transfer-config" => flags.tiers = transfer(&json(&flag, &value()?)?)?,
            "--disaggregation-mode" => {
                let mode = value()?;
                flags.role = match mode.as_str() {
                    "agg" => Role::Aggregated,
                    "prefill" => Role::Prefill,
                    "decode" => Role::Decode,
                    other => {
                        return Err(usage(format!(
                            "argument {flag}: invalid choice: '{other}' (choose from 'agg', 'prefill', 'decode')"
                        )));
                    }
                };
            }
            "--enable-prefix-caching" => flags.prefix_caching = true,
            "--no-enable-prefix-caching" => flags.prefix_caching = false,
            known if WITH_VALUE.contains(&known) => drop(value()?),
            known if SWITCHES.contains(&known) => {}
            _ => unknown.push(flag),
        }
    }
    if !unknown.is_empty() {
        return Err(usage(format!(
            "unrecognized arguments: {}",
            unknown.join(" ")
        )));
    }
    if flags.model.as_os_str().is_empty() {
        return Err(usage(
            "the following arguments are required: --model".to_owned(),
        ));
    }
    if flags.block_tokens == Some(0) || flags.device_blocks == 0 {
        return Err(invalid("block_size and num_gpu_blocks must be positive"));
    }
    if flags.served_model.is_empty() {
        flags.served_model = flags.model.to_string_lossy().into_owned();
    }
    Ok(flags)
}

fn number<T: std::str::FromStr>(flag: &str, text: &str) -> Result<T, Refused> {
    text.parse()
        .map_err(|_| usage(format!("argument {flag}: invalid int value: '{text}'")))
}

fn json(flag: &str, text: &str) -> Result<Value, Refused> {
    serde_json::from_str(text).map_err(|_| {
        usage(format!(
            "argument {flag}: Value {text} cannot be converted to <function loads>."
        ))
    })
}

fn element_bytes(dtype: &str) -> Result<u32, Refused> {
    match dtype {
        "float32" | "float" => Ok(4),
        "auto" | "bfloat16" | "float16" | "half" => Ok(2),
        other => Err(usage(format!(
            "argument --dtype: invalid choice: '{other}' (choose from auto, bfloat16, float, float16, float32, half)"
        ))),
    }
}

fn events(config: &Value) -> Result<Option<u16>, Refused> {
    if config["enable_kv_cache_events"] != true {
        return Ok(None);
    }
    let endpoint = config["endpoint"].as_str().unwrap_or_default();
    endpoint
        .rsplit_once(':')
        .and_then(|(_, port)| port.parse().ok())
        .map(Some)
        .ok_or_else(|| invalid(&format!("invalid KV events endpoint: '{endpoint}'")))
}

/// The offloading connector, alone or inside a `MultiConnector`; none in a decode engine.
fn transfer(config: &Value) -> Result<Option<Tiers>, Refused> {
    let extra = &config["kv_connector_extra_config"];
    let offloading = match config["kv_connector"].as_str() {
        Some("OffloadingConnector") => Some(config),
        Some("MultiConnector") => extra["connectors"].as_array().and_then(|connectors| {
            connectors
                .iter()
                .find(|inner| inner["kv_connector"] == "OffloadingConnector")
        }),
        Some("NixlConnector") => None,
        other => {
            return Err(invalid(&format!(
                "Unsupported connector type: {}",
                other.unwrap_or("None")
            )));
        }
    };
    let Some(offloading) = offloading else {
        return Ok(None);
    };
    let inner = &offloading["kv_connector_extra_config"];
    // Dynamo looks at the outermost connector only (dynamo#16778).
    let owner = extra["dynamo_state_agent"]["cache_owner_ids"]
        .as_object()
        .and_then(|owners| Some(owners.values().next()?.as_str()?.to_owned()));
    let of_kvcr = |extra: &Value| {
        let mut tiers = extra["secondary_tiers"].as_array().into_iter().flatten();
        tiers.find(|tier| tier["type"] == "kvcr").cloned()
    };
    let hinted = of_kvcr(extra).is_some();
    let kvcr = of_kvcr(inner)
        .map(|tier| kvcr(&tier, inner["self_describing_kv_events"] == true, hinted))
        .transpose()?;
    // Only the wrapper of a MultiConnector has an id.
    let engine_id = config["engine_id"].as_str().unwrap_or("engine").to_owned();
    Ok(Some(Tiers {
        engine_id,
        primary_bytes: inner["cpu_bytes_to_use"].as_u64().unwrap_or(0),
        kvcr,
        owner,
    }))
}

fn kvcr(tier: &Value, self_describing: bool, hinted: bool) -> Result<Kvcr, Refused> {
    let text = |name: &str| tier[name].as_str().map(str::to_owned);
    let millis =
        |name: &str, default| Duration::from_millis(tier[name].as_u64().unwrap_or(default));
    let service = match (
        text("kvcr_service_socket_path"),
        text("compatibility_digest"),
    ) {
        (Some(socket), Some(digest)) => Some((socket.into(), digest)),
        (None, None) => None,
        _ => {
            return Err(invalid(
                "kvcr_service_socket_path and compatibility_digest must be configured together",
            ));
        }
    };
    let ports = tier["control_ports"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let [port] = ports else {
        return Err(invalid(
            "control_ports must contain exactly one port when data_parallel_rank_local is unset",
        ));
    };
    if tier["router_capabilities"]
        .as_array()
        .is_none_or(Vec::is_empty)
    {
        return Err(invalid(
            "KVCR secondary tier requires router capabilities: ['router_hint']",
        ));
    }
    let operation_timeout = millis("operation_timeout_ms", 1000);
    let abandon_timeout = millis("abandon_timeout_ms", 5000);
    if abandon_timeout < 2 * operation_timeout {
        return Err(invalid(
            "abandon_timeout_ms must be at least twice operation_timeout_ms",
        ));
    }
    let slots = tier["secondary_g2_slots"].as_u64().unwrap_or(0) as usize;
    if !self_describing && (slots > 0 || service.is_some()) {
        return Err(invalid(
            "KVCR local G2/G3 inventory requires self_describing_kv_events",
        ));
    }
    let host = text("control_host").unwrap_or_else(|| "127.0.0.1".to_owned());
    let advertised = text("control_advertise_host").unwrap_or_else(|| host.clone());
    Ok(Kvcr {
        listen: format!("{host}:{port}"),
        advertised: format!("{advertised}:{port}"),
        hinted,
        slots,
        service,
        operation_timeout,
        abandon_timeout,
        opportunistic_query: tier["opportunistic_query"].as_bool().unwrap_or(true),
        telemetry: tier["enable_telemetry"] == true,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(args: &[&str]) -> Result<Flags, Refused> {
        parse(args.iter().map(|arg| (*arg).to_owned()))
    }

    fn tier() -> Value {
        json!({
            "type": "kvcr", "router_capabilities": ["router_hint"],
            "control_host": "127.0.0.1", "control_ports": [20005],
            "control_advertise_host": "127.0.0.1", "secondary_g2_slots": 1024,
            "operation_timeout_ms": 5000, "abandon_timeout_ms": 10000,
            "opportunistic_query": false, "enable_telemetry": true,
        })
    }

    fn config(tier: Value) -> Value {
        json!({
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "engine_id": "c-w0",
            "kv_connector_extra_config": {
                "cpu_bytes_to_use": 33_554_432, "self_describing_kv_events": true,
                "secondary_tiers": [tier],
            },
        })
    }

    fn with(config: &Value) -> Result<Flags, Refused> {
        of(&["--model", "/m", "--kv-transfer-config", &config.to_string()])
    }

    /// The whole path: what the plan of the CPU profile says is what is read.
    #[test]
    fn the_planned_command_lines_are_understood() {
        let plan = crate::plan::testing::canonical(
            &crate::config::testing::cpu(&[]),
            &crate::plan::testing::installed(),
        )
        .unwrap();
        let read = |name: &str| {
            let process = plan.processes.iter().find(|p| p.name == name).unwrap();
            parse(process.argv[3..].iter().cloned()).unwrap()
        };
        let worker = read("worker0");
        assert_eq!(worker.block_tokens, Some(64));
        assert_eq!(worker.device_blocks, 224);
        assert_eq!(worker.element_bytes, 4);
        assert_eq!(worker.events_port, Some(20_004));
        let tiers = worker.tiers.unwrap();
        assert_eq!(tiers.primary_bytes, 53_477_376);
        let kvcr = tiers.kvcr.unwrap();
        assert_eq!(kvcr.listen, "127.0.0.1:20005");
        assert_eq!(kvcr.slots, 320);
        assert!(kvcr.telemetry && !kvcr.opportunistic_query);
        assert_eq!(read("reference").tiers, None);
    }

    #[test]
    fn an_unknown_flag_ends_as_argparse_ends_it() {
        let Err(Refused::Usage(text)) = of(&["--model", "/m", "--nonsense"]) else {
            panic!("accepted");
        };
        assert!(text.ends_with("__main__.py: error: unrecognized arguments: --nonsense"));
    }

    #[test]
    fn disaggregated_engines_find_their_connector() {
        let inner = config(tier());
        let multi = json!({
            "kv_connector": "MultiConnector", "kv_role": "kv_both", "engine_id": "c-p0",
            "kv_connector_extra_config": {"connectors": [
                {"kv_connector": "NixlConnector"}, inner,
            ]},
        });
        let tiers = with(&multi).unwrap().tiers.unwrap();
        assert_eq!(tiers.engine_id, "c-p0");
        assert!(!tiers.kvcr.unwrap().hinted);
        let mut told = multi.clone();
        told["kv_connector_extra_config"]["secondary_tiers"] = json!([tier()]);
        assert!(with(&told).unwrap().tiers.unwrap().kvcr.unwrap().hinted);
        let decode = json!({"kv_connector": "NixlConnector", "kv_role": "kv_consumer"});
        assert_eq!(with(&decode).unwrap().tiers, None);
        let flags = of(&["--model=/m", "--disaggregation-mode", "decode"]).unwrap();
        assert_eq!(flags.role, Role::Decode);
    }

    #[test]
    fn a_tier_that_kvcr_refuses_is_refused_in_its_words() {
        let change = |name: &str, value: Value| {
            let mut tier = tier();
            tier[name] = value;
            match with(&config(tier)) {
                Err(Refused::Config(text)) => text,
                other => panic!("{other:?}"),
            }
        };
        for (name, value, why) in [
            ("abandon_timeout_ms", json!(9999), "at least twice"),
            ("control_ports", json!([1, 2]), "exactly one port"),
            ("compatibility_digest", json!("ab"), "configured together"),
            ("router_capabilities", json!([]), "router capabilities"),
        ] {
            let text = change(name, value);
            assert!(
                text.starts_with("ValueError: ") && text.contains(why),
                "{text}"
            );
        }
    }
}
