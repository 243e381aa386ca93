use std::num::NonZeroU32;

use proptest::prelude::*;

use super::*;

fn geometry(state_groups: Option<u32>, page_bytes: Option<u64>) -> Geometry {
    Geometry {
        hit_block: NonZeroU32::new(256).unwrap(),
        state_groups,
        page_bytes,
    }
}

fn judged(groups: Option<u32>, hit: u64, found: u64) -> Delivery {
    let geometry = geometry(groups, None);
    geometry.judge(geometry.pages_of_hit(hit), found)
}

/// The transfers that were seen by hand with a hybrid model, and what they are.
#[test]
fn what_was_seen_has_its_name() {
    use Delivery::{AsNeeded, StateMissing, Useless};
    // Eleven attention pages came, and no token was cached.
    assert_eq!(judged(Some(3), 0, 11), Useless(11));
    // A hit of ten blocks stands on ten and three.
    assert_eq!(judged(Some(3), 2_560, 13), AsNeeded);
    assert_eq!(judged(Some(3), 2_560, 10), StateMissing(3));
    assert_eq!(judged(Some(3), 2_560, 12), StateMissing(1));
    // The states of every block instead of the last one's.
    assert_eq!(judged(Some(3), 2_560, 40), Useless(27));
}

#[test]
fn every_count_has_one_name() {
    use Delivery::{AsNeeded, AttentionMissing, StateMissing, Useless};
    let two_blocks = [
        (
            Some(0),
            [
                AttentionMissing(2),
                AttentionMissing(1),
                AsNeeded,
                Useless(1),
                Useless(2),
            ],
        ),
        (
            Some(1),
            [
                AttentionMissing(2),
                AttentionMissing(1),
                StateMissing(1),
                AsNeeded,
                Useless(1),
            ],
        ),
        (
            Some(2),
            [
                AttentionMissing(2),
                AttentionMissing(1),
                StateMissing(2),
                StateMissing(1),
                AsNeeded,
            ],
        ),
        // Nobody said, so the others may be states.
        (
            None,
            [
                AttentionMissing(2),
                AttentionMissing(1),
                AsNeeded,
                AsNeeded,
                AsNeeded,
            ],
        ),
    ];
    for (groups, expected) in two_blocks {
        let found = [0, 1, 2, 3, 4].map(|found| judged(groups, 512, found));
        assert_eq!(found, expected, "{groups:?}");
    }
    for groups in [None, Some(0), Some(3)] {
        assert_eq!(judged(groups, 255, 0), AsNeeded);
        assert_eq!(judged(groups, 255, 1), Useless(1));
    }
}

#[test]
fn a_lower_bound_says_that_it_is_one() {
    assert_eq!(Bound::Exactly(8).to_string(), "8");
    let bound = geometry(None, None).moved(Pages {
        attention: 8,
        state: 0,
    });
    assert_eq!(
        bound.to_string(),
        "at least 8 (geometry not configured: a lower bound)"
    );
}

prop_compose! {
    fn any_pages()(attention in 0_u64..1 << 30, state in 0_u64..1 << 10) -> Pages {
        Pages { attention, state }
    }
}

proptest! {
    #[test]
    fn only_what_is_needed_is_as_needed(groups in 0_u32..8, needed in any_pages(), found in 0_u64..1 << 31) {
        let delivery = geometry(Some(groups), None).judge(needed, found);
        prop_assert_eq!(delivery == Delivery::AsNeeded, found == needed.total());
        let total = match delivery {
            Delivery::AsNeeded => found,
            Delivery::AttentionMissing(pages) => found + pages + needed.state,
            Delivery::StateMissing(pages) => found + pages,
            Delivery::Useless(pages) => found - pages,
        };
        prop_assert_eq!(total, needed.total());
    }

    #[test]
    fn what_is_not_known_is_never_called_missing_states(needed in 0_u64..1 << 30, found in 0_u64..1 << 31) {
        let unknown = geometry(None, None);
        let needed = unknown.pages_of_hit(needed);
        let delivery = unknown.judge(needed, found);
        prop_assert!(!matches!(delivery, Delivery::StateMissing(_)));
        prop_assert_eq!(delivery == Delivery::AsNeeded, unknown.moved(needed).allows(found));
    }

    #[test]
    fn bytes_follow_from_pages_as_exactly_as_both_are_known(groups in prop::option::of(0_u32..8), page in prop::option::of(1_u64..1 << 30), needed in any_pages()) {
        let geometry = geometry(groups, page);
        let pages = geometry.moved(needed);
        let bytes = geometry.bytes_of(pages);
        prop_assert_eq!(bytes.least(), needed.total() * page.unwrap_or(1));
        let nothing = needed.total() == 0;
        let exact = nothing || geometry.is_exact();
        prop_assert_eq!(matches!(bytes, Bound::Exactly(_)), exact);
        prop_assert!(bytes.allows(bytes.least()));
        prop_assert_eq!(bytes.allows(bytes.least() + 1), !exact);
    }
}
