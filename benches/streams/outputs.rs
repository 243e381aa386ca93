//! What clients reported, read from what they write, and compared with what the server did. Pure.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// One stream, as it was served. Times are nanoseconds of `CLOCK_MONOTONIC`.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Stamps {
    /// It stands in the text of each of its tokens: `s17 `.
    pub(crate) number: usize,
    /// `x-request-id` of its request.
    pub(crate) request_id: Option<String>,
    /// When the kernel took the last byte of its request.
    pub(crate) received_ns: u64,
    /// Right before each token was handed to the socket.
    pub(crate) written_ns: Vec<u64>,
    /// How much later than planned that was.
    pub(crate) late_ns: Vec<u64>,
}

impl Stamps {
    fn ttft_ms(&self) -> Option<f64> {
        let first = self.written_ns.first()?;
        Some(first.saturating_sub(self.received_ns) as f64 / 1e6)
    }

    fn itls_ms(&self) -> impl Iterator<Item = f64> {
        let pairs = self.written_ns.windows(2);
        pairs.map(|pair| pair[1].saturating_sub(pair[0]) as f64 / 1e6)
    }
}

/// Which stream of the server something was.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) enum Which {
    /// By the number in its text.
    Number(usize),
    /// By the id of its request.
    Request(String),
}

impl Which {
    /// From a text of tokens.
    pub(crate) fn of_text(text: &str) -> Option<Self> {
        let first = text.split_whitespace().next()?;
        first.strip_prefix('s')?.parse().ok().map(Self::Number)
    }
}

/// What one stream was, as a client reports it; of one that came to its end.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct Reported {
    pub(crate) which: Which,
    /// Milliseconds.
    pub(crate) ttft_ms: f64,
    /// Milliseconds, in their order; empty where the client keeps none.
    pub(crate) itls_ms: Vec<f64>,
}

/// vLLM `bench serve --save-detailed`: one document with a list of everything, in seconds.
pub(crate) fn vllm(text: &str) -> Option<Vec<Reported>> {
    let document: Value = serde_json::from_str(text).ok()?;
    let lists = ["generated_texts", "ttfts", "itls"].map(|name| document.get(name)?.as_array());
    let [Some(texts), Some(ttfts), Some(itls)] = lists else {
        return None;
    };
    let each = texts.iter().zip(ttfts).zip(itls);
    // One that failed has an empty text.
    let streams = each.filter_map(|((text, ttft), itls)| {
        Some(Reported {
            which: Which::of_text(text.as_str()?)?,
            ttft_ms: ttft.as_f64()? * 1e3,
            itls_ms: numbers(itls)?.into_iter().map(|s| s * 1e3).collect(),
        })
    });
    Some(streams.collect())
}

/// aiperf `profile_export.jsonl`: a line for each request, in milliseconds.
pub(crate) fn aiperf(text: &str) -> Option<Vec<Reported>> {
    let lines = text.lines().map(serde_json::from_str::<Value>);
    let lines = lines.collect::<Result<Vec<_>, _>>().ok()?;
    let streams = lines.iter().filter_map(|line| {
        let metric = |name: &str| line.get("metrics")?.get(name)?.get("value");
        let id = line.pointer("/metadata/x_request_id")?.as_str()?;
        Some(Reported {
            which: Which::Request(id.to_owned()),
            ttft_ms: metric("time_to_first_token")?.as_f64()?,
            itls_ms: numbers(metric("inter_chunk_latency")?)?,
        })
    });
    Some(streams.collect())
}

/// guidellm's JSON: one document, in seconds. It keeps the first token and the last, not those
/// between them.
pub(crate) fn guidellm(text: &str) -> Option<Vec<Reported>> {
    let document: Value = serde_json::from_str(text).ok()?;
    let requests = document.pointer("/benchmarks/0/requests/successful")?;
    let streams = requests.as_array()?.iter().filter_map(|request| {
        let at = |name: &str| request.pointer("/info/timings")?.get(name)?.as_f64();
        Some(Reported {
            which: Which::of_text(request.get("output")?.as_str()?)?,
            ttft_ms: (at("first_token_iteration")? - at("request_start")?) * 1e3,
            itls_ms: Vec::new(),
        })
    });
    Some(streams.collect())
}

fn numbers(list: &Value) -> Option<Vec<f64>> {
    list.as_array()?.iter().map(Value::as_f64).collect()
}

/// How far off a client was, in milliseconds; sorted.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Errors {
    pub(crate) ttft_ms: Vec<f64>,
    /// Of the gaps that the client reports and the server made.
    pub(crate) itl_ms: Vec<f64>,
    /// First request to last request, as the server received them.
    pub(crate) skew_ms: f64,
    /// How much later than planned the server wrote; of every token.
    pub(crate) late_ms: Vec<f64>,
}

/// Compares stream by stream; reports of streams that the server does not know are left out.
pub(crate) fn compare(reported: &[Reported], served: &[Stamps]) -> Errors {
    let by_number: HashMap<usize, &Stamps> = served.iter().map(|one| (one.number, one)).collect();
    let by_request: HashMap<&str, &Stamps> = served
        .iter()
        .filter_map(|one| Some((one.request_id.as_deref()?, one)))
        .collect();
    let mut errors = Errors::default();
    let mut received = Vec::new();
    for one in reported {
        let stamps = match &one.which {
            Which::Number(number) => by_number.get(number),
            Which::Request(id) => by_request.get(id.as_str()),
        };
        let Some((stamps, ttft_ms)) = stamps.and_then(|it| Some((it, it.ttft_ms()?))) else {
            continue;
        };
        received.push(stamps.received_ns);
        let late = stamps.late_ns.iter().map(|ns| *ns as f64 / 1e6);
        errors.late_ms.extend(late);
        errors.ttft_ms.push((one.ttft_ms - ttft_ms).abs());
        let gaps = one.itls_ms.iter().zip(stamps.itls_ms());
        let off = gaps.map(|(reported, true_ms)| (reported - true_ms).abs());
        errors.itl_ms.extend(off);
    }
    errors.ttft_ms.sort_by(f64::total_cmp);
    errors.itl_ms.sort_by(f64::total_cmp);
    errors.late_ms.sort_by(f64::total_cmp);
    if let (Some(first), Some(last)) = (received.iter().min(), received.iter().max()) {
        errors.skew_ms = (last - first) as f64 / 1e6;
    }
    errors
}

/// The smallest of `sorted` that at least this share of them does not exceed; `None` of none.
pub(crate) fn quantile(sorted: &[f64], share: f64) -> Option<f64> {
    let rank = (sorted.len() as f64 * share).ceil().max(1.0);
    sorted.get(rank as usize - 1).or(sorted.last()).copied()
}
