//! One pool of a service, and its Guard: hands the pool to a worker, watches the worker, serves
//! the pool at the worker's endpoint when it dies, and hands it back to a replacement.

use std::io;
use std::net::SocketAddrV4;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::time::ClockId;
use tokio::io::BufReader;
use tokio::net::{TcpListener, UnixStream};
use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

use super::hear;
use super::holder::Holder;
use super::log::Log;
use crate::sim::entry::nanos;
use crate::sim::fault::{Fault, Faults, Part};
use crate::sim::kvcr::Uncounted;
use crate::sim::kvcr::claim::{ClaimRequest, Grant, Say};
use crate::sim::kvcr::pool::{self, Pool};
use crate::sim::kvcr::source::Source;
use crate::sim::settings::Latency;

const LOGGER: &str = "kvcr.guard";
/// How long a claim waits for a promotion that is under way.
const TRANSITION: Duration = Duration::from_secs(30);
/// Between two looks at something that changes soon.
const MOMENT: Duration = Duration::from_millis(2);
/// How long a dead worker's endpoint may still be taken.
const ENDPOINT: Duration = Duration::from_secs(2);
/// How much later a late promotion is.
const LATE: Duration = Duration::from_secs(2);
/// How long a Guard that should not takes silence for life.
const IMPATIENT: Duration = Duration::from_secs(1);
/// How long the last words of a dead worker are waited for; they are there already.
const LAST_WORDS: Duration = Duration::from_millis(50);

/// A Guard that failed, and its service with it.
#[derive(Debug)]
pub(super) struct Broken {
    /// Which.
    pub(super) guard: usize,
    /// Why.
    pub(super) why: io::Error,
}

/// A pool with its Guard.
pub(super) struct Guard {
    index: usize,
    dir: PathBuf,
    /// Bytes that the pool may have.
    room: u64,
    faults: Arc<Faults>,
    latency: Latency,
    log: Log,
    /// Locked for as long as the pool changes hands.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    seat: Seat,
    /// Where the pool's worker and Guard answer; the first claim says.
    control: Option<String>,
    /// Slots and bytes of a page; the first claim says.
    shape: Option<(usize, usize)>,
    /// There is no journal to recover from.
    unrecoverable: bool,
    /// Its transfer agent, once there is one.
    agent: Option<String>,
}

/// Who has the pool.
#[derive(Default)]
enum Seat {
    #[default]
    Nobody,
    Worker(Arc<Holder>),
    Guard(Source),
}

impl Guard {
    pub(super) fn new(
        index: usize,
        dir: PathBuf,
        room: u64,
        faults: Arc<Faults>,
        latency: Latency,
        log: Log,
    ) -> Self {
        Self {
            index,
            dir,
            room,
            faults,
            latency,
            log,
            state: Mutex::default(),
        }
    }

    /// Where it answers, once it was claimed.
    pub(super) async fn control(&self) -> Option<String> {
        self.state.lock().await.control.clone()
    }

    /// Why whoever answers on `control`, where nobody can, does not get the pool.
    pub(super) async fn refuse(&self, control: &str) -> String {
        let index = self.index;
        let Ok(state) = timeout(TRANSITION, self.state.lock()).await else {
            return format!("KVCR Guard {index} is busy");
        };
        match (&state.seat, &state.control) {
            (Seat::Worker(worker), _) if worker.lives() => {
                format!("KVCR Guard {index} is held by another worker")
            }
            (Seat::Worker(_), _) => format!("KVCR Guard {index} is busy"),
            (_, Some(own)) => {
                format!("KVCR Guard {index} answers on {own} and cannot be moved to {control}")
            }
            (_, None) => match TcpListener::bind(control).await {
                Err(error) => {
                    format!("KVCR Guard {index} control listener {control} is unavailable: {error}")
                }
                Ok(_) => "pool layout must match the number of pools in the Guard".to_owned(),
            },
        }
    }

