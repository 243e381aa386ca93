//! The KV geometry that the engines state themselves, against the one that is configured.
//!
//! An engine may choose other blocks than it was asked for: a hybrid model's are made so long that
//! an attention page is at least as large as a state page. What a case then counts would be wrong
//! to the block, and look like the product's fault. So everything that is stated is read once the
//! workers are ready, and a disagreement ends the bring-up. What is not stated says nothing.
//!
//! Stated are, by vLLM 0.32 and Dynamo 1.6.1:
//! - tokens of a block: `block_size` of `vllm:cache_config_info` on a worker's page, and
//!   `dynamo_frontend_model_kv_cache_block_size` on the front door's, which is the model card's;
//! - whether there are state groups: `mamba_cache_mode`, `none` without them;
//! - bytes of one layer's state page, where it is padded: `mamba_page_size_padded`;
//! - every group's block, where there are several groups: the log line `kv cache group sizes (…)`.

use std::path::Path;
use std::time::Duration;

use crate::failure::Failure;
use crate::geometry::Geometry;
use crate::stack::protocol::WorkerInfo;
use crate::telemetry::settle::wait_for;
use crate::telemetry::{Page, Scraper};

/// For one metrics page.
const LOOK_DEADLINE: Duration = Duration::from_secs(10);
/// How long a page that does not come is asked for: one that stays away states nothing, and is the
/// cases' to judge.
const PATIENCE: Duration = Duration::from_secs(3);

const INFO: &str = "vllm:cache_config_info";
const CARD: &str = "dynamo_frontend_model_kv_cache_block_size";
const GROUP_SIZES: &str = "kv cache group sizes (";

