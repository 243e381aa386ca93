//! KV arithmetic of dense models: blocks, bytes, expected hits. Pure.
//!
//! All lengths are in tokens unless they say blocks. What is confirmed was measured on vLLM 0.32
//! with KVCR 0.1.1 (blocks of 64 tokens, prompts of 508 to 576).

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::config::Profile;
use crate::sim::model::Shape;

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

/// The tiny random model that the environment builds as `kind`.
fn built(kind: &str, dtype: &str) -> Option<DenseKv> {
    let element_bytes = element_bytes(dtype)?;
    match kind {
        "dense" => Some(DenseKv {
            layers: 4,
            kv_heads: 2,
            head_dim: 64,
            element_bytes,
        }),
        // The attention group's page; the state pages are padded to its size.
        "hybrid" => Some(DenseKv {
            layers: 1,
            kv_heads: 2,
            head_dim: 64,
            element_bytes,
        }),
        "sim" => Some(simulated(Shape::DENSE, element_bytes)),
        // The attention page; the state pages are padded to its size.
        "sim-hybrid" => Some(simulated(Shape::HYBRID, element_bytes)),
        _ => None,
    }
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

/// How an engine cuts sequences into blocks.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Blocks {
    /// Tokens in one block.
    pub tokens: NonZeroU32,
    /// Bytes of one block, over all layers.
    pub bytes: u64,
}

impl Blocks {
    /// Blocks of `tokens` tokens of a dense model. `None` for 0 tokens.
    pub fn dense(tokens: u32, kv: DenseKv) -> Option<Self> {
        let tokens = NonZeroU32::new(tokens)?;
        let bytes = u64::from(tokens.get()) * kv.token_bytes();
        Some(Self { tokens, bytes })
    }

    /// Blocks of a profile's engine; `None` for a model whose shape only its files tell.
    pub fn of(profile: &Profile) -> Option<Self> {
        let kv = built(profile.model.build.as_deref()?, &profile.engine.dtype)?;
        Self::dense(profile.engine.block_tokens, kv)
    }

    fn size(self) -> u64 {
        u64::from(self.tokens.get())
    }

    /// Blocks that a prompt fills. Only full blocks are cached, offloaded and hashed.
    pub fn full(self, prompt: u64) -> u64 {
        prompt / self.size()
    }

    /// Tokens in `blocks` blocks.
    pub fn tokens_of(self, blocks: u64) -> u64 {
        blocks * self.size()
    }

    /// Bytes of `blocks` blocks.
    pub fn bytes_of(self, blocks: u64) -> u64 {
        blocks * self.bytes
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

    /// Prompt lengths around the end of block `blocks`, where off-by-one errors live: one token
    /// short of it, exactly it, one token beyond.
    pub fn boundary(self, blocks: u64) -> [u64; 3] {
        let edge = self.tokens_of(blocks);
        [edge.saturating_sub(1), edge, edge + 1]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::config::testing::{cpu, sim};

    fn tiny(dtype: &str) -> Blocks {
        Blocks::of(&cpu(&["--dtype", dtype]).profile).unwrap()
    }

    #[test]
    fn sizes_and_hits_are_those_that_were_measured() {
        assert_eq!(tiny("bfloat16").bytes, 131_072);
        let blocks = tiny("float32");
        assert_eq!(blocks.bytes, 262_144);
        assert_eq!(blocks.bytes_of(8), 2_097_152);
        for (prompt, device, offload) in [
            (508, 448, 448),
            (566, 512, 512),
            (568, 512, 512),
            (576, 512, 576),
        ] {
            assert_eq!(blocks.device_hit(prompt), device, "{prompt}");
            assert_eq!(blocks.offload_hit(prompt), offload, "{prompt}");
        }
        assert_eq!(blocks.boundary(9), [575, 576, 577]);
    }

    #[test]
    fn a_shared_prefix_is_served_in_whole_blocks() {
        let blocks = tiny("float32");
        for (prompt, shared, device, offload) in [
            (576, 130, 128, 128),
            (576, 63, 0, 0),
            (576, 576, 512, 576),
            (100, 576, 64, 64),
        ] {
            let hits = (
                blocks.shared_device_hit(prompt, shared),
                blocks.shared_offload_hit(prompt, shared),
            );
            assert_eq!(hits, (device, offload), "{prompt} {shared}");
        }
    }

    #[test]
    fn a_block_of_a_simulated_model_is_its_page() {
        for (build, shape) in [("sim", Shape::DENSE), ("sim-hybrid", Shape::HYBRID)] {
            for (dtype, element) in [("float32", 4), ("bfloat16", 2)] {
                let profile = sim(&["--model-build", build, "--dtype", dtype]).profile;
                let page = shape.page_bytes(profile.engine.block_tokens, element);
                assert_eq!(Blocks::of(&profile).unwrap().bytes, page as u64);
            }
        }
    }

    #[test]
    fn what_is_not_known_has_no_size() {
        assert_eq!(Blocks::of(&cpu(&["--model-path", "/m"]).profile), None);
        assert_eq!(built("dense", "int3"), None);
        assert_eq!(Blocks::dense(0, built("dense", "float32").unwrap()), None);
    }

    proptest! {
        #[test]
        fn hits_are_whole_blocks_and_within_the_prompt(tokens in 1_u32..2048, prompt in 0_u64..1 << 32, shared in 0_u64..1 << 32) {
            let blocks = Blocks { tokens: NonZeroU32::new(tokens).unwrap(), bytes: 1 };
            let size = u64::from(tokens);
            for hit in [
                blocks.device_hit(prompt),
                blocks.offload_hit(prompt),
                blocks.shared_device_hit(prompt, shared),
                blocks.shared_offload_hit(prompt, shared),
            ] {
                prop_assert_eq!(hit % size, 0);
                prop_assert!(hit <= prompt);
            }
            prop_assert!(blocks.device_hit(prompt) < prompt.max(1));
            let beyond = blocks.offload_hit(prompt) - blocks.device_hit(prompt);
            let at_edge = prompt > 0 && prompt % size == 0;
            prop_assert_eq!(beyond, if at_edge { size } else { 0 });
            prop_assert!(blocks.shared_offload_hit(prompt, shared) <= shared);
            prop_assert_eq!(blocks.shared_offload_hit(prompt, prompt), blocks.offload_hit(prompt));
        }

        #[test]
        fn sharing_more_never_hits_less(tokens in 1_u32..512, prompt in 0_u64..1 << 20, a in 0_u64..1 << 20, b in 0_u64..1 << 20) {
            let blocks = Blocks { tokens: NonZeroU32::new(tokens).unwrap(), bytes: 1 };
            let (less, more) = (a.min(b), a.max(b));
            prop_assert!(blocks.shared_device_hit(prompt, less) <= blocks.shared_device_hit(prompt, more));
            prop_assert!(blocks.shared_offload_hit(prompt, less) <= blocks.shared_offload_hit(prompt, more));
        }
    }
}
