//! Pages by key, the least recently used one evicted first. What is in them and where they lie
//! is the owner's.

use std::collections::{BTreeMap, HashMap};

use crate::sim::model::Key;

/// At most a number of entries, in order of use.
#[derive(Debug)]
pub struct Lru<V> {
    slots: usize,
    uses: u64,
    entries: HashMap<Key, (u64, V)>,
    order: BTreeMap<u64, Key>,
}

impl<V> Lru<V> {
    /// Room for `slots` entries.
    pub fn new(slots: usize) -> Self {
        Self {
            slots,
            uses: 0,
            entries: HashMap::new(),
            order: BTreeMap::new(),
        }
    }

    /// Puts an entry in as the last used one. Returns the entry that had to go: the one that was
    /// there under this key, or the least recently used.
    pub fn insert(&mut self, key: Key, value: V) -> Option<(Key, V)> {
        if self.slots == 0 {
            return Some((key, value));
        }
        let mut gone = self.remove(&key).map(|value| (key, value));
        if gone.is_none() && self.entries.len() >= self.slots {
            gone = self.pop();
        }
        self.put(key, value);
        gone
    }

    /// Puts an entry in, whatever room there is.
    pub fn insert_beyond(&mut self, key: Key, value: V) {
        self.remove(&key);
        self.put(key, value);
    }

    fn put(&mut self, key: Key, value: V) {
        self.uses += 1;
        self.order.insert(self.uses, key);
        self.entries.insert(key, (self.uses, value));
    }

    /// Takes the least recently used entry out.
    pub fn pop(&mut self) -> Option<(Key, V)> {
        let (_, key) = self.order.pop_first()?;
        let (_, value) = self.entries.remove(&key)?;
        Some((key, value))
    }

    /// The entry of `key`, which is now the last used one.
    pub fn get(&mut self, key: &Key) -> Option<&V> {
        let (used, value) = self.entries.get_mut(key)?;
        self.order.remove(used);
        self.uses += 1;
        *used = self.uses;
        self.order.insert(self.uses, *key);
        Some(value)
    }

    /// Whether `key` is there; not a use.
    pub fn contains(&self, key: &Key) -> bool {
        self.entries.contains_key(key)
    }

    /// Takes an entry out.
    pub fn remove(&mut self, key: &Key) -> Option<V> {
        let (used, value) = self.entries.remove(key)?;
        self.order.remove(&used);
        Some(value)
    }

    /// Entries.
    pub fn count(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(block: u64) -> Key {
        Key::attention(block)
    }

    proptest! {
        /// Against a list that is searched: slow, and plainly right.
        #[test]
        fn behaves_as_a_list_in_order_of_use(
            slots in 1usize..6,
            steps in prop::collection::vec((any::<bool>(), 0u64..9), 0..60),
        ) {
            let mut lru = Lru::new(slots);
            let mut list: Vec<(u64, usize)> = Vec::new();
            for (step, (insert, block)) in steps.into_iter().enumerate() {
                let at = list.iter().position(|(known, _)| *known == block);
                if insert {
                    let gone = match at {
                        Some(at) => Some(list.remove(at)),
                        None if list.len() == slots => Some(list.remove(0)),
                        None => None,
                    };
                    list.push((block, step));
                    let evicted = lru.insert(key(block), step);
                    prop_assert_eq!(evicted.map(|(key, value)| (key.block, value)), gone);
                } else {
                    let found = at.map(|at| list.remove(at));
                    list.extend(found);
                    prop_assert_eq!(lru.get(&key(block)).copied(), found.map(|(_, value)| value));
                }
                prop_assert_eq!(lru.count(), list.len());
                prop_assert!(lru.count() <= slots);
            }
        }
    }

    #[test]
    fn no_room_keeps_nothing_and_asking_for_presence_is_no_use() {
        assert_eq!(Lru::new(0).insert(key(1), ()), Some((key(1), ())));
        let mut lru = Lru::new(2);
        lru.insert(key(1), ());
        lru.insert(key(2), ());
        assert!(lru.contains(&key(1)));
        assert_eq!(lru.insert(key(3), ()), Some((key(1), ())));
        lru.insert_beyond(key(4), ());
        assert_eq!(lru.count(), 3);
    }
}
