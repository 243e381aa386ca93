//! A user's machine of one test: empty directories, a `PATH` of fakes, no other variable.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use kvcr_phase1::stack::wait::{Look, until_blocking};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

/// What this binary has to be called to be the test binary `phase1`.
pub(crate) const PHASE1: &str = "phase1";

/// Generous: it only bounds a test that has gone wrong.
const LONG: Duration = Duration::from_secs(120);

/// An interpreter as far as the harness asks: what it is, that releases fit, and a model that
/// ends early. As an engine it does what `$ENGINE`, filled in below, says.
const PYTHON: &str = r#"case "$*" in
-c*) echo '{"implementation": "CPython", "version": [3, 12, 1], "executable": "'"$0"'", "site": []}' ;;
*preflight.py*) echo '{"schema": 1, "ok": true, "packages": {}, "probes": []}' ;;
*build_model.py*)
    /bin/mkdir -p "$3"
    printf weigh > "$3/model.safetensors"
    echo '{"schema": 1, "files": {"model.safetensors": "00"}, "digest": "00"}' > "$3/model.json" ;;
*) $ENGINE ;;
esac"#;

/// A uv that makes a virtual environment of our interpreter, and installs nothing into it.
const UV: &str = r#"for last; do :; done
case "$1" in
--version) echo 'uv 0.9.0' ;;
venv) /bin/mkdir -p "$last/bin" && /bin/cp "$PYTHON" "$last/bin/python" ;;
esac"#;

/// Directories of one test. Nothing that was started in them survives the value.
pub(crate) struct Place(tempfile::TempDir);

impl Place {
    /// Nothing is installed, and nothing is on `PATH`.
    pub(crate) fn bare() -> Self {
        let place = Self(tempfile::tempdir().expect("a directory"));
        for name in ["bin", "home"] {
            fs::create_dir(place.path(name)).expect("a directory");
        }
        place
    }

    /// With an interpreter that the harness would install with.
    pub(crate) fn with_python() -> Self {
        Self::with_engine(
            "echo 'Traceback (most recent call last):' >&2
             echo 'ModuleNotFoundError: No module named dynamo' >&2
             exit 1",
        )
    }

    /// With an interpreter that, asked to be a process of a stack, runs these words of shell.
    pub(crate) fn with_engine(engine: &str) -> Self {
        let place = Self::bare();
        place.script("python3.12", &PYTHON.replace("$ENGINE", engine));
        place
    }

    /// Adds a uv.
    pub(crate) fn and_uv(self) -> Self {
        let python = self.python();
        self.script("uv", &UV.replace("$PYTHON", &python));
        self
    }

    /// Puts a shell script on `PATH`.
    pub(crate) fn script(&self, name: &str, body: &str) {
        // A shell writes it: were it open for writing in this process, a child that another test
        // thread forks at that moment would make it unexecutable (ETXTBSY).
        let status = Command::new("/bin/sh")
            .args(["-c", "printf '%s' \"$1\" > \"$0\" && chmod 755 \"$0\""])
            .arg(self.path("bin").join(name))
            .arg(format!("#!/bin/sh\n{body}\n"))
            .status()
            .expect("a shell");
        assert!(status.success());
    }

    /// The interpreter, as an argument.
    pub(crate) fn python(&self) -> String {
        self.text("bin/python3.12")
    }

    /// A model of the user's that the harness takes as it is; its directory, as an argument.
    pub(crate) fn model(&self) -> String {
        fs::create_dir(self.path("model")).expect("a directory");
        fs::write(self.path("model/config.json"), "{}").expect("a file");
        self.text("model")
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// Writes a file; its path, as an argument.
    pub(crate) fn file(&self, name: &str, text: &str) -> String {
        fs::write(self.path(name), text).expect("a file");
        self.text(name)
    }

    /// `kvcr-phase1 ARGS`.
    pub(crate) fn command(&self, args: &[&str]) -> Typed {
        self.typed(Command::new(env!("CARGO_BIN_EXE_kvcr-phase1")), args)
    }

    /// `phase1 ARGS`: the test binary.
    pub(crate) fn phase1(&self, args: &[&str]) -> Typed {
        let mut command = Command::new(std::env::current_exe().expect("a path"));
        command.arg0(PHASE1);
        self.typed(command, args)
    }

    fn typed(&self, mut command: Command, args: &[&str]) -> Typed {
        command
            .args(args)
            .current_dir(self.0.path())
            .env_clear()
            .env("HOME", self.path("home"))
            .env("PATH", self.path("bin"))
            .env("PHASE1_CACHE_DIR", self.path("cache"))
            .env("PHASE1_STATE_DIR", self.path("state"))
            .env("PHASE1_RUNS_DIR", self.path("runs"));
        Typed(command)
    }

    /// Shorthand for [`Self::command`] that is waited for.
    pub(crate) fn says(&self, args: &[&str]) -> Said {
        self.command(args).said()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.path("state").is_dir() {
            let _ = self.command(&["down", "--force"]).0.output();
        }
    }
}

/// A command line that is not carried out yet.
pub(crate) struct Typed(Command);

impl Typed {
    pub(crate) fn var(mut self, name: &str, value: &str) -> Self {
        self.0.env(name, value);
        self
    }

