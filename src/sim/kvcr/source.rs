//! Serves a pool to peers at a control endpoint.
//!
//! A peer that says who it is for the first time is set up, later ones are reused; each request
//! is one write of the pages that are held, in the order in which they were asked for.

use std::collections::HashMap;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;

use super::peer::{self, Answer, Ask, MOST_KEYS};
use super::pool::Pool;
use super::{Lies, Telemetry};
use crate::sim::fault::{Fault, Faults, Part};
use crate::sim::model::Key;
use crate::sim::settings::Latency;

/// A pool that is served. Stops when it is dropped.
#[derive(Debug)]
pub struct Source {
    task: JoinHandle<()>,
}

impl Source {
    /// Serves `pool` to whoever connects to `listener`; an engine's source, with an engine's
    /// faults. Needs a runtime.
    #[must_use]
    pub fn serve(
        listener: TcpListener,
        pool: Arc<Pool>,
        faults: Arc<Faults>,
        telemetry: Arc<dyn Telemetry>,
        latency: Latency,
    ) -> Self {
        Self::start(listener, pool, faults, telemetry, latency, Part::Engine)
    }

    /// The same for `part`, whose faults are told.
    pub(crate) fn start(
        listener: TcpListener,
        pool: Arc<Pool>,
        faults: Arc<Faults>,
        telemetry: Arc<dyn Telemetry>,
        latency: Latency,
        part: Part,
    ) -> Self {
        let shared = Arc::new(Shared {
            pool,
            faults,
            telemetry,
            latency,
            part,
            disabled: AtomicBool::new(false),
            peers: Mutex::default(),
        });
        Self {
            task: tokio::spawn(accept(listener, shared)),
        }
    }

