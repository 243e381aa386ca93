//! KV events: what an engine's caches hold, told to whoever connects. A snapshot first, then
//! every change, in order.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::broadcast;

use super::meters::Meters;
use crate::sim::wire::{Cache, KvEvent};

/// Changes that a slow reader may lag behind before it has to connect again.
const BACKLOG: usize = 4096;

/// What is in the caches that routers know of.
#[derive(Clone, Debug)]
pub struct Events {
    shared: Arc<Mutex<State>>,
    meters: Meters,
}

#[derive(Debug)]
struct State {
    device: HashSet<u64>,
    kvcr: HashSet<u64>,
    changes: broadcast::Sender<Arc<str>>,
}

fn line(event: &KvEvent) -> Arc<str> {
    // Numbers and words only: there is nothing in an event that cannot be written.
    let mut text = serde_json::to_string(event).unwrap_or_default();
    text.push('\n');
    text.into()
}

impl Events {
    /// Nothing is held yet.
    pub fn new(meters: Meters) -> Self {
        Self {
            shared: Arc::new(Mutex::new(State {
                device: HashSet::new(),
                kvcr: HashSet::new(),
                changes: broadcast::channel(BACKLOG).0,
            })),
            meters,
        }
    }

    /// Says what changed. To be called under the lock of the cache that changed, so that changes
    /// are told in the order in which they happened.
    pub fn publish(&self, cache: Cache, stored: Vec<u64>, removed: Vec<u64>) {
        if stored.is_empty() && removed.is_empty() {
            return;
        }
        if cache == Cache::Device {
            self.meters.events("stored", stored.len() as u64);
            self.meters.events("removed", removed.len() as u64);
        } else {
            self.meters.events_of_kvcr(stored.len() as u64);
        }
        let mut state = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let held = match cache {
            Cache::Device => &mut state.device,
            Cache::Kvcr => &mut state.kvcr,
        };
        for block in &removed {
            held.remove(block);
        }
        held.extend(&stored);
        let event = KvEvent {
            cache,
            stored,
            removed,
        };
        // Nobody may be listening.
        drop(state.changes.send(line(&event)));
    }

    fn subscribe(&self) -> (Vec<Arc<str>>, broadcast::Receiver<Arc<str>>) {
        let state = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        let snapshot = [(Cache::Device, &state.device), (Cache::Kvcr, &state.kvcr)]
            .into_iter()
            .map(|(cache, held)| {
                line(&KvEvent {
                    cache,
                    stored: held.iter().copied().collect(),
                    removed: Vec::new(),
                })
            })
            .collect();
        (snapshot, state.changes.subscribe())
    }

    /// Serves whoever connects, until the task is dropped.
    pub async fn serve(self, listener: TcpListener) {
        loop {
            if let Ok((stream, _)) = listener.accept().await {
                let events = self.clone();
                tokio::spawn(async move {
                    // A reader that is gone is no error of ours.
                    drop(events.tell(stream).await);
                });
            }
        }
    }

    async fn tell(self, mut stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let (snapshot, mut changes) = self.subscribe();
        for line in snapshot {
            stream.write_all(line.as_bytes()).await?;
        }
        // A reader that lags is cut off: its next connection starts with the truth.
        while let Ok(line) = changes.recv().await {
            stream.write_all(line.as_bytes()).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, BufReader};

    use super::super::registry::tests::identity;
    use super::super::registry::{Present, Registry};
    use super::*;

    #[tokio::test]
    async fn a_snapshot_then_every_change() {
        let present = Present {
            tiers: true,
            kvcr: true,
            publisher: true,
        };
        let registry = Arc::new(Registry::new(&identity(), present));
        let events = Events::new(Meters::new(registry));
        events.publish(Cache::Device, vec![1, 2], vec![]);
        events.publish(Cache::Device, vec![3], vec![1]);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(events.clone().serve(listener));
        let stream = TcpStream::connect(address).await.unwrap();
        let mut lines = BufReader::new(stream).lines();
        let mut next = async || -> KvEvent {
            let line = lines.next_line().await.unwrap().unwrap();
            serde_json::from_str(&line).unwrap()
        };
        let mut device = next().await;
        device.stored.sort_unstable();
        assert_eq!((device.cache, device.stored), (Cache::Device, vec![2, 3]));
        assert_eq!(next().await.stored, Vec::<u64>::new());
        events.publish(Cache::Kvcr, vec![7], vec![]);
        let change = next().await;
        assert_eq!((change.cache, change.stored), (Cache::Kvcr, vec![7]));
    }
}
