//! What changed between two pages of one process.
//!
//! A delta answers three questions before it subtracts: is it the same process, is the series
//! there at all, and did it only rise. Where one of them is no, the answer is that, not a number.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::page::Kind;
use super::{Page, Reading, Series};

/// What happened to one cumulative series.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Change {
    /// On neither page.
    Absent,
    /// Only on the later page, with this value. Its implicit start is zero.
    Appeared(f64),
    /// Rose by this much.
    Increased(f64),
    /// Has the same value.
    Unchanged,
    /// Fell, which a counter does only when its process restarts.
    Decreased {
        /// Earlier value.
        from: f64,
        /// Later value.
        to: f64,
    },
    /// Only on the earlier page, which a counter does only when its process restarts.
    Vanished(f64),
    /// Not a finite number, or twice on a page.
    Unusable,
}

/// How a restart was noticed.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "by")]
pub enum Restart {
    /// `process_start_time_seconds` moved by more than a second.
    StartTime {
        /// Earlier start, seconds since the epoch.
        from: f64,
        /// Later start, seconds since the epoch.
        to: f64,
    },
    /// A series was created anew (its `_created` gauge moved).
    Recreated {
        /// The `_created` series.
        series: String,
    },
    /// A counter fell.
    Decreased {
        /// Which.
        series: String,
        /// Earlier value.
        from: f64,
        /// Later value.
        to: f64,
    },
    /// A counter is gone, as all are when a replacement registers under a new `worker_id`.
    Vanished {
        /// Which.
        series: String,
    },
}

impl fmt::Display for Restart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::StartTime { from, to } => {
                write!(f, "process_start_time_seconds went from {from} to {to}")
            }
            Self::Recreated { series } => write!(f, "{series} moved"),
            Self::Decreased { series, from, to } => write!(f, "{series} fell from {from} to {to}"),
            Self::Vanished { series } => write!(f, "{series} is gone"),
        }
    }
}

/// One quantity read from a delta or a page, with what is needed to explain it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Counted {
    /// What was asked for: `vllm:kvcr_transfer_blocks_total{operation="local_deliver"}`.
    pub series: String,
    /// What the page says.
    pub reading: Reading,
    /// Where it is not a value: what else is there under a similar name, at most five.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub similar: Vec<String>,
}

/// A delta as evidence keeps it.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    /// How a restart was noticed; no number below means anything then.
    pub restart: Option<Restart>,
    /// Counters that moved, by series. Histogram buckets are left out: their count is here.
    pub moved: BTreeMap<String, Change>,
}

/// The difference of two pages of one process.
#[derive(Clone, Debug)]
pub struct Delta {
    changes: BTreeMap<Series, Change>,
    restart: Option<Restart>,
    after: Page,
}

impl Delta {
    /// Compares an earlier page with a later one of the same URL.
    pub fn between(before: &Page, after: &Page) -> Self {
        // The later page knows more families; one that it no longer declares has to vanish.
        let cumulative = |name: &str| {
            after.is_cumulative(name) || (after.kind(name).is_none() && before.is_cumulative(name))
        };
        let mut changes = BTreeMap::new();
        for (series, old) in before.samples().filter(|(s, _)| cumulative(s.name())) {
            let change = match (old, after.values(series)) {
                ([old], []) => Change::Vanished(*old),
                ([old], [new]) => compare(*old, *new),
                _ => Change::Unusable,
            };
            changes.insert(series.clone(), change);
        }
        for (series, new) in after.samples().filter(|(s, _)| cumulative(s.name())) {
            changes.entry(series.clone()).or_insert_with(|| match new {
                [new] if new.is_finite() => Change::Appeared(*new),
                _ => Change::Unusable,
            });
        }
        let restart = start_time(before, after)
            .or_else(|| recreated(before, after))
            .or_else(|| fallen(&changes));
        Self {
            changes,
            restart,
            after: after.clone(),
        }
    }

    /// The process behind the pages is not the same one: no reading is a number then.
    pub fn restart(&self) -> Option<&Restart> {
        self.restart.as_ref()
    }

    /// The later page.
    pub fn after(&self) -> &Page {
        &self.after
    }

