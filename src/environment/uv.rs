//! uv: the one on `PATH` if it is recent enough, else the pinned one, brought by pip.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::failure::Failure;

use super::assets::UvPin;
use super::child::{self, Ending, Search};
use super::interpreter::Interpreter;
use super::progress::Reporter;
use super::{lock, log};

const ANSWER_LIMIT: Duration = Duration::from_secs(20);
const BRING_LIMIT: Duration = Duration::from_secs(600);

/// A uv that answered.
#[derive(Clone, Debug)]
pub(crate) struct Uv {
    pub(crate) program: PathBuf,
    pub(crate) version: String,
}

/// Finds one, or brings one into `<cache>/tools`.
pub(crate) fn find_or_bring(
    pin: &UvPin,
    cache: &Path,
    python: &Interpreter,
    search: &Search,
    reporter: &mut dyn Reporter,
) -> Result<Uv, Failure> {
    let mut why = "none on PATH".to_owned();
    for program in search.all("uv") {
        match ask(&program) {
            Ok(uv) if number(&uv.version) >= number(&pin.minimum) => return Ok(uv),
            Ok(uv) => why = format!("{} is older than {}", uv.version, pin.minimum),
            Err(_) => {} // a shim of a version that is not selected
        }
    }
    let directory = cache.join("tools").join(format!("uv-{}", pin.version));
    let program = directory.join("bin/uv");
    let usable = || ask(&program).ok().filter(|uv| uv.version == pin.version);
    if let Some(uv) = usable() {
        return Ok(uv);
    }
    log::create_dir(&cache.join("tools"))?;
    let held = lock::wait_to_install(&directory, BRING_LIMIT, reporter)?;
    if let Some(uv) = usable() {
        return Ok(uv);
    }
    reporter.step(&format!("Bringing uv {} ({why})", pin.version));
    bring(pin, &directory, python, search, &held)?;
    usable().ok_or_else(|| {
        Failure::environment(format!(
            "the uv that pip installed does not run: {}",
            program.display()
        ))
        .expected(format!("uv {}", pin.version))
        .found(ask(&program).map_or_else(|why| why, |uv| uv.version))
        .hint("install uv by other means, so that it is on PATH")
    })
}

/// Asks a program for its version.
fn ask(program: &Path) -> Result<Uv, String> {
    let mut command = child::command(program);
    command.arg("--version");
    let answer = child::ask(command, ANSWER_LIMIT);
    let version = answer
        .stdout
        .strip_prefix("uv ")
        .and_then(|rest| rest.split_whitespace().next());
    match version {
        Some(version) if answer.ok() => Ok(Uv {
            program: program.to_owned(),
            version: version.to_owned(),
        }),
        _ => Err(answer.complaint()),
    }
}

/// Installs the pinned release with pip, into a directory that is renamed into place.
fn bring(
    pin: &UvPin,
    directory: &Path,
    python: &Interpreter,
    search: &Search,
    held: &lock::Lock,
) -> Result<(), Failure> {
    let place = directory.parent().unwrap_or(directory);
    let failed = |error: std::io::Error| log::io("cannot prepare uv", place, &error);
    let temporary = tempfile::Builder::new()
        .prefix(".uv-")
        .tempdir_in(place)
        .map_err(failed)?;
    let requirements = temporary.path().join("uv.txt");
    let mut text = format!("uv=={}", pin.version);
    for hash in &pin.sha256 {
        text.push_str(" --hash=sha256:");
        text.push_str(hash);
    }
    std::fs::write(&requirements, text + "\n").map_err(failed)?;

    let pip = pip(python, search, temporary.path())?;
    let target = temporary.path().join("target");
    let log_path = place.join("uv-install.log");
    let _ = std::fs::remove_file(&log_path);
    let mut command = child::command(&pip);
    command
        .args([
            "-I",
            "-m",
            "pip",
            "install",
            "--no-input",
            "--disable-pip-version-check",
        ])
        .args([
            "--require-hashes",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--target",
        ])
        .arg(&target)
        .arg("-r")
        .arg(&requirements)
        .current_dir(temporary.path());
    let ending = child::work(command, BRING_LIMIT, &log_path, held.file());
    if ending != Ending::Exit(0) {
        return Err(log::explain("pip could not install uv", &ending, &log_path));
    }
    let _ = std::fs::remove_dir_all(directory);
    std::fs::rename(&target, directory).map_err(failed)
}

