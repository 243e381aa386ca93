//! What a value is of: a name with its labels.

use std::fmt;

/// Between the parts of [`Series::text`]: before every other character, so that texts have the
/// order of names, then of labels.
const BETWEEN: char = '\0';

/// A name with its labels, sorted by label name.
///
/// Two allocations, however many labels: pages have tens of thousands of them.
// The derived order is that of `text`; `ends` tells apart what only a label value with a NUL in
// it makes look alike.
#[derive(Clone, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Series {
    /// The name, then each label's name and value, with a NUL between them.
    text: Box<str>,
    /// Where each of these ends in `text`.
    ends: Box<[usize]>,
}

impl Series {
    /// A series; the order of `labels` does not matter.
    pub fn new(name: impl AsRef<str>, labels: &[(&str, &str)]) -> Self {
        let mut labels = labels.to_vec();
        labels.sort_unstable();
        Self::of_sorted(name.as_ref(), &labels)
    }

    /// A series of labels that are sorted.
    pub(super) fn of_sorted<V: AsRef<str>>(name: &str, labels: &[(&str, V)]) -> Self {
        let of_labels = |(key, value): &(&str, V)| key.len() + value.as_ref().len() + 2;
        let length = name.len() + labels.iter().map(of_labels).sum::<usize>();
        let mut text = String::with_capacity(length);
        let mut ends = Vec::with_capacity(1 + 2 * labels.len());
        text.push_str(name);
        ends.push(text.len());
        for (key, value) in labels {
            for part in [key, value.as_ref()] {
                text.push(BETWEEN);
                text.push_str(part);
                ends.push(text.len());
            }
        }
        Self {
            text: text.into_boxed_str(),
            ends: ends.into_boxed_slice(),
        }
    }

    /// Its name: `vllm:kvcr_transfer_blocks_total`.
    pub fn name(&self) -> &str {
        &self.text[..self.ends[0]]
    }

    /// Its labels, by name.
    pub fn labels(&self) -> impl Iterator<Item = (&str, &str)> {
        let part = |from: usize, to: usize| &self.text[from + BETWEEN.len_utf8()..to];
        let mut from = self.ends[0];
        self.ends[1..].chunks_exact(2).map(move |ends| {
            let label = (part(from, ends[0]), part(ends[0], ends[1]));
            from = ends[1];
            label
        })
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
        f.write_str(self.name())?;
        let mut before = "{";
        for (key, value) in self.labels() {
            write!(f, "{before}{key}=\"")?;
            for c in value.chars() {
                match c {
                    '\\' => f.write_str("\\\\")?,
                    '"' => f.write_str("\\\"")?,
                    '\n' => f.write_str("\\n")?,
                    c => write!(f, "{c}")?,
                }
            }
            f.write_str("\"")?;
            before = ",";
        }
        match before {
            "{" => Ok(()),
            _ => f.write_str("}"),
        }
    }
}

impl fmt::Debug for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Few characters, so that parts are often alike or begin alike.
    fn parts() -> impl Strategy<Value = (String, Vec<(String, String)>)> {
        let label = ("[ab]{0,2}", "[a\0\u{1F980}]{0,3}");
        ("[ab:]{0,3}", proptest::collection::vec(label, 0..3))
    }

    fn series((name, labels): &(String, Vec<(String, String)>)) -> Series {
        let labels: Vec<_> = labels
            .iter()
            .map(|(key, value)| (key.as_str(), value.as_str()))
            .collect();
        Series::new(name, &labels)
    }

    proptest! {
        #[test]
        fn what_went_in_comes_out_sorted(mut parts in parts()) {
            let series = series(&parts);
            parts.1.sort();
            prop_assert_eq!(series.name(), parts.0);
            let labels = parts.1.iter().map(|(key, value)| (key.as_str(), value.as_str()));
            prop_assert!(series.labels().eq(labels));
        }

        #[test]
        fn series_are_the_same_where_their_parts_are(mut a in parts(), mut b in parts()) {
            let (one, other) = (series(&a), series(&b));
            a.1.sort();
            b.1.sort();
            prop_assert_eq!(one == other, a == b);
            // Names come first, and without NULs in values so do labels.
            if a.0 != b.0 {
                prop_assert_eq!(one.cmp(&other), a.0.cmp(&b.0));
            } else if !format!("{a:?}{b:?}").contains("\\0") {
                prop_assert_eq!(one.cmp(&other), a.cmp(&b));
            }
        }
    }
}
