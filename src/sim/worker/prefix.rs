//! Which blocks of a prompt an engine has, and getting them: device, host tier, KVCR's own pool,
//! then the peer that a hint names.

use std::collections::HashSet;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::engine::{Engine, lock};
use super::meters;
use super::own::Page;
use crate::sim::discovery::Watch;
use crate::sim::fault::Fault;
use crate::sim::kvcr::target::Fetched;
use crate::sim::model::{Held, Key};
use crate::sim::wire::{Generate, Hint, Reply};

/// What was found of a prompt.
#[derive(Default)]
pub(super) struct Prefix {
    /// Attention pages of the reused blocks.
    pub attention: Vec<Page>,
    /// State pages after the last of them.
    pub states: Vec<Page>,
    /// Blocks from the device.
    pub device: usize,
    /// Blocks from the host tier.
    pub host: usize,
    /// Blocks from KVCR: its own pool or a peer.
    pub external: usize,
    /// Whether a load from KVCR's own pool failed.
    pub load_failed: bool,
    /// What was held before the last block.
    pub before_last: Option<Held>,
}

impl Prefix {
    /// Reused blocks.
    pub(super) fn blocks(&self) -> usize {
        self.attention.len()
    }
}

/// Where a page behind the device is.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Place {
    Host,
    Own,
    Peer,
}

/// What is found behind the device: attention pages in order, then state pages.
#[derive(Default)]
struct Behind {
    attention: Vec<(Key, Place)>,
    states: Vec<(Key, Place)>,
    /// State pages that are moved and not needed.
    needless: Vec<(Key, Place)>,
}

/// Where peers' blocks are said to be.
struct Source {
    endpoint: String,
    /// `None`: anything may be there.
    blocks: Option<HashSet<u64>>,
}

impl Source {
    fn may_hold(&self, block: u64) -> bool {
        self.blocks
            .as_ref()
            .is_none_or(|blocks| blocks.contains(&block))
    }
}

fn attention(block: u64) -> Key {
    Key::attention(block)
}

impl Engine {
    /// Finds and loads the longest prefix that can be reused, and puts what was loaded into the
    /// caches in front of where it came from.
    pub(super) async fn reuse(
        &self,
        request: &Generate,
        hashes: &[u64],
        replies: &mpsc::Sender<Reply>,
    ) -> Prefix {
        let faults = &self.parts.around.faults;
        if !self.parts.prefix_caching || faults.tell(Fault::ReferenceReusesNothing) {
            return Prefix::default();
        }
        let limit = (request.tokens.len() - 1) / self.parts.block_tokens;
        let _turn = match (&request.hint, hashes.first()) {
            (Some(_), Some(first)) => Some(self.turn(*first).await),
            _ => None,
        };
        let mut prefix = self.on_device(&hashes[..limit.min(hashes.len())]);
        let source = self.source(request.hint.as_ref());
        let mut behind = self.behind(hashes, prefix.device, source.as_ref());
        if prefix.device + behind.attention.len() > 0 && faults.tell(Fault::HitTooShort) {
            self.shorten(&mut prefix, &mut behind);
        }
        if behind
            .attention
            .iter()
            .any(|(_, place)| *place == Place::Own)
            && faults.tell(Fault::LivelockedLoad)
        {
            // Ends with the client's patience.
            replies.closed().await;
        }
        if !behind.attention.is_empty() {
            self.load(&mut prefix, behind, source.as_ref()).await;
        }
        if prefix.attention.len() == hashes.len() && prefix.states.is_empty() {
            prefix.before_last = prefix.attention.split_last().map(|(_, before)| {
                let Self { parts, .. } = self;
                let mut held = Held::nothing(parts.weights, parts.shape, parts.page_bytes);
                before.iter().for_each(|page| held.take_attention(page));
                held
            });
        }
        prefix
    }

    /// One block less. With states nothing is left of a level: they stand at its end only.
    fn shorten(&self, prefix: &mut Prefix, behind: &mut Behind) {
        if !behind.attention.is_empty() {
            behind.attention.pop();
            if !behind.states.is_empty() {
                *behind = Behind::default();
            }
        } else {
            prefix.attention.pop();
            if !prefix.states.is_empty() {
                *prefix = Prefix::default();
            }
            prefix.device = prefix.attention.len();
        }
    }

