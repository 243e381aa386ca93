//! What the front door counts, and the page it shows: families, labels and order are data
//! (`families.txt`), values are here. What is not modelled stays at the value in the table.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write as _;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// One family of the table.
struct Family {
    kind: &'static str,
    name: &'static str,
    help: &'static str,
    /// Appears with its first sample only.
    late: bool,
    /// There only where engines tell the router of their blocks themselves.
    direct: bool,
    /// Upper bounds of a histogram's buckets as they are written, without `+Inf`.
    bounds: Vec<(&'static str, f64)>,
    /// Labels and the value before anything was observed.
    series: Vec<(&'static str, &'static str)>,
}

static FAMILIES: LazyLock<Vec<Family>> = LazyLock::new(|| table(include_str!("families.txt")));

fn table(text: &'static str) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for line in text.lines() {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        if line.starts_with(['%', '?', '!']) {
            let mut words = line.splitn(4, ' ');
            let mark = words.next();
            let mut word = || words.next().unwrap_or_default();
            families.push(Family {
                late: mark == Some("?"),
                direct: mark == Some("!"),
                kind: word(),
                name: word(),
                help: word(),
                bounds: Vec::new(),
                series: Vec::new(),
            });
            continue;
        }
        let Some(family) = families.last_mut() else {
            continue;
        };
        if let Some(bounds) = line.strip_prefix("= ") {
            family.bounds = bounds
                .split(' ')
                .map(|bound| (bound, bound.parse().unwrap_or(f64::INFINITY)))
                .collect();
        } else {
            let (labels, value) = line.split_once(' ').unwrap_or((line, "0"));
            let labels = if labels == "-" { "" } else { labels };
            family.series.push((labels, value));
        }
    }
    families
}

/// A histogram's content.
#[derive(Clone, Debug, Default)]
struct Histogram {
    /// Not cumulated.
    buckets: Vec<u64>,
    sum: f64,
    count: u64,
}

