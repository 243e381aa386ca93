//! The families of a worker's metrics page and the values of their series, rendered as the real
//! programs render them. Which event moves which series is [`super::meters`]'s.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

const TABLE: &str = include_str!("families.txt");

/// Labels that every engine series has.
const ENGINE: [&str; 7] = [
    "dynamo_component",
    "dynamo_endpoint",
    "dynamo_namespace",
    "engine",
    "model",
    "model_name",
    "worker_id",
];

/// Labels of a series, by name.
type Labels = Vec<(String, String)>;

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
}

#[derive(Debug)]
struct Family {
    kind: Kind,
    name: &'static str,
    help: &'static str,
    labels: Vec<&'static str>,
    buckets: Vec<(&'static str, f64)>,
    initial: Vec<(&'static str, f64)>,
}

#[derive(Clone, Debug)]
struct Sample {
    /// The labels that tell it from others of its family.
    own: Labels,
    /// All labels, sorted.
    all: Labels,
    /// Value, or sum of a histogram.
    value: f64,
    /// Observations up to each bucket.
    counts: Vec<u64>,
    /// Unix seconds.
    created: f64,
}

/// Who the page is of: values of the labels that do not change.
#[derive(Clone, Debug)]
pub struct Identity {
    /// `DYN_NAMESPACE`.
    pub namespace: String,
    /// Served model name.
    pub model: String,
    /// Instance id.
    pub instance: u64,
    /// Tokens of a block.
    pub block_tokens: u32,
    /// Bytes of a state page, where there are any.
    pub state_page: Option<usize>,
    /// Blocks of the device cache.
    pub device_blocks: usize,
}

/// Which families a worker has beside the engine's own.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Present {
    /// Those of the tiers behind the device.
    pub tiers: bool,
    /// Those of KVCR.
    pub kvcr: bool,
    /// Those of events that it publishes itself: a state agent counts its own.
    pub publisher: bool,
}

/// Every series of one worker.
#[derive(Debug)]
pub struct Registry {
    families: Vec<Family>,
    index: HashMap<&'static str, usize>,
    values: HashMap<&'static str, String>,
    samples: Mutex<Vec<Vec<Sample>>>,
    born: Instant,
}

fn now() -> f64 {
    // Only shown, never compared.
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}

/// `name="value",…` of our own table: no escapes in it.
fn own_labels(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.split("\",")
        .filter_map(|pair| pair.split_once("=\""))
        .map(|(name, value)| (name, value.trim_end_matches('"')))
}

fn families(present: Present) -> Vec<Family> {
    let mut families: Vec<Family> = Vec::new();
    for line in TABLE.lines() {
        let Some((first, rest)) = line.split_once(' ') else {
            continue;
        };
        let kind = match first {
            "counter" => Kind::Counter,
            "gauge" => Kind::Gauge,
            "histogram" => Kind::Histogram,
            mark => {
                let Some(family) = families.last_mut() else {
                    continue;
                };
                match mark {
                    "?" => family.help = rest,
                    "<" => {
                        let bounds = rest.split(' ');
                        family.buckets = bounds
                            .map(|text| (text, text.parse().unwrap_or(f64::INFINITY)))
                            .collect();
                    }
                    "=" => {
                        let (labels, value) = rest.rsplit_once(' ').unwrap_or(("", rest));
                        family.initial.push((labels, value.parse().unwrap_or(0.0)));
                    }
                    _ => {}
                }
                continue;
            }
        };
        let mut words = rest.split(' ');
        let name = words.next().unwrap_or_default();
        let mut labels = Vec::new();
        for word in words {
            match word {
                "@engine" => labels.extend(ENGINE),
                label => labels.push(label),
            }
        }
        families.push(Family {
            kind,
            name,
            help: "",
            labels,
            buckets: Vec::new(),
            initial: Vec::new(),
        });
    }
    families.retain(|family| {
        (present.tiers || !family.name.starts_with("vllm:kv_offload_"))
            && (present.kvcr || !family.name.starts_with("vllm:kvcr_"))
            && (present.publisher || !family.name.starts_with("dynamo_component_kv_publisher_"))
    });
    families
}

impl Family {
    /// The real engine's families also say when each series was created; the runtime's do not.
    fn python(&self) -> bool {
        self.name.starts_with("vllm:")
    }

    fn cumulative(&self) -> bool {
        self.kind != Kind::Gauge
    }