    /// Stops, and returns when nobody listens any more: then the endpoint can be bound again.
    pub async fn stop(mut self) {
        self.task.abort();
        let _ = (&mut self.task).await;
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Shared {
    pool: Arc<Pool>,
    faults: Arc<Faults>,
    telemetry: Arc<dyn Telemetry>,
    latency: Latency,
    part: Part,
    /// Refuses everybody until it is made anew.
    disabled: AtomicBool,
    /// Open connections by the target's name.
    peers: Mutex<HashMap<String, usize>>,
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    // Connections end with the source: dropping the set aborts them.
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                if let Ok((stream, _)) = accepted {
                    connections.spawn(connection(stream, Arc::clone(&shared)));
                } else {
                    // Out of descriptors, most likely: nothing to gain by asking at once.
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn connection(mut stream: TcpStream, shared: Arc<Shared>) {
    let _ = stream.set_nodelay(true);
    // A peer that breaks off or talks nonsense is dropped; it will see that itself.
    if let Ok(Some(Ask::TargetMetadata { agent })) = peer::receive(&mut stream).await {
        let _connected = Connected::new(&shared, agent);
        let _ = shared.serve(&mut stream).await;
    }
}

/// Counts a peer as long as it is connected.
struct Connected<'a> {
    shared: &'a Shared,
    agent: String,
}

impl<'a> Connected<'a> {
    fn new(shared: &'a Shared, agent: String) -> Self {
        let telemetry = &shared.telemetry;
        telemetry.ended("control_target_metadata", "handled", Duration::ZERO);
        let mut peers = shared.peers.lock().unwrap_or_else(PoisonError::into_inner);
        let open = peers.entry(agent.clone()).or_default();
        *open += 1;
        let result = if *open == 1 { "connected" } else { "reused" };
        telemetry.ended("peer_setup", result, Duration::ZERO);
        telemetry.gauge("connected_remotes", peers.len() as i64);
        drop(peers);
        Self { shared, agent }
    }
}

impl Drop for Connected<'_> {
    fn drop(&mut self) {
        let peers = &self.shared.peers;
        let mut peers = peers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = peers.get_mut(&self.agent) {
            *open -= 1;
            if *open == 0 {
                peers.remove(&self.agent);
            }
        }
        let count = peers.len() as i64;
        self.shared.telemetry.gauge("connected_remotes", count);
    }
}

impl Shared {
    fn lies(&self) -> Lies<'_> {
        Lies {
            faults: &self.faults,
            part: self.part,
        }
    }

    async fn serve(&self, stream: &mut TcpStream) -> io::Result<()> {
        self.answer(stream, &Answer::TargetMetadataAck).await?;
        while let Some(ask) = peer::receive(stream).await? {
            let Ask::StartWrite { keys } = ask else {
                return Err(peer::bad("metadata twice".to_owned()));
            };
            if keys.len() > MOST_KEYS {
                return Err(peer::bad(format!("{} keys", keys.len())));
            }
            self.ended("control_start_write", "handled", Duration::ZERO);
            if self.lies().tell(Fault::TransferHangs) {
                // Until the target hangs up.
                let _ = peer::receive::<Ask>(stream).await;
                return Ok(());
            }
            match self.refusal() {
                Some(why) => {
                    self.ended("source_write", "failed", Duration::ZERO);
                    self.answer(stream, &Answer::WriteRefused { why }).await?;
                }
                None => self.write(stream, &keys).await?,
            }
        }
        Ok(())
    }

    /// Why nothing is written.
    fn refusal(&self) -> Option<String> {
        if self.lies().tell(Fault::SourceDisabled) && !self.disabled.swap(true, Ordering::Relaxed) {
            errln!(
                "ERROR kvcr.core: KVCR source progress stalled for 2372.0 ms (timeout: 1000 ms); \
                 new source writes disabled until restart"
            );
        }
        if self.disabled.load(Ordering::Relaxed) {
            return Some("source writes are disabled".to_owned());
        }
        let refused = self.lies().tell(Fault::WriteRefused);
        refused.then(|| "the target is not known".to_owned())
    }

    async fn write(&self, stream: &mut TcpStream, keys: &[Key]) -> io::Result<()> {
        let started = Instant::now();
        let lies = self.lies();
        self.ended("peer_setup", "reused", Duration::ZERO);
        let lacking = lies.tell(Fault::PartialTransfer);
        let mut pages = Vec::new();
        let mut held = Vec::with_capacity(keys.len());
        for (at, key) in keys.iter().enumerate() {
            let lacks = lacking && at >= keys.len() / 2;
            // A page that cannot be read is a page that is not held.
            let page = if lacks {
                None
            } else {
                self.pool.get(key).ok().flatten().or_else(|| {
                    let stale = lies.tell(Fault::StaleSource);
                    stale.then(|| vec![0; self.pool.page_bytes()])
                })
            };
            held.push(page.is_some());
            pages.extend(page);
        }
        let (blocks, page_bytes) = (pages.len() as u64, self.pool.page_bytes());
        if let Some(first) = pages.first_mut()
            && (lies.tell(Fault::CorruptTransfer) || lies.tell(Fault::GuardCorrupts))
            && let Some(byte) = first.first_mut()
        {
            *byte ^= 1;
        }
        if blocks > 0 && lies.tell(Fault::ShortTransfer) {
            for page in &mut pages[blocks as usize / 2..] {
                page.fill(0);
            }
        }
        let twice = blocks > 0 && lies.tell(Fault::DuplicatedTransfer);
        let copies = if twice { 2 } else { 1 };
        tokio::time::sleep(self.latency.transfer(blocks)).await;

        let head = Answer::Written {
            held,
            page_bytes,
            copies,
        };
        // Counted before the last byte is out: whoever has the pages may look at the counters.
        if blocks == 0 {
            // The engine's host tier is asked, and has them no more.
            self.ended("source_acquire", "pending", Duration::ZERO);
            self.ended("framework_pin_wait", "failed", started.elapsed());
            self.ended("source_write", "failed", started.elapsed());
        } else {
            self.count_write(blocks * copies as u64, started.elapsed());
        }
        self.answer(stream, &head).await?;
        for _ in 0..copies {
            for page in &pages {
                stream.write_all(page).await?;
            }
        }
        Ok(())
    }

    fn count_write(&self, blocks: u64, took: Duration) {
        for scope in [
            "transfer_submit",
            "transfer_post",
            "transfer",
            "source_write",
        ] {
            self.ended(scope, "success", took);
        }
        let page_bytes = self.pool.page_bytes() as u64;
        let mut bytes = blocks * page_bytes;
        if self.lies().tell(Fault::BytesMismatch) {
            bytes -= page_bytes;
        }
        self.telemetry.moved("source_write", blocks, Some(bytes));
    }

    async fn answer(&self, stream: &mut TcpStream, answer: &Answer) -> io::Result<()> {
        self.ended("control_enqueue", "success", Duration::ZERO);
        peer::send(stream, answer).await
    }

    fn ended(&self, scope: &str, result: &str, took: Duration) {
        self.telemetry.ended(scope, result, took);
    }
}
