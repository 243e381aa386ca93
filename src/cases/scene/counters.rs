//! Counters of the workers and of the router, read once they stand still.

use std::time::Instant;

use super::{Counters, Deltas, Scene, file_name, millis};
use crate::failure::{Class, Failure};
use crate::stack::protocol::WorkerInfo;
use crate::telemetry::kvcr::PromptSource;
use crate::telemetry::settle::{How, Settling, settle, wait_for};
use crate::telemetry::{Delta, Scrape, kvcr, router};
use crate::verdict::Check;

/// What is made of transfers that did not end well.
#[derive(Clone, Copy)]
enum BadEndings<'a> {
    /// None but these may be, by scope and result.
    Fail(&'a [(&'a str, &'a str)]),
    Note,
}

impl Scene<'_> {
    /// Reads every worker's counters once they stand still, and keeps the raw pages under `name`.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn counters(&mut self, name: &str) -> Result<Counters, Failure> {
        let all: Vec<usize> = (0..self.workers()).collect();
        self.counters_of(&all, name).await
    }

    /// The same of some workers only: where others are dead.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn counters_of(
        &mut self,
        workers: &[usize],
        name: &str,
    ) -> Result<Counters, Failure> {
        let profile = &self.config.profile;
        let idle = Settling::idle(
            profile.kvcr.abandon_timeout_ms,
            profile.request.deadline_seconds,
        );
        self.settled(workers, name, idle).await
    }

    async fn settled(
        &mut self,
        workers: &[usize],
        name: &str,
        settling: Settling,
    ) -> Result<Counters, Failure> {
        let asked: Vec<WorkerInfo> = workers
            .iter()
            .map(|index| self.worker(*index))
            .collect::<Result<_, _>>()?;
        let urls: Vec<String> = asked
            .iter()
            .map(|worker| worker.metrics_url.clone())
            .collect();
        let began = Instant::now();
        let settled = settle(&self.scraper, &urls, settling).await;
        self.told.timings.settle += millis(began);
        let settled = settled?;
        let endless = match &settled.how {
            How::Idle => String::new(),
            How::Abandoned(busy) => busy.join(", "),
        };
        self.check(Check::new(
            format!("operations_end[{name}]"),
            Class::Product,
            endless.is_empty(),
            "nothing in flight for longer than the abandon timeout",
            if endless.is_empty() {
                "nothing"
            } else {
                &endless
            },
        ));
        for (worker, scrape) in asked.iter().zip(&settled.scrapes) {
            let file = format!("metrics/{}.prom", file_name(&worker.process, name));
            self.dir.text(&file, &scrape.raw)?;
        }
        let decode = self.decode_counters(name).await?;
        Ok(Counters {
            workers: asked,
            settled,
            decode,
        })
    }

    /// Those of who decodes, once nothing moves at who hands over.
    async fn decode_counters(&mut self, name: &str) -> Result<Option<Scrape>, Failure> {
        let Some(decode) = self.decode().cloned() else {
            return Ok(None);
        };
        let what = format!("an answer of the metrics page of {}", decode.process);
        let began = Instant::now();
        let url = &decode.metrics_url;
        let scraped = wait_for(&self.scraper, url, &what, self.patience(), |_| Ok(())).await;
        self.told.timings.settle += millis(began);
        let ((), scrape) = scraped?;
        let file = format!("metrics/{}.prom", file_name(&decode.process, name));
        self.dir.text(&file, &scrape.raw)?;
        Ok(Some(scrape))
    }

    /// What the counters did since `before`; leaves a check for every invariant that broke.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn since(&mut self, before: &Counters, name: &str) -> Result<Deltas, Failure> {
        let after = self.counters_of(&before.indices(), name).await?;
        Ok(self.between(before, &after, name, BadEndings::Fail(&[])))
    }

    /// The same where a source is asked for what it does not hold: that this failed is no fault, and
    /// how often it may is the story's to say. Anything else must have ended well.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn since_refused(
        &mut self,
        before: &Counters,
        name: &str,
    ) -> Result<Deltas, Failure> {
        let after = self.counters_of(&before.indices(), name).await?;
        let endings = BadEndings::Fail(&kvcr::NOTHING_HELD);
        Ok(self.between(before, &after, name, endings))
    }

    /// The same, where transfers may end badly, because somebody was killed: each bad ending is a
    /// note.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn since_a_kill(&mut self, before: &Counters, name: &str) -> Result<Deltas, Failure> {
        let after = self.counters_of(&before.indices(), name).await?;
        Ok(self.between(before, &after, name, BadEndings::Note))
    }

    /// The same, but the counters must also have stood still for longer than a transfer may take
    /// to be given up: for the claim that nothing failed, not even late.
    ///
    /// # Errors
    /// Inconclusive, if they do not settle.
    pub async fn outlived(&mut self, before: &Counters, name: &str) -> Result<Deltas, Failure> {
        let profile = &self.config.profile;
        let outliving = Settling::outliving(
            profile.kvcr.abandon_timeout_ms,
            profile.request.deadline_seconds,
        );
        let after = self.settled(&before.indices(), name, outliving).await?;
        Ok(self.between(before, &after, name, BadEndings::Fail(&[])))
    }

    fn between(
        &mut self,
        before: &Counters,
        after: &Counters,
        name: &str,
        endings: BadEndings<'_>,
    ) -> Deltas {
        let pages = before.settled.scrapes.iter().zip(&after.settled.scrapes);
        let deltas: Vec<Delta> = pages
            .map(|(before, after)| Delta::between(&before.page, &after.page))
            .collect();
        for (worker, delta) in before.workers.iter().zip(&deltas) {
            for broken in kvcr::invariants(delta, self.blocks.page_bytes) {
                let mut check = Check::from(&broken.failure);
                check.name = format!("{}[{}.{name}]", broken.name, worker.process);
                self.check(check);
            }
            match (endings, kvcr::failures(delta)) {
                (BadEndings::Note, Ok(bad)) => {
                    let list: Vec<String> = bad.iter().map(ToString::to_string).collect();
                    if !list.is_empty() {
                        let list = list.join(", ");
                        self.note(format!("{}, {name}: {list}", worker.process));
                    }
                }
                (BadEndings::Note, Err(_)) => {
                    self.no_bad_endings(&worker.process, name, delta, &[]);
                }
                (BadEndings::Fail(expected), _) => {
                    self.no_bad_endings(&worker.process, name, delta, expected);
                }
            }
        }
        if let (Some(before), Some(after)) = (&before.decode, &after.decode) {
            let delta = Delta::between(&before.page, &after.page);
            let computed = kvcr::prompt_tokens(&delta, PromptSource::LocalCompute);
            let check = format!("prompts_are_handed_over[{name}]");
            self.check(Check::counter_exactly(check, Class::Product, 0, &computed));
        }
        let indices = before.workers.iter().map(|worker| worker.index);
        Deltas(indices.zip(deltas).collect())
    }

    /// No transfer ended other than well, but for those `expected`, by scope and result.
    fn no_bad_endings(
        &mut self,
        process: &str,
        name: &str,
        delta: &Delta,
        expected: &[(&str, &str)],
    ) {
        let check_name = format!("no_failed_transfer[{process}.{name}]");
        let failures = kvcr::failures(delta).map(|mut bad| {
            bad.retain(|ending| !expected.contains(&(&ending.scope, &ending.result)));
            bad
        });
        let check = match failures {
            Ok(bad) if bad.is_empty() => {
                Check::new(check_name, Class::Product, true, "none failed", "none")
            }
            Ok(bad) => {
                let list: Vec<String> = bad.iter().map(ToString::to_string).collect();
                Check::new(
                    check_name,
                    Class::Product,
                    false,
                    "none failed",
                    list.join(", "),
                )
            }
            Err(reading) => Check::new(
                check_name,
                Class::Inconclusive,
                false,
                "a readable count",
                reading,
            ),
        };
        self.check(check);
    }

    /// Bytes of one page: as configured, and else as worker `index` itself counts what it stored.
    ///
    /// # Errors
    /// Inconclusive, if its counters do not say.
    pub(super) async fn page_bytes(&mut self, index: usize) -> Result<u64, Failure> {
        if let Some(bytes) = self.blocks.page_bytes {
            return Ok(bytes);
        }
        let counted = self.counters_of(&[index], "page_size").await?;
        let page = counted.settled.scrapes.first().map(|scrape| &scrape.page);
        page.and_then(kvcr::stored_page_bytes).ok_or_else(|| {
            Failure::inconclusive("the size of a page is not known")
                .expected("it is configured, or follows from what KVCR's own tier has stored")
                .found("neither")
                .hint("say it: --page-bytes")
        })
    }

    /// Stored blocks that the router has taken notice of so far, once no more of them arrive: one
    /// that reads a worker's whole state anew counts each of its blocks again, hundreds of them.
    ///
    /// # Errors
    /// Inconclusive, if its page cannot be read, or its counter does not come to rest in the time
    /// a request may take.
    pub async fn router_events(&mut self) -> Result<u64, Failure> {
        self.router_at_rest("a router whose count of stored blocks stands still", Ok)
            .await
    }

    /// Waits until the router has taken notice of stored blocks since `before`, and no more of
    /// them arrive: only then can it name their holder in a hint. How many it counts is a note, not
    /// a condition: 7 were seen for 8 stored blocks, all of which it then hinted.
    ///
    /// # Errors
    /// Inconclusive, if it takes notice of none in the time a request may take.
    pub async fn router_knows(&mut self, before: u64, blocks: u64) -> Result<(), Failure> {
        let known = self
            .router_at_rest("the router's notice of stored blocks", |now| {
                match now.checked_sub(before) {
                    Some(new @ 1..) => Ok(new),
                    _ => Err(format!("0 of {blocks} blocks")),
                }
            })
            .await?;
        if known != blocks {
            self.note(format!(
                "the router counts {known} stored blocks where {blocks} were stored"
            ));
        }
        Ok(())
    }

    /// Waits until two counts of stored blocks, one after the other, are the same, and `condition`
    /// takes it.
    async fn router_at_rest(
        &mut self,
        what: &str,
        condition: impl Fn(u64) -> Result<u64, String>,
    ) -> Result<u64, Failure> {
        let url = format!("{}/metrics", self.stack.plan.frontend_url);
        let deadline = self.patience();
        let began = Instant::now();
        let mut last = None;
        let counted = wait_for(&self.scraper, &url, what, deadline, |page| {
            let now = router::stored_blocks(page).unwrap_or(0);
            match last.replace(now) {
                Some(before) if before == now => condition(now),
                _ => Err(format!("{now} blocks, and more of them arrive")),
            }
        })
        .await;
        self.told.timings.settle += millis(began);
        counted.map(|(count, _)| count)
    }
}
