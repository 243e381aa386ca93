//! What is true of this machine, as plain data: decisions are tested without a machine.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{Need, gpu, host};

/// Everything that a need can be about.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Facts {
    /// `6.1.0-18-amd64`.
    pub kernel: String,
    /// Whether `pidfd_open` works; the error if it does not.
    pub pidfd: Result<(), String>,
    /// `/dev/shm`; the error if it cannot be looked at.
    pub shm: Result<Shm, String>,
    /// Addresses that other hosts may reach, the preferred one first.
    pub addresses: Vec<Address>,
    /// The devices; why there are none to see if there are none.
    pub gpus: Result<Vec<Gpu>, String>,
    /// Cores that this process may use.
    pub cores: usize,
    /// Memory that this process may still use.
    pub memory: Option<Memory>,
    /// etcd, where there is one.
    pub etcd: Option<PathBuf>,
}

/// `/dev/shm`.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Shm {
    /// Bytes in all.
    pub total: u64,
    /// Bytes that are free for us.
    pub free: u64,
}

/// An address of this host.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Address {
    /// The interface that has it.
    pub interface: String,
    /// The address.
    pub ip: IpAddr,
}

/// Memory, with the limits of the control group.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Memory {
    /// Bytes that can be had without swapping or being killed.
    pub available: u64,
    /// Bytes in all, for us.
    pub total: u64,
}

/// One device.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Gpu {
    /// Index, as `--gpus` counts.
    pub index: u32,
    /// Identity that survives reordering.
    pub uuid: String,
    /// `NVIDIA H200`.
    pub name: String,
    /// Bytes in use, by anybody.
    pub used: u64,
    /// Bytes in all.
    pub total: u64,
    /// Processes that compute on it. In a container their numbers are the host's, or hidden:
    /// a count for people, never a proof that a device is free.
    pub tenants: usize,
}

impl Facts {
    /// Looks. Takes milliseconds; a driver that does not answer is given up after seconds.
    pub fn gather(etcd: Option<&Path>) -> Self {
        Self::with(etcd, gpu::devices())
    }

    /// Looks only at what `needs` are about: tests have to be listed at once, and a driver may
    /// take its time.
    pub fn about(needs: &[Need], etcd: Option<&Path>) -> Self {
        let devices = needs.iter().any(|need| matches!(need, Need::Gpus { .. }));
        Self::with(
            etcd,
            match devices {
                true => gpu::devices(),
                false => Err("not looked at".to_owned()),
            },
        )
    }

    fn with(etcd: Option<&Path>, gpus: Result<Vec<Gpu>, String>) -> Self {
        Self {
            kernel: host::kernel(),
            pidfd: host::pidfd(),
            shm: host::shm(),
            addresses: host::addresses(),
            gpus,
            cores: host::cores(),
            memory: host::memory(),
            etcd: etcd.map(Path::to_owned),
        }
    }

    /// The address that the stack will use: `wanted` if this host has it, else the preferred one.
    pub fn address(&self, wanted: Option<IpAddr>) -> Option<&Address> {
        match wanted {
            Some(wanted) => self.addresses.iter().find(|address| address.ip == wanted),
            None => self.addresses.iter().find(|address| address.ip.is_ipv4()),
        }
    }

    /// Major and minor version of the kernel.
    pub fn kernel_version(&self) -> Option<(u32, u32)> {
        let mut numbers = self
            .kernel
            .split(|letter: char| !letter.is_ascii_digit())
            .map(str::parse);
        Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
    }
}
