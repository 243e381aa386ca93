//! The shape of a metrics page: its families, their labels, and the values of those labels whose
//! values are a closed set.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::telemetry::Page;
use crate::telemetry::page::Kind;

/// Labels whose values mean something by themselves. Others name a model, an instance, a bucket,
/// a setting.
const CLOSED: &[&str] = &[
    "event_type",
    "finished_reason",
    "operation",
    "resource",
    "result",
    "scope",
    "source",
    "stage",
    "state",
    "tier",
    "transfer_type",
    "worker_type",
];

/// Labels that Dynamo puts on everything, and how they are written as one.
const TOGETHER: &[(&str, &[&str])] = &[
    (
        "@endpoint",
        &[
            "dynamo_component",
            "dynamo_endpoint",
            "dynamo_namespace",
            "model",
            "model_name",
            "worker_id",
        ],
    ),
    (
        "@component",
        &["dynamo_component", "dynamo_namespace", "worker_id"],
    ),
];

/// One family. Written as one line: `counter+created {engine,tier} tier=0:primary | tier=1:kvcr`.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(into = "String", try_from = "String")]
pub struct Family {
    /// What it is declared as.
    pub kind: String,
    /// Whether a gauge says when each of its series began.
    pub created: bool,
    /// Names of its labels; none also where it has no series yet.
    pub labels: BTreeSet<String>,
    /// Which values of closed labels occur together: `result=success,scope=local_fill`.
    pub samples: BTreeSet<String>,
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let join = |set: &BTreeSet<String>, with: &str| {
            set.iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(with)
        };
        let created = if self.created { "+created" } else { "" };
        let labels = join(&together(&self.labels), ",");
        write!(f, "{}{created} {{{labels}}}", self.kind)?;
        if !self.samples.is_empty() {
            write!(f, " {}", join(&self.samples, " | "))?;
        }
        Ok(())
    }
}

fn together(labels: &BTreeSet<String>) -> BTreeSet<String> {
    let whole = |parts: &[&str]| parts.iter().all(|part| labels.contains(*part));
    let Some((name, parts)) = TOGETHER.iter().find(|(_, parts)| whole(parts)) else {
        return labels.clone();
    };
    let rest = labels
        .iter()
        .filter(|label| !parts.contains(&label.as_str()));
    rest.cloned().chain([(*name).to_owned()]).collect()
}

fn apart(mut labels: BTreeSet<String>) -> BTreeSet<String> {
    for (name, parts) in TOGETHER {
        if labels.remove(*name) {
            labels.extend(parts.iter().map(|part| (*part).to_owned()));
        }
    }
    labels
}

/// Not a line that [`Family`] writes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("not a family: {0}")]
pub struct NotAFamily(String);

impl FromStr for Family {
    type Err = NotAFamily;

    fn from_str(text: &str) -> Result<Self, NotAFamily> {
        let parts = text.split_once(" {").and_then(|(kind, rest)| {
            let (labels, samples) = rest.split_once('}')?;
            Some((kind, labels, samples.trim()))
        });
        let (kind, labels, samples) = parts.ok_or_else(|| NotAFamily(text.to_owned()))?;
        let set = |text: &str, by: &str| -> BTreeSet<String> {
            let parts = text.split(by).filter(|part| !part.is_empty());
            parts.map(str::to_owned).collect()
        };
        Ok(Self {
            kind: kind.strip_suffix("+created").unwrap_or(kind).to_owned(),
            created: kind.ends_with("+created"),
            labels: apart(set(labels, ",")),
            samples: set(samples, " | "),
        })
    }
}

impl From<Family> for String {
    fn from(family: Family) -> Self {
        family.to_string()
    }
}

impl TryFrom<String> for Family {
    type Error = NotAFamily;

    fn try_from(text: String) -> Result<Self, NotAFamily> {
        text.parse()
    }
}

