//! What users may not change through `engine.env` and `engine.args`, because the plan decides it.
//!
//! A second `--block-size` would win silently, and the harness would then judge with the wrong
//! geometry.

/// Variables that the plan sets and depends on.
const VARIABLES: &[&str] = &[
    "HOME",
    "KVCR_SIM",
    "TMPDIR",
    "XDG_CACHE_HOME",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "ETCD_ENDPOINTS",
    "DYN_DISCOVERY_BACKEND",
    "DYN_FILE_KV",
    "DYN_REQUEST_PLANE",
    "DYN_EVENT_PLANE",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS",
    "DYN_NAMESPACE",
    "DYN_SYSTEM_PORT",
    "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "VLLM_NIXL_SIDE_CHANNEL_PORT",
];

/// Arguments that the plan sets, and what to change instead.
const ARGUMENTS: &[(&str, &str)] = &[
    ("--model", "model.path or model.build"),
    ("--served-model-name", "model.served_name"),
    ("--dtype", "engine.dtype"),
    ("--block-size", "engine.block_tokens"),
    ("--max-model-len", "engine.max_model_len"),
    ("--num-gpu-blocks-override", "engine.device_blocks"),
    ("--kv-transfer-config", "[kvcr]"),
    ("--kv-events-config", "[kvcr]"),
    ("--disaggregation-mode", "topology.kind"),
    ("--enable-prefix-caching", PREFIX_CACHING),
    ("--no-enable-prefix-caching", PREFIX_CACHING),
];

const PREFIX_CACHING: &str = "nothing: it is on, but where an engine only decodes";

/// Whether the plan or the harness sets this variable.
pub fn is_variable(name: &str) -> bool {
    VARIABLES.contains(&name) || name.starts_with("PHASE1_")
}

/// What to change instead of passing `arg`, if the plan passes it.
pub fn argument(arg: &str) -> Option<&'static str> {
    let flag = arg.split('=').next().unwrap_or(arg);
    // argparse takes underscores for dashes.
    let flag = flag.replace('_', "-");
    let found = ARGUMENTS.iter().find(|(known, _)| *known == flag);
    found.map(|(_, instead)| *instead)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::cpu;
    use crate::plan::testing::{canonical, installed};

    /// What may be changed is tuning; everything else that a worker gets is reserved.
    #[test]
    fn the_lists_cover_what_the_plan_sets() {
        const TUNING: &[&str] = &[
            "PATH",
            "PYTHONUNBUFFERED",
            "HF_HUB_OFFLINE",
            "DO_NOT_TRACK",
            "VLLM_NO_USAGE_STATS",
            "VLLM_CPU_KVCACHE_SPACE",
            "TORCHDYNAMO_DISABLE",
            "VLLM_CPU_OMP_THREADS_BIND",
            "OMP_NUM_THREADS",
        ];
        let plan = canonical(&cpu(&["--topology", "disagg"]), &installed()).unwrap();
        let worker = plan
            .processes
            .iter()
            .find(|process| process.name == "worker0")
            .unwrap();
        for name in worker.env.keys() {
            assert!(
                is_variable(name) != TUNING.contains(&name.as_str()),
                "{name}"
            );
        }
        for flag in worker.argv.iter().filter(|arg| arg.starts_with("--")) {
            assert!(
                argument(flag).is_some() || flag == "--enforce-eager",
                "{flag}"
            );
        }
    }

    #[test]
    fn spelling_does_not_get_around_it() {
        assert!(argument("--block-size=32").is_some());
        assert!(argument("--block_size").is_some());
        assert!(argument("--seed").is_none());
    }
}