/// One thing that is stated.
#[derive(Clone, Debug, Eq, PartialEq)]
struct Statement {
    says: Says,
    /// `worker0: vllm:cache_config_info{block_size}`.
    place: String,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Says {
    /// Tokens of a block.
    Block(u64),
    /// Whether there are state groups.
    States(bool),
    /// How many state groups there are.
    StateGroups(u64),
    /// Bytes of one layer's part of a page.
    LayerPage(u64),
}

/// Reads what `workers` (their logs are in `logs`) and the front door state, and compares it with
/// `geometry`.
///
/// # Errors
/// Environment, if anything disagrees.
pub(super) async fn examine(
    geometry: Geometry,
    frontend: &str,
    workers: &[WorkerInfo],
    logs: &Path,
    say: &(dyn Fn(String) + Send + Sync),
) -> Result<(), Failure> {
    let scraper = Scraper::new(LOOK_DEADLINE)?;
    let front = format!("{}/metrics", frontend.trim_end_matches('/'));
    let card = page(&scraper, &front, say).await;
    for worker in workers {
        let info = page(&scraper, &worker.metrics_url, say).await;
        // A log that cannot be read states nothing.
        let log = std::fs::read(logs.join(format!("{}.log", worker.process)));
        let log = log.unwrap_or_default();
        let mut stated = on_page(&worker.process, &info);
        stated.extend(in_log(&worker.process, &String::from_utf8_lossy(&log)));
        stated.extend(on_card(&worker.served_model, &card));
        compare(&worker.process, geometry, &stated)?;
    }
    Ok(())
}

async fn page(scraper: &Scraper, url: &str, say: &(dyn Fn(String) + Send + Sync)) -> Page {
    match wait_for(scraper, url, "an answer of the page", PATIENCE, |_| Ok(())).await {
        Ok(((), scrape)) => scrape.page,
        Err(failure) => {
            say(format!("geometry: {url} is not compared: {failure}"));
            Page::parse("")
        }
    }
}

/// What a worker's own page states.
fn on_page(process: &str, page: &Page) -> Vec<Statement> {
    let mut stated = Vec::new();
    for (series, _) in page.named(INFO) {
        let mut state = |label: &str, says: Option<Says>| {
            let place = format!("{process}: {INFO}{{{label}}}");
            stated.extend(says.map(|says| Statement { says, place }));
        };
        // `None` where the engine has none.
        let number = |label| series.label(label)?.parse::<u64>().ok();
        state("block_size", number("block_size").map(Says::Block));
        let mode = series.label("mamba_cache_mode");
        state(
            "mamba_cache_mode",
            mode.map(|mode| Says::States(mode != "none")),
        );
        let padded = number("mamba_page_size_padded").filter(|bytes| *bytes > 0);
        state("mamba_page_size_padded", padded.map(Says::LayerPage));
    }
    stated
}

/// What the front door states of `model`.
fn on_card(model: &str, page: &Page) -> Option<Statement> {
    let block = page.read(CARD, &[("model", model)]).exact()?;
    Some(Statement {
        // 0 stands for a card without it.
        says: Some(block).filter(|block| *block > 0).map(Says::Block)?,
        place: format!("frontend: {CARD}{{model={model:?}}}"),
    })
}

/// What a worker's log states, where it has several groups. The last line counts: it is of the
/// engine that serves.
fn in_log(process: &str, log: &str) -> Vec<Statement> {
    let line = log
        .lines()
        .rev()
        .find_map(|line| line.split_once(GROUP_SIZES));
    let Some((sizes, _)) = line.and_then(|(_, rest)| rest.split_once(')')) else {
        return Vec::new();
    };
    let sizes: Vec<&str> = sizes.split(',').map(str::trim).collect();
    let sizes: Option<Vec<u64>> = sizes
        .iter()
        // A tuple of one ends with a comma.
        .filter(|size| !size.is_empty())
        .map(|size| size.parse().ok())
        .collect();
    let Some(sizes) = sizes.filter(|sizes| !sizes.is_empty()) else {
        return Vec::new();
    };
    let place = format!("{process}: its log, `{GROUP_SIZES}…)`");
    let groups = Says::StateGroups(sizes.len() as u64 - 1);
    std::iter::once(groups)
        .chain(sizes.into_iter().map(Says::Block))
        .map(|says| Statement {
            says,
            place: place.clone(),
        })
        .collect()
}

/// Everything of `stated` that is not as configured, in one failure.
fn compare(process: &str, geometry: Geometry, stated: &[Statement]) -> Result<(), Failure> {
    let mut wrong: Vec<(String, String, String)> = Vec::new();
    for Statement { says, place } in stated {
        if let Some((expected, found, hint)) = disagreement(geometry, *says)
            && !wrong.iter().any(|(known, ..)| *known == expected)
        {
            wrong.push((expected, format!("{found} ({place})"), hint));
        }
    }
    if wrong.is_empty() {
        return Ok(());
    }
    let all = |of: fn(&(String, String, String)) -> &String| {
        let texts: Vec<&str> = wrong.iter().map(|one| of(one).as_str()).collect();
        texts.join(", ")
    };
    Err(
        Failure::environment(format!("{process} has another KV geometry than configured"))
            .expected(all(|one| &one.0))
            .found(all(|one| &one.1))
            .hint(format!("if the engine is right: {}", all(|one| &one.2))),
    )
}

/// What was configured, what is stated instead, and the flag that would say the same.
fn disagreement(geometry: Geometry, says: Says) -> Option<(String, String, String)> {
    let groups = geometry.state_groups.map(u64::from);
    let (as_configured, expected, found, hint) = match says {
        Says::Block(tokens) => {
            let configured = u64::from(geometry.hit_block.get());
            (
                tokens == configured,
                format!("hit blocks of {configured} tokens"),
                format!("{tokens} tokens"),
                format!("--hit-block-tokens {tokens}"),
            )
        }
        Says::StateGroups(stated) => {
            let configured = groups?;
            (
                stated == configured,
                format!("{configured} state groups"),
                format!("{stated} state groups"),
                format!("--ssm-groups {stated}"),
            )
        }
        Says::States(stated) => {
            let configured = groups?;
            let (found, hint) = if stated {
                (
                    "at least one",
                    "the number of its state groups with --ssm-groups",
                )
            } else {
                ("none", "--ssm-groups 0")
            };
            (
                stated == (configured > 0),
                format!("{configured} state groups"),
                found.to_owned(),
                hint.to_owned(),
            )
        }
        Says::LayerPage(layer) => {
            let configured = geometry.page_bytes?;
            (
                configured % layer == 0,
                format!("pages of {configured} B"),
                format!("{layer} B for each layer of a group"),
                format!("--page-bytes of {layer} times the layers of a group"),
            )
        }
    };
    (!as_configured).then_some((expected, found, hint))
}

#[cfg(test)]
mod tests;
