//! Installing a locked environment: once, whole, and the same everywhere.
//!
//! The place is named by what goes into it (see [`Recipe::key`]), built where it will stay
//! (virtual environments do not move), and complete only when `manifest.json` is there. Whoever
//! is killed on the way leaves a directory without one, which the next install wipes.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;

use crate::failure::Failure;

use super::assets::{self, Recipe};
use super::child::{self, Ending, Search};
use super::etcd::{self, Choice};
use super::interpreter::{self, Interpreter};
use super::lock::{self, Lock};
use super::manifest::{self, Manifest, Unreadable};
use super::model::{self, Model, ModelRequest};
use super::progress::Reporter;
use super::uv::{self, Uv};
use super::{Installed, Program, dynamo, log, packages, space};

/// A cold install over a slow line, with room to spare.
const INSTALL_LIMIT: Duration = Duration::from_secs(2 * 3600);
const ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Which environment, and where it goes.
#[derive(Clone, Debug)]
pub struct Request {
    /// Name of a locked environment: `cpu`.
    pub name: String,
    /// Root of everything that is installed.
    pub cache: PathBuf,
    /// Which model.
    pub model: ModelRequest,
    /// Where programs are looked for.
    pub search: Search,
}

/// What there is at the place of an environment.
#[derive(Debug)]
pub(crate) enum State {
    /// Nothing.
    Absent,
    /// An install that never ended, or is still going on.
    Interrupted,
    /// An install that ended, but is no longer what it was.
    Damaged(String),
    /// A usable one.
    Complete(Box<Manifest>),
}

/// Installs what is missing, and returns what there is then. Cheap when nothing is missing.
pub fn install(request: &Request, reporter: &mut dyn Reporter) -> Result<Installed, Failure> {
    let recipe = Recipe::embedded(&request.name)?;
    Installer::new(&request.cache, &request.search, recipe)?.with_model(&request.model, reporter)
}

/// Returns what is installed, and changes nothing.
pub fn locate(request: &Request) -> Result<Installed, Failure> {
    let recipe = Recipe::embedded(&request.name)?;
    Installer::new(&request.cache, &request.search, recipe)?.locate_with_model(&request.model)
}

/// Whether the locked environment `name` was ever finished in `cache`, be it damaged since.
pub fn finished(name: &str, cache: &Path) -> bool {
    let Ok(recipe) = Recipe::embedded(name) else {
        return false;
    };
    interpreter::SUPPORTED.into_iter().any(|minor| {
        let directory = place(&recipe, &recipe.key(minor), cache);
        !matches!(Manifest::read(&directory), Err(Unreadable::Absent))
    })
}

fn place(recipe: &Recipe, key: &str, cache: &Path) -> PathBuf {
    let name = format!("{}-{}", recipe.name, &key[..12]);
    cache.join("env").join(name)
}

/// One environment, with everything that follows from its recipe before anything is written.
pub(crate) struct Installer<'a> {
    search: &'a Search,
    /// Absolute: helpers run in other directories.
    cache: PathBuf,
    recipe: Recipe,
    base: Interpreter,
    key: String,
    directory: PathBuf,
}

impl<'a> Installer<'a> {
    pub(crate) fn new(cache: &Path, search: &'a Search, recipe: Recipe) -> Result<Self, Failure> {
        let cache = absolute(cache)?;
        let placed = |minor| {
            let key = recipe.key(minor);
            let directory = place(&recipe, &key, &cache);
            (key, directory)
        };
        // What is installed knows its interpreter. Asking those on PATH takes as long as their
        // shims do (half a second was seen), and every listing of tests would pay for it.
        let known = || {
            interpreter::SUPPORTED.into_iter().find_map(|minor| {
                let manifest = Manifest::read(&placed(minor).1).ok()?;
                manifest.interpreter().filter(|it| it.minor() == minor)
            })
        };
        let base = match known() {
            Some(base) => base,
            None => interpreter::find(search)?,
        };
        let (key, directory) = placed(base.minor());
        Ok(Self {
            search,
            cache,
            recipe,
            base,
            key,
            directory,
        })
    }

