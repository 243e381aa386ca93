//! A profile while it is being put together: values with where each came from.
//!
//! The file comes first, then variables, then flags. What is wrong is collected, not thrown, so
//! that a user sees every mistake at once.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;

use toml::Value;
use toml::de::{DeTable, DeValue};

use super::fields::{self, FIELDS, Field, Place, Presence};
use super::kind::Kind;

/// Where a value came from, from the weakest to the strongest.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) enum Origin {
    /// A line of the profile.
    File {
        /// `env/cpu.toml`.
        file: String,
        /// From 1; 0 where no single line is to blame.
        line: usize,
    },
    /// An environment variable, by name.
    Variable(String),
    /// A flag, with its dashes.
    Flag(String),
}

impl Origin {
    /// Whether this one wins over `other`.
    pub(super) fn outranks(&self, other: &Self) -> bool {
        let rank = |origin: &Self| match origin {
            Self::File { .. } => 0,
            Self::Variable(_) => 1,
            Self::Flag(_) => 2,
        };
        rank(self) > rank(other)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File { file, line: 0 } => f.write_str(file),
            Self::File { file, line } => write!(f, "{file}:{line}"),
            Self::Variable(name) | Self::Flag(name) => f.write_str(name),
        }
    }
}

/// Values by dotted path.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    file: String,
    values: BTreeMap<&'static str, (Value, Origin)>,
    /// Fields whose value was of the wrong kind: complained about, so not missing too.
    refused: BTreeSet<&'static str>,
    /// What is wrong so far.
    pub(super) problems: Vec<String>,
}

impl Draft {
    /// Reads the text of a profile; `file` is how messages call it, and relative paths in it start
    /// at `base`.
    pub(super) fn read(file: &str, base: &Path, text: &str) -> Self {
        let mut draft = Self {
            file: file.to_owned(),
            ..Self::default()
        };
        match DeTable::parse(text) {
            Ok(document) => draft.walk(text, base, "", document.get_ref()),
            Err(error) => {
                let line = error.span().map_or(0, |span| line_at(text, span.start));
                let origin = draft.at_line(line);
                draft
                    .problems
                    .push(format!("{origin}: {}", error.message()));
            }
        }
        draft
    }

    fn walk(&mut self, text: &str, base: &Path, prefix: &str, table: &DeTable<'_>) {
        // The table is sorted by name; people read from top to bottom.
        let mut entries: Vec<_> = table.iter().collect();
        entries.sort_by_key(|(key, _)| key.span().start);
        for (key, value) in entries {
            let path = if prefix.is_empty() {
                key.get_ref().to_string()
            } else {
                format!("{prefix}.{}", key.get_ref())
            };
            let origin = self.at_line(line_at(text, key.span().start));
            let section = format!("{path}.");
            if let Some(field) = fields::by_path(&path) {
                match field.kind.accept(value.get_ref()) {
                    Ok(value) => {
                        let value = absolute(field, value, base);
                        self.values.insert(field.name(), (value, origin));
                    }
                    Err(why) => self.refuse(field, &origin, &why),
                }
            } else if paths().any(|known| known.starts_with(&section)) {
                match value.get_ref() {
                    DeValue::Table(inner) => self.walk(text, base, &path, inner),
                    _ => self
                        .problems
                        .push(format!("{origin}: {path}: expected a table")),
                }
            } else {
                let sections =
                    paths().filter_map(|path| path.split_once('.').map(|(head, _)| head));
                let nearest = fields::nearest(&path, sections.chain(paths())).unwrap_or_default();
                self.problems.push(format!(
                    "{origin}: {path}: no such field; the nearest is {nearest}"
                ));
            }
        }
    }

    /// Puts the text of a flag or variable over what is there; a relative path starts at `here`.
    pub(super) fn override_with(
        &mut self,
        field: &'static Field,
        text: &str,
        here: &Path,
        origin: Origin,
    ) {
        if text == "none" && field.presence == Presence::Optional {
            self.values.remove(field.name());
            return;
        }
        match field.kind.parse(text) {
            Ok(value) => {
                if let Some(other) = field.instead_of
                    && let Some((_, theirs)) = self.values.get(other)
                    && origin.outranks(theirs)
                {
                    self.values.remove(other);
                }
                let value = absolute(field, value, here);
                self.values.insert(field.name(), (value, origin));
            }
            Err(why) => self.refuse(field, &origin, &why),
        }
    }

    /// Where `cause` was said and `path` was not, `path` is `value`, by the same origin.
    pub(super) fn follow(&mut self, cause: &str, path: &'static str, value: Value) {
        if self.given(cause) && !self.given(path) && !self.refused.contains(path) {
            let origin = self.origin(cause);
            self.values.insert(path, (value, origin));
        }
    }

    fn refuse(&mut self, field: &Field, origin: &Origin, why: &str) {
        self.refused.insert(field.name());
        self.problems
            .push(format!("{origin}: {}: {why}", field.name()));
    }

