//! Our own client, in a process of its own, as the others are.

use std::time::Duration;

use kvcr_phase1::client::stream::load::{self, Shape};
use kvcr_phase1::client::stream::{Ask, Outcome};
use kvcr_phase1::client::{Completion, Input};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::Problem;
use crate::outputs::{Reported, Which};
use crate::server::{MODEL, TOKENS};

/// What a client reports of a load.
#[derive(Debug, Default, Deserialize, Serialize)]
pub(crate) struct Load {
    /// Those that came to their end.
    pub(crate) streams: Vec<Reported>,
    /// Seconds of user and system time.
    pub(crate) cpu_s: f64,
}

/// Sends `count` requests at once, and prints a [`Load`].
pub(crate) fn run(url: &str, count: usize) -> Result<(), Problem> {
    let completion = Completion {
        model: MODEL.to_owned(),
        prompt: Input::Ids((0..16).collect()),
        max_tokens: u32::try_from(TOKENS)?,
        ignore_eos: true,
        pin: None,
        cache_salt: None,
    };
    let asks = (0..count).map(|n| Ask::plain_completion(&completion, &format!("stream{n}")));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let load = load::run(url, Duration::from_secs(120), asks.collect(), Shape::Burst);
    let sent = runtime
        .block_on(load)
        .map_err(|failure| failure.to_string())?;
    let complete = sent
        .iter()
        .map(|one| &one.streamed)
        .filter(|streamed| streamed.outcome == Outcome::Complete);
    let streams = complete.filter_map(|streamed| {
        let text = &streamed.tokens.first()?.text;
        Some(Reported {
            which: Which::of_text(text)?,
            ttft_ms: streamed.ttft_ns()? as f64 / 1e6,
            itls_ms: streamed.itls_ns().map(|ns| ns as f64 / 1e6).collect(),
        })
    });
    let streams = streams.collect();
    let spent = clock_gettime(ClockId::ProcessCPUTime);
    let cpu_s = spent.tv_sec as f64 + spent.tv_nsec as f64 / 1e9;
    println!("{}", serde_json::to_string(&Load { streams, cpu_s })?);
    Ok(())
}
