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

/// A name with its labels, sorted by label name.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Series {
    name: String,
    labels: Vec<(String, String)>,
}

impl Series {
    /// A series; the order of `labels` does not matter.
    pub fn new(name: impl Into<String>, labels: &[(&str, &str)]) -> Self {
        let mut labels: Vec<_> = labels
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        labels.sort();
        Self {
            name: name.into(),
            labels,
        }
    }

    /// Its name: `vllm:kvcr_transfer_blocks_total`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its labels, by name.
    pub fn labels(&self) -> impl Iterator<Item = (&str, &str)> {
        self.labels.iter().map(|(k, v)| (k.as_str(), v.as_str()))
    }

    /// The value of one label.
    pub fn label(&self, key: &str) -> Option<&str> {
        self.labels().find(|(k, _)| *k == key).map(|(_, v)| v)
    }

    /// Whether it carries all of `labels`; others do not matter.
    pub fn has(&self, labels: &[(&str, &str)]) -> bool {
        labels.iter().all(|(k, v)| self.label(k) == Some(*v))
    }
}

impl fmt::Display for Series {
    /// As it stands on a page, escapes included.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        for (i, (key, value)) in self.labels().enumerate() {
            write!(f, "{}{key}=\"", if i == 0 { "{" } else { "," })?;
            for c in value.chars() {
                match c {
                    '\\' => f.write_str("\\\\")?,
                    '"' => f.write_str("\\\"")?,
                    '\n' => f.write_str("\\n")?,
                    c => write!(f, "{c}")?,
                }
            }
            f.write_str("\"")?;
        }
        if !self.labels.is_empty() {
            f.write_str("}")?;
        }
        Ok(())
    }
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

/// One scrape, parsed.
#[derive(Clone, Debug, Default)]
pub struct Page {
    kinds: BTreeMap<String, Kind>,
    /// One value for each series, except where the page repeats itself.
    samples: BTreeMap<Series, Vec<f64>>,
    problems: Vec<Problem>,
}

impl Page {
    /// Reads a whole page. Never fails: what could not be read is in [`Self::problems`].
    /// Timestamps and exemplars are accepted and dropped. Linear in the length of `text`.
    pub fn parse(text: &str) -> Self {
        let mut page = Self::default();
        let complete = text.is_empty() || text.ends_with('\n');
        let lines = text.lines().count();
        for (i, line) in text.lines().enumerate() {
            let number = i + 1;
            if !complete && number == lines {
                // `1` may be the beginning of `123`: a cut line is reported, not read.
                page.problem(number, Fault::Truncated, line);
                break;
            }
            let line = line.trim_matches([' ', '\t', '\r']);
            if line.is_empty() {
                continue;
            }
            if let Some(comment) = line.strip_prefix('#') {
                page.comment(comment);
                continue;
            }
            match sample(line) {
                Ok((series, value)) => {
                    let values = page.samples.entry(series).or_default();
                    values.push(value);
                    if values.len() > 1 {
                        page.problem(number, Fault::Duplicate, line);
                    }
                }
                Err(why) => page.problem(number, Fault::Malformed(why), line),
            }
        }
        page
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

    /// Every series with its value, or its values where the page repeats itself.
    pub fn samples(&self) -> impl Iterator<Item = (&Series, &[f64])> {
        self.samples.iter().map(|(s, v)| (s, v.as_slice()))
    }

    /// Values of exactly this series; empty if it is not on the page.
    pub fn values(&self, series: &Series) -> &[f64] {
        self.samples.get(series).map_or(&[], Vec::as_slice)
    }

    /// Series of one name.
    pub fn named(&self, name: &str) -> impl Iterator<Item = (&Series, &[f64])> {
        let first = Series::new(name, &[]);
        self.samples
            .range(first..)
            .take_while({
                let name = name.to_owned();
                move |(series, _)| series.name == name
            })
            .map(|(s, v)| (s, v.as_slice()))
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
        let mut values: Vec<_> = self.samples.keys().filter_map(|s| s.label(key)).collect();
        values.sort_unstable();
        values.dedup();
        values
    }

    /// Declared family names.
    pub fn families(&self) -> impl Iterator<Item = &str> {
        self.kinds.keys().map(String::as_str)
    }
}

/// `name{label="value",…} value [timestamp] [# exemplar]`.
fn sample(line: &str) -> Result<(Series, f64), &'static str> {
    let mut at = Cursor { rest: line };
    let name = at.name().ok_or("no metric name")?.to_owned();
    let mut labels = Vec::new();
    at.blank();
    if at.eat('{') {
        loop {
            at.blank();
            if at.eat('}') {
                break;
            }
            let key = at.name().ok_or("no label name")?.to_owned();
            at.blank();
            if !at.eat('=') {
                return Err("no = after a label name");
            }
            at.blank();
            let value = at.quoted()?;
            labels.push((key, value));
            at.blank();
            if at.eat('}') {
                break;
            }
            if !at.eat(',') {
                return Err("neither , nor } after a label");
            }
        }
    }
    labels.sort();
    if labels.windows(2).any(|pair| pair[0].0 == pair[1].0) {
        return Err("a label twice in one series");
    }
    // An exemplar follows a lone `#`; labels, where a `#` may stand, are behind us.
    let tail = at.rest.split(" #").next().unwrap_or_default();
    let mut words = tail.split_ascii_whitespace();
    let value = words.next().ok_or("no value")?;
    // Rust reads every spelling that the format allows: NaN, +Inf, 1e-05.
    let value = value.parse::<f64>().map_err(|_| "value is not a number")?;
    match words.next().map(str::parse::<f64>) {
        None | Some(Ok(_)) => {}
        Some(Err(_)) => return Err("timestamp is not a number"),
    }
    if words.next().is_some() {
        return Err("words after the timestamp");
    }
    Ok((Series { name, labels }, value))
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn blank(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t']);
    }

