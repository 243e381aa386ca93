//! Where a request goes, and where its blocks can be fetched. Pure: who knows what is given.

use std::collections::HashSet;

use crate::sim::wire::Hint;

/// What the router knows of one engine, for one prompt.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Known {
    /// Leading blocks of the prompt in the device cache.
    pub(super) device: usize,
    /// Leading blocks of the prompt in KVCR's own tier.
    pub(super) kvcr: usize,
    /// Its KVCR control endpoint.
    pub(super) control: Option<String>,
    /// Nobody has found it dead.
    pub(super) up: bool,
}

impl Known {
    /// Leading blocks that it need not compute.
    pub(super) fn cached(&self) -> usize {
        self.device.max(self.kvcr)
    }
}

/// A place where blocks can be fetched.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Source {
    /// KVCR control endpoint.
    pub(super) control: String,
    /// Leading blocks of the prompt that are there.
    pub(super) blocks: usize,
}

/// How many of `hashes`, from the first, are in `blocks`.
pub(super) fn prefix(blocks: &HashSet<u64>, hashes: &[u64]) -> usize {
    hashes
        .iter()
        .take_while(|hash| blocks.contains(hash))
        .count()
}

/// The engine with the longest cached prefix; `ticket` decides between equals, in turn. Engines
/// that are down are taken only when there is no other.
pub(super) fn choose(engines: &[Known], ticket: usize) -> Option<usize> {
    let rank = |known: &Known| (known.up, known.cached());
    let best = engines.iter().map(rank).max()?;
    let equals: Vec<usize> = (0..engines.len())
        .filter(|&at| rank(&engines[at]) == best)
        .collect();
    Some(equals[ticket % equals.len()])
}

/// The longest source that has more than `target` has itself.
pub(super) fn hint(target: &Known, sources: &[Source], hashes: &[u64]) -> Option<Hint> {
    let own = target.control.as_ref()?;
    sources
        .iter()
        .filter(|source| source.blocks > target.cached() && source.control != *own)
        .max_by_key(|source| source.blocks)
        .map(|source| Hint {
            source_control_endpoint: source.control.clone(),
            block_hashes: hashes[..source.blocks].to_vec(),
        })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn known(device: usize, kvcr: usize, control: Option<&str>) -> Known {
        Known {
            device,
            kvcr,
            control: control.map(str::to_owned),
            up: true,
        }
    }

    fn source(control: &str, blocks: usize) -> Source {
        Source {
            control: control.to_owned(),
            blocks,
        }
    }

    #[test]
    fn a_prefix_ends_at_the_first_gap() {
        let blocks = HashSet::from([1, 2, 4]);
        assert_eq!(prefix(&blocks, &[1, 2, 3, 4]), 2);
        assert_eq!(prefix(&blocks, &[]), 0);
    }

    #[test]
    fn equals_take_turns_and_the_dead_come_last() {
        let mut engines = vec![known(0, 0, None), known(0, 0, None), known(3, 0, None)];
        assert_eq!(choose(&engines, 0), Some(2));
        engines[2].up = false;
        assert_eq!(choose(&engines, 0), Some(0));
        assert_eq!(choose(&engines, 1), Some(1));
        assert_eq!(choose(&[], 0), None);
    }

    #[test]
    fn a_hint_needs_more_than_the_target_has() {
        let hashes = [1, 2, 3];
        let target = known(1, 0, Some("t"));
        let found = hint(&target, &[source("s", 3), source("u", 2)], &hashes).unwrap();
        assert_eq!(found.source_control_endpoint, "s");
        assert_eq!(found.block_hashes, hashes);
        assert_eq!(hint(&target, &[source("s", 1)], &hashes), None);
        assert_eq!(hint(&target, &[source("t", 3)], &hashes), None);
        assert_eq!(
            hint(&known(0, 2, Some("t")), &[source("s", 2)], &hashes),
            None
        );
        // Without KVCR nobody could fetch.
        assert_eq!(hint(&known(0, 0, None), &[source("s", 3)], &hashes), None);
    }

    proptest! {
        #[test]
        fn nobody_better_is_left_out(cached in prop::collection::vec(0usize..5, 1..6), ticket in 0usize..9) {
            let engines: Vec<Known> = cached.iter().map(|n| known(*n, 0, None)).collect();
            let at = choose(&engines, ticket).unwrap();
            prop_assert!(cached.iter().all(|n| *n <= cached[at]));
        }
    }
}
