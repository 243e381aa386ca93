//! The one table of everything that can be configured.
//!
//! A row names a profile field (or a setting of the run), its flag and its kind; the variable
//! follows from the flag. Parsing, `--help`, precedence and the checks for unknown names all
//! read this table, so a field cannot be settable in one way and unknown in another.

use super::kind::{Kind, YEAR};

/// Prefix of every variable of ours.
pub(super) const PREFIX: &str = "PHASE1_";

/// Where a value goes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Place {
    /// A field of the profile, by dotted path.
    Profile(&'static str),
    /// A setting of this run, which no profile may contain.
    Run,
}

/// Whether a profile field may be absent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Presence {
    /// Every profile says it.
    Required,
    /// It has a default.
    Defaulted,
    /// Absence means something; an override of `none` restores it.
    Optional,
}

/// One thing that can be configured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    /// Where its value goes.
    pub(super) place: Place,
    /// The flag, without dashes.
    pub(super) flag: &'static str,
    /// What its values look like.
    pub(super) kind: Kind,
    /// Whether it may be absent.
    pub(super) presence: Presence,
    /// One line for people.
    pub(super) help: &'static str,
    /// The path of the field that this one stands in for: giving one drops the other, unless both
    /// are given in the same way.
    pub(super) instead_of: Option<&'static str>,
}

impl Field {
    /// The name that messages and the replay command use: the dotted path, or the flag of a
    /// setting.
    pub(super) fn name(&self) -> &'static str {
        match self.place {
            Place::Profile(path) => path,
            Place::Run => self.flag,
        }
    }

    /// The environment variable: `PHASE1_` and the flag in capitals.
    pub(super) fn variable(&self) -> String {
        let mut name = String::from(PREFIX);
        name.extend(self.flag.chars().map(|c| match c {
            '-' => '_',
            other => other.to_ascii_uppercase(),
        }));
        name
    }
}

const fn field(
    path: &'static str,
    flag: &'static str,
    kind: Kind,
    presence: Presence,
    help: &'static str,
) -> Field {
    Field {
        place: Place::Profile(path),
        flag,
        kind,
        presence,
        help,
        instead_of: None,
    }
}

const fn either(mut field: Field, other: &'static str) -> Field {
    field.instead_of = Some(other);
    field
}

const fn setting(flag: &'static str, kind: Kind, help: &'static str) -> Field {
    Field {
        place: Place::Run,
        flag,
        kind,
        presence: Presence::Optional,
        help,
        instead_of: None,
    }
}

const U16: Kind = Kind::Integer {
    max: u16::MAX as u64,
};
const U32: Kind = Kind::Integer {
    max: u32::MAX as u64,
};
// TOML integers are signed.
const U64: Kind = Kind::Integer {
    max: i64::MAX as u64,
};

const SECONDS: Kind = Kind::Integer { max: YEAR };
// What a process of the simulated stack takes its time for, so hours are more than enough.
const MICROSECONDS: Kind = Kind::Integer {
    max: 24 * 3600 * 1_000_000,
};
const MILLISECONDS: Kind = Kind::Integer { max: 1000 * YEAR };

/// A replacement is started after every kill, which takes a minute where it is real.
const KILLS: Kind = Kind::Integer { max: 1000 };

use Presence::{Defaulted, Optional, Required};

/// Blocks and turns of a prompt: none is longer.
const BLOCKS: Kind = Kind::Integer { max: 1000 };

/// A round takes every arm once, which takes minutes where the product is real.
const REPEATS: Kind = Kind::Integer { max: 1000 };

/// Groups of a KV cache: an engine has a handful.
const GROUPS: Kind = Kind::Integer { max: 64 };

/// Workers of one host: a typing error must not ask for thousands of ports.
const WORKERS: Kind = Kind::Integer { max: 64 };

