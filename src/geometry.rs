//! KV arithmetic: hit blocks, the pages that a hit stands on, bytes, expected hits. Pure.
//!
//! A dense model has one attention group; a hybrid one has groups of state pages beside it. A hit of
//! n blocks stands on n attention pages and, at its end, one state page of each state group: what
//! the pages of a transfer say of a hit is [`pages`]'. The numbers of three models are worked out in
//! `docs/geometry.md`; what an engine states of its own geometry is `engine`'s to read.
//!
//! All lengths are in tokens unless they say blocks. What is confirmed was measured on vLLM 0.32
//! with KVCR 0.1.1 (blocks of 64 tokens, prompts of 508 to 576).

pub mod pages;

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::config::Profile;
use crate::sim::model::Shape;

pub use pages::{Bound, Delivery, Pages};

/// The shape of one layer's keys and values, and how many layers there are.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct DenseKv {
    /// Layers with a KV cache.
    pub layers: u32,
    /// KV heads of each layer.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of one element: 2 for `bfloat16`, 4 for `float32`.
    pub element_bytes: u32,
}

impl DenseKv {
    /// Bytes that one token takes: keys and values of every layer.
    pub fn token_bytes(self) -> u64 {
        let elements = u64::from(self.layers) * 2 * u64::from(self.kv_heads);
        elements * u64::from(self.head_dim) * u64::from(self.element_bytes)
    }
}

/// A model whose shape is known: the keys and values of its attention group, and how many state
/// groups are beside it, whose pages an engine pads to the size of the attention group's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Built {
    attention: DenseKv,
    state_groups: u32,
}

/// The tiny random model that the environment builds as `kind`.
fn built(kind: &str, dtype: &str) -> Option<Built> {
    let element_bytes = element_bytes(dtype)?;
    let dense = |layers| DenseKv {
        layers,
        kv_heads: 2,
        head_dim: 64,
        element_bytes,
    };
    let (attention, state_groups) = match kind {
        "dense" => (dense(4), 0),
        // One layer of full attention, three with a state.
        "hybrid" => (dense(1), 3),
        "sim" => (simulated(Shape::DENSE, element_bytes), 0),
        "sim-hybrid" => (
            simulated(Shape::HYBRID, element_bytes),
            Shape::HYBRID.state_groups,
        ),
        _ => return None,
    };
    Some(Built {
        attention,
        state_groups,
    })
}

fn simulated(shape: Shape, element_bytes: u32) -> DenseKv {
    DenseKv {
        layers: shape.layers,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        element_bytes,
    }
}

/// Bytes of an element of an engine's dtype; `None` for a name that is not known.
fn element_bytes(dtype: &str) -> Option<u32> {
    match dtype {
        "float32" => Some(4),
        "bfloat16" | "float16" => Some(2),
        _ => None,
    }
}

/// How an engine lays out its KV cache.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Geometry {
    /// Tokens of one hit block: prefixes are hit in whole ones.
    pub hit_block: NonZeroU32,
    /// Groups of state pages beside the attention group: 0 for a dense model, `None` where nobody
    /// said.
    pub state_groups: Option<u32>,
    /// Bytes of one page, the block of one group over the group's layers; `None` where nobody said.
    pub page_bytes: Option<u64>,
}

impl Geometry {
    /// The geometry of a profile's engine: what the profile says, and else what follows from the
    /// shape of a model that the environment builds. A block of no tokens, which configuration
    /// refuses, counts as one of one.
    pub fn of(profile: &Profile) -> Self {
        let said = &profile.geometry;
        let tokens = said.hit_block_tokens.unwrap_or(profile.engine.block_tokens);
        let hit_block = NonZeroU32::new(tokens).unwrap_or(NonZeroU32::MIN);
        let kind = profile.model.build.as_deref();
        let built = kind.and_then(|kind| built(kind, &profile.engine.dtype));
        Self {
            hit_block,
            state_groups: said.ssm_groups.or(built.map(|it| it.state_groups)),
            page_bytes: said
                .page_bytes
                .or(built.map(|it| u64::from(hit_block.get()) * it.attention.token_bytes())),
        }
    }

    /// Whether pages and bytes are known to the last one; otherwise they are lower bounds.
    pub fn is_exact(self) -> bool {
        self.state_groups.is_some() && self.page_bytes.is_some()
    }

    fn size(self) -> u64 {
        u64::from(self.hit_block.get())
    }

    /// Blocks that a prompt fills. Only full blocks are cached, offloaded and hashed.
    pub fn full(self, prompt: u64) -> u64 {
        prompt / self.size()
    }

    /// Tokens in `blocks` blocks.
    pub fn tokens_of(self, blocks: u64) -> u64 {
        blocks * self.size()
    }

    /// Tokens that the device's prefix cache serves when a prompt of this length comes again:
    /// the engine always computes the last token, for its logits, so a block that ends exactly
    /// there is computed too. This is also all that a KVCR-off engine can reuse.
    pub fn device_hit(self, prompt: u64) -> u64 {
        self.tokens_of(self.full(prompt.saturating_sub(1)))
    }

    /// Tokens that are served when any tier behind the device holds the whole prompt: the
    /// offloading connector also gives a block that ends with the last token (576 of 576 were
    /// seen, where the device alone gives 512; the engine then counts no token as computed).
    pub fn offload_hit(self, prompt: u64) -> u64 {
        self.tokens_of(self.full(prompt))
    }

    /// Tokens that a prompt of this length reuses of one that shares its first `shared` tokens
    /// and differs in the next, from the device: whole shared blocks, at most [`Self::device_hit`].
    pub fn shared_device_hit(self, prompt: u64, shared: u64) -> u64 {
        self.tokens_of(self.full(shared.min(prompt)))
            .min(self.device_hit(prompt))
    }

    /// The same from a tier behind the device, at most [`Self::offload_hit`].
    pub fn shared_offload_hit(self, prompt: u64, shared: u64) -> u64 {
        self.tokens_of(self.full(shared.min(prompt)))
            .min(self.offload_hit(prompt))
    }

    /// Tokens of the first `held` that can be used. The whole blocks of them with one group; with
    /// state groups only as far as the last of `checkpoints` among them, the lengths after which
    /// every group's state is held: what lies behind it is of no use.
    pub fn usable(self, held: u64, checkpoints: &[u64]) -> u64 {
        let whole = self.tokens_of(self.full(held));
        if self.state_groups.unwrap_or(0) == 0 {
            return whole;
        }
        let at_a_block = |length: &&u64| length.is_multiple_of(self.size()) && **length <= whole;
        checkpoints
            .iter()
            .filter(at_a_block)
            .max()
            .copied()
            .unwrap_or(0)
    }

    /// Prompt lengths around the end of block `blocks`, where off-by-one errors live: one token
    /// short of it, exactly it, one token beyond.
    pub fn boundary(self, blocks: u64) -> [u64; 3] {
        let edge = self.tokens_of(blocks);
        [edge.saturating_sub(1), edge, edge + 1]
    }
}

#[cfg(test)]
mod tests;
