//! Profile, flags and `PHASE1_*` become one validated [`Config`].
//!
//! The only module that reads environment variables. Values come from a profile (`env/*.toml`),
//! then variables, then flags; what each can be stands in one table (`fields`). Mistakes are
//! collected and said together, each with the line, variable or flag it came from.
//!
//! What the machine can do is not asked here: that is a gate's question.

mod args;
mod check;
mod draft;
mod env;
mod fields;
mod fingerprint;
mod kind;
mod paths;
pub mod profile;
mod source;
#[cfg(test)]
pub(crate) mod testing;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use args::{Foreign, LIBTEST, OwnArgs, split_args, split_args_among};
pub use env::{EnvSource, ProcessEnv};
pub use fields::help_table;
pub use profile::Profile;

use draft::{Draft, Origin};
use fields::{FIELDS, Field, PREFIX, Place};
use source::Source;

/// The profile that is used when none is asked for, unless [`load_choosing`] has another.
const DEFAULT_PROFILE: &str = "cpu";

/// Kills of the recovery case when nobody says how many.
const KILLS: usize = 5;

/// A wrong flag, field, variable or case: exit code 2, before anything runs.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{0}")]
pub struct UsageError(pub String);

impl UsageError {
    /// One error that says every problem.
    fn join(problems: &[String]) -> Self {
        Self(match problems {
            [only] => only.clone(),
            many => format!("{} problems:\n  {}", many.len(), many.join("\n  ")),
        })
    }
}

/// Directories that the harness writes to.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Paths {
    /// Locks, sockets, generations: `$XDG_RUNTIME_DIR/kvcr-phase1` or `/tmp/kvcr-phase1-$UID`.
    pub state: PathBuf,
    /// Installed environments and models: `$XDG_CACHE_HOME/kvcr-phase1`.
    pub cache: PathBuf,
    /// Evidence: `<target>/phase1`.
    pub runs: PathBuf,
    /// Package root, where `snapshots/` is.
    pub root: PathBuf,
}

/// Variables of insta that can turn a failing snapshot into a passing one.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct InstaState {
    /// `INSTA_FORCE_PASS` is set to something other than 0.
    pub force_pass: bool,
    /// `INSTA_UPDATE`, as it is.
    pub update: Option<String>,
}

/// Everything a run is configured with.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Config {
    /// Name or path the profile was asked for by.
    pub profile_name: String,
    /// The profile with every override applied.
    pub profile: Profile,
    /// Name and text of every override that counts, variables first, for the replay command.
    /// The name is the dotted path of a field, or the flag of a setting.
    pub overrides: Vec<(String, String)>,
    /// Directories.
    pub paths: Paths,
    /// Shared by every process of one run: `NEXTEST_RUN_ID`, or one of our own.
    pub run_id: String,
    /// nextest's attempt number, from 1.
    pub attempt: u32,
    /// Cases that may not be gated (`PHASE1_REQUIRE`): `tc01`, `tc01::cold`, `all`.
    pub require: Vec<String>,
    /// Whether a reference without a pin fails (`PHASE1_STRICT_PINS`).
    pub strict_pins: bool,
    /// How often the recovery case kills a worker (`PHASE1_KILLS`).
    pub kills: usize,
    /// Whether nextest runs us, one process a test.
    pub under_nextest: bool,
    /// Whether this is a CI job (`CI`).
    pub ci: bool,
    /// What insta was told.
    pub insta: InstaState,
}

impl Config {
    /// [`Self::replay_args`] for a shell.
    pub fn replay_line(&self) -> String {
        let quoted = self.replay_args().into_iter().map(|arg| {
            // Only the value may need quotes. Only a zero byte cannot be quoted, and neither
            // flags nor variables can hold one.
            match arg
                .split_once('=')
                .map(|(flag, value)| (flag, shlex::try_quote(value)))
            {
                Some((flag, Ok(value))) => format!("{flag}={value}"),
                _ => arg,
            }
        });
        quoted.collect::<Vec<_>>().join(" ")
    }

    /// Arguments that lead to this configuration again without any variable; not quoted yet.
    pub fn replay_args(&self) -> Vec<String> {
        let overrides = self.overrides.iter().filter_map(|(name, text)| {
            let field = FIELDS.iter().find(|field| field.name() == name)?;
            Some(format!("--{}={text}", field.flag))
        });
        std::iter::once(format!("--profile={}", self.profile_name))
            .chain(overrides)
            .collect()
    }
}