/// An interpreter with pip: the chosen one, another on `PATH`, or a virtual environment made for
/// the purpose (Debian's Python has no pip, but may have what makes one).
fn pip(python: &Interpreter, search: &Search, temporary: &Path) -> Result<PathBuf, Failure> {
    let has_pip = |program: &Path| {
        let mut command = child::command(program);
        command.args(["-I", "-m", "pip", "--version"]);
        child::ask(command, ANSWER_LIMIT).ok()
    };
    let others = search.all("python3");
    let mut all = vec![python.executable.clone()];
    all.extend(others);
    if let Some(program) = all.iter().find(|program| has_pip(program)) {
        return Ok(program.clone());
    }
    let venv = temporary.join("pip");
    let mut command = child::command(&python.executable);
    command.args(["-I", "-m", "venv"]).arg(&venv);
    let answer = child::ask(command, Duration::from_secs(120));
    let program = venv.join("bin/python");
    if answer.ok() && has_pip(&program) {
        return Ok(program);
    }
    Err(Failure::environment("no uv, and no pip to bring it with")
        .expected("uv on PATH, or a Python with pip or venv")
        .found(format!(
            "neither on PATH; {} has no pip, and its venv says: {}",
            python.executable.display(),
            answer.complaint()
        ))
        .hint("`apt-get install python3-pip` or `apt-get install python3-venv`, or install uv"))
}

/// A version as numbers, for comparison; what is no number counts as 0.
fn number(version: &str) -> Vec<u64> {
    version
        .split('.')
        .map(|part| {
            let digits: String = part.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap_or(0)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::environment::progress::Silent;
    use crate::environment::{fakes, interpreter};

    fn pin() -> UvPin {
        UvPin {
            minimum: "0.8.0".to_owned(),
            version: "0.13.9".to_owned(),
            sha256: vec!["00".repeat(32)],
        }
    }

    fn python(at: &Path) -> Interpreter {
        fakes::python(at, "CPython", (3, 12, 1));
        interpreter::ask(at).unwrap()
    }

    #[test]
    fn one_on_path_is_used_if_recent() {
        let place = tempfile::tempdir().unwrap();
        let bin = place.path().join("bin");
        fakes::script(&bin.join("uv"), "echo 'uv 0.8.1 (x86_64)'");
        let python = python(&place.path().join("python"));
        let search = fakes::search(&bin, place.path());
        let uv = find_or_bring(&pin(), place.path(), &python, &search, &mut Silent).unwrap();
        assert_eq!(uv.version, "0.8.1");
    }

    #[test]
    fn an_old_one_is_replaced_by_the_pinned_one() {
        let place = tempfile::tempdir().unwrap();
        let bin = place.path().join("bin");
        fakes::script(&bin.join("uv"), "echo 'uv 0.7.99'");
        let at = place.path().join("python");
        let python = python(&at);
        // A pip that "installs" a uv, once.
        fakes::script(
            &at,
            r#"case "$*" in *--version*) exit 0;; esac
while [ $# -gt 0 ]; do [ "$1" = --target ] && target=$2; shift; done
mkdir -p "$target/bin"; printf '#!/bin/sh\necho uv 0.13.9\n' > "$target/bin/uv"; chmod +x "$target/bin/uv""#,
        );
        let search = fakes::search(&bin, place.path());
        let cache = place.path().join("cache");
        let uv = find_or_bring(&pin(), &cache, &python, &search, &mut Silent).unwrap();
        assert_eq!(uv.program, cache.join("tools/uv-0.13.9/bin/uv"));
        fakes::script(&at, "exit 1");
        assert!(find_or_bring(&pin(), &cache, &python, &search, &mut Silent).is_ok());
    }

    #[test]
    fn without_uv_and_pip_says_what_to_install() {
        let place = tempfile::tempdir().unwrap();
        let at = place.path().join("python");
        let python = python(&at);
        fakes::script(&at, "echo 'ensurepip is not available'; exit 1");
        let search = fakes::search(&place.path().join("bin"), place.path());
        let text = find_or_bring(&pin(), place.path(), &python, &search, &mut Silent)
            .unwrap_err()
            .to_string();
        assert!(text.contains("no uv, and no pip"), "{text}");
        assert!(
            text.contains("exit status 1 (ensurepip is not available)"),
            "{text}"
        );
        assert!(text.contains("apt-get install python3-venv"), "{text}");
    }

    #[test]
    fn versions_compare_as_numbers() {
        assert!(number("0.13.9") > number("0.8.0"));
        assert!(number("0.8.0-rc1") >= number("0.8.0"));
        assert!(number("1") > number("0.99.99"));
        assert!(number("nonsense") < number("0.8.0"));
    }
}
