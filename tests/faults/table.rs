//! Fault × arm → class and check: the expectation as data.
//!
//! A cell names the class that decides and one check of that class that must not hold; other
//! checks may fail beside it. An arm that does not touch what the fault damages passes, and has
//! to: a harness that goes red everywhere says nothing.

use std::collections::BTreeSet;

use kvcr_phase1::cases::PHASE1;
use kvcr_phase1::failure::Class::{self, Environment, Inconclusive, Product, Skew};
use kvcr_phase1::sim::fault::{CATALOGUE, Switch};

/// What one arm must say.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cell {
    /// It does not touch what the fault damages.
    Pass,
    /// This class decides, and this check of it does not hold.
    Red(Class, &'static str),
}
use Cell::{Pass, Red};

/// The columns.
pub(crate) const ARMS: [&str; 11] = [
    "tc01::cold",
    "tc01::warm_device",
    "tc01::warm_tier",
    "tc01::boundary",
    "tc02::full",
    "tc02::partial_prefix",
    "tc02::absent",
    "tc03::hinted_and_fresh",
    "tc03::partial_prefix_hint",
    "tc03::both_directions",
    "tc03::concurrent",
];

/// One fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// `corrupt_block@worker0`, or empty for the row without a fault.
    pub(crate) switches: &'static str,
    /// Configuration beside it.
    pub(crate) flags: &'static [&'static str],
    /// Whether the second of two runs on one stack is judged.
    pub(crate) again: bool,
    /// What each arm says.
    pub(crate) cells: [Cell; ARMS.len()],
    /// What the program must print.
    pub(crate) prints: &'static str,
    /// What the supervisor must write down.
    pub(crate) logs: &'static str,
    /// Why no arm sees it, where none does.
    pub(crate) unseen: &'static str,
}

impl Row {
    pub(crate) fn name(&self) -> &str {
        if self.switches.is_empty() {
            "no_fault"
        } else {
            self.switches
        }
    }

    const fn with(mut self, flags: &'static [&'static str]) -> Self {
        self.flags = flags;
        self
    }

    const fn again(mut self) -> Self {
        self.again = true;
        self
    }

    const fn prints(mut self, words: &'static str) -> Self {
        self.prints = words;
        self
    }

    const fn logs(mut self, words: &'static str) -> Self {
        self.logs = words;
        self
    }
}

const fn row(switches: &'static str, cells: [Cell; ARMS.len()]) -> Row {
    Row {
        switches,
        flags: &[],
        again: false,
        cells,
        prints: "",
        logs: "",
        unseen: "",
    }
}

/// Nothing that the cases of today claim is touched by it.
const fn unseen(switches: &'static str, why: &'static str) -> Row {
    Row {
        unseen: why,
        ..row(switches, [Pass; ARMS.len()])
    }
}

/// The stack does not come up.
const fn not_up(switches: &'static str, class: Class, words: &'static str) -> Row {
    row(switches, [Red(class, ENDED); ARMS.len()]).prints(words)
}

/// What every arm fails that something ended early.
const ENDED: &str = "ran_to_its_end";