    /// The environment and the model, made where they are missing.
    pub(crate) fn with_model(
        &self,
        model: &ModelRequest,
        reporter: &mut dyn Reporter,
    ) -> Result<Installed, Failure> {
        let manifest = self.install(reporter)?;
        let python = python(&self.directory);
        let model = model::install(model, &self.recipe, &self.cache, &python, reporter)?;
        Ok(self.installed(manifest, model))
    }

    /// The environment and the model, if they are there.
    pub(crate) fn locate_with_model(&self, model: &ModelRequest) -> Result<Installed, Failure> {
        let manifest = self.locate()?;
        let model = model::locate(model, &self.recipe, &self.cache)?;
        Ok(self.installed(manifest, model))
    }

    /// Where the environment's programs are.
    pub(crate) fn programs(&self) -> PathBuf {
        self.directory.join("venv/bin")
    }

    pub(crate) fn locate(&self) -> Result<Manifest, Failure> {
        let install = format!("run `kvcr-phase1 env install {}`", self.recipe.name);
        let absent = |what: &str, found: String| {
            Failure::environment(format!("the `{}` environment is {what}", self.recipe.name))
                .expected(self.directory.display())
                .found(found)
                .hint(&install)
        };
        match self.state() {
            State::Complete(manifest) => Ok(*manifest),
            State::Absent => Err(absent("not installed", "nothing".to_owned())),
            State::Interrupted => Err(absent("not installed", "an unfinished install".to_owned())),
            State::Damaged(why) => Err(absent("damaged", why)),
        }
    }

    pub(crate) fn install(&self, reporter: &mut dyn Reporter) -> Result<Manifest, Failure> {
        // Without a lock, so that a complete install in a read-only cache can be used.
        if let State::Complete(manifest) = self.state() {
            return Ok(*manifest);
        }
        log::create_dir(&self.cache.join("env"))?;
        let held = lock::wait_to_install(&self.directory, INSTALL_LIMIT, reporter)?;
        match self.state() {
            State::Complete(manifest) => Ok(*manifest),
            state => {
                let _unused = self.wipe(&state, reporter)?;
                let built = self.build(&held, reporter);
                if built.is_err() {
                    self.tidy();
                }
                built
            }
        }
    }

    /// Looks at what is there, cheaply enough for every start.
    pub(crate) fn state(&self) -> State {
        let directory = &self.directory;
        if !directory.exists() {
            return State::Absent;
        }
        let manifest = match Manifest::read(directory) {
            Ok(manifest) => manifest,
            Err(Unreadable::Absent) => return State::Interrupted,
            Err(Unreadable::Damaged(why)) => return State::Damaged(why),
        };
        match self.damage(&manifest) {
            Some(why) => State::Damaged(why),
            None => State::Complete(Box::new(manifest)),
        }
    }

    fn damage(&self, manifest: &Manifest) -> Option<String> {
        if manifest.key != self.key {
            return Some(format!("it is another install: key {}", manifest.key));
        }
        let python = python(&self.directory);
        match interpreter::ask(&python) {
            Ok(found) if found.minor() != self.base.minor() => {
                return Some(format!("{} is {found} now", python.display()));
            }
            Ok(_) => {}
            Err(why) => return Some(format!("{}: {why}", python.display())),
        }
        if let Some(path) = self.recipe.damaged_overlay(&self.directory) {
            return Some(format!("{} is not as installed", path.display()));
        }
        if packages::stamp(&manifest.site) != manifest.stamp {
            let now = packages::scan(&manifest.site);
            let changed: Vec<&str> = manifest
                .packages
                .iter()
                .filter(|(name, package)| now.get(*name) != Some(package))
                .map(|(name, _)| name.as_str())
                .chain(
                    now.keys()
                        .map(String::as_str)
                        .filter(|name| !manifest.packages.contains_key(*name)),
                )
                .take(5)
                .collect();
            let what = match changed.is_empty() {
                true => "some".to_owned(),
                false => changed.join(", "),
            };
            return Some(format!(
                "its packages were changed after the install: {what}"
            ));
        }
        None
    }

