//! The Prometheus text format as typed samples.
//!
//! Parsing only: what a series means is [`super::kvcr`]'s, what changed is [`super::delta`]'s.
//!
//! No crate does this for us. `prometheus-parse` 0.2.5, the usual choice, was tried on our pages
//! and silently drops every name with a colon (all of `vllm:…`), every label value with a `}`,
//! and any line it does not understand; it leaves escapes in place and needs seconds for 4 MB.
//! A harness that must tell *absent* from *zero* cannot lose lines in silence: here every line
//! is a sample, a declaration, a comment or a [`Problem`].

use std::collections::BTreeMap;
use std::fmt;

use super::Reading;
pub use series::Series;

mod line;
mod series;

/// What a `# TYPE` line says.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    /// Only ever rises within one process.
    Counter,
    /// Moves freely.
    Gauge,
    /// `_bucket`, `_sum` and `_count` series.
    Histogram,
    /// Quantiles, `_sum` and `_count` series.
    Summary,
    /// `untyped`, `unknown`, or a word we do not know.
    Untyped,
}

/// Why a line, or the page, is not what it should be.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Fault {
    /// A line that is neither sample, declaration nor comment.
    #[error("malformed: {0}")]
    Malformed(&'static str),
    /// The same series twice: both values are kept, and nothing can be read from it.
    #[error("the same series a second time")]
    Duplicate,
    /// The last line has no newline: the page was cut, and the value on it may be too.
    #[error("cut off: no newline at the end of the page")]
    Truncated,
}

/// One thing that is wrong with a page.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Problem {
    /// Line number, from 1.
    pub line: usize,
    /// What is wrong.
    pub fault: Fault,
    /// The line, cut to 200 characters.
    pub text: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}: {}: {}", self.line, self.fault, self.text)
    }
}

/// A line that was read.
struct Sample<'a> {
    series: Series,
    value: f64,
    /// The line's number, from 1.
    number: usize,
    line: &'a str,
}

/// One scrape, parsed.
#[derive(Clone, Debug, Default)]
pub struct Page {
    kinds: BTreeMap<String, Kind>,
    /// Every series once, in order, and where its values end in `values`.
    series: Vec<(Series, usize)>,
    /// One value for each series, except where the page repeats itself.
    values: Vec<f64>,
    problems: Vec<Problem>,
}

