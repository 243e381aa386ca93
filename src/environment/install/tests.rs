//! The whole install, with a uv and interpreters that are shell scripts.

use std::process::{Command, Stdio};

use super::*;
use crate::environment::fakes;
use crate::environment::inventory::{self, Condition};
use crate::environment::progress::Silent;
use crate::failure::Class;

/// Remembers what it was told.
#[derive(Default)]
struct Told(Vec<String>);

impl Reporter for Told {
    fn step(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }

    fn note(&mut self, text: &str) {
        self.0.push(text.to_owned());
    }

    fn done(&mut self, _: &str) {}
}

impl Told {
    fn has(&self, text: &str) -> bool {
        self.0.iter().any(|line| line.contains(text))
    }
}

/// A machine with a Python, a uv and nothing else, in a directory.
struct Machine {
    root: PathBuf,
    _kept: Option<tempfile::TempDir>,
}

impl Machine {
    fn new() -> Self {
        let place = tempfile::tempdir().unwrap();
        let machine = Self {
            root: place.path().canonicalize().unwrap(),
            _kept: Some(place),
        };
        fakes::python(&machine.root.join("bin/python3.12"), "CPython", (3, 12, 1));
        machine.uv("");
        let model = machine.root.join("model");
        std::fs::create_dir(&model).unwrap();
        std::fs::write(model.join("config.json"), "{}").unwrap();
        machine
    }

    /// A uv whose `pip install` first does `before`.
    fn uv(&self, before: &str) {
        let root = self.root.display();
        fakes::script(
            &self.root.join("bin/uv"),
            &format!(
                r#"case "$1" in
--version) echo uv 0.13.9;;
cache) echo {root};;
venv)
    for last; do :; done
    mkdir -p "$last/bin" "$last/site"
    cat > "$last/bin/python" <<END
#!/bin/sh
echo '{{"implementation": "CPython", "version": [3, 12, 1], "executable": "/x", "site": ["$last/site"]}}'
END
    chmod +x "$last/bin/python";;
pip)
    echo install >> {root}/installs
    {before}
    site=$(dirname "$(dirname "$4")")/site
    mkdir -p "$site/kvcr-0.1.1.dist-info"
    echo kvcr >> "$site/kvcr-0.1.1.dist-info/RECORD";;
esac"#
            ),
        );
    }

    fn request(&self) -> Request {
        Request {
            name: "cpu".to_owned(),
            cache: self.root.join("cache"),
            model: ModelRequest::Path(self.root.join("model")),
            search: fakes::search(&self.root.join("bin"), &self.root),
        }
    }

    fn recipe() -> Recipe {
        let mut recipe = Recipe::embedded("cpu").unwrap();
        recipe.files.clear();
        for (name, text) in [
            (assets::LOCK, "kvcr==0.1.1\n"),
            (assets::PREFLIGHT, ""),
            ("overlay/a.py", "pass\n"),
        ] {
            recipe.files.insert(name.to_owned(), text.as_bytes().into());
        }
        recipe.pins.disk.clear();
        recipe
    }

    fn install(&self, reporter: &mut dyn Reporter) -> Result<Installed, Failure> {
        let request = self.request();
        Installer::new(&request.cache, &request.search, Self::recipe())?
            .with_model(&request.model, reporter)
    }

    fn locate(&self) -> Result<Installed, Failure> {
        let request = self.request();
        Installer::new(&request.cache, &request.search, Self::recipe())?
            .locate_with_model(&request.model)
    }

    fn installs(&self) -> usize {
        std::fs::read_to_string(self.root.join("installs"))
            .unwrap_or_default()
            .lines()
            .count()
    }

    fn directory(installed: &Installed) -> PathBuf {
        installed
            .program
            .path()
            .ancestors()
            .nth(3)
            .unwrap()
            .to_owned()
    }
}

#[test]
fn installs_once_and_then_finds_it() {
    let machine = Machine::new();
    let text = machine.locate().unwrap_err().to_string();
    assert!(text.contains("is not installed"), "{text}");
    assert!(text.contains("kvcr-phase1 env install cpu"), "{text}");

    let installed = machine.install(&mut Silent).unwrap();
    assert_eq!(installed.packages["kvcr"].version, "0.1.1");
    assert!(installed.overlay.as_ref().unwrap().join("a.py").exists());
    assert_eq!(installed.etcd, None);
    assert_eq!(machine.install(&mut Silent).unwrap(), installed);
    assert_eq!(machine.locate().unwrap(), installed);
    assert_eq!(machine.installs(), 1);
}

