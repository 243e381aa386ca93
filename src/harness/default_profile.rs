//! Which profile the tests run where nobody names one: the product if it is installed, else the
//! simulated stack, so that a fresh checkout has something to run.
//!
//! Never quietly: a line says so. And never where somebody insists on the product
//! (`PHASE1_REQUIRE`): there a missing environment is a failure.

use crate::config::{self, Config, EnvSource, OwnArgs, UsageError};
use crate::environment;

const SIMULATED: &str = "sim";

/// Loads the configuration of the test binary.
///
/// # Errors
/// Usage, as [`config::load`].
pub(super) fn load(own: OwnArgs, env: &dyn EnvSource) -> Result<Config, UsageError> {
    let mut missing = None;
    let config = config::load_choosing(own, env, |config| {
        missing = missing_lock(config);
        missing.is_some().then_some(SIMULATED)
    })?;
    if let (Some(lock), true) = (missing, config.profile.engine.kind.is_simulated()) {
        errln!(
            "harness: the `{lock}` environment is not installed, so this is the simulated stack: \
             it proves the harness, never the product; for the product: \
             `kvcr-phase1 run --profile cpu`, or `cargo run --release -- run`"
        );
    }
    Ok(config)
}

/// The locked environment that is not there, unless somebody insists on it. One that is damaged
/// was wanted: it is said, not replaced.
fn missing_lock(config: &Config) -> Option<String> {
    let lock = config.profile.environment.lock.as_ref()?;
    let absent = config.require.is_empty() && !environment::finished(lock, &config.paths.cache);
    absent.then(|| lock.clone())
}
