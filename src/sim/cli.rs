//! `kvcr-phase1 sim …`: the catalogue, and lies told to a stack that runs.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand};
use comfy_table::{ContentArrangement, Table, presets};

use super::NOTICE;
use super::fault::{CATALOGUE, Part, Switch};
use crate::atomic;
use crate::failure::Failure;
use crate::plan;
use crate::stack::admin;
use crate::stack::protocol::Status;
use crate::stack::state_dir::StateDir;
use crate::terminal;

/// The simulated stack.
#[derive(Clone, Debug, Subcommand)]
pub enum SimCommand {
    /// List every lie that a simulated stack can tell.
    Faults,
    /// Tell the running simulated stack to lie, instead of what it was told before.
    Tell {
        /// name[@process][#times], for example corrupt_block@worker1#2.
        #[arg(required = true, value_name = "FAULT")]
        switches: Vec<Switch>,
        /// Which stack.
        #[command(flatten)]
        which: Which,
    },
    /// Tell the running simulated stack only what its profile says.
    Honest {
        /// Which stack.
        #[command(flatten)]
        which: Which,
    },
}

/// Which stack.
#[derive(Clone, Debug, Args)]
pub struct Which {
    /// Beginning of its fingerprint, where several run.
    #[arg(long)]
    pub fingerprint: Option<String>,
}

/// Carries a command out on the stacks of `state`. Exit status: 0 done, 1 not (the reason is on
/// standard error).
#[must_use]
pub fn cli(command: &SimCommand, state: &Path) -> ExitCode {
    let done = match command {
        SimCommand::Faults => {
            outln!("{}\n{NOTICE}", catalogue(terminal::columns()));
            Ok(())
        }
        SimCommand::Tell { switches, which } => tell(state, which, switches),
        SimCommand::Honest { which } => honest(state, which),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            errln!("{failure}");
            ExitCode::FAILURE
        }
    }
}

fn catalogue(width: u16) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width)
        .set_header(["FAULT", "WHO", "WHAT", "SOURCE"]);
    for entry in CATALOGUE {
        let who = match entry.part {
            Part::Engine => "engine",
            Part::Frontend => "frontend",
            Part::Service => "service",
            Part::Agent => "agent",
        };
        table.add_row([entry.name, who, entry.what, entry.source]);
    }
    table.trim_fmt()
}

fn tell(state: &Path, which: &Which, switches: &[Switch]) -> Result<(), Failure> {
    let (status, file) = running(state, which)?;
    // The reference starts when it is asked for.
    let names = || {
        let running = status.processes.iter().map(|it| it.name.as_str());
        running.chain(["reference"])
    };
    for switch in switches {
        if !names().any(|name| switch.is_told_by(name)) {
            return Err(
                Failure::environment(format!("{switch} would be told by nobody"))
                    .expected(format!("one of {}", names().collect::<Vec<_>>().join(", ")))
                    .found(switch.process.as_deref().unwrap_or("no such process")),
            );
        }
    }
    let lines: String = switches
        .iter()
        .map(|switch| format!("{switch}\n"))
        .collect();
    atomic::replace(&file, lines.as_bytes()).map_err(|error| unusable(&file, &error))?;
    outln!("{} tells now (simulated stack):", status.fingerprint);
    out!("{lines}");
    Ok(())
}

fn honest(state: &Path, which: &Which) -> Result<(), Failure> {
    let (status, file) = running(state, which)?;
    match std::fs::remove_file(&file) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(unusable(&file, &error)),
        _ => {
            outln!(
                "{} tells only what its profile says (simulated stack)",
                status.fingerprint
            );
            Ok(())
        }
    }
}

