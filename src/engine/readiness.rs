//! Readiness that means it: a pinned request completes on each worker.
//!
//! A worker's own `/health` says ready before the router knows it, and a frontend's says ready
//! as soon as anything has registered. So each worker goes through these levels, every one of
//! them looked at again until it holds:
//!
//! 1. its metrics page is there and names its instance id (the `worker_id` label, in hex);
//! 2. the front door lists that instance and the model it serves;
//! 3. a canary pinned to it completes, and says that this instance served it. Who only decodes
//!    cannot be pinned: its canary is anybody's, and has to have ended with it;
//! 4. where KVCR is on, its telemetry is on the page.
//!
//! The canary has the shape of a case's request, log-probabilities included: where the engine
//! compiles for them, the first one takes half a minute, which no case should pay. It is shorter
//! than any block, so that it moves no counter of blocks.
//!
//! What is *not there yet* is waited for, without a bound of our own: the supervisor bounds the
//! bring-up and watches the processes. What *contradicts* readiness fails at once.

use std::time::Duration;

use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::client::parse::unsigned;
use crate::client::{
    Client, Completion, Input, Observation, Pin, RequestFailure, RequestFailureKind, Transport,
};
use crate::engine::Registered;
use crate::failure::{Class, Failure};
use crate::plan::{Group, Plan, PlannedWorker, Serves};
use crate::stack::clock::monotonic_ns;
use crate::stack::protocol::{WorkerInfo, millis};
use crate::telemetry::{Page, Scraper, kvcr};

/// Between two looks at a level that does not hold.
const INTERVAL: Duration = Duration::from_millis(250);
/// For one small document or metrics page.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// For one canary; the first one may compile (27 s were seen on two idle cores).
const CANARY_DEADLINE: Duration = Duration::from_secs(180);
/// How long telemetry may stay away after a request has completed. It was always there before
/// the first request; a worker without it was started without it.
const TELEMETRY_WINDOW: Duration = Duration::from_secs(15);

/// Why a level does not hold.
enum Wait {
    /// Not there yet: worth another look.
    NotYet(String),
    /// It never will be.
    Never(Failure),
}

/// Waits until every worker of `group` is ready as this module means it, and says so level by
/// level. Returns them by index, with `ready_ms` counted from this call and `probes_ms` 0: only the
/// supervisor knows when it spawned them.
///
/// Dropping the future stops everything it started.
pub async fn await_workers(
    plan: &Plan,
    group: Group,
    say: &(dyn Fn(String) + Send + Sync),
) -> Result<Vec<WorkerInfo>, Failure> {
    let planned: Vec<PlannedWorker> = match group {
        Group::Core => plan.workers.clone(),
        Group::Reference => plan.reference.iter().cloned().collect(),
    };
    if planned.is_empty() {
        return Err(Failure::environment(format!(
            "the plan has no worker in group {group:?}"
        )));
    }
    let ready = Probe::of(plan)?.all(planned, say).await?;
    Ok(ready
        .into_iter()
        .map(|registered| registered.worker)
        .collect())
}

/// [`await_workers`] for the one worker of the core whose process is `process`.
pub async fn await_worker(
    plan: &Plan,
    process: &str,
    say: &(dyn Fn(String) + Send + Sync),
) -> Result<Registered, Failure> {
    let planned = plan.workers.iter().find(|worker| worker.process == process);
    let planned = planned.cloned().into_iter().collect();
    let ready = Probe::of(plan)?.all(planned, say).await?;
    ready.into_iter().next().ok_or_else(|| {
        Failure::inconclusive(format!("the plan has no worker whose process is {process}"))
    })
}

/// Two of our workers cannot be one instance: on one of the ports somebody else answers, such
/// as a worker of an earlier stack that has not let go of it yet.
fn same_instance(a: &WorkerInfo, b: &WorkerInfo) -> Failure {
    Failure::environment(format!(
        "{} and {} are the same instance",
        a.process, b.process
    ))
    .expected("one instance id for each worker")
    .found(format_args!(
        "{} at {} and at {}",
        a.instance_id, a.metrics_url, b.metrics_url
    ))
    .hint("see which process listens on these ports")
}

/// An instance that the front door lists.
#[derive(Clone, Copy)]
struct Listed {
    instance_id: u64,
    listed_ns: u64,
    /// When its canary completed.
    canary: Option<(u64, Instant)>,
}

/// One that is ready.
struct Ready {
    instance_id: u64,
    listed_ns: u64,
    canary_ns: u64,
}

#[derive(Clone)]
struct Probe {
    frontend: String,
    client: Client,
    transport: Transport,
    scraper: Scraper,
    telemetry_window: Duration,
}

