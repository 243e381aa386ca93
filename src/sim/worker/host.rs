//! The engine's own host tier: pages in a file of `/dev/shm`, as vLLM's offloading has them.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use super::lru::Lru;
use crate::sim::model::Key;

/// Pages in a file, least recently used ones evicted first. The file is removed on drop.
#[derive(Debug)]
pub struct HostTier {
    path: PathBuf,
    file: File,
    page_bytes: usize,
    slots: Mutex<Slots>,
}

#[derive(Debug)]
struct Slots {
    used: Lru<usize>,
    free: Vec<usize>,
    /// The file stays when its owner goes.
    leaked: bool,
}

impl HostTier {
    /// A tier of `bytes` in `<folder>/vllm_offload_<engine_id>.mmap`; whole pages only.
    ///
    /// # Errors
    /// The exception that the real engine dies of.
    pub fn create(
        folder: &Path,
        engine_id: &str,
        bytes: u64,
        page_bytes: usize,
    ) -> Result<Self, String> {
        let mebibytes = |bytes: u64| bytes.div_ceil(1 << 20);
        let count = usize::try_from(bytes).unwrap_or(usize::MAX) / page_bytes.max(1);
        let room = rustix::fs::statvfs(folder).map_or(0, |fs| fs.f_bavail * fs.f_frsize);
        if room < bytes {
            return Err(full(mebibytes(bytes), mebibytes(room)));
        }
        let path = folder.join(format!("vllm_offload_{engine_id}.mmap"));
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&path)
            .and_then(|file| file.set_len((count * page_bytes) as u64).map(|()| file))
            .map_err(|error| {
                format!(
                    "OSError: [Errno {}] {error}: '{}'",
                    error.raw_os_error().unwrap_or(0),
                    path.display()
                )
            })?;
        Ok(Self {
            path,
            file,
            page_bytes,
            slots: Mutex::new(Slots {
                used: Lru::new(count),
                free: (0..count).rev().collect(),
                leaked: false,
            }),
        })
    }

    /// Writes a page. Nothing happens where there is no room for any.
    ///
    /// # Errors
    /// If the file cannot be written, or the page has another size.
    pub fn put(&self, key: Key, page: &[u8]) -> io::Result<()> {
        if page.len() != self.page_bytes {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let mut slots = self.lock();
        if slots.used.get(&key).is_some() {
            return Ok(());
        }
        let Some(slot) = slots
            .free
            .pop()
            .or_else(|| slots.used.pop().map(|(_, slot)| slot))
        else {
            return Ok(());
        };
        if let Err(error) = self
            .file
            .write_all_at(page, (slot * self.page_bytes) as u64)
        {
            slots.free.push(slot);
            return Err(error);
        }
        slots.used.insert(key, slot);
        Ok(())
    }

    /// Reads a page, if it is there.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn get(&self, key: &Key) -> io::Result<Option<Vec<u8>>> {
        // The lock is held while reading: the slot must not get another page meanwhile.
        let mut slots = self.lock();
        let Some(slot) = slots.used.get(key).copied() else {
            return Ok(None);
        };
        let mut page = vec![0; self.page_bytes];
        self.file
            .read_exact_at(&mut page, (slot * self.page_bytes) as u64)?;
        Ok(Some(page))
    }

    /// Whether a page is there.
    pub fn contains(&self, key: &Key) -> bool {
        self.lock().used.contains(key)
    }

    /// Room, in pages.
    pub fn chunks(&self) -> usize {
        let slots = self.lock();
        slots.used.count() + slots.free.len()
    }

    /// Leaves the file behind.
    pub fn leak(&self) {
        self.lock().leaked = true;
    }

    /// Removes the file, unless it is to stay behind. Pages can still be read by who has them.
    pub fn close(&self) {
        let mut slots = self.lock();
        if !std::mem::replace(&mut slots.leaked, true) {
            // A sweep may have been faster.
            drop(std::fs::remove_file(&self.path));
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for HostTier {
    fn drop(&mut self) {
        self.close();
    }
}

/// What a too small `/dev/shm` is reported as, in MiB.
pub fn full(required: u64, free: u64) -> String {
    format!(
        "RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in \
         /dev/shm: {required} MiB required, {free} MiB free. Increase /dev/shm (e.g. --shm-size \
         or --ipc=host)."
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(block: u64) -> Key {
        Key::attention(block)
    }

    #[test]
    fn pages_are_in_the_file_and_the_oldest_goes_first() {
        let folder = tempfile::tempdir().unwrap();
        let tier = HostTier::create(folder.path(), "c-w0", 100, 32).unwrap();
        let path = folder.path().join("vllm_offload_c-w0.mmap");
        assert_eq!(tier.chunks(), 3);
        for block in 0..4u8 {
            tier.put(key(block.into()), &[block; 32]).unwrap();
        }
        assert!(!tier.contains(&key(0)));
        assert_eq!(tier.get(&key(3)).unwrap(), Some(vec![3; 32]));
        // What is read is what lies there, whoever wrote it.
        let bytes = std::fs::read(&path).unwrap();
        let flipped: Vec<u8> = bytes.iter().map(|byte| !byte).collect();
        std::fs::write(&path, flipped).unwrap();
        assert_eq!(tier.get(&key(3)).unwrap(), Some(vec![!3; 32]));
        drop(tier);
        assert!(!path.exists());
    }

    #[test]
    fn a_leaked_file_stays() {
        let folder = tempfile::tempdir().unwrap();
        let tier = HostTier::create(folder.path(), "c-w0", 64, 32).unwrap();
        tier.leak();
        drop(tier);
        assert!(folder.path().join("vllm_offload_c-w0.mmap").exists());
    }

    #[test]
    fn no_room_is_said_in_the_engines_words() {
        let folder = tempfile::tempdir().unwrap();
        let error = HostTier::create(folder.path(), "c-w0", u64::MAX, 32).unwrap_err();
        assert!(error.contains("Insufficient space in /dev/shm"), "{error}");
    }

    #[test]
    fn a_page_of_another_size_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let tier = HostTier::create(folder.path(), "c-w0", 64, 32).unwrap();
        assert!(tier.put(key(1), &[0; 31]).is_err());
    }
}
