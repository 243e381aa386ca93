//! One line that is neither comment nor empty: what it says, or why it says nothing.
//!
//! Bytes are looked at, not characters: all that the format knows is ASCII.

use std::borrow::Cow;

use super::Series;

/// A name of a label, and its value with escapes undone.
type Label<'a> = (&'a str, Cow<'a, str>);

/// Reads lines of one page.
#[derive(Default)]
pub(super) struct Reader<'a> {
    /// Labels of the line that is being read; kept because growing it anew costs more than the
    /// rest of a line.
    labels: Vec<Label<'a>>,
}

impl<'a> Reader<'a> {
    /// `name{label="value",…} value [timestamp] [# exemplar]`.
    pub(super) fn sample(&mut self, line: &'a str) -> Result<(Series, f64), &'static str> {
        let mut at = Cursor { rest: line };
        let name = at.name().ok_or("no metric name")?;
        at.blank();
        self.labels.clear();
        if at.eat(b'{') {
            at.labels(&mut self.labels)?;
        }
        if !self.labels.is_sorted_by(|a, b| a.0 < b.0) {
            self.labels.sort_unstable();
            if self.labels.windows(2).any(|pair| pair[0].0 == pair[1].0) {
                return Err("a label twice in one series");
            }
        }
        let value = value(at.rest)?;
        Ok((Series::of_sorted(name, &self.labels), value))
    }
}

/// What follows the labels.
fn value(mut tail: &str) -> Result<f64, &'static str> {
    // An exemplar follows a lone `#`; labels, where a `#` may stand, are behind us.
    if tail.as_bytes().contains(&b'#') {
        tail = tail.split(" #").next().unwrap_or_default();
    }
    let mut words = tail.split_ascii_whitespace();
    let value = words.next().ok_or("no value")?;
    // Rust reads every spelling that the format allows: NaN, +Inf, 1e-05.
    let value = value.parse::<f64>().map_err(|_| "value is not a number")?;
    match words.next().map(str::parse::<f64>) {
        None | Some(Ok(_)) => {}
        Some(Err(_)) => return Err("timestamp is not a number"),
    }
    match words.next() {
        None => Ok(value),
        Some(_) => Err("words after the timestamp"),
    }
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn blank(&mut self) {
        self.rest = self.rest.trim_start_matches([' ', '\t']);
    }

    fn eat(&mut self, byte: u8) -> bool {
        let is_next = self.rest.as_bytes().first() == Some(&byte);
        if is_next {
            self.rest = &self.rest[1..];
        }
        is_next
    }

    fn name(&mut self) -> Option<&'a str> {
        let bytes = self.rest.as_bytes();
        let of_name = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b':');
        let end = bytes.iter().position(|byte| !of_name(byte));
        let (name, rest) = self.rest.split_at(end.unwrap_or(bytes.len()));
        if name.is_empty() || bytes[0].is_ascii_digit() {
            return None;
        }
        self.rest = rest;
        Some(name)
    }

    /// Labels until the brace that ends them.
    fn labels(&mut self, labels: &mut Vec<Label<'a>>) -> Result<(), &'static str> {
        loop {
            self.blank();
            if self.eat(b'}') {
                return Ok(());
            }
            let key = self.name().ok_or("no label name")?;
            self.blank();
            if !self.eat(b'=') {
                return Err("no = after a label name");
            }
            self.blank();
            labels.push((key, self.quoted()?));
            self.blank();
            if self.eat(b'}') {
                return Ok(());
            }
            if !self.eat(b',') {
                return Err("neither , nor } after a label");
            }
        }
    }

    /// A value in quotes; borrowed, unless there is an escape in it.
    fn quoted(&mut self) -> Result<Cow<'a, str>, &'static str> {
        if !self.eat(b'"') {
            return Err("label value is not quoted");
        }
        let mut value = Cow::Borrowed("");
        loop {
            let special = |byte| matches!(byte, b'"' | b'\\');
            let plain = self.rest.bytes().position(special);
            let (plain, rest) = self.rest.split_at(plain.ok_or("label value has no end")?);
            value += plain;
            self.rest = rest;
            if self.eat(b'"') {
                return Ok(value);
            }
            let escaped = match self.rest.as_bytes().get(1) {
                Some(b'n') => "\n",
                Some(b'\\') => "\\",
                Some(b'"') => "\"",
                _ => return Err("unknown escape in a label value"),
            };
            value += escaped;
            self.rest = &self.rest[2..];
        }
    }
}
