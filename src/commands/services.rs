//! `services`: the Guards' services of a profile by themselves, as a sidecar or a step of a CI job
//! runs them; or what they are started with, printed.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use super::{failed, runtime};
use crate::config::{Config, UsageError};
use crate::engine::vllm::VllmBlueprint;
use crate::environment::{self, progress};
use crate::failure::Failure;
use crate::launch::services::Services;
use crate::plan::sidecar;
use crate::sim::NOTICE;

/// What is to be done with them.
#[derive(Clone, Debug, clap::Args)]
pub struct ServicesArgs {
    /// Print what each is started with, one line a service, and start nothing.
    #[arg(long)]
    print: bool,
}

/// Runs the services until SIGTERM or Ctrl-C, or prints how.
///
/// # Errors
/// Usage, if nobody said where they should be.
pub fn services(config: &Config, args: &ServicesArgs) -> Result<ExitCode, UsageError> {
    let Some(directory) = &config.profile.topology.external_services else {
        return Err(UsageError(
            "services need a directory for their sockets and logs: --external-services DIR, \
             which `run` is given too"
                .to_owned(),
        ));
    };
    let done = match args.print {
        true => print(config, directory),
        false => serve(config, directory),
    };
    Ok(match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => failed(&failure),
    })
}

fn print(config: &Config, directory: &Path) -> Result<(), Failure> {
    let installed = environment::find(&config.profile, &config.paths.cache)?;
    let plan = sidecar::plan(config, &installed, directory)?;
    if config.profile.engine.kind.is_simulated() {
        errln!("{NOTICE}");
    }
    out!("{}", sidecar::render(&plan, directory));
    Ok(())
}

fn serve(config: &Config, directory: &Path) -> Result<(), Failure> {
    let simulated = config.profile.engine.kind.is_simulated();
    let mut reporter = progress::reporter_of(simulated);
    let installed = environment::ensure(&config.profile, &config.paths.cache, reporter.as_mut())?;
    drop(reporter);
    // What runs is neither removed nor repaired.
    let _hold = installed.hold()?;
    let services = Services {
        plan: sidecar::plan(config, &installed, directory)?,
        directory: directory.to_owned(),
        bound: Duration::from_secs(config.profile.stack.bring_up_seconds),
        blueprint: Arc::new(VllmBlueprint::new(config.clone(), installed)),
    };
    let sockets: Vec<String> = services
        .plan
        .processes
        .iter()
        .flat_map(|process| process.sockets())
        .map(|path| path.display().to_string())
        .collect();
    let ready = || outln!("services accept at {}", sockets.join(", "));
    if simulated {
        errln!("{NOTICE}");
    }
    // On this thread: what it starts dies with it.
    runtime()?.block_on(async {
        let unheard = |error| Failure::environment("no signal can be waited for").found(error);
        let mut terminate = signal(SignalKind::terminate()).map_err(unheard)?;
        let mut interrupt = signal(SignalKind::interrupt()).map_err(unheard)?;
        let stop = async {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        };
        services
            .run(Arc::new(|text| errln!("{text}")), ready, stop)
            .await
    })
}
