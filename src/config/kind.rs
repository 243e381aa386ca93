//! What values look like: as TOML in a profile, and as text in a flag or variable.
//!
//! Both ways lead to the same [`toml::Value`], or to a sentence that says what was expected and
//! what was found. Whether values fit together is `check`'s.

use std::net::IpAddr;

use toml::Value;
use toml::de::DeValue;

use crate::known::Known;
use crate::sim::fault::Switch;

/// One hour: what `--keep 1` and `PHASE1_KEEP=1` mean.
const HOUR: i64 = 3600;

/// The longest time that can be asked for, in seconds. Nobody waits longer; clocks cannot count
/// everything that an integer can say.
pub(super) const YEAR: u64 = 366 * 24 * 3600;

/// The shape of a value.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    /// Any text.
    Text,
    /// One of these words.
    Choice(&'static [&'static str]),
    /// A whole number from 0 to `max`.
    Integer {
        /// The largest value.
        max: u64,
    },
    /// A duration in seconds; as text, `1` means an hour.
    Keep,
    /// A number with a point.
    Fraction,
    /// Yes or no.
    Switch,
    /// A path.
    Path,
    /// An IP address.
    Address,
    /// Device indices; as text, separated by commas.
    Indices,
    /// Words; as text, separated by commas.
    Names,
    /// Arguments; as text, split and unquoted as a shell would.
    Words,
    /// Variables with values; as text, `A=1 B='x y'`.
    Pairs,
    /// Faults of the simulated stack; as text, separated by commas or spaces.
    Faults,
    /// Known defects of the product; as text, separated by semicolons.
    Defects,
}

