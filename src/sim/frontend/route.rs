//! A request finds its engine, and a hint if somebody else holds more of its prompt.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::Door;
use super::engine::{self, Broken, Lines};
use super::fleet::Member;
use super::refusal::Refusal;
use super::request::Ask;
use super::router::{self, Known, Source};
use crate::sim::fault::Fault;
use crate::sim::model::block_hashes;
use crate::sim::wire::{Generate, Handover, Hint, Owner, Reply, Role};

/// Where hints send a target that shall find nobody: the port of a service that no host has.
const DEAD_PEER: &str = "127.0.0.1:1";

/// How long the state agent may take.
const AGENT_PATIENCE: Duration = Duration::from_secs(1);

/// A request on its way.
#[derive(Debug)]
pub(super) struct Routed {
    pub(super) lines: Lines,
    /// Who really prefills and decodes.
    pub(super) prefill: u64,
    pub(super) decode: u64,
    /// What a pinned answer shall say instead.
    pub(super) pretended: Option<u64>,
    /// What a prefill engine found cached: the decode engine does not know.
    pub(super) cached_tokens: Option<u64>,
    /// Leading blocks that the router knew of.
    pub(super) overlap: usize,
}

/// What every engine needs of a request.
pub(super) struct Request<'a> {
    pub(super) id: &'a str,
    pub(super) ask: &'a Ask,
    pub(super) tokens: &'a [u32],
    pub(super) max_tokens: u32,
    pub(super) members: &'a [Arc<Member>],
}

/// One engine has taken the request.
struct Taken {
    member: Arc<Member>,
    lines: Lines,
    overlap: usize,
    pretended: Option<u64>,
}