/// Puts profile, variables and flags together.
pub fn load(own: OwnArgs, env: &dyn EnvSource) -> Result<Config, UsageError> {
    load_by_default(own, env, DEFAULT_PROFILE)
}

/// The same; but where nobody names a profile, nor the software or model to run, `choose` may
/// replace the default one after a look at what it comes to. A choice that contradicts an
/// override is dropped.
pub fn load_choosing(
    own: OwnArgs,
    env: &dyn EnvSource,
    choose: impl FnOnce(&Config) -> Option<&'static str>,
) -> Result<Config, UsageError> {
    const SOFTWARE: &[&str] = &["environment.", "model.build", "model.path", "engine.kind"];
    let named = Given::collect(own.clone(), env, &mut Vec::new())
        .0
        .iter()
        .any(|over| {
            let name = over.field.name();
            name == "profile" || SOFTWARE.iter().any(|known| name.starts_with(known))
        });
    let config = load(own.clone(), env)?;
    if named {
        return Ok(config);
    }
    let chosen = choose(&config).map(|name| load_by_default(own, env, name));
    Ok(chosen.and_then(Result::ok).unwrap_or(config))
}

fn load_by_default(own: OwnArgs, env: &dyn EnvSource, default: &str) -> Result<Config, UsageError> {
    let mut problems = Vec::new();
    let given = Given::collect(own, env, &mut problems);
    let here = env.current_dir();
    let defaults = paths::defaults(env);

    let profile_name = given.text("profile").unwrap_or(default);
    let source = source::find(profile_name, &defaults.root, &here).map_err(|why| {
        problems.push(match given.last("profile") {
            Some(over) => format!("{}: {why}", over.origin),
            None => why,
        });
        UsageError::join(&problems)
    })?;

    let settings = Settings::read(&given, &here, &mut problems);
    let profile = put_together(&given, &source, &here, &mut problems);
    let (Some(profile), true) = (profile, problems.is_empty()) else {
        return Err(UsageError::join(&problems));
    };

    let text = |name: &str| {
        let value = env.var(name)?;
        Some(value.to_string_lossy().into_owned()).filter(|text| !text.is_empty())
    };
    Ok(Config {
        profile_name: profile_name.to_owned(),
        profile,
        overrides: given.effective(),
        paths: Paths {
            state: settings.state.unwrap_or(defaults.state),
            cache: settings.cache.unwrap_or(defaults.cache),
            runs: settings.runs.unwrap_or(defaults.runs),
            root: defaults.root,
        },
        run_id: text("NEXTEST_RUN_ID")
            .map_or_else(|| uuid::Uuid::new_v4().to_string(), |id| file_name(&id)),
        attempt: text("NEXTEST_ATTEMPT")
            .and_then(|number| number.parse().ok())
            .unwrap_or(1),
        require: settings.require,
        strict_pins: settings.strict_pins,
        kills: settings.kills,
        under_nextest: text("NEXTEST").is_some_and(|value| value == "1"),
        ci: text("CI").is_some_and(|value| !matches!(value.as_str(), "0" | "false")),
        insta: InstaState {
            force_pass: text("INSTA_FORCE_PASS").is_some_and(|value| value != "0"),
            update: text("INSTA_UPDATE"),
        },
    })
}

/// A run's id names directories: it may not lead out of them.
fn file_name(id: &str) -> String {
    id.chars()
        .map(|letter| match letter {
            letter if letter.is_ascii_alphanumeric() || letter == '-' => letter,
            _ => '_',
        })
        .take(100)
        .collect()
}

/// The profile with every override applied and checked; `None` if it has no shape at all.
fn put_together(
    given: &Given,
    source: &Source,
    here: &Path,
    problems: &mut Vec<String>,
) -> Option<Profile> {
    let mut draft = Draft::read(&source.file, &source.base, &source.text);
    for over in &given.0 {
        if let Place::Profile(_) = over.field.place {
            draft.override_with(over.field, &over.text, here, over.origin.clone());
        }
    }
    // Whoever names services of Guards wants Guards; only a `false` in so many words is refused.
    draft.follow("topology.external_services", "kvcr.guard", true.into());
    draft.require_all();
    problems.append(&mut draft.problems);
    match draft.document().try_into::<Profile>() {
        Ok(profile) => {
            problems.extend(check::check(&profile, &draft));
            Some(profile)
        }
        // The table and the struct agree (a test says so), so something was said already.
        Err(error) => {
            if problems.is_empty() {
                problems.push(format!("{}: {}", source.file, error.message()));
            }
            None
        }
    }
}

