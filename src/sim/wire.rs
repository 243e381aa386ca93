//! What simulated processes say to one another. The surfaces that clients see are elsewhere, in
//! the real programs' words; these are ours.

use serde::{Deserialize, Serialize};

/// What an engine is for.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Prefills and decodes.
    #[default]
    Aggregated,
    /// Only prefills, and hands its pages to a decode engine.
    Prefill,
    /// Decodes what another has prefilled.
    Decode,
}

/// A registered engine: `<discovery>/<instance id, hex>.json`.
///
/// The file is written whole (renamed into place) and its owner holds an exclusive `flock` on it
/// for life: whoever can take the lock knows that the owner is dead, whatever the clock says. A
/// registration outlives its owner by `Latency::lease_us`, counted by whoever looks.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Registration {
    /// 64 bits, all used: ids beyond 2^53 are where readers that know only floats go wrong.
    pub instance_id: u64,
    /// `DYN_NAMESPACE`.
    pub namespace: String,
    /// `backend`, or `kv_state_agent`.
    pub component: String,
    /// Served model name; empty for a state agent.
    pub model: String,
    /// Tokens in one block; 0 for a state agent.
    pub block_tokens: u32,
    /// Longest sequence.
    pub max_model_len: u32,
    /// Entries of the vocabulary.
    pub vocabulary: u32,
    /// What it is for.
    pub role: Role,
    /// `127.0.0.1:PORT` of `POST /generate` ([`Generate`] in, lines of [`Reply`] out); for a
    /// state agent of `GET /owners` (a list of [`Owner`]).
    pub request_address: String,
    /// `127.0.0.1:PORT` where lines of [`KvEvent`] come from, a snapshot first.
    pub events_address: Option<String>,
    /// `HOST:PORT` of its KVCR control endpoint; `None` without KVCR.
    pub control: Option<String>,
    /// Cache owner id, where a state agent is used.
    pub owner: Option<String>,
}

/// Where the router says the blocks of a prompt can be fetched.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Hint {
    /// `HOST:PORT` of a KVCR control endpoint.
    pub source_control_endpoint: String,
    /// Hashes of the prefix's blocks that the source holds, from the first.
    pub block_hashes: Vec<u64>,
}

/// Where a decode engine gets the pages of a prompt that another engine prefilled.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Handover {
    /// `HOST:PORT` of `GET /handover/REQUEST_ID` at the prefill engine: the pages, one after the
    /// other, attention pages of every full block first, then one state page a group.
    pub address: String,
    /// Which request.
    pub request_id: String,
    /// Full blocks that are handed over.
    pub blocks: u64,
}

/// One request to an engine.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Generate {
    /// Unique.
    pub request_id: String,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Goes into every block hash.
    pub cache_salt: Option<String>,
    /// Tokens to generate; a prefill engine generates one whatever it says.
    pub max_tokens: u32,
    /// Where the router says the blocks are.
    pub hint: Option<Hint>,
    /// For a decode engine.
    pub handover: Option<Handover>,
}

/// One line of an engine's answer. The last one is `Done` or `Failed`; anything else is a cut.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// A generated token.
    Token {
        /// The token.
        id: u32,
        /// Its log-probability.
        logprob: f64,
        /// The second likeliest token.
        runner_up: u32,
        /// Its log-probability.
        runner_up_logprob: f64,
    },
    /// The end.
    Done {
        /// `length`.
        finish_reason: String,
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Tokens generated.
        completion_tokens: u64,
        /// Prompt tokens that were found instead of computed.
        cached_tokens: u64,
        /// Of a prefill engine.
        handover: Option<Handover>,
    },
    /// The engine failed.
    Failed {
        /// HTTP status for the client.
        status: u16,
        /// Why, for the client.
        message: String,
    },
}

/// Which of an engine's caches an event speaks of.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cache {
    /// The device's prefix cache: what a router wants for placement.
    Device,
    /// KVCR's own tier: what a hint may name.
    Kvcr,
}

/// A cache changed. Only attention pages are published.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct KvEvent {
    /// Which cache.
    pub cache: Cache,
    /// Block hashes that are there now.
    #[serde(default)]
    pub stored: Vec<u64>,
    /// Block hashes that are gone.
    #[serde(default)]
    pub removed: Vec<u64>,
}

/// What a state agent knows of one cache owner, across the incarnations of its engine.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Owner {
    /// Cache owner id.
    pub owner: String,
    /// `HOST:PORT` where its blocks can be fetched: the engine's, or its Guard's.
    pub control: String,
    /// Block hashes in its KVCR tier.
    pub blocks: Vec<u64>,
}
