//! Finding a CPython that the lock was made for.

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::failure::Failure;

use super::child::{self, Search};

/// The versions that `requirements.lock` resolves for, the preferred one first.
pub(crate) const SUPPORTED: [(u32, u32); 2] = [(3, 12), (3, 11)];

/// An interpreter answers this in well under a second, on a starved machine in a few.
const LIMIT: Duration = Duration::from_secs(20);

/// What an interpreter says of itself, one JSON line. `_base_executable` leads out of a virtual
/// environment that happens to be active: ours must not depend on it.
const QUESTION: &str = "\
import json, os, platform, sys
print(json.dumps({
    'implementation': platform.python_implementation(),
    'version': list(sys.version_info[:3]),
    'executable': getattr(sys, '_base_executable', None) or sys.executable,
    'site': [p for p in sys.path if os.path.isdir(p)],
}))";

/// An interpreter that answered.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct Interpreter {
    /// `CPython`, `PyPy`, …
    pub(crate) implementation: String,
    /// Major, minor, patch.
    pub(crate) version: (u32, u32, u32),
    /// The real program, behind shims and virtual environments.
    pub(crate) executable: PathBuf,
    /// Where it looks for packages, in its order.
    pub(crate) site: Vec<PathBuf>,
}

impl Interpreter {
    pub(crate) fn minor(&self) -> (u32, u32) {
        (self.version.0, self.version.1)
    }

    fn supported(&self) -> bool {
        self.implementation == "CPython" && SUPPORTED.contains(&self.minor())
    }
}

impl std::fmt::Display for Interpreter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (major, minor, patch) = self.version;
        write!(f, "{} {major}.{minor}.{patch}", self.implementation)
    }
}

/// Asks a program what it is; the error says why it is no interpreter. Starting Python takes
/// longer than everything else before an arm, so one process asks the same file once.
pub(crate) fn ask(program: &Path) -> Result<Interpreter, String> {
    type Answers = Mutex<HashMap<(PathBuf, u64, u64, i64, i64), Interpreter>>;
    static ANSWERS: LazyLock<Answers> = LazyLock::new(Answers::default);

    let Ok(found) = std::fs::metadata(program) else {
        return ask_anew(program);
    };
    // A replaced program is another file, a rewritten one has another time.
    let (dev, ino) = (found.dev(), found.ino());
    let file = (
        program.to_owned(),
        dev,
        ino,
        found.mtime(),
        found.mtime_nsec(),
    );
    let answers = || ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = answers().get(&file) {
        return Ok(known.clone());
    }
    let answer = ask_anew(program)?;
    answers().insert(file, answer.clone());
    Ok(answer)
}

fn ask_anew(program: &Path) -> Result<Interpreter, String> {
    let mut command = child::command(program);
    // Not `-I`: the engines see the user's site-packages too, so they count.
    command.args(["-c", QUESTION]).current_dir("/");
    let answer = child::ask(command, LIMIT);
    if !answer.ok() {
        return Err(answer.complaint());
    }
    let line = answer.stdout.lines().last().unwrap_or_default();
    serde_json::from_str(line).map_err(|_| format!("did not answer as Python does: {line:?}"))
}

/// The interpreter to install with: the first suitable one of what is on `PATH` and in the usual
/// places beside it.
pub(crate) fn find(search: &Search) -> Result<Interpreter, Failure> {
    let mut found = Vec::new();
    for program in candidates(search) {
        // Shims of versions that are not selected do not answer, which is ordinary.
        let Ok(interpreter) = ask(&program) else {
            continue;
        };
        if interpreter.supported() {
            return Ok(interpreter);
        }
        let text = format!("{interpreter} ({})", interpreter.executable.display());
        if !found.contains(&text) {
            found.push(text);
        }
    }
    Err(Failure::environment("no suitable Python interpreter")
        .expected("CPython 3.12 or 3.11")
        .found(match found.is_empty() {
            true => "none".to_owned(),
            false => found.join(", "),
        })
        .hint("`apt-get install python3.12` (Debian 12: `apt-get install python3`, which is 3.11), or put one on PATH"))
}

fn candidates(search: &Search) -> Vec<PathBuf> {
    let mut programs = Vec::new();
    for name in ["python3.12", "python3.11", "python3"] {
        programs.extend(search.all(name));
    }
    if let Some(home) = search.home() {
        for (major, minor) in SUPPORTED {
            let prefix = format!("{major}.{minor}.");
            programs.extend(below(&home.join(".pyenv/versions"), &prefix));
            let prefix = format!("cpython-{prefix}");
            programs.extend(below(&home.join(".local/share/uv/python"), &prefix));
        }
    }
    programs
}

/// `bin/python3` of every directory whose name starts with `prefix`.
fn below(place: &Path, prefix: &str) -> Vec<PathBuf> {
    let Ok(entries) = place.read_dir() else {
        return Vec::new();
    };
    let mut programs: Vec<PathBuf> = entries
        .flatten()
        .filter(|entry| entry.file_name().to_string_lossy().starts_with(prefix))
        .map(|entry| entry.path().join("bin/python3"))
        .filter(|program| program.exists())
        .collect();
    programs.sort();
    programs.reverse();
    programs
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::fakes;

    #[test]
    fn takes_the_first_that_fits_past_dead_shims_and_wrong_versions() {
        let place = tempfile::tempdir().unwrap();
        let bin = place.path().join("bin");
        fakes::script(&bin.join("python3.12"), "echo not selected >&2; exit 127");
        fakes::python(&bin.join("python3.11"), "CPython", (3, 11, 2));
        fakes::python(&bin.join("python3"), "CPython", (3, 13, 0));
        let search = fakes::search(&bin, place.path());
        let interpreter = find(&search).unwrap();
        assert_eq!(interpreter.version, (3, 11, 2));
    }

    #[test]
    fn looks_where_version_managers_put_them() {
        let place = tempfile::tempdir().unwrap();
        let at = place.path().join(".pyenv/versions/3.12.1/bin/python3");
        fakes::python(&at, "CPython", (3, 12, 1));
        let search = fakes::search(&place.path().join("bin"), place.path());
        assert_eq!(find(&search).unwrap().minor(), (3, 12));
    }

    #[test]
    fn says_what_it_found_and_what_to_do() {
        let place = tempfile::tempdir().unwrap();
        let bin = place.path().join("bin");
        fakes::python(&bin.join("python3"), "CPython", (3, 13, 0));
        fakes::python(&bin.join("python3.12"), "PyPy", (3, 12, 0));
        let text = find(&fakes::search(&bin, place.path()))
            .unwrap_err()
            .to_string();
        assert!(text.starts_with("Environment: no suitable Python interpreter; expected CPython 3.12 or 3.11; found PyPy 3.12.0"), "{text}");
        assert!(text.contains("CPython 3.13.0"), "{text}");
        assert!(text.contains("apt-get install python3.12"), "{text}");
    }

    #[test]
    fn something_else_than_python_says_what_it_answered() {
        let place = tempfile::tempdir().unwrap();
        let program = place.path().join("program");
        let why = ask(&program).unwrap_err();
        assert!(why.starts_with("could not be started"), "{why}");
        fakes::script(&program, "echo hello");
        assert_eq!(
            ask(&program).unwrap_err(),
            "did not answer as Python does: \"hello\""
        );
    }
}
