//! Who may use the stack now: a pure first-come, first-served queue of shared and exclusive
//! leases.
//!
//! A queued exclusive lease holds back every lease behind it, shared ones too; otherwise a
//! steady trickle of shared leases would starve it. Nobody overtakes, so nobody starves.

use std::collections::VecDeque;

use super::protocol::Mode;

/// Leases that hold the stack and leases that wait for it.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    held: Vec<(T, Mode)>,
    waiting: VecDeque<(T, Mode)>,
}

impl<T> Default for Queue<T> {
    fn default() -> Self {
        Self {
            held: Vec::new(),
            waiting: VecDeque::new(),
        }
    }
}

impl<T: Copy + Eq> Queue<T> {
    /// Puts `id` at the end of the queue. Grants nothing; see [`Self::grant`].
    pub fn push(&mut self, id: T, mode: Mode) {
        self.waiting.push_back((id, mode));
    }

    /// Grants whatever may be granted now, in order, and returns it.
    pub fn grant(&mut self) -> Vec<T> {
        let mut granted = Vec::new();
        while let Some(&(id, mode)) = self.waiting.front() {
            let free = match mode {
                Mode::Shared => self.held.iter().all(|(_, held)| *held == Mode::Shared),
                Mode::Exclusive => self.held.is_empty(),
            };
            if !free {
                break;
            }
            self.waiting.pop_front();
            self.held.push((id, mode));
            granted.push(id);
        }
        granted
    }

    /// Forgets `id`, whether it held the stack or waited. Returns whether it held it.
    pub fn remove(&mut self, id: T) -> bool {
        let before = self.held.len();
        self.held.retain(|(other, _)| *other != id);
        self.waiting.retain(|(other, _)| *other != id);
        self.held.len() < before
    }

    /// Leases that hold the stack, oldest first.
    pub fn held(&self) -> impl Iterator<Item = T> + '_ {
        self.held.iter().map(|(id, _)| *id)
    }

    /// Leases that wait, next one first.
    pub fn waiting(&self) -> impl Iterator<Item = T> + '_ {
        self.waiting.iter().map(|(id, _)| *id)
    }

    /// Nobody holds the stack and nobody waits.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty() && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn shared_leases_run_side_by_side_and_an_exclusive_one_alone() {
        let mut queue = Queue::default();
        queue.push(1, Mode::Shared);
        queue.push(2, Mode::Shared);
        queue.push(3, Mode::Exclusive);
        assert_eq!(queue.grant(), [1, 2]);
        assert!(queue.remove(1));
        assert!(queue.grant().is_empty());
        assert!(queue.remove(2));
        assert_eq!(queue.grant(), [3]);
    }

    #[test]
    fn a_queued_exclusive_lease_holds_back_later_shared_ones() {
        let mut queue = Queue::default();
        queue.push(1, Mode::Shared);
        queue.grant();
        queue.push(2, Mode::Exclusive);
        queue.push(3, Mode::Shared);
        assert!(queue.grant().is_empty());
        assert_eq!(queue.waiting().collect::<Vec<_>>(), [2, 3]);
        assert!(!queue.remove(2), "it only waited");
        assert_eq!(queue.grant(), [3]);
    }

    #[test]
    fn it_is_empty_when_nobody_holds_and_nobody_waits() {
        let mut queue = Queue::default();
        assert!(queue.is_empty());
        queue.push(1, Mode::Exclusive);
        assert!(!queue.is_empty(), "one waits");
        queue.grant();
        assert!(!queue.is_empty(), "one holds");
        assert!(queue.remove(1));
        assert!(queue.is_empty());
    }

    #[derive(Clone, Debug)]
    enum Move {
        Push(bool),
        /// Ends the lease at this position of held + waiting.
        Remove(usize),
    }

    fn moves() -> impl Strategy<Value = Vec<Move>> {
        let one = prop_oneof![
            any::<bool>().prop_map(Move::Push),
            (0_usize..8).prop_map(Move::Remove),
        ];
        prop::collection::vec(one, 0..64)
    }

    proptest! {
        /// Whatever happens: an exclusive lease is alone, grants come in order of arrival, the
        /// stack is never idle while somebody waits, and once everyone leaves everyone was served.
        #[test]
        fn exclusive_is_alone_order_is_kept_and_nobody_starves(moves in moves()) {
            let mut queue = Queue::default();
            let mut modes = Vec::new();
            let mut granted: Vec<usize> = Vec::new();
            let mut gone = Vec::new();
            for step in moves {
                match step {
                    Move::Push(exclusive) => {
                        let id = modes.len();
                        modes.push(if exclusive { Mode::Exclusive } else { Mode::Shared });
                        queue.push(id, modes[id]);
                    }
                    Move::Remove(at) => {
                        let present: Vec<_> = queue.held().chain(queue.waiting()).collect();
                        if let Some(&id) = present.get(at) {
                            queue.remove(id);
                            gone.push(id);
                        }
                    }
                }
                granted.extend(queue.grant());
                let held: Vec<_> = queue.held().collect();
                let exclusive = held.iter().any(|id| modes[*id] == Mode::Exclusive);
                prop_assert!(!exclusive || held.len() == 1);
                prop_assert!(!held.is_empty() || queue.waiting().next().is_none());
            }
            loop {
                let Some(id) = queue.held().next() else { break };
                queue.remove(id);
                granted.extend(queue.grant());
            }
            prop_assert!(queue.is_empty());
            prop_assert!(granted.is_sorted(), "granted in order of arrival: {granted:?}");
            for id in 0..modes.len() {
                prop_assert!(granted.contains(&id) || gone.contains(&id));
            }
        }
    }
}