/// Shims of version managers take a quarter of a second each, and every listing of tests locates.
#[test]
fn what_is_installed_asks_no_interpreter_on_the_path() {
    let machine = Machine::new();
    let installed = machine.install(&mut Silent).unwrap();
    let bin = machine.root.join("bin");
    for name in ["python3.12", "python3.11", "python3"] {
        let asked = machine.root.join("asked");
        fakes::script(&bin.join(name), &format!("echo > {}", asked.display()));
    }
    assert_eq!(machine.locate().unwrap(), installed);
    assert!(!machine.root.join("asked").exists());
    std::fs::remove_dir_all(Machine::directory(&installed)).unwrap();
    assert!(machine.locate().is_err());
    assert!(machine.root.join("asked").exists());
}

#[test]
fn a_relative_cache_is_the_same_place() {
    let machine = Machine::new();
    let installed = machine.install(&mut Silent).unwrap();
    let mut request = machine.request();
    let up = std::env::current_dir().unwrap().components().count() - 1;
    request.cache = PathBuf::from("../".repeat(up)).join(request.cache.strip_prefix("/").unwrap());
    let found = Installer::new(&request.cache, &request.search, Machine::recipe())
        .unwrap()
        .locate_with_model(&request.model)
        .unwrap();
    assert_eq!(found.packages, installed.packages);
    assert!(found.program.path().is_absolute());
}

#[test]
fn an_interrupted_install_is_done_again() {
    let machine = Machine::new();
    let installed = machine.install(&mut Silent).unwrap();
    let directory = Machine::directory(&installed);
    std::fs::remove_file(directory.join(manifest::FILE)).unwrap();
    std::fs::write(directory.join("half"), "x").unwrap();
    assert_eq!(
        inventory::list(&machine.request().cache)[0].condition,
        Condition::Interrupted
    );

    let mut told = Told::default();
    machine.install(&mut told).unwrap();
    assert!(told.has("Unfinished, done again"), "{:?}", told.0);
    assert!(!directory.join("half").exists());
    assert_eq!(machine.installs(), 2);
}

#[test]
fn damage_is_named_and_repaired() {
    let machine = Machine::new();
    let installed = machine.install(&mut Silent).unwrap();
    let directory = Machine::directory(&installed);
    let record = directory.join("venv/site/kvcr-0.1.1.dist-info/RECORD");
    let damages: [(&str, &dyn Fn()); 6] = [
        ("manifest.json is damaged", &|| {
            std::fs::write(directory.join(manifest::FILE), "{\"schema\"").unwrap();
        }),
        ("venv/bin/python: could not be started", &|| {
            std::fs::remove_file(installed.program.path()).unwrap();
        }),
        ("overlay/a.py is not as installed", &|| {
            std::fs::write(directory.join("overlay/a.py"), "changed").unwrap();
        }),
        ("changed after the install: kvcr", &|| {
            std::fs::write(&record, "other").unwrap();
        }),
        ("changed after the install: nixl", &|| {
            std::fs::create_dir(directory.join("venv/site/nixl-1.0.dist-info")).unwrap();
        }),
        ("python is CPython 3.11.0 now", &|| {
            fakes::python(installed.program.path(), "CPython", (3, 11, 0));
        }),
    ];
    for (number, (what, damage)) in damages.iter().enumerate() {
        damage();
        let text = machine.locate().unwrap_err().to_string();
        assert!(text.contains("is damaged") && text.contains(what), "{text}");
        let mut told = Told::default();
        machine.install(&mut told).unwrap();
        assert!(
            told.has("Damaged, done again") && told.has(what),
            "{:?}",
            told.0
        );
        assert_eq!(machine.installs(), number + 2);
        assert_eq!(machine.locate().unwrap(), installed);
    }
}

#[test]
fn what_a_stack_runs_from_is_neither_repaired_nor_removed() {
    let machine = Machine::new();
    let installed = machine.install(&mut Silent).unwrap();
    let cache = machine.request().cache;
    let hold = installed.hold().unwrap();
    let second = installed.hold().unwrap();
    assert!(inventory::list(&cache)[0].in_use);
    let removal = inventory::remove(&cache, "all").unwrap();
    assert!(removal.removed.is_empty());
    assert!(removal.kept[0].1.contains("a stack runs from it"));

    std::fs::remove_file(Machine::directory(&installed).join("overlay/a.py")).unwrap();
    let text = machine.install(&mut Silent).unwrap_err().to_string();
    assert!(text.contains("a stack still runs from it"), "{text}");

    drop((hold, second));
    machine.install(&mut Silent).unwrap();
    let removal = inventory::remove(&cache, "cpu").unwrap();
    assert_eq!(removal.removed.len(), 1);
    assert!(inventory::list(&cache).is_empty());
    let text = inventory::remove(&cache, "cpu").unwrap_err().to_string();
    assert!(text.contains("nothing called `cpu` is installed"), "{text}");
}

