//! The series that speak of KVCR and the engine's tiers, by name: the only file that spells them.
//!
//! Present only with `enable_telemetry`; a labelled sample appears with its first event. The
//! names are those of vLLM 0.32 and kvcr 0.1.1, as measured; where an older name exists it is
//! asked for when the newer family is not declared.

use super::{Counted, Delta, Page, Reading};
use crate::failure::Failure;

const DURATION_COUNT: &str = "vllm:kvcr_duration_seconds_count";
const TRANSFER_BLOCKS: &str = "vllm:kvcr_transfer_blocks_total";
const TRANSFER_BYTES: &str = "vllm:kvcr_transfer_bytes_total";
const STATE: &str = "vllm:kvcr_state";
const READ_BYTES: &str = "vllm:kv_offload_tiering_read_bytes_total";
const WRITE_BYTES: &str = "vllm:kv_offload_tiering_write_bytes_total";
/// Newer name first.
const QUERIES: [&str; 2] = [
    "vllm:kv_offload_tiering_chunk_queries_total",
    "vllm:kv_offload_tiering_block_queries_total",
];
const HITS: [&str; 2] = [
    "vllm:kv_offload_tiering_chunk_hits_total",
    "vllm:kv_offload_tiering_block_hits_total",
];
const PROMPT_TOKENS: &str = "vllm:prompt_tokens_total";
const PROMPT_TOKENS_BY_SOURCE: &str = "vllm:prompt_tokens_by_source_total";
const CACHED_BY_SOURCE: &str = "vllm:prompt_tokens_cached_by_source_total";
const ACTIVE_JOBS: [&str; 2] = [
    "vllm:kv_offload_tiering_active_promotion_jobs",
    "vllm:kv_offload_tiering_active_cascade_jobs",
];

/// Counters that must stand still before a delta is read. Request and step counters of the
/// engine are not among them: a health probe may move those.
pub(super) const SETTLING: [&str; 4] = [
    "vllm:kvcr_",
    "vllm:kv_offload_",
    "vllm:prompt_tokens",
    "vllm:generation_tokens",
];

/// `operation` of the transfer counters.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Operation {
    /// Engine into KVCR's own pool: an offload. Rises on cold requests too.
    LocalFill,
    /// KVCR's own pool into the engine: a local hit.
    LocalDeliver,
    /// A peer's pool into this engine: a hinted hit. Has blocks, but no bytes of its own.
    RemoteDeliver,
    /// A peer's pool into this pool.
    RemoteFetch,
    /// This pool to a peer: the source's side of a remote hit.
    SourceWrite,
}

impl Operation {
    /// The label's value.
    pub fn label(self) -> &'static str {
        match self {
            Self::LocalFill => "local_fill",
            Self::LocalDeliver => "local_deliver",
            Self::RemoteDeliver => "remote_deliver",
            Self::RemoteFetch => "remote_fetch",
            Self::SourceWrite => "source_write",
        }
    }
}

/// `tier` of the tiering counters. The label begins with the tier's position (`1:kvcr`).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Tier {
    /// The engine's own host tier.
    Primary,
    /// KVCR, at any position.
    Kvcr,
}

impl Tier {
    fn kind(self) -> &'static str {
        match self {
            Self::Primary => "primary",
            Self::Kvcr => "kvcr",
        }
    }
}

/// `source` of `prompt_tokens_by_source`: where the prompt's tokens came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum PromptSource {
    /// Computed.
    LocalCompute,
    /// The device's prefix cache.
    LocalCacheHit,
    /// Any tier behind the device, the engine's own included.
    ExternalKvTransfer,
}

impl PromptSource {
    fn label(self) -> &'static str {
        match self {
            Self::LocalCompute => "local_compute",
            Self::LocalCacheHit => "local_cache_hit",
            Self::ExternalKvTransfer => "external_kv_transfer",
        }
    }
}