    /// Gives the pool to `holder`; the error is the refusal.
    pub(super) async fn claim(
        &self,
        request: &ClaimRequest,
        holder: &Arc<Holder>,
    ) -> Result<Grant, String> {
        let index = self.index;
        let deadline = Instant::now() + TRANSITION;
        let anybody = self.faults.on(Fault::ClaimGranted);
        let mut state = loop {
            let state = timeout(TRANSITION, self.state.lock())
                .await
                .map_err(|_| format!("KVCR Guard {index} is busy"))?;
            match &state.seat {
                Seat::Worker(_) if anybody => break state,
                Seat::Worker(other) if other.lives() => {
                    return Err(format!("KVCR Guard {index} is held by another worker"));
                }
                // Dead, and the promotion not yet begun.
                Seat::Worker(_) if Instant::now() < deadline => {}
                Seat::Worker(_) => return Err(format!("KVCR Guard {index} is busy")),
                Seat::Nobody | Seat::Guard(_) => break state,
            }
            drop(state);
            tokio::time::sleep(MOMENT).await;
        };
        let shape = self.fits(&state, request)?;
        let replacement = state.control.is_some();
        if replacement && self.faults.tell(Fault::ClaimRefused) {
            return Err(format!("KVCR Guard {index} is held by another worker"));
        }
        if let Seat::Guard(source) = std::mem::take(&mut state.seat) {
            source.stop().await;
            if let Some(agent) = state.agent.take() {
                self.progress("cleanup", &agent);
            }
            // Whoever may still hold the endpoint, the worker that is about to listen there must
            // not find it taken.
            let free = bind(&request.control).await;
            free.map_err(|error| {
                format!(
                    "KVCR Guard {index} control listener {} is unavailable: {error}",
                    request.control
                )
            })?;
        }
        if replacement {
            self.spoil(shape).map_err(|error| error.to_string())?;
        }
        if self.faults.tell(Fault::JournalOverflow) {
            state.unrecoverable = true;
            let text = "KVCR pool recovery disabled; claimable but cold if this primary dies: \
                        recovery journal is full";
            self.log.warning(LOGGER, text);
        }
        if state.agent.is_none() {
            state.agent = Some(self.set_up());
        }
        state.seat = Seat::Worker(Arc::clone(holder));
        state.control = Some(request.control.clone());
        state.shape = Some(shape);
        let text = format!(
            "KVCR_EVENT primary_attached guard={index} pool=pool_{index} control={}",
            request.control
        );
        self.log.debug(LOGGER, &text);
        Ok(Grant::Granted {
            pool: self.dir.clone(),
            slots: shape.0,
        })
    }

    /// Slots and bytes of a page for `request`, or why it cannot have the pool.
    fn fits(&self, state: &State, request: &ClaimRequest) -> Result<(usize, usize), String> {
        let index = self.index;
        if request.control.parse::<SocketAddrV4>().is_err() {
            return Err(format!("{} is not a literal IPv4 address", request.control));
        }
        match &state.control {
            Some(own) if *own != request.control && !self.faults.on(Fault::ClaimGranted) => {
                return Err(format!(
                    "KVCR Guard {index} answers on {own} and cannot be moved to {}",
                    request.control
                ));
            }
            _ => {}
        }
        let room = usize::try_from(self.room).unwrap_or(usize::MAX);
        let most = room.checked_div(request.page_bytes).unwrap_or(0);
        let slots = match request.slots {
            0 => most,
            wanted => wanted.min(most),
        };
        let shape = (slots, request.page_bytes);
        if slots == 0 || state.shape.is_some_and(|own| own != shape) {
            return Err("KVCR pool was claimed with another tier configuration".to_owned());
        }
        Ok(shape)
    }

    /// What a pool that is handed back lies about.
    fn spoil(&self, (slots, page_bytes): (usize, usize)) -> io::Result<()> {
        if self.faults.tell(Fault::ClaimCold) {
            pool::forget(&self.dir)?;
        }
        if self.faults.tell(Fault::ClaimStale) {
            let pool = Pool::in_file(&self.dir, slots, page_bytes)?;
            let keys = pool.keys();
            let mut pages = Vec::new();
            for key in &keys {
                pages.extend(pool.get(key)?);
            }
            if !pages.is_empty() {
                pages.rotate_left(1);
            }
            for (key, page) in keys.into_iter().zip(&pages) {
                pool.fill(key, page)?;
            }
        }
        Ok(())
    }

