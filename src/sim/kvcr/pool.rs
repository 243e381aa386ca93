//! Pages by key, the least recently used evicted first; in memory, or in a file whose journal
//! outlives the process that wrote it.
//!
//! Every record of the journal carries a check over itself and over the page. So a record that
//! was torn, and one whose page was overwritten after the record was written, are both found out
//! when the pool is opened again: a process killed at any moment loses what it was writing and
//! nothing else. Only one process has a pool open; the service sees to that.

use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use crate::sim::model::{Group, Key};

/// Pages, one slot after the other.
const PAGES: &str = "pool";
/// Which slot holds which key, in the order of filling.
const JOURNAL: &str = "journal";
/// A journal that is being written anew.
const NEXT_JOURNAL: &str = "journal.next";

const CHECK: usize = 8;
/// Slot, block, group, check of the page, check of the record.
const RECORD: usize = 4 + 8 + 4 + CHECK + CHECK;
/// What a journal begins with: a word of ours and the size of a page.
const HEADER: usize = 16;
const MAGIC: &[u8; 8] = b"kvcrsim1";

/// Equal pages in a fixed number of slots.
#[derive(Debug)]
pub struct Pool {
    slots: usize,
    page_bytes: usize,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    store: Store,
    index: HashMap<Key, Place>,
    /// Keys by when they were last used.
    order: BTreeMap<u64, Key>,
    clock: u64,
    /// Slots below this were used at some time.
    used: usize,
    free: Vec<usize>,
}

#[derive(Clone, Copy, Debug)]
struct Place {
    slot: usize,
    used_at: u64,
}

#[derive(Debug)]
enum Store {
    Memory(Vec<Vec<u8>>),
    File { pages: File, journal: File },
}

impl Pool {
    /// A pool that dies with its process.
    #[must_use]
    pub fn in_memory(slots: usize, page_bytes: usize) -> Self {
        Self::new(slots, page_bytes, Store::Memory(Vec::new()))
    }

    /// The pool in the directory `dir`, made if there is none, or with the pages that an earlier
    /// process left there. Other sizes than those it was made with make it empty.
    ///
    /// # Errors
    /// The files cannot be made, read or written.
    pub fn in_file(dir: &Path, slots: usize, page_bytes: usize) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let pages = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(dir.join(PAGES))?;
        pages.set_len((slots as u64).saturating_mul(page_bytes as u64))?;
        let kept = recovered(dir, &pages, slots, page_bytes)?;
        // Written anew, so that it does not grow with every owner; renamed into place, so that
        // there is a whole one at any moment.
        let next = dir.join(NEXT_JOURNAL);
        let mut journal = OpenOptions::new().append(true).create(true).open(&next)?;
        journal.set_len(0)?;
        let mut text = header(page_bytes).to_vec();
        for (slot, key, check) in &kept {
            text.extend_from_slice(&record(*slot, *key, *check));
        }
        journal.write_all(&text)?;
        std::fs::rename(&next, dir.join(JOURNAL))?;
        let pool = Self::new(slots, page_bytes, Store::File { pages, journal });
        {
            let mut inner = pool.lock();
            inner.used = kept.iter().map(|(slot, ..)| slot + 1).max().unwrap_or(0);
            let mut taken = vec![false; inner.used];
            for (slot, key, _) in kept {
                taken[slot] = true;
                inner.place(key, slot);
            }
            inner.free = (0..taken.len()).filter(|slot| !taken[*slot]).collect();
        }
        Ok(pool)
    }

    fn new(slots: usize, page_bytes: usize, store: Store) -> Self {
        let inner = Inner {
            store,
            index: HashMap::new(),
            order: BTreeMap::new(),
            clock: 0,
            used: 0,
            free: Vec::new(),
        };
        Self {
            slots,
            page_bytes,
            inner: Mutex::new(inner),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores `page` under `key`, and says which key had to go for it.
    ///
    /// # Errors
    /// The page has another size than the pool's pages, there is no slot at all, or the file
    /// cannot be written.
    pub fn fill(&self, key: Key, page: &[u8]) -> io::Result<Option<Key>> {
        if page.len() != self.page_bytes || self.slots == 0 {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "a page of {} bytes for {} slots of {} bytes",
                    page.len(),
                    self.slots,
                    self.page_bytes
                ),
            ));
        }
        let mut inner = self.lock();
        let (slot, evicted) = match inner.remove(&key) {
            Some(slot) => (slot, None),
            None => inner.slot(self.slots)?,
        };
        match inner.store.write(slot, key, page) {
            Ok(()) => inner.place(key, slot),
            // Whatever is in the slot now, nobody will find it.
            Err(error) => {
                inner.free.push(slot);
                return Err(error);
            }
        }
        Ok(evicted)
    }

    /// The page under `key`, which counts as used now.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn get(&self, key: &Key) -> io::Result<Option<Vec<u8>>> {
        let mut inner = self.lock();
        let Some(slot) = inner.remove(key) else {
            return Ok(None);
        };
        inner.place(*key, slot);
        inner.store.read(slot, self.page_bytes).map(Some)
    }

    /// Whether there is a page under `key`; not a use of it.
    pub fn contains(&self, key: &Key) -> bool {
        self.lock().index.contains_key(key)
    }

    /// Every key, the least recently used first.
    pub fn keys(&self) -> Vec<Key> {
        self.lock().order.values().copied().collect()
    }

    /// Pages that are there.
    pub fn len(&self) -> usize {
        self.lock().index.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Pages that fit.
    pub fn slots(&self) -> usize {
        self.slots
    }

    /// Bytes of one page.
    pub fn page_bytes(&self) -> usize {
        self.page_bytes
    }
}

