//! From a configuration to something that can be launched: software, preflight, launch spec.

use std::path::PathBuf;

use crate::config::Config;
use crate::engine::vllm::VllmBlueprint;
use crate::engine::Blueprint;
use crate::environment::preflight::preflight;
use crate::environment::progress::Reporter;
use crate::environment::{self, Installed, ModelRequest, Request};
use crate::failure::Failure;
use crate::gate::skew::preflight_failure;
use crate::stack::lease::LaunchSpec;

/// A configuration with the software it runs on.
#[derive(Clone, Debug)]
pub struct Prepared {
    /// The stack to be.
    pub blueprint: VllmBlueprint,
    /// How to launch it.
    pub spec: LaunchSpec,
}

impl Prepared {
    /// The software.
    #[must_use]
    pub fn installed(&self) -> &Installed {
        &self.blueprint.installed
    }
}

/// Which software `config` asks for.
#[must_use]
pub fn request(config: &Config) -> Option<Request> {
    let profile = &config.profile;
    Some(Request {
        name: profile.environment.lock.clone()?,
        cache: config.paths.cache.clone(),
        python: None,
        model: model(config),
        search: environment::Search::default(),
    })
}

fn model(config: &Config) -> ModelRequest {
    let profile = &config.profile;
    match (&profile.model.path, &profile.model.build) {
        (Some(path), _) => ModelRequest::Path(path.clone()),
        (None, kind) => ModelRequest::Build {
            kind: kind.clone().unwrap_or_else(|| "dense".into()),
            dtype: profile.engine.dtype.clone(),
        },
    }
}

/// The software of `config` as it is: nothing is installed. Fast enough for listing tests.
///
/// # Errors
/// Environment, with the command that installs it.
pub fn locate(config: &Config, reporter: &mut dyn Reporter) -> Result<Installed, Failure> {
    match request(config) {
        Some(request) => environment::locate(&request).map(|installed| overlay(config, installed)),
        None => external(config, reporter),
    }
}

/// The software of `config`, installed if it is not.
///
/// # Errors
/// Environment, naming what kept it from being installed.
pub fn install(config: &Config, reporter: &mut dyn Reporter) -> Result<Installed, Failure> {
    match request(config) {
        Some(request) => {
            environment::install(&request, reporter).map(|installed| overlay(config, installed))
        }
        None => external(config, reporter),
    }
}

fn overlay(config: &Config, mut installed: Installed) -> Installed {
    if !config.profile.environment.overlay {
        installed.overlay = None;
    }
    installed
}

fn external(config: &Config, reporter: &mut dyn Reporter) -> Result<Installed, Failure> {
    let environment = &config.profile.environment;
    let python = environment.python.clone().unwrap_or_else(|| PathBuf::from("python3"));
    environment::external(
        &python,
        environment.overlay,
        &model(config),
        &config.paths.cache,
        &environment::Search::default(),
        reporter,
    )
}

/// Refuses software that cannot work together, before any engine starts, and says how to launch
/// the rest.
///
/// # Errors
/// Skew, naming the pair; Environment, if the software cannot be examined.
pub fn prepare(config: &Config, installed: Installed) -> Result<Prepared, Failure> {
    let report = preflight(&installed, &config.paths.cache)?;
    if let Some(failure) = preflight_failure(&report) {
        return Err(failure);
    }
    let blueprint = VllmBlueprint::new(config.clone(), installed);
    let stack = &config.profile.stack;
    let spec = LaunchSpec {
        state_dir: config.paths.state.clone(),
        fingerprint: blueprint.fingerprint()?,
        profile: blueprint.name().to_owned(),
        devices: devices(config),
        exe: std::env::current_exe().map_err(|error| {
            Failure::environment("this program does not know its own path").found(error)
        })?,
        keep_seconds: stack.keep_seconds,
        reference_keep_seconds: stack.reference_keep_seconds,
        bring_up_seconds: stack.bring_up_seconds,
        max_lifetime_seconds: stack.max_lifetime_seconds,
        launch: serde_json::to_value(&blueprint).map_err(|error| {
            Failure::environment("the launch description cannot be written").found(error)
        })?,
    };
    Ok(Prepared { blueprint, spec })
}

/// What the stack must have for itself. Two stacks on one machine's cores would starve each
/// other, so the cores are one device.
fn devices(config: &Config) -> Vec<String> {
    let gpus = &config.profile.devices.gpus;
    if gpus.is_empty() {
        return vec!["cpu".to_owned()];
    }
    let mut names: Vec<String> = gpus.iter().map(|index| format!("gpu{index}")).collect();
    names.sort();
    names.dedup();
    names
}

/// Makes the blueprint of a launch description: what the supervisor is given.
///
/// # Errors
/// Environment, if it was written by another version.
pub fn build(launch: &serde_json::Value) -> Result<Box<dyn Blueprint>, Failure> {
    serde_json::from_value::<VllmBlueprint>(launch.clone())
        .map(|blueprint| Box::new(blueprint) as Box<dyn Blueprint>)
        .map_err(|error| {
            Failure::environment("the launch description cannot be read")
                .found(error)
                .hint("another version wrote it: `kvcr-phase1 down`, then try again")
        })
}