impl Probe {
    fn of(plan: &Plan) -> Result<Self, Failure> {
        Ok(Self {
            frontend: plan.frontend_url.trim_end_matches('/').to_owned(),
            client: Client::new(&plan.frontend_url, CANARY_DEADLINE)?,
            transport: Transport::new(LOOK_DEADLINE)?,
            scraper: Scraper::new(LOOK_DEADLINE)?,
            telemetry_window: TELEMETRY_WINDOW,
        })
    }

    async fn all(
        &self,
        planned: Vec<PlannedWorker>,
        say: &(dyn Fn(String) + Send + Sync),
    ) -> Result<Vec<Registered>, Failure> {
        // Tasks outlive no one: the set aborts them when it is dropped. `say` is only borrowed, so
        // what they have to say comes back through a channel.
        let (told, mut tell) = mpsc::unbounded_channel();
        let mut tasks = JoinSet::new();
        for worker in planned {
            let (probe, told) = (self.clone(), told.clone());
            tasks.spawn(async move { probe.ready(worker, told).await });
        }
        drop(told);
        let mut ready: Vec<Registered> = Vec::new();
        loop {
            tokio::select! {
                biased;
                Some(text) = tell.recv() => say(text),
                Some(done) = tasks.join_next() => {
                    let info = done.map_err(|error| {
                        Failure::inconclusive("a readiness probe ended by itself").found(error)
                    })??;
                    let mut others = ready.iter().map(|other| &other.worker);
                    if let Some(other) = others.find(|w| w.instance_id == info.worker.instance_id) {
                        return Err(same_instance(other, &info.worker));
                    }
                    ready.push(info);
                }
                else => break,
            }
        }
        ready.sort_by_key(|registered| registered.worker.index);
        Ok(ready)
    }

