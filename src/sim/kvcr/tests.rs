//! A source and a target in one process, over a real connection.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::pool::Pool;
use super::source::Source;
use super::target::{Fetched, Target, Why};
use super::testing::Counted;
use crate::sim::fault::{Faults, Part};
use crate::sim::model::Key;
use crate::sim::settings::Latency;

const PAGE: usize = 96;
const OPERATION: Duration = Duration::from_millis(150);
const ABANDON: Duration = Duration::from_millis(300);

fn key(block: u64) -> Key {
    Key::attention(block)
}

fn page(block: u64) -> Vec<u8> {
    vec![block as u8 + 1; PAGE]
}

fn faults(process: &str, fault: &str) -> Arc<Faults> {
    let switches = fault.split_whitespace().map(|one| one.parse().unwrap());
    Arc::new(Faults::new(process, switches.collect(), None))
}

/// A source with four blocks, and a target.
struct Pair {
    source: Option<Source>,
    target: Target,
    endpoint: String,
    at_source: Arc<Counted>,
    at_target: Arc<Counted>,
    keys: Vec<Key>,
}

impl Pair {
    async fn new(source_fault: &str, target_fault: &str) -> Self {
        Self::of(Part::Engine, source_fault, target_fault).await
    }

    async fn of(part: Part, source_fault: &str, target_fault: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = listener.local_addr().unwrap().to_string();
        let (at_source, at_target) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
        let target = Target::new(
            faults("worker1", target_fault),
            at_target.clone(),
            Latency::default(),
            OPERATION,
            ABANDON,
        );
        let mut pair = Self {
            source: None,
            target,
            endpoint,
            at_source,
            at_target,
            keys: (0..4).map(key).collect(),
        };
        pair.serve(listener, part, source_fault);
        pair
    }

    fn serve(&mut self, listener: TcpListener, part: Part, fault: &str) {
        let pool = Arc::new(Pool::in_memory(8, PAGE));
        for block in 0..4 {
            pool.fill(key(block), &page(block)).unwrap();
        }
        self.source = Some(Source::start(
            listener,
            pool,
            faults("worker0", fault),
            self.at_source.clone(),
            Latency::default(),
            part,
        ));
    }

    async fn fetch(&self) -> Fetched {
        self.target.fetch(&self.endpoint, &self.keys).await
    }

    fn delivered(&self) -> i64 {
        self.at_target.get("remote_deliver blocks")
    }

    fn written(&self) -> i64 {
        self.at_source.get("source_write blocks")
    }
}

fn right() -> Fetched {
    Fetched::All((0..4).map(page).collect())
}

#[tokio::test]
async fn a_transfer_is_counted_as_the_real_one() {
    let pair = Pair::new("", "").await;
    assert_eq!(pair.fetch().await, right());
    let source = [
        "connected_remotes 1",
        "control_enqueue success 2",
        "control_start_write handled 1",
        "control_target_metadata handled 1",
        "peer_setup connected 1",
        "peer_setup reused 1",
        "source_write blocks 4",
        "source_write bytes 384",
        "source_write success 1",
        "transfer success 1",
        "transfer_post success 1",
        "transfer_submit success 1",
    ];
    assert_eq!(pair.at_source.all(), source);
    let target = [
        "control_enqueue success 2",
        "control_target_metadata_ack handled 2",
        "hint_wait complete 1",
        "remote_deliver blocks 4",
        "remote_deliver success 1",
    ];
    assert_eq!(pair.at_target.all(), target);

    assert_eq!(pair.fetch().await, right());
    assert_eq!(pair.at_source.get("peer_setup connected"), 1);
    assert_eq!(pair.at_source.get("connected_remotes"), 1);
    assert_eq!((pair.written(), pair.delivered()), (8, 8));
}

#[tokio::test]
async fn some_and_none_are_said_as_they_are() {
    let mut pair = Pair::new("", "").await;
    pair.keys = vec![key(9), key(2)];
    let partial = Fetched::Partial(vec![None, Some(page(2))]);
    assert_eq!(pair.fetch().await, partial);
    assert_eq!(pair.at_target.get("remote_deliver partial"), 1);
    assert_eq!((pair.written(), pair.delivered()), (1, 1));
    pair.keys = vec![key(9)];
    assert!(matches!(
        pair.fetch().await,
        Fetched::Failed(Why::Refused(_))
    ));
    assert_eq!(pair.at_target.get("remote_deliver failed"), 1);
    assert_eq!(pair.at_source.get("source_write failed"), 1);
    pair.keys = Vec::new();
    assert_eq!(pair.fetch().await, Fetched::All(Vec::new()));
}

#[tokio::test]
async fn a_successor_at_the_same_endpoint_is_found() {
    let mut pair = Pair::new("", "").await;
    assert_eq!(pair.fetch().await, right());
    pair.source.take().unwrap().stop().await;
    assert!(matches!(
        pair.fetch().await,
        Fetched::Failed(Why::Unreachable(_))
    ));
    let listener = TcpListener::bind(&pair.endpoint).await.unwrap();
    pair.serve(listener, Part::Service, "");
    assert_eq!(pair.fetch().await, right());
}

