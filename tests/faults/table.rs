//! Fault × arm → class and check: the expectation as data.
//!
//! A row names the arms that must go red, the class that decides there and one check of that class
//! that must not hold; other checks may fail beside it. Every other arm does not touch what the
//! fault damages, and has to pass: a harness that goes red everywhere says nothing.

use std::collections::BTreeSet;

use kvcr_phase1::cases::PHASE1;
use kvcr_phase1::failure::Class::{self, Environment, Inconclusive, Product, Skew};
use kvcr_phase1::gate::Wants;
use kvcr_phase1::sim::fault::{CATALOGUE, Switch};

/// What one arm must say.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Cell {
    /// It does not touch what the fault damages.
    Pass,
    /// The row leaves it out.
    NotRun,
    /// This class decides, and this check of it does not hold.
    Red(Class, &'static str),
}

const COLD: &str = "tc01::cold";
const WARM_DEVICE: &str = "tc01::warm_device";
const WARM_TIER: &str = "tc01::warm_tier";
const BOUNDARY: &str = "tc01::boundary";
const FULL: &str = "tc02::full";
const PREFIX: &str = "tc02::partial_prefix";
const ABSENT: &str = "tc02::absent";
const SEED_PREFIX: &str = "tc02::seed_prefix";
const SECTIONS: &str = "tc02::extra_shared_sections";
const TURNS: &str = "tc02::evict_target";
const HINTED: &str = "tc03::hinted_and_fresh";
const SHARED: &str = "tc03::partial_prefix_hint";
const BOTH: &str = "tc03::both_directions";
const CONCURRENT: &str = "tc03::concurrent";
const TWICE: &str = "tc03::twice_at_once";
const NO_SOURCE: &str = "tc03::no_source";
const LARGE: &str = "tc03::large";

const PROTECTION: &str = "tc04::protection";
const TAKEOVER: &str = "tc04::takeover";
const REPLACEMENT: &str = "tc04::replacement";
const SECOND: &str = "tc04::second_failure";
const GUARD_DEATH: &str = "tc04::guard_death";
const HUNG: &str = "tc04::hung_worker";
const DIGEST: &str = "tc04::digest_mismatch";
const CLAIM: &str = "tc04::claim_refused";
const BOTH_DIE: &str = "tc04::both_die";
const TIERS: &str = "tc05::tiers";
const SERVED: &str = "tc05::guard";
const RECOVERY: &str = "tc06::recovery";
const COST: &str = "tc06::cost_curve";

/// The columns.
pub(crate) const ARMS: [&str; 30] = [
    COLD,
    WARM_DEVICE,
    WARM_TIER,
    BOUNDARY,
    FULL,
    PREFIX,
    ABSENT,
    SEED_PREFIX,
    SECTIONS,
    TURNS,
    HINTED,
    SHARED,
    BOTH,
    CONCURRENT,
    TWICE,
    NO_SOURCE,
    LARGE,
    PROTECTION,
    TAKEOVER,
    REPLACEMENT,
    SECOND,
    GUARD_DEATH,
    HUNG,
    DIGEST,
    CLAIM,
    BOTH_DIE,
    TIERS,
    SERVED,
    RECOVERY,
    COST,
];

/// Arms of thousands of tokens. Where a row does not name them they are left out: what they have
/// beside the shorter ones is their length.
const LONG: [&str; 2] = [NO_SOURCE, LARGE];
/// Arms that repeat what others do once, to measure it. They run where a row names them.
const MEASURED: [&str; 2] = [TIERS, SERVED];

/// An arm that goes red, and how.
type Red = (&'static str, Class, &'static str);

/// One fault.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Row {
    /// `corrupt_block@worker0`, or empty for the row without a fault.
    pub(crate) switches: &'static str,
    /// Configuration beside it.
    pub(crate) flags: &'static [&'static str],
    /// Whether the stack is honest for one run first, and told to lie then.
    pub(crate) live: bool,
    /// Cases that run, where not all do.
    only: &'static [&'static str],
    /// Whether the second of two runs on one stack is judged.
    pub(crate) again: bool,
    /// The arms that go red.
    red: &'static [Red],
    /// What every arm says that `red` does not name.
    rest: Option<(Class, &'static str)>,
    /// What the program must print.
    pub(crate) prints: &'static str,
    /// What the supervisor must write down.
    pub(crate) logs: &'static str,
    /// Why no arm sees it, where none does.
    unseen: &'static str,
}

