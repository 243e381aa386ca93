//! Temporary: calls `environment::cli` until the binary does.
use clap::Parser;
#[derive(Parser)]
struct Cli {
    #[arg(long)]
    cache: std::path::PathBuf,
    #[command(subcommand)]
    command: kvcr_phase1::environment::cli::EnvCommand,
}
fn main() -> std::process::ExitCode {
    let cli = Cli::parse();
    kvcr_phase1::environment::cli::cli(&cli.command, &cli.cache)
}
