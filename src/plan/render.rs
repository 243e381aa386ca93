//! A plan as text: for people, for golden snapshots, and for pasting into a shell.

use std::fmt::Write as _;

use super::{Group, Plan, PlannedWorker, Probe, Process, Role};

/// The whole plan. Each process is a command that starts it as the harness would.
pub fn render(plan: &Plan) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = write_plan(&mut out, plan);
    out
}

fn write_plan(out: &mut String, plan: &Plan) -> std::fmt::Result {
    let discovery = &plan.discovery;
    writeln!(out, "# topology: {}", plan.topology)?;
    writeln!(
        out,
        "# discovery: {} ({})",
        discovery.backend, discovery.reason
    )?;
    writeln!(out, "# front door: {}", plan.frontend_url)?;
    for worker in plan.workers.iter().chain(&plan.reference) {
        writeln!(out, "{}", describe(worker))?;
    }
    for service in &plan.external {
        writeln!(
            out,
            "# {}: runs elsewhere, guards {}; {} must accept, its log is {}, its pool in {}",
            service.name,
            service.worker,
            service.socket.display(),
            service.log.display(),
            service.pool_dir.display()
        )?;
    }
    writeln!(
        out,
        "# /dev/shm: {} bytes under {}",
        plan.shm_bytes,
        plan.shm_prefixes.join(", ")
    )?;
    let directories = plan
        .directories
        .iter()
        .map(|dir| quote(&dir.to_string_lossy()));
    writeln!(
        out,
        "mkdir -p -m 700 {}",
        directories.collect::<Vec<_>>().join(" ")
    )?;
    for process in &plan.processes {
        writeln!(out)?;
        write_process(out, process)?;
    }
    Ok(())
}

fn describe(worker: &PlannedWorker) -> String {
    format!(
        "# {}: model {}, KVCR {}, {}",
        worker.process,
        worker.served_model,
        if worker.kvcr { "on" } else { "off" },
        worker.metrics_url
    )
}

fn write_process(out: &mut String, process: &Process) -> std::fmt::Result {
    let after = if process.after.is_empty() {
        "nothing".to_owned()
    } else {
        process.after.join(", ")
    };
    writeln!(
        out,
        "# {}: {}, group {}, after {after}; {} s to start, {} s to stop",
        process.name,
        role(process.role),
        group(process.group),
        process.start_seconds,
        process.stop_seconds
    )?;
    for probe in &process.ready {
        writeln!(out, "# ready: {}", condition(probe))?;
    }
    write!(out, "env -i")?;
    for (name, value) in &process.env {
        write!(out, " \\\n  {}", quote(&format!("{name}={value}")))?;
    }
    // One line for an option and its value.
    for (at, word) in process.argv.iter().enumerate() {
        let starts_line = at == 0 || word.starts_with('-');
        let separator = if starts_line { " \\\n  " } else { " " };
        write!(out, "{separator}{}", quote(word))?;
    }
    writeln!(out)
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Discovery => "discovery",
        Role::Frontend => "frontend",
        Role::Worker => "worker",
        Role::Service => "service",
        Role::StateAgent => "state agent",
    }
}

fn group(group: Group) -> &'static str {
    match group {
        Group::Core => "core",
        Group::Reference => "reference",
    }
}

fn condition(probe: &Probe) -> String {
    match probe {
        Probe::Tcp { port } => format!("127.0.0.1:{port} accepts"),
        Probe::Unix { path } => format!("{} accepts", path.display()),
        Probe::Http { url } => format!("GET {url} is 2xx"),
        Probe::HttpJson {
            url,
            pointer,
            equals,
        } => format!("GET {url} has {equals} at {pointer}"),
    }
}

/// One shell word. A NUL cannot be said in a shell, nor can a process be started with one.
fn quote(word: &str) -> String {
    match shlex::try_quote(word) {
        Ok(quoted) => quoted.into_owned(),
        Err(_) => format!("{word:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{canonical, installed};
    use super::*;
    use crate::config::testing::cpu;

    /// What the shell would make of the text is what the plan says, to the byte.
    #[test]
    fn a_shell_reads_back_the_plan() {
        let config = cpu(&["--engine-env", "ODD='it''s $HOME \"x\"'"]);
        let plan = canonical(&config, &installed()).unwrap();
        let text = render(&plan);
        for (block, process) in text.split("\n\n").skip(1).zip(&plan.processes) {
            let command: String = block
                .lines()
                .filter(|line| !line.starts_with('#'))
                .collect::<Vec<_>>()
                .join("\n")
                .replace(" \\\n", " ");
            let words = shlex::split(&command).unwrap();
            let env = process
                .env
                .iter()
                .map(|(name, value)| format!("{name}={value}"));
            let expected: Vec<String> = ["env".to_owned(), "-i".to_owned()]
                .into_iter()
                .chain(env)
                .chain(process.argv.iter().cloned())
                .collect();
            assert_eq!(words, expected);
        }
    }
}