impl Inner {
    fn place(&mut self, key: Key, slot: usize) {
        self.clock += 1;
        let used_at = self.clock;
        self.order.insert(used_at, key);
        self.index.insert(key, Place { slot, used_at });
    }

    fn remove(&mut self, key: &Key) -> Option<usize> {
        let place = self.index.remove(key)?;
        self.order.remove(&place.used_at);
        Some(place.slot)
    }

    /// A slot to write to, and the key that had to leave it.
    fn slot(&mut self, slots: usize) -> io::Result<(usize, Option<Key>)> {
        if let Some(slot) = self.free.pop() {
            return Ok((slot, None));
        }
        if self.used < slots {
            self.used += 1;
            return Ok((self.used - 1, None));
        }
        let oldest = self.order.first_key_value().map(|(_, key)| *key);
        let freed = oldest.and_then(|key| Some((self.remove(&key)?, Some(key))));
        freed.ok_or_else(|| io::Error::other("a pool without slots"))
    }
}

impl Store {
    fn write(&mut self, slot: usize, key: Key, page: &[u8]) -> io::Result<()> {
        match self {
            Self::Memory(pages) => {
                if pages.len() <= slot {
                    pages.resize(slot + 1, Vec::new());
                }
                pages[slot] = page.to_vec();
                Ok(())
            }
            // The page first: a record without its page would be a promise, a page without its
            // record is only lost.
            Self::File { pages, journal } => {
                pages.write_all_at(page, (slot * page.len()) as u64)?;
                journal.write_all(&record(slot, key, check(page)))
            }
        }
    }

    fn read(&self, slot: usize, page_bytes: usize) -> io::Result<Vec<u8>> {
        match self {
            Self::Memory(pages) => Ok(pages.get(slot).cloned().unwrap_or_default()),
            Self::File { pages, .. } => {
                let mut page = vec![0; page_bytes];
                pages.read_exact_at(&mut page, (slot * page_bytes) as u64)?;
                Ok(page)
            }
        }
    }
}