/// The families of a page, by name. A family of `_created` gauges is part of the one it dates.
pub fn families(text: &str) -> BTreeMap<String, Family> {
    let page = Page::parse(text);
    let mut families: BTreeMap<String, Family> = page
        .families()
        .map(|name| {
            let kind = page.kind(name).map_or("untyped", word).to_owned();
            (
                name.to_owned(),
                Family {
                    kind,
                    ..Family::default()
                },
            )
        })
        .collect();
    for (series, _) in page.samples() {
        let name = family_of(&families, series.name()).to_owned();
        let family = families.entry(name).or_insert_with(|| Family {
            kind: "undeclared".to_owned(),
            ..Family::default()
        });
        let labels = series.labels().filter(|(label, _)| *label != "le");
        family
            .labels
            .extend(labels.map(|(label, _)| label.to_owned()));
        let closed: Vec<String> = series
            .labels()
            .filter(|(label, _)| CLOSED.contains(label))
            .map(|(label, value)| format!("{label}={value}"))
            .collect();
        if !closed.is_empty() {
            family.samples.insert(closed.join(","));
        }
    }
    fold_created(families)
}

fn word(kind: Kind) -> &'static str {
    match kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
        Kind::Summary => "summary",
        Kind::Untyped => "untyped",
    }
}

/// The declared family that a series belongs to, or its own name.
fn family_of<'a>(families: &'a BTreeMap<String, Family>, series: &'a str) -> &'a str {
    if families.contains_key(series) {
        return series;
    }
    ["_bucket", "_sum", "_count", "_total"]
        .iter()
        .filter_map(|suffix| series.strip_suffix(suffix))
        .find(|name| families.contains_key(*name))
        .unwrap_or(series)
}

fn fold_created(mut families: BTreeMap<String, Family>) -> BTreeMap<String, Family> {
    let dates: Vec<String> = families
        .keys()
        .filter(|name| name.ends_with("_created"))
        .cloned()
        .collect();
    for date in dates {
        let base = date.trim_end_matches("_created");
        let counted = format!("{base}_total");
        let owner = [base, counted.as_str()]
            .into_iter()
            .find(|name| families.contains_key(*name))
            .map(str::to_owned);
        if let Some(family) = owner.and_then(|name| families.get_mut(&name)) {
            family.created = true;
            families.remove(&date);
        }
    }
    families
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = r#"# TYPE vllm:kvcr_transfer_blocks_total counter
vllm:kvcr_transfer_blocks_total{engine="0",operation="local_fill"} 8
vllm:kvcr_transfer_blocks_total{engine="0",operation="remote_deliver"} 8
# TYPE vllm:kvcr_transfer_blocks_created gauge
vllm:kvcr_transfer_blocks_created{engine="0",operation="local_fill"} 1.7e9
# TYPE vllm:kvcr_duration_seconds histogram
vllm:kvcr_duration_seconds_bucket{le="+Inf",result="success",scope="local_fill"} 1
vllm:kvcr_duration_seconds_count{result="success",scope="local_fill"} 1
# TYPE silent counter
bare 1
"#;

    #[test]
    fn a_page_becomes_lines_that_say_what_matters() {
        let lines: Vec<String> = families(PAGE)
            .iter()
            .map(|(name, family)| format!("{name}: {family}"))
            .collect();
        assert_eq!(
            lines,
            [
                "bare: undeclared {}",
                "silent: counter {}",
                "vllm:kvcr_duration_seconds: histogram {result,scope} result=success,scope=local_fill",
                "vllm:kvcr_transfer_blocks_total: counter+created {engine,operation} operation=local_fill | operation=remote_deliver",
            ]
        );
    }

    #[test]
    fn a_line_reads_back() {
        for family in families(PAGE).into_values() {
            assert_eq!(family.to_string().parse(), Ok(family));
        }
        assert!("counter".parse::<Family>().is_err());
        let line = "gauge {@component,dp_rank}";
        let family: Family = line.parse().unwrap();
        assert_eq!(family.labels.len(), 4);
        assert_eq!(family.to_string(), line);
    }
}
