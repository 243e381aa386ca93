//! Why a process did not start or died, out of its log.
//!
//! The last line of a failed engine says that something above failed; the first line that looks
//! like an error is often a health check of ours. So the log is searched for the first line that
//! is known to be a cause (`table`), then for the first exception, then for the first error
//! that is not known noise. The way the process ended decides where the log is silent.

mod table;

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::LazyLock;

use regex::{Regex, RegexSet};

use crate::failure::Failure;
use table::{MARKS, Mark, NOISE};

/// How much is read of each end of a log. Causes stand where starting stops, and a start is not
/// that long.
const END_BYTES: u64 = 4 << 20;

/// Longest quote of a line.
const QUOTE_CHARS: usize = 400;

static PATTERNS: LazyLock<RegexSet> = LazyLock::new(|| set(MARKS.iter().map(|mark| mark.pattern)));
static NOISE_PATTERNS: LazyLock<RegexSet> = LazyLock::new(|| set(NOISE.iter().copied()));
static ANSI: LazyLock<Regex> = LazyLock::new(|| pattern(r"\x1b\[[0-9;]*[A-Za-z]"));
/// Time, level, process and source, as vLLM, Dynamo and UCX write them. What is indented after
/// them stays so.
static PREFIX: LazyLock<Regex> = LazyLock::new(|| {
    pattern(
        r"(?x)^
        (?:\([^()]*\bpid=\d+\)\s)?                                   # (EngineCore pid=7)
        (?:(?:TRACE|DEBUG|INFO|WARNING|ERROR|CRITICAL)\s\d\d-\d\d\s\d\d:\d\d:\d\d(?:\.\d+)?\s\[[^\]]*\]\s?
          |\d{4}-\d\d-\d\dT\S+\s+(?:TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL)\s
        )?",
    )
});
static LEVEL: LazyLock<Regex> =
    LazyLock::new(|| pattern(r"\b(TRACE|DEBUG|DIAG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)\b"));
/// The last line of a traceback: the exception's name, then nothing or its message.
static EXCEPTION: LazyLock<Regex> = LazyLock::new(|| pattern(r"^[A-Za-z_][\w.]*(:\s|$)"));

#[expect(
    clippy::expect_used,
    reason = "patterns are constants, and a test compiles every one of them"
)]
fn pattern(text: &str) -> Regex {
    Regex::new(text).expect("a constant pattern")
}

#[expect(
    clippy::expect_used,
    reason = "patterns are constants, and a test compiles every one of them"
)]
fn set<'a>(patterns: impl Iterator<Item = &'a str>) -> RegexSet {
    RegexSet::new(patterns).expect("constant patterns")
}

/// Says why `name` ended as it did, from the log at `path`. See [`explain_text`].
pub fn explain(name: &str, ending: Option<&str>, path: &Path) -> Failure {
    match read_ends(path, END_BYTES) {
        Ok(text) => explain_text(name, ending, &text, path),
        Err(error) => {
            let mut failure = silent(name, ending, path);
            failure.found = Some(format!("its log cannot be read: {error}"));
            failure
        }
    }
}

/// Says why `name` ended as it did. `ending` is `exit code 1`, `signal 9`, or `None` where the
/// process runs but did not become ready in time.
pub fn explain_text(name: &str, ending: Option<&str>, text: &str, path: &Path) -> Failure {
    let lines: Vec<Line> = text.lines().map(Line::read).collect();
    if let Some((mark, line)) = first_mark(&lines, false).or_else(|| first_mark(&lines, true)) {
        return Failure::new(
            mark.class,
            format!("{}: {}", subject(name, ending), mark.what),
        )
        .cause(line.quote(), path)
        .hint(mark.hint);
    }
    // Whoever is killed from outside leaves any last words behind.
    let blame_log = !matches!(
        Signal::of(ending),
        Some(Signal::Outside | Signal::SharedMemory)
    );
    if let Some(line) = first_exception(&lines).filter(|_| blame_log) {
        return Failure::product(format!("{}: an exception", subject(name, ending)))
            .cause(line.quote(), path)
            .hint("the whole traceback is in the log");
    }
    let mut failure = silent(name, ending, path);
    if let Some(line) = first_error(&lines) {
        failure.cause = Some(line.quote());
    }
    failure
}

/// What the ending alone says.
fn silent(name: &str, ending: Option<&str>, path: &Path) -> Failure {
    let subject = subject(name, ending);
    let mut failure = match (Signal::of(ending), ending) {
        (Some(Signal::Outside), _) => Failure::environment(format!("{subject}: killed from outside"))
            .hint("the kernel's out-of-memory killer is the usual one; see `dmesg`"),
        (Some(Signal::SharedMemory), _) => {
            Failure::environment(format!("{subject}: shared memory ran out under it"))
                .hint("/dev/shm is smaller than what was mapped in it; remount it larger")
        }
        (Some(Signal::Crash), _) => {
            Failure::product(format!("{subject}: it crashed in native code"))
                .hint("set PYTHONFAULTHANDLER=1 in engine.env for the stack of every thread")
        }
        (None, Some(_)) => Failure::product(format!("{subject}: its log names no cause")),
        (None, None) => Failure::environment(format!("{subject}: its log names no cause"))
            .hint("the machine may be too slow for stack.bring_up_seconds; the log's last lines say where it stood"),
    };
    failure.log = Some(path.to_path_buf());
    failure
}