    /// What happened to exactly this series.
    pub fn change(&self, series: &Series) -> Change {
        self.changes.get(series).copied().unwrap_or(Change::Absent)
    }

    /// How much the counters of this name that carry `labels` rose, summed over their other
    /// labels (engine, model, worker).
    pub fn counter(&self, name: &str, labels: &[(&str, &str)]) -> Counted {
        self.counter_where(name, &Series::new(name, labels).to_string(), |series| {
            series.has(labels)
        })
    }

    /// The same for the series of this name that `matches`; `described` is how to call them.
    pub fn counter_where(
        &self,
        name: &str,
        described: &str,
        matches: impl Fn(&Series) -> bool,
    ) -> Counted {
        let reading = self.reading(name, matches);
        let similar = match reading {
            Reading::Absent | Reading::Silent => self.similar(name),
            _ => Vec::new(),
        };
        Counted {
            series: described.to_owned(),
            reading,
            similar,
        }
    }

    fn reading(&self, name: &str, matches: impl Fn(&Series) -> bool) -> Reading {
        if let Some(restart) = &self.restart {
            return Reading::Restarted(restart.to_string());
        }
        if self.after.kind(name) == Some(Kind::Gauge) {
            return Reading::Unusable(format!("{name} is a gauge: read it from a page"));
        }
        let mut sum = None;
        for (series, change) in self.named(name).filter(|(series, _)| matches(series)) {
            *sum.get_or_insert(0.0) += match change {
                Change::Appeared(by) | Change::Increased(by) => *by,
                Change::Unchanged => 0.0,
                // Fallen and vanished counters are restarts, which were answered above.
                _ => return Reading::Unusable(format!("{series} is repeated or not finite")),
            };
        }
        match sum {
            Some(sum) => Reading::of(sum),
            None if self.after.kind(name).is_some() => Reading::Silent,
            None => Reading::Absent,
        }
    }

    fn named(&self, name: &str) -> impl Iterator<Item = (&Series, &Change)> {
        self.changes
            .range(Series::new(name, &[])..)
            .take_while(move |(series, _)| series.name() == name)
    }

    /// What evidence keeps.
    pub fn record(&self) -> Record {
        Record {
            restart: self.restart.clone(),
            moved: self
                .moved()
                .filter(|(series, _)| !series.name().ends_with("_bucket"))
                .map(|(series, change)| (series.to_string(), change))
                .collect(),
        }
    }

    /// Every counter that moved, with how it moved.
    pub fn moved(&self) -> impl Iterator<Item = (&Series, Change)> {
        self.changes
            .iter()
            .filter(|(_, change)| match change {
                Change::Unchanged | Change::Absent => false,
                Change::Appeared(value) => *value != 0.0,
                _ => true,
            })
            .map(|(series, change)| (series, *change))
    }

    /// What is there under this or a similar name: series of the same name, else names that
    /// share most of their letters. At most five.
    fn similar(&self, name: &str) -> Vec<String> {
        let same: Vec<_> = self
            .named(name)
            .map(|(s, _)| s.to_string())
            .take(5)
            .collect();
        if !same.is_empty() {
            return same;
        }
        let mut close: Vec<_> = self
            .after
            .families()
            .filter(|other| *other != name)
            .map(|other| (strsim::normalized_levenshtein(name, other), other))
            .filter(|(closeness, _)| *closeness > 0.6)
            .collect();
        close.sort_by(|a, b| b.0.total_cmp(&a.0));
        close
            .into_iter()
            .take(5)
            .map(|(_, other)| other.to_owned())
            .collect()
    }
}

fn compare(old: f64, new: f64) -> Change {
    if !old.is_finite() || !new.is_finite() {
        Change::Unusable
    } else if new > old {
        Change::Increased(new - old)
    } else if new < old {
        Change::Decreased { from: old, to: new }
    } else {
        Change::Unchanged
    }
}

fn start_time(before: &Page, after: &Page) -> Option<Restart> {
    const NAME: &str = "process_start_time_seconds";
    let (Reading::Value(from), Reading::Value(to)) =
        (before.read(NAME, &[]), after.read(NAME, &[]))
    else {
        return None;
    };
    // Some clients compute it from the uptime each time, with jitter.
    ((to - from).abs() > 1.0).then_some(Restart::StartTime { from, to })
}

