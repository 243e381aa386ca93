//! How far the numbers of streaming clients are off, and what they cost.
//!
//! ```sh
//! cargo run --release -- env install peers    # aiperf and guidellm, once
//! cargo bench --bench streams                 # tables
//! cargo bench --bench streams -- --write      # the same into docs/benchmarks.md
//! cargo bench --bench streams -- --check      # exit status 1 if a limit is missed
//! ```
//!
//! One server writes 1, 32, 256 and 1,000 streams at a time and keeps when it did; our client and
//! three of the field ask it for the same, one after the other, each in a process of its own.
//!
//! [`server`] writes, [`ours`] is our client, [`clients`] runs all of them, [`outputs`] reads what
//! they report and compares, [`table`] says what came of it.

mod clients;
mod ours;
mod outputs;
#[path = "../report/mod.rs"]
mod report;
mod server;
mod table;

use std::io::{BufRead, BufReader};
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};

use clap::Parser;

use clients::{Client, Clients};
use outputs::{Stamps, compare};
use report::{Asked, Report};
use table::Row;

/// Why a number could not be had.
type Problem = Box<dyn std::error::Error>;

/// Streams at a time. The first shows what a client costs before it does anything.
const COUNTS: [usize; 4] = [1, 32, 256, 1000];
/// From one token of a stream to its next, up to 256 streams.
const ITL_MS: u64 = 50;

/// Measures streaming clients.
#[derive(Debug, Parser)]
struct Args {
    #[command(flatten)]
    asked: Asked,
    /// Only our own client.
    #[arg(long)]
    alone: bool,
    /// Be the server.
    #[arg(long, hide = true)]
    serve: bool,
    /// Be our client, and ask this server.
    #[arg(long, hide = true)]
    client: Option<String>,
    #[arg(long, hide = true, default_value_t = 1)]
    streams: usize,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let done = match (&args.client, args.serve) {
        (Some(url), _) => ours::run(url, args.streams),
        (None, true) => server::serve(),
        (None, false) => {
            let needs =
                "runs load generators for minutes: run it with `cargo bench --bench streams`";
            return args.asked.conclude(needs, || measure(args.alone));
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(problem) => {
            eprintln!("error: {problem}");
            ExitCode::FAILURE
        }
    }
}

fn measure(alone: bool) -> Result<Report, Problem> {
    let mut report = Report::begin("streams");
    let clients = Clients::find()?;
    let server = Server::start()?;
    let mut rows = Vec::new();
    for count in COUNTS {
        for client in Client::EACH {
            if alone && client != Client::Ours {
                continue;
            }
            eprintln!("{count} streams: {}", client.name());
            // As many tokens a second as 256 streams have, at most: what is measured are clients,
            // and a server that two cores are enough for.
            let itl_ms = ITL_MS * count.div_ceil(256) as u64;
            server.stamps(itl_ms)?;
            let load = clients.run(client, &server.url, count)?;
            let errors = compare(&load.streams, &server.stamps(itl_ms)?);
            rows.push(Row {
                client,
                count,
                cpu_s: load.cpu_s,
                errors,
            });
        }
    }
    report.details = table::details(&rows);
    report.claims = table::claims(&rows);
    Ok(report)
}

/// The server's process; it ends when its standard input does.
struct Server {
    url: String,
    child: Child,
    stdin: Option<ChildStdin>,
    runtime: tokio::runtime::Runtime,
}

impl Server {
    fn start() -> Result<Self, Problem> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg("--serve")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut url = String::new();
        let stdout = child.stdout.take().ok_or("no output of the server")?;
        BufReader::new(stdout).read_line(&mut url)?;
        Ok(Self {
            url: url.trim().to_owned(),
            stdin: child.stdin.take(),
            child,
            runtime: tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?,
        })
    }

    /// Every stream since the last time; from then on tokens are `itl_ms` apart.
    fn stamps(&self, itl_ms: u64) -> Result<Vec<Stamps>, Problem> {
        let url = format!("{}/stamps?itl_ms={itl_ms}", self.url);
        let text = async { reqwest::get(url).await?.text().await };
        Ok(serde_json::from_str(&self.runtime.block_on(text)?)?)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.stdin.take());
        let _ = self.child.wait();
    }
}
