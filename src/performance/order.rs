//! In which order arms are measured: rounds, each of them every arm once.
//!
//! A machine drifts, and a request may leave something behind for the next. So the rounds are those
//! of a Williams design: in as many rounds as there are arms each arm stands once in every place,
//! and in twice as many it follows each other arm equally often. Which arm is which, and the order
//! of the rounds, are the seed's to say.

use rand::SeedableRng;
use rand::rngs::ChaCha8Rng;
use rand::seq::SliceRandom;
use serde::{Deserialize, Serialize};

use super::Arm;

/// One round: every arm once.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Round {
    /// Whether it is left out of what is said.
    pub warm_up: bool,
    /// In the order in which they are measured.
    pub arms: Vec<Arm>,
}

/// All rounds, for evidence too.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Order {
    /// What it follows from.
    pub seed: u64,
    /// Warm-up first.
    pub rounds: Vec<Round>,
}

impl Order {
    /// `warm_up` rounds and then `repeats` rounds of `arms`.
    #[must_use]
    pub fn new(arms: &[Arm], repeats: usize, warm_up: usize, seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let named = |places: Vec<usize>| places.into_iter().map(|at| arms[at]).collect();
        // Designs of their own, so that what is measured is balanced in itself.
        let mut rounds = Vec::with_capacity(warm_up + repeats);
        for (count, warm_up) in [(warm_up, true), (repeats, false)] {
            let places = balanced(arms.len(), count, &mut rng);
            rounds.extend(places.into_iter().map(|places| Round {
                warm_up,
                arms: named(places),
            }));
        }
        Self { seed, rounds }
    }
}

/// `count` permutations of `0..arms`.
fn balanced(arms: usize, count: usize, rng: &mut ChaCha8Rng) -> Vec<Vec<usize>> {
    let zigzag = zigzag(arms);
    let mut names: Vec<usize> = (0..arms).collect();
    let mut rounds = Vec::with_capacity(count);
    for square in 0.. {
        if rounds.len() >= count {
            break;
        }
        // An odd number of arms needs a square and its mirror until neighbours are balanced.
        let mirrored = arms % 2 == 1 && square % 2 == 1;
        if !mirrored {
            names.shuffle(rng);
        }
        let mut steps = zigzag.clone();
        if mirrored {
            steps.reverse();
        }
        let mut shifts: Vec<usize> = (0..arms.max(1)).collect();
        shifts.shuffle(rng);
        rounds.extend(shifts.into_iter().map(|shift| {
            let round = steps.iter().map(|step| names[(step + shift) % arms]);
            round.collect()
        }));
    }
    rounds.truncate(count);
    rounds
}

/// `0, 1, n-1, 2, n-2, …`: the steps between neighbours are all different, or each there twice.
fn zigzag(arms: usize) -> Vec<usize> {
    let step = |at: usize| match at % 2 {
        0 => (arms - at / 2) % arms,
        _ => at.div_ceil(2),
    };
    (0..arms).map(step).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_seed_is_an_order_for_ever() {
        let order = Order::new(&Arm::ALL, 3, 1, 20_261_130);
        let lines: Vec<String> = order
            .rounds
            .iter()
            .map(|round| {
                let names: Vec<_> = round.arms.iter().map(|arm| arm.name()).collect();
                format!("{} {}", round.warm_up, names.join(" "))
            })
            .collect();
        // Evidence says the seed: who reads it later must get the same rounds.
        assert_eq!(lines, PINNED);
        assert_ne!(order, Order::new(&Arm::ALL, 3, 1, 20_261_131));
    }

    const PINNED: [&str; 4] = [
        "true off local peer guard cold",
        "false local cold off peer guard",
        "false off local guard cold peer",
        "false peer guard cold off local",
    ];

    #[test]
    fn nothing_to_measure_is_no_trouble() {
        assert_eq!(Order::new(&Arm::ALL, 0, 0, 1).rounds, []);
        assert_eq!(Order::new(&[], 2, 0, 1).rounds.len(), 2);
        assert_eq!(Order::new(&[Arm::Off], 2, 1, 1).rounds.len(), 3);
    }

    fn counts<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeMap<T, usize> {
        let mut counts = BTreeMap::new();
        for item in items {
            *counts.entry(item).or_insert(0) += 1;
        }
        counts
    }

    proptest! {
        #[test]
        fn every_round_is_a_permutation(arms in 1..=5_usize, repeats in 0..20_usize, warm_up in 0..4_usize, seed in any::<u64>()) {
            let arms = &Arm::ALL[..arms];
            let order = Order::new(arms, repeats, warm_up, seed);
            prop_assert_eq!(order.rounds.len(), repeats + warm_up);
            prop_assert!(order.rounds.iter().enumerate().all(|(at, round)| round.warm_up == (at < warm_up)));
            for round in &order.rounds {
                let mut sorted = round.arms.clone();
                sorted.sort();
                prop_assert_eq!(sorted.as_slice(), arms);
            }
            prop_assert_eq!(&order, &Order::new(arms, repeats, warm_up, seed));
        }

        #[test]
        fn each_arm_stands_in_each_place_about_equally_often(arms in 1..8_usize, count in 0..40_usize, seed in any::<u64>()) {
            let rounds = balanced(arms, count, &mut ChaCha8Rng::seed_from_u64(seed));
            let places = rounds.iter().flat_map(|round| round.iter().copied().enumerate());
            let counts = counts(places);
            for place in 0..arms {
                for arm in 0..arms {
                    let often = counts.get(&(place, arm)).copied().unwrap_or(0);
                    prop_assert!(often == count / arms || often == count.div_ceil(arms));
                }
            }
        }

        #[test]
        fn each_arm_follows_each_other_equally_often(arms in 2..8_usize, pairs in 1..4_usize, seed in any::<u64>()) {
            let rounds = balanced(arms, 2 * arms * pairs, &mut ChaCha8Rng::seed_from_u64(seed));
            let neighbours = rounds.iter().flat_map(|round| round.windows(2).map(|two| (two[0], two[1])));
            let counts = counts(neighbours);
            prop_assert_eq!(counts.len(), arms * (arms - 1));
            prop_assert!(counts.values().all(|often| *often == 2 * pairs), "{:?}", counts);
        }
    }
}
