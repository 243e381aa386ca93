//! What a case needs of the machine, and whether it has it. Pure.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::config::Profile;
use crate::config::profile::{DeviceKind, DiscoveryBackend};
use crate::environment::bytes;
use crate::failure::Failure;

use super::facts::Shm;
use super::{Facts, host};

/// One thing that a case cannot do without.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "need")]
pub enum Need {
    /// This many NVIDIA devices.
    Gpus {
        /// How many.
        count: usize,
    },
    /// An etcd: the case starves the host, which file discovery does not survive.
    Etcd,
    /// An IPv4 address that is not loopback: the state agent and the Guard refuse others.
    NonLoopback {
        /// This one and no other.
        address: Option<IpAddr>,
    },
    /// `pidfd_open`: the supervisor watches its processes, and the Guard its worker, through one.
    Pidfd,
    /// Free bytes in `/dev/shm`.
    Shm {
        /// How many.
        bytes: u64,
    },
}

/// Whether a case may run.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "decision")]
pub enum Decision {
    /// Every need is met.
    Runnable,
    /// One is not: the first in the order of the case's list.
    Gated {
        /// What is needed.
        need: String,
        /// What there is.
        found: String,
        /// What to do.
        hint: String,
    },
}

impl std::fmt::Display for Decision {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Runnable => f.write_str("runnable"),
            Self::Gated { need, found, hint } => {
                write!(f, "needs {need}; found {found}; {hint}")
            }
        }
    }
}

impl Decision {
    /// The failure of a case that is gated and that somebody insisted on: by requiring it, or
    /// by running what is ignored.
    pub fn insisted_failure(&self, case: &str, required: bool) -> Option<Failure> {
        let required = match required {
            true => " is required (PHASE1_REQUIRE) and",
            false => "",
        };
        self.failure(format!("{case}{required} cannot run here"))
    }

    /// The unmet need as a failure of `what`.
    pub fn failure(&self, what: impl Into<String>) -> Option<Failure> {
        let Self::Gated { need, found, hint } = self else {
            return None;
        };
        let failure = Failure::environment(what).expected(need).found(found);
        Some(failure.hint(hint))
    }
}

/// Whether every need is met, and if not, which one is the first that is not.
pub fn decide(needs: &[Need], facts: &Facts) -> Decision {
    needs
        .iter()
        .find_map(|need| {
            let (found, hint) = need.unmet(facts)?;
            Some(Decision::Gated {
                need: need.to_string(),
                found,
                hint,
            })
        })
        .unwrap_or(Decision::Runnable)
}

/// What every case needs of the machine, because the stack of `profile` does.
///
/// Room in `/dev/shm` is not among them: it comes and goes, and a stack that runs has its share
/// already. Whoever starts one asks for it then ([`room`]).
pub fn of_profile(profile: &Profile) -> Vec<Need> {
    if profile.engine.kind.is_simulated() {
        // It listens on the loopback interface only, and registers in files.
        return vec![Need::Pidfd];
    }
    let mut needs = Vec::new();
    if let Some(last) = gpus(profile).into_iter().max() {
        needs.push(Need::Gpus {
            count: last as usize + 1,
        });
    }
    if profile.discovery.backend == DiscoveryBackend::Etcd {
        needs.push(Need::Etcd);
    }
    needs.push(Need::NonLoopback {
        address: profile.network.host_address,
    });
    // The supervisor watches its processes through them.
    needs.push(Need::Pidfd);
    needs
}

/// Whether `/dev/shm` has room for a stack of this size that is about to start.
///
/// # Errors
/// Environment: an engine would refuse it later, in other words, or die of SIGBUS.
pub fn room(wanted: u64) -> Result<(), Failure> {
    if wanted == 0 {
        return Ok(());
    }
    match too_small(wanted, &host::shm()) {
        None => Ok(()),
        Some((found, hint)) => Err(Failure::environment("no room for this stack in /dev/shm")
            .expected(format!("{} free", bytes(wanted)))
            .found(found)
            .hint(hint)),
    }
}

fn too_small(wanted: u64, shm: &Result<Shm, String>) -> Option<(String, String)> {
    let found = match shm {
        Ok(shm) if shm.free >= wanted => return None,
        Ok(shm) => format!("{} of {}", bytes(shm.free), bytes(shm.total)),
        Err(why) => why.clone(),
    };
    let hint = "remove what others left there (`ls -la /dev/shm`), or make it larger (docker: \
                --shm-size; else `mount -o remount,size=… /dev/shm`)";
    Some((found, hint.to_owned()))
}

