//! `kvcr-phase1 env …`.

use std::path::Path;
use std::process::ExitCode;

use clap::Subcommand;
use comfy_table::{ContentArrangement, Table, presets};

use crate::config::Profile;
use crate::failure::Failure;

use super::child::Search;
use super::inventory::{self, Condition, Entry, Kind};
use super::progress::{self, Reporter};
use super::{Request, install, of_profile, peers, space};

/// Environments: install, list, remove.
#[derive(Clone, Debug, Subcommand)]
pub enum EnvCommand {
    /// Install a locked environment and the profile's model; does nothing if both are there.
    Install {
        /// Which one; `peers` are the load generators that `cargo bench --bench streams` compares with.
        #[arg(default_value = "cpu")]
        name: String,
    },
    /// List what is installed.
    List {
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Remove environments, models and tools.
    Remove {
        /// `all`, a name (`cpu`), a key or its beginning, or `name-key`.
        what: String,
    },
}

/// Carries a command out. Exit status: 0 done, 1 not (the reason is on standard error).
pub fn cli(command: &EnvCommand, profile: &Profile, cache: &Path) -> ExitCode {
    let mut reporter = progress::reporter();
    match run(command, profile, cache, reporter.as_mut()) {
        Ok(code) => code,
        Err(failure) => {
            drop(reporter); // clears its line before another is printed
            errln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn run(
    command: &EnvCommand,
    profile: &Profile,
    cache: &Path,
    reporter: &mut dyn Reporter,
) -> Result<ExitCode, Failure> {
    match command {
        EnvCommand::Install { name } if name == peers::ALL => {
            for peer in peers::Peer::EACH {
                let program = peers::install(peer, cache, &Search::default(), reporter)?;
                reporter.done(&format!("{} is ready.", peer.name()));
                outln!("{:<10} {}", peer.name(), program.display());
            }
            Ok(ExitCode::SUCCESS)
        }
        EnvCommand::Install { name } => {
            if profile.engine.kind.is_simulated() {
                return Err(Failure::environment("nothing is to be installed")
                    .expected("a profile with a locked environment")
                    .found("the simulated stack, which is this program")
                    .hint("`kvcr-phase1 env install --profile cpu` installs the real one"));
            }
            if let Some(python) = &profile.environment.python {
                return Err(Failure::environment("nothing is to be installed")
                    .expected("a profile with a locked environment")
                    .found(format!("it uses {} as it is", python.display()))
                    .hint("leave --python (environment.python) out"));
            }
            let request = Request {
                name: name.clone(),
                cache: cache.to_owned(),
                model: of_profile::model(profile)?,
                search: Search::default(),
            };
            let installed = install(&request, reporter)?;
            reporter.done(&format!("The `{name}` environment is ready."));
            outln!("python  {}", installed.program.path().display());
            outln!("model   {}", installed.model.display());
            if let Some(overlay) = &installed.overlay {
                outln!("overlay {}", overlay.display());
            }
            match &installed.etcd {
                Some(etcd) => outln!("etcd    {}", etcd.display()),
                None => outln!("etcd    none: discovery through files"),
            }
            Ok(ExitCode::SUCCESS)
        }
        EnvCommand::List { json } => {
            let entries = inventory::list(cache);
            match json {
                true => outln!("{}", json_list(&entries)),
                false if entries.is_empty() => {
                    outln!("Nothing is installed in {}.", cache.display())
                }
                false => outln!("{}", table(&entries)),
            }
            Ok(ExitCode::SUCCESS)
        }
        EnvCommand::Remove { what } => {
            let removal = inventory::remove(cache, what)?;
            for entry in &removal.removed {
                outln!(
                    "removed {} ({})",
                    entry.full_name(),
                    space::bytes(entry.bytes)
                );
            }
            for (entry, why) in &removal.kept {
                errln!("kept {}: {why}", entry.full_name());
            }
            if removal.removed.is_empty() && removal.kept.is_empty() {
                outln!("Nothing is installed in {}.", cache.display());
            }
            Ok(match removal.kept.is_empty() {
                true => ExitCode::SUCCESS,
                false => ExitCode::FAILURE,
            })
        }
    }
}

fn json_list(entries: &[Entry]) -> String {
    let document = serde_json::json!({"schema": 1, "installed": entries});
    format!("{document:#}")
}

fn table(entries: &[Entry]) -> Table {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Disabled)
        .set_header(["KIND", "NAME", "KEY", "SIZE", "AGE", "STATE"]);
    for entry in entries {
        let kind = match entry.kind {
            Kind::Environment => "environment",
            Kind::Model => "model",
            Kind::Tool => "tool",
        };
        let state = match entry.condition {
            Condition::Complete if entry.in_use => "complete, in use",
            Condition::Complete => "complete",
            Condition::Interrupted => "interrupted",
            Condition::Damaged => "damaged",
            Condition::Installing => "being installed",
        };
        table.add_row([
            kind,
            &entry.name,
            &entry.key,
            &space::bytes(entry.bytes),
            &age(entry.age.as_secs()),
            state,
        ]);
    }
    table
}

fn age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}
