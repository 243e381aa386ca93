//! TCP ports that nobody else gets between now and the moment a process binds them.
//!
//! Three things could take a port away: the kernel, for somebody's outgoing connection (so ours
//! lie below its ephemeral range); another supervisor of ours (so each port has a lock file);
//! anyone else (so a listener holds it until just before the first process starts).

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::Path;

use procfs::net::TcpState;
use procfs::process::{FDTarget, all_processes};

use crate::failure::Failure;
use crate::stack::state_dir::try_lock;

/// Below this, ports belong to well-known services.
const FLOOR: u16 = 15_000;
/// Where the kernel does not say what its ephemeral range is.
const EPHEMERAL: u16 = 32_768;

/// Ports by name, with what keeps them ours.
#[derive(Debug)]
pub struct Reserved {
    /// The ports.
    pub ports: BTreeMap<String, u16>,
    listeners: Vec<TcpListener>,
    _locks: Vec<File>,
}

impl Reserved {
    /// Lets the processes have their ports; the locks stay.
    pub fn release_listeners(&mut self) {
        self.listeners.clear();
    }
}

/// Reserves one port for each of `names`; those in `fixed` get the number they ask for.
pub fn reserve(
    names: &[String],
    fixed: &[(String, u16)],
    locks: &Path,
) -> Result<Reserved, Failure> {
    let mut reserved = Reserved {
        ports: BTreeMap::new(),
        listeners: Vec::new(),
        _locks: Vec::new(),
    };
    for (name, port) in fixed {
        let (lock, listener) = take(*port, locks)?.ok_or_else(|| taken(name, *port))?;
        reserved.add(name, *port, lock, listener);
    }
    let range = below_ephemeral();
    // Supervisors that start together begin at different places; the locks settle the rest.
    let width = u32::from(range.end - range.start);
    let mut offset = std::process::id().wrapping_mul(2_654_435_761) % width;
    let mut tried = 0;
    for name in names
        .iter()
        .filter(|name| !fixed.iter().any(|(other, _)| other == *name))
    {
        loop {
            if tried == width {
                return Err(
                    Failure::environment("no TCP port is free").expected(format!(
                        "one of {}-{}",
                        range.start,
                        range.end - 1
                    )),
                );
            }
            let port = range.start + u16::try_from(offset).unwrap_or(0);
            offset = (offset + 1) % width;
            tried += 1;
            if let Some((lock, listener)) = take(port, locks)? {
                reserved.add(name, port, lock, listener);
                break;
            }
        }
    }
    Ok(reserved)
}

impl Reserved {
    fn add(&mut self, name: &str, port: u16, lock: File, listener: TcpListener) {
        self.ports.insert(name.to_owned(), port);
        self.listeners.push(listener);
        self._locks.push(lock);
    }
}

fn take(port: u16, locks: &Path) -> Result<Option<(File, TcpListener)>, Failure> {
    let Some(lock) = try_lock(&locks.join(format!("{port}.lock")))? else {
        return Ok(None);
    };
    Ok(bind(port).ok().map(|listener| (lock, listener)))
}

/// A listener on every address. The loopback address is tried first and by itself: a listener
/// there alone does not always stand in the way of the wildcard.
fn bind(port: u16) -> io::Result<TcpListener> {
    drop(TcpListener::bind((Ipv4Addr::LOCALHOST, port))?);
    TcpListener::bind((Ipv4Addr::UNSPECIFIED, port))
}

fn taken(name: &str, port: u16) -> Failure {
    Failure::environment(format!("port {port} ({name}) is taken"))
        .expected("a free port: the profile fixes this number")
        .found(owner(port))
        .hint("stop that process, or leave network.frontend_port out of the profile")
}

/// Who listens on `port`: pid and command line, as far as they can be seen.
pub fn owner(port: u16) -> String {
    visible_owner(port).unwrap_or_else(|| "a process that cannot be seen from here".to_owned())
}

fn visible_owner(port: u16) -> Option<String> {
    let entries = procfs::net::tcp()
        .into_iter()
        .chain(procfs::net::tcp6())
        .flatten()
        .filter(|entry| entry.local_address.port() == port && entry.state == TcpState::Listen)
        .map(|entry| entry.inode);
    let inodes: Vec<u64> = entries.collect();
    all_processes().ok()?.flatten().find_map(|process| {
        let holds = process
            .fd()
            .ok()?
            .flatten()
            .any(|fd| matches!(fd.target, FDTarget::Socket(inode) if inodes.contains(&inode)));
        holds.then(|| {
            let command = process.cmdline().unwrap_or_default().join(" ");
            let short: String = command.chars().take(120).collect();
            format!("pid {} ({short})", process.pid())
        })
    })
}

fn below_ephemeral() -> Range<u16> {
    let first = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range")
        .ok()
        .and_then(|text| text.split_whitespace().next()?.parse().ok())
        .unwrap_or(EPHEMERAL);
    range_below(first)
}

fn range_below(first_ephemeral: u16) -> Range<u16> {
    // A host that gives nearly everything to the kernel leaves us no safe place; the locks and
    // listeners then have to do.
    if first_ephemeral > FLOOR + 1000 {
        FLOOR..first_ephemeral
    } else {
        FLOOR..EPHEMERAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn ports_differ_and_lie_below_the_ephemeral_range() {
        let locks = tempfile::tempdir().unwrap();
        let one = reserve(&names(&["a", "b"]), &[], locks.path()).unwrap();
        let other = reserve(&names(&["a", "b"]), &[], locks.path()).unwrap();
        let mut all: Vec<u16> = one
            .ports
            .values()
            .chain(other.ports.values())
            .copied()
            .collect();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 4);
        assert!(all.iter().all(|port| below_ephemeral().contains(port)));
    }

    #[test]
    fn a_released_port_is_still_not_given_twice() {
        let locks = tempfile::tempdir().unwrap();
        let mut one = reserve(&names(&["a"]), &[], locks.path()).unwrap();
        one.release_listeners();
        let port = one.ports["a"];
        assert!(
            TcpListener::bind(("127.0.0.1", port)).is_ok(),
            "the process can have it"
        );
        assert!(
            take(port, locks.path()).unwrap().is_none(),
            "another supervisor cannot"
        );
    }

    #[test]
    fn a_taken_fixed_port_names_its_owner() {
        let locks = tempfile::tempdir().unwrap();
        let squatter = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = squatter.local_addr().unwrap().port();
        let failure = reserve(
            &names(&["http"]),
            &[("http".to_owned(), port)],
            locks.path(),
        )
        .unwrap_err();
        let text = failure.to_string();
        assert!(
            text.contains(&format!("port {port} (http) is taken")),
            "{text}"
        );
        assert!(
            text.contains(&format!("pid {}", std::process::id())),
            "{text}"
        );
    }

    #[test]
    fn a_huge_ephemeral_range_still_leaves_ports() {
        assert_eq!(range_below(32_768), 15_000..32_768);
        assert_eq!(range_below(1024), 15_000..32_768);
    }
}