/// Everything that can be configured, in the order of `--help`.
#[rustfmt::skip]
pub(super) const FIELDS: &[Field] = &[
    setting("profile", Kind::Text, "profile: a name under env/, or a path to a .toml file [cpu]"),
    setting("state-dir", Kind::Path, "locks, sockets and generations of running stacks"),
    setting("cache-dir", Kind::Path, "installed environments and models"),
    setting("runs-dir", Kind::Path, "evidence of runs"),
    setting("require", Kind::Names, "cases that may not be gated, comma-separated: tc01, tc01::cold, all"),
    setting("strict-pins", Kind::Switch, "a reference without a pinned result fails"),
    setting("kills", KILLS, "how often tc06 kills a worker [5]"),
    field("known", "known", Kind::Defects, Defaulted, "known defects, for which an arm passes only if it sees them: 'ARM CHECK[?][,CHECK]: WHY; ..'; with `?` it need not show"),
    field("title", "title", Kind::Text, Required, "one line for people"),
    either(field("environment.lock", "lock", Kind::Text, Optional, "locked environment that the harness installs"), "environment.python"),
    either(field("environment.python", "python", Kind::Path, Optional, "an interpreter of yours, used as it is, instead of a lock"), "environment.lock"),
    field("environment.overlay", "overlay", Kind::Switch, Defaulted, "put the harness's overlay on the import path"),
    field("engine.kind", "engine", Kind::Choice(&["vllm", "sim"]), Required, "which engine; sim stands in for the whole stack and proves the harness only"),
    field("engine.device", "device", Kind::Choice(&["cpu", "cuda"]), Required, "what the engine computes on"),
    field("engine.dtype", "dtype", Kind::Choice(&["float32", "bfloat16", "float16"]), Required, "number format of weights and KV cache"),
    field("engine.block_tokens", "block-tokens", U32, Required, "tokens in one KV block"),
    field("engine.max_model_len", "max-model-len", U32, Required, "longest sequence, in tokens"),
    field("engine.device_blocks", "device-blocks", U32, Optional, "blocks in the device cache"),
    field("engine.gpu_memory_utilization", "gpu-memory-utilization", Kind::Fraction, Optional, "share of device memory, 0 to 1 (CUDA only)"),
    field("engine.env", "engine-env", Kind::Pairs, Defaulted, "extra environment of the engines: 'A=1 B=\"x y\"'"),
    field("engine.args", "engine-args", Kind::Words, Defaulted, "extra arguments of the engines, as shell words"),
    either(field("model.build", "model-build", Kind::Choice(&["dense", "hybrid", "sim", "sim-hybrid"]), Optional, "tiny random model that the harness builds; the sim ones for engine sim"), "model.path"),
    either(field("model.path", "model-path", Kind::Path, Optional, "directory with weights and tokenizer, instead of a built model"), "model.build"),
    field("model.served_name", "served-name", Kind::Text, Required, "model name that clients ask for"),
    field("geometry.hit_block_tokens", "hit-block-tokens", U32, Optional, "tokens of the shortest prefix that can be hit; block_tokens where absent"),
    field("geometry.ssm_groups", "ssm-groups", GROUPS, Optional, "groups of state pages of a hybrid model, 0 for a dense one; follows from a built model"),
    field("geometry.page_bytes", "page-bytes", U64, Optional, "bytes of one group's block over its layers; follows from a built model"),
    field("kvcr.primary_bytes", "primary-bytes", U64, Required, "bytes of the engine's own host tier, which stages KVCR's"),
    field("kvcr.dram_slots", "dram-slots", U32, Required, "blocks in KVCR's own DRAM tier"),
    field("kvcr.operation_timeout_ms", "operation-timeout-ms", MILLISECONDS, Required, "milliseconds until a transfer counts as timed out"),
    field("kvcr.abandon_timeout_ms", "abandon-timeout-ms", MILLISECONDS, Required, "milliseconds until a timed-out transfer settles"),
    field("kvcr.opportunistic_query", "opportunistic-query", Kind::Switch, Defaulted, "let hinted requests ask for blocks the source may lack"),
    field("kvcr.guard", "guard", Kind::Switch, Defaulted, "a kvcr_service keeps each worker's tier beyond the worker's death"),
    field("kvcr.pool_bytes", "pool-bytes", U64, Optional, "bytes of a guarded tier; as much as dram_slots blocks take where absent"),
    field("kvcr.heartbeat_timeout_ms", "heartbeat-timeout-ms", MILLISECONDS, Optional, "milliseconds without a heartbeat until a Guard takes over"),
    field("topology.kind", "topology", Kind::Choice(&["aggregated", "disagg"]), Required, "shape of the stack"),
    field("topology.workers", "workers", WORKERS, Required, "number of workers with KVCR; disagg has one more, which decodes"),
    field("topology.external_services", "external-services", Kind::Path, Optional, "directory of kvcr_services that run elsewhere (docs/sidecar.md): serviceN.sock, serviceN.log; means --guard"),
    field("devices.gpus", "gpus", Kind::Indices, Defaulted, "device of each worker, comma-separated; repeat one to share it"),
    field("discovery.backend", "discovery", Kind::Choice(&["auto", "etcd", "file"]), Defaulted, "how processes find each other"),
    field("network.host_address", "host-address", Kind::Address, Optional, "non-loopback address of this host"),
    field("network.frontend_port", "frontend-port", U16, Optional, "fixed port of the front door"),
    field("stack.keep_seconds", "keep", Kind::Keep, Defaulted, "seconds an unused stack stays up; 1 as a flag or variable means an hour"),
    field("stack.reference_keep_seconds", "reference-keep", SECONDS, Defaulted, "seconds an unused reference engine stays up"),
    field("stack.bring_up_seconds", "bring-up", SECONDS, Defaulted, "seconds that bring-up may take"),
    field("stack.max_lifetime_seconds", "max-lifetime", SECONDS, Defaulted, "hard limit of one stack's life, in seconds"),
    field("request.deadline_seconds", "deadline", SECONDS, Defaulted, "seconds until a request is given up"),
    field("request.max_tokens", "max-tokens", U32, Defaulted, "tokens to generate"),
    field("budget.promotion_ms", "budget-promotion-ms", MILLISECONDS, Optional, "milliseconds from a kill until the Guard has taken over"),
    field("budget.first_correct_response_ms", "budget-first-correct-response-ms", MILLISECONDS, Optional, "milliseconds from a kill until a request is answered right"),
    field("budget.first_guard_hit_ms", "budget-first-guard-hit-ms", MILLISECONDS, Optional, "milliseconds from a kill until a request is served the dead worker's blocks"),
    field("budget.replacement_serving_ms", "budget-replacement-serving-ms", MILLISECONDS, Optional, "milliseconds from a kill until a replacement serves"),
    field("performance.dedicated", "dedicated", Kind::Switch, Defaulted, "nothing else uses the devices: performance is judged, and not only measured"),
    field("performance.repeats", "repeats", REPEATS, Defaulted, "rounds of tc05 in which each arm is measured once [7]"),
    field("performance.warm_up", "warm-up", REPEATS, Defaulted, "rounds before them that do not count [1]"),
    field("performance.blocks", "perf-blocks", BLOCKS, Defaulted, "whole blocks of each prompt that tc05 measures [16]"),
    field("performance.seed", "perf-seed", U64, Defaulted, "what the order of tc05's arms follows from [1]"),
    field("performance.cold_ttft_ratio_max", "cold-ttft-ratio-max", Kind::Fraction, Optional, "most that the time to first token may be with nothing to hit, as a share of that without KVCR"),
    field("performance.local_ttft_ratio_max", "local-ttft-ratio-max", Kind::Fraction, Optional, "the same of a hit in the worker's own tier: 0.8 is a fifth less"),
    field("performance.peer_ttft_ratio_max", "peer-ttft-ratio-max", Kind::Fraction, Optional, "the same of a hit in a peer's tier"),
    field("performance.guard_ttft_ratio_max", "guard-ttft-ratio-max", Kind::Fraction, Optional, "the same of a hit that a Guard serves"),
    field("tc02.seed_prefix", "tc02-seed-prefix", BLOCKS, Defaulted, "hybrid model: blocks of the prefix that tc02 asks for alone first [3]"),
    field("tc02.extra_shared_sections", "tc02-extra-shared-sections", BLOCKS, Defaulted, "hybrid model: sections of two blocks that tc02's prompts share beyond it [2]"),
    field("tc02.evict_target", "tc02-evict-target", BLOCKS, Defaulted, "hybrid model: turns of tc02's conversation between which everything is evicted [2]"),
    field("sim.seed", "sim-seed", U64, Defaulted, "simulated stack: what its weights follow from"),
    field("sim.faults", "sim-faults", Kind::Faults, Defaulted, "simulated stack: lies from the start, name[@process][#times]"),
    field("sim.start_us", "sim-start-us", MICROSECONDS, Defaulted, "simulated stack: microseconds until a worker is healthy"),
    field("sim.prefill_token_us", "sim-prefill-token-us", MICROSECONDS, Defaulted, "simulated stack: microseconds to compute a prompt token"),
    field("sim.load_block_us", "sim-load-block-us", MICROSECONDS, Defaulted, "simulated stack: microseconds to load a block from a tier"),
    field("sim.transfer_block_us", "sim-transfer-block-us", MICROSECONDS, Defaulted, "simulated stack: microseconds to move a block between processes"),
    field("sim.decode_token_us", "sim-decode-token-us", MICROSECONDS, Defaulted, "simulated stack: microseconds to generate a token"),
    field("sim.lease_us", "sim-lease-us", MICROSECONDS, Defaulted, "simulated stack: microseconds until a dead worker is no longer listed"),
    field("sim.promotion_us", "sim-promotion-us", MICROSECONDS, Defaulted, "simulated stack: microseconds until a Guard serves"),
];