    fn on_device(&self, hashes: &[u64]) -> Prefix {
        let mut device = lock(&self.device);
        let run = hashes
            .iter()
            .take_while(|block| device.contains(&attention(**block)))
            .count();
        let blocks = (0..=run)
            .rev()
            .find(|blocks| {
                blocks.checked_sub(1).is_none_or(|last| {
                    self.state_keys(hashes[last])
                        .all(|key| device.contains(&key))
                })
            })
            .unwrap_or(0);
        // Used from the end, so that the beginning is what was used last.
        let mut pages: Vec<Page> = Vec::new();
        let mut states: Vec<Page> = Vec::new();
        if let Some(last) = blocks.checked_sub(1) {
            states.extend(
                self.state_keys(hashes[last])
                    .filter_map(|key| device.get(&key).cloned()),
            );
        }
        for block in hashes[..blocks].iter().rev() {
            pages.extend(device.get(&attention(*block)).cloned());
        }
        drop(device);
        pages.reverse();
        if let Some(first) = pages.first_mut()
            && self.parts.around.faults.tell(Fault::CorruptDeviceBlock)
        {
            *first = flipped(first);
        }
        Prefix {
            device: pages.len(),
            attention: pages,
            states,
            ..Prefix::default()
        }
    }

    /// The peer to ask, if there is one.
    fn source(&self, hint: Option<&Hint>) -> Option<Source> {
        self.parts.target.as_ref()?;
        let faults = &self.parts.around.faults;
        if let Some(hint) = hint.filter(|_| !faults.tell(Fault::HintIgnored)) {
            let blocks = hint.block_hashes.iter().copied().collect();
            return Some(Source {
                endpoint: hint.source_control_endpoint.clone(),
                blocks: (!self.parts.opportunistic_query).then_some(blocks),
            });
        }
        if hint.is_none() && faults.on(Fault::FreshPulls) {
            let (directory, own) = self.parts.peers.as_ref()?;
            let lease = Duration::from_micros(self.parts.around.latency.lease_us);
            let others = Watch::new(directory, lease).look();
            let other = others
                .into_iter()
                .filter_map(|other| other.control)
                .find(|control| control != own)?;
            return faults.tell(Fault::FreshPulls).then_some(Source {
                endpoint: other,
                blocks: None,
            });
        }
        None
    }

    /// The longest prefix behind `device` blocks that is there, as far as anyone knows.
    fn behind(&self, hashes: &[u64], device: usize, source: Option<&Source>) -> Behind {
        let mut behind = Behind::default();
        let (host, own) = (self.parts.host.as_ref(), self.parts.own.as_ref());
        if host.is_none() && own.is_none() && source.is_none() {
            return behind;
        }
        let faults = &self.parts.around.faults;
        let blind = own.is_some() && faults.tell(Fault::TierNeverHits);
        let in_host = |key: &Key| host.is_some_and(|host| host.contains(key));
        let in_own = |key: &Key| !blind && own.is_some_and(|own| own.contains(key));
        let in_kvcr = |key: &Key| {
            if in_own(key) {
                return Some(Place::Own);
            }
            let said = source.is_some_and(|source| source.may_hold(key.block));
            said.then_some(Place::Peer)
        };
        let place = |key: &Key| in_host(key).then_some(Place::Host).or_else(|| in_kvcr(key));

        let (mut asked_host, mut asked_kvcr) = (0, 0);
        for block in &hashes[device..] {
            let key = attention(*block);
            asked_host += 1;
            asked_kvcr += u64::from(!in_host(&key));
            let Some(place) = place(&key) else { break };
            behind.attention.push((key, place));
        }
        let hits = |here: bool| {
            let found = behind.attention.iter();
            found
                .filter(|(_, place)| (*place == Place::Host) == here)
                .count() as u64
        };
        let meters = &self.parts.around.meters;
        meters.asked();
        meters.looked_up(meters::HOST, asked_host, hits(true));
        if self.parts.target.is_some() || own.is_some() {
            meters.looked_up(meters::KVCR, asked_kvcr, hits(false));
        }

        if self.parts.shape.state_groups == 0 {
            return behind;
        }
        // Only as far as the states after the last block are there too.
        while let Some((last, _)) = behind.attention.last().copied() {
            let states: Option<Vec<_>> = self
                .state_keys(last.block)
                .map(|key| Some((key, place(&key)?)))
                .collect();
            if let Some(states) = states {
                behind.states = states;
                break;
            }
            behind.attention.pop();
        }
        let in_kvcr = |(_, place): &(Key, Place)| *place != Place::Host;
        if behind.states.iter().any(in_kvcr) && faults.tell(Fault::StatePageMissing) {
            behind.states.clear();
        }
        if behind.attention.len() > 1 && faults.tell(Fault::StateOverTransfer) {
            let before = &behind.attention[..behind.attention.len() - 1];
            behind.needless = before
                .iter()
                .flat_map(|(key, _)| self.state_keys(key.block))
                .filter_map(|key| Some((key, place(&key)?)))
                .filter(|(_, place)| *place != Place::Host)
                .collect();
        }
        behind
    }

