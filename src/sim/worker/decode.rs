//! The second half of an answer: tokens, one after the other, from what is held; and the pages
//! that go from a prefill engine to a decode engine in between.

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::death;
use super::engine::{Engine, Parts, Prefilled, lock};
use super::meters::Ended;
use super::own::Page;
use crate::sim::fault::Fault;
use crate::sim::model::{Key, Next};
use crate::sim::wire::{Generate, Handover, Reply};

/// Prompts whose pages wait for a decode engine; the oldest goes first.
const HANDOVERS: usize = 1024;

impl Engine {
    /// Generates, and stores what was computed in KVCR when the answer is complete.
    pub(super) async fn decode(
        &self,
        request: &Generate,
        prefilled: Prefilled,
        max_tokens: u32,
        replies: &mpsc::Sender<Reply>,
        began: Instant,
        ended: &mut Ended,
    ) -> Option<()> {
        let Parts {
            block_tokens,
            shape,
            around,
            ..
        } = &self.parts;
        let Prefilled {
            mut held,
            mut computed,
            again,
            ..
        } = prefilled;
        let mut sequence = request.tokens.clone();
        let mut tail = sequence.len() / block_tokens * block_tokens;
        let start = Instant::now();
        let step = Duration::from_micros(around.latency.decode_token_us);
        // Asked once a request: each asking looks at the control file, and tokens are many.
        let near_ties = around.faults.on(Fault::NearTies);
        for at in 0..max_tokens {
            // Against the clock, so that what one timer is late the next one is early.
            tokio::time::sleep_until(start + step * (at + 1)).await;
            if at == max_tokens / 2 {
                death::while_generating(&around.faults).await;
            }
            let mut next = held.next(&sequence[tail..], shape.vocabulary);
            if at == 0 {
                ended.to_first = began.elapsed();
                around.meters.prompt(ended);
                if again && around.faults.tell(Fault::ReferenceWavers) {
                    std::mem::swap(&mut next.token, &mut next.runner_up);
                }
            }
            if near_ties {
                next.runner_up_logprob = next.logprob - 1e-4;
            }
            ended.generated += 1;
            replies.send(reply(next)).await.ok()?;
            sequence.push(next.token);
            // The last token is never fed to the model: it completes no block.
            if at + 1 < max_tokens && sequence.len() - tail == *block_tokens {
                let pages = held.compute(&sequence[tail..]);
                tail = sequence.len();
                let hashes = self.hashes(&sequence, request.cache_salt.as_deref());
                if let (Some(block), Some(page)) = (hashes.last(), pages.into_iter().next()) {
                    let key = Key::attention(*block);
                    let new = (key, Page::from(page));
                    // A hybrid model's stays on the device: no state stands behind it.
                    let offloaded = self.parts.shape.state_groups == 0;
                    self.keep(std::slice::from_ref(&new), offloaded);
                    if offloaded {
                        computed.push(new);
                    }
                }
            }
        }
        match (&self.parts.own, &self.parts.target) {
            (Some(own), _) => own.fill(computed),
            // A tier without any room refuses every store.
            (None, Some(_)) if !computed.is_empty() => around.meters.job_failed(false),
            _ => {}
        }
        Some(())
    }

    pub(super) fn keep_for_decode(&self, request_id: &str, pages: Vec<Page>) {
        let mut handovers = lock(&self.handovers);
        if handovers.len() >= HANDOVERS {
            handovers.pop_front();
        }
        handovers.push_back((request_id.to_owned(), pages));
    }

    /// Gets the pages of a prompt that another engine prefilled.
    pub(super) async fn handed_over(
        &self,
        request: &Generate,
        handover: &Handover,
        ended: &mut Ended,
    ) -> Result<Prefilled, String> {
        let url = format!(
            "http://{}/handover/{}",
            handover.address, handover.request_id
        );
        let failed = |error: &dyn std::fmt::Display| format!("NIXL transfer failed: {error}");
        let response = self.http.get(url).send().await.map_err(|e| failed(&e))?;
        let response = response.error_for_status().map_err(|e| failed(&e))?;
        let bytes = response.bytes().await.map_err(|e| failed(&e))?;
        let faults = &self.parts.around.faults;
        if faults.tell(Fault::HandoverFails) {
            return Err(failed(&"remote memory is not registered"));
        }
        let mut bytes = bytes.to_vec();
        if let Some(last) = bytes.last_mut()
            && faults.tell(Fault::HandoverCorrupts)
        {
            *last ^= 1;
        }
        let pages: Vec<Page> = bytes
            .chunks_exact(self.parts.page_bytes)
            .map(Page::from)
            .collect();
        let hashes = self.hashes(&request.tokens, request.cache_salt.as_deref());
        let blocks = hashes.len();
        let states = self.parts.shape.state_groups as usize;
        let whole = blocks + if blocks > 0 { states } else { 0 };
        if handover.blocks != blocks as u64 || pages.len() != whole {
            return Err(failed(&format_args!(
                "{} pages instead of {whole}",
                pages.len()
            )));
        }
        tokio::time::sleep(self.parts.around.latency.transfer(blocks as u64)).await;
        let mut held = self.nothing_held();
        for page in &pages[..blocks] {
            held.take_attention(page);
        }
        for (group, page) in pages[blocks..].iter().enumerate() {
            held.take_state(group, page);
        }
        let keys = hashes.iter().map(|block| Key::attention(*block));
        let known: Vec<(Key, Page)> = keys.zip(pages.iter().cloned()).collect();
        let device = {
            let device = lock(&self.device);
            known
                .iter()
                .take_while(|(key, _)| device.contains(key))
                .count()
        };
        self.keep(&known, false);
        ended.device = (device * self.parts.block_tokens) as u64;
        ended.external = ended.prompt - ended.device;
        let again = false;
        Ok(Prefilled {
            held,
            pages,
            computed: Vec::new(),
            again,
        })
    }
}

fn reply(next: Next) -> Reply {
    Reply::Token {
        id: next.token,
        logprob: next.logprob,
        runner_up: next.runner_up,
        runner_up_logprob: next.runner_up_logprob,
    }
}