    async fn ready(
        &self,
        worker: PlannedWorker,
        told: mpsc::UnboundedSender<String>,
    ) -> Result<Registered, Failure> {
        let mut last = String::new();
        let mut say = |text: String| {
            // A supervisor that no longer listens is about to drop us anyway.
            if text != last {
                let _ = told.send(format!("{}: {text}", worker.process));
                last = text;
            }
        };
        let mut listed: Option<Listed> = None;
        let began = Instant::now();
        loop {
            match self.look(&worker, &mut listed, &mut say).await {
                Ok(ready) => {
                    say(format!("ready as instance {}", ready.instance_id));
                    return Ok(Registered {
                        worker: WorkerInfo {
                            process: worker.process,
                            index: worker.index,
                            instance_id: ready.instance_id,
                            served_model: worker.served_model,
                            serves: worker.serves,
                            metrics_url: worker.metrics_url,
                            probes_ms: 0,
                            ready_ms: millis(began.elapsed()),
                        },
                        listed_ns: ready.listed_ns,
                        canary_ns: ready.canary_ns,
                    });
                }
                Err(Wait::NotYet(status)) => say(status),
                Err(Wait::Never(failure)) => return Err(failure),
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// All levels, from the first: a worker that restarts in between begins anew. `listed` keeps
    /// the instance, and that its canary completed, so that it is asked only once.
    async fn look(
        &self,
        worker: &PlannedWorker,
        listed: &mut Option<Listed>,
        say: &mut impl FnMut(String),
    ) -> Result<Ready, Wait> {
        let page = match self.scraper.scrape(&worker.metrics_url).await {
            Ok(scrape) => scrape.page,
            Err(failure) => return Err(Wait::NotYet(format!("no metrics page: {}", failure.kind))),
        };
        let id = instance_id(&page).map_err(Wait::NotYet)?;

        let health = self.document("/health").await?;
        if !lists_instance(&health, id) {
            return Err(Wait::NotYet(format!(
                "the front door does not list instance {id}"
            )));
        }
        let models = self.document("/v1/models").await?;
        if !lists_model(&models, &worker.served_model) {
            return Err(Wait::NotYet(format!(
                "the front door does not list model `{}`",
                worker.served_model
            )));
        }

        let known = listed.filter(|known| known.instance_id == id);
        let known = listed.insert(known.unwrap_or_else(|| Listed {
            instance_id: id,
            listed_ns: monotonic_ns(),
            canary: None,
        }));
        let (canary_ns, since) = match known.canary {
            Some(done) => done,
            None => {
                say(format!("listed as instance {id}; its canary is on its way"));
                self.canary(worker, id).await?;
                *known.canary.insert((monotonic_ns(), Instant::now()))
            }
        };

        // The page from before the canary may do: telemetry does not need a request.
        if worker.kvcr
            && let Err(missing) = kvcr::telemetry_present(&page)
        {
            return Err(if since.elapsed() < self.telemetry_window {
                Wait::NotYet(format!("KVCR telemetry: {missing}"))
            } else {
                Wait::Never(no_telemetry(worker, &missing))
            });
        }
        Ok(Ready {
            instance_id: id,
            listed_ns: known.listed_ns,
            canary_ns,
        })
    }

    async fn document(&self, path: &str) -> Result<Value, Wait> {
        self.transport
            .get_json(&format!("{}{path}", self.frontend))
            .await
            .map_err(|failure| Wait::NotYet(format!("front door{path}: {}", failure.kind)))
    }

    async fn canary(&self, worker: &PlannedWorker, id: u64) -> Result<(), Wait> {
        let completion = Completion {
            model: worker.served_model.clone(),
            // Two tokens: no block of any size that is in use is filled by them.
            prompt: Input::Text("canary".into()),
            max_tokens: 2,
            ignore_eos: true,
            pin: Pin::new(worker.serves, id),
            cache_salt: None,
        };
        let label = format!("canary on {}", worker.process);
        match self.client.complete(&completion, &label).await {
            Ok(seen) => match (server(worker.serves, &seen), worker.serves) {
                (Some(server), _) if server == id => Ok(()),
                // Whoever decodes also prefills until the router knows others that do.
                (None, Serves::Prefill) if seen.served_by.is_some() => Err(Wait::NotYet(
                    "canary: the router does not prefill apart yet".to_owned(),
                )),
                (server, _) => Err(Wait::Never(misrouted(worker, id, server))),
            },
            Err(failure) if may_pass(&failure) => {
                Err(Wait::NotYet(format!("canary: {}", failure.kind)))
            }
            Err(failure) => Err(Wait::Never(failure.into())),
        }
    }
}

/// Who did with a request what a worker of this kind does.
fn server(serves: Serves, seen: &Observation) -> Option<u64> {
    match serves {
        Serves::Whole | Serves::Decode => seen.served_by,
        Serves::Prefill => seen.prefilled_by,
    }
}

/// Whether a canary's failure is one that a stack in the making shows: the router does not know
/// the worker yet (400, 404), nothing serves (5xx), or the answer was cut or late.
fn may_pass(failure: &RequestFailure) -> bool {
    match failure.kind {
        RequestFailureKind::Connect(_)
        | RequestFailureKind::Deadline { .. }
        | RequestFailureKind::Truncated { .. } => true,
        RequestFailureKind::Http { .. } => failure.class() != Class::Skew,
        // A complete answer that is wrong stays wrong.
        _ => false,
    }
}

fn misrouted(worker: &PlannedWorker, id: u64, served_by: Option<u64>) -> Failure {
    match served_by {
        Some(other) => Failure::product(format!(
            "the router sent {}'s canary to another worker",
            worker.process
        ))
        .expected(format_args!("served by {id}"))
        .found(format_args!("served by {other}")),
        // Without it no case can prove who served what.
        None => Failure::skew("the front door does not say which worker served a request")
            .expected("nvext.worker_id.decode_worker_id in the response")
            .found("no such field")
            .hint("compare Dynamo's version with the environment's lock"),
    }
}

fn no_telemetry(worker: &PlannedWorker, missing: &str) -> Failure {
    Failure::skew(format!("{} shows no KVCR telemetry", worker.process))
        .expected(format_args!(
            "KVCR's series on {} after a completed request",
            worker.metrics_url
        ))
        .found(missing)
        .hint("check `enable_telemetry` of the tier, and that engine and KVCR belong together")
}

/// The one `worker_id` of a worker's own page, in hex there.
fn instance_id(page: &Page) -> Result<u64, String> {
    match page.label_values("worker_id")[..] {
        [] => Err("its metrics page names no worker_id yet".into()),
        [hex] => u64::from_str_radix(hex, 16)
            .map_err(|_| format!("worker_id `{hex}` on its metrics page is not an id")),
        ref several => Err(format!(
            "its metrics page names several worker_ids: {}",
            several.join(", ")
        )),
    }
}

/// Whether the front door's `/health` lists this instance as one that generates.
pub(crate) fn lists_instance(health: &Value, id: u64) -> bool {
    let instances = health.get("instances").and_then(Value::as_array);
    instances.into_iter().flatten().any(|instance| {
        instance.get("endpoint").and_then(Value::as_str) == Some("generate")
            && instance.get("instance_id").and_then(unsigned) == Some(id)
    })
}

fn lists_model(models: &Value, name: &str) -> bool {
    let data = models.get("data").and_then(Value::as_array);
    data.into_iter()
        .flatten()
        .any(|m| m.get("id").and_then(Value::as_str) == Some(name))
}

#[cfg(test)]
mod tests;
