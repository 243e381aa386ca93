//! `kvcr-phase1`: the commands. Only parsing is here; see [`kvcr_phase1::commands`].

#![warn(clippy::print_stdout, clippy::print_stderr)]

use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use kvcr_phase1::cases::PHASE1;
use kvcr_phase1::commands::{ServicesArgs, StrikeArgs};
use kvcr_phase1::config::{self, Config, Foreign, ProcessEnv, UsageError};
use kvcr_phase1::environment::cli::EnvCommand;
use kvcr_phase1::gate::cli::DoctorArgs;
use kvcr_phase1::harness::{USAGE, run, software};
use kvcr_phase1::sim::cli::SimCommand;
use kvcr_phase1::stack::supervisor;
use kvcr_phase1::{commands, environment, sim};

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
    /// The simulated stack: which lies it can tell, and telling it to.
    #[command(subcommand)]
    Sim(SimCommand),
    /// Kill a process of the stack, see what becomes of it, and replace it.
    Strike(StrikeArgs),
    /// Run the Guards' services alone, as a sidecar does, for `run --external-services`.
    Services(ServicesArgs),
    /// Write down what the stack shows: the shapes of its pages, responses and logs.
    Record {
        /// Where to write `PROFILE.json`.
        directory: PathBuf,
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
    let first = args.first();
    if first.is_some_and(|first| first == supervisor::SUPERVISE) {
        return supervisor::main(args.into_iter().skip(1), &software::build);
    }
    if first.is_some_and(|first| first == sim::SIMULATE) {
        return sim::main(args.into_iter().skip(1));
    }
    match dispatch(args, began) {
        Ok(code) => code,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error}");
            ExitCode::from(USAGE)
        }
    }
}

fn dispatch(args: Vec<OsString>, began: Instant) -> Result<ExitCode, UsageError> {
    let mut command = Cli::command();
    for name in [
        "run", "up", "doctor", "render", "record", "services", "strike",
    ] {
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
        Command::Env(command) => {
            environment::cli::cli(&command, &config.profile, &config.paths.cache)
        }
        Command::Render { json } => commands::render(&config, json),
        Command::Sim(command) => sim::cli::cli(&command, &config.paths.state),
        Command::Strike(args) => commands::strike(&config, &args),
        Command::Services(args) => commands::services(&config, &args)?,
        Command::Record { directory } => commands::record(&config, &directory),
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

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    /// Flags in messages that are not ours.
    const FOREIGN: &[&str] = &[
        "--exact",       // libtest
        "--ipc",         // docker
        "--log-level",   // kvcr_service
        "--network",     // docker
        "--pid",         // docker
        "--pool-dir",    // kvcr_service
        "--release",     // cargo
        "--run-ignored", // nextest
        "--shm-size",    // docker
        "--user",        // docker
    ];

    /// Files that write other programs' command lines.
    const OTHERS: &[&str] = &[
        "config/args.rs",
        "engine/vllm/reserved.rs",
        "engine/vllm/worker.rs",
        "environment/uv.rs",
        "plan/dynamo.rs",
    ];

    /// Folders of programs that speak in other programs' words.
    const STANDING_IN: &[&str] = &["sim/frontend", "sim/service", "sim/worker"];

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in folder.read_dir().unwrap() {
            let path = entry.unwrap().path();
            let tests = path.ends_with("tests.rs") || path.ends_with("main.rs");
            if path.is_dir() {
                if STANDING_IN.iter().any(|other| path.ends_with(other)) {
                    continue;
                }
                sources(&path, found);
            } else if !tests && !OTHERS.iter().any(|other| path.ends_with(other)) {
                found.push(path);
            }
        }
    }

    /// Lines of code with text in them, without those of unit tests.
    fn messages() -> Vec<(PathBuf, String)> {
        let mut files = Vec::new();
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        sources(&root.join("src"), &mut files);
        let mut found = Vec::new();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            let code = text.split("#[cfg(test)]\nmod tests").next().unwrap();
            for line in code.lines() {
                if line.contains('"') && !line.trim_start().starts_with("//") {
                    found.push((file.clone(), line.to_owned()));
                }
            }
        }
        for name in [
            "README.md",
            "CONTRIBUTING.md",
            "docs/ci.md",
            "docs/evidence.md",
        ] {
            let text = std::fs::read_to_string(root.join(name)).unwrap();
            found.extend(text.lines().map(|line| (name.into(), line.to_owned())));
        }
        found
    }

    /// What follows each `start` in `text`, as long as `part` holds.
    fn after<'a>(text: &'a str, start: &str, part: fn(char) -> bool) -> Vec<&'a str> {
        text.match_indices(start)
            .map(|(at, _)| {
                let rest = &text[at + start.len()..];
                &rest[..rest.find(|c| !part(c)).unwrap_or(rest.len())]
            })
            .collect()
    }

    #[test]
    fn flags_of_commands_are_not_taken_for_configuration() {
        let table = config::help_table();
        for known in flags(&Cli::command()) {
            for follows in ["=", "["] {
                let clash = format!("  {}{follows}", known.flag);
                assert!(!table.contains(&clash), "{} never arrives", known.flag);
            }
        }
    }

    /// Whoever follows a message to a command or a flag finds one.
    #[test]
    fn messages_and_documents_name_what_exists() {
        let table = config::help_table();
        let cli = Cli::command();
        let ours: Vec<&str> = flags(&cli).iter().map(|known| known.flag).collect();
        for (file, line) in messages() {
            let at = format!("{}: {line}", file.display());
            for word in after(&line, "kvcr-phase1 ", |c| c.is_ascii_lowercase()) {
                let sub = cli.get_subcommands().any(|sub| sub.get_name() == word);
                assert!(sub || word.is_empty() || !line.contains('`'), "{at}");
            }
            for word in after(&line, "`kvcr-phase1 env ", |c| c.is_ascii_lowercase()) {
                let env = cli.find_subcommand("env").unwrap();
                assert!(env.find_subcommand(word).is_some(), "{at}");
            }
            for word in after(&line, "PHASE1_", |c| c.is_ascii_uppercase() || c == '_') {
                let known = table.contains(&format!("  PHASE1_{word} "));
                let marks = line.contains("KVCR_PHASE1_") || word.is_empty();
                assert!(known || marks, "{at}");
            }
            // Prose only: a flag by itself is an argument for somebody.
            for word in after(&line, " --", |c| c.is_ascii_lowercase() || c == '-') {
                let flag = format!("--{word}");
                let known = ours.contains(&flag.as_str())
                    || FOREIGN.contains(&flag.as_str())
                    || table.contains(&format!("  {flag}="))
                    || table.contains(&format!("  {flag}["));
                let cargo = file.extension().is_some_and(|end| end == "md");
                assert!(known || word.is_empty() || cargo, "{at}");
            }
        }
    }
}
