//! Scraping, and scraping until the counters stand still.
//!
//! A response arrives before the counters that it caused: stores run behind it, a source counts
//! after its target, a timed-out transfer counts only at its abandon deadline. Nothing here
//! waits for a moment; it waits for a state that can be seen, and says which one it was.

use std::future::Future;
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::{Page, Series, kvcr};
use crate::client::{RequestFailure, RequestFailureKind, Transport};
use crate::failure::Failure;
use crate::stack::wait::Patience;

/// One page as it was fetched.
#[derive(Clone, Debug)]
pub struct Scrape {
    /// Where from.
    pub url: String,
    /// Parsed.
    pub page: Page,
    /// As it came, for evidence.
    pub raw: String,
}

/// Fetches pages. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Scraper {
    transport: Transport,
}

impl Scraper {
    /// `deadline` holds for one page.
    pub fn new(deadline: Duration) -> Result<Self, Failure> {
        Ok(Self {
            transport: Transport::new(deadline)?,
        })
    }

    /// Fetches and parses one page. A page that was cut off is a failure: a series missing from
    /// it would look absent.
    pub async fn scrape(&self, url: &str) -> Result<Scrape, RequestFailure> {
        let reply = self.transport.get(url).await?;
        let failure = |kind| RequestFailure {
            request: url.to_owned(),
            wall_ms: reply.wall_ms,
            kind,
        };
        let raw = reply.text().map_err(failure)?.to_owned();
        let page = Page::parse(&raw);
        if !page.is_complete() {
            return Err(failure(RequestFailureKind::Truncated {
                received: raw.len(),
                why: "the last line of the page has no end".into(),
            }));
        }
        Ok(Scrape {
            url: url.to_owned(),
            page,
            raw,
        })
    }

    async fn scrape_all(&self, urls: &[String]) -> Result<Vec<Scrape>, RequestFailure> {
        let mut scrapes = Vec::with_capacity(urls.len());
        for url in urls {
            scrapes.push(self.scrape(url).await?);
        }
        Ok(scrapes)
    }
}

/// A transfer is given up after the abandon timeout by the clock of its worker, and on a busy machine
/// that worker may run late while its pages still come: so much more patience is no accusation yet.
pub const STALLED: u32 = 3;

/// How long to wait for what.
#[derive(Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Settling {
    /// Between two rounds of scrapes. Counters were seen to move up to 100 ms after a response.
    pub interval: Duration,
    /// Counters must have stood still for at least this long. Zero reads them as soon as
    /// nothing is going on; `abandon + interval` also outlives transfers that time out.
    pub quiet: Duration,
    /// KVCR's `abandon_timeout_ms`: after [`STALLED`] times this without a change nothing more is
    /// coming, even if a gauge still says that something is going on.
    pub abandon: Duration,
    /// The end of patience: counters that still move then do not settle.
    pub deadline: Duration,
}

impl Settling {
    /// For a worker with this `abandon_timeout_ms`: reads as soon as nothing is going on. Patience
    /// ends after the time in which a request may take, half a minute at most, beyond what a
    /// transfer may take on a busy machine.
    pub fn idle(abandon_timeout_ms: u64, request_deadline_seconds: u64) -> Self {
        let interval = Duration::from_millis(100);
        let abandon = Duration::from_millis(abandon_timeout_ms);
        Self {
            interval,
            quiet: Duration::ZERO,
            abandon,
            deadline: (STALLED + 1) * abandon
                + Duration::from_secs(request_deadline_seconds.min(30)),
        }
    }

    /// The same, but also outlives every transfer that may still time out: for claims that
    /// nothing failed.
    pub fn outliving(abandon_timeout_ms: u64, request_deadline_seconds: u64) -> Self {
        let idle = Self::idle(abandon_timeout_ms, request_deadline_seconds);
        Self {
            quiet: idle.abandon + idle.interval,
            ..idle
        }
    }
}

/// What state ended the wait.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum How {
    /// Nothing was going on and two rounds in a row agreed (for [`Settling::quiet`]).
    Idle,
    /// The abandon deadline passed since the last change, although this was still going on.
    Abandoned(Vec<String>),
}

