//! What a machine shows of us: memory of a supervisor, and what is left when all is over.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use kvcr_phase1::stack::admin;

use crate::Problem;

/// Resident memory of the supervisor, in KiB; `None` if none runs.
pub(crate) fn supervisor_kib(state: &Path) -> Result<Option<u64>, Problem> {
    let Some(status) = admin::status(state)?.into_iter().next() else {
        return Ok(None);
    };
    let text = fs::read_to_string(format!("/proc/{}/status", status.supervisor_pid))?;
    let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    Ok(line.and_then(|line| line.split_whitespace().next()?.parse().ok()))
}

/// How memory grew between the second and the last run of each stack, in words.
pub(crate) fn growth(stacks: &[Vec<u64>]) -> String {
    let grown = stacks.iter().filter_map(|runs| {
        let (first, last) = (runs.get(1)?, runs.last()?);
        Some((*first, *last))
    });
    let grown: Vec<(u64, u64)> = grown.collect();
    match grown
        .iter()
        .max_by_key(|(first, last)| last.saturating_sub(*first))
    {
        None => "too few runs to compare its memory".to_owned(),
        Some((first, last)) => format!("{first} KiB, then {last} KiB at the worst"),
    }
}

/// Processes, shared memory, sockets and temporary files of ours. A port is open only as long as a
/// process holds it.
#[derive(Debug)]
pub(crate) struct Left(BTreeSet<String>);

impl Left {
    /// What there is now. `files` is where everything of this soak is kept.
    pub(crate) fn now(files: &Path) -> Result<Self, Problem> {
        let mut found = BTreeSet::new();
        for process in procfs::process::all_processes()?.filter_map(Result::ok) {
            let Ok(environ) = process.environ() else {
                continue;
            };
            let ours = environ
                .values()
                .any(|value| Path::new(value).starts_with(files));
            if ours {
                found.insert(format!("process {}", process.pid));
            }
        }
        // Named after the stacks of our state directory; other people's are theirs.
        let stacks: Vec<String> = fs::read_dir(files.join("s"))
            .into_iter()
            .flatten()
            .filter_map(Result::ok)
            .map(|stack| stack.file_name().to_string_lossy().into_owned())
            .collect();
        for entry in fs::read_dir("/dev/shm")?.filter_map(Result::ok) {
            let name = entry.file_name().to_string_lossy().into_owned();
            if stacks.iter().any(|stack| name.contains(stack.as_str())) {
                found.insert(format!("/dev/shm/{name}"));
            }
        }
        // Its `TMPDIR` too.
        let inside = fs::read_dir(files)?.filter_map(Result::ok);
        found.extend(inside.map(|entry| format!("inside: {}", entry.file_name().display())));
        for socket in procfs::net::unix()?.into_iter().filter_map(|one| one.path) {
            if socket.starts_with(files) {
                found.insert(format!("socket {}", socket.display()));
            }
        }
        Ok(Self(found))
    }

    /// What was not there before; directories that the soak itself keeps are not left over.
    pub(crate) fn beyond(&self, before: &Self) -> Vec<String> {
        const KEPT: [&str; 3] = ["inside: s", "inside: cache", "inside: runs"];
        self.0
            .difference(&before.0)
            .filter(|one| !KEPT.contains(&one.as_str()))
            .cloned()
            .collect()
    }
}