/// `source` of `prompt_tokens_cached_by_source`: which tier a hit came from.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum CacheSource {
    /// Device memory.
    Device,
    /// The engine's own host tier.
    Host,
    /// A tier that the engine knows nothing of: KVCR, local or remote.
    ExternalUnspecified,
}

impl CacheSource {
    fn label(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Host => "host",
            Self::ExternalUnspecified => "external_unspecified",
        }
    }
}

/// Blocks that successful operations moved.
pub fn blocks(delta: &Delta, operation: Operation) -> Counted {
    delta.counter(TRANSFER_BLOCKS, &[("operation", operation.label())])
}

/// Bytes that operations moved, where the operation counts them.
pub fn bytes(delta: &Delta, operation: Operation) -> Counted {
    delta.counter(TRANSFER_BYTES, &[("operation", operation.label())])
}

/// How often `scope` ended with `result` (`remote_deliver`, `partial`).
pub fn events(delta: &Delta, scope: &str, result: &str) -> Counted {
    delta.counter(DURATION_COUNT, &[("scope", scope), ("result", result)])
}

/// How it is counted that a source holds nothing of what it is asked for: it looks at its engine's
/// host tier in vain and fails the write, and the target fails the delivery.
pub const NOTHING_HELD: [(&str, &str); 3] = [
    ("framework_pin_wait", "failed"),
    ("source_write", "failed"),
    ("remote_deliver", "failed"),
];

/// Requests of peers that a source took up, however they ended.
pub fn requests_of_peers(delta: &Delta) -> Counted {
    events(delta, "control_start_write", "handled")
}

/// Requests of peers that a source failed.
pub fn failed_writes(delta: &Delta) -> Counted {
    events(delta, "source_write", "failed")
}

/// Requests to peers of which a target got nothing.
pub fn failed_deliveries(delta: &Delta) -> Counted {
    events(delta, "remote_deliver", "failed")
}

/// Bytes read from a tier into the engine's own host tier. Computed from keys, not measured.
pub fn read_bytes(delta: &Delta, tier: Tier) -> Counted {
    tiered(delta, READ_BYTES, tier)
}

/// Bytes written from the engine's own host tier to a tier.
pub fn write_bytes(delta: &Delta, tier: Tier) -> Counted {
    tiered(delta, WRITE_BYTES, tier)
}

/// Chunk lookups sent to a tier.
pub fn chunk_queries(delta: &Delta, tier: Tier) -> Counted {
    renamed(delta, QUERIES, tier)
}

/// Chunk lookups that a tier answered with a hit.
pub fn chunk_hits(delta: &Delta, tier: Tier) -> Counted {
    renamed(delta, HITS, tier)
}

/// Prompt tokens by where they came from.
pub fn prompt_tokens(delta: &Delta, source: PromptSource) -> Counted {
    delta.counter(PROMPT_TOKENS_BY_SOURCE, &[("source", source.label())])
}

/// Prompt tokens served from a cache, by tier: the best single sign of which tier was used.
pub fn cached_tokens(delta: &Delta, source: CacheSource) -> Counted {
    delta.counter(CACHED_BY_SOURCE, &[("source", source.label())])
}

/// A `kvcr_state` gauge: `in_flight_ops`, `framework_pins`, `local_g2_free_slots`, …
pub fn state(page: &Page, resource: &str) -> Reading {
    page.read(STATE, &[("resource", resource)])
}

/// Bytes of one page, from all that a worker has stored in KVCR's own tier since it started; `None`
/// if that was nothing, or not whole pages.
pub fn stored_page_bytes(page: &Page) -> Option<u64> {
    let fill = [("operation", Operation::LocalFill.label())];
    let bytes = page.read(TRANSFER_BYTES, &fill).exact()?;
    let pages = page.read(TRANSFER_BLOCKS, &fill).exact()?;
    let whole = pages > 0 && bytes > 0 && bytes % pages == 0;
    whole.then(|| bytes / pages)
}