/// One override, as it was given.
struct Override {
    field: &'static Field,
    text: String,
    origin: Origin,
}

/// Every override: variables in the order of the table, then flags in theirs.
struct Given(Vec<Override>);

impl Given {
    fn collect(own: OwnArgs, env: &dyn EnvSource, problems: &mut Vec<String>) -> Self {
        let mut found = Vec::new();
        for (name, value) in env.vars() {
            let name = name.to_string_lossy();
            if !name.starts_with(PREFIX) {
                continue;
            }
            let Some(field) = fields::by_variable(&name) else {
                let known: Vec<String> = FIELDS.iter().map(Field::variable).collect();
                let nearest = fields::nearest(&name, &known).map_or("", String::as_str);
                problems.push(format!(
                    "{name}: no such variable; the nearest is {nearest}"
                ));
                continue;
            };
            match value.into_string() {
                // CI systems export what a user left out as an empty text.
                Ok(text) if text.is_empty() => {}
                Ok(text) => found.push(Override {
                    field,
                    text,
                    origin: Origin::Variable(name.into_owned()),
                }),
                Err(value) => problems.push(format!("{name}: {value:?} is not valid UTF-8")),
            }
        }
        found.sort_by_key(|over| {
            FIELDS
                .iter()
                .position(|field| field.flag == over.field.flag)
        });
        found.extend(own.given.into_iter().map(|(field, text)| Override {
            field,
            text,
            origin: Origin::Flag(format!("--{}", field.flag)),
        }));
        Self(found)
    }

    fn last(&self, flag: &str) -> Option<&Override> {
        self.0.iter().rev().find(|over| over.field.flag == flag)
    }

    fn text(&self, flag: &str) -> Option<&str> {
        self.last(flag).map(|over| over.text.as_str())
    }

    /// What a stronger override did not replace; the profile has its own place.
    fn effective(&self) -> Vec<(String, String)> {
        let outranked = |over: &Override, field: &Field| {
            self.last(field.flag)
                .is_some_and(|last| last.origin.outranks(&over.origin))
        };
        let counts = |over: &&Override| {
            let other = over.field.instead_of.and_then(fields::by_path);
            over.field.flag != "profile"
                && !outranked(over, over.field)
                && !other.is_some_and(|other| outranked(over, other))
        };
        self.0
            .iter()
            .filter(counts)
            .map(|over| (over.field.name().to_owned(), over.text.clone()))
            .collect()
    }
}

/// What can be set for a run but not in a profile.
#[derive(Default)]
struct Settings {
    state: Option<PathBuf>,
    cache: Option<PathBuf>,
    runs: Option<PathBuf>,
    require: Vec<String>,
    strict_pins: bool,
    kills: usize,
}

impl Settings {
    fn read(given: &Given, here: &Path, problems: &mut Vec<String>) -> Self {
        let mut value = |flag: &str| {
            let over = given.last(flag).filter(|over| over.text != "none")?;
            match over.field.kind.parse(&over.text) {
                Ok(value) => Some(value),
                Err(why) => {
                    problems.push(format!("{}: {why}", over.origin));
                    None
                }
            }
        };
        let kills = value("kills").and_then(|kills| kills.as_integer());
        let mut path = |flag: &str| match value(flag) {
            Some(toml::Value::String(text)) => Some(here.join(text)),
            _ => None,
        };
        let read = Self {
            state: path("state-dir"),
            cache: path("cache-dir"),
            runs: path("runs-dir"),
            require: value("require")
                .and_then(|names| names.try_into().ok())
                .unwrap_or_default(),
            strict_pins: value("strict-pins").and_then(|yes| yes.as_bool()) == Some(true),
            kills: kills.map_or(KILLS, |kills| usize::try_from(kills).unwrap_or(KILLS)),
        };
        if let (0, Some(over)) = (read.kills, given.last("kills")) {
            problems.push(format!("{}: must be at least 1", over.origin));
        }
        read
    }
}

#[cfg(test)]
mod tests;