    fn eat(&mut self, c: char) -> bool {
        match self.rest.strip_prefix(c) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let end = self
            .rest
            .find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'))
            .unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        self.rest = rest;
        Some(name)
    }

    fn quoted(&mut self) -> Result<String, &'static str> {
        if !self.eat('"') {
            return Err("label value is not quoted");
        }
        let mut value = String::new();
        let mut chars = self.rest.char_indices();
        while let Some((i, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &self.rest[i + 1..];
                    return Ok(value);
                }
                '\\' => match chars.next().map(|(_, c)| c) {
                    Some('n') => value.push('\n'),
                    Some(c @ ('\\' | '"')) => value.push(c),
                    _ => return Err("unknown escape in a label value"),
                },
                c => value.push(c),
            }
        }
        Err("label value has no end")
    }
}

#[cfg(test)]
mod handed;
#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value(page: &Page, name: &str, labels: &[(&str, &str)]) -> f64 {
        match page.read(name, labels) {
            Reading::Value(value) => value,
            other => panic!("{name}: {other:?}"),
        }
    }

    #[test]
    fn values_of_a_label_are_listed_once_and_in_order() {
        let page = Page::parse("a{l=\"y\"} 1\nb{l=\"x\"} 1\nb{l=\"y\"} 1\nc{m=\"z\"} 1\n");
        assert_eq!(page.label_values("l"), ["x", "y"]);
        assert!(page.label_values("n").is_empty());
    }

    #[test]
    fn a_problem_names_its_line() {
        let page = Page::parse("a 1\na 1\n");
        let problem = page.problems()[0].to_string();
        assert_eq!(problem, "line 2: the same series a second time: a 1");
    }

    #[test]
    fn every_kind_is_told_from_the_others() {
        let kinds = [
            ("counter", Kind::Counter),
            ("gauge", Kind::Gauge),
            ("histogram", Kind::Histogram),
            ("summary", Kind::Summary),
            ("unknown", Kind::Untyped),
        ];
        for (word, kind) in kinds {
            let page = Page::parse(&format!("# TYPE f {word}\n"));
            assert_eq!(page.kind("f"), Some(kind), "{word}");
        }
    }

    #[test]
    fn reads_what_the_format_allows() {
        let page = Page::parse(concat!(
            "# HELP a_total says \"quotes\" and \\n\n",
            "# TYPE a_total counter\n",
            "a_total{l=\"x\\\"y\\\\z\\nw\"} 1\n",
            "a_total{l=\"comma, and } brace # hash\" , } 2\n",
            "# a comment\n",
            "\n",
            "vllm:colon_total{e=\"0\"} 1.7960348847795017e+09\r\n",
            "  inf +Inf\n",
            "ninf -Inf\n",
            "stamped 5 1700000000123\n",
            "exemplar_total{a=\"b\"} 6 # {trace_id=\"x\"} 0.5 1.0\n",
            "small 1e-05\n",
        ));
        assert_eq!(page.problems(), []);
        assert_eq!(value(&page, "a_total", &[("l", "x\"y\\z\nw")]), 1.0);
        assert_eq!(value(&page, "a_total", &[]), 3.0);
        assert_eq!(
            value(&page, "vllm:colon_total", &[]),
            1_796_034_884.779_501_7
        );
        assert_eq!(page.values(&Series::new("inf", &[])), [f64::INFINITY]);
        assert_eq!(page.values(&Series::new("ninf", &[])), [f64::NEG_INFINITY]);
        assert_eq!(value(&page, "stamped", &[]), 5.0);
        assert_eq!(value(&page, "exemplar_total", &[("a", "b")]), 6.0);
        assert_eq!(value(&page, "small", &[]), 1e-5);
    }

    #[test]
    fn nothing_is_lost_in_silence() {
        for (line, fault) in [
            ("1name 2", "no metric name"),
            ("a", "no value"),
            ("a x", "value is not a number"),
            ("a 1 x", "timestamp is not a number"),
            ("a 1 2 3", "words after the timestamp"),
            ("a{b=\"c\" 1", "neither , nor } after a label"),
            ("a{b=\"c", "label value has no end"),
            ("a{b=c} 1", "label value is not quoted"),
            ("a{b=\"\\t\"} 1", "unknown escape in a label value"),
            ("a{b=\"1\",b=\"2\"} 1", "a label twice in one series"),
            ("a{b} 1", "no = after a label name"),
            ("a{} ", "no value"),
        ] {
            let page = Page::parse(&format!("{line}\n"));
            assert_eq!(page.samples().count(), 0, "{line}");
            assert_eq!(page.problems()[0].fault, Fault::Malformed(fault), "{line}");
            assert!(page.is_complete());
        }
    }

    #[test]
    fn duplicates_are_kept_and_reported_and_unreadable() {
        let page = Page::parse("a{x=\"1\"} 1\na{x=\"1\"} 2\n");
        assert_eq!(page.values(&Series::new("a", &[("x", "1")])), [1.0, 2.0]);
        assert_eq!(page.problems()[0].fault, Fault::Duplicate);
        assert!(matches!(page.read("a", &[]), Reading::Unusable(_)));
    }

    #[test]
    fn a_cut_line_is_reported_and_not_read() {
        let page = Page::parse("a 1\nb 12");
        assert!(!page.is_complete());
        assert_eq!(page.read("b", &[]), Reading::Absent);
        assert_eq!(page.read("a", &[]), Reading::Value(1.0));
    }

    #[test]
    fn declared_without_a_sample_is_silent_and_undeclared_is_absent() {
        let page = Page::parse("# TYPE d histogram\n# TYPE c_total counter\nc_total{x=\"1\"} 0\n");
        assert_eq!(page.read("d_count", &[]), Reading::Silent);
        assert_eq!(page.read("c_total", &[("x", "2")]), Reading::Silent);
        assert_eq!(page.read("c_total", &[("x", "1")]), Reading::Value(0.0));
        assert_eq!(page.read("e_total", &[]), Reading::Absent);
    }

    #[test]
    fn a_page_of_five_megabytes_is_read_completely() {
        let mut text = String::from("# TYPE m_total counter\n");
        let mut lines = 0_u32;
        while text.len() < 5 << 20 {
            text.push_str(&format!(
                "m_total{{engine=\"0\",worker=\"{lines}\"}} {lines}.0\n"
            ));
            lines += 1;
        }
        let page = Page::parse(&text);
        assert_eq!(page.problems(), []);
        assert_eq!(page.samples().count(), lines as usize);
    }

    proptest! {
        #[test]
        fn what_is_printed_is_read_back(
            name in "[a-zA-Z_:][a-zA-Z0-9_:]{0,20}",
            labels in proptest::collection::btree_map("[a-zA-Z_][a-zA-Z0-9_]{0,8}", any::<String>(), 0..4),
            value in any::<f64>(),
        ) {
            // Values never hold a bare carriage return or newline: the latter is escaped, and
            // `lines` takes the former only at the end of a line, where a digit stands.
            let labels: Vec<_> = labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            let series = Series::new(name, &labels);
            let page = Page::parse(&format!("{series} {value}\n"));
            prop_assert_eq!(page.problems(), &[]);
            let [read] = page.values(&series) else { panic!("{series} is not there") };
            prop_assert!(read.to_bits() == value.to_bits() || (read.is_nan() && value.is_nan()));
        }

        #[test]
        fn no_input_panics(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = Page::parse(&String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn nothing_that_looks_like_a_page_panics(text in "[a{}\",=\\\\n#\n 1+.eINaTYP_]{0,80}") {
            let _ = Page::parse(&text);
        }
    }
}
