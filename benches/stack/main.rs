//! The harness's speed claims, measured on the real stack as ratios within one run.
//!
//! ```sh
//! cargo bench --bench stack               # a table: claim, limit, measured, margin, held
//! cargo bench --bench stack -- --write    # the same into docs/benchmarks.md
//! cargo bench --bench stack -- --check    # exit status 1 if a limit is missed
//! ```
//!
//! Takes about three minutes on a quiet machine, and means nothing on a busy one: the load before
//! the start stands in the report. It uses the software and the state directory of the user,
//! because two stacks on the same cores would measure each other; a stack that somebody holds is
//! not touched, and ends the bench.
//!
//! [`drive`] runs the binaries and reads what they wrote, [`idle`] looks at the processes,
//! [`report`] says what came of it.

mod drive;
mod idle;
#[path = "../report/mod.rs"]
mod report;

use std::process::ExitCode;

use clap::Parser;

use drive::Bench;
use report::{Asked, Claim, Report};

/// Why a number could not be had.
type Problem = Box<dyn std::error::Error>;

/// Starts of a warm arm: few, because each costs the product's own seconds.
const ARMS: usize = 7;
/// Lists: cheap, and short enough for the scheduler to matter.
const LISTS: usize = 20;

/// Measures the speed claims on the real stack.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    asked: Asked,
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.asked.conclude(
        "brings up the real stack: run it with `cargo bench --bench stack`",
        measure,
    )
}

fn measure() -> Result<Report, Problem> {
    let mut report = Report::begin("stack");
    let bench = Bench::new()?;

    // Before any stack, so that nothing else wants the cores.
    let lists = bench.lists(LISTS)?;

    bench.down()?;
    let cold = bench.cold()?;
    let stack = cold.stack()?;
    let slowest = stack.workers.iter().map(|worker| worker.ready_ms).max();
    let slowest = slowest.filter(|ms| *ms > 0).ok_or("no worker was timed")?;

    // The arms first: they keep the stack warm, and the idle stack is measured at its end.
    let overheads = bench.warm(ARMS, stack)?;
    let idle = idle::cores(&bench.paths.state, &stack.fingerprint)?;
    bench.down()?;

    report.claims = vec![
        Claim {
            what: "bring-up of the stack ÷ slowest worker's own start",
            measured: stack.bring_up_ms as f64 / slowest as f64,
            limit: 1.25,
            unit: "",
            how: format!("{} ms ÷ {slowest} ms", stack.bring_up_ms),
        },
        Claim {
            what: "idle stack",
            measured: idle.cores,
            limit: 0.4,
            unit: " cores",
            how: format!("{} processes over {:.0} s", idle.processes, idle.seconds),
        },
        Claim {
            what: "harness overhead of one arm on a warm stack",
            measured: median(&overheads),
            limit: 150.0,
            unit: " ms",
            how: format!("median of {}, {}", overheads.len(), range(&overheads)),
        },
        Claim {
            what: "`--list`",
            measured: median(&lists),
            limit: 100.0,
            unit: " ms",
            how: format!("median of {}, {}", lists.len(), range(&lists)),
        },
        Claim {
            what: "harness's own share of a cold run",
            measured: cold.harness_share * 100.0,
            limit: 3.0,
            unit: " %",
            how: format!("{} arms in {:.1} s", cold.arms.len(), cold.wall_ms / 1000.0),
        },
    ];
    Ok(report)
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() % 2 {
        0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
        _ => sorted[middle],
    }
}

fn range(samples: &[f64]) -> String {
    let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
    let most = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    format!("{least:.0} to {most:.0} ms")
}