    /// Watches `holder`, which speaks on `stream`, until it is done with the pool.
    ///
    /// # Errors
    /// The Guard could not take over.
    pub(super) async fn watch(
        &self,
        mut stream: BufReader<UnixStream>,
        holder: &Arc<Holder>,
        heartbeat: Option<Duration>,
    ) -> Result<(), Broken> {
        let mut heard = Instant::now();
        let mut listening = true;
        let heartbeat = if self.faults.on(Fault::TakesLiving) {
            Some(IMPATIENT)
        } else {
            heartbeat.filter(|_| !self.faults.on(Fault::HeartbeatIgnored))
        };
        loop {
            let missed = async {
                match heartbeat {
                    Some(limit) => tokio::time::sleep_until(heard + limit).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                said = hear(&mut stream), if listening => match said {
                    Some(Say::Release) => {
                        self.state.lock().await.seat = Seat::Nobody;
                        return Ok(());
                    }
                    Some(_) => heard = Instant::now(),
                    // It hung up without a word: it dies, or will.
                    None => listening = false,
                },
                died = holder.died() => {
                    let seen = Instant::now();
                    died.map_err(|why| self.broken(why))?;
                    if listening && released(&mut stream).await {
                        self.state.lock().await.seat = Seat::Nobody;
                        return Ok(());
                    }
                    self.stage("death_observed");
                    return self.promote(seen).await;
                }
                () = missed => {
                    if let Err(error) = holder.fence() {
                        let index = self.index;
                        let text = format!(
                            "KVCR Guard {index} cannot fence its primary, waiting for pidfd: {error}"
                        );
                        self.log.warning(LOGGER, &text);
                        heard = Instant::now();
                        continue;
                    }
                    self.promote(Instant::now()).await?;
                    let text = format!(
                        "KVCR Guard {} promoted after heartbeat timeout", self.index
                    );
                    self.log.warning(LOGGER, &text);
                    return Ok(());
                }
            }
        }
    }

    /// Takes over from a worker that was `seen` dead.
    async fn promote(&self, seen: Instant) -> Result<(), Broken> {
        let mut state = self.state.lock().await;
        state.seat = Seat::Nobody;
        if self.faults.tell(Fault::PromotionNever) {
            return Ok(());
        }
        let promoted = self.serve(&mut state, seen).await;
        promoted.map_err(|why| self.broken(why))
    }

    async fn serve(&self, state: &mut State, seen: Instant) -> io::Result<()> {
        let (Some(control), Some((slots, page_bytes))) = (state.control.clone(), state.shape)
        else {
            return Err(io::Error::other("promoted without a claim"));
        };
        let cold = self.faults.tell(Fault::PromotionCold) || state.unrecoverable;
        if cold {
            state.unrecoverable = false;
            pool::forget(&self.dir)?;
            let text = "KVCR pool has no recovered state to promote";
            self.log.warning(LOGGER, text);
        }
        let recovering = Instant::now();
        let pool = Arc::new(Pool::in_file(&self.dir, slots, page_bytes)?);
        let recovered = pool.len();
        let recovery = recovering.elapsed();
        self.stage("records_recovered");

        let setting_up = Instant::now();
        if self.faults.tell(Fault::GuardDies) {
            return Err(io::Error::other("NIXL_ERR_BACKEND"));
        }
        if self.faults.tell(Fault::PromotionLate) {
            tokio::time::sleep(LATE).await;
        }
        tokio::time::sleep(Duration::from_micros(self.latency.promotion_us)).await;
        let agent = state.agent.get_or_insert_with(|| self.set_up()).clone();
        let setup = setting_up.elapsed();
        self.stage("records_adopted");
        for stage in ["backend initialization", "agent metadata capture", "ready"] {
            self.progress(stage, &agent);
        }

        let starting = Instant::now();
        let listener = bind(&control).await?;
        let source = Source::start(
            listener,
            pool,
            Arc::clone(&self.faults),
            Arc::new(Uncounted),
            self.latency,
            Part::Service,
        );
        state.seat = Seat::Guard(source);
        let start = starting.elapsed();
        self.stage("serving");

        let index = self.index;
        let text = format!(
            "KVCR_EVENT guard_promoted guard={index} pool=pool_{index} \
             recovered_blocks={recovered} agent={agent} control={control} \
             recovery_ms={:.3} setup_ms={:.3} start_ms={:.3} promotion_ms={:.3}",
            millis(recovery),
            millis(setup),
            millis(start),
            millis(seen.elapsed()),
        );
        self.log.info(LOGGER, &text);
        if self.faults.tell(Fault::PromotionTwice) {
            self.log.info(LOGGER, &text);
        }
        Ok(())
    }

    /// Makes the transfer agent that will serve the pool, and says its name.
    fn set_up(&self) -> String {
        let agent = format!("KVCR-Guard-{}", uuid::Uuid::new_v4());
        self.stage("core_init_start");
        self.stage("core_init_done");
        self.progress("NIXL agent initialization", &agent);
        let now = jiff::Timestamp::now().strftime("%F %T").to_string();
        let text = format!("{now} NIXL INFO    _api.py:281 Initialized NIXL agent: {agent}");
        self.log.foreign(&text);
        self.progress("memory registration", &agent);
        agent
    }

    fn progress(&self, stage: &str, agent: &str) {
        let text = format!(
            "KVCR_EVENT progress_startup_stage stage={stage} agent={agent} \
             tid={} monotonic_ns={} thread_cpu_ns={}",
            rustix::thread::gettid().as_raw_nonzero(),
            nanos(ClockId::Monotonic),
            nanos(ClockId::ThreadCPUTime),
        );
        self.log.debug("kvcr.progress", &text);
    }

    fn stage(&self, stage: &str) {
        let text = format!(
            "KVCR_EVENT guard_promotion_stage stage={stage} guard={index} pool=pool_{index} \
             tid={} monotonic_ns={} thread_cpu_ns={}",
            rustix::thread::gettid().as_raw_nonzero(),
            nanos(ClockId::Monotonic),
            nanos(ClockId::ThreadCPUTime),
            index = self.index,
        );
        self.log.debug(LOGGER, &text);
    }

    fn broken(&self, why: io::Error) -> Broken {
        Broken {
            guard: self.index,
            why,
        }
    }
}

/// Whether a worker that is dead released its pool before.
async fn released(stream: &mut BufReader<UnixStream>) -> bool {
    let heard = async {
        while let Some(said) = hear(stream).await {
            if said == Say::Release {
                return true;
            }
        }
        false
    };
    timeout(LAST_WORDS, heard).await.unwrap_or(false)
}

/// Listens where the worker did. One that was killed a moment ago may not have let go yet.
async fn bind(control: &str) -> io::Result<TcpListener> {
    let deadline = Instant::now() + ENDPOINT;
    loop {
        match TcpListener::bind(control).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < deadline => {
                tokio::time::sleep(MOMENT).await;
            }
            other => return other,
        }
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
