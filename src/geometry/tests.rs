//! The numbers here are those of `docs/geometry.md`.

use proptest::prelude::*;

use super::*;
use crate::config::testing::{cpu, sim};

/// The geometry of the `cpu` profile with these flags.
fn of(flags: &[&str]) -> Geometry {
    Geometry::of(&cpu(flags).profile)
}

fn tiny(dtype: &str) -> Geometry {
    of(&["--dtype", dtype])
}

/// Blocks of `tokens` of a model with `groups` state groups and pages of a byte.
fn blocks_of(tokens: u32, groups: Option<u32>) -> Geometry {
    Geometry {
        hit_block: NonZeroU32::new(tokens).unwrap(),
        state_groups: groups,
        page_bytes: Some(1),
    }
}

#[test]
fn sizes_and_hits_are_those_that_were_measured() {
    assert_eq!(tiny("bfloat16").page_bytes, Some(131_072));
    let blocks = tiny("float32");
    assert_eq!(blocks.page_bytes, Some(262_144));
    assert_eq!(blocks.state_groups, Some(0));
    assert_eq!(
        blocks.bytes_of(Bound::Exactly(8)),
        Bound::Exactly(2_097_152)
    );
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
fn a_page_of_a_simulated_model_is_as_large_as_it_is() {
    for (build, shape) in [("sim", Shape::DENSE), ("sim-hybrid", Shape::HYBRID)] {
        for (dtype, element) in [("float32", 4), ("bfloat16", 2)] {
            let profile = sim(&["--model-build", build, "--dtype", dtype]).profile;
            let page = shape.page_bytes(profile.engine.block_tokens, element);
            let geometry = Geometry::of(&profile);
            assert_eq!(geometry.page_bytes, Some(page as u64));
            assert_eq!(geometry.state_groups, Some(shape.state_groups));
            assert!(geometry.is_exact());
        }
    }
}

#[test]
fn the_tiny_hybrid_model_has_pages_as_large_as_the_dense_ones() {
    let built = built("hybrid", "bfloat16").unwrap();
    assert_eq!(256 * built.attention.token_bytes(), 131_072);
    assert_eq!(built.state_groups, 3);
}

#[test]
fn of_a_model_from_elsewhere_only_the_flags_speak() {
    let path = ["--model-path", "/m"];
    let nothing = of(&path);
    assert_eq!((nothing.state_groups, nothing.page_bytes), (None, None));
    assert_eq!(nothing.hit_block.get(), 64);
    assert!(!nothing.is_exact());
    assert!(!of(&["--model-path", "/m", "--ssm-groups", "3"]).is_exact());

    let flags = "--hit-block-tokens 576 --ssm-groups 3 --page-bytes 18874368";
    let flags: Vec<&str> = path.into_iter().chain(flags.split(' ')).collect();
    let qwen = of(&flags);
    assert!(qwen.is_exact());
    assert_eq!(qwen.tokens_of(10), 5_760);
    let pages = qwen.pages_of_hit(5_760);
    assert_eq!((pages.attention, pages.state), (10, 3));
    assert_eq!(
        qwen.bytes_of(qwen.moved(pages)),
        Bound::Exactly(245_366_784)
    );
    // Eight layers of 4,096 B a token.
    assert_eq!(qwen.page_bytes, Some(576 * 8 * 4_096));
}

#[test]
fn what_is_said_wins_over_what_follows_from_the_shape() {
    let longer = of(&["--hit-block-tokens", "128"]);
    assert_eq!(longer.hit_block.get(), 128);
    assert_eq!(longer.page_bytes, Some(524_288));
    let other = of(&["--page-bytes", "7", "--ssm-groups", "1"]);
    assert_eq!((other.page_bytes, other.state_groups), (Some(7), Some(1)));
    assert_eq!(built("dense", "int3"), None);
    assert_eq!(built("unheard-of", "float32"), None);
}

#[test]
fn a_hybrid_hit_ends_at_a_checkpoint() {
    let hybrid = blocks_of(256, Some(3));
    assert_eq!(hybrid.usable(2_700, &[]), 0);
    assert_eq!(hybrid.usable(2_700, &[2_560]), 2_560);
    // One token short of the checkpoint, on it, and one beyond.
    for (held, usable) in [(2_559, 1_280), (2_560, 2_560), (2_561, 2_560)] {
        assert_eq!(hybrid.usable(held, &[1_280, 2_560]), usable, "{held}");
    }
    assert_eq!(
        hybrid.usable(2_700, &[100]),
        0,
        "within a block nothing is kept"
    );
    assert_eq!(blocks_of(256, Some(0)).usable(2_700, &[]), 2_560);
}

prop_compose! {
    fn any_geometry()(
        tokens in 1_u32..2048,
        state_groups in prop::option::of(0_u32..8),
        page_bytes in prop::option::of(1_u64..1 << 30),
    ) -> Geometry {
        Geometry { state_groups, page_bytes, ..blocks_of(tokens, None) }
    }
}

proptest! {
    #[test]
    fn hits_are_whole_blocks_and_within_the_prompt(blocks in any_geometry(), prompt in 0_u64..1 << 32, shared in 0_u64..1 << 32) {
        let size = u64::from(blocks.hit_block.get());
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
    fn sharing_more_never_hits_less(blocks in any_geometry(), prompt in 0_u64..1 << 20, a in 0_u64..1 << 20, b in 0_u64..1 << 20) {
        let (less, more) = (a.min(b), a.max(b));
        prop_assert!(blocks.shared_device_hit(prompt, less) <= blocks.shared_device_hit(prompt, more));
        prop_assert!(blocks.shared_offload_hit(prompt, less) <= blocks.shared_offload_hit(prompt, more));
    }

    #[test]
    fn what_is_usable_is_held_and_ends_with_a_block(blocks in any_geometry(), held in 0_u64..1 << 20, checkpoints in prop::collection::vec(0_u64..1 << 20, 0..6)) {
        let usable = blocks.usable(held, &checkpoints);
        prop_assert!(usable <= held);
        prop_assert_eq!(usable % u64::from(blocks.hit_block.get()), 0);
        if blocks.state_groups.unwrap_or(0) > 0 {
            prop_assert!(usable == 0 || checkpoints.contains(&usable));
        }
        // A checkpoint more never makes a hit shorter.
        let more = [checkpoints, vec![blocks.tokens_of(blocks.full(held))]].concat();
        prop_assert_eq!(blocks.usable(held, &more), blocks.tokens_of(blocks.full(held)));
    }

    #[test]
    fn around_the_end_of_a_block(blocks in any_geometry(), count in 1_u64..1 << 20) {
        let [short, exact, over] = blocks.boundary(count).map(|prompt| blocks.pages_of_hit(prompt));
        let groups = u64::from(blocks.state_groups.unwrap_or(0));
        let state = |blocks: u64| if blocks > 0 { groups } else { 0 };
        prop_assert_eq!(short, Pages { attention: count - 1, state: state(count - 1) });
        prop_assert_eq!(exact, Pages { attention: count, state: groups });
        // One token more is one block more only where a block is one token.
        let more = u64::from(blocks.hit_block.get() == 1);
        prop_assert_eq!(over, Pages { attention: count + more, state: groups });
    }
}