/// Forgets every page of the pool in `dir`.
///
/// # Errors
/// The journal cannot be removed.
pub fn forget(dir: &Path) -> io::Result<()> {
    match std::fs::remove_file(dir.join(JOURNAL)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn check(bytes: &[u8]) -> [u8; CHECK] {
    let hash = Sha256::digest(bytes);
    let mut check = [0; CHECK];
    check.copy_from_slice(&hash[..CHECK]);
    check
}

fn header(page_bytes: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..].copy_from_slice(&(page_bytes as u64).to_le_bytes());
    header
}

fn record(slot: usize, key: Key, page: [u8; CHECK]) -> [u8; RECORD] {
    let group = match key.group {
        Group::Attention => 0,
        Group::State(group) => group.saturating_add(1),
    };
    let mut record = [0; RECORD];
    record[..4].copy_from_slice(&(slot as u32).to_le_bytes());
    record[4..12].copy_from_slice(&key.block.to_le_bytes());
    record[12..16].copy_from_slice(&group.to_le_bytes());
    record[16..24].copy_from_slice(&page);
    let own = check(&record[..24]);
    record[24..].copy_from_slice(&own);
    record
}

fn parse(record: &[u8]) -> Option<(usize, Key, [u8; CHECK])> {
    let (body, own) = record.split_at_checked(RECORD - CHECK)?;
    if own != check(body) {
        return None;
    }
    let slot = u32::from_le_bytes(body[..4].try_into().ok()?) as usize;
    let block = u64::from_le_bytes(body[4..12].try_into().ok()?);
    let group = match u32::from_le_bytes(body[12..16].try_into().ok()?) {
        0 => Group::Attention,
        group => Group::State(group - 1),
    };
    let page = body[16..24].try_into().ok()?;
    Some((slot, Key { block, group }, page))
}

/// What the journal in `dir` says and the pages bear out, in the order of filling.
fn recovered(
    dir: &Path,
    pages: &File,
    slots: usize,
    page_bytes: usize,
) -> io::Result<Vec<(usize, Key, [u8; CHECK])>> {
    let mut text = Vec::new();
    match File::open(dir.join(JOURNAL)) {
        Ok(mut journal) => journal.read_to_end(&mut text)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let Some(records) = text.strip_prefix(&header(page_bytes)) else {
        return Ok(Vec::new());
    };
    // Of a slot and of a key only the last record counts.
    let mut by_slot: HashMap<usize, usize> = HashMap::new();
    let mut by_key: HashMap<Key, usize> = HashMap::new();
    let mut said = Vec::new();
    for record in records.chunks_exact(RECORD) {
        // Whatever stands after a bad record was not written after it.
        let Some(entry) = parse(record) else { break };
        by_slot.insert(entry.0, said.len());
        by_key.insert(entry.1, said.len());
        said.push(entry);
    }
    let mut kept = Vec::new();
    let mut page = vec![0; page_bytes];
    for (at, (slot, key, expected)) in said.into_iter().enumerate() {
        let last = by_slot.get(&slot) == Some(&at) && by_key.get(&key) == Some(&at);
        if !last || slot >= slots {
            continue;
        }
        pages.read_exact_at(&mut page, (slot * page_bytes) as u64)?;
        if check(&page) == expected {
            kept.push((slot, key, expected));
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const PAGE: usize = 64;

    fn key(block: u64) -> Key {
        let group = match block % 3 {
            0 => Group::Attention,
            other => Group::State(other as u32 - 1),
        };
        Key { block, group }
    }

    fn page(block: u64, version: u8) -> Vec<u8> {
        let mut page = vec![version; PAGE];
        page[..8].copy_from_slice(&block.to_le_bytes());
        page
    }

    #[test]
    fn the_least_recently_used_goes() {
        let folder = tempfile::tempdir().unwrap();
        let file = Pool::in_file(folder.path(), 2, PAGE).unwrap();
        for pool in [Pool::in_memory(2, PAGE), file] {
            assert_eq!(pool.fill(key(1), &page(1, 0)).unwrap(), None);
            assert_eq!(pool.fill(key(2), &page(2, 0)).unwrap(), None);
            assert_eq!(pool.get(&key(1)).unwrap(), Some(page(1, 0)));
            assert_eq!(pool.fill(key(3), &page(3, 0)).unwrap(), Some(key(2)));
            assert!(pool.contains(&key(1)) && !pool.contains(&key(2)));
            assert_eq!(pool.get(&key(2)).unwrap(), None);
            assert_eq!(pool.keys(), [key(1), key(3)]);
            assert_eq!((pool.len(), pool.slots()), (2, 2));
            assert_eq!(pool.fill(key(1), &page(1, 9)).unwrap(), None);
            assert_eq!(pool.get(&key(1)).unwrap(), Some(page(1, 9)));
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let pool = Pool::in_memory(1, PAGE);
        assert!(pool.fill(key(1), &[0; 3]).is_err());
        assert!(Pool::in_memory(0, PAGE).fill(key(1), &page(1, 0)).is_err());
    }

    #[test]
    fn pages_outlive_the_pool_and_are_forgotten_on_demand() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Pool::in_file(folder.path(), 4, PAGE).unwrap();
        for round in 0..3 {
            let pool = open();
            assert_eq!(pool.len(), round);
            pool.fill(key(round as u64), &page(round as u64, 7))
                .unwrap();
        }
        assert_eq!(open().get(&key(1)).unwrap(), Some(page(1, 7)));
        assert_eq!(open().keys(), [key(0), key(1), key(2)]);
        let resized = Pool::in_file(folder.path(), 4, PAGE * 2).unwrap();
        assert!(resized.is_empty());
        drop(resized);
        open().fill(key(1), &page(1, 7)).unwrap();
        forget(folder.path()).unwrap();
        forget(folder.path()).unwrap();
        assert!(open().is_empty());
    }

    #[test]
    fn a_page_that_was_overwritten_under_its_record_is_not_given_out() {
        let folder = tempfile::tempdir().unwrap();
        let pool = Pool::in_file(folder.path(), 2, PAGE).unwrap();
        pool.fill(key(1), &page(1, 0)).unwrap();
        pool.fill(key(2), &page(2, 0)).unwrap();
        // A process killed between the page and its record leaves exactly this.
        let pages = OpenOptions::new()
            .write(true)
            .open(folder.path().join(PAGES))
            .unwrap();
        pages.write_all_at(&page(3, 0)[..PAGE / 2], 0).unwrap();
        let again = Pool::in_file(folder.path(), 2, PAGE).unwrap();
        assert_eq!(again.keys(), [key(2)]);
        assert_eq!(again.fill(key(4), &page(4, 0)).unwrap(), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(40))]
        #[test]
        fn a_journal_cut_anywhere_gives_only_what_was_stored(
            fills in prop::collection::vec((0u64..9, 0u8..4), 1..24),
            slots in 1usize..6,
            cut in 0usize..1000,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let pool = Pool::in_file(folder.path(), slots, PAGE).unwrap();
            for (block, version) in &fills {
                pool.fill(key(*block), &page(*block, *version)).unwrap();
            }
            let last: HashMap<u64, u8> = fills.iter().copied().collect();
            let live = pool.keys();
            drop(pool);
            let journal = folder.path().join(JOURNAL);
            let whole = std::fs::metadata(&journal).unwrap().len();
            let whole_pool = Pool::in_file(folder.path(), slots, PAGE).unwrap();
            prop_assert_eq!(whole_pool.keys(), live.clone());
            drop(whole_pool);
            let text = std::fs::read(&journal).unwrap();
            prop_assert!(text.len() as u64 <= whole);
            let cut = cut % (text.len() + 1);
            std::fs::write(&journal, &text[..cut]).unwrap();
            let again = Pool::in_file(folder.path(), slots, PAGE).unwrap();
            // The journal was just written anew: a record for each live key, in order.
            let records = cut.saturating_sub(HEADER) / RECORD;
            prop_assert_eq!(again.keys(), live[..records].to_vec());
            for key in again.keys() {
                let expected = page(key.block, last[&key.block]);
                prop_assert_eq!(again.get(&key).unwrap(), Some(expected));
            }
        }

        #[test]
        fn a_journal_cut_before_evictions_is_right_too(
            fills in prop::collection::vec((0u64..9, 0u8..4), 1..24),
            slots in 1usize..6,
            cut in 0usize..1000,
        ) {
            let folder = tempfile::tempdir().unwrap();
            let pool = Pool::in_file(folder.path(), slots, PAGE).unwrap();
            for (block, version) in &fills {
                pool.fill(key(*block), &page(*block, *version)).unwrap();
            }
            drop(pool);
            let journal = folder.path().join(JOURNAL);
            let text = std::fs::read(&journal).unwrap();
            let cut = cut % (text.len() + 1);
            std::fs::write(&journal, &text[..cut]).unwrap();
            let again = Pool::in_file(folder.path(), slots, PAGE).unwrap();
            for key in again.keys() {
                let page_there = again.get(&key).unwrap().unwrap();
                let stored = fills.iter().any(|(block, version)| {
                    *block == key.block && page(*block, *version) == page_there
                });
                prop_assert!(stored);
            }
        }
    }
}
