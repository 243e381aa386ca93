//! `kvcr-phase1 doctor`.

use std::process::ExitCode;

use clap::Args;

use super::doctor::{Inputs, doctor};
use crate::terminal;

/// Says whether the profile can run here, and what is missing.
#[derive(Clone, Debug, Args)]
pub struct DoctorArgs {
    /// Print JSON.
    #[arg(long)]
    pub json: bool,
}

/// Prints the report. Exit status: 0 if the profile can run here, 1 if not.
pub fn cli(args: &DoctorArgs, inputs: &Inputs<'_>) -> ExitCode {
    let report = doctor(inputs);
    match args.json {
        true => outln!("{}", report.json()),
        false => outln!("{}", report.table(terminal::columns())),
    }
    match report.runnable {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
