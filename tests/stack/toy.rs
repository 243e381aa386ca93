//! Toys: real processes with the manners of an engine and none of its weight, and the blueprint
//! that starts them.

#![expect(
    clippy::disallowed_methods,
    reason = "a toy is a whole program: it shows its environment and takes its time"
)]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use kvcr_phase1::engine::{Blueprint, BoxFuture, Registered};
use kvcr_phase1::failure::Failure;
use kvcr_phase1::plan::{Bindings, Group, Plan, PlannedWorker, Probe, Process, Role, Serves};
use kvcr_phase1::stack::clock::monotonic_ns;
use kvcr_phase1::stack::harm::Changes;
use kvcr_phase1::stack::protocol::WorkerInfo;
use serde::{Deserialize, Serialize};

/// The command line of a grandchild, the engine core of a toy.
const GRANDCHILD: &str = "sleep 1000";

/// One toy process.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Toy {
    pub(crate) name: String,
    pub(crate) group: Group,
    pub(crate) after: Vec<String>,
    pub(crate) manners: Manners,
    pub(crate) stop_seconds: u64,
}

/// How a toy behaves.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(crate) struct Manners {
    /// Milliseconds until it listens.
    pub(crate) delay_ms: u64,
    /// It listens once this file exists.
    pub(crate) gate: Option<PathBuf>,
    /// It exits with code 3 if this file exists.
    pub(crate) fails_while: Option<PathBuf>,
    /// It ignores SIGTERM.
    pub(crate) stubborn: bool,
    /// It starts a process in a session of its own, whose pid goes to this file.
    pub(crate) grandchild: Option<PathBuf>,
    /// It ends with code 1 when that process does.
    pub(crate) follows: bool,
    /// It says why it may not start, and exits with code 4.
    pub(crate) refused: bool,
    /// It holds a file of this name under `/dev/shm` open; `{}` is the plan's prefix.
    pub(crate) shm: Option<String>,
}

/// A stack of toys.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct Toys {
    pub(crate) toys: Vec<Toy>,
    pub(crate) fixed: Vec<(String, u16)>,
    pub(crate) shm_bytes: u64,
}

impl Toys {
    /// A core process that nobody waits for.
    pub(crate) fn with(mut self, name: &str, manners: Manners) -> Self {
        self.toys.push(Toy {
            name: name.to_owned(),
            group: Group::Core,
            after: Vec::new(),
            manners,
            stop_seconds: 30,
        });
        self
    }

    /// The last toy belongs to the reference group.
    pub(crate) fn in_reference_group(mut self) -> Self {
        self.toys.last_mut().unwrap().group = Group::Reference;
        self
    }

    /// The last toy starts after `name`.
    pub(crate) fn after(mut self, name: &str) -> Self {
        self.toys.last_mut().unwrap().after.push(name.to_owned());
        self
    }

    /// The last toy has this long to stop.
    pub(crate) fn stop_seconds(mut self, seconds: u64) -> Self {
        self.toys.last_mut().unwrap().stop_seconds = seconds;
        self
    }
}

/// The supervisor's way from JSON to a blueprint.
pub(crate) fn build(launch: &serde_json::Value) -> Result<Box<dyn Blueprint>, Failure> {
    let toys: Toys = serde_json::from_value(launch.clone())
        .map_err(|error| Failure::environment(format!("not toys: {error}")))?;
    Ok(Box::new(toys))
}

pub(crate) fn shm_prefix(cookie: &str) -> String {
    format!("phase1-{}-", cookie.replace(':', "-"))
}

impl Blueprint for Toys {
    fn name(&self) -> &str {
        "toys"
    }

    fn ports(&self) -> Vec<String> {
        self.toys.iter().map(|toy| toy.name.clone()).collect()
    }

    fn fixed_ports(&self) -> Vec<(String, u16)> {
        self.fixed.clone()
    }

    fn plan(&self, bindings: &Bindings) -> Result<Plan, Failure> {
        let exe = std::env::current_exe().unwrap().display().to_string();
        let prefix = shm_prefix(&bindings.cookie);
        let process = |toy: &Toy| {
            let port = bindings.ports[&toy.name];
            let mut manners = toy.manners.clone();
            manners.shm = manners.shm.map(|name| name.replace("{}", &prefix));
            let mut argv = vec![
                exe.clone(),
                "__toy".to_owned(),
                port.to_string(),
                serde_json::to_string(&manners).unwrap(),
            ];
            if manners.stubborn {
                // An ignored signal stays ignored over exec.
                let shell = ["/bin/sh", "-c", "trap '' TERM; exec \"$0\" \"$@\""];
                argv.splice(0..0, shell.map(str::to_owned));
            }
            Process {
                name: toy.name.clone(),
                role: Role::Worker,
                group: toy.group,
                argv,
                env: BTreeMap::from([("TOY".to_owned(), toy.name.clone())]),
                after: toy.after.clone(),
                ready: vec![Probe::Tcp { port }, Probe::Http { url: url(port) }],
                start_seconds: 60,
                stop_seconds: toy.stop_seconds,
            }
        };
        let worker = |index: usize, toy: &Toy| PlannedWorker {
            process: toy.name.clone(),
            index,
            served_model: toy.name.clone(),
            metrics_url: url(bindings.ports[&toy.name]),
            health_url: url(bindings.ports[&toy.name]),
            kvcr: false,
            serves: Serves::Whole,
        };
        let of = |group| {
            self.toys
                .iter()
                .filter(move |toy: &&Toy| toy.group == group)
        };
        let workers: Vec<_> = of(Group::Core)
            .enumerate()
            .map(|(i, toy)| worker(i, toy))
            .collect();
        Ok(Plan {
            discovery: kvcr_phase1::plan::ChosenDiscovery {
                backend: "file".into(),
                reason: "toys".into(),
            },
            topology: "toys".to_owned(),
            processes: self.toys.iter().map(process).collect(),
            frontend_url: workers[0].health_url.clone(),
            workers,
            reference: of(Group::Reference).next().map(|toy| worker(0, toy)),
            directories: vec![bindings.scratch.join("toys")],
            shm_prefixes: vec![prefix],
            shm_bytes: self.shm_bytes,
            external: Vec::new(),
        })
    }