/// The device of each worker, repeated where one is shared; none on host cores.
pub(super) fn gpus(profile: &Profile) -> Vec<u32> {
    match (profile.engine.device, profile.devices.gpus.is_empty()) {
        (DeviceKind::Cpu, _) => Vec::new(),
        (DeviceKind::Cuda, false) => profile.devices.gpus.clone(),
        (DeviceKind::Cuda, true) => (0..profile.topology.workers as u32).collect(),
    }
}

/// Whether `case` (`tc03::hinted_and_fresh`) may not be gated, by what was required: `all`, a
/// case (`tc03`) or an arm.
pub fn required(require: &[String], case: &str) -> bool {
    require.iter().any(|wanted| {
        let rest = case.strip_prefix(wanted.as_str());
        wanted == "all" || rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
    })
}

impl std::fmt::Display for Need {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gpus { count: 1 } => f.write_str("an NVIDIA device"),
            Self::Gpus { count } => write!(f, "{count} NVIDIA devices"),
            Self::Etcd => f.write_str("etcd"),
            Self::NonLoopback { address: None } => f.write_str("a non-loopback IPv4 address"),
            Self::NonLoopback { address: Some(ip) } => write!(f, "the address {ip} on this host"),
            Self::Pidfd => f.write_str("pidfd_open (Linux 5.3)"),
            Self::Shm { bytes: wanted } => write!(f, "{} free in /dev/shm", bytes(*wanted)),
        }
    }
}

