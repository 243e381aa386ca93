//! `kvcr-phase1`: the commands. Only parsing is here; see [`kvcr_phase1::commands`].

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use kvcr_phase1::cases::PHASE1;
use kvcr_phase1::config::{self, Config, Foreign, ProcessEnv, UsageError};
use kvcr_phase1::environment::cli::EnvCommand;
use kvcr_phase1::gate::cli::DoctorArgs;
use kvcr_phase1::harness::{USAGE, run, software};
use kvcr_phase1::stack::supervisor;
use kvcr_phase1::{commands, environment};

/// End-to-end tests for KVCR deployed with Dynamo, an engine and NIXL.
#[derive(Debug, Parser)]
#[command(name = "kvcr-phase1", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Install what is missing, bring the stack up, run cases, print the verdicts.
    Run {
        /// Cases or arms; a part of a name is enough. All where none is given.
        filters: Vec<String>,
    },
    /// Bring the stack up and hold it until Ctrl-C.
    Up {
        /// Return at once and keep an unused stack for an hour.
        #[arg(long)]
        detach: bool,
    },
    /// What runs, who holds it, where its logs are.
    Status {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Stop every stack and remove what dead ones left behind.
    Down {
        /// Also stacks that are in use.
        #[arg(long)]
        force: bool,
    },
    /// Can this machine run the profile? Need, found, hint.
    Doctor(DoctorArgs),
    /// Environments: install, list, remove.
    #[command(subcommand)]
    Env(EnvCommand),
    /// Print what would be started: every argv, variable and probe.
    Render {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Run one recorded arm again: the same profile, the same prompts.
    Replay {
        /// RUN/CASE: latest/tc01::cold, or a path to a result.json.
        what: String,
    },
}

fn main() -> ExitCode {
    let began = Instant::now();
    let args: Vec<OsString> = std::env::args_os().skip(1).collect();
    if args
        .first()
        .is_some_and(|first| first == supervisor::SUPERVISE)
    {
        return supervisor::main(args.into_iter().skip(1), &software::build);
    }
    match dispatch(args, began) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(USAGE)
        }
    }
}

fn dispatch(args: Vec<OsString>, began: Instant) -> Result<ExitCode, UsageError> {
    let mut command = Cli::command();
    for name in ["run", "up", "doctor", "render"] {
        command = command.mut_subcommand(name, |sub| sub.after_help(config::help_table()));
    }
    let (own, rest) = config::split_args_among(args.into_iter(), &flags(&command))?;
    let program = OsString::from("kvcr-phase1");
    let parsed = command
        .try_get_matches_from(std::iter::once(program).chain(rest))
        .and_then(|matches| Cli::from_arg_matches(&matches));
    let cli = match parsed {
        Ok(cli) => cli,
        // Help and version also come as errors, with an exit code of 0.
        Err(error) => {
            let _ = error.print();
            return Ok(ExitCode::from(
                u8::try_from(error.exit_code()).unwrap_or(USAGE),
            ));
        }
    };
    let config = config::load(own, &ProcessEnv)?;
    carry_out(cli.command, config, began)
}

fn carry_out(command: Command, config: Config, began: Instant) -> Result<ExitCode, UsageError> {
    Ok(match command {
        Command::Run { filters } => run::run(PHASE1, config, &filters, began)?,
        Command::Up { detach } => commands::up(config, detach),
        Command::Status { json } => commands::status(&config, json),
        Command::Down { force } => commands::down(&config, force),
        Command::Doctor(args) => commands::doctor(&config, &args),
        Command::Env(command) => environment::cli::cli(&command, &config.paths.cache),
        Command::Render { json } => commands::render(&config, json),
        Command::Replay { what } => commands::replay(&config, &what, began)?,
    })
}

/// Every flag that clap knows, in any subcommand.
fn flags(command: &clap::Command) -> Vec<Foreign> {
    let mut flags = vec![
        Foreign {
            flag: "--help",
            takes_value: false,
        },
        Foreign {
            flag: "-h",
            takes_value: false,
        },
        Foreign {
            flag: "--version",
            takes_value: false,
        },
        Foreign {
            flag: "-V",
            takes_value: false,
        },
    ];
    collect(command, &mut flags);
    flags
}

fn collect(command: &clap::Command, flags: &mut Vec<Foreign>) {
    for arg in command.get_arguments() {
        if let Some(long) = arg.get_long() {
            flags.push(Foreign {
                // A handful of short names, once a process.
                flag: Box::leak(format!("--{long}").into_boxed_str()),
                takes_value: arg.get_action().takes_values(),
            });
        }
    }
    for sub in command.get_subcommands() {
        collect(sub, flags);
    }
}