    fn created_name(&self) -> String {
        let base = match self.kind {
            Kind::Counter => self.name.strip_suffix("_total").unwrap_or(self.name),
            _ => self.name,
        };
        format!("{base}_created")
    }
}

impl Registry {
    /// The page before the first request.
    pub fn new(identity: &Identity, present: Present) -> Self {
        let families = families(present);
        let index = families
            .iter()
            .enumerate()
            .map(|(at, family)| (family.name, at))
            .collect();
        let blocks = identity.device_blocks;
        let tokens = blocks.saturating_mul(identity.block_tokens as usize);
        let block = identity.block_tokens.to_string();
        let none = || "None".to_owned();
        let [mode, state_block, state_page] = match identity.state_page {
            Some(bytes) => ["align".to_owned(), block.clone(), bytes.to_string()],
            None => ["none".to_owned(), none(), none()],
        };
        let values = [
            ("dynamo_component", "backend".to_owned()),
            ("dynamo_endpoint", "generate".to_owned()),
            ("dynamo_namespace", identity.namespace.clone()),
            ("engine", "0".to_owned()),
            ("model", identity.model.clone()),
            ("model_name", identity.model.clone()),
            ("worker_id", format!("{:x}", identity.instance)),
            ("dp_rank", "0".to_owned()),
            ("$query_source", query_source(identity.instance)),
            ("$block_tokens", block),
            ("$state_mode", mode),
            ("$state_block", state_block),
            ("$state_page", state_page),
            ("$device_blocks", blocks.to_string()),
            ("$device_tokens", tokens.to_string()),
        ]
        .into();
        let registry = Self {
            samples: Mutex::new(families.iter().map(|_| Vec::new()).collect()),
            families,
            index,
            values,
            born: Instant::now(),
        };
        registry.begin();
        registry.set("dynamo_component_total_blocks", &[], blocks as f64);
        registry
    }

    /// Makes the series that are there from the start.
    fn begin(&self) {
        let mut samples = self.lock();
        for (family, samples) in self.families.iter().zip(samples.iter_mut()) {
            for (labels, value) in &family.initial {
                let without: Vec<&str> = labels
                    .split(',')
                    .filter_map(|word| word.strip_prefix('!'))
                    .collect();
                let own: Vec<(&str, &str)> = own_labels(labels)
                    .map(|(name, value)| {
                        let known = self.values.get(value).map(String::as_str);
                        (name, known.unwrap_or(value))
                    })
                    .collect();
                let mut sample = self.sample(family, &own);
                sample
                    .all
                    .retain(|(name, _)| !without.contains(&name.as_str()));
                sample.value = *value;
                samples.push(sample);
            }
        }
    }

    fn sample(&self, family: &Family, own: &[(&str, &str)]) -> Sample {
        let mut all: Labels = family
            .labels
            .iter()
            .map(|label| {
                let said = own.iter().find(|(name, _)| name == label);
                let value = match said {
                    Some((_, value)) => (*value).to_owned(),
                    None => self.values.get(label).cloned().unwrap_or_default(),
                };
                ((*label).to_owned(), value)
            })
            .collect();
        all.sort();
        Sample {
            own: owned(own),
            all,
            value: 0.0,
            counts: vec![0; family.buckets.len()],
            created: now(),
        }
    }

    /// Does `change` to a series, which appears if it was not there. A family that this worker
    /// does not have is left out in silence: an engine without tiers counts none.
    fn change(&self, name: &str, own: &[(&str, &str)], change: impl FnOnce(&Family, &mut Sample)) {
        let Some(at) = self.index.get(name).copied() else {
            return;
        };
        let family = &self.families[at];
        let mut samples = self.lock();
        let samples = &mut samples[at];
        let found = samples.iter().position(|sample| same(&sample.own, own));
        let found = found.unwrap_or_else(|| {
            samples.push(self.sample(family, own));
            samples.len() - 1
        });
        change(family, &mut samples[found]);
    }

    /// Adds to a counter.
    pub fn add(&self, name: &str, own: &[(&str, &str)], by: f64) {
        self.change(name, own, |_, sample| sample.value += by);
    }

    /// Sets a gauge.
    pub fn set(&self, name: &str, own: &[(&str, &str)], to: f64) {
        self.change(name, own, |_, sample| sample.value = to);
    }

    /// Adds an observation to a histogram.
    pub fn observe(&self, name: &str, own: &[(&str, &str)], value: f64) {
        self.change(name, own, |family, sample| {
            sample.value += value;
            for (count, (_, bound)) in sample.counts.iter_mut().zip(&family.buckets) {
                *count += u64::from(value <= *bound);
            }
        });
    }

