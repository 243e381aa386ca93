//! What a plan is about to use and somebody else has already: sockets, and names in `/dev/shm`.
//!
//! Ports have their own reservation. What earlier generations of ours left was swept before, so
//! whatever is here now is not ours: it is named, and left alone.

use std::collections::BTreeSet;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use crate::failure::Failure;
use crate::plan::{Plan, Probe, Process};
use crate::stack::inventory::ShmFile;
use crate::stack::state_dir::{self, SOCKET_PATH_MAX};

/// Names that are quoted of files that are in the way.
const QUOTED: usize = 3;

/// Whether the plan can have what it names.
pub(super) fn check(plan: &Plan, before: &BTreeSet<ShmFile>) -> Result<(), Failure> {
    for process in &plan.processes {
        sockets(process)?;
    }
    let paths = before.iter().map(|file| file.path.as_path());
    let foreign = foreign(&plan.shm_prefixes, paths);
    if foreign.is_empty() {
        return Ok(());
    }
    let names: Vec<String> = foreign
        .iter()
        .take(QUOTED)
        .map(|path| path.display().to_string())
        .collect();
    Err(
        Failure::environment("files of somebody else are where this stack keeps its own")
            .expected(format!("nothing called {}…", plan.shm_prefixes.join("…, ")))
            .found(names.join(", "))
            .hint("nobody but this stack uses these names: see whose they are, and remove them"),
    )
}

/// A socket that is too long fails in the engine, late and in other words; one that somebody
/// listens on would be taken for the process that is about to start.
pub(crate) fn sockets(process: &Process) -> Result<(), Failure> {
    for probe in &process.ready {
        let Probe::Unix { path } = probe else {
            continue;
        };
        let name = &process.name;
        if path.as_os_str().len() > SOCKET_PATH_MAX {
            return Err(Failure::environment(format!(
                "the socket of {name} has too long a path: {}",
                path.display()
            ))
            .expected(format!("at most {SOCKET_PATH_MAX} bytes"))
            .hint(state_dir::SHORTER));
        }
        // A file alone is no obstacle: it may be stale, and a service removes it.
        if UnixStream::connect(path).is_ok() {
            return Err(Failure::environment(format!(
                "another process already listens on the socket of {name}"
            ))
            .expected("a socket that nobody listens on")
            .found(path.display())
            .hint("stop that service, or use another --state-dir"));
        }
    }
    Ok(())
}

fn foreign<'a>(prefixes: &[String], paths: impl Iterator<Item = &'a Path>) -> Vec<PathBuf> {
    let ours = |path: &&Path| {
        let name = path.strip_prefix("/dev/shm").ok().and_then(Path::to_str);
        name.is_some_and(|name| {
            let mut prefixes = prefixes.iter().filter(|prefix| !prefix.is_empty());
            prefixes.any(|prefix| name.starts_with(prefix.as_str()))
        })
    };
    paths.filter(ours).map(Path::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;
    use crate::failure::Class;
    use crate::plan::{Group, Role};

    fn with_socket(path: &Path) -> Process {
        Process {
            name: "service0".to_owned(),
            role: Role::Service,
            group: Group::Core,
            argv: Vec::new(),
            env: Default::default(),
            after: Vec::new(),
            ready: vec![Probe::Unix {
                path: path.to_owned(),
            }],
            start_seconds: 1,
            stop_seconds: 1,
        }
    }

    #[test]
    fn a_socket_that_somebody_listens_on_is_named_and_a_stale_one_is_no_obstacle() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s.sock");
        assert_eq!(sockets(&with_socket(&path)), Ok(()));
        let listener = UnixListener::bind(&path).unwrap();
        let failure = sockets(&with_socket(&path)).unwrap_err();
        assert_eq!(failure.class, Class::Environment);
        let text = failure.to_string();
        assert!(text.contains("listens on the socket of service0"), "{text}");
        drop(listener);
        assert!(path.exists());
        assert_eq!(sockets(&with_socket(&path)), Ok(()));
        let long = folder.path().join("x".repeat(SOCKET_PATH_MAX));
        let text = sockets(&with_socket(&long)).unwrap_err().to_string();
        assert!(text.contains("too long a path"), "{text}");
    }

    #[test]
    fn only_names_that_begin_as_ours_are_in_the_way() {
        let prefixes = ["kvcr_pool_ab-g1-".to_owned(), String::new()];
        let found = |path: &str| foreign(&prefixes, [Path::new(path)].into_iter()).len();
        assert_eq!(found("/dev/shm/kvcr_pool_ab-g1-0/kvcr-1-pool_0/pool"), 1);
        assert_eq!(found("/dev/shm/kvcr_pool_ab-g1-0"), 1);
        assert_eq!(found("/dev/shm/kvcr_pool_ab-g2-0"), 0);
        assert_eq!(found("/dev/shm/other"), 0);
        assert_eq!(found("/tmp/kvcr_pool_ab-g1-0"), 0);
    }
}