/// What telemetry must show before the first request, or why it does not.
pub fn telemetry_present(page: &Page) -> Result<(), String> {
    if state(page, "in_flight_ops").counted().is_none() {
        return Err(format!(
            "{STATE}{{resource=\"in_flight_ops\"}} is not there"
        ));
    }
    // These have no sample before their first event, but are declared from the start.
    for name in [DURATION_COUNT, TRANSFER_BLOCKS, TRANSFER_BYTES] {
        if page.kind(name).is_none() {
            return Err(format!("{name} is not declared"));
        }
    }
    Ok(())
}

/// What is still going on, as the gauges tell: empty when idle. Gauges that are absent (KVCR is
/// off) say nothing and hold nothing up.
pub fn busy(page: &Page) -> Vec<String> {
    let states = ["in_flight_ops", "framework_pins", "completed"]
        .map(|resource| (resource, state(page, resource)));
    let jobs = ACTIVE_JOBS.map(|name| (name, page.read(name, &[])));
    states
        .into_iter()
        .chain(jobs)
        .filter_map(|(what, reading)| match reading.counted() {
            Some(count) if count != 0.0 => Some(format!("{what} {count}")),
            _ => None,
        })
        .collect()
}

fn tiered(delta: &Delta, name: &str, tier: Tier) -> Counted {
    let described = format!("{name}{{tier=\"*:{}\"}}", tier.kind());
    delta.counter_where(name, &described, |series| {
        series.label("tier").is_some_and(|label| {
            label
                .split_once(':')
                .is_some_and(|(_, kind)| kind == tier.kind())
        })
    })
}

fn renamed(delta: &Delta, names: [&str; 2], tier: Tier) -> Counted {
    let newer = tiered(delta, names[0], tier);
    if newer.reading != Reading::Absent {
        return newer;
    }
    let older = tiered(delta, names[1], tier);
    if older.reading == Reading::Absent {
        newer
    } else {
        older
    }
}

/// An operation that ended badly, and how often.
#[derive(Clone, Debug, PartialEq)]
pub struct BadEnding {
    /// `remote_deliver`, `source_write`, …
    pub scope: String,
    /// `partial`, `failed`, `timeout`, or what a refusal is counted as.
    pub result: String,
    /// How often.
    pub count: f64,
}

impl std::fmt::Display for BadEnding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}: {}", self.scope, self.result, self.count)
    }
}

/// Operations that ended partially, failed, timed out or were refused between two pages.
/// `Err` where that cannot be said: no failures and no telemetry are not the same.
pub fn failures(delta: &Delta) -> Result<Vec<BadEnding>, Reading> {
    let all = delta.counter(DURATION_COUNT, &[]).reading;
    if all.counted().is_none() {
        return Err(all);
    }
    let mut endings: Vec<BadEnding> = Vec::new();
    for (series, _) in delta.moved().filter(|(s, _)| s.name() == DURATION_COUNT) {
        let (Some(scope), Some(result)) = (series.label("scope"), series.label("result")) else {
            continue;
        };
        let bad =
            ["partial", "failed", "timeout"].contains(&result) || scope == "control_write_refused";
        if !bad
            || endings
                .iter()
                .any(|e| e.scope == scope && e.result == result)
        {
            continue;
        }
        let count = events(delta, scope, result)
            .reading
            .counted()
            .unwrap_or_default();
        endings.push(BadEnding {
            scope: scope.to_owned(),
            result: result.to_owned(),
            count,
        });
    }
    Ok(endings)
}

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq)]
pub struct Broken {
    /// Its stable name, in snake case.
    pub name: &'static str,
    /// Who has to act, expected and found.
    pub failure: Failure,
}

fn broken(name: &'static str, failure: Failure) -> Broken {
    Broken { name, failure }
}

