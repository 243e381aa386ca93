//! Stopping a group: SIGTERM to each process group, SIGKILL when its patience ends, the ones
//! others depend on last; then a sweep for descendants that left their group.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use rustix::process::Signal;

use super::{Child, Local};
use crate::failure::Failure;
use crate::plan::Process;
use crate::stack::sweep::{self, Identity, Ours};
use crate::stack::wait::Patience;

/// After SIGKILL only the kernel can delay the end.
const KILLED_WITHIN: Duration = Duration::from_secs(10);

impl Local {
    /// Stops every process of the group, and everything that descends from them.
    pub async fn stop(&mut self) -> Result<(), Failure> {
        self.jobs.abort();
        self.lost.abort_all();
        let names: BTreeSet<String> = self.members().map(|p| p.name.clone()).collect();
        // Written down now: a program that hides its environment is found by its number.
        let ours = self.ours(Some(names));
        let mut known: BTreeSet<Identity> = ours.scan().into_iter().collect();
        let mut layers: BTreeMap<usize, Vec<Child>> = BTreeMap::new();
        let depths = depths(self.plan.processes.iter());
        for child in self.children.drain(..) {
            let depth = depths.get(&child.process.name).copied().unwrap_or(0);
            layers.entry(depth).or_default().push(child);
        }
        for (_, layer) in layers.into_iter().rev() {
            stop_side_by_side(&layer).await;
            for child in layer {
                known.insert(child.identity());
                // A process that even SIGKILL did not end would hold us here for good; leave it
                // to the sweep, which reports it.
                if child.leader.ending().ok().flatten().is_some() {
                    let _ = child.leader.reap();
                }
            }
        }
        Ours { known, ..ours }.kill().await.map(|_| ())
    }
}

/// SIGTERM to every group, SIGKILL to those that outlive their patience.
async fn stop_side_by_side(layer: &[Child]) {
    let mut groups: BTreeSet<u32> = layer.iter().map(|child| child.leader.pid()).collect();
    for child in layer {
        let _ = child.leader.signal_group(Signal::TERM);
        if child.lot.stopped {
            // One that stands still would never hear of it.
            let _ = child.leader.signal_group(Signal::CONT);
        }
    }
    let mut patience: BTreeMap<u32, (Patience, Patience)> = layer
        .iter()
        .map(|child| {
            let stop = Duration::from_secs(child.process.stop_seconds);
            (
                child.leader.pid(),
                (Patience::new(stop), Patience::new(stop + KILLED_WITHIN)),
            )
        })
        .collect();
    loop {
        groups = sweep::living_groups(&groups);
        if groups.is_empty() {
            return;
        }
        for child in layer
            .iter()
            .filter(|child| groups.contains(&child.leader.pid()))
        {
            let Some((stop, kill)) = patience.get_mut(&child.leader.pid()) else {
                continue;
            };
            if stop.spent() {
                let _ = child.leader.signal_group(Signal::KILL);
            }
            if kill.spent() {
                return;
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// How long the longest chain of `after` behind each process is.
fn depths<'a>(processes: impl Iterator<Item = &'a Process> + Clone) -> BTreeMap<String, usize> {
    let count = processes.clone().count();
    let mut depths: BTreeMap<String, usize> =
        processes.clone().map(|p| (p.name.clone(), 0)).collect();
    // As many rounds as there are processes: enough for the longest chain, and an end for a cycle.
    for _ in 0..count {
        for process in processes.clone() {
            let behind = process
                .after
                .iter()
                .filter_map(|name| depths.get(name))
                .max();
            if let Some(depth) = behind.map(|depth| (depth + 1).min(count)) {
                depths.insert(process.name.clone(), depth);
            }
        }
    }
    depths
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Group, Role};

    fn process(name: &str, after: &[&str]) -> Process {
        Process {
            name: name.to_owned(),
            role: Role::Worker,
            group: Group::Core,
            argv: Vec::new(),
            env: BTreeMap::new(),
            after: after.iter().map(|name| (*name).to_owned()).collect(),
            ready: Vec::new(),
            start_seconds: 1,
            stop_seconds: 1,
        }
    }

    #[test]
    fn what_others_depend_on_is_deeper_down() {
        let plan = [
            process("worker0", &["frontend", "etcd"]),
            process("frontend", &["etcd"]),
            process("etcd", &[]),
        ];
        let depths = depths(plan.iter());
        assert_eq!(
            (depths["etcd"], depths["frontend"], depths["worker0"]),
            (0, 1, 2)
        );
    }

    #[test]
    fn a_cycle_has_depths_too() {
        let plan = [process("a", &["b"]), process("b", &["a"])];
        assert_eq!(depths(plan.iter()).len(), 2);
    }
}
