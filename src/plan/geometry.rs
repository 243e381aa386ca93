//! How many bytes a block is.

use crate::config::Profile;

/// What one token's keys and values look like in every layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KvShape {
    /// Layers with a KV cache.
    pub layers: u64,
    /// KV heads of a layer.
    pub kv_heads: u64,
    /// Numbers in a head.
    pub head_dim: u64,
}

/// The tiny random model that the environment builds as `dense`.
pub const DENSE: KvShape = KvShape {
    layers: 4,
    kv_heads: 2,
    head_dim: 64,
};

impl KvShape {
    /// Bytes of keys and values of one token.
    pub fn token_bytes(&self, number_bytes: u64) -> u64 {
        const KEYS_AND_VALUES: u64 = 2;
        self.layers * KEYS_AND_VALUES * self.kv_heads * self.head_dim * number_bytes
    }
}

/// Bytes of one number of `dtype`, as the engine spells it.
pub fn number_bytes(dtype: &str) -> Option<u64> {
    match dtype {
        "float32" => Some(4),
        "bfloat16" | "float16" => Some(2),
        _ => None,
    }
}

/// Bytes of one KV block of this profile; `None` for a model whose shape only its files tell.
pub fn block_bytes(profile: &Profile) -> Option<u64> {
    let shape = match profile.model.build.as_deref() {
        Some("dense") => DENSE,
        _ => return None,
    };
    let number = number_bytes(&profile.engine.dtype)?;
    Some(shape.token_bytes(number) * u64::from(profile.engine.block_tokens))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::cpu;

    /// Both sizes were read off a running stack.
    #[test]
    fn a_block_is_as_large_as_the_engine_says() {
        assert_eq!(block_bytes(&cpu(&[]).profile), Some(262_144));
        let half = cpu(&["--dtype", "bfloat16"]).profile;
        assert_eq!(block_bytes(&half), Some(131_072));
    }

    #[test]
    fn a_model_of_the_user_has_no_shape_here() {
        assert_eq!(block_bytes(&cpu(&["--model-path", "/m"]).profile), None);
    }
}