/// The one simulated stack that is meant, and its control file.
fn running(state: &Path, which: &Which) -> Result<(Status, PathBuf), Failure> {
    let wanted = which.fingerprint.as_deref().unwrap_or_default();
    let mut stacks: Vec<Status> = admin::status(state)?
        .into_iter()
        .filter(|it| it.simulated && it.state == "ready" && it.fingerprint.starts_with(wanted))
        .collect();
    let Some(status) = stacks.pop() else {
        return Err(Failure::environment("no simulated stack runs")
            .expected(match wanted {
                "" => "one that is up".to_owned(),
                wanted => format!("one that is up, whose fingerprint begins with {wanted}"),
            })
            .found("none")
            .hint("`kvcr-phase1 up --profile sim --detach` brings one up"));
    };
    if !stacks.is_empty() {
        let all = stacks.iter().chain([&status]);
        let all: Vec<&str> = all.map(|it| it.fingerprint.as_str()).collect();
        return Err(Failure::environment("several simulated stacks run")
            .expected("one")
            .found(all.join(", "))
            .hint("name one: --fingerprint, of which the beginning is enough"));
    }
    let scratch = StateDir::open(state)?
        .stack(&status.fingerprint)?
        .scratch(status.generation);
    Ok((status, plan::faults_file(&scratch)))
}

fn unusable(file: &Path, error: &std::io::Error) -> Failure {
    Failure::environment(format!("cannot change {}", file.display()))
        .expected("the directory of a stack that runs")
        .found(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_fault_with_who_what_and_where_from() {
        let text = catalogue(400);
        assert_eq!(text.lines().count(), CATALOGUE.len() + 1);
        for entry in CATALOGUE {
            let line = text
                .lines()
                .find(|line| line.split_whitespace().next() == Some(entry.name));
            let line = line.unwrap_or_else(|| panic!("no {}", entry.name));
            assert!(
                line.contains(entry.what) && line.contains(entry.source),
                "{line}"
            );
        }
    }

    #[test]
    fn where_no_stack_runs_nothing_can_be_told() {
        let state = tempfile::tempdir().unwrap();
        let which = Which {
            fingerprint: Some("ab".into()),
        };
        let text = honest(state.path(), &which).unwrap_err().to_string();
        assert!(text.contains("no simulated stack runs"), "{text}");
        assert!(text.contains("begins with ab"), "{text}");
    }

    /// As a supervisor leaves it: its lock held, its last word in a file.
    fn up(state: &Path, fingerprint: &str, simulated: bool) -> std::fs::File {
        let dir = StateDir::open(state).unwrap().stack(fingerprint).unwrap();
        let lock = dir.try_lock().unwrap().unwrap();
        let status = serde_json::json!({
            "state": "ready", "fingerprint": fingerprint, "generation": 3, "profile": "sim",
            "simulated": simulated, "supervisor_pid": 1, "leases": [], "queued": [],
            "idle_stop_in_seconds": null, "frontend_url": null, "failure": null,
            "processes": [{"name": "worker0", "pid": 1, "start_ticks": 1, "log": "/log"}],
        });
        std::fs::write(dir.state(), status.to_string()).unwrap();
        std::fs::create_dir_all(dir.scratch(3)).unwrap();
        lock
    }

    #[test]
    fn a_stack_that_runs_is_told_to_lie_and_to_stop() {
        let state = tempfile::tempdir().unwrap();
        let any = Which { fingerprint: None };
        let _real = up(state.path(), "ffff", false);
        let _one = up(state.path(), "abcd", true);
        let file = plan::faults_file(
            &StateDir::open(state.path())
                .unwrap()
                .stack("abcd")
                .unwrap()
                .scratch(3),
        );
        let switches = |text: &str| vec![text.parse::<Switch>().unwrap()];
        tell(state.path(), &any, &switches("corrupt_block@worker0#2")).unwrap();
        tell(state.path(), &any, &switches("swap_blocks@reference")).unwrap();
        let text = std::fs::read_to_string(&file).unwrap();
        assert_eq!(text, "swap_blocks@reference\n");
        assert_eq!(
            super::super::fault::parse_file(&text).unwrap(),
            switches(text.trim())
        );
        let failure = tell(state.path(), &any, &switches("swap_blocks@worker7")).unwrap_err();
        assert!(failure.to_string().contains("told by nobody"), "{failure}");
        for _ in 0..2 {
            honest(state.path(), &any).unwrap();
            assert!(!file.exists());
        }

        let _other = up(state.path(), "abff", true);
        let text = honest(state.path(), &any).unwrap_err().to_string();
        assert!(text.contains("several simulated stacks run"), "{text}");
        assert!(text.contains("--fingerprint"), "{text}");
        let which = Which {
            fingerprint: Some("abc".into()),
        };
        tell(state.path(), &which, &switches("corrupt_block")).unwrap();
        assert!(file.exists());
    }
}