    /// Every counter begins again, as after a restart.
    pub fn restart(&self) {
        let mut samples = self.lock();
        for (family, samples) in self.families.iter().zip(samples.iter_mut()) {
            for sample in samples.iter_mut().filter(|_| family.cumulative()) {
                sample.value = 0.0;
                sample.counts.fill(0);
                sample.created = now();
            }
        }
    }

    /// The page.
    pub fn render(&self) -> String {
        self.set(
            "dynamo_component_uptime_seconds",
            &[],
            self.born.elapsed().as_secs_f64(),
        );
        let samples = self.lock();
        let mut page = String::with_capacity(1 << 18);
        for (family, samples) in self.families.iter().zip(samples.iter()) {
            render_family(&mut page, family, samples);
        }
        page
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Vec<Sample>>> {
        self.samples.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Name of the endpoint that a router asks for this worker's blocks.
pub fn query_source(instance: u64) -> String {
    // Its own id, as in the real worker: not the instance's.
    format!(
        "worker_kv_query_source_{:x}",
        instance.rotate_left(17) >> 12
    )
}

fn owned(labels: &[(&str, &str)]) -> Labels {
    labels
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect()
}

fn same(known: &Labels, asked: &[(&str, &str)]) -> bool {
    // What the table says of a label with one value (`dp_rank`) nobody has to repeat.
    let known = known.iter().filter(|(name, _)| name != "dp_rank");
    known.clone().count() == asked.len()
        && known
            .zip(asked)
            .all(|((name, value), (asked, wanted))| name == asked && value == wanted)
}

fn render_family(page: &mut String, family: &Family, samples: &[Sample]) {
    // The runtime's client leaves out a family without a series; the engine's declares it.
    if samples.is_empty() && !family.python() {
        return;
    }
    let kind = match family.kind {
        Kind::Counter => "counter",
        Kind::Gauge => "gauge",
        Kind::Histogram => "histogram",
    };
    header(page, family.name, family.help, kind);
    let plain = |value: f64| number(value, family.python());
    for sample in samples {
        if family.kind != Kind::Histogram {
            line(page, family.name, &sample.all, None, &plain(sample.value));
            continue;
        }
        let bucket = format!("{}_bucket", family.name);
        for (count, (bound, _)) in sample.counts.iter().zip(&family.buckets) {
            line(
                page,
                &bucket,
                &sample.all,
                Some(bound),
                &plain(*count as f64),
            );
        }
        let total = sample.counts.last().copied().unwrap_or(0);
        let (count, sum) = (
            format!("{}_count", family.name),
            format!("{}_sum", family.name),
        );
        line(page, &count, &sample.all, None, &plain(total as f64));
        line(page, &sum, &sample.all, None, &plain(sample.value));
    }
    if family.python() && family.cumulative() && !samples.is_empty() {
        let created = family.created_name();
        header(page, &created, family.help, "gauge");
        for sample in samples {
            line(page, &created, &sample.all, None, &plain(sample.created));
        }
    }
}

// Writing to a String cannot fail.
fn header(page: &mut String, name: &str, help: &str, kind: &str) {
    if !help.is_empty() {
        let _ = writeln!(page, "# HELP {name} {help}");
    }
    let _ = writeln!(page, "# TYPE {name} {kind}");
}

fn line(page: &mut String, name: &str, labels: &Labels, le: Option<&str>, value: &str) {
    page.push_str(name);
    let mut le = le.map(|bound| ("le", bound));
    let mut first = true;
    let mut label = |page: &mut String, name: &str, value: &str| {
        page.push(if first { '{' } else { ',' });
        first = false;
        let value = value
            .replace('\\', "\\\\")
            .replace('"', "\\\"")
            .replace('\n', "\\n");
        let _ = write!(page, "{name}=\"{value}\"");
    };
    for (name, value) in labels {
        if let Some((le_name, bound)) = le.take_if(|(le_name, _)| *le_name < name.as_str()) {
            label(page, le_name, bound);
        }
        label(page, name, value);
    }
    if let Some((name, bound)) = le {
        label(page, name, bound);
    }
    if !first {
        page.push('}');
    }
    let _ = writeln!(page, " {value}");
}

/// As the Python client writes floats (`2.097152e+06`), or as the Rust one does (`2`).
fn number(value: f64, python: bool) -> String {
    if !python {
        return format!("{value}");
    }
    if value.abs() < 1e6 {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    match text.split_once('e') {
        Some((mantissa, exponent)) if mantissa.contains('.') => {
            format!("{mantissa}e+{exponent:0>2}")
        }
        Some((mantissa, exponent)) => format!("{mantissa}.0e+{exponent:0>2}"),
        None => text,
    }
}

#[cfg(test)]
pub(super) mod tests;
