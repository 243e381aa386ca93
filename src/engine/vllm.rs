//! vLLM behind `dynamo.vllm`, and the simulated processes that stand in for it: they have the
//! same command lines and print the same lines, so they have the same plan and marks.
//!
//! What its processes are started with ([`worker`], and their connectors: `transfer`), which of that users may not change
//! ([`reserved`]), what its logs say when it does not start ([`marks`]) and which KV geometry it
//! states when it does. The shape of a stack
//! is `plan`'s; carrying it out is `stack`'s.

pub mod marks;
pub mod reserved;
mod stated;
mod transfer;
pub mod worker;

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::{Blueprint, BoxFuture, Registered, readiness};
use crate::config::Config;
use crate::environment::Installed;
use crate::failure::Failure;
use crate::geometry::Geometry;
use crate::plan::{self, Bindings, External, Group, Plan, Process};
use crate::stack::harm::Changes;
use crate::stack::protocol::WorkerInfo;

/// How the title of vLLM's engine core begins; one of several says which (`_DP1`).
pub(crate) const ENGINE_CORE: &str = "VLLM::EngineCore";

/// A stack of `dynamo.vllm` workers, real or simulated: a configuration and the software it runs on. Written to the supervisor's
/// launch file as it is.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct VllmBlueprint {
    /// What to run.
    pub config: Config,
    /// What to run it with.
    pub installed: Installed,
}

impl VllmBlueprint {
    /// The stack of `config` on `installed`.
    pub fn new(config: Config, installed: Installed) -> Self {
        Self { config, installed }
    }

    /// The plan with placeholder ports and directories: what is shown, pinned and hashed.
    pub fn canonical_plan(&self) -> Result<Plan, Failure> {
        self.plan(&Bindings::canonical(&self.ports(), &self.fixed_ports()))
    }

    /// Which running stack may be shared, see [`Config::fingerprint`].
    pub fn fingerprint(&self) -> Result<String, Failure> {
        let canonical = self.canonical_plan()?;
        Ok(self.config.fingerprint(&canonical, &self.installed))
    }
}

impl Blueprint for VllmBlueprint {
    fn name(&self) -> &str {
        &self.config.profile_name
    }

    fn ports(&self) -> Vec<String> {
        plan::ports(&self.config)
    }

    fn fixed_ports(&self) -> Vec<(String, u16)> {
        plan::fixed_ports(&self.config)
    }

    fn external(&self) -> Result<Vec<External>, Failure> {
        // They are called the same whatever the machine gives the rest.
        plan::sidecar::external(
            &self.config,
            &self.installed,
            &Bindings::canonical(&[], &[]),
        )
    }

    fn plan(&self, bindings: &Bindings) -> Result<Plan, Failure> {
        plan::plan(&self.config, &self.installed, bindings)
    }

    fn ready<'a>(
        &'a self,
        plan: &'a Plan,
        group: Group,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Vec<WorkerInfo>, Failure>> {
        Box::pin(readiness::await_workers(plan, group, say))
    }

    fn examine<'a>(
        &'a self,
        plan: &'a Plan,
        workers: &'a [WorkerInfo],
        logs: &'a Path,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<(), Failure>> {
        let geometry = Geometry::of(&self.config.profile);
        Box::pin(stated::examine(
            geometry,
            &plan.frontend_url,
            workers,
            logs,
            say,
        ))
    }

    fn ready_again<'a>(
        &'a self,
        plan: &'a Plan,
        process: &'a str,
        say: &'a (dyn Fn(String) + Send + Sync),
    ) -> BoxFuture<'a, Result<Registered, Failure>> {
        Box::pin(readiness::await_worker(plan, process, say))
    }

    fn changed(&self, plan: &Plan, process: &str, changes: &Changes) -> Result<Process, Failure> {
        plan::changed::changed(plan, process, changes)
    }

    fn renewed(&self, process: Process, before: u32) -> Process {
        plan::changed::renewed(process, before)
    }

    fn is_engine_core(&self, command_line: &str) -> bool {
        command_line.starts_with(ENGINE_CORE)
    }

    fn explain(&self, process: &Process, ending: Option<&str>, log: &Path) -> Failure {
        marks::explain(&process.name, ending, log)
    }

    fn devices_released(&self) -> BoxFuture<'_, Result<(), Failure>> {
        // Host memory is back when the processes are gone, and configuration allows no other
        // device.
        Box::pin(std::future::ready(Ok(())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::cpu;
    use crate::plan::testing::installed;

    #[test]
    fn it_survives_the_launch_file() {
        let blueprint = VllmBlueprint::new(cpu(&["--frontend-port", "8000"]), installed());
        let text = serde_json::to_string(&blueprint).unwrap();
        let again: VllmBlueprint = serde_json::from_str(&text).unwrap();
        assert_eq!(again, blueprint);
        assert_eq!(again.fingerprint(), blueprint.fingerprint());
    }

    #[test]
    fn a_fixed_port_is_one_of_the_ports() {
        let blueprint = VllmBlueprint::new(cpu(&["--frontend-port", "8000"]), installed());
        assert_eq!(blueprint.fixed_ports(), [("frontend".to_owned(), 8000)]);
        assert!(blueprint.ports().contains(&"frontend".to_owned()));
        let plan = blueprint.canonical_plan().unwrap();
        assert_eq!(plan.frontend_url, "http://127.0.0.1:8000");
    }
}