/// Counters that stand still.
#[derive(Clone, Debug)]
pub struct Settled {
    /// The last page of each URL, in the order asked.
    pub scrapes: Vec<Scrape>,
    /// What ended the wait.
    pub how: How,
    /// Rounds of scrapes.
    pub rounds: u32,
    /// From the first scrape to the last.
    pub took: Duration,
    /// From the first scrape until the last counter moved; zero if none did.
    pub last_change: Duration,
}

/// The counters of one page that must stand still, with the bits of their values: NaN equals
/// itself here.
type Standing = Vec<(Series, Vec<u64>)>;

/// Decides from pages and times alone, so that it can be tested without either.
#[derive(Debug)]
struct Quiet {
    settling: Settling,
    seen: Option<Vec<Standing>>,
    last_change: Duration,
}

impl Quiet {
    fn new(settling: Settling) -> Self {
        Self {
            settling,
            seen: None,
            last_change: Duration::ZERO,
        }
    }

    /// One round of pages, `at` since the first. `Err` says what is not settled yet.
    fn round(&mut self, at: Duration, pages: &[&Page]) -> Result<How, String> {
        let now: Vec<_> = pages.iter().map(|page| watched(page)).collect();
        if self.seen.as_ref() != Some(&now) {
            if self.seen.replace(now).is_some() {
                self.last_change = at;
                return Err("counters moved".into());
            }
            return Err("scraped once".into());
        }
        let still = at.saturating_sub(self.last_change);
        let busy: Vec<_> = pages.iter().flat_map(|page| kvcr::busy(page)).collect();
        if busy.is_empty() && still >= self.settling.quiet {
            Ok(How::Idle)
        } else if !busy.is_empty()
            && still > (STALLED * self.settling.abandon).max(self.settling.quiet)
        {
            Ok(How::Abandoned(busy))
        } else {
            let going_on = if busy.is_empty() {
                "nothing".into()
            } else {
                busy.join(", ")
            };
            Err(format!(
                "{going_on} going on, counters still for {} ms",
                still.as_millis()
            ))
        }
    }
}

fn watched(page: &Page) -> Standing {
    page.samples()
        .filter(|(series, _)| {
            kvcr::SETTLING
                .iter()
                .any(|prefix| series.name().starts_with(prefix))
                && page.is_cumulative(series.name())
        })
        .map(|(series, values)| (series.clone(), values.iter().map(|v| v.to_bits()).collect()))
        .collect()
}

/// Scrapes `urls` together until all of them stand still at the same time: a transfer is over
/// when both its sides have counted it. Fails as inconclusive at the deadline, with the last
/// thing that was in the way.
pub async fn settle(
    scraper: &Scraper,
    urls: &[String],
    settling: Settling,
) -> Result<Settled, Failure> {
    settle_with(|| scraper.scrape_all(urls), settling).await
}

async fn settle_with<F, T>(fetch: F, settling: Settling) -> Result<Settled, Failure>
where
    F: Fn() -> T,
    T: Future<Output = Result<Vec<Scrape>, RequestFailure>>,
{
    let start = Instant::now();
    let mut quiet = Quiet::new(settling);
    // A stalled machine neither makes counters stand still nor uses patience up.
    let mut patience = Patience::new(settling.deadline);
    let mut rounds = 0;
    loop {
        let spent = patience.spent();
        // The time before the fetch: what is on the page was true at some moment after it.
        let at = patience.counted();
        rounds += 1;
        let status = match fetch().await {
            Ok(scrapes) => {
                let pages: Vec<_> = scrapes.iter().map(|s| &s.page).collect();
                match quiet.round(at, &pages) {
                    Ok(how) => {
                        return Ok(Settled {
                            scrapes,
                            how,
                            rounds,
                            took: start.elapsed(),
                            last_change: quiet.last_change,
                        });
                    }
                    Err(status) => status,
                }
            }
            Err(failure) => failure.to_string(),
        };
        if spent {
            return Err(Failure::inconclusive("the counters did not settle")
                .expected(format_args!(
                    "no change within {} s",
                    settling.deadline.as_secs()
                ))
                .found(status));
        }
        tokio::time::sleep(settling.interval).await;
    }
}

