//! Probes of the host. Each one is a question to the kernel, with an answer for every outcome.

use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::{Path, PathBuf};

use procfs::Current;
use rustix::process::{PidfdFlags, getpid, pidfd_open};

use super::facts::{Address, Memory, Shm};
use crate::launch::ports;

pub(crate) fn kernel() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .map_or_else(|error| error.to_string(), |text| text.trim().to_owned())
}

/// Tried on ourselves: containers forbid the call on kernels that have it.
pub(crate) fn pidfd() -> Result<(), String> {
    pidfd_open(getpid(), PidfdFlags::empty())
        .map(drop)
        .map_err(|error| error.to_string())
}

pub(crate) fn shm() -> Result<Shm, String> {
    let found = rustix::fs::statvfs("/dev/shm").map_err(|error| error.to_string())?;
    Ok(Shm {
        total: found.f_blocks.saturating_mul(found.f_frsize),
        free: found.f_bavail.saturating_mul(found.f_frsize),
    })
}

/// Addresses that are neither loopback nor link-local nor unspecified, that of the default route
/// first: a host with containers has many that lead nowhere.
pub(crate) fn addresses() -> Vec<Address> {
    let mut addresses: Vec<Address> = if_addrs::get_if_addrs()
        .unwrap_or_default()
        .into_iter()
        .filter(|interface| interface.is_oper_up() && usable(interface.ip()))
        .map(|interface| Address {
            ip: interface.ip(),
            interface: interface.name,
        })
        .collect();
    let preferred = default_route();
    addresses.sort_by_key(|address| {
        let preferred = Some(address.ip) == preferred;
        (!preferred, address.ip.is_ipv6(), address.ip)
    });
    addresses
}

fn usable(ip: IpAddr) -> bool {
    let link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    !ip.is_loopback() && !ip.is_unspecified() && !link_local
}

/// The source address towards elsewhere. Connecting a datagram socket sends nothing; the
/// destination is reserved for documentation.
fn default_route() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    Some(socket.local_addr().ok()?.ip())
}

/// With affinity and the control group's quota.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, Into::into)
}

pub(crate) fn memory() -> Option<Memory> {
    let info = procfs::Meminfo::current().ok()?;
    let host = Memory {
        available: info.mem_available.unwrap_or(info.mem_free),
        total: info.mem_total,
    };
    Some(limit(host, groups(), Path::new("/sys/fs/cgroup")))
}

/// Our control group (version 2), from the root down.
fn groups() -> PathBuf {
    procfs::process::Process::myself()
        .and_then(|process| process.cgroups())
        .ok()
        .and_then(|groups| groups.into_iter().find(|group| group.hierarchy == 0))
        .map(|group| PathBuf::from(group.pathname.trim_start_matches('/')))
        .unwrap_or_default()
}

/// The least of what the host and each control group on the way allow.
fn limit(host: Memory, group: PathBuf, root: &Path) -> Memory {
    let read =
        |path: PathBuf| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    group.ancestors().fold(host, |least, group| {
        let group = root.join(group);
        let Some(maximum) = read(group.join("memory.max")) else {
            return least; // `max`, or no such control
        };
        let used = read(group.join("memory.current")).unwrap_or(0);
        // File pages count as used, and are given back under pressure.
        let cache = inactive_file(&group).unwrap_or(0);
        let available = maximum.saturating_sub(used.saturating_sub(cache));
        Memory {
            available: least.available.min(available),
            total: least.total.min(maximum),
        }
    })
}

fn inactive_file(group: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(group.join("memory.stat")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("inactive_file "))?;
    line.trim().parse().ok()
}

/// Whether a TCP port can be bound; who has it if not, as far as that can be seen.
pub(crate) fn port(port: u16) -> Result<(), String> {
    match std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port)) {
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            Err(format!("in use by {}", ports::owner(port)))
        }
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_answers() {
        assert!(kernel().contains('.'));
        assert!(cores() >= 1);
        let memory = memory().unwrap();
        assert!(memory.available > 0 && memory.available <= memory.total);
        assert!(addresses().iter().all(|address| usable(address.ip)));
    }

    #[test]
    fn the_narrowest_control_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let host = Memory {
            available: 1000,
            total: 2000,
        };
        let limited = || limit(host, PathBuf::from("a/b"), root.path());
        assert_eq!(limited(), host);
        write("a/memory.max", "900\n");
        write("a/memory.current", "800\n");
        write("a/memory.stat", "anon 1\ninactive_file 300\n");
        write("a/b/memory.max", "max\n");
        assert_eq!(
            limited(),
            Memory {
                available: 400,
                total: 900
            }
        );
        write("a/b/memory.max", "100\n");
        assert_eq!(
            limited(),
            Memory {
                available: 100,
                total: 100
            }
        );
        write("a/b/memory.current", "5000\n");
        assert_eq!(limited().available, 0);
    }

    #[test]
    fn a_busy_port_names_its_owner() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let busy = listener.local_addr().unwrap().port();
        let text = port(busy).unwrap_err();
        assert!(
            text.contains(&format!("pid {}", std::process::id())),
            "{text}"
        );
        drop(listener);
        assert_eq!(port(0), Ok(()));
    }

    #[test]
    fn only_addresses_that_others_can_reach_are_usable() {
        let usable = |text: &str| usable(text.parse().unwrap());
        assert!(usable("10.0.0.1") && usable("2001:db8::1"));
        for text in ["127.0.0.1", "0.0.0.0", "169.254.1.1", "::1", "fe80::1"] {
            assert!(!usable(text), "{text}");
        }
    }
}
