//! What was measured, for people and for `docs/benchmarks.md`: the shell of every bench that makes claims.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use comfy_table::{Table, presets};
use kvcr_phase1::evidence::host;
use procfs::Current;

use crate::Problem;

/// What every bench is asked for.
#[derive(Debug, Args)]
pub(crate) struct Asked {
    /// Replace the bench's part of docs/benchmarks.md.
    #[arg(long)]
    write: bool,
    /// Exit status 1 if a limit is missed.
    #[arg(long)]
    check: bool,
    /// What `cargo bench` passes.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Asked {
    /// Measures, and does with the report what was asked for. `cargo test --all-targets` runs
    /// benches too, to see whether they work: it is only told what this one `needs`.
    pub(crate) fn conclude(
        &self,
        needs: &str,
        measure: impl FnOnce() -> Result<Report, Problem>,
    ) -> ExitCode {
        if !self.bench {
            println!("{needs}");
            return ExitCode::SUCCESS;
        }
        match measure().and_then(|report| self.say(&report)) {
            Ok(code) => code,
            Err(problem) => {
                eprintln!("error: {problem}");
                ExitCode::FAILURE
            }
        }
    }

    fn say(&self, report: &Report) -> Result<ExitCode, Problem> {
        println!("{report}");
        if self.write {
            println!("written to {}", report.write()?.display());
        }
        Ok(match self.check && !report.held() {
            true => ExitCode::FAILURE,
            false => ExitCode::SUCCESS,
        })
    }
}

/// Above this the machine had something else to do.
const QUIET: f32 = 1.5;

/// One number that has a limit; lower is better.
pub(crate) struct Claim {
    pub(crate) what: &'static str,
    pub(crate) measured: f64,
    pub(crate) limit: f64,
    pub(crate) unit: &'static str,
    /// What it was made from.
    pub(crate) how: String,
}

impl Claim {
    fn held(&self) -> bool {
        self.measured <= self.limit
    }
}

/// All claims, and the machine that they were measured on.
pub(crate) struct Report {
    /// What the bench is called.
    name: &'static str,
    machine: String,
    /// What the claims were made from, as Markdown; may be empty.
    pub(crate) details: String,
    pub(crate) claims: Vec<Claim>,
}

impl Report {
    /// Looks at the machine before anything runs on it.
    pub(crate) fn begin(name: &'static str) -> Self {
        let host = host::read();
        let load = procfs::LoadAverage::current().map_or(f32::NAN, |load| load.one);
        let quiet = match load <= QUIET {
            true => "",
            false => " — **not quiet: these numbers mean little**",
        };
        Self {
            name,
            details: String::new(),
            machine: format!(
                "kvcr-phase1 {} on {}, {} cores, Linux {}; {}; load before the start {load:.2}{quiet}",
                env!("CARGO_PKG_VERSION"),
                host.processor,
                host.cores,
                host.kernel,
                jiff::Timestamp::now().strftime("%Y-%m-%d"),
            ),
            claims: Vec::new(),
        }
    }

    /// Whether every limit holds.
    fn held(&self) -> bool {
        self.claims.iter().all(Claim::held)
    }

    /// What encloses the bench's part of the document.
    fn markers(&self) -> [String; 2] {
        let name = self.name;
        [
            format!(
                "<!-- {name}: begin; `cargo bench --bench {name} -- --write` replaces this -->"
            ),
            format!("<!-- {name}: end -->"),
        ]
    }

    /// Replaces that part; the document's path.
    fn write(&self) -> Result<PathBuf, Problem> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/benchmarks.md");
        let text = fs::read_to_string(&path)?;
        let [begin, end] = self.markers();
        let parts = text.split_once(&begin).and_then(|(before, rest)| {
            let (_, after) = rest.split_once(&end)?;
            Some((before, after))
        });
        let (before, after) = parts.ok_or("docs/benchmarks.md has lost its markers")?;
        fs::write(&path, format!("{before}{begin}\n{self}\n{end}{after}"))?;
        Ok(path)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        table.set_header(["claim", "limit", "measured", "margin", "held", "from"]);
        for claim in &self.claims {
            let unit = claim.unit;
            table.add_row([
                claim.what.to_owned(),
                format!("≤ {}{unit}", plain(claim.limit)),
                format!("{}{unit}", short(claim.measured)),
                format!("{:+.0} %", (claim.limit / claim.measured - 1.0) * 100.0),
                if claim.held() { "yes" } else { "**no**" }.to_owned(),
                claim.how.clone(),
            ]);
        }
        writeln!(f, "{}\n", self.machine)?;
        if !self.details.is_empty() {
            writeln!(f, "{}\n", self.details)?;
        }
        write!(f, "{table}")
    }
}

fn short(number: f64) -> String {
    match number {
        0.0..1.0 => format!("{number:.3}"),
        1.0..10.0 => format!("{number:.2}"),
        _ => format!("{number:.0}"),
    }
}

/// Without digits that say nothing.
fn plain(number: f64) -> String {
    let text = format!("{number:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}
