//! Our flags, pulled out of an argument list that also has others' flags in it.
//!
//! The test binary shares its command line with libtest's flags, which libtest-mimic parses. It
//! would reject ours, and we must not guess what its flags mean, so both sets are known by name
//! here: what is in neither is a usage error that names the nearest of either.

use std::ffi::OsString;

use super::UsageError;
use super::fields::{self, FIELDS, Field};
use super::kind::Kind;

/// A flag of someone else that is passed on.
#[derive(Clone, Copy, Debug)]
pub struct Foreign {
    /// As it is written, with dashes.
    pub flag: &'static str,
    /// Whether the next argument is its value.
    pub takes_value: bool,
}

const fn switch(flag: &'static str) -> Foreign {
    Foreign {
        flag,
        takes_value: false,
    }
}

const fn option(flag: &'static str) -> Foreign {
    Foreign {
        flag,
        takes_value: true,
    }
}

/// What libtest-mimic understands.
pub const LIBTEST: &[Foreign] = &[
    switch("--include-ignored"),
    switch("--ignored"),
    switch("--test"),
    switch("--bench"),
    switch("--list"),
    switch("--nocapture"),
    switch("--show-output"),
    switch("--exact"),
    switch("--quiet"),
    switch("-q"),
    switch("--help"),
    switch("-h"),
    option("--test-threads"),
    option("--logfile"),
    option("--skip"),
    option("--color"),
    option("--format"),
    option("-Z"),
];

