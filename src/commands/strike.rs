//! `strike`: kills or stops a process of the stack as a case would, and says what became of it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use super::{Ended, Held, hold, runtime};
use crate::config::Config;
use crate::failure::Failure;
use crate::sim::NOTICE;
use crate::stack::harm::{Blow, Changes, Part, Replaced, Struck};
use crate::stack::lease::Lease;
use crate::stack::protocol::Mode;
use crate::stack::tail;

/// What a Guard says of its taking over.
const GUARD: &str = "KVCR_EVENT guard_";
/// A parent is given this long to follow its engine core.
const FOLLOWS_WITHIN: Duration = Duration::from_secs(120);

/// What is struck, and how.
#[derive(Clone, Debug, clap::Args)]
pub struct StrikeArgs {
    /// Name of the process in the plan: worker0, service1 (see `kvcr-phase1 render`).
    process: String,
    /// Only the engine core of a worker, not its parent.
    #[arg(long)]
    core: bool,
    /// Let it stand still until Ctrl-C instead of killing and replacing it.
    #[arg(long)]
    stop: bool,
    /// How often it is killed and replaced.
    #[arg(long, default_value_t = 1)]
    times: u32,
}

/// Strikes a process of the stack, which is started if none is up.
#[must_use]
pub fn strike(config: &Config, args: &StrikeArgs) -> ExitCode {
    let done = hold(config, "strike", Mode::Exclusive).and_then(|held| {
        if held.prepared.spec.simulated {
            outln!("{NOTICE}");
        }
        let Held {
            interrupt, lease, ..
        } = &held;
        runtime()?.block_on(async {
            tokio::select! {
                // What is killed when the signal comes, the supervisor replaces.
                cause = interrupt.seen(), if !args.stop => Err(Ended::By(cause)),
                done = carry_out(lease, args) => done.map_err(Ended::Failed),
                _ = interrupt.seen(), if args.stop => {
                    outln!("it goes on");
                    Ok(())
                }
            }
        })
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(ended) => ended.exit(),
    }
}

async fn carry_out(lease: &Lease, args: &StrikeArgs) -> Result<(), Failure> {
    let part = match args.core {
        true => Part::EngineCore,
        false => Part::Whole,
    };
    if args.stop {
        let struck = lease.strike(&args.process, part, Blow::Stop).await?;
        outln!("{}: stands still until Ctrl-C", describe(&struck));
        return std::future::pending().await;
    }
    for round in 1..=args.times {
        let mut logs = Logs::from_now(lease);
        let struck = lease.strike(&args.process, part, Blow::Kill).await?;
        outln!("{round}: {}", describe(&struck));
        let said = |what: &str, at: u64| {
            let since = at.saturating_sub(struck.monotonic_ns);
            outln!("{:>12.3} ms  {what}", since as f64 / 1e6);
        };
        for who in &struck.hit {
            let death = lease.death_of(*who, FOLLOWS_WITHIN).await?;
            said(&format!("pid {} ended", who.pid), death.monotonic_ns);
        }
        if !struck.hit.contains(&struck.leader) {
            match lease.death_of(struck.leader, FOLLOWS_WITHIN).await {
                Ok(death) => {
                    let ending = death.ending.map(|ending| ending.to_string());
                    let ending = ending.unwrap_or_default();
                    said(
                        &format!("its parent followed: {ending}"),
                        death.monotonic_ns,
                    );
                }
                Err(failure) if lease.broken().is_some() => return Err(failure),
                Err(_) => outln!("{:>12} ms  its parent does not follow", "-"),
            }
        }
        match lease.replace(&args.process, Changes::default()).await? {
            Replaced::Serving(new) => {
                said(
                    &format!("replaced by pid {}", new.process.pid),
                    new.started_ns,
                );
                said("its own probes hold", new.probes_ns);
                if let Some(worker) = &new.worker {
                    let text = format!("listed as instance {}", worker.instance_id);
                    said(&text, new.listed_ns);
                    said("its canary completed", new.canary_ns);
                }
            }
            Replaced::Refused(refusal) => return Err(refusal.failure),
        }
        for (process, line) in logs.new_lines() {
            outln!("  {process}: {line}");
        }
    }
    Ok(())
}

fn describe(struck: &Struck) -> String {
    let pids: Vec<String> = struck.hit.iter().map(|one| one.pid.to_string()).collect();
    format!(
        "{} struck: pid {} at monotonic_ns={}",
        struck.process,
        pids.join(", "),
        struck.monotonic_ns
    )
}

/// What Guards say from a moment on.
struct Logs(Vec<(String, PathBuf, u64)>);

impl Logs {
    fn from_now(lease: &Lease) -> Self {
        let stack = lease.stack();
        let own = stack.processes.iter().map(|one| (&one.name, &one.log));
        let elsewhere = stack.plan.external.iter().map(|one| (&one.name, &one.log));
        let logs = own.chain(elsewhere);
        Self(
            logs.map(|(name, log)| (name.clone(), log.clone(), tail::end(log)))
                .collect(),
        )
    }

    fn new_lines(&mut self) -> Vec<(String, String)> {
        let mut lines = Vec::new();
        for (process, path, from) in &mut self.0 {
            let text = tail::since(path, *from).unwrap_or_default();
            for line in text.lines() {
                if let Some(at) = line.find(GUARD) {
                    lines.push((process.clone(), line[at..].to_owned()));
                }
            }
        }
        lines
    }
}
