//! A service in this process; claimants speak for a child process, so that there is one to kill.

use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, Ordering};

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::*;
use crate::sim::kvcr::Uncounted;
use crate::sim::kvcr::claim::{ClaimError, ClaimRequest, claim};
use crate::sim::kvcr::pool::Pool;
use crate::sim::kvcr::target::{Fetched, Target};
use crate::sim::model::Key;

const PAGE: usize = 128;
const DIGEST: &str = "ab";

fn key(block: u64) -> Key {
    Key::attention(block)
}

fn page(block: u64) -> Vec<u8> {
    vec![block as u8 + 1; PAGE]
}

fn latency() -> Latency {
    Latency {
        promotion_us: 1_000,
        ..Latency::default()
    }
}

/// An endpoint that nobody uses. Each has an address of its own: a connection that another test
/// makes from 127.0.0.1 could have been given the port in the meantime.
async fn endpoint() -> String {
    static NEXT: AtomicU8 = AtomicU8::new(2);
    let host = NEXT.fetch_add(1, Ordering::Relaxed);
    let listener = tokio::net::TcpListener::bind(format!("127.0.0.{host}:0"));
    listener.await.unwrap().local_addr().unwrap().to_string()
}

fn request(control: &str) -> ClaimRequest {
    ClaimRequest {
        digest: DIGEST.into(),
        control: control.into(),
        slots: 8,
        page_bytes: PAGE,
    }
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn log(&self) -> Log {
        let lines = self.clone();
        Log::new(Level::Debug, move |line| {
            lines.0.lock().unwrap().push(line.to_owned());
        })
    }

    fn count(&self, part: &str) -> usize {
        let lines = self.0.lock().unwrap();
        lines.iter().filter(|line| line.contains(part)).count()
    }

    async fn wait_for(&self, part: &str) {
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.count(part) == 0 {
            assert!(
                Instant::now() < deadline,
                "{part} not in {:?}",
                self.0.lock().unwrap()
            );
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// Guards without a socket.
struct Bench {
    service: Arc<Service>,
    lines: Lines,
    control: String,
    _folder: tempfile::TempDir,
}

/// A worker that holds the pool: a process, and the connection that speaks for it.
struct Worker {
    child: Child,
    stream: BufReader<UnixStream>,
    watched: tokio::task::JoinHandle<Result<(), Broken>>,
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Worker {
    /// Kills it, as a worker dies: its connection ends too.
    async fn die(mut self) -> Result<(), Broken> {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.stream.shutdown().await.unwrap();
        (&mut self.watched).await.unwrap()
    }

    async fn say(&mut self, what: &Say) {
        self.stream.write_all(&line(what).unwrap()).await.unwrap();
    }
}

impl Bench {
    async fn new(fault: &str) -> Self {
        Self::with(fault, None).await
    }

    async fn with(fault: &str, heartbeat: Option<Duration>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let switches = fault.split_whitespace().map(|one| one.parse().unwrap());
        let faults = Arc::new(Faults::new("service0", switches.collect(), None));
        let lines = Lines::default();
        let guard = Guard::new(
            0,
            folder.path().join("pool_0"),
            1 << 20,
            Arc::clone(&faults),
            latency(),
            lines.log(),
        );
        let service = Service {
            guards: vec![guard],
            digest: DIGEST.into(),
            heartbeat,
            faults,
        };
        Self {
            service: Arc::new(service),
            lines,
            control: endpoint().await,
            _folder: folder,
        }
    }

    async fn ask(&self, request: ClaimRequest) -> (Grant, Worker) {
        let child = sleeper();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let service = Arc::clone(&self.service);
        let watched = tokio::spawn(attend(service, theirs, Some(pid)));
        let stream = BufReader::new(ours);
        let mut worker = Worker {
            child,
            stream,
            watched,
        };
        worker.say(&Say::Claim(request)).await;
        let mut text = String::new();
        worker.stream.read_line(&mut text).await.unwrap();
        (serde_json::from_str(&text).unwrap(), worker)
    }

    /// A worker with the pool.
    async fn worker(&self) -> (Pool, Worker) {
        let (grant, worker) = self.ask(request(&self.control)).await;
        let Grant::Granted { pool, slots } = grant else {
            panic!("{grant:?}");
        };
        (Pool::in_file(&pool, slots, PAGE).unwrap(), worker)
    }

    /// A worker that stored three blocks.
    async fn busy_worker(&self) -> Worker {
        let (pool, worker) = self.worker().await;
        for block in 0..3 {
            pool.fill(key(block), &page(block)).unwrap();
        }
        worker
    }

    async fn refusal(&self, request: ClaimRequest) -> String {
        match self.ask(request).await.0 {
            Grant::Refused(why) => why,
            granted => panic!("{granted:?}"),
        }
    }

    async fn fetch(&self) -> Fetched {
        let faults = Arc::new(Faults::new("worker1", Vec::new(), None));
        let second = Duration::from_secs(1);
        let target = Target::new(faults, Arc::new(Uncounted), latency(), second, second * 2);
        target.fetch(&self.control, &[key(0), key(1), key(2)]).await
    }
}

fn right() -> Fetched {
    Fetched::All((0..3).map(page).collect())
}

const PROMOTED: &str = "INFO:kvcr.guard:KVCR_EVENT guard_promoted guard=0 pool=pool_0 ";

#[tokio::test]
async fn a_guard_serves_for_its_dead_worker_and_hands_back_warm() {
    let bench = Bench::new("").await;
    for round in 1..=2 {
        bench.busy_worker().await.die().await.unwrap();
        assert_eq!(bench.fetch().await, right());
        assert_eq!(bench.lines.count(PROMOTED), round);
        assert_eq!(bench.lines.count("recovered_blocks=3 "), round);
        for stage in [
            "death_observed",
            "records_recovered",
            "records_adopted",
            "serving",
        ] {
            let stage = format!("DEBUG:kvcr.guard:KVCR_EVENT guard_promotion_stage stage={stage} ");
            assert_eq!(bench.lines.count(&stage), round);
        }
    }
    let (pool, _worker) = bench.worker().await;
    assert_eq!(pool.len(), 3);
    assert_eq!(pool.get(&key(1)).unwrap(), Some(page(1)));
    // The endpoint is the replacement's now.
    tokio::net::TcpListener::bind(&bench.control).await.unwrap();
    let attached = format!(
        "KVCR_EVENT primary_attached guard=0 pool=pool_0 control={}",
        bench.control
    );
    assert_eq!(bench.lines.count(&attached), 3);
    let lines = bench.lines.0.lock().unwrap();
    let promoted = lines.iter().find(|line| line.contains(PROMOTED)).unwrap();
    for part in ["agent=KVCR-Guard-", "promotion_ms="] {
        assert!(promoted.contains(part), "{promoted}");
    }
}

#[tokio::test]
async fn a_release_promotes_nobody() {
    let bench = Bench::new("").await;
    let mut worker = bench.busy_worker().await;
    worker.say(&Say::Beat).await;
    worker.say(&Say::Release).await;
    worker.die().await.unwrap();
    assert_eq!(bench.lines.count("guard_promoted"), 0);
    let (pool, _worker) = bench.worker().await;
    assert_eq!(pool.len(), 3);
}

#[tokio::test]
async fn who_may_not_claim_is_told_why() {
    let bench = Bench::new("").await;
    let other = ClaimRequest {
        digest: "cd".into(),
        ..request(&bench.control)
    };
    let why = bench.refusal(other).await;
    assert_eq!(why, "KVCR compatibility digest does not match the service");
    let why = bench.refusal(request("0:0")).await;
    assert!(why.ends_with("is not a literal IPv4 address"), "{why}");

    let worker = bench.busy_worker().await;
    let why = bench.refusal(request(&bench.control)).await;
    assert_eq!(why, "KVCR Guard 0 is held by another worker");
    worker.die().await.unwrap();
    let why = bench.refusal(request("127.0.0.1:1")).await;
    assert!(why.contains("and cannot be moved to 127.0.0.1:1"), "{why}");
    let layout = ClaimRequest {
        page_bytes: PAGE * 2,
        ..request(&bench.control)
    };
    let why = bench.refusal(layout).await;
    assert_eq!(why, "KVCR pool was claimed with another tier configuration");
}

#[tokio::test]
async fn a_worker_without_a_heartbeat_is_killed_and_replaced_by_its_guard() {
    let bench = Bench::with("", Some(Duration::from_millis(100))).await;
    let mut worker = bench.busy_worker().await;
    (&mut worker.watched).await.unwrap().unwrap();
    assert!(!worker.child.wait().unwrap().success());
    assert_eq!(bench.fetch().await, right());
    let text = "WARNING:kvcr.guard:KVCR Guard 0 promoted after heartbeat timeout";
    assert_eq!(bench.lines.count(text), 1);
}

#[tokio::test]
async fn a_guard_lies_about_its_promotion() {
    let bench = Bench::new("promotion_never").await;
    bench.busy_worker().await.die().await.unwrap();
    assert!(matches!(bench.fetch().await, Fetched::Failed(_)));
    assert_eq!(bench.lines.count("guard_promoted"), 0);

    let bench = Bench::new("promotion_twice").await;
    bench.busy_worker().await.die().await.unwrap();
    assert_eq!(bench.lines.count(PROMOTED), 2);

    for fault in ["promotion_cold", "journal_overflow"] {
        let bench = Bench::new(fault).await;
        bench.busy_worker().await.die().await.unwrap();
        assert!(matches!(bench.fetch().await, Fetched::Failed(_)));
        assert_eq!(bench.lines.count("recovered_blocks=0 "), 1);
        let cold = "WARNING:kvcr.guard:KVCR pool has no recovered state to promote";
        assert_eq!(bench.lines.count(cold), 1);
        let disabled = bench.lines.count("KVCR pool recovery disabled");
        assert_eq!(disabled, usize::from(fault == "journal_overflow"));
    }
}

#[tokio::test]
async fn a_guard_lies_about_its_blocks() {
    let bench = Bench::new("guard_corrupts").await;
    bench.busy_worker().await.die().await.unwrap();
    let Fetched::All(pages) = bench.fetch().await else {
        panic!("not all");
    };
    assert_ne!(pages[0], page(0));
    assert_eq!(pages[1], page(1));
}

#[tokio::test]
async fn a_late_guard_serves_in_the_end() {
    let bench = Bench::new("promotion_late").await;
    let worker = bench.busy_worker().await;
    let death = Instant::now();
    let late = worker.die();
    tokio::pin!(late);
    tokio::select! {
        _ = &mut late => panic!("at once"),
        () = bench.lines.wait_for("stage=records_recovered") => {}
    }
    assert!(matches!(bench.fetch().await, Fetched::Failed(_)));
    late.await.unwrap();
    assert!(death.elapsed() >= Duration::from_secs(2));
    assert_eq!(bench.fetch().await, right());
}

#[tokio::test]
async fn a_replacement_is_lied_to() {
    let replaced = async |fault: &str| {
        let bench = Bench::new(fault).await;
        bench.busy_worker().await.die().await.unwrap();
        bench
    };
    let bench = replaced("claim_refused").await;
    let why = bench.refusal(request(&bench.control)).await;
    assert_eq!(why, "KVCR Guard 0 is held by another worker");

    let bench = replaced("claim_cold").await;
    assert_eq!(bench.fetch().await, right());
    assert!(bench.worker().await.0.is_empty());

    let bench = replaced("claim_stale").await;
    assert_eq!(bench.fetch().await, right());
    let (pool, _worker) = bench.worker().await;
    assert_eq!(pool.len(), 3);
    for block in 0..3 {
        let there = pool.get(&key(block)).unwrap();
        assert_eq!(there, Some(page((block + 1) % 3)));
    }

    let bench = Bench::new("claim_digest#1").await;
    let why = bench.refusal(request(&bench.control)).await;
    assert_eq!(why, "KVCR compatibility digest does not match the service");
    bench.worker().await;
}

/// The whole service, over its socket.
struct Running {
    folder: tempfile::TempDir,
    options: Options,
    lines: Lines,
    stop: Option<oneshot::Sender<()>>,
    ended: tokio::task::JoinHandle<io::Result<()>>,
}

impl Running {
    async fn new(fault: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let text = format!(
            "kvcr_service --socket-path {path}/s --pool-dir {path} --guard-count 2 \
             --pool-sizes-gb 0.001 --compatibility-digest {DIGEST}"
        );
        let options = Options::try_parse_from(text.split_whitespace()).unwrap();
        let lines = Lines::default();
        let (stop, stopped) = oneshot::channel::<()>();
        let (given, log, fault) = (options.clone(), lines.log(), fault.to_owned());
        let ended = tokio::spawn(async move {
            let switches = fault.split_whitespace().map(|one| one.parse().unwrap());
            let faults = Arc::new(Faults::new("service0", switches.collect(), None));
            let stop = async {
                let _ = stopped.await;
            };
            serve(&given, &faults, latency(), &log, stop).await
        });
        let running = Self {
            folder,
            options,
            lines,
            stop: Some(stop),
            ended,
        };
        running.lines.wait_for("KVCR service ready: socket=").await;
        running
    }

    fn socket(&self) -> &Path {
        &self.options.socket_path
    }
}

#[tokio::test]
async fn a_service_lends_its_pools_and_leaves_nothing() {
    let mut running = Running::new("").await;
    let mode = std::fs::metadata(running.socket()).unwrap().permissions();
    assert_eq!(mode.mode() & 0o777, 0o600);
    let (one, other) = (endpoint().await, endpoint().await);
    let first = claim(running.socket(), request(&one)).await.unwrap();
    first.pool.fill(key(1), &page(1)).unwrap();
    let second = claim(running.socket(), request(&other)).await.unwrap();
    assert!(second.pool.is_empty());
    let refused = claim(running.socket(), request(&one)).await.unwrap_err();
    assert!(matches!(refused, ClaimError::Refused(_)), "{refused}");
    drop(first);
    // The release is heard at some time after it was said.
    let again = loop {
        match claim(running.socket(), request(&one)).await {
            Ok(claim) => break claim,
            Err(error) => assert!(error.to_string().contains("is held by another worker")),
        }
    };
    assert_eq!(again.pool.get(&key(1)).unwrap(), Some(page(1)));
    drop((again, second));

    let log = running.lines.log();
    let faults = Arc::new(Faults::new("service1", Vec::new(), None));
    let stop = std::future::pending();
    let rival = serve(&running.options, &faults, latency(), &log, stop).await;
    let error = rival.unwrap_err().to_string();
    assert!(
        error.contains("another KVCR service is listening on"),
        "{error}"
    );

    running.stop.take().unwrap().send(()).unwrap();
    (&mut running.ended).await.unwrap().unwrap();
    assert_eq!(std::fs::read_dir(running.folder.path()).unwrap().count(), 0);
    assert_eq!(running.lines.count("guard_promoted"), 0);
}

#[tokio::test]
async fn what_a_dead_service_left_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    drop(UnixListener::bind(&socket).unwrap());
    let old = OwnedDir::new(folder.path(), 0).unwrap();
    let live = OwnedDir::new(folder.path(), 1).unwrap();
    let dead = old.path.clone();
    // As a kill: the directory stays, the lock does not.
    let OwnedDir { _lock, .. } = &old;
    flock(_lock, FlockOperation::Unlock).unwrap();
    let lines = Lines::default();
    reclaim(folder.path(), &lines.log()).unwrap();
    remove_stale(&socket, &lines.log()).await.unwrap();
    assert!(!socket.exists() && !dead.exists() && live.path.exists());
    for text in [
        "WARNING:__main__:Removing stale KVCR service socket: ",
        "WARNING:__main__:Reclaimed orphaned KVCR pool from a dead instance: ",
        "INFO:__main__:Leaving KVCR pool still in use: ",
    ] {
        assert_eq!(lines.count(text), 1, "{text}");
    }
}

#[tokio::test]
async fn a_failed_guard_ends_the_service() {
    let bench = Bench::new("guard_dies").await;
    let mut child = sleeper();
    let pid = i32::try_from(child.id()).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut ours = BufReader::new(ours);
    let asked = line(&Say::Claim(request(&bench.control))).unwrap();
    ours.write_all(&asked).await.unwrap();
    let mut theirs = Some(theirs);
    let accept = || {
        let next = theirs.take();
        async move {
            match next {
                Some(stream) => Ok((stream, Some(pid))),
                None => std::future::pending().await,
            }
        }
    };
    let log = bench.lines.log();
    let served = supervise(&bench.service, accept, &log, std::future::pending());
    let killed = async {
        let mut text = String::new();
        ours.read_line(&mut text).await.unwrap();
        assert!(text.contains("granted"), "{text}");
        child.kill().unwrap();
        child.wait().unwrap();
        std::future::pending::<()>().await
    };
    tokio::select! {
        ended = served => assert_eq!(ended.unwrap_err().to_string(), "NIXL_ERR_BACKEND"),
        () = killed => {}
    }
    for text in [
        "CRITICAL:kvcr.guard:KVCR Guard 0 failed",
        "CRITICAL:__main__:KVCR pool 0 Guard failed",
    ] {
        assert_eq!(bench.lines.count(text), 1, "{text}");
    }
}

/// A process to kill.
fn sleeper() -> Child {
    let mut command = Command::new("sleep");
    command.arg("60").stdout(Stdio::null());
    command.spawn().unwrap()
}