/// The row of a flag (without dashes).
pub(super) fn by_flag(flag: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.flag == flag)
}

/// The row of a profile field.
pub(super) fn by_path(path: &str) -> Option<&'static Field> {
    FIELDS
        .iter()
        .find(|field| matches!(field.place, Place::Profile(known) if known == path))
}

/// The row of a variable.
pub(super) fn by_variable(name: &str) -> Option<&'static Field> {
    FIELDS.iter().find(|field| field.variable() == name)
}

/// `--help`: every flag with its variable, profile field and meaning.
pub fn help_table() -> String {
    let rows: Vec<[String; 3]> = FIELDS
        .iter()
        .map(|field| {
            [
                format!("--{}{}", field.flag, field.kind.placeholder()),
                field.variable(),
                match field.place {
                    Place::Profile(path) => path.to_owned(),
                    Place::Run => "-".to_owned(),
                },
            ]
        })
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    let (flags, variables, paths) = (width(0), width(1), width(2));
    let mut text = String::from(
        "Configuration. Flags win over variables, variables over the profile. `none` removes an optional value.\n\n",
    );
    for (field, [flag, variable, path]) in FIELDS.iter().zip(&rows) {
        let words = match field.kind {
            Kind::Choice(words) => format!(": {}", words.join(", ")),
            _ => String::new(),
        };
        text += &format!(
            "  {flag:flags$}  {variable:variables$}  {path:paths$}  {}{words}\n",
            field.help
        );
    }
    text
}