impl Row {
    pub(crate) fn name(&self) -> String {
        match (self.switches, self.flags) {
            ("", []) => "no_fault".to_owned(),
            ("", flags) => format!("no_fault {}", flags.join(" ")),
            (switches, DISAGG) => format!("{switches} disagg"),
            (switches, _) => switches.to_owned(),
        }
    }

    /// Whether a stack of this row can tell `arm`.
    fn tells(&self, arm: &str) -> bool {
        let all = PHASE1.iter().flat_map(|case| case.arms);
        let wants = all
            .filter(|known| known.name == arm)
            .map(|known| known.wants);
        let guarded = self.flags.contains(&"--guard");
        wants.into_iter().any(|wants| match wants {
            Wants::Any => true,
            Wants::Guards | Wants::OwnServices => guarded,
            Wants::Hints => true,
            Wants::DenseHints => self.flags != HYBRID,
            Wants::StaleHints => !guarded && self.flags != HYBRID,
            Wants::States => self.flags == HYBRID,
        })
    }

    /// A cell for each arm.
    pub(crate) fn cells(&self) -> [Cell; ARMS.len()] {
        ARMS.map(|arm| {
            let runs = |filter: &&str| arm.starts_with(filter);
            if !self.only.is_empty() && !self.only.iter().any(runs) || !self.tells(arm) {
                return Cell::NotRun;
            }
            let named = self.red.iter().copied().find(|(red, ..)| *red == arm);
            let untouched = named.is_none() && self.rest.is_none();
            let left_out =
                untouched && LONG.contains(&arm) || named.is_none() && MEASURED.contains(&arm);
            if left_out && !self.switches.is_empty() {
                return Cell::NotRun;
            }
            match (named, self.rest) {
                (Some((_, class, check)), _) | (None, Some((class, check))) => {
                    Cell::Red(class, check)
                }
                (None, None) => Cell::Pass,
            }
        })
    }