impl Kind {
    /// `an integer`, `one of cpu, cuda`, …
    pub(super) fn expected(&self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Choice(words) => format!("one of {}", words.join(", ")),
            Self::Integer { .. } | Self::Keep => "an integer".to_owned(),
            Self::Fraction => "a number".to_owned(),
            Self::Switch => "true or false".to_owned(),
            Self::Path => "a path".to_owned(),
            Self::Address => "an IP address".to_owned(),
            Self::Indices => "a list of integers".to_owned(),
            Self::Names | Self::Words => "a list of texts".to_owned(),
            Self::Pairs => "a table of texts".to_owned(),
            Self::Faults => "a list of faults (`kvcr-phase1 sim faults`)".to_owned(),
            Self::Defects => "a list of known defects".to_owned(),
        }
    }

    /// What follows the flag in `--help`.
    pub(super) fn placeholder(&self) -> &'static str {
        match self {
            Self::Text => "=TEXT",
            Self::Choice(_) => "=WORD",
            Self::Integer { .. } => "=N",
            Self::Keep => "=SECONDS",
            Self::Fraction => "=X",
            Self::Switch => "[=BOOL]",
            Self::Path => "=PATH",
            Self::Address => "=IP",
            Self::Indices => "=N,..",
            Self::Names => "=NAME,..",
            Self::Words => "=WORDS",
            Self::Pairs => "=K=V..",
            Self::Faults => "=FAULT,..",
            Self::Defects => "=TEXT;..",
        }
    }

    /// Reads the text of a flag or variable.
    pub(super) fn parse(&self, text: &str) -> Result<Value, String> {
        let found = || format!("expected {}, found {text:?}", self.expected());
        match self {
            Self::Text | Self::Path => Ok(Value::String(text.to_owned())),
            Self::Choice(_) | Self::Address => self.check_text(text),
            Self::Integer { max } => {
                integer(text.parse::<i128>().map_err(|_| found())?, *max).map(Value::Integer)
            }
            Self::Keep => {
                let seconds = integer(text.parse::<i128>().map_err(|_| found())?, YEAR)?;
                Ok(Value::Integer(if seconds == 1 { HOUR } else { seconds }))
            }
            Self::Fraction => text
                .parse::<f64>()
                .ok()
                .filter(|number| number.is_finite())
                .map(Value::Float)
                .ok_or_else(found),
            Self::Switch => match text {
                "true" | "1" | "yes" | "on" => Ok(Value::Boolean(true)),
                "false" | "0" | "no" | "off" => Ok(Value::Boolean(false)),
                _ => Err(found()),
            },
            Self::Indices => text
                .split(',')
                .map(|part| match part.trim().parse::<i128>() {
                    Ok(number) => integer(number, u64::from(u32::MAX)).map(Value::Integer),
                    Err(_) => Err(found()),
                })
                .collect::<Result<Vec<_>, _>>()
                .map(Value::Array),
            Self::Names => Ok(Value::Array(
                text.split(',')
                    .map(str::trim)
                    .filter(|part| !part.is_empty())
                    .map(|part| Value::String(part.to_owned()))
                    .collect(),
            )),
            Self::Words => Ok(Value::Array(
                words(text)?.into_iter().map(Value::String).collect(),
            )),
            Self::Pairs => words(text)?
                .into_iter()
                .map(|word| match word.split_once('=') {
                    Some((key, value)) if !key.is_empty() => {
                        Ok((key.to_owned(), Value::String(value.to_owned())))
                    }
                    _ => Err(format!("expected NAME=VALUE, found {word:?}")),
                })
                .collect::<Result<toml::Table, _>>()
                .map(Value::Table),
            Self::Faults => text
                .split([',', ' '])
                .filter(|part| !part.is_empty())
                .map(fault)
                .collect::<Result<_, _>>()
                .map(Value::Array),
            Self::Defects => text
                .split(';')
                .filter(|part| !part.trim().is_empty())
                .map(defect)
                .collect::<Result<_, _>>()
                .map(Value::Array),
        }
    }

    /// Reads a value of the profile.
    pub(super) fn accept(&self, value: &DeValue<'_>) -> Result<Value, String> {
        let found = || format!("expected {}, found {}", self.expected(), describe(value));
        match (self, value) {
            (Self::Text | Self::Path, DeValue::String(text)) => Ok(Value::String(text.to_string())),
            (Self::Choice(_) | Self::Address, DeValue::String(text)) => self.check_text(text),
            (Self::Integer { max }, DeValue::Integer(number)) => {
                let number = i128::from_str_radix(number.as_str(), number.radix());
                integer(number.map_err(|_| found())?, *max).map(Value::Integer)
            }
            (Self::Keep, DeValue::Integer(_)) => Self::Integer { max: YEAR }.accept(value),
            (Self::Fraction, DeValue::Float(number)) => {
                Self::Fraction.parse(number.as_str()).map_err(|_| found())
            }
            (Self::Fraction, DeValue::Integer(number)) => {
                let number = i128::from_str_radix(number.as_str(), number.radix());
                Ok(Value::Float(number.map_err(|_| found())? as f64))
            }
            (Self::Switch, DeValue::Boolean(yes)) => Ok(Value::Boolean(*yes)),
            (Self::Indices, DeValue::Array(items)) => {
                let index = Self::Integer {
                    max: u64::from(u32::MAX),
                };
                items
                    .iter()
                    .map(|item| index.accept(item.get_ref()))
                    .collect::<Result<_, _>>()
                    .map(Value::Array)
            }
            (Self::Faults | Self::Defects, DeValue::Array(items)) => items
                .iter()
                .map(|item| match (self, item.get_ref()) {
                    (Self::Faults, DeValue::String(text)) => fault(text),
                    (_, DeValue::String(text)) => defect(text),
                    _ => Err(found()),
                })
                .collect::<Result<_, _>>()
                .map(Value::Array),
            (Self::Names | Self::Words, DeValue::Array(items)) => items
                .iter()
                .map(|item| Self::Text.accept(item.get_ref()))
                .collect::<Result<_, _>>()
                .map(Value::Array),
            (Self::Pairs, DeValue::Table(items)) => items
                .iter()
                .map(|(key, item)| match Self::Text.accept(item.get_ref()) {
                    Ok(text) => Ok((key.get_ref().to_string(), text)),
                    Err(why) => Err(format!("{}: {why}", key.get_ref())),
                })
                .collect::<Result<_, _>>()
                .map(Value::Table),
            _ => Err(found()),
        }
    }

    fn check_text(&self, text: &str) -> Result<Value, String> {
        let good = match self {
            Self::Choice(words) => words.contains(&text),
            Self::Address => text.parse::<IpAddr>().is_ok(),
            _ => true,
        };
        if good {
            Ok(Value::String(text.to_owned()))
        } else {
            Err(format!("expected {}, found {text:?}", self.expected()))
        }
    }
}