/// Whichever of `candidates` is closest to `name`.
pub(super) fn nearest<'a, S: AsRef<str> + ?Sized + 'a>(
    name: &str,
    candidates: impl IntoIterator<Item = &'a S>,
) -> Option<&'a S> {
    candidates
        .into_iter()
        .min_by_key(|candidate| strsim::damerau_levenshtein(name, candidate.as_ref()))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn names_are_unique() {
        let flags: BTreeSet<_> = FIELDS.iter().map(|field| field.flag).collect();
        let names: BTreeSet<_> = FIELDS.iter().map(Field::name).collect();
        let variables: BTreeSet<_> = FIELDS.iter().map(Field::variable).collect();
        assert_eq!(flags.len(), FIELDS.len());
        assert_eq!(names.len(), FIELDS.len());
        assert_eq!(variables.len(), FIELDS.len());
    }

    #[test]
    fn the_variable_follows_from_the_flag() {
        let field = by_path("engine.device_blocks").unwrap();
        assert_eq!(field.flag, "device-blocks");
        assert_eq!(field.variable(), "PHASE1_DEVICE_BLOCKS");
        assert_eq!(
            by_variable("PHASE1_DEVICE_BLOCKS").unwrap().name(),
            field.name()
        );
    }

    #[test]
    fn help_has_a_line_for_every_field_and_no_other() {
        let help = help_table();
        let lines: Vec<&str> = help
            .lines()
            .filter(|line| line.starts_with("  --"))
            .collect();
        assert_eq!(lines.len(), FIELDS.len());
        for (field, line) in FIELDS.iter().zip(lines) {
            let mut words = line.split_whitespace();
            let flag = words.next().unwrap();
            assert_eq!(
                flag,
                format!("--{}{}", field.flag, field.kind.placeholder())
            );
            assert_eq!(words.next().unwrap(), field.variable());
            assert!(line.contains(field.help), "{line}");
        }
    }

    #[test]
    fn nearest_forgives_a_typing_error() {
        let flags = FIELDS.iter().map(|field| field.flag);
        assert_eq!(nearest("device-bloks", flags), Some("device-blocks"));
        assert_eq!(nearest("x", std::iter::empty::<&str>()), None);
    }
}