#[tokio::test]
async fn nonsense_ends_its_connection_only() {
    let pair = Pair::new("", "").await;
    for nonsense in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        b"\xff\xff\xff\x7f",
        b"\x02\0\0\0{}",
    ] {
        let mut stream = TcpStream::connect(&pair.endpoint).await.unwrap();
        stream.write_all(nonsense).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        // Whether as an end or as a reset, it is over.
        let _ = stream.read_to_end(&mut rest).await;
        assert!(rest.is_empty());
    }
    assert_eq!(pair.fetch().await, right());
}

#[tokio::test]
async fn many_fetch_at_once() {
    let pair = Arc::new(Pair::new("", "").await);
    let mut all = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let pair = Arc::clone(&pair);
        all.spawn(async move { pair.fetch().await });
    }
    while let Some(fetched) = all.join_next().await {
        assert_eq!(fetched.unwrap(), right());
    }
    assert_eq!((pair.written(), pair.delivered()), (200, 200));
}

#[tokio::test]
async fn a_source_lies_about_its_pages() {
    let pair = Pair::new("corrupt_transfer#1", "").await;
    let Fetched::All(pages) = pair.fetch().await else {
        panic!("not all");
    };
    assert_ne!(pages[0], page(0));
    assert_eq!(pages[1..], [page(1), page(2), page(3)]);
    assert_eq!(pair.fetch().await, right());

    let pair = Pair::new("short_transfer", "").await;
    let zeros = vec![0; PAGE];
    let short = vec![page(0), page(1), zeros.clone(), zeros];
    assert_eq!(pair.fetch().await, Fetched::All(short));
    assert_eq!((pair.written(), pair.delivered()), (4, 4));

    let pair = Pair::of(Part::Service, "guard_corrupts corrupt_transfer", "").await;
    let Fetched::All(pages) = pair.fetch().await else {
        panic!("not all");
    };
    assert_ne!(pages[0], page(0));
}

#[tokio::test]
async fn a_source_lies_about_its_counters() {
    let pair = Pair::new("duplicated_transfer", "").await;
    assert_eq!(pair.fetch().await, right());
    assert_eq!(pair.fetch().await, right());
    assert_eq!((pair.written(), pair.delivered()), (16, 8));

    let pair = Pair::new("bytes_mismatch", "").await;
    assert_eq!(pair.fetch().await, right());
    let bytes = pair.at_source.get("source_write bytes");
    assert_eq!((pair.written(), bytes), (4, 3 * PAGE as i64));
}

#[tokio::test]
async fn a_source_refuses_once_or_for_good() {
    let pair = Pair::new("write_refused#1", "").await;
    assert!(matches!(
        pair.fetch().await,
        Fetched::Failed(Why::Refused(_))
    ));
    assert_eq!(pair.at_target.get("control_write_refused handled"), 1);
    assert_eq!(pair.at_target.get("remote_deliver failed"), 1);
    assert_eq!(pair.at_source.get("source_write failed"), 1);
    assert_eq!(pair.fetch().await, right());

    let pair = Pair::new("source_disabled#1", "").await;
    for _ in 0..3 {
        assert!(matches!(
            pair.fetch().await,
            Fetched::Failed(Why::Refused(_))
        ));
    }
}

#[tokio::test]
async fn a_source_lacks_half() {
    let pair = Pair::new("partial_transfer", "").await;
    let half = vec![Some(page(0)), Some(page(1)), None, None];
    assert_eq!(pair.fetch().await, Fetched::Partial(half));
    assert_eq!(pair.at_target.get("remote_deliver partial"), 1);
    assert_eq!((pair.written(), pair.delivered()), (2, 2));
}

#[tokio::test]
async fn a_target_lies_about_its_success() {
    let pair = Pair::new("", "partial_as_success").await;
    let half = vec![Some(page(0)), Some(page(1)), None, None];
    assert_eq!(pair.fetch().await, Fetched::Partial(half));
    assert_eq!(pair.at_target.get("remote_deliver success"), 1);
    assert_eq!(pair.at_target.get("remote_deliver partial"), 0);
    assert_eq!((pair.written(), pair.delivered()), (2, 4));

    let pair = Pair::new("", "success_without_transfer").await;
    assert!(matches!(pair.fetch().await, Fetched::Failed(_)));
    assert_eq!((pair.written(), pair.delivered()), (0, 4));
    assert_eq!(pair.at_target.get("remote_deliver success"), 1);
}

#[tokio::test]
async fn a_hanging_source_is_given_up() {
    let pair = Pair::new("transfer_hangs#1", "").await;
    assert_eq!(pair.fetch().await, Fetched::Failed(Why::TimedOut));
    assert_eq!(pair.at_target.get("remote_deliver failed"), 1);
    assert_eq!(pair.at_target.get("in_flight_ops"), 0);
    assert_eq!(pair.fetch().await, right());
}

#[tokio::test]
async fn a_late_operation_is_counted_when_it_is_abandoned() {
    let pair = Pair::new("", "late_settle").await;
    assert_eq!(pair.fetch().await, Fetched::Failed(Why::TimedOut));
    assert_eq!(pair.at_target.get("remote_deliver failed"), 0);
    assert_eq!(pair.at_target.get("in_flight_ops"), 1);
    let deadline = tokio::time::Instant::now() + ABANDON * 4;
    while pair.at_target.get("in_flight_ops") != 0 {
        assert!(tokio::time::Instant::now() < deadline, "it never settles");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(pair.at_target.get("remote_deliver failed"), 1);
}