impl Page {
    /// Reads a whole page. Never fails: what could not be read is in [`Self::problems`].
    /// Timestamps and exemplars are accepted and dropped. Looks at `text` once.
    pub fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let mut reader = line::Reader::default();
        let mut samples = Vec::new();
        for (number, line) in (1..).zip(text.split_inclusive('\n')) {
            let Some(line) = line.strip_suffix('\n') else {
                // `1` may be the beginning of `123`: a cut line is reported, not read.
                page.problem(number, Fault::Truncated, line);
                break;
            };
            let line = line.trim_matches([' ', '\t', '\r']);
            if line.is_empty() {
                continue;
            }
            if let Some(comment) = line.strip_prefix('#') {
                page.comment(comment);
                continue;
            }
            match reader.sample(line) {
                Ok((series, value)) => samples.push(Sample {
                    series,
                    value,
                    number,
                    line,
                }),
                Err(why) => page.problem(number, Fault::Malformed(why), line),
            }
        }
        page.keep(samples);
        page
    }

    /// Puts samples in order, those of one series together as they came.
    fn keep(&mut self, mut samples: Vec<Sample<'_>>) {
        samples.sort_by(|a, b| a.series.cmp(&b.series));
        self.series.reserve_exact(samples.len());
        self.values.reserve_exact(samples.len());
        for sample in samples {
            self.values.push(sample.value);
            let end = self.values.len();
            match self.series.last_mut() {
                Some((series, ends)) if *series == sample.series => {
                    *ends = end;
                    self.problem(sample.number, Fault::Duplicate, sample.line);
                }
                _ => self.series.push((sample.series, end)),
            }
        }
        self.problems.sort_by_key(|problem| problem.line);
    }

    fn problem(&mut self, line: usize, fault: Fault, text: &str) {
        self.problems.push(Problem {
            line,
            fault,
            text: text.chars().take(200).collect(),
        });
    }

    fn comment(&mut self, comment: &str) {
        let mut words = comment.split_ascii_whitespace();
        // HELP says nothing that a program needs; any other comment is for people.
        if words.next() != Some("TYPE") {
            return;
        }
        if let (Some(name), Some(kind)) = (words.next(), words.next()) {
            let kind = match kind {
                "counter" => Kind::Counter,
                "gauge" => Kind::Gauge,
                "histogram" => Kind::Histogram,
                "summary" => Kind::Summary,
                _ => Kind::Untyped,
            };
            self.kinds.insert(name.to_owned(), kind);
        }
    }

    /// Everything that is wrong with the page.
    pub fn problems(&self) -> &[Problem] {
        &self.problems
    }

    /// Whether the page ends where a page ends.
    pub fn is_complete(&self) -> bool {
        !self.problems.iter().any(|p| p.fault == Fault::Truncated)
    }

    /// Every series with its value, or its values where the page repeats itself; in order.
    pub fn samples(&self) -> impl Iterator<Item = (&Series, &[f64])> {
        self.samples_from(0)
    }

    /// Values of exactly this series; empty if it is not on the page.
    pub fn values(&self, series: &Series) -> &[f64] {
        match self.series.binary_search_by(|(one, _)| one.cmp(series)) {
            Ok(at) => &self.values[self.begin(at)..self.series[at].1],
            Err(_) => &[],
        }
    }

    /// Series of one name.
    pub fn named(&self, name: &str) -> impl Iterator<Item = (&Series, &[f64])> {
        let first = self.series.partition_point(|(one, _)| one.name() < name);
        self.samples_from(first).take_while({
            let name = name.to_owned();
            move |(series, _)| series.name() == name
        })
    }

    fn samples_from(&self, first: usize) -> impl Iterator<Item = (&Series, &[f64])> {
        let mut from = self.begin(first);
        self.series[first..].iter().map(move |(series, to)| {
            let values = &self.values[from..*to];
            from = *to;
            (series, values)
        })
    }

    /// Where the values of the series at `at` begin.
    fn begin(&self, at: usize) -> usize {
        match at.checked_sub(1) {
            Some(before) => self.series[before].1,
            None => 0,
        }
    }

    /// The declared kind of the family that a sample of this name belongs to: the name itself,
    /// or a histogram's or summary's name without its suffix.
    pub fn kind(&self, name: &str) -> Option<Kind> {
        if let Some(kind) = self.kinds.get(name) {
            return Some(*kind);
        }
        let parts: [(&str, &[Kind]); 4] = [
            ("_bucket", &[Kind::Histogram]),
            ("_sum", &[Kind::Histogram, Kind::Summary]),
            ("_count", &[Kind::Histogram, Kind::Summary]),
            // OpenMetrics declares a counter without its suffix.
            ("_total", &[Kind::Counter]),
        ];
        parts.iter().find_map(|(suffix, kinds)| {
            let kind = self.kinds.get(name.strip_suffix(suffix)?)?;
            kinds.contains(kind).then_some(*kind)
        })
    }

    /// Whether series of this name only ever rise: by declaration, or by convention of the name
    /// where nothing is declared.
    pub fn is_cumulative(&self, name: &str) -> bool {
        match self.kind(name) {
            Some(Kind::Counter) => true,
            // A `_sum` may fall where negative values are observed.
            Some(Kind::Histogram | Kind::Summary) => {
                name.ends_with("_bucket") || name.ends_with("_count")
            }
            Some(Kind::Gauge) => false,
            Some(Kind::Untyped) | None => ["_total", "_count", "_bucket"]
                .iter()
                .any(|s| name.ends_with(s)),
        }
    }

    /// The sum over all series of this name that carry `labels`.
    pub fn read(&self, name: &str, labels: &[(&str, &str)]) -> Reading {
        self.read_where(name, |series| series.has(labels))
    }

    /// The sum over all series of this name that `matches`.
    pub fn read_where(&self, name: &str, matches: impl Fn(&Series) -> bool) -> Reading {
        let mut sum = None;
        for (series, values) in self.named(name).filter(|(s, _)| matches(s)) {
            match values {
                [value] => *sum.get_or_insert(0.0) += value,
                _ => return Reading::Unusable(format!("{series} stands on the page twice")),
            }
        }
        match sum {
            Some(value) => Reading::of(value),
            None if self.kind(name).is_some() => Reading::Silent,
            None => Reading::Absent,
        }
    }

    /// Every value that a label has anywhere on the page, sorted, each once.
    pub fn label_values(&self, key: &str) -> Vec<&str> {
        let mut values: Vec<_> = self
            .series
            .iter()
            .filter_map(|(s, _)| s.label(key))
            .collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// Declared family names.
    pub fn families(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod handed;
#[cfg(test)]
mod tests;