/// What must hold between any two pages of one worker, whatever was asked of it. `block_bytes`
/// is the size of one block, where the geometry is known. Silent across a restart: there is
/// nothing to hold then.
pub fn invariants(delta: &Delta, block_bytes: Option<u64>) -> Vec<Broken> {
    let mut found = Vec::new();
    if let Some(first) = delta.after().problems().first() {
        let count = delta.after().problems().len();
        found.push(broken(
            "page_readable",
            Failure::inconclusive("the metrics page cannot be read completely")
                .expected("every line a sample, a declaration or a comment")
                .found(format_args!("{count} that are not; the first: {first}")),
        ));
    }
    // vllm#38230: a negative increment ends the engine's statistics without a word.
    for (series, values) in delta.after().samples() {
        if delta.after().is_cumulative(series.name()) && values.iter().any(|v| *v < 0.0) {
            found.push(broken(
                "counters_not_negative",
                Failure::product(format!("{series} is negative"))
                    .expected("a counter of at least 0")
                    .found(values[0]),
            ));
        }
    }
    if delta.restart().is_some() {
        return found;
    }
    let total = delta.counter(PROMPT_TOKENS, &[]);
    let by_source = delta.counter(PROMPT_TOKENS_BY_SOURCE, &[]);
    if let (Some(total), Some(sum)) = (total.reading.exact(), by_source.reading.exact())
        && total != sum
    {
        found.push(broken(
            "prompt_sources_add_up",
            Failure::product("the sources of the prompt's tokens do not add up")
                .expected(format_args!("{total} tokens ({PROMPT_TOKENS})"))
                .found(format_args!("{sum} tokens ({PROMPT_TOKENS_BY_SOURCE})")),
        ));
    }
    if let Some(block_bytes) = block_bytes {
        found.extend(accounting(delta, block_bytes));
    }
    found
}