fn fault(text: &str) -> Result<Value, String> {
    let switch: Switch = text.parse()?;
    Ok(Value::String(switch.to_string()))
}

fn defect(text: &str) -> Result<Value, String> {
    let known: Known = text.parse()?;
    // A semicolon would be two in a flag.
    match text.contains(';') {
        true => Err(format!("expected no semicolon, found {text:?}")),
        false => Ok(Value::String(known.to_string())),
    }
}

fn integer(number: i128, max: u64) -> Result<i64, String> {
    i64::try_from(number)
        .ok()
        .filter(|&number| (0..=i128::from(max)).contains(&i128::from(number)))
        .ok_or_else(|| format!("expected an integer from 0 to {max}, found {number}"))
}

fn words(text: &str) -> Result<Vec<String>, String> {
    shlex::split(text)
        .ok_or_else(|| format!("expected shell words, found a quote without an end in {text:?}"))
}

fn describe(value: &DeValue<'_>) -> String {
    match value {
        DeValue::String(text) => format!("the string {text:?}"),
        DeValue::Integer(number) => format!("the integer {number}"),
        DeValue::Float(number) => format!("the number {number}"),
        DeValue::Boolean(yes) => format!("{yes}"),
        DeValue::Datetime(_) => "a date".to_owned(),
        DeValue::Array(_) => "a list".to_owned(),
        DeValue::Table(_) => "a table".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BYTE: Kind = Kind::Integer { max: 255 };

    #[test]
    fn text_that_does_not_fit_says_what_would() {
        let cases: [(Kind, &str, &str); 10] = [
            (BYTE, "x", r#"expected an integer, found "x""#),
            (BYTE, "256", "expected an integer from 0 to 255, found 256"),
            (BYTE, "-1", "expected an integer from 0 to 255, found -1"),
            (
                Kind::Choice(&["a", "b"]),
                "c",
                r#"expected one of a, b, found "c""#,
            ),
            (
                Kind::Switch,
                "maybe",
                r#"expected true or false, found "maybe""#,
            ),
            (Kind::Fraction, "nan", r#"expected a number, found "nan""#),
            (
                Kind::Address,
                "host",
                r#"expected an IP address, found "host""#,
            ),
            (
                Kind::Words,
                "'",
                r#"expected shell words, found a quote without an end in "'""#,
            ),
            (Kind::Pairs, "A", r#"expected NAME=VALUE, found "A""#),
            (
                Kind::Faults,
                "swap_blocks,corupt_block",
                r#"no fault is called "corupt_block"; the nearest is corrupt_block"#,
            ),
        ];
        for (kind, text, message) in cases {
            assert_eq!(kind.parse(text).unwrap_err(), message);
        }
    }

    #[test]
    fn keep_one_is_an_hour_only_as_text() {
        assert_eq!(Kind::Keep.parse("1"), Ok(Value::Integer(3600)));
        assert_eq!(Kind::Keep.parse("2"), Ok(Value::Integer(2)));
        let document = toml::de::DeTable::parse("x = 1").unwrap();
        let value = document.get_ref().values().next().unwrap();
        assert_eq!(Kind::Keep.accept(value.get_ref()), Ok(Value::Integer(1)));
    }

    fn any_kind() -> impl Strategy<Value = Kind> {
        prop::sample::select(vec![
            Kind::Text,
            Kind::Choice(&["a", "b"]),
            BYTE,
            Kind::Keep,
            Kind::Fraction,
            Kind::Switch,
            Kind::Path,
            Kind::Address,
            Kind::Indices,
            Kind::Names,
            Kind::Words,
            Kind::Pairs,
            Kind::Faults,
            Kind::Defects,
        ])
    }

    proptest! {
        #[test]
        fn no_text_panics(kind in any_kind(), text in any::<String>()) {
            let _ = kind.parse(&text);
        }

        #[test]
        fn what_text_gives_the_profile_accepts(kind in any_kind(), text in "[0-9a-z.,= ]{0,12}") {
            if let Ok(value) = kind.parse(&text) {
                let line = format!("x = {}", toml::Value::to_string(&value));
                if let Ok(document) = toml::de::DeTable::parse(&line) {
                    let again = document.get_ref().values().next().unwrap();
                    prop_assert_eq!(kind.accept(again.get_ref()), Ok(value));
                }
            }
        }
    }
}
