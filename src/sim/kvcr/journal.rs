//! The journal of a pool in a file: which slot holds which key, in the order of filling.
//!
//! A record carries a check over itself and one over the page, so whatever was torn or is not
//! true any more is found out when the journal is read.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::FileExt;
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::sim::model::{Group, Key};

/// Its file in the pool's directory.
pub(super) const JOURNAL: &str = "journal";

const CHECK: usize = 8;
/// Slot, block, group, check of the page, check of the record.
pub(super) const RECORD: usize = 4 + 8 + 4 + CHECK + CHECK;
/// What a journal begins with: a word of ours and the size of a page.
pub(super) const HEADER: usize = 16;
const MAGIC: &[u8; 8] = b"kvcrsim1";

pub(super) fn check(bytes: &[u8]) -> [u8; CHECK] {
    let hash = Sha256::digest(bytes);
    let mut check = [0; CHECK];
    check.copy_from_slice(&hash[..CHECK]);
    check
}

pub(super) fn header(page_bytes: usize) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8..].copy_from_slice(&(page_bytes as u64).to_le_bytes());
    header
}

pub(super) fn record(slot: usize, key: Key, page: [u8; CHECK]) -> [u8; RECORD] {
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
pub(super) fn recovered(
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