/// Flags of ours, as they were given.
#[derive(Clone, Debug, Default)]
pub struct OwnArgs {
    pub(super) given: Vec<(&'static Field, String)>,
}

/// Pulls our flags out of the arguments of the test binary; the rest is for libtest-mimic.
pub fn split_args(
    args: impl Iterator<Item = OsString>,
) -> Result<(OwnArgs, Vec<OsString>), UsageError> {
    split_args_among(args, LIBTEST)
}

/// Pulls our flags out of `args`; flags in `foreign` and everything that is no flag is the rest.
///
/// `--x v` and `--x=v` mean the same. A switch takes its value after `=`, or from a next argument
/// that is exactly `true` or `false`. After `--` nothing is ours.
pub fn split_args_among(
    args: impl Iterator<Item = OsString>,
    foreign: &[Foreign],
) -> Result<(OwnArgs, Vec<OsString>), UsageError> {
    let mut own = OwnArgs::default();
    let mut rest = Vec::new();
    let mut problems = Vec::new();
    let mut args = args.peekable();
    while let Some(arg) = args.next() {
        let Some(text) = arg.to_str() else {
            if arg.as_encoded_bytes().starts_with(b"-") {
                problems.push(format!("{arg:?} is not valid UTF-8"));
            }
            rest.push(arg);
            continue;
        };
        if text == "--" {
            rest.push(arg);
            rest.extend(args);
            break;
        }
        if !text.starts_with('-') || text == "-" {
            rest.push(arg);
            continue;
        }
        let (flag, inline) = match text.split_once('=') {
            Some((flag, value)) => (flag, Some(value.to_owned())),
            None => (text, None),
        };
        let field = flag.strip_prefix("--").and_then(fields::by_flag);
        if let Some(field) = field {
            let value = match inline {
                Some(value) => Ok(value),
                None if field.kind == Kind::Switch => Ok(args
                    .next_if(|next| next == "true" || next == "false")
                    .map_or("true".to_owned(), |next| next.to_string_lossy().into())),
                None => value_of(flag, &mut args),
            };
            match value {
                Ok(_) if own.given.iter().any(|(other, _)| other.flag == field.flag) => {
                    problems.push(format!("{flag}: given twice"));
                }
                Ok(value) => own.given.push((field, value)),
                Err(problem) => problems.push(problem),
            }
        } else if let Some(known) = foreign.iter().find(|known| passes(known, flag)) {
            // `-Zunstable-options` and `--format=terse` bring their value along.
            let wants_value = known.takes_value && inline.is_none() && flag == known.flag;
            rest.push(arg);
            if wants_value {
                rest.extend(args.next());
            }
        } else {
            let ours = FIELDS.iter().map(|field| format!("--{}", field.flag));
            let theirs = foreign.iter().map(|known| known.flag.to_owned());
            let all: Vec<String> = ours.chain(theirs).collect();
            let nearest = fields::nearest(flag, &all).map_or("", String::as_str);
            problems.push(format!(
                "{flag}: no such flag; the nearest is {nearest} (--help lists them)"
            ));
        }
    }
    if problems.is_empty() {
        Ok((own, rest))
    } else {
        Err(UsageError::join(&problems))
    }
}

fn passes(known: &Foreign, flag: &str) -> bool {
    let short = known.takes_value && !known.flag.starts_with("--");
    flag == known.flag || (short && flag.starts_with(known.flag))
}

fn value_of(
    flag: &str,
    args: &mut std::iter::Peekable<impl Iterator<Item = OsString>>,
) -> Result<String, String> {
    let is_flag = |next: &OsString| next.as_encoded_bytes().starts_with(b"--");
    match args.next_if(|next| !is_flag(next)) {
        Some(value) => value
            .into_string()
            .map_err(|value| format!("{flag}: {value:?} is not valid UTF-8")),
        None => match args.peek() {
            Some(next) => Err(format!(
                "{flag}: needs a value, found {}; a value that begins with dashes is written {flag}=VALUE",
                next.to_string_lossy()
            )),
            None => Err(format!("{flag}: needs a value")),
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    type Split = (Vec<(&'static str, String)>, Vec<String>);

    fn split(args: &[&str]) -> Result<Split, String> {
        match split_args(args.iter().map(OsString::from)) {
            Ok((own, rest)) => Ok((
                own.given
                    .into_iter()
                    .map(|(field, value)| (field.flag, value))
                    .collect(),
                rest.into_iter()
                    .map(|arg| arg.into_string().unwrap())
                    .collect(),
            )),
            Err(UsageError(text)) => Err(text),
        }
    }

    #[test]
    fn both_spellings_and_switches() {
        let (own, rest) = split(&[
            "tc01",
            "--device-blocks",
            "96",
            "--workers=3",
            "--strict-pins",
            "--overlay",
            "false",
            "--exact",
        ])
        .unwrap();
        let expected = [
            ("device-blocks", "96"),
            ("workers", "3"),
            ("strict-pins", "true"),
            ("overlay", "false"),
        ];
        assert_eq!(own, expected.map(|(flag, value)| (flag, value.to_owned())));
        assert_eq!(rest, ["tc01", "--exact"]);
    }

    #[test]
    fn what_nextest_passes_goes_through_unchanged() {
        let args = ["--list", "--format", "terse", "--ignored"];
        assert_eq!(split(&args).unwrap().1, args);
        let args = ["--exact", "tc01::cold", "--nocapture", "-Zx", "-Z", "y"];
        assert_eq!(split(&args).unwrap().1, args);
        let args = ["--skip", "--workers", "--", "--workers", "--nonsense"];
        assert_eq!(split(&args).unwrap().1, args);
    }

    #[test]
    fn every_problem_is_said_at_once() {
        let text = split(&["--device-bloks", "4", "--lits", "--gpus", "--exact"]).unwrap_err();
        assert!(text.contains("the nearest is --device-blocks"), "{text}");
        assert!(text.contains("the nearest is --list"), "{text}");
        assert!(
            text.contains("--gpus: needs a value, found --exact"),
            "{text}"
        );
    }

    #[test]
    fn a_flag_given_twice_is_refused() {
        assert_eq!(
            split(&["--keep", "2", "--keep=3"]).unwrap_err(),
            "--keep: given twice"
        );
    }

    proptest! {
        #[test]
        fn no_argument_list_panics(args in prop::collection::vec("(--?[a-z-]{0,12}(=[0-9]*)?|.{0,6})", 0..8)) {
            let _ = split_args(args.into_iter().map(OsString::from));
        }

        #[test]
        fn arguments_are_ours_or_passed_on_in_order(
            filters in prop::collection::vec("[a-z0-9:]{1,8}", 0..4),
            at in 0usize..4,
        ) {
            let mut args = filters.clone();
            args.insert(at.min(filters.len()), "--device-blocks=7".to_owned());
            let (own, rest) = split_args(args.into_iter().map(OsString::from)).unwrap();
            prop_assert_eq!(own.given.len(), 1);
            prop_assert_eq!(rest, filters.into_iter().map(OsString::from).collect::<Vec<_>>());
        }
    }
}