/// Every fault of the catalogue, and none.
#[rustfmt::skip]
pub(crate) const ROWS: &[Row] = &[
    row("", [Pass; ARMS.len()]),
    row("corrupt_block@worker*", [Pass; ARMS.len()]),
    row("swap_blocks@worker*", [Pass; ARMS.len()]),
    row("stale_block@worker*", [Pass; ARMS.len()]),
    row("truncated_block@worker*", [Pass; ARMS.len()]),
    row("missing_block@worker*", [Pass; ARMS.len()]),
    row("corrupt_host_block@worker*", [Pass; ARMS.len()]),
    row("corrupt_device_block@worker*", [Pass; ARMS.len()]),
    row("boundary_off_by_one@worker*", [Pass; ARMS.len()]),
    row("recompute_wrong@worker*", [Pass; ARMS.len()]),
    row("false_hit@worker*", [Pass; ARMS.len()]),
    row("salt_ignored@worker*", [Pass; ARMS.len()]),
    row("hit_beyond_reference@worker*", [Pass; ARMS.len()]),
    row("hit_too_short@worker*", [Pass; ARMS.len()]),
    row("tier_never_hits@worker*", [Pass; ARMS.len()]),
    row("fill_lost@worker*", [Pass; ARMS.len()]),
    row("fill_silent@worker*", [Pass; ARMS.len()]),
    row("fill_twice@worker*", [Pass; ARMS.len()]),
    row("fill_failed@worker*", [Pass; ARMS.len()]),
    row("deliver_failed@worker*", [Pass; ARMS.len()]),
    row("device_never_evicts@worker*", [Pass; ARMS.len()]),
    row("livelocked_load@worker*", [Pass; ARMS.len()]).with(&["--deadline=2"]),
    row("corrupt_transfer@worker*", [Pass; ARMS.len()]),
    row("short_transfer@worker*", [Pass; ARMS.len()]),
    row("duplicated_transfer@worker*", [Pass; ARMS.len()]),
    row("hint_ignored@worker*", [Pass; ARMS.len()]),
    row("partial_as_success@worker*", [Pass; ARMS.len()]),
    row("success_without_transfer@worker*", [Pass; ARMS.len()]),
    row("bytes_mismatch@worker*", [Pass; ARMS.len()]),
    row("write_refused@worker*", [Pass; ARMS.len()]),
    row("source_disabled@worker*", [Pass; ARMS.len()]),
    row("transfer_hangs@worker*", [Pass; ARMS.len()]),
    row("late_settle@worker*", [Pass; ARMS.len()]),
    row("partial_transfer@worker*", [Pass; ARMS.len()]),
    row("fresh_pulls@worker*", [Pass; ARMS.len()]),
    row("state_page_missing@worker*", [Pass; ARMS.len()]),
    row("state_over_transfer@worker*", [Pass; ARMS.len()]),
    row("state_off_by_one@worker*", [Pass; ARMS.len()]),
    row("counter_missing@worker*", [Pass; ARMS.len()]),
    row("counter_renamed@worker*", [Pass; ARMS.len()]),
    row("counter_reset@worker*", [Pass; ARMS.len()]),
    row("counter_negative@worker*", [Pass; ARMS.len()]),
    row("counter_frozen@worker*", [Pass; ARMS.len()]),
    row("sources_disagree@worker*", [Pass; ARMS.len()]),
    row("counters_never_settle@worker*", [Pass; ARMS.len()]).with(&["--deadline=2"]),
    row("gauge_stuck@worker*", [Pass; ARMS.len()]),
    row("page_cut@worker*", [Pass; ARMS.len()]).with(&["--deadline=2"]),
    row("page_garbage@worker*", [Pass; ARMS.len()]),
    row("page_duplicate@worker*", [Pass; ARMS.len()]),
    row("page_gone@worker*", [Pass; ARMS.len()]).with(&["--deadline=2"]),
    row("telemetry_absent@worker*", [Pass; ARMS.len()]),
    row("wrong_worker", [Pass; ARMS.len()]),
    row("wrong_worker_hidden", [Pass; ARMS.len()]),
    row("worker_id_absent", [Pass; ARMS.len()]),
    row("worker_id_rounded", [Pass; ARMS.len()]).with(&["--bring-up=3"]),
    row("error_after_200", [Pass; ARMS.len()]),
    row("empty_completion", [Pass; ARMS.len()]),
    row("body_cut", [Pass; ARMS.len()]),
    row("not_json", [Pass; ARMS.len()]),
    row("http_500", [Pass; ARMS.len()]),
    row("http_503", [Pass; ARMS.len()]),
    row("never_answers", [Pass; ARMS.len()]).with(&["--deadline=2"]),
    row("usage_off", [Pass; ARMS.len()]),
    row("cached_tokens_absent", [Pass; ARMS.len()]),
    row("finish_reason_absent", [Pass; ARMS.len()]),
    row("token_dropped", [Pass; ARMS.len()]),
    row("stops_early", [Pass; ARMS.len()]),
    row("stream_without_done", [Pass; ARMS.len()]),
    row("stream_cut", [Pass; ARMS.len()]),
    row("stream_error_frame", [Pass; ARMS.len()]),
    row("stream_stalls", [Pass; ARMS.len()]),
    row("hint_dead_peer", [Pass; ARMS.len()]),
    row("hint_missing", [Pass; ARMS.len()]),
    row("registration_lost", [Pass; ARMS.len()]),
    row("model_missing", [Pass; ARMS.len()]).with(&["--bring-up=3"]),
    row("frontend_dies", [Pass; ARMS.len()]),
    row("reference_wavers@reference", [Pass; ARMS.len()]),
    row("reference_reuses_nothing@reference", [Pass; ARMS.len()]),
    row("model_drift", [Pass; ARMS.len()]),
    row("near_ties", [Pass; ARMS.len()]),
    row("start_kwarg@worker1", [Pass; ARMS.len()]),
    row("start_import@worker1", [Pass; ARMS.len()]),
    row("start_port_taken@worker1", [Pass; ARMS.len()]),
    row("start_shm_full@worker1", [Pass; ARMS.len()]),
    row("start_bad_address@worker1", [Pass; ARMS.len()]),
    row("start_segfault@worker1", [Pass; ARMS.len()]),
    row("start_unknown@worker1", [Pass; ARMS.len()]),
    row("start_exits_quietly@worker1", [Pass; ARMS.len()]),
    row("start_hangs@worker1", [Pass; ARMS.len()]).with(&["--bring-up=3"]),
    row("start_unregistered@worker1", [Pass; ARMS.len()]).with(&["--bring-up=3"]),
    row("start_slow@worker1", [Pass; ARMS.len()]),
    row("dies@worker0", [Pass; ARMS.len()]),
    row("crashes@worker0", [Pass; ARMS.len()]),
    row("hangs@worker0", [Pass; ARMS.len()]).with(&["--deadline=2"]),
    row("leaks_shm@worker0", [Pass; ARMS.len()]),
    row("ignores_sigterm@worker0", [Pass; ARMS.len()]),
    row("leaves_orphan@worker0", [Pass; ARMS.len()]),
    row("promotion_never", [Pass; ARMS.len()]).with(&["--guard"]),
    row("promotion_late", [Pass; ARMS.len()]).with(&["--guard"]),
    row("promotion_cold", [Pass; ARMS.len()]).with(&["--guard"]),
    row("promotion_twice", [Pass; ARMS.len()]).with(&["--guard"]),
    row("guard_corrupts", [Pass; ARMS.len()]).with(&["--guard"]),
    row("guard_dies", [Pass; ARMS.len()]).with(&["--guard"]),
    row("journal_overflow", [Pass; ARMS.len()]).with(&["--guard"]),
    row("claim_refused", [Pass; ARMS.len()]).with(&["--guard"]),
    row("claim_cold", [Pass; ARMS.len()]).with(&["--guard"]),
    row("claim_stale", [Pass; ARMS.len()]).with(&["--guard"]),
    row("claim_digest", [Pass; ARMS.len()]).with(&["--guard"]),
    row("agent_forgets", [Pass; ARMS.len()]).with(&["--guard"]),
    row("agent_dies", [Pass; ARMS.len()]).with(&["--guard"]),
];

pub(crate) fn every_fault_has_a_row() {
    let told: BTreeSet<&str> = ROWS
        .iter()
        .filter(|row| !row.switches.is_empty())
        .map(|row| {
            row.switches
                .parse::<Switch>()
                .expect(row.switches)
                .fault
                .entry()
                .name
        })
        .collect();
    let all: BTreeSet<&str> = CATALOGUE.iter().map(|entry| entry.name).collect();
    let missing: Vec<_> = all.difference(&told).collect();
    assert!(missing.is_empty(), "no row for {missing:?}");
    let arms: Vec<&str> = PHASE1
        .iter()
        .flat_map(|case| case.arms)
        .map(|arm| arm.name)
        .collect();
    assert_eq!(arms, ARMS, "a column for every arm");
}

pub(crate) fn what_no_case_sees_says_why() {
    for row in ROWS {
        let seen = row.cells.iter().any(|cell| *cell != Pass)
            || !row.prints.is_empty()
            || !row.logs.is_empty()
            || row.switches.is_empty();
        assert_eq!(seen, row.unseen.is_empty(), "{}", row.name());
    }
}
