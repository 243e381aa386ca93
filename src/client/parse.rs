//! A response body becomes an observation.

use serde_json::Value;

use super::Observation;
use super::failure::{RequestFailureKind, excerpt};
use super::transport::Reply;

/// Reads a `/v1/completions` response. The label is the caller's name for the request.
pub(super) fn observation(reply: &Reply, label: &str) -> Result<Observation, RequestFailureKind> {
    let raw = reply.json()?;
    let missing = |pointer: &'static str| RequestFailureKind::MissingField {
        pointer,
        found: raw
            .pointer(pointer)
            .map_or_else(|| excerpt(&reply.body), Value::to_string),
    };
    // Dynamo may fail after it has committed to 200.
    if raw.get("error").is_some_and(|error| !error.is_null())
        || (raw.get("choices").is_none() && raw.get("message").is_some())
    {
        return Err(RequestFailureKind::Http {
            status: reply.status,
            body: excerpt(&reply.body),
        });
    }

    let number = |pointer: &'static str| raw.pointer(pointer).and_then(unsigned);
    let text = raw.pointer("/choices/0/text").and_then(Value::as_str);
    let prompt_tokens = number("/usage/prompt_tokens");
    let completion_tokens = number("/usage/completion_tokens");
    let tokens = tokens(&raw);

    // First of all, since an answer that is empty often lacks other things too. A token may have
    // no text of its own (a special token, half a character), so text alone decides nothing.
    let nothing = text.unwrap_or_default().is_empty() && tokens.is_empty();
    if completion_tokens == Some(0) || nothing {
        return Err(RequestFailureKind::EmptyCompletion {
            body: excerpt(&reply.body),
        });
    }

    Ok(Observation {
        label: label.to_owned(),
        status: reply.status,
        text: text.ok_or_else(|| missing("/choices/0/text"))?.to_owned(),
        finish_reason: raw
            .pointer("/choices/0/finish_reason")
            .and_then(Value::as_str)
            .ok_or_else(|| missing("/choices/0/finish_reason"))?
            .to_owned(),
        prompt_tokens: prompt_tokens.ok_or_else(|| missing("/usage/prompt_tokens"))?,
        completion_tokens: completion_tokens.ok_or_else(|| missing("/usage/completion_tokens"))?,
        cached_tokens: number("/usage/prompt_tokens_details/cached_tokens"),
        served_by: worker(&raw, "/nvext/worker_id/decode_worker_id", &missing)?,
        prefilled_by: worker(&raw, "/nvext/worker_id/prefill_worker_id", &missing)?,
        smallest_top2_gap: smallest_top2_gap(&raw, tokens.len()),
        tokens,
        wall_ms: reply.wall_ms,
        raw,
    })
}

/// An unsigned integer, exactly: as a number or, where a server protects it from readers that
/// know only floats, as a string. A float is refused: it has already lost digits of an id.
pub(crate) fn unsigned(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| value.as_str()?.parse().ok())
}

/// `None` where the field is absent or null; an error where it is there and not an id.
fn worker(
    raw: &Value,
    pointer: &'static str,
    missing: &impl Fn(&'static str) -> RequestFailureKind,
) -> Result<Option<u64>, RequestFailureKind> {
    match raw.pointer(pointer) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => unsigned(value).map(Some).ok_or_else(|| missing(pointer)),
    }
}

/// Token ids where the server gives them, else the token strings beside the log-probabilities.
fn tokens(raw: &Value) -> Vec<String> {
    if let Some(ids) = raw
        .pointer("/nvext/completion_token_ids")
        .and_then(Value::as_array)
    {
        return ids.iter().map(Value::to_string).collect();
    }
    let strings = raw
        .pointer("/choices/0/logprobs/tokens")
        .and_then(Value::as_array);
    strings
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .map(|token| token.strip_prefix("token_id:").unwrap_or(token).to_owned())
        .collect()
}

/// How near the closest runner-up was. A token whose two best candidates share one spelling has
/// only one entry; then nothing is said, since the gap may be the smallest of all.
fn smallest_top2_gap(raw: &Value, tokens: usize) -> Option<f64> {
    let tops = raw
        .pointer("/choices/0/logprobs/top_logprobs")?
        .as_array()?;
    if tops.is_empty() || tops.len() < tokens {
        return None;
    }
    let mut smallest = f64::INFINITY;
    for top in tops {
        let values = top.as_object()?.values();
        smallest = smallest.min(top2_gap(values.filter_map(Value::as_f64))?);
    }
    Some(smallest)
}

/// What lies between the best and the second best; `None` where there are not two.
pub(super) fn top2_gap(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(|a, b| b.total_cmp(a));
    match values[..] {
        [first, second, ..] => Some(first - second),
        _ => None,
    }
}