    /// As nextest runs a test binary.
    pub(crate) fn under_nextest(self, run: &str) -> Self {
        self.var("NEXTEST", "1").var("NEXTEST_RUN_ID", run)
    }

    /// Starts it, in a process group of its own as a shell does.
    pub(crate) fn start(mut self) -> Running {
        let file = || tempfile::tempfile().expect("a file");
        let (out, err) = (file(), file());
        let copy = |file: &File| Stdio::from(file.try_clone().expect("a descriptor"));
        self.0
            .stdin(Stdio::null())
            .stdout(copy(&out))
            .stderr(copy(&err))
            .process_group(0);
        Running {
            child: self.0.spawn().expect("it starts"),
            out,
            err,
        }
    }

    pub(crate) fn said(self) -> Said {
        self.start().end()
    }

    /// Carries it out for a reader who has left: standard output is a pipe without another end.
    pub(crate) fn unread(mut self) -> ExitStatus {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let err = tempfile::tempfile().expect("a file");
        let copy = err.try_clone().expect("a descriptor");
        self.0.stdin(Stdio::null()).stdout(writer).stderr(copy);
        let status = self.0.status().expect("it starts");
        assert!(!text(&err).contains("panicked"), "{}", text(&err));
        status
    }
}

/// A command that is being carried out.
pub(crate) struct Running {
    child: Child,
    out: File,
    err: File,
}

impl Running {
    /// Ctrl-C: the terminal's whole foreground group hears it.
    pub(crate) fn ctrl_c(&self) {
        kill_process_group(Pid::from_child(&self.child), Signal::INT).expect("it still runs");
    }

    /// SIGTERM, to it alone.
    pub(crate) fn terminate(&self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).expect("it still runs");
    }

    /// SIGKILL, to it alone; waits for its end.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("it still runs");
        self.child.wait().expect("its end");
    }

    /// What it has said so far, on standard output.
    pub(crate) fn said_so_far(&self) -> String {
        text(&self.out)
    }

    /// What it has said so far, on standard error.
    pub(crate) fn so_far(&self) -> String {
        text(&self.err)
    }

    /// Waits for the end. Output goes to files, so that a process which is left behind cannot
    /// keep us waiting.
    pub(crate) fn end(mut self) -> Said {
        let ended = until_blocking(LONG, Duration::from_millis(5), || {
            match self.child.try_wait() {
                Ok(Some(status)) => Look::Ready(status),
                Ok(None) => Look::NotYet("it does not end".to_owned()),
                Err(error) => Look::Failed(error),
            }
        });
        let status = ended.unwrap_or_else(|gave| {
            let _ = self.child.kill();
            panic!("{gave}\n{}", text(&self.err));
        });
        let said = Said {
            code: status.code(),
            out: text(&self.out),
            err: text(&self.err),
        };
        assert!(!said.err.contains("panicked"), "{said:?}");
        said
    }
}

/// All of a file, at no cost to the position at which the process writes.
fn text(file: &File) -> String {
    let size = file.metadata().expect("a file").len();
    let mut bytes = vec![0; usize::try_from(size).expect("small")];
    file.read_exact_at(&mut bytes, 0).expect("a file");
    String::from_utf8(bytes).expect("UTF-8")
}

/// What was said, and the exit status (none: a signal ended it).
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) code: Option<i32>,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// It ended with `code`, and all of `words` are on standard error.
    #[track_caller]
    pub(crate) fn fails(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in {self:#?}");
        }
    }

    /// It went well, and all of `words` are on standard output.
    #[track_caller]
    pub(crate) fn succeeds(&self, words: &[&str]) {
        assert_eq!(self.code, Some(0), "{self:#?}");
        for word in words {
            assert!(self.out.contains(word), "no {word:?} in {self:#?}");
        }
    }

    /// The document on standard output.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.out).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// Waits until `look` has something.
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    until_blocking::<T, String>(LONG, Duration::from_millis(10), || match look() {
        Some(value) => Look::Ready(value),
        None => Look::NotYet(what.to_owned()),
    })
    .unwrap_or_else(|gave| panic!("{gave}"))
}

/// A JSON file.
pub(crate) fn read_json(path: &Path) -> serde_json::Value {
    let text = fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::from_slice(&text).expect("JSON")
}