/// vLLM's pages have no start time behind Dynamo's port, but a `_created` gauge (seconds since
/// the epoch) beside every counter.
fn recreated(before: &Page, after: &Page) -> Option<Restart> {
    before
        .samples()
        .filter(|(series, _)| series.name().ends_with("_created"))
        .find(|(series, old)| {
            let new = after.values(series);
            !new.is_empty() && new != *old
        })
        .map(|(series, _)| Restart::Recreated {
            series: series.to_string(),
        })
}

fn fallen(changes: &BTreeMap<Series, Change>) -> Option<Restart> {
    changes.iter().find_map(|(series, change)| match change {
        Change::Decreased { from, to } => Some(Restart::Decreased {
            series: series.to_string(),
            from: *from,
            to: *to,
        }),
        Change::Vanished(_) => Some(Restart::Vanished {
            series: series.to_string(),
        }),
        _ => None,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const TYPES: &str = "# TYPE c_total counter\n# TYPE g gauge\n# TYPE h histogram\n";

    fn delta(before: &str, after: &str) -> Delta {
        Delta::between(
            &Page::parse(&format!("{TYPES}{before}")),
            &Page::parse(&format!("{TYPES}{after}")),
        )
    }

    #[test]
    fn a_counter_that_appears_must_be_a_number() {
        let d = delta("", "c_total NaN\n");
        assert_eq!(d.change(&Series::new("c_total", &[])), Change::Unusable);
        assert_eq!(d.after().read("c_total", &[]).counted(), None);
        let d = delta("", "c_total 4\n");
        assert_eq!(d.after().read("c_total", &[]), Reading::Value(4.0));
    }

    #[test]
    fn what_appears_has_moved_unless_it_is_zero() {
        let d = delta("", "c_total{op=\"a\"} 5\nc_total{op=\"b\"} 0\n");
        let moved: Vec<_> = d.moved().map(|(series, _)| series.label("op")).collect();
        assert_eq!(moved, [Some("a")]);
    }

    #[test]
    fn a_restart_says_what_was_seen() {
        let at = |from, to| {
            let page = |at| format!("# TYPE p gauge\nprocess_start_time_seconds {at}\n");
            delta(&page(from), &page(to)).restart().cloned()
        };
        // A second is within the jitter of a start time that is computed anew.
        assert_eq!(at("100", "101"), None);
        assert_eq!(
            at("100", "101.5").unwrap().to_string(),
            "process_start_time_seconds went from 100 to 101.5"
        );
        let fell = delta("c_total 5\n", "c_total 2\n");
        let text = fell.restart().unwrap().to_string();
        assert_eq!(text, "c_total fell from 5 to 2");
    }

    #[test]
    fn sums_over_the_labels_that_were_not_asked_for() {
        let d = delta(
            "c_total{op=\"a\",engine=\"0\"} 5\n",
            "c_total{op=\"a\",engine=\"0\"} 7\nc_total{op=\"a\",engine=\"1\"} 3\nc_total{op=\"b\"} 9\n",
        );
        assert_eq!(d.restart(), None);
        assert_eq!(
            d.counter("c_total", &[("op", "a")]).reading,
            Reading::Value(5.0)
        );
        assert_eq!(d.counter("c_total", &[]).reading, Reading::Value(14.0));
        let new = Series::new("c_total", &[("op", "b")]);
        assert_eq!(d.change(&new), Change::Appeared(9.0));
        assert_eq!(d.change(&Series::new("c_total", &[])), Change::Absent);
    }

    #[test]
    fn evidence_keeps_what_moved_and_can_be_read_back() {
        let d = delta(
            "c_total{op=\"a\"} 5\nc_total{op=\"b\"} 5\n",
            "c_total{op=\"a\"} 7\nc_total{op=\"b\"} 5\nh_bucket{le=\"1\"} 1\nh_count 1\n",
        );
        let record = d.record();
        let names: Vec<_> = record.moved.keys().map(String::as_str).collect();
        assert_eq!(names, ["c_total{op=\"a\"}", "h_count"]);
        let json = serde_json::to_string(&record).unwrap();
        assert_eq!(serde_json::from_str::<Record>(&json).unwrap(), record);
    }

    #[test]
    fn absent_silent_and_zero_are_three_things() {
        let d = delta("c_total{op=\"a\"} 5\n", "c_total{op=\"a\"} 5\n");
        assert_eq!(
            d.counter("c_total", &[("op", "a")]).reading,
            Reading::Value(0.0)
        );
        let silent = d.counter("c_total", &[("op", "b")]);
        assert_eq!(silent.reading, Reading::Silent);
        assert_eq!(silent.similar, ["c_total{op=\"a\"}"]);
        let absent = d.counter("cc_total", &[("op", "a")]);
        assert_eq!(absent.reading, Reading::Absent);
        assert_eq!(absent.similar, ["c_total"]);
        assert_eq!(d.counter("h_count", &[]).reading, Reading::Silent);
    }

    #[test]
    fn a_restart_is_never_subtracted_across() {
        let restarts = [
            ("c_total 5\n", "c_total 4\n"),
            (
                "c_total{worker_id=\"1\"} 5\n",
                "c_total{worker_id=\"2\"} 6\n",
            ),
            (
                "process_start_time_seconds 10\nc_total 5\n",
                "process_start_time_seconds 99\nc_total 6\n",
            ),
            ("c_created 10.5\nc_total 5\n", "c_created 99.5\nc_total 6\n"),
            ("h_count 5\n", "h_count 4\n"),
        ];
        for (before, after) in restarts {
            let d = delta(before, after);
            assert!(d.restart().is_some(), "{before}{after}");
            let reading = d.counter("c_total", &[]).reading;
            assert!(
                matches!(reading, Reading::Restarted(_)),
                "{before}{after}{reading:?}"
            );
        }
    }

    #[test]
    fn a_gauge_may_fall_and_a_start_time_may_jitter() {
        let d = delta(
            "g 5\nprocess_start_time_seconds 10.0\n",
            "g 4\nprocess_start_time_seconds 10.4\n",
        );
        assert_eq!(d.restart(), None);
        assert_eq!(d.moved().count(), 0);
    }

    #[test]
    fn a_family_that_appears_is_counted_and_a_gauge_is_refused() {
        let new = Page::parse("# TYPE seen counter\nseen 3\n");
        let d = Delta::between(&Page::default(), &new);
        assert_eq!(d.counter("seen", &[]).reading, Reading::Value(3.0));
        assert!(Delta::between(&new, &Page::default()).restart().is_some());
        let gauge = delta("g 5\n", "g 6\n").counter("g", &[]).reading;
        assert!(matches!(gauge, Reading::Unusable(_)), "{gauge}");
    }

    #[test]
    fn nan_and_repeated_series_are_unusable() {
        let nan = delta("c_total 5\n", "c_total NaN\n");
        assert!(matches!(
            nan.counter("c_total", &[]).reading,
            Reading::Unusable(_)
        ));
        let twice = delta("c_total 5\n", "c_total 6\nc_total 7\n");
        assert!(matches!(
            twice.counter("c_total", &[]).reading,
            Reading::Unusable(_)
        ));
    }

    proptest! {
        #[test]
        fn the_difference_is_what_was_added(start in 0_u32.., by in 0_u32..) {
            let end = u64::from(start) + u64::from(by);
            let d = delta(&format!("c_total {start}\n"), &format!("c_total {end}\n"));
            prop_assert_eq!(d.counter("c_total", &[]).reading.exact(), Some(u64::from(by)));
        }

        #[test]
        fn a_reading_is_never_negative(before in "c_total[ab]? -?[0-9]{1,3}\n", after in "c_total[ab]? -?[0-9]{1,3}\n") {
            let reading = delta(&before, &after).counter("c_total", &[]).reading;
            // A counter that starts below zero is for the invariants to report.
            if !after.contains('-') && let Reading::Value(value) = reading {
                prop_assert!(value >= 0.0);
            }
        }
    }
}