#[test]
fn concurrent_threads_make_one_install() {
    let machine = Machine::new();
    machine.uv("sleep 0.4");
    let waited = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let mut told = Told::default();
                    machine.install(&mut told).unwrap();
                    told.has("Waiting for another install (pid ")
                })
            })
            .collect();
        let waited = threads.into_iter().map(|it| it.join().unwrap());
        waited.filter(|waited| *waited).count()
    });
    assert_eq!(machine.installs(), 1);
    assert_eq!(waited, 3);
}

/// Not a test: what the tests below run as a process of its own, in a machine's directory.
#[test]
#[ignore = "a helper process of other tests"]
fn as_a_process() {
    let machine = Machine {
        root: std::env::current_dir().unwrap(),
        _kept: None,
    };
    machine.install(&mut Silent).unwrap();
}

fn process(machine: &Machine) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "environment::install::tests::as_a_process",
            "--ignored",
        ])
        .current_dir(&machine.root)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

#[test]
fn concurrent_processes_make_one_install() {
    let machine = Machine::new();
    machine.uv("sleep 0.4");
    let mut processes = [process(&machine), process(&machine)];
    for process in &mut processes {
        assert!(process.wait().unwrap().success());
    }
    assert_eq!(machine.installs(), 1);
    assert!(machine.locate().is_ok());
}

#[test]
fn a_killed_install_is_done_again_and_its_children_are_ended() {
    let machine = Machine::new();
    // `exec`: the process that has the lock as its input is the one that takes its time.
    machine.uv("exec sleep 60");
    let mut killed = process(&machine);
    while machine.installs() == 0 {
        crate::stack::wait::pause(Duration::from_millis(10));
    }
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(machine.locate().is_err());

    machine.uv("");
    let started = std::time::Instant::now();
    let mut told = Told::default();
    machine.install(&mut told).unwrap();
    assert!(started.elapsed() < Duration::from_secs(30));
    let waiting = format!("what a killed install (pid {}) left running", killed.id());
    assert!(told.has(&waiting), "{:?}", told.0);
    assert!(told.has("Unfinished, done again"), "{:?}", told.0);
    assert_eq!(machine.installs(), 2);
}

#[test]
fn a_failed_install_is_explained_and_leaves_only_its_log() {
    let machine = Machine::new();
    machine.uv("echo '  ╰─▶ Hash mismatch for `kvcr==0.1.1`'; exit 2");
    let failure = machine.install(&mut Silent).unwrap_err();
    assert_eq!(failure.class, Class::Environment);
    assert!(
        failure.what.contains("not the one that was locked"),
        "{failure}"
    );
    assert_eq!(
        failure.cause.as_deref(),
        Some("Hash mismatch for `kvcr==0.1.1`")
    );
    let log = failure.log.unwrap();
    assert!(log.exists());
    assert_eq!(log.parent().unwrap().read_dir().unwrap().count(), 1);

    machine.uv("");
    machine.install(&mut Silent).unwrap();
}

#[test]
fn a_full_disk_is_found_before_anything_is_done() {
    let machine = Machine::new();
    let mut recipe = Machine::recipe();
    let need = assets::DiskNeed {
        environment: u64::MAX,
        uv_cache: 0,
    };
    recipe.pins.disk.insert("cpu".to_owned(), need);
    let request = machine.request();
    let failure = Installer::new(&request.cache, &request.search, recipe)
        .unwrap()
        .install(&mut Silent)
        .unwrap_err();
    assert!(failure.what.contains("not enough disk space"), "{failure}");
    assert_eq!(machine.installs(), 0);
}

#[test]
fn a_cache_that_cannot_be_written_is_said() {
    let machine = Machine::new();
    // A file in its place: root may write anywhere, so modes would prove nothing.
    std::fs::write(machine.request().cache, "").unwrap();
    let failure = machine.install(&mut Silent).unwrap_err();
    assert_eq!(failure.class, Class::Environment);
    assert!(
        failure.to_string().contains("cannot make the cache"),
        "{failure}"
    );
}

#[test]
fn without_python_nothing_is_done() {
    let machine = Machine::new();
    std::fs::remove_file(machine.root.join("bin/python3.12")).unwrap();
    let failure = machine.install(&mut Silent).unwrap_err();
    assert!(failure.what.contains("no suitable Python"), "{failure}");
    assert!(!machine.request().cache.exists());
}