#[derive(Debug, Default)]
struct Values {
    /// By family and labels.
    numbers: BTreeMap<(&'static str, String), f64>,
    histograms: BTreeMap<(&'static str, String), Histogram>,
    /// Models and workers that were asked something: their late families are there.
    touched: HashSet<String>,
}

/// Counters, gauges and histograms that move.
#[derive(Debug, Default)]
pub(super) struct Metrics {
    values: Mutex<Values>,
}

/// A listed model, for the page.
#[derive(Clone, Debug)]
pub(super) struct Scope {
    pub(super) namespace: String,
    pub(super) model: String,
    /// Instance id, and whether it only prefills.
    pub(super) workers: Vec<(u64, bool)>,
}

/// Who the front door is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Identity {
    /// Its own instance id.
    pub(super) id: u64,
    /// Its router's.
    pub(super) router: u64,
}

impl Metrics {
    fn lock(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Moves a counter or gauge.
    pub(super) fn add(&self, name: &'static str, labels: String, by: f64) {
        *self.lock().numbers.entry((name, labels)).or_default() += by;
    }

    /// Forgets what a gauge was set to, for everything that it varies over.
    pub(super) fn clear(&self, name: &str) {
        self.lock().numbers.retain(|(known, _), _| *known != name);
    }

    /// Sets a gauge.
    pub(super) fn set(&self, name: &'static str, labels: String, to: f64) {
        self.lock().numbers.insert((name, labels), to);
    }

    /// Observes values of a histogram.
    pub(super) fn observe(&self, name: &'static str, labels: String, observed: &[f64]) {
        let Some(family) = FAMILIES.iter().find(|family| family.name == name) else {
            return;
        };
        let mut values = self.lock();
        let histogram = values.histograms.entry((name, labels)).or_default();
        histogram.buckets.resize(family.bounds.len() + 1, 0);
        for value in observed {
            let at = family.bounds.partition_point(|(_, bound)| bound < value);
            histogram.buckets[at] += 1;
            histogram.sum += value;
            histogram.count += 1;
        }
    }

    /// From now on the late families of this model or worker are on the page.
    pub(super) fn touch(&self, what: &str) {
        let mut values = self.lock();
        if !values.touched.contains(what) {
            values.touched.insert(what.to_owned());
        }
    }

    /// The page in the text format; `direct`: no state agent stands between engines and router.
    pub(super) fn page(&self, identity: Identity, scopes: &[Scope], direct: bool) -> String {
        let values = self.lock();
        let mut page = String::with_capacity(1 << 17);
        for family in FAMILIES.iter().filter(|family| direct || !family.direct) {
            let mut labels = Vec::new();
            for (pattern, initial) in &family.series {
                for labels_of in expand(pattern, identity, scopes, family.late, &values.touched) {
                    labels.push((labels_of, *initial));
                }
            }
            // Label sets that only requests know: endpoints, statuses.
            let from = (family.name, String::new());
            let numbers = values.numbers.range(from.clone()..).map(|(key, _)| key);
            let histograms = values.histograms.range(from..).map(|(key, _)| key);
            let of_family = |(name, _): &&(&str, String)| *name == family.name;
            let own = numbers.take_while(of_family);
            for (_, seen) in own.chain(histograms.take_while(of_family)) {
                if !labels.iter().any(|(known, _)| known == seen) {
                    labels.push((seen.clone(), "0"));
                }
            }
            if labels.is_empty() {
                continue;
            }
            let _ = writeln!(page, "# HELP {} {}", family.name, family.help);
            let _ = writeln!(page, "# TYPE {} {}", family.name, family.kind);
            for (labels, initial) in labels {
                if family.kind == "histogram" {
                    histogram(&mut page, family, &labels, &values);
                } else {
                    let value = values.numbers.get(&(family.name, labels.clone()));
                    let value = value.map_or_else(|| initial.to_owned(), f64::to_string);
                    sample(&mut page, family.name, "", &labels, &value);
                }
            }
        }
        page
    }
}

fn sample(page: &mut String, name: &str, suffix: &str, labels: &str, value: &str) {
    let _ = if labels.is_empty() {
        writeln!(page, "{name}{suffix} {value}")
    } else {
        writeln!(page, "{name}{suffix}{{{labels}}} {value}")
    };
}

fn histogram(page: &mut String, family: &Family, labels: &str, values: &Values) {
    let content = values.histograms.get(&(family.name, labels.to_owned()));
    let content = content.cloned().unwrap_or_default();
    let comma = if labels.is_empty() { "" } else { "," };
    let mut below = 0;
    let bounds = family.bounds.iter().map(|(text, _)| *text);
    for (at, bound) in bounds.chain(["+Inf"]).enumerate() {
        below += content.buckets.get(at).copied().unwrap_or(0);
        let labels = format!("{labels}{comma}le=\"{bound}\"");
        sample(page, family.name, "_bucket", &labels, &below.to_string());
    }
    sample(page, family.name, "_sum", labels, &content.sum.to_string());
    sample(
        page,
        family.name,
        "_count",
        labels,
        &content.count.to_string(),
    );
}

/// A pattern's labels for everything that it varies over.
fn expand(
    pattern: &str,
    identity: Identity,
    scopes: &[Scope],
    late: bool,
    touched: &HashSet<String>,
) -> Vec<String> {
    let shown = |what: &str| !late || touched.contains(what);
    let fixed = pattern
        .replace("$id", &format!("{:x}", identity.id))
        .replace("$router", &identity.router.to_string());
    let mut all: Vec<String> = Vec::new();
    if !fixed.contains('$') {
        if !late || !touched.is_empty() {
            all.push(fixed);
        }
        return all;
    }
    for scope in scopes {
        let labels = fixed
            .replace("$ns", &scope.namespace)
            .replace("$model", &scope.model);
        if !labels.contains("$worker") {
            // Several models of a namespace share what has no model.
            if shown(&scope.model) && !all.contains(&labels) {
                all.push(labels);
            }
            continue;
        }
        for (worker, prefills) in &scope.workers {
            let worker = worker.to_string();
            if !shown(&worker) {
                continue;
            }
            let mut labels = labels.replace("$worker", &worker);
            if *prefills {
                labels = labels.replace("worker_type=\"decode\"", "worker_type=\"prefill\"");
            }
            all.push(labels);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDENTITY: Identity = Identity {
        id: 0xabc,
        router: 77,
    };

    fn scopes() -> Vec<Scope> {
        vec![Scope {
            namespace: "dynamo".into(),
            model: "tiny".into(),
            workers: vec![(u64::MAX, false), (5, true)],
        }]
    }

    #[test]
    fn the_table_is_whole() {
        assert!(FAMILIES.len() > 100);
        for family in FAMILIES.iter() {
            assert!(["counter", "gauge", "histogram"].contains(&family.kind));
            assert!(!family.help.is_empty(), "{}", family.name);
            assert_eq!(family.kind == "histogram", !family.bounds.is_empty());
        }
    }

    #[test]
    fn a_page_can_be_read_and_says_what_was_counted() {
        let metrics = Metrics::default();
        let quiet = metrics.page(IDENTITY, &scopes(), true);
        assert!(!quiet.contains("time_to_first_token_seconds_bucket{model"));
        assert!(quiet.contains(&format!("router_worker_id=\"{}\"", u64::MAX)));
        assert!(quiet.contains("worker_type=\"prefill\""));
        assert!(!quiet.contains('$'), "something was not filled in");
        metrics.touch("tiny");
        let labels = "model=\"tiny\"".to_owned();
        metrics.observe(
            "dynamo_frontend_time_to_first_token_seconds",
            labels.clone(),
            &[0.005, 0.0022, 1e9],
        );
        let requests = "dynamo_frontend_requests_total";
        metrics.add(requests, "endpoint=\"x\",model=\"tiny\"".into(), 2.0);
        let text = metrics.page(IDENTITY, &scopes(), true);
        for line in [
            "dynamo_frontend_time_to_first_token_seconds_bucket{model=\"tiny\",le=\"0.0022\"} 1",
            "dynamo_frontend_time_to_first_token_seconds_bucket{model=\"tiny\",le=\"0.01\"} 2",
            "dynamo_frontend_time_to_first_token_seconds_bucket{model=\"tiny\",le=\"+Inf\"} 3",
            "dynamo_frontend_requests_total{endpoint=\"x\",model=\"tiny\"} 2",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}");
        }
        let relayed = metrics.page(IDENTITY, &scopes(), false);
        assert!(text.contains("kv_zmq_ingress_sources{"));
        assert!(!relayed.contains("kv_zmq_ingress_sources{"));
        let page = crate::telemetry::Page::parse(&text);
        assert!(page.problems().is_empty() && page.is_complete());
    }
}
