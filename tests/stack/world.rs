//! A state directory of one test, clients as processes of their own, and waiting.

use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use kvcr_phase1::failure::Failure;
use kvcr_phase1::stack::admin;
use kvcr_phase1::stack::harm::{Blow, Changes, Part};
use kvcr_phase1::stack::lease::{LaunchSpec, Lease, LeaseRequest, Progress, acquire};
use kvcr_phase1::stack::leftovers::Leftovers;
use kvcr_phase1::stack::protocol::{Mode, Status};
use kvcr_phase1::stack::state_dir::{StackDir, StateDir};
use kvcr_phase1::stack::sweep::Identity;
use kvcr_phase1::stack::wait::{Look, until_blocking};
use rustix::process::Signal;

use crate::behaviour::run;
use crate::toy::Toys;

/// Generous: it only bounds a test that has gone wrong.
const LONG: Duration = Duration::from_secs(120);

/// One fingerprint in a state directory. Nothing of it survives the value.
pub(crate) struct World {
    pub(crate) spec: LaunchSpec,
    pub(crate) files: tempfile::TempDir,
}

impl World {
    pub(crate) fn new(toys: &Toys) -> Self {
        let files = tempfile::tempdir().unwrap();
        let state = files.path().join("s");
        Self::within(files, &state, toys)
    }

    /// A second fingerprint in the state directory of another world.
    pub(crate) fn beside(other: &Self, toys: &Toys) -> Self {
        Self::within(tempfile::tempdir().unwrap(), &other.spec.state_dir, toys)
    }

    fn within(files: tempfile::TempDir, state: &Path, toys: &Toys) -> Self {
        let fingerprint = uuid::Uuid::new_v4().simple().to_string();
        Self {
            spec: LaunchSpec {
                simulated: false,
                state_dir: state.to_owned(),
                profile: format!("toys-{}", &fingerprint[..4]),
                fingerprint,
                devices: Vec::new(),
                exe: std::env::current_exe().unwrap(),
                keep_seconds: 300,
                reference_keep_seconds: 300,
                bring_up_seconds: 100,
                max_lifetime_seconds: 900,
                launch: serde_json::to_value(toys).unwrap(),
            },
            files,
        }
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.files.path().join(name)
    }

    pub(crate) fn try_lease(&self, case: &str, run: &str, mode: Mode) -> Result<Lease, Failure> {
        acquire(
            &self.spec,
            &LeaseRequest {
                run_id: run.to_owned(),
                case: case.to_owned(),
                mode,
            },
            &mut |_| {},
            &AtomicBool::new(false),
        )
    }

    pub(crate) fn lease(&self) -> Lease {
        self.try_lease("case", "run", Mode::Shared).unwrap()
    }

    pub(crate) fn status(&self) -> Option<Status> {
        let all = admin::status(&self.spec.state_dir).unwrap();
        all.into_iter()
            .find(|status| status.fingerprint == self.spec.fingerprint)
    }

    pub(crate) fn dir(&self) -> StackDir {
        StateDir::open(&self.spec.state_dir)
            .unwrap()
            .stack(&self.spec.fingerprint)
            .unwrap()
    }

    /// The supervisor and everything it started are gone.
    pub(crate) fn until_nothing_is_left(&self) {
        eventually("the supervisor exits", || {
            self.dir().try_lock().unwrap().is_some()
        });
        assert!(!self.leftovers().any(), "{:?}", self.leftovers());
    }

    pub(crate) fn leftovers(&self) -> Leftovers {
        Leftovers::of(&self.dir(), &self.spec.fingerprint, None)
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.dir().log()).unwrap_or_default()
    }

    /// A client in a process of its own.
    pub(crate) fn client(&self, case: &str, mode: Mode) -> Client {
        self.client_by(Command::new(&self.spec.exe), case, mode)
    }

    pub(crate) fn client_by(&self, mut command: Command, case: &str, mode: Mode) -> Client {
        let mode = if mode == Mode::Shared {
            "shared"
        } else {
            "exclusive"
        };
        let mut child = command
            .args([
                "__client",
                &serde_json::to_string(&self.spec).unwrap(),
                case,
                mode,
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Client { child, lines }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- supervisor.log\n{}---", self.log());
        }
        let _ = admin::down(&self.spec.state_dir, Some(&self.spec.fingerprint), true);
    }
}

/// A client in a process of its own: killing it is how its lease ends.
pub(crate) struct Client {
    pub(crate) child: Child,
    pub(crate) lines: Lines<BufReader<ChildStdout>>,
}

impl Client {
    /// Its next line that begins with `word`.
    pub(crate) fn until(&mut self, word: &str) -> String {
        loop {
            let line = self
                .lines
                .next()
                .expect("the client is still there")
                .unwrap();
            if line.starts_with(word) {
                return line;
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `__client SPEC CASE MODE`: says what happens, holds the lease until it is killed or told.
pub(crate) fn client_main(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let mut next = || args.next().unwrap().into_string().unwrap();
    let spec: LaunchSpec = serde_json::from_str(&next()).unwrap();
    let case = next();
    let mode = if next() == "shared" {
        Mode::Shared
    } else {
        Mode::Exclusive
    };
    let request = LeaseRequest {
        run_id: "run".to_owned(),
        case,
        mode,
    };
    let mut report = |progress: Progress| {
        match progress {
            Progress::Queued { behind } => println!("queued {}", behind.join(",")),
            other => println!("progress {other}"),
        }
        std::io::stdout().flush().unwrap();
    };
    match acquire(&spec, &request, &mut report, &AtomicBool::new(false)) {
        Ok(lease) => {
            println!("granted {}", lease.stack().generation);
            std::io::stdout().flush().unwrap();
            harm(&lease, &request.case);
            // Until the test closes it.
            let _ = std::io::stdin().read(&mut [0]);
            ExitCode::SUCCESS
        }
        Err(failure) => {
            println!("failed {failure}");
            ExitCode::FAILURE
        }
    }
}

/// Some cases do what they are called.
fn harm(lease: &Lease, case: &str) {
    if let Some(process) = case
        .strip_prefix("kills ")
        .or(case.strip_prefix("replaces "))
    {
        run(lease.strike(process, Part::Whole, Blow::Kill)).unwrap();
        println!("killed {process}");
        std::io::stdout().flush().unwrap();
    }
    if let Some(process) = case.strip_prefix("replaces ") {
        run(lease.replace(process, Changes::default())).unwrap();
    }
}

/// Waits until `condition` holds.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    until_blocking::<(), String>(LONG, Duration::from_millis(10), || {
        if condition() {
            Look::Ready(())
        } else {
            Look::NotYet(what.to_owned())
        }
    })
    .unwrap_or_else(|gave| panic!("{gave}"));
}

/// `GET url`.
pub(crate) fn get(url: &str) -> String {
    let host = url.strip_prefix("http://").unwrap().trim_end_matches('/');
    let mut stream = TcpStream::connect(host).unwrap();
    stream
        .write_all(b"GET / HTTP/1.1\r\nhost: toy\r\n\r\n")
        .unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

/// The process whose pid a file holds.
pub(crate) fn identity_in(file: &Path) -> Identity {
    let pid = fs::read_to_string(file).unwrap().trim().parse().unwrap();
    Identity::of(pid).unwrap()
}

pub(crate) fn kill(pid: u32) {
    assert!(Identity::of(pid).unwrap().signal(Signal::KILL));
}