/// Scrapes `url` until `condition` gives a value; it says in words what is still missing. Fails
/// as inconclusive at the deadline with the last such words; `what` names the condition.
pub async fn wait_for<T>(
    scraper: &Scraper,
    url: &str,
    what: &str,
    deadline: Duration,
    mut condition: impl FnMut(&Page) -> Result<T, String>,
) -> Result<(T, Scrape), Failure> {
    const INTERVAL: Duration = Duration::from_millis(100);
    let mut patience = Patience::new(deadline);
    loop {
        let spent = patience.spent();
        let status = match scraper.scrape(url).await {
            Ok(scrape) => match condition(&scrape.page) {
                Ok(value) => return Ok((value, scrape)),
                Err(status) => status,
            },
            Err(failure) => failure.to_string(),
        };
        if spent {
            return Err(Failure::inconclusive(format!("{what} did not happen"))
                .expected(format_args!("within {} s", deadline.as_secs_f64()))
                .found(status));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;
    use crate::client::testing::{Script, serve};
    use crate::failure::Class;

    const SETTLING: Settling = Settling {
        interval: Duration::from_millis(1),
        quiet: Duration::ZERO,
        abandon: Duration::from_millis(10_000),
        deadline: Duration::from_millis(60_000),
    };

    fn page(blocks: u32, in_flight: u32) -> Page {
        Page::parse(&format!(
            "# TYPE vllm:kvcr_transfer_blocks_total counter\nvllm:kvcr_transfer_blocks_total {blocks}\n\
             # TYPE vllm:kvcr_state gauge\nvllm:kvcr_state{{resource=\"in_flight_ops\"}} {in_flight}\n\
             # TYPE vllm:e2e_seconds counter\nvllm:e2e_seconds 1\n"
        ))
    }

    fn rounds(settling: Settling, rounds: &[(u64, u32, u32)]) -> Vec<Result<How, String>> {
        let mut quiet = Quiet::new(settling);
        rounds
            .iter()
            .map(|(ms, blocks, busy)| {
                quiet.round(Duration::from_millis(*ms), &[&page(*blocks, *busy)])
            })
            .collect()
    }

    #[test]
    fn patience_covers_the_request_and_what_a_transfer_may_take_on_a_busy_machine() {
        let ms = Duration::from_millis;
        let idle = Settling::idle(5_000, 20);
        assert_eq!((idle.quiet, idle.abandon), (Duration::ZERO, ms(5_000)));
        assert_eq!(idle.deadline, ms(40_000));
        assert_eq!(Settling::idle(5_000, 600).deadline, ms(50_000));
        let outliving = Settling::outliving(5_000, 20);
        assert_eq!(outliving.quiet, ms(5_100));
        assert_eq!(outliving.deadline, idle.deadline);
    }

    #[test]
    fn two_equal_rounds_without_work_are_idle() {
        let seen = rounds(SETTLING, &[(0, 0, 1), (100, 8, 0), (200, 8, 0)]);
        assert_eq!(seen[0], Err("scraped once".into()));
        assert_eq!(seen[1], Err("counters moved".into()));
        assert_eq!(seen[2], Ok(How::Idle));
    }

    #[test]
    fn work_in_flight_holds_it_up_until_it_is_abandoned() {
        let seen = rounds(
            SETTLING,
            &[
                (0, 8, 1),
                (100, 8, 1),
                (9_000, 9, 1),
                (39_000, 9, 1),
                (39_001, 9, 1),
            ],
        );
        assert_eq!(
            seen[1],
            Err("in_flight_ops 1 going on, counters still for 100 ms".into())
        );
        assert!(
            seen[3].is_err(),
            "30 s since the last change are not more than three times 10 s"
        );
        assert_eq!(seen[4], Ok(How::Abandoned(vec!["in_flight_ops 1".into()])));
    }

    #[test]
    fn outliving_waits_although_nothing_is_going_on() {
        let settling = Settling {
            quiet: Duration::from_secs(10),
            ..SETTLING
        };
        let seen = rounds(settling, &[(0, 8, 0), (9_999, 8, 0), (10_000, 8, 0)]);
        assert!(seen[1].is_err());
        assert_eq!(seen[2], Ok(How::Idle));
    }

    #[test]
    fn both_sides_must_stand_still() {
        let mut quiet = Quiet::new(SETTLING);
        let (a, b, c) = (page(1, 0), page(2, 0), page(3, 0));
        assert!(quiet.round(Duration::ZERO, &[&a, &b]).is_err());
        assert!(quiet.round(Duration::from_millis(1), &[&a, &c]).is_err());
        assert_eq!(
            quiet.round(Duration::from_millis(2), &[&a, &c]),
            Ok(How::Idle)
        );
    }

    #[tokio::test]
    async fn the_loop_returns_the_last_pages_and_what_ended_it() {
        let pages = RefCell::new(vec![page(8, 0), page(8, 0), page(8, 1), page(0, 0)]);
        let fetch = || async {
            let page = pages
                .borrow_mut()
                .pop()
                .expect("settled before the pages ran out");
            Ok(vec![Scrape {
                url: "u".into(),
                page,
                raw: String::new(),
            }])
        };
        let settled = settle_with(fetch, SETTLING).await.unwrap();
        assert_eq!((settled.how, settled.rounds), (How::Idle, 3));
        assert!(settled.last_change > Duration::ZERO);
    }

    #[tokio::test]
    async fn every_page_that_was_asked_for_comes_in_order() {
        let url = serve(Script::from([
            ("/a", vec![(200, "a 1\n".into())]),
            ("/b", vec![(200, "b 2\n".into())]),
        ]))
        .await;
        let scraper = Scraper::new(Duration::from_secs(60)).unwrap();
        let urls = [format!("{url}/a"), format!("{url}/b")];
        let settled = settle(&scraper, &urls, SETTLING).await.unwrap();
        let raw: Vec<_> = settled.scrapes.iter().map(|s| s.raw.as_str()).collect();
        assert_eq!(raw, ["a 1\n", "b 2\n"]);
    }

    #[tokio::test]
    async fn pages_are_fetched_and_cut_ones_refused() {
        let url = serve(Script::from([
            ("/metrics", vec![(200, "a 1\n".into())]),
            ("/cut", vec![(200, "a 1\nb 12".into())]),
        ]))
        .await;
        let scraper = Scraper::new(Duration::from_secs(60)).unwrap();
        let scrape = scraper.scrape(&format!("{url}/metrics")).await.unwrap();
        assert_eq!(
            (scrape.raw.as_str(), scrape.page.samples().count()),
            ("a 1\n", 1)
        );
        let cut = scraper.scrape(&format!("{url}/cut")).await.unwrap_err();
        assert!(
            matches!(cut.kind, RequestFailureKind::Truncated { received: 8, .. }),
            "{cut}"
        );
        let gone = scraper.scrape(&format!("{url}/gone")).await.unwrap_err();
        assert!(
            matches!(gone.kind, RequestFailureKind::Http { status: 404, .. }),
            "{gone}"
        );
    }

    #[tokio::test]
    async fn a_condition_is_looked_at_until_it_holds_or_time_is_up() {
        let url = serve(Script::from([(
            "/metrics",
            vec![
                (503, String::new()),
                (200, "a 1\n".into()),
                (200, "a 2\n".into()),
            ],
        )]))
        .await;
        let scraper = Scraper::new(Duration::from_secs(60)).unwrap();
        let url = format!("{url}/metrics");
        let two = |page: &Page| match page.read("a", &[]).exact() {
            Some(2) => Ok("two"),
            other => Err(format!("a is {other:?}")),
        };
        let minute = Duration::from_secs(60);
        let (value, scrape) = wait_for(&scraper, &url, "a reached 2", minute, two)
            .await
            .unwrap();
        assert_eq!((value, scrape.raw.as_str()), ("two", "a 2\n"));
        let three = |page: &Page| match page.read("a", &[]).exact() {
            Some(3) => Ok(()),
            other => Err(format!("a is {other:?}")),
        };
        let failure = wait_for(&scraper, &url, "a reached 3", Duration::ZERO, three)
            .await
            .unwrap_err();
        assert_eq!(
            failure.to_string(),
            "Inconclusive: a reached 3 did not happen; expected within 0 s; found a is Some(2)"
        );
    }

    #[tokio::test]
    async fn the_deadline_names_the_last_thing_in_the_way() {
        let fetch = || async {
            Err(RequestFailure {
                request: "http://w/metrics".into(),
                wall_ms: 1.0,
                kind: RequestFailureKind::Connect("refused".into()),
            })
        };
        let settling = Settling {
            deadline: Duration::ZERO,
            ..SETTLING
        };
        let failure = settle_with(fetch, settling).await.unwrap_err();
        assert_eq!(failure.class, Class::Inconclusive);
        assert!(
            failure.to_string().contains("cannot connect: refused"),
            "{failure}"
        );
    }
}
