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
pub(crate) const ARMS: [&str; 4] = [
    "tc01::cold",
    "tc01::warm_device",
    "tc01::warm_tier",
    "tc01::boundary",
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
