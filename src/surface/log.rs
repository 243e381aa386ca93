//! The shape of a log: which of the lines that somebody reads occur in it.
//!
//! `KVCR_EVENT` lines are known by themselves, whatever they say. Others are in a table: those
//! that a process says when it is ready, and those that say how large its caches are.

use std::collections::BTreeSet;
use std::sync::LazyLock;

use regex::Regex;

/// The beginnings of lines, each up to its first value.
const KNOWN: &[&str] = &[
    "KVCR service ready:",
    "KVCR pool has no recovered state to promote",
    "Initialized NIXL agent: KVCR-Guard-",
    "KV state-agent host started with max_slots=",
    "KV state-agent host stopped",
    "Created TieringOffloadingManager with primary tier",
    "Overriding num_gpu_blocks=",
    "CPU KV cache size:",
    "kvcr-phase1 sim:",
];

#[expect(clippy::unwrap_used, reason = "constant patterns, tried by every test")]
static EVENT: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"KVCR_EVENT (\w+)(.*)").unwrap());
#[expect(clippy::unwrap_used, reason = "constant patterns, tried by every test")]
static FIELD: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?:^|\s)(\w+)=").unwrap());
#[expect(clippy::unwrap_used, reason = "constant patterns, tried by every test")]
static COLOUR: LazyLock<Regex> = LazyLock::new(|| Regex::new("\x1b\\[[0-9;]*m").unwrap());

/// The known lines of `text`, without values.
pub fn known(text: &str) -> BTreeSet<String> {
    let text = COLOUR.replace_all(text, "");
    text.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<String> {
    if let Some(event) = EVENT.captures(line) {
        return Some(format!(
            "KVCR_EVENT {}{}",
            &event[1],
            fields(&event[2], true)
        ));
    }
    let known = KNOWN.iter().find(|known| line.contains(**known))?;
    let rest = line.split_once(known).map_or("", |(_, rest)| rest);
    Some(format!("{known}{}", fields(rest, false)))
}

/// ` name=` of each field; with its value where that is a word that says what happened.
fn fields(text: &str, words: bool) -> String {
    const SAYING: &[&str] = &["stage", "result", "scope"];
    let found: Vec<_> = FIELD.captures_iter(text).collect();
    let begins = |at: usize| {
        let next = found.get(at).and_then(|field| field.get(0));
        next.map_or(text.len(), |field| field.start())
    };
    let mut out = String::new();
    for (at, field) in found.iter().enumerate() {
        let name = &field[1];
        // A value goes on to the next field: it may have spaces.
        let end = field.get(0).map_or(0, |field| field.end());
        let said = if words && SAYING.contains(&name) {
            text[end..begins(at + 1)].trim()
        } else {
            ""
        };
        out += &format!(" {name}={said}");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_lines_keep_their_fields_and_lose_their_values() {
        let text = "\
            INFO:kvcr.kvcr_service:KVCR service ready: socket=/s guards=1 pool_sizes_bytes=(268435456,) journal_bytes=104857600\n\
            DEBUG:kvcr.guard:KVCR_EVENT primary_attached guard=0 pool=pool_0 control=127.0.0.1:21\n\
            DEBUG:kvcr.guard:KVCR_EVENT guard_promotion_stage stage=serving guard=0 monotonic_ns=12\n\
            \x1b[2m2026\x1b[0m INFO main.worker: KV state-agent host started with max_slots=2\n\
            DEBUG:kvcr.progress:KVCR_EVENT progress_startup_stage stage=NIXL agent initialization agent=x\n\
            GET /metrics\n";
        let known: Vec<String> = known(text).into_iter().collect();
        assert_eq!(
            known,
            [
                "KV state-agent host started with max_slots=",
                "KVCR service ready: socket= guards= pool_sizes_bytes= journal_bytes=",
                "KVCR_EVENT guard_promotion_stage stage=serving guard= monotonic_ns=",
                "KVCR_EVENT primary_attached guard= pool= control=",
                "KVCR_EVENT progress_startup_stage stage=NIXL agent initialization agent=",
            ]
        );
    }

    /// Of a real service whose worker was killed.
    #[test]
    fn a_promotion_is_known_stage_by_stage() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let log = root.join("tests/fixtures/real/service-promotion.log");
        let known = known(&std::fs::read_to_string(log).unwrap());
        for beginning in [
            "KVCR_EVENT guard_promotion_stage stage=death_observed guard= pool= tid= monotonic_ns=",
            "KVCR_EVENT guard_promotion_stage stage=records_recovered ",
            "KVCR_EVENT guard_promotion_stage stage=records_adopted ",
            "KVCR_EVENT guard_promotion_stage stage=serving ",
            "KVCR_EVENT guard_promoted guard= pool= recovered_blocks= agent= control= recovery_ms= setup_ms= start_ms= promotion_ms=",
        ] {
            assert!(
                known.iter().any(|line| line.starts_with(beginning)),
                "{known:#?}"
            );
        }
    }
}