impl Need {
    /// What there is instead and what to do, if it is not met.
    pub(super) fn unmet(&self, facts: &Facts) -> Option<(String, String)> {
        match self {
            Self::Gpus { count } => {
                let found = match &facts.gpus {
                    Ok(gpus) if gpus.len() >= *count => return None,
                    Ok(gpus) => format!("{}", gpus.len()),
                    Err(why) => why.clone(),
                };
                let hint =
                    "run where the devices are visible (`nvidia-smi -L`), or use the `cpu` profile";
                Some((found, hint.to_owned()))
            }
            Self::Etcd => facts.etcd.is_none().then(|| {
                (
                    "none".to_owned(),
                    "`apt-get install etcd-server` (etcd on PATH is enough)".to_owned(),
                )
            }),
            Self::NonLoopback { address } => {
                let usable = facts.address(*address).filter(|found| found.ip.is_ipv4());
                if usable.is_some() {
                    return None;
                }
                let addresses: Vec<String> = facts
                    .addresses
                    .iter()
                    .map(|found| format!("{} ({})", found.ip, found.interface))
                    .collect();
                let found = match addresses.is_empty() {
                    true => "loopback only".to_owned(),
                    false => addresses.join(", "),
                };
                let hint = match address {
                    Some(_) => "correct network.host_address in the profile, or leave it out",
                    None => "give the host or container a network (docker: not `--network none`)",
                };
                Some((found, hint.to_owned()))
            }
            Self::Pidfd => {
                let why = facts.pidfd.as_ref().err()?;
                let hint =
                    "allow pidfd_open in the container's seccomp profile, or use a newer kernel";
                Some((format!("{why} (kernel {})", facts.kernel), hint.to_owned()))
            }
            Self::Shm { bytes: wanted } => too_small(*wanted, &facts.shm),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::facts::{Address, Gpu, Memory, Shm};
    use super::*;

    /// A machine that has everything.
    pub(in crate::gate) fn facts() -> Facts {
        let gpu = |index| Gpu {
            index,
            uuid: format!("GPU-{index}"),
            name: "NVIDIA H200".to_owned(),
            used: 0,
            total: 150_000_000_000,
            tenants: 0,
        };
        Facts {
            kernel: "6.8.0-generic".to_owned(),
            pidfd: Ok(()),
            shm: Ok(Shm {
                total: 2_000_000_000,
                free: 1_000_000_000,
            }),
            addresses: vec![Address {
                interface: "eth0".to_owned(),
                ip: "10.0.0.7".parse().unwrap(),
            }],
            gpus: Ok(vec![gpu(0), gpu(1)]),
            cores: 8,
            memory: Some(Memory {
                available: 60_000_000_000,
                total: 64_000_000_000,
            }),
            etcd: Some("/usr/bin/etcd".into()),
        }
    }

    type Change = fn(&mut Facts);

    #[test]
    fn each_need_is_decided_by_its_fact() {
        let address = |text: &str| Need::NonLoopback {
            address: Some(text.parse().unwrap()),
        };
        let any = Need::NonLoopback { address: None };
        let nothing: Change = |_| {};
        let no_network: Change = |facts| facts.addresses.clear();
        let only_v6: Change = |facts| facts.addresses[0].ip = "2001:db8::1".parse().unwrap();
        let no_driver: Change = |facts| facts.gpus = Err("no NVIDIA driver".to_owned());
        let no_etcd: Change = |facts| facts.etcd = None;
        let no_pidfd: Change = |facts| facts.pidfd = Err("Operation not permitted".to_owned());
        let no_shm: Change = |facts| facts.shm = Err("No such file".to_owned());
        let shm = |bytes| Need::Shm { bytes };
        let cases: Vec<(Need, Change, Option<&str>)> = vec![
            (Need::Gpus { count: 2 }, nothing, None),
            (Need::Gpus { count: 3 }, nothing, Some("2")),
            (Need::Gpus { count: 1 }, no_driver, Some("no NVIDIA driver")),
            (Need::Etcd, nothing, None),
            (Need::Etcd, no_etcd, Some("none")),
            (any.clone(), nothing, None),
            (any.clone(), no_network, Some("loopback only")),
            (any, only_v6, Some("2001:db8::1 (eth0)")),
            (address("10.0.0.7"), nothing, None),
            (address("10.0.0.8"), nothing, Some("10.0.0.7 (eth0)")),
            (Need::Pidfd, nothing, None),
            (
                Need::Pidfd,
                no_pidfd,
                Some("Operation not permitted (kernel 6.8.0-generic)"),
            ),
            (shm(1_000_000_000), nothing, None),
            (shm(1_000_000_001), nothing, Some("1.0 GB of 2.0 GB")),
            (shm(1), no_shm, Some("No such file")),
        ];
        for (need, change, expected) in cases {
            let mut facts = facts();
            change(&mut facts);
            let found = match decide(std::slice::from_ref(&need), &facts) {
                Decision::Runnable => None,
                Decision::Gated { found, .. } => Some(found),
            };
            assert_eq!(found.as_deref(), expected, "{need}");
        }
    }

    #[test]
    fn a_stack_that_does_not_fit_is_said_in_one_sentence() {
        assert_eq!(room(0), Ok(()));
        let text = room(u64::MAX).unwrap_err().to_string();
        assert!(
            text.starts_with(
                "Environment: no room for this stack in /dev/shm; expected 18446.7 PB free; found "
            ),
            "{text}"
        );
        assert!(text.contains("--shm-size"), "{text}");
    }

    #[test]
    fn the_first_unmet_need_speaks() {
        let mut facts = facts();
        facts.etcd = None;
        let needs = [Need::Pidfd, Need::Etcd, Need::Gpus { count: 9 }];
        let decision = decide(&needs, &facts);
        assert_eq!(
            decision.to_string(),
            "needs etcd; found none; `apt-get install etcd-server` (etcd on PATH is enough)"
        );
        let failure = decision
            .insisted_failure("tc04::kill", true)
            .unwrap()
            .to_string();
        assert!(
            failure.starts_with("Environment: tc04::kill is required"),
            "{failure}"
        );
        assert_eq!(decide(&[], &facts), Decision::Runnable);
        let failure = decision.insisted_failure("tc04::kill", false).unwrap();
        assert_eq!(failure.what, "tc04::kill cannot run here");
        assert_eq!(Decision::Runnable.insisted_failure("x", true), None);
    }

    #[test]
    fn a_simulated_stack_needs_next_to_nothing() {
        use crate::config::testing::{cpu, sim};
        assert_eq!(of_profile(&sim(&[]).profile), [Need::Pidfd]);
        assert!(of_profile(&cpu(&[]).profile).len() > 1);
    }

    #[test]
    fn required_names_cases_arms_or_all() {
        let require = |names: &[&str], case: &str| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            required(&names, case)
        };
        assert!(require(&["all"], "tc01::cold"));
        assert!(require(&["tc01"], "tc01::cold"));
        assert!(require(&["tc02", "tc01::cold"], "tc01::cold"));
        assert!(!require(&["tc01::co"], "tc01::cold"));
        assert!(!require(&["tc0"], "tc01::cold"));
        assert!(!require(&[], "tc01::cold"));
    }
}