    /// The arms that run.
    pub(crate) fn arms(&self) -> impl Iterator<Item = &'static str> + use<> {
        let cells = ARMS.into_iter().zip(self.cells());
        cells
            .filter(|(_, cell)| *cell != Cell::NotRun)
            .map(|(arm, _)| arm)
    }

    const fn with(mut self, flags: &'static [&'static str]) -> Self {
        self.flags = flags;
        self
    }

    const fn live(mut self) -> Self {
        self.live = true;
        self
    }

    const fn only(mut self, cases: &'static [&'static str]) -> Self {
        self.only = cases;
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

const fn row(switches: &'static str, red: &'static [Red]) -> Row {
    Row {
        switches,
        flags: &[],
        live: false,
        only: &[],
        again: false,
        red,
        rest: None,
        prints: "",
        logs: "",
        unseen: "",
    }
}

/// Every arm goes red in the same way.
const fn every(switches: &'static str, class: Class, check: &'static str) -> Row {
    every_but(switches, class, check, &[])
}

/// The same but for those named.
const fn every_but(
    switches: &'static str,
    class: Class,
    check: &'static str,
    red: &'static [Red],
) -> Row {
    Row {
        rest: Some((class, check)),
        ..row(switches, red)
    }
}

/// Nothing that the cases of today claim is touched by it.
const fn unseen(switches: &'static str, why: &'static str) -> Row {
    Row {
        unseen: why,
        ..row(switches, &[])
    }
}

/// What an arm fails that something ended early.
const ENDED: &str = "ran_to_its_end";

/// The text is wrong where KVCR's own tier gave blocks.
const OWN_TIER_TEXT: &[Red] = &[
    (WARM_TIER, Product, "tokens_equal_reference[warm]"),
    (FULL, Product, "tokens_equal_reference[load]"),
    (PREFIX, Product, "tokens_equal_reference[one_short]"),
    (TIERS, Product, "tokens_equal_reference[round0.local]"),
];
/// KVCR's own tier gives less than the reference could reuse.
const OWN_TIER_HIT: &[Red] = &[
    (WARM_TIER, Product, "hit_as_reference_reuses[warm]"),
    (FULL, Product, "hit_as_reference_reuses[load]"),
    (PREFIX, Product, "hit_as_reference_reuses[one_short]"),
    (TIERS, Product, "hit_as_reference_reuses[round0.local]"),
];
/// A hit is not the one that the reference reuses, wherever there is one.
const EVERY_HIT: &[Red] = &[
    (WARM_DEVICE, Product, "hit_as_reference_reuses[warm]"),
    (WARM_TIER, Product, "hit_as_reference_reuses[warm]"),
    (BOUNDARY, Product, "cached_tokens[one_short.warm]"),
    (FULL, Product, "hit_as_reference_reuses[load]"),
    (PREFIX, Product, "hit_as_reference_reuses[one_short]"),
    (HINTED, Product, "hit_as_reference_reuses[hinted]"),
    (SHARED, Product, "hit_as_reference_reuses[one_short]"),
    (BOTH, Product, "hit_as_reference_reuses[of_worker0]"),
    (CONCURRENT, Product, "hit_as_reference_reuses[hinted0]"),
    (TWICE, Product, "hit_as_reference_reuses[one]"),
    (NO_SOURCE, Product, "hit_as_reference_reuses[kept]"),
    (LARGE, Product, "hit_as_reference_reuses[asked]"),
];
/// The text is wrong where a peer gave blocks.
const PEER_TEXT: &[Red] = &[
    (HINTED, Product, "tokens_equal_reference[hinted]"),
    (SHARED, Product, "tokens_equal_reference[one_short]"),
    (BOTH, Product, "tokens_equal_reference[of_worker0]"),
    (CONCURRENT, Product, "tokens_equal_reference[hinted0]"),
    (TWICE, Product, "tokens_equal_reference[one]"),
    (LARGE, Product, "tokens_equal_reference[asked]"),
    (TIERS, Product, "tokens_equal_reference[round0.peer]"),
];
/// The text is wrong wherever blocks are handed over.
const HANDED_OVER: &[Red] = &[
    (COLD, Product, "tokens_equal_reference[long]"),
    (WARM_DEVICE, Product, "tokens_equal_reference[cold]"),
    (WARM_TIER, Product, "tokens_equal_reference[cold]"),
    (HINTED, Product, "tokens_equal_reference[hinted]"),
];
/// Who was pinned did not prefill.
const DECODED_ALONE: &[Red] = &[
    (COLD, Product, "served_by_pinned_worker[long]"),
    (WARM_DEVICE, Product, "served_by_pinned_worker[cold]"),
    (WARM_TIER, Product, "served_by_pinned_worker[cold]"),
];
/// A peer gives nothing, and nothing is counted as failed.
const PEER_HIT: &[Red] = &[
    (HINTED, Product, "hit_as_reference_reuses[hinted]"),
    (SHARED, Product, "hit_as_reference_reuses[one_short]"),
    (BOTH, Product, "hit_as_reference_reuses[of_worker0]"),
    (CONCURRENT, Product, "hit_as_reference_reuses[hinted0]"),
    (TWICE, Product, "hit_as_reference_reuses[one]"),
    (NO_SOURCE, Inconclusive, "peer_was_asked"),
    (LARGE, Product, "hit_as_reference_reuses[asked]"),
    (TIERS, Product, "hit_as_reference_reuses[round0.peer]"),
];
/// A transfer that ended badly is counted by its target.
const TARGET_FAILED: &[Red] = &[
    (HINTED, Product, "no_failed_transfer[worker1.asked]"),
    (SHARED, Product, "no_failed_transfer[worker1.asked]"),
    (BOTH, Product, "no_failed_transfer[worker0.asked]"),
    (CONCURRENT, Product, "no_failed_transfer[worker1.asked]"),
    (TWICE, Product, "no_failed_transfer[worker1.asked]"),
    (NO_SOURCE, Product, "target_counts_that_nothing_came"),
    (LARGE, Product, "no_failed_transfer[worker1.asked]"),
];
/// And by its source.
const SOURCE_FAILED: &[Red] = &[
    (HINTED, Product, "no_failed_transfer[worker0.asked]"),
    (SHARED, Product, "no_failed_transfer[worker0.asked]"),
    (BOTH, Product, "no_failed_transfer[worker0.asked]"),
    (CONCURRENT, Product, "no_failed_transfer[worker0.asked]"),
    (TWICE, Product, "no_failed_transfer[worker0.asked]"),
    (NO_SOURCE, Product, "no_failed_transfer[worker1.asked]"),
    (LARGE, Product, "no_failed_transfer[worker0.asked]"),
];
/// A check of every arm's counters, at the worker that the arm asks last.
macro_rules! of_counters {
    ($class:expr, $check:literal) => {
        &[
            (COLD, $class, concat!($check, "[worker0.after]")),
            (WARM_DEVICE, $class, concat!($check, "[worker0.after]")),
            (WARM_TIER, $class, concat!($check, "[worker0.after]")),
            (BOUNDARY, $class, concat!($check, "[worker0.after]")),
            (FULL, $class, concat!($check, "[worker0.stored]")),
            (PREFIX, $class, concat!($check, "[worker0.loaded]")),
            (ABSENT, $class, concat!($check, "[worker0.asked]")),
            (HINTED, $class, concat!($check, "[worker1.asked]")),
            (SHARED, $class, concat!($check, "[worker1.asked]")),
            (BOTH, $class, concat!($check, "[worker0.asked]")),
            (CONCURRENT, $class, concat!($check, "[worker1.asked]")),
            (TWICE, $class, concat!($check, "[worker1.asked]")),
            (NO_SOURCE, $class, concat!($check, "[worker0.flooded]")),
            (LARGE, $class, concat!($check, "[worker1.asked]")),
        ]
    };
}
/// A check of every arm's first request.
macro_rules! of_requests {
    ($class:expr, $check:literal) => {
        &[
            (COLD, $class, concat!($check, "[short]")),
            (WARM_DEVICE, $class, concat!($check, "[cold]")),
            (WARM_TIER, $class, concat!($check, "[cold]")),
            (BOUNDARY, $class, concat!($check, "[one_short.cold]")),
            (FULL, $class, concat!($check, "[store]")),
            (PREFIX, $class, concat!($check, "[one_short.store]")),
            (ABSENT, $class, concat!($check, "[store]")),
            (HINTED, $class, concat!($check, "[seed]")),
            (SHARED, $class, concat!($check, "[one_short.seed]")),
            (BOTH, $class, concat!($check, "[of_worker0.seed]")),
            (CONCURRENT, $class, concat!($check, "[hinted0.seed]")),
            (TWICE, $class, concat!($check, "[seed]")),
            (NO_SOURCE, $class, concat!($check, "[seed]")),
            (LARGE, $class, concat!($check, "[seed]")),
        ]
    };
}
/// The source did not write what its target got.
const SOURCE_BLOCKS: &[Red] = &[
    (HINTED, Product, "blocks_to_peer[worker0]"),
    (SHARED, Product, "blocks_to_peer[worker0]"),
    (BOTH, Product, "blocks_to_peer[worker0]"),
    (CONCURRENT, Product, "blocks_to_peer[worker0]"),
    (TWICE, Product, "blocks_to_peer[worker0]"),
    (LARGE, Product, "blocks_to_peer[worker0]"),
    (TIERS, Product, "round0.blocks_to_peer[worker0]"),
];
/// Tokens of the prompt, by where they came from, are not what the arm claims.
const TOKENS_BY_SOURCE: &[Red] = &[
    (COLD, Product, "every_token_computed[worker0]"),
    (WARM_DEVICE, Product, "hit_in_device_cache"),
    (WARM_TIER, Product, "hit_outside_the_engine"),
    (FULL, Product, "tokens_computed[worker0]"),
    (PREFIX, Product, "tokens_computed[worker0]"),
    (ABSENT, Product, "tokens_computed[worker0]"),
    (HINTED, Product, "tokens_computed[worker1]"),
    (SHARED, Product, "tokens_computed[worker1]"),
    (BOTH, Product, "tokens_computed[worker0]"),
    (CONCURRENT, Product, "tokens_computed[worker1]"),
    (TWICE, Product, "tokens_computed[worker1]"),
    (NO_SOURCE, Product, "tokens_computed[worker0]"),
    (LARGE, Product, "tokens_computed[worker1]"),
    (TIERS, Product, "round0.tokens_computed[worker1]"),
];

/// Settings under which a lie is seen before a person loses patience.
const SHORT: &[&str] = &["--deadline=2"];
const SHORT_START: &[&str] = &["--bring-up=3"];
/// KVCR's tier holds all that several runs store.
const ROOMY: &[&str] = &["--dram-slots=4096"];
const BUT_NO_SOURCE: &[&str] = &[
    "tc01", "tc02", HINTED, SHARED, BOTH, CONCURRENT, TWICE, LARGE,
];
const GUARDED: &[&str] = &["--guard"];
/// Workers that prefill, and one that decodes.
const DISAGG: &[&str] = &["--topology=disagg"];
const DISAGG_GUARDED: &[&str] = &["--topology=disagg", "--guard", "--kills=1"];
/// An arm for each way in which a prompt's blocks come to who prefills it.
const EACH_WAY: &[&str] = &[COLD, WARM_DEVICE, WARM_TIER, HINTED];
/// A model with states; what one says of hits without states is nothing a dense one could.
const HYBRID: &[&str] = &["--profile=sim-hybrid"];
const WITH_STATES: &[&str] = &[SEED_PREFIX, SECTIONS, TURNS];
/// One kill says as much as five.
const ONE_KILL: &[&str] = &["--guard", "--kills=1"];
const TWO_KILLS: &[&str] = &["--guard", "--kills=2"];
/// One, where somebody waits for a takeover that does not come.
const IMPATIENT: &[&str] = &["--guard", "--kills=1", "--deadline=3"];
/// A takeover may take a second: what is late is seen by nothing but a budget.
const BUDGET: &[&str] = &["--guard", "--kills=1", "--budget-promotion-ms=1500"];
const HEARTBEAT: &[&str] = &["--guard", "--heartbeat-timeout-ms=1000"];
const HEARTBEAT_IMPATIENT: &[&str] = &["--guard", "--heartbeat-timeout-ms=1000", "--deadline=3"];
/// Cases that know nothing of Guards, and hold in front of one.
const WITHOUT_DEATHS: &[&str] = &["tc01", "tc02"];
/// One arm for each thing that a takeover can get wrong.
const DEATHS: &[&str] = &[PROTECTION, REPLACEMENT, RECOVERY];
/// The same, and times of what a Guard serves.
const SERVICE: &[&str] = &[PROTECTION, REPLACEMENT, RECOVERY, SERVED];
/// The only case that streams.
const STREAMS: &[&str] = &[TIERS];

include!("rows.rs");

pub(crate) fn every_fault_has_a_row() {
    let told: BTreeSet<&str> = ROWS
        .iter()
        .filter(|row| !row.switches.is_empty())
        .map(|row| {
            let switch: Switch = row.switches.parse().expect(row.switches);
            switch.fault.entry().name
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
        let named = row.red.iter().all(|(arm, ..)| ARMS.contains(arm));
        assert!(named, "{}: a cell of no arm", row.name());
        let seen = row.cells().iter().any(|cell| matches!(cell, Cell::Red(..)))
            || !row.prints.is_empty()
            || !row.logs.is_empty()
            || row.switches.is_empty();
        assert_eq!(seen, row.unseen.is_empty(), "{}", row.name());
    }
}