    fn ready<'a>(
        &'a self,
        plan: &'a Plan,
        group: Group,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Vec<WorkerInfo>, Failure>> {
        Box::pin(async move {
            say("toys answer".to_owned());
            let planned: Vec<_> = match group {
                Group::Core => plan.workers.iter().collect(),
                Group::Reference => plan.reference.iter().collect(),
            };
            let info = |worker: &PlannedWorker| WorkerInfo {
                process: worker.process.clone(),
                index: worker.index,
                instance_id: u64::MAX,
                served_model: worker.served_model.clone(),
                serves: worker.serves,
                metrics_url: worker.metrics_url.clone(),
                probes_ms: 0,
                ready_ms: 0,
            };
            Ok(planned.into_iter().map(info).collect())
        })
    }

    fn ready_again<'a>(
        &'a self,
        plan: &'a Plan,
        process: &'a str,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Registered, Failure>> {
        Box::pin(async move {
            let all = self.ready(plan, Group::Core, say).await?;
            let mut found = all.into_iter().find(|worker| worker.process == process);
            let mut worker = found.take().unwrap();
            worker.instance_id -= 1;
            let now = monotonic_ns();
            Ok(Registered {
                worker,
                listed_ns: now,
                canary_ns: now,
            })
        })
    }

    fn changed(&self, plan: &Plan, name: &str, changes: &Changes) -> Result<Process, Failure> {
        let mut process = plan
            .processes
            .iter()
            .find(|it| it.name == name)
            .unwrap()
            .clone();
        if changes.owner_of.is_some() {
            return Err(Failure::inconclusive("toys have no owners"));
        }
        if changes.digest.is_some() {
            let manners = Manners {
                refused: true,
                ..Manners::default()
            };
            *process.argv.last_mut().unwrap() = serde_json::to_string(&manners).unwrap();
        }
        Ok(process)
    }

    fn is_engine_core(&self, command_line: &str) -> bool {
        command_line == GRANDCHILD
    }

    fn explain(&self, process: &Process, ending: Option<&str>, log: &Path) -> Failure {
        let text = fs::read_to_string(log).unwrap_or_default();
        let line = text.lines().last().unwrap_or("nothing was logged");
        Failure::product(format!("{} broke", process.name))
            .found(ending.unwrap_or("not ready"))
            .cause(line, log)
    }

    fn devices_released(&self) -> BoxFuture<'_, Result<(), Failure>> {
        Box::pin(async { Ok(()) })
    }
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}/")
}

/// The toy itself: `__toy PORT MANNERS`.
#[expect(
    clippy::zombie_processes,
    reason = "a child that nobody waits for is what is tested"
)]
pub(crate) fn main(mut args: impl Iterator<Item = OsString>) -> ExitCode {
    let port: u16 = args.next().unwrap().to_str().unwrap().parse().unwrap();
    let manners: Manners = serde_json::from_str(args.next().unwrap().to_str().unwrap()).unwrap();
    if manners.fails_while.is_some_and(|path| path.exists()) {
        println!("toy: ImportError, so to say");
        return ExitCode::from(3);
    }
    if manners.refused {
        println!("toy: the digest does not match");
        return ExitCode::from(4);
    }
    let _shm = manners.shm.map(|name| {
        let path = Path::new("/dev/shm").join(name);
        fs::File::create(path).unwrap()
    });
    if let Some(file) = manners.grandchild {
        let script = format!(
            "echo $$ > '{0}.new'; mv '{0}.new' '{0}'; exec {GRANDCHILD}",
            file.display()
        );
        let mut child = Command::new("setsid")
            .args(["sh", "-c", &script])
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        // Not ready before it is there: tests read the file.
        until(|| file.exists());
        if manners.follows {
            std::thread::spawn(move || {
                child.wait().unwrap();
                println!("toy: my engine core is dead");
                std::process::exit(1);
            });
        }
    }
    if let Some(gate) = manners.gate {
        until(|| gate.exists());
    }
    std::thread::sleep(Duration::from_millis(manners.delay_ms));
    let listener = TcpListener::bind(("0.0.0.0", port)).unwrap();
    println!("toy: listening");
    for mut stream in listener.incoming().flatten() {
        let mut request = String::new();
        let mut reader = BufReader::new(stream.try_clone().unwrap());
        // The first line and the headers; toys take no bodies.
        while reader.read_line(&mut request).is_ok_and(|n| n > 2) {}
        let body: String = std::env::vars()
            .map(|(name, value)| format!("{name}={value}\n"))
            .collect();
        let _ = write!(
            stream,
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        );
    }
    ExitCode::SUCCESS
}

fn until(condition: impl Fn() -> bool) {
    while !condition() {
        std::thread::sleep(Duration::from_millis(5));
    }
}
