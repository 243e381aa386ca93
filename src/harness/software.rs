//! From a configuration to something that can be launched: software, preflight, launch spec.

use crate::config::Config;
use crate::engine::Blueprint;
use crate::engine::vllm::VllmBlueprint;
use crate::environment::Installed;
use crate::environment::preflight::preflight;
use crate::failure::Failure;
use crate::gate::skew::preflight_failure;
use crate::gate::{Decision, Facts, needs};
use crate::plan::External;
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

/// Whether the machine can do what a stack of this profile needs. Quick: it is asked whenever
/// tests are listed.
#[must_use]
pub fn machine(config: &Config, installed: &Installed) -> Decision {
    let needs = needs::of_profile(&config.profile);
    needs::decide(&needs, &Facts::about(&needs, installed.etcd.as_deref()))
}

/// Refuses a machine that cannot run the profile, and software that cannot work together, before
/// any engine starts; says how to launch the rest.
///
/// # Errors
/// Skew, naming the pair; Environment, for the machine or if the software cannot be examined.
pub fn prepare(config: &Config, installed: Installed) -> Result<Prepared, Failure> {
    let decision = machine(config, &installed);
    if let Some(failure) = decision.failure("this machine cannot run the profile") {
        return Err(failure);
    }
    let report = preflight(&installed, &config.paths.cache)?;
    if let Some(failure) = report.as_ref().and_then(preflight_failure) {
        return Err(failure);
    }
    let blueprint = VllmBlueprint::new(config.clone(), installed);
    let stack = &config.profile.stack;
    let spec = LaunchSpec {
        state_dir: config.paths.state.clone(),
        fingerprint: blueprint.fingerprint()?,
        profile: blueprint.name().to_owned(),
        simulated: config.profile.engine.kind.is_simulated(),
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

/// Services that the stack needs and somebody else runs.
///
/// # Errors
/// Environment, if the plan cannot be made.
pub fn external(config: &Config, installed: &Installed) -> Result<Vec<External>, Failure> {
    VllmBlueprint::new(config.clone(), installed.clone()).external()
}

/// What the stack must have for itself. Two stacks on one machine's cores would starve each
/// other, so the cores are one device; simulated ones compute nothing and run side by side.
fn devices(config: &Config) -> Vec<String> {
    if config.profile.engine.kind.is_simulated() {
        return Vec::new();
    }
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
    let blueprint: VllmBlueprint = serde_json::from_value(launch.clone()).map_err(|error| {
        Failure::environment("the launch description cannot be read")
            .found(error)
            .hint("another version wrote it: `kvcr-phase1 down`, then try again")
    })?;
    // Software in use is neither removed nor repaired. The lock lasts as long as the supervisor:
    // the kernel lets go of it, however that ends.
    std::mem::forget(blueprint.installed.hold()?);
    Ok(Box::new(blueprint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::{cpu, sim};

    #[test]
    fn simulated_stacks_run_side_by_side_and_real_ones_do_not() {
        assert_eq!(devices(&cpu(&[])), ["cpu"]);
        assert!(devices(&sim(&[])).is_empty());
    }

    #[test]
    fn a_simulated_stack_is_launched_without_preflight_and_says_so() {
        let cache = tempfile::tempdir().unwrap();
        let config = sim(&[]);
        let installed = crate::environment::find(&config.profile, cache.path()).unwrap();
        let prepared = prepare(&config, installed).unwrap();
        assert!(prepared.spec.simulated);
        let again = build(&prepared.spec.launch).unwrap();
        assert_eq!(again.ports(), prepared.blueprint.ports());
    }
}