    async fn load(&self, prefix: &mut Prefix, behind: Behind, source: Option<&Source>) {
        let began = Instant::now();
        let (meters, page_bytes) = (&self.parts.around.meters, self.parts.page_bytes);
        let wanted: Vec<(Key, Place)> = [
            behind.attention.clone(),
            behind.states.clone(),
            behind.needless,
        ]
        .concat();
        let of = |place: Place| -> Vec<Key> {
            let there = wanted.iter().filter(|(_, at)| *at == place);
            there.map(|(key, _)| *key).collect()
        };
        let near = wanted.iter().filter(|(_, at)| *at != Place::Peer).count();
        tokio::time::sleep(self.parts.around.latency.load(near as u64)).await;

        let host = self.out_of_host(&of(Place::Host));
        let own_keys = of(Place::Own);
        let own = match &self.parts.own {
            Some(tier) if !own_keys.is_empty() => {
                let pages = tier.deliver(&own_keys);
                prefix.load_failed = pages.is_none();
                all_or_none(pages, own_keys.len())
            }
            _ => Vec::new(),
        };
        let peer = self.out_of_peer(&of(Place::Peer), source).await;
        let (mut host, mut own, mut peer) = (host.into_iter(), own.into_iter(), peer.into_iter());
        let got: Vec<(Key, Place, Option<Page>)> = wanted
            .iter()
            .map(|(key, place)| {
                let page = match place {
                    Place::Host => host.next(),
                    Place::Own => own.next(),
                    Place::Peer => peer.next(),
                };
                (*key, *place, page.flatten().map(Page::from))
            })
            .collect();

        let (blocks, states) = (behind.attention.len(), behind.states.len());
        let mut usable = got[..blocks]
            .iter()
            .take_while(|(.., page)| page.is_some())
            .count();
        let whole = got[blocks..blocks + states]
            .iter()
            .all(|(.., page)| page.is_some());
        if states > 0 && (usable < blocks || !whole) {
            usable = 0;
        }
        let pages =
            |range: std::ops::Range<usize>| got[range].iter().filter_map(|(.., page)| page.clone());
        if usable > 0 {
            prefix.attention.extend(pages(0..usable));
            prefix.states = pages(blocks..blocks + states).collect();
            let host = got[..usable]
                .iter()
                .filter(|(_, at, _)| *at == Place::Host)
                .count();
            prefix.host = host;
            prefix.external = usable - host;
        }
        let arrived: Vec<(Key, Page)> = got
            .iter()
            .filter(|(_, place, _)| *place != Place::Host)
            .filter_map(|(key, _, page)| Some((*key, page.clone()?)))
            .collect();
        if let Some(host) = &self.parts.host {
            for (key, page) in arrived.iter().rev() {
                if let Err(error) = host.put(*key, page) {
                    outln!("ERROR vllm.offloading: host tier: {error}");
                }
            }
        }
        let used: Vec<(Key, Page)> = got[..usable]
            .iter()
            .chain(&got[blocks..blocks + if usable > 0 { states } else { 0 }])
            .filter_map(|(key, _, page)| Some((*key, page.clone()?)))
            .collect();
        self.keep(&used, false);
        meters.loaded((used.len() * page_bytes) as u64, began.elapsed());
    }

    fn out_of_host(&self, keys: &[Key]) -> Vec<Option<Vec<u8>>> {
        let Some(host) = &self.parts.host else {
            return Vec::new();
        };
        let mut pages: Vec<_> = keys
            .iter()
            .map(|key| host.get(key).ok().flatten())
            .collect();
        if let Some(Some(first)) = pages.first_mut()
            && self.parts.around.faults.tell(Fault::CorruptHostBlock)
        {
            first[0] ^= 1;
        }
        pages
    }

    async fn out_of_peer(&self, keys: &[Key], source: Option<&Source>) -> Vec<Option<Vec<u8>>> {
        let (Some(target), Some(source)) = (&self.parts.target, source) else {
            return Vec::new();
        };
        if keys.is_empty() {
            return Vec::new();
        }
        let pages = match target.fetch(&source.endpoint, keys).await {
            Fetched::All(pages) => all_or_none(Some(pages), keys.len()),
            Fetched::Partial(pages) => pages,
            Fetched::Failed(_) => all_or_none(None, keys.len()),
        };
        let meters = &self.parts.around.meters;
        let arrived = pages.iter().flatten().count();
        if arrived < keys.len() {
            meters.job_failed(true);
        }
        let bytes = arrived * self.parts.page_bytes;
        meters.read_from_kvcr(bytes as u64);
        pages
    }
}

fn all_or_none(pages: Option<Vec<Vec<u8>>>, count: usize) -> Vec<Option<Vec<u8>>> {
    match pages {
        Some(pages) => pages.into_iter().map(Some).collect(),
        None => vec![None; count],
    }
}

fn flipped(page: &Page) -> Page {
    let mut bytes = page.to_vec();
    if let Some(byte) = bytes.first_mut() {
        *byte ^= 1;
    }
    Page::from(bytes)
}