    /// Removes what is in the way, unless somebody runs from it. The returned lock keeps others
    /// from starting to.
    fn wipe(&self, state: &State, reporter: &mut dyn Reporter) -> Result<Lock, Failure> {
        let at = self.directory.display();
        let path = lock::use_path(&self.directory);
        let unused = lock::attempt_for_a_second(&path, FlockOperation::NonBlockingLockExclusive)
            .map_err(|error| lock::unusable(&path, &error.to_string()))?
            .ok_or_else(|| {
                let found = match state {
                    State::Damaged(why) => format!("{why}, and a stack still runs from it"),
                    _ => "a stack still runs from it".to_owned(),
                };
                Failure::environment(format!("cannot install at {at}"))
                    .expected("nothing that uses it")
                    .found(found)
                    .hint("`kvcr-phase1 down`, then run this again")
            })?;
        match state {
            State::Absent | State::Complete(_) => return Ok(unused),
            State::Interrupted => reporter.note(&format!("Unfinished, done again: {at}")),
            State::Damaged(why) => reporter.note(&format!("Damaged, done again: {at} ({why})")),
        }
        reporter.step("Removing what an earlier install left");
        // The marker first: whatever happens next, this is no longer a complete install.
        let _ = std::fs::remove_file(self.directory.join(manifest::FILE));
        let removed = match self.directory.is_dir() {
            true => std::fs::remove_dir_all(&self.directory),
            false => std::fs::remove_file(&self.directory),
        };
        match removed {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(log::io(
                "cannot remove an unfinished install",
                &self.directory,
                &error,
            )),
            _ => Ok(unused),
        }
    }

    fn build(&self, held: &Lock, reporter: &mut dyn Reporter) -> Result<Manifest, Failure> {
        let what = format!("the `{}` environment", self.recipe.name);
        let need = self.recipe.disk();
        space::require(&what, &self.directory, need.environment)?;
        let uv = uv::find_or_bring(
            &self.recipe.pins.uv,
            &self.cache,
            &self.base,
            self.search,
            reporter,
        )?;
        if let Some(uv_cache) = uv_cache(&uv)
            && !space::together(&uv_cache, &self.directory)
        {
            space::require("uv's own cache", &uv_cache, need.uv_cache)?;
        }
        log::create_dir(&self.directory)?;
        let write = |error: std::io::Error| log::io("cannot install", &self.directory, &error);
        let log_path = self.directory.join("install.log");

        reporter.step(&format!("Making a virtual environment ({})", self.base));
        let mut command = child::command(&uv.program);
        command
            .args(["venv", "--no-project", "--python"])
            .arg(&self.base.executable)
            .arg(self.directory.join("venv"));
        self.run(
            command,
            "uv could not make a virtual environment",
            &log_path,
            held,
        )?;

        let lock_path = self.directory.join(assets::LOCK);
        std::fs::write(
            &lock_path,
            self.recipe.file(assets::LOCK).unwrap_or_default(),
        )
        .map_err(write)?;
        reporter.step(&format!(
            "Installing packages with uv {} (up to {}; log: {})",
            uv.version,
            space::bytes(need.environment),
            log_path.display()
        ));
        let mut command = child::command(&uv.program);
        command
            .args(["pip", "install", "--python"])
            .arg(python(&self.directory))
            .args(["--no-deps", "--require-hashes", "--no-build", "--strict"])
            // Shares the bytes with uv's cache; uv copies by itself where it cannot link.
            .args(["--link-mode", "hardlink"])
            // Paid for once here instead of at the first start of every engine.
            .arg("--compile-bytecode")
            .arg("-r")
            .arg(&lock_path);
        self.run(
            command,
            "uv could not install the packages",
            &log_path,
            held,
        )?;

        self.recipe.write_overlay(&self.directory).map_err(write)?;
        let etcd = match self.recipe.is_of_the_product() {
            true => {
                reporter.step("Looking for etcd");
                let etcd = etcd::find_or_bring(&self.directory, self.search, &log_path, held);
                reporter.note(&etcd.reason);
                etcd
            }
            false => Choice {
                program: None,
                reason: "tools need none".to_owned(),
            },
        };

        let installed = interpreter::ask(&python(&self.directory)).map_err(|why| {
            Failure::environment("the new environment's interpreter does not run")
                .found(why)
                .hint("look at the log and run this again")
        })?;
        let site: Vec<PathBuf> = installed
            .site
            .into_iter()
            .filter(|path| path.starts_with(&self.directory))
            .collect();
        let manifest = Manifest {
            schema: manifest::SCHEMA,
            name: self.recipe.name.clone(),
            key: self.key.clone(),
            created: jiff::Timestamp::now(),
            installed_by: env!("CARGO_PKG_VERSION").to_owned(),
            interpreter: self.base.to_string(),
            base: self.base.executable.clone(),
            uv: uv.version,
            etcd: etcd.program,
            etcd_reason: etcd.reason,
            stamp: packages::stamp(&site),
            packages: packages::scan(&site),
            site,
        };
        manifest.write(&self.directory).map_err(write)?;
        Ok(manifest)
    }