impl Request<'_> {
    /// Finds engines, and asks them.
    ///
    /// # Errors
    /// What Dynamo answers when it cannot.
    pub(super) async fn route(&self, door: &Door) -> Result<Routed, Refusal> {
        let of = |wanted: fn(Role) -> bool| -> Vec<Arc<Member>> {
            let all = self.members.iter();
            all.filter(|member| wanted(member.registration.role))
                .cloned()
                .collect()
        };
        let prefills = of(|role| role == Role::Prefill);
        let decodes = of(|role| role == Role::Decode);
        if prefills.is_empty() || decodes.is_empty() {
            let engines = of(|role| role == Role::Aggregated);
            let pin = self.ask.pins.worker;
            let taken = self.send(door, &engines, pin, None).await?;
            let id = taken.member.registration.instance_id;
            return Ok(Routed {
                lines: taken.lines,
                prefill: id,
                decode: id,
                pretended: taken.pretended,
                cached_tokens: None,
                overlap: taken.overlap,
            });
        }
        if let Some(id) = self.ask.pins.worker {
            return Err(Refusal::not_eligible(id));
        }
        if door.faults.tell(Fault::DecodesAlone) {
            let taken = self.send(door, &decodes, None, None).await?;
            let id = taken.member.registration.instance_id;
            return Ok(Routed {
                lines: taken.lines,
                prefill: id,
                decode: id,
                pretended: None,
                cached_tokens: None,
                overlap: taken.overlap,
            });
        }
        let pin = self.ask.pins.prefill;
        let mut first = self.send(door, &prefills, pin, None).await?;
        let (handover, cached) = prefilled(&mut first.lines).await?;
        let second = self.send(door, &decodes, None, Some(handover)).await?;
        Ok(Routed {
            lines: second.lines,
            prefill: first.member.registration.instance_id,
            decode: second.member.registration.instance_id,
            pretended: first.pretended,
            cached_tokens: Some(cached),
            overlap: first.overlap,
        })
    }

    /// Asks the pinned engine, or the best one that is there.
    async fn send(
        &self,
        door: &Door,
        engines: &[Arc<Member>],
        pin: Option<u64>,
        handover: Option<Handover>,
    ) -> Result<Taken, Refusal> {
        let hashes = self.hashes();
        let at = |id: u64| {
            engines
                .iter()
                .position(|m| m.registration.instance_id == id)
        };
        let mut known: Vec<Known> = engines.iter().map(|m| m.known(&hashes)).collect();
        let mut pretended = None;
        let mut pinned = None;
        if let Some(id) = pin {
            let mut target = at(id).ok_or_else(Refusal::unknown_pin)?;
            let other = (0..engines.len()).find(|index| *index != target);
            if let Some(other) = other {
                if door.faults.tell(Fault::WrongWorker) {
                    target = other;
                } else if door.faults.tell(Fault::WrongWorkerHidden) {
                    target = other;
                    pretended = Some(id);
                }
            }
            pinned = Some(target);
        }
        // Every failure to connect takes an engine out, so this ends.
        for _ in 0..engines.len() {
            let ticket = door.tickets.fetch_add(1, Ordering::Relaxed);
            let target = pinned.or_else(|| router::choose(&known, ticket));
            let Some(target) = target else { break };
            let member = &engines[target];
            let hint = match handover {
                Some(_) => None,
                None => self.hint(door, &known[target], &hashes).await,
            };
            let request = Generate {
                request_id: self.id.to_owned(),
                tokens: self.tokens.to_vec(),
                cache_salt: self.ask.salt.clone(),
                max_tokens: self.max_tokens,
                hint,
                handover: handover.clone(),
            };
            let sent = engine::generate(&door.http, &member.registration, door.built_in, &request);
            match sent.await {
                Ok(lines) => {
                    let id = member.registration.instance_id;
                    if door.faults.tell(Fault::RegistrationLost) {
                        door.fleet.hide(id);
                    }
                    return Ok(Taken {
                        member: Arc::clone(member),
                        lines,
                        overlap: known[target].cached(),
                        pretended,
                    });
                }
                Err(Broken::Cut) => return Err(Refusal::failed()),
                Err(Broken::Unreachable) => {
                    member.lost();
                    known[target].up = false;
                    if pinned.is_some() {
                        break;
                    }
                }
            }
        }
        Err(Refusal::unavailable())
    }

    /// Of the prompt's full blocks.
    fn hashes(&self) -> Vec<u64> {
        let block = self.members.first().map(|m| m.registration.block_tokens);
        match block {
            Some(block) if block > 0 => {
                block_hashes(self.tokens, block as usize, self.ask.salt.as_deref())
            }
            _ => Vec::new(),
        }
    }

    /// Where the target can fetch more than it has.
    async fn hint(&self, door: &Door, target: &Known, hashes: &[u64]) -> Option<Hint> {
        target.control.as_ref()?;
        let agent = door.fleet.agent().is_some();
        // As measured: what a state agent tells the router is not told apart by salt.
        if self.ask.salt.is_some() && agent {
            return None;
        }
        let mut sources: Vec<Source> = self
            .members
            .iter()
            .filter_map(|member| {
                let known = member.known(hashes);
                let control = known.control?;
                let lost = door.came_back(&control, member.registration.instance_id)
                    && door.faults.tell(Fault::HintLost);
                if lost {
                    return None;
                }
                Some(Source {
                    control,
                    // As measured: without a state agent a block that only KVCR holds is not hinted,
                    // and one that only the device holds is.
                    blocks: if agent { known.kvcr } else { known.device },
                })
            })
            .collect();
        if target.cached() < hashes.len()
            && let Some(agent) = door.fleet.agent_for_the_dead()
        {
            for owner in owners(door, &agent).await {
                let blocks = owner.blocks.into_iter().collect();
                sources.push(Source {
                    blocks: router::prefix(&blocks, hashes),
                    control: owner.control,
                });
            }
        }
        let mut hint = router::hint(target, &sources, hashes)?;
        if door.faults.tell(Fault::HintMissing) {
            return None;
        }
        if door.faults.tell(Fault::HintDeadPeer) {
            hint.source_control_endpoint = DEAD_PEER.to_owned();
        }
        Some(hint)
    }
}

/// What the state agent knows; nothing when it does not answer.
async fn owners(door: &Door, agent: &str) -> Vec<Owner> {
    let url = format!("http://{agent}/owners");
    let asked = door.http.get(url).timeout(AGENT_PATIENCE).send().await;
    match asked {
        Ok(response) => response.json().await.unwrap_or_default(),
        Err(_) => Vec::new(),
    }
}

/// Waits for a prefill engine: its handover, and what it found cached.
async fn prefilled(lines: &mut Lines) -> Result<(Handover, u64), Refusal> {
    loop {
        match lines.next().await {
            Ok(Reply::Token { .. }) => {}
            Ok(Reply::Done {
                handover: Some(handover),
                cached_tokens,
                ..
            }) => return Ok((handover, cached_tokens)),
            Ok(Reply::Failed { status, message }) => return Err(Refusal::engine(status, message)),
            Ok(Reply::Done { handover: None, .. }) | Err(_) => return Err(Refusal::failed()),
        }
    }
}
