//! How fast a metrics page is read, against the parser that the field uses.
//!
//! ```sh
//! cargo run --release -- env install cpu    # prometheus_client comes with vLLM, once
//! cargo bench --bench page                  # a table
//! cargo bench --bench page -- --write       # the same into docs/benchmarks.md
//! cargo bench --bench page -- --check       # exit status 1 if the limit is missed
//! ```
//!
//! Both parsers read the same page of 5 MB several times, in one run, and must find as many
//! samples in it. Each is one thread that waits for nothing, so CPU time is counted: what else
//! the machine does is nobody's fault.
//!
//! [`generate`] makes the page, `report` says what came of it.

mod generate;
#[path = "../report/mod.rs"]
mod report;

use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use kvcr_phase1::config::{self, OwnArgs, ProcessEnv};
use kvcr_phase1::environment;
use kvcr_phase1::telemetry::Page;
use rustix::time::{ClockId, clock_gettime};

use report::{Asked, Claim, Report};

/// Why a number could not be had.
type Problem = Box<dyn std::error::Error>;

/// As large as a page gets, and larger than a processor's caches.
const PAGE: usize = 5_000_000;
/// Times that we read it.
const OURS: usize = 51;
/// Times that Python reads it, a second each.
const PEERS: usize = 5;
/// We are to be so many times as fast as Python …
const RATIO: f64 = 20.0;
/// … or read so many megabytes a second.
const SPEED: f64 = 300.0;

/// Prints the samples of a page, then the seconds that each reading took.
const PEER: &str = "
import sys, time
from prometheus_client.parser import text_string_to_metric_families as parse
with open(sys.argv[1], encoding='utf-8', newline='') as file:
    text = file.read()
print(sum(len(family.samples) for family in parse(text)))
for _ in range(int(sys.argv[2])):
    began = time.thread_time()
    families = list(parse(text))
    print(time.thread_time() - began)
";

/// Measures the reader of metrics pages.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    asked: Asked,
}

fn main() -> ExitCode {
    let args = Args::parse();
    args.asked.conclude(
        "needs the real product's Python: run it with `cargo bench --bench page`",
        measure,
    )
}

/// What one parser needed, and found.
struct Read {
    samples: usize,
    seconds: Vec<f64>,
}

impl Read {
    /// Megabytes a second, by the median.
    fn speed(&self, page: &str) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        page.len() as f64 / 1e6 / seconds[seconds.len() / 2]
    }
}

fn measure() -> Result<Report, Problem> {
    let mut report = Report::begin("page");
    let page = generate::page(PAGE);
    let ours = ours(&page)?;
    let peer = peer(&page)?;
    if ours.samples != peer.samples {
        let (ours, peer) = (ours.samples, peer.samples);
        return Err(format!("we find {ours} samples, prometheus_client {peer}").into());
    }
    let (our_speed, peer_speed) = (ours.speed(&page), peer.speed(&page));
    let speed_needed = SPEED.min(RATIO * peer_speed);
    report.details = format!(
        "{:.1} MB, {} samples found by both. Either limit is enough: {RATIO} × \
         `prometheus_client`'s speed, or {SPEED} MB/s.\n\n\
         | parser | MB/s | × | from |\n|---|---|---|---|\n\
         | `telemetry::Page` | {our_speed:.0} | {:.1} | median of {OURS} |\n\
         | `prometheus_client` | {peer_speed:.1} | 1 | median of {PEERS} |",
        page.len() as f64 / 1e6,
        ours.samples,
        our_speed / peer_speed,
    );
    report.claims = vec![Claim {
        what: "CPU time for a megabyte",
        measured: 1000.0 / our_speed,
        limit: 1000.0 / speed_needed,
        unit: " ms",
        how: format!("{our_speed:.0} MB/s of {speed_needed:.0} MB/s needed"),
    }];
    Ok(report)
}

fn ours(page: &str) -> Result<Read, Problem> {
    let first = Page::parse(page);
    if let Some(problem) = first.problems().first() {
        return Err(format!("our own page: {problem}").into());
    }
    let one = |_| {
        let began = cpu_seconds();
        let read = Page::parse(page);
        let seconds = cpu_seconds() - began;
        drop(std::hint::black_box(read));
        seconds
    };
    Ok(Read {
        samples: first.samples().count(),
        seconds: (0..OURS).map(one).collect(),
    })
}

/// CPU time of this thread.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn peer(page: &str) -> Result<Read, Problem> {
    let mut file = tempfile::NamedTempFile::new()?;
    file.write_all(page.as_bytes())?;
    let output = Command::new(python()?)
        .args(["-c", PEER])
        .arg(file.path())
        .arg(PEERS.to_string())
        .output()?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        return Err(format!("prometheus_client: {}: {complaint}", output.status).into());
    }
    let printed = String::from_utf8(output.stdout)?;
    let mut lines = printed.lines();
    let samples = lines.next().ok_or("prometheus_client said nothing")?;
    let read = Read {
        samples: samples.parse()?,
        seconds: lines.map(str::parse).collect::<Result<_, _>>()?,
    };
    match read.seconds.len() {
        PEERS => Ok(read),
        other => Err(format!("prometheus_client was timed {other} times").into()),
    }
}

/// The interpreter of the environment that the profile names.
fn python() -> Result<PathBuf, Problem> {
    let config = config::load(OwnArgs::default(), &ProcessEnv)?;
    let product = environment::find(&config.profile, &config.paths.cache)
        .map_err(|failure| failure.to_string())?;
    match product.program.python() {
        Some(python) => Ok(python.to_owned()),
        None => Err("the profile names no Python: set PHASE1_PROFILE=cpu".into()),
    }
}