fn subject(name: &str, ending: Option<&str>) -> String {
    match ending {
        Some(ending) => format!("{name} ended with {ending}"),
        None => format!("{name} did not become ready"),
    }
}

/// What a signal says about who did it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Signal {
    /// 9 and 15: nobody does that to itself.
    Outside,
    /// 7 (SIGBUS): a page of a mapped file could not be had.
    SharedMemory,
    /// 4, 6, 8, 11: its own code.
    Crash,
}

impl Signal {
    fn of(ending: Option<&str>) -> Option<Self> {
        let number: u32 = ending?
            .strip_prefix("signal ")?
            .split(' ')
            .next()?
            .parse()
            .ok()?;
        match number {
            9 | 15 => Some(Self::Outside),
            7 => Some(Self::SharedMemory),
            _ => Some(Self::Crash),
        }
    }
}

/// One line of a log.
struct Line {
    /// Without colours.
    plain: String,
    /// Where the message begins in it.
    message_at: usize,
    /// How bad the writer thought it was.
    level: Level,
}

#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum Level {
    Harmless,
    Warning,
    /// No level at all: tracebacks and what libraries print.
    Unsaid,
    Error,
}

impl Line {
    fn read(raw: &str) -> Self {
        let plain = ANSI.replace_all(raw.trim_end(), "").into_owned();
        let message_at = PREFIX.find(&plain).map_or(0, |prefix| prefix.end());
        // A level stands in front; the same word further on belongs to a message.
        let front: String = plain.chars().take(80).collect();
        let level = match LEVEL.find(&front).map(|level| level.as_str()) {
            None => Level::Unsaid,
            Some("ERROR" | "CRITICAL" | "FATAL") => Level::Error,
            Some("WARN" | "WARNING") => Level::Warning,
            Some(_) => Level::Harmless,
        };
        Self {
            plain,
            message_at,
            level,
        }
    }

    fn message(&self) -> &str {
        self.plain.get(self.message_at..).unwrap_or_default()
    }

    /// Known not to be a cause, or indented: then it is source code in a traceback, which names
    /// exceptions without saying anything of this one.
    fn is_noise(&self) -> bool {
        self.message().starts_with("  ") || NOISE_PATTERNS.is_match(&self.plain)
    }

    fn quote(&self) -> String {
        let line = self.plain.trim();
        match line.char_indices().nth(QUOTE_CHARS) {
            Some((at, _)) => format!("{}…", &line[..at]),
            None => line.to_owned(),
        }
    }
}

fn first_mark(lines: &[Line], warned: bool) -> Option<(&'static Mark, &Line)> {
    lines
        .iter()
        .filter(|line| match line.level {
            Level::Unsaid | Level::Error => !warned,
            Level::Warning => warned,
            Level::Harmless => false,
        })
        .filter(|line| !line.is_noise())
        .find_map(|line| {
            let hits = PATTERNS.matches(line.message());
            let mark = hits
                .iter()
                .map(|at| &MARKS[at])
                .find(|mark| mark.warned || !warned)?;
            Some((mark, line))
        })
}

/// The exception that the first traceback ends with. A traceback whose exception is noise
/// re-raises what an earlier process already said.
fn first_exception(lines: &[Line]) -> Option<&Line> {
    let mut inside = false;
    for line in lines {
        let message = line.message();
        if message.starts_with("Traceback (most recent call last):") {
            inside = line.level >= Level::Unsaid;
        } else if inside && EXCEPTION.is_match(message) {
            inside = false;
            if !line.is_noise() {
                return Some(line);
            }
        }
    }
    None
}

fn first_error(lines: &[Line]) -> Option<&Line> {
    let mut errors = lines.iter().filter(|line| line.level == Level::Error);
    errors.find(|line| !line.is_noise())
}

/// The first and last `end` bytes of a file, whatever is in it.
fn read_ends(path: &Path, end: u64) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    let mut bytes = Vec::new();
    if length <= 2 * end {
        file.take(2 * end).read_to_end(&mut bytes)?;
    } else {
        (&mut file).take(end).read_to_end(&mut bytes)?;
        let left_out = length - 2 * end;
        bytes.extend(format!("\n[{left_out} bytes left out]\n").as_bytes());
        file.seek(SeekFrom::Start(length - end))?;
        file.take(end).read_to_end(&mut bytes)?;
    }
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests;