    /// Notes every required field that nothing has set.
    pub(super) fn require_all(&mut self) {
        for field in FIELDS {
            let missing = field.presence == Presence::Required
                && matches!(field.place, Place::Profile(path) if !self.values.contains_key(path));
            if missing && !self.refused.contains(field.name()) {
                self.problems.push(format!(
                    "{}: {}: missing ({}); say it here, with --{} or with {}",
                    self.file,
                    field.name(),
                    field.help,
                    field.flag,
                    field.variable()
                ));
            }
        }
    }

    /// Where `path` got its value; the file as a whole for a default.
    pub(super) fn origin(&self, path: &str) -> Origin {
        match self.values.get(path) {
            Some((_, origin)) => origin.clone(),
            None => self.at_line(0),
        }
    }

    /// Whether somebody said `path`, in whatever way.
    pub(super) fn given(&self, path: &str) -> bool {
        self.values.contains_key(path)
    }

    /// Paths below `section.` that somebody said.
    pub(super) fn given_below(&self, section: &str) -> Vec<&'static str> {
        let inside = |path: &str| {
            path.strip_prefix(section)
                .is_some_and(|rest| rest.starts_with('.'))
        };
        let paths = self.values.keys().copied();
        paths.filter(|path| inside(path)).collect()
    }

    /// The values as one document.
    pub(super) fn document(&self) -> toml::Table {
        let mut root = toml::Table::new();
        for (path, (value, _)) in &self.values {
            insert(&mut root, path, value.clone());
        }
        root
    }

    fn at_line(&self, line: usize) -> Origin {
        Origin::File {
            file: self.file.clone(),
            line,
        }
    }
}

/// A path means the same wherever the harness is then started from.
fn absolute(field: &Field, value: Value, base: &Path) -> Value {
    match (field.kind, value) {
        (Kind::Path, Value::String(path)) => {
            Value::String(base.join(path).to_string_lossy().into_owned())
        }
        (_, value) => value,
    }
}

fn insert(table: &mut toml::Table, path: &str, value: Value) {
    match path.split_once('.') {
        None => {
            table.insert(path.to_owned(), value);
        }
        Some((head, tail)) => {
            let inner = table
                .entry(head)
                .or_insert_with(|| Value::Table(toml::Table::new()));
            if let Value::Table(inner) = inner {
                insert(inner, tail, value);
            }
        }
    }
}

fn paths() -> impl Iterator<Item = &'static str> {
    FIELDS.iter().filter_map(|field| match field.place {
        Place::Profile(path) => Some(path),
        Place::Run => None,
    })
}

fn line_at(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().get(..offset).unwrap_or(text.as_bytes());
    1 + before.iter().filter(|&&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn problems(text: &str) -> Vec<String> {
        Draft::read("env/x.toml", Path::new("/b"), text).problems
    }

    #[test]
    fn a_wrong_type_names_file_line_field_and_value() {
        assert_eq!(
            problems("title = \"x\"\n\n[engine]\nblock_tokens = \"64\"\n"),
            [r#"env/x.toml:4: engine.block_tokens: expected an integer, found the string "64""#]
        );
    }

    #[test]
    fn an_unknown_field_names_the_nearest() {
        assert_eq!(
            problems("[engine]\nblock_token = 64\n[engin]\nkind = 'vllm'"),
            [
                "env/x.toml:2: engine.block_token: no such field; the nearest is engine.block_tokens",
                "env/x.toml:3: engin: no such field; the nearest is engine",
            ]
        );
    }

    #[test]
    fn broken_toml_names_its_line() {
        let found = problems("title = \"x\"\n[engine\n");
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("env/x.toml:2: "), "{found:?}");
    }

    #[test]
    fn a_section_that_is_no_table_is_said() {
        assert_eq!(
            problems("engine = 3"),
            ["env/x.toml:1: engine: expected a table"]
        );
    }

    #[test]
    fn one_alternative_displaces_the_other_only_from_below() {
        let lock = fields::by_path("environment.lock").unwrap();
        let python = fields::by_path("environment.python").unwrap();
        let mut draft = Draft::read("f", Path::new("/b"), "[environment]\nlock = 'cpu'");
        draft.override_with(
            python,
            "py",
            Path::new("/here"),
            Origin::Variable("PHASE1_PYTHON".into()),
        );
        assert!(!draft.values.contains_key("environment.lock"));
        assert_eq!(
            draft.document()["environment"]["python"].as_str(),
            Some("/here/py")
        );
        draft.override_with(
            lock,
            "cpu",
            Path::new("/here"),
            Origin::Variable("PHASE1_LOCK".into()),
        );
        assert!(draft.values.contains_key("environment.python"));
        draft.override_with(
            lock,
            "cpu",
            Path::new("/here"),
            Origin::Flag("--lock".into()),
        );
        assert!(!draft.values.contains_key("environment.python"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in any::<String>()) {
            let mut draft = Draft::read("f", Path::new("/b"), &text);
            draft.require_all();
            let _ = draft.document();
        }
    }
}
