//! Temporary: calls `environment::cli` and `gate::cli` until the binary does.
use clap::{Parser, Subcommand};
use kvcr_phase1::{config, environment, gate};
#[derive(Parser)]
struct Cli {
    #[arg(long)]
    cache: std::path::PathBuf,
    #[command(subcommand)]
    command: Command,
}
#[derive(Subcommand)]
enum Command {
    Env {
        #[command(subcommand)]
        command: environment::cli::EnvCommand,
    },
    Doctor {
        #[arg(long)]
        profile: std::path::PathBuf,
        #[arg(long)]
        python: Option<std::path::PathBuf>,
        #[command(flatten)]
        args: gate::cli::DoctorArgs,
    },
}
fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    match cli.command {
        Command::Env { command } => environment::cli::cli(&command, &cli.cache),
        Command::Doctor {
            profile,
            args,
            python,
        } => {
            let profile: config::Profile =
                toml::from_str(&std::fs::read_to_string(profile).unwrap()).unwrap();
            let paths = config::Paths {
                state: "/tmp/envinst/state".into(),
                cache: cli.cache.clone(),
                runs: "/tmp".into(),
                root: "/tmp".into(),
            };
            let model = environment::ModelRequest::Build {
                kind: "dense".into(),
                dtype: "float32".into(),
            };
            let installed = match &profile.environment.python {
                Some(python) => environment::external(
                    python,
                    profile.environment.overlay,
                    &model,
                    &cli.cache,
                    &Default::default(),
                    &mut environment::progress::Silent,
                ),
                None => environment::locate(&environment::Request {
                    name: profile.environment.lock.clone().unwrap_or_default(),
                    cache: cli.cache.clone(),
                    python,
                    model,
                    search: Default::default(),
                }),
            };
            let inputs = gate::doctor::Inputs {
                profile_name: "cpu",
                profile: &profile,
                paths: &paths,
                installed,
                shm_bytes: 300_000_000,
                variables: Default::default(),
            };
            gate::cli::cli(&args, &inputs)
        }
    }
}