    fn run(
        &self,
        mut command: std::process::Command,
        what: &str,
        log_path: &Path,
        held: &Lock,
    ) -> Result<(), Failure> {
        // Not the caller's directory: uv reads configuration from it and its parents.
        command.current_dir(&self.directory);
        match child::work(command, INSTALL_LIMIT, log_path, held.file()) {
            Ending::Exit(0) => Ok(()),
            ending => Err(log::explain(what, &ending, log_path)),
        }
    }

    /// After a failure: gives the space back, and keeps the log.
    fn tidy(&self) {
        for entry in self.directory.read_dir().into_iter().flatten().flatten() {
            if entry.file_name() != "install.log" {
                let path = entry.path();
                let _ = std::fs::remove_dir_all(&path).or_else(|_| std::fs::remove_file(&path));
            }
        }
    }

    fn installed(&self, manifest: Manifest, model: Model) -> Installed {
        Installed {
            key: self.key.clone(),
            program: Program::Python(python(&self.directory)),
            overlay: self
                .recipe
                .has_overlay()
                .then(|| self.directory.join(assets::OVERLAY)),
            model: model.directory,
            model_digest: model.digest,
            etcd: self.etcd(&manifest).program,
            reads_nested_tiers: dynamo::reads_nested_tiers(&manifest.site),
            packages: manifest.packages,
        }
    }

    /// The etcd of the install, or another one if that has gone since.
    fn etcd(&self, manifest: &Manifest) -> Choice {
        if let Some(program) = manifest.etcd.as_ref().filter(|program| program.exists()) {
            return Choice {
                program: Some(program.clone()),
                reason: manifest.etcd_reason.clone(),
            };
        }
        etcd::find(Some(&self.directory), self.search).unwrap_or_else(|| Choice {
            program: None,
            reason: manifest.etcd_reason.clone(),
        })
    }
}

/// `path` from the root, links kept: a virtual environment's interpreter is one.
pub(crate) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|error| log::io("cannot find the place", path, &error))
}

/// The interpreter of the environment in `directory`.
pub(crate) fn python(directory: &Path) -> PathBuf {
    directory.join("venv/bin/python")
}

fn uv_cache(uv: &Uv) -> Option<PathBuf> {
    let mut command = child::command(&uv.program);
    command.args(["cache", "dir"]);
    let answer = child::ask(command, ANSWER_LIMIT);
    let path = PathBuf::from(answer.stdout.trim());
    (answer.ok() && path.is_absolute()).then_some(path)
}

#[cfg(test)]
mod tests;