fn accounting(delta: &Delta, block_bytes: u64) -> Vec<Broken> {
    use Operation::{LocalDeliver, LocalFill, RemoteDeliver, SourceWrite};
    // A family that is gone or renamed says nothing; whoever needs it says that it is missing.
    let moved = |operation| blocks(delta, operation).reading.exact();
    let mut found = Vec::new();
    for operation in [LocalFill, LocalDeliver, SourceWrite] {
        let Some(count) = moved(operation) else {
            continue;
        };
        match bytes(delta, operation).reading.exact() {
            // The source's bytes come from NIXL's telemetry, whose errors KVCR swallows.
            None | Some(0) if count > 0 => found.push(broken(
                "bytes_counted",
                Failure::inconclusive(format!("{} counted no bytes", operation.label()))
                    .expected(format_args!("{} B for {count} blocks", count * block_bytes))
                    .found("0 B")
                    .hint("the transport's telemetry is missing; the blocks may still be right"),
            )),
            Some(bytes) if Some(bytes) != count.checked_mul(block_bytes) => found.push(broken(
                "blocks_and_bytes_agree",
                Failure::product(format!("{} blocks and bytes disagree", operation.label()))
                    .expected(format_args!("{count} blocks of {block_bytes} B"))
                    .found(format_args!("{bytes} B")),
            )),
            _ => {}
        }
    }
    // Both ways into the engine pass through its host tier, which counts them by key.
    if let (Some(local), Some(remote)) = (moved(LocalDeliver), moved(RemoteDeliver))
        && let delivered = local + remote
        && let Some(read) = read_bytes(delta, Tier::Kvcr).reading.exact()
        && Some(read) != delivered.checked_mul(block_bytes)
    {
        found.push(broken(
            "tier_bytes_and_delivered_blocks_agree",
            Failure::product("bytes read from the KVCR tier and delivered blocks disagree")
                .expected(format_args!("{delivered} blocks of {block_bytes} B"))
                .found(format_args!("{read} B")),
        ));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::Class;

    /// Declarations as they stand on a page of vLLM 0.32 with KVCR before any request.
    const READY: &str = "\
# TYPE vllm:kvcr_duration_seconds histogram
# TYPE vllm:kvcr_transfer_bytes_total counter
# TYPE vllm:kvcr_transfer_blocks_total counter
# TYPE vllm:kvcr_state gauge
vllm:kvcr_state{engine=\"0\",resource=\"in_flight_ops\"} 0.0
vllm:kvcr_state{engine=\"0\",resource=\"framework_pins\"} 0.0
# TYPE vllm:kv_offload_tiering_read_bytes_total counter
# TYPE vllm:kv_offload_tiering_chunk_hits_total counter
# TYPE vllm:kv_offload_tiering_active_cascade_jobs gauge
vllm:kv_offload_tiering_active_cascade_jobs{tier=\"1:kvcr\"} 0.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine=\"0\"} 2.0
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"local_compute\"} 2.0
";

    fn delta(after: &str) -> Delta {
        let before = Page::parse(READY);
        let after: String = READY
            .lines()
            .filter(|line| {
                let series = line.rsplit_once(' ').map_or(*line, |(series, _)| series);
                line.starts_with('#') || !after.contains(series)
            })
            .map(|line| format!("{line}\n"))
            .chain([after.to_owned()])
            .collect();
        Delta::between(&before, &Page::parse(&after))
    }

    const WARM: &str = "\
vllm:prompt_tokens_total{engine=\"0\"} 568.0
vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"local_compute\"} 56.0
vllm:prompt_tokens_by_source_total{engine=\"0\",source=\"external_kv_transfer\"} 512.0
vllm:kvcr_transfer_blocks_total{engine=\"0\",operation=\"local_deliver\"} 8.0
vllm:kvcr_transfer_bytes_total{engine=\"0\",operation=\"local_deliver\"} 2.097152e+06
vllm:kv_offload_tiering_read_bytes_total{engine=\"0\",tier=\"1:kvcr\"} 2.097152e+06
vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"success\",scope=\"local_deliver\"} 1.0
";

    #[test]
    fn a_local_hit_is_read_and_its_invariants_hold() {
        let d = delta(WARM);
        assert_eq!(d.restart(), None);
        assert_eq!(
            blocks(&d, Operation::LocalDeliver).reading,
            Reading::Value(8.0)
        );
        assert_eq!(
            blocks(&d, Operation::RemoteDeliver).reading,
            Reading::Silent
        );
        assert_eq!(read_bytes(&d, Tier::Kvcr).reading.exact(), Some(2_097_152));
        assert_eq!(write_bytes(&d, Tier::Kvcr).reading, Reading::Absent);
        assert_eq!(
            prompt_tokens(&d, PromptSource::ExternalKvTransfer).reading,
            Reading::Value(512.0)
        );
        assert_eq!(
            events(&d, "local_deliver", "success").reading,
            Reading::Value(1.0)
        );
        assert_eq!(chunk_hits(&d, Tier::Kvcr).reading, Reading::Silent);
        assert_eq!(stored_page_bytes(d.after()), None, "nothing was stored");
        assert_eq!(chunk_queries(&d, Tier::Kvcr).reading, Reading::Absent);
        assert_eq!(failures(&d), Ok(vec![]));
        assert_eq!(invariants(&d, Some(262_144)), []);
    }

    /// A tier without a pool of its own cannot take what the engine offers, and counts each offer.
    #[test]
    fn a_cascade_that_fails_for_want_of_a_pool_is_no_failed_transfer() {
        let cascades = "\
# TYPE vllm:kv_offload_tiering_cascade_job_failures_total counter
vllm:kv_offload_tiering_cascade_job_failures_total{engine=\"0\",tier=\"1:kvcr\"} 3.0
vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"handled\",scope=\"control_start_write\"} 1.0
";
        let d = delta(cascades);
        assert_eq!(failures(&d), Ok(vec![]));
        assert_eq!(invariants(&d, Some(262_144)), []);
    }

    #[test]
    fn a_source_that_holds_nothing_is_counted_on_both_sides() {
        let refused = "\
vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"handled\",scope=\"control_start_write\"} 1.0
vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"failed\",scope=\"framework_pin_wait\"} 1.0
vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"failed\",scope=\"source_write\"} 1.0
";
        let source = delta(refused);
        assert_eq!(requests_of_peers(&source).reading, Reading::Value(1.0));
        assert_eq!(failed_writes(&source).reading, Reading::Value(1.0));
        assert_eq!(failed_deliveries(&source).reading, Reading::Silent);
        for ending in failures(&source).unwrap() {
            let name = (ending.scope.as_str(), ending.result.as_str());
            assert!(NOTHING_HELD.contains(&name), "{ending}");
        }
        let late = "vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"timeout\",scope=\"framework_pin_wait\"} 1.0\n";
        let ending = &failures(&delta(late)).unwrap()[0];
        assert!(!NOTHING_HELD.contains(&(&ending.scope, &ending.result)));
    }

    /// Pages of the two workers around one hinted transfer of 8 blocks (and, on the source, a
    /// session of seeding and flooding before it), as scraped from vLLM 0.32, kvcr 0.1.1 and
    /// Dynamo 1.6.1 on a CPU; only series of other families were removed.
    fn real(before: &str, after: &str) -> Delta {
        let (before, after) = (Page::parse(before), Page::parse(after));
        assert_eq!((before.problems(), after.problems()), (&[][..], &[][..]));
        assert_eq!(telemetry_present(&before), Ok(()));
        assert_eq!(busy(&after), Vec::<String>::new());
        let delta = Delta::between(&before, &after);
        assert_eq!(delta.restart(), None);
        assert_eq!(failures(&delta), Ok(vec![]));
        assert_eq!(invariants(&delta, Some(262_144)), []);
        delta
    }

    #[test]
    fn a_real_transfer_is_read_from_both_sides() {
        let source_before = include_str!("testdata/source-before.prom");
        let source = real(source_before, include_str!("testdata/source-after.prom"));
        let target = real(
            include_str!("testdata/target-before.prom"),
            include_str!("testdata/target-after.prom"),
        );
        assert_eq!(
            blocks(&target, Operation::RemoteDeliver).reading,
            Reading::Value(8.0)
        );
        assert_eq!(
            bytes(&target, Operation::RemoteDeliver).reading,
            Reading::Silent
        );
        assert_eq!(
            read_bytes(&target, Tier::Kvcr).reading.exact(),
            Some(8 * 262_144)
        );
        assert_eq!(
            cached_tokens(&target, CacheSource::ExternalUnspecified).reading,
            Reading::Value(512.0)
        );
        assert_eq!(
            blocks(&target, Operation::LocalFill).reading,
            Reading::Silent
        );
        assert_eq!(
            blocks(&source, Operation::SourceWrite).reading,
            Reading::Value(8.0)
        );
        assert_eq!(
            bytes(&source, Operation::SourceWrite).reading.exact(),
            Some(8 * 262_144)
        );
        assert_eq!(
            events(&source, "source_write", "success").reading,
            Reading::Value(1.0)
        );
        // One worker's page is not the continuation of another's.
        let mixed = Delta::between(&Page::parse(source_before), target.after());
        assert!(mixed.restart().is_some());
    }

    #[test]
    fn every_lie_breaks_an_invariant() {
        for (from, to, class) in [
            (
                "source=\"local_compute\"} 56",
                "source=\"local_compute\"} 57",
                Class::Product,
            ),
            (
                "2.097152e+06\nvllm:kv_off",
                "2.097153e+06\nvllm:kv_off",
                Class::Product,
            ),
            (
                "2.097152e+06\nvllm:kv_off",
                "0\nvllm:kv_off",
                Class::Inconclusive,
            ),
            (
                "tier=\"1:kvcr\"} 2.097152e+06",
                "tier=\"1:kvcr\"} 1",
                Class::Product,
            ),
            (
                "blocks_total{engine=\"0\",operation=\"local_deliver\"} 8",
                "blocks_total{engine=\"0\",operation=\"local_deliver\"} -8",
                Class::Product,
            ),
        ] {
            assert!(WARM.contains(from), "{from}");
            let found = invariants(&delta(&WARM.replacen(from, to, 1)), Some(262_144));
            assert!(
                found.iter().any(|one| one.failure.class == class),
                "{to}: {found:?}"
            );
        }
    }

    #[test]
    fn a_family_that_is_gone_breaks_no_invariant() {
        let renamed = |page: &Page| {
            let text: String = page
                .samples()
                .map(|(s, v)| format!("{s} {}\n", v[0]))
                .collect();
            let kinds = READY.lines().filter(|line| line.starts_with("# TYPE"));
            let kinds: String = kinds.map(|line| format!("{line}\n")).collect();
            Page::parse(&(kinds + &text).replace("kvcr_transfer_blocks", "kvcr_moved_blocks"))
        };
        let d = delta(WARM);
        let gone = Delta::between(&renamed(&Page::parse(READY)), &renamed(d.after()));
        assert_eq!(
            blocks(&gone, Operation::LocalDeliver).reading,
            Reading::Absent
        );
        assert_eq!(invariants(&gone, Some(262_144)), []);
    }

    #[test]
    fn bad_endings_are_found_and_missing_telemetry_is_not_their_absence() {
        let d = delta(
            "vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"partial\",scope=\"remote_deliver\"} 2\n\
             vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"handled\",scope=\"control_write_refused\"} 1\n\
             vllm:kvcr_duration_seconds_count{engine=\"0\",result=\"success\",scope=\"transfer\"} 9\n",
        );
        let found: Vec<_> = failures(&d)
            .unwrap()
            .into_iter()
            .map(|e| (e.scope, e.count))
            .collect();
        assert_eq!(
            found,
            [
                ("control_write_refused".to_owned(), 1.0),
                ("remote_deliver".to_owned(), 2.0)
            ]
        );
        let off = Page::parse("# TYPE a_total counter\n");
        assert_eq!(failures(&Delta::between(&off, &off)), Err(Reading::Absent));
    }

    #[test]
    fn older_names_are_read_where_the_newer_are_not_declared() {
        let old = Page::parse(
            "# TYPE vllm:kv_offload_tiering_block_hits_total counter\nvllm:kv_offload_tiering_block_hits_total{tier=\"1:kvcr\"} 0\n",
        );
        let new = Page::parse(
            "# TYPE vllm:kv_offload_tiering_block_hits_total counter\nvllm:kv_offload_tiering_block_hits_total{tier=\"1:kvcr\"} 4\n",
        );
        assert_eq!(
            chunk_hits(&Delta::between(&old, &new), Tier::Kvcr).reading,
            Reading::Value(4.0)
        );
    }

    #[test]
    fn telemetry_and_idleness_are_read_from_the_page() {
        let page = Page::parse(READY);
        assert_eq!(telemetry_present(&page), Ok(()));
        assert_eq!(busy(&page), Vec::<String>::new());
        assert!(telemetry_present(&Page::parse("")).is_err());
        let working = READY.replace("\"framework_pins\"} 0.0", "\"framework_pins\"} 3.0");
        assert_eq!(busy(&Page::parse(&working)), ["framework_pins 3"]);
    }

    #[test]
    fn each_bad_ending_is_told_once_with_its_sum() {
        let ended = |engine: u32, scope: &str, result: &str, count: u32| {
            format!(
                "vllm:kvcr_duration_seconds_count{{engine=\"{engine}\",scope=\"{scope}\",result=\"{result}\"}} {count}\n"
            )
        };
        let page = [
            ended(0, "remote_deliver", "failed", 1),
            ended(1, "remote_deliver", "failed", 2),
            ended(0, "remote_deliver", "timeout", 4),
            ended(0, "source_write", "failed", 8),
            ended(0, "source_write", "success", 16),
        ]
        .concat();
        let mut told: Vec<_> = failures(&delta(&page))
            .unwrap()
            .iter()
            .map(BadEnding::to_string)
            .collect();
        told.sort_unstable();
        assert_eq!(
            told,
            [
                "remote_deliver failed: 3",
                "remote_deliver timeout: 4",
                "source_write failed: 8"
            ]
        );
    }
}
