//! How simulated processes find one another: files in a directory, each locked by its owner.
//!
//! The lock says who is alive, whatever the clock says; the clock of whoever looks says how long
//! a dead one stays listed. What a registration holds is [`wire`](super::wire)'s.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, flock};

use super::wire::Registration;

/// One's own registration. Withdrawn when it is dropped; a killed process leaves it behind.
#[derive(Debug)]
pub struct Registered {
    path: PathBuf,
    /// Holds the lock.
    _file: File,
}

impl Registered {
    /// Lists `registration` in `dir`, which is made if there is none.
    ///
    /// # Errors
    /// The file cannot be written or locked.
    pub fn publish(dir: &Path, registration: &Registration) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        let name = format!("{:x}.json", registration.instance_id);
        // Locked before anybody can see it: a reader that could take the lock would think that
        // its owner is dead.
        let hidden = dir.join(format!(".{name}"));
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&hidden)?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        file.write_all(&serde_json::to_vec(registration)?)?;
        let path = dir.join(name);
        std::fs::rename(&hidden, &path)?;
        Ok(Self { path, _file: file })
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // Somebody else may have removed it already.
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Reads the directory, again and again.
#[derive(Debug)]
pub struct Watch {
    dir: PathBuf,
    lease: Duration,
    /// When an owner was first seen dead.
    dead: HashMap<PathBuf, Instant>,
}

impl Watch {
    /// Of `dir`, where the dead stay listed for `lease` after they were first seen dead.
    #[must_use]
    pub fn new(dir: &Path, lease: Duration) -> Self {
        Self {
            dir: dir.to_owned(),
            lease,
            dead: HashMap::new(),
        }
    }

    /// Who is listed now, by instance id. A file whose lease is over is removed; what cannot be
    /// read is not listed.
    pub fn look(&mut self) -> Vec<Registration> {
        self.look_at(Instant::now())
    }

    fn look_at(&mut self, now: Instant) -> Vec<Registration> {
        let entries = std::fs::read_dir(&self.dir).into_iter().flatten().flatten();
        let mut listed = Vec::new();
        let mut dead = HashMap::new();
        for path in entries.map(|entry| entry.path()) {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            if name.starts_with('.') || !name.ends_with(".json") {
                continue;
            }
            let Ok((registration, alive)) = read(&path) else {
                continue;
            };
            if !alive {
                let since = self.dead.get(&path).copied().unwrap_or(now);
                if now.saturating_duration_since(since) >= self.lease {
                    let _ = std::fs::remove_file(&path);
                    continue;
                }
                dead.insert(path, since);
            }
            listed.push(registration);
        }
        self.dead = dead;
        listed.sort_by_key(|registration: &Registration| registration.instance_id);
        listed
    }
}

/// A registration, and whether its owner lives.
fn read(path: &Path) -> io::Result<(Registration, bool)> {
    let file = File::open(path)?;
    let registration = serde_json::from_reader(io::BufReader::new(&file))?;
    // Shared, so that two readers do not take each other for the owner.
    let alive = match flock(&file, FlockOperation::NonBlockingLockShared) {
        Ok(()) => false,
        Err(error) if error == rustix::io::Errno::WOULDBLOCK => true,
        Err(error) => return Err(error.into()),
    };
    Ok((registration, alive))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::sim::wire::Role;

    pub(crate) fn registration(instance_id: u64) -> Registration {
        Registration {
            instance_id,
            namespace: "dynamo".into(),
            component: "backend".into(),
            model: "tiny".into(),
            block_tokens: 8,
            max_model_len: 64,
            vocabulary: 1024,
            role: Role::Aggregated,
            request_address: "127.0.0.1:1".into(),
            events_address: None,
            control: None,
            owner: None,
        }
    }

    const LEASE: Duration = Duration::from_millis(300);

    #[test]
    fn the_living_are_listed_until_they_withdraw() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("not there yet");
        let mut watch = Watch::new(&dir, LEASE);
        assert!(watch.look().is_empty());
        let big = Registered::publish(&dir, &registration(u64::MAX)).unwrap();
        let _small = Registered::publish(&dir, &registration(7)).unwrap();
        let ids = |watch: &mut Watch| -> Vec<u64> {
            let listed = watch.look_at(Instant::now() + LEASE * 10);
            listed.iter().map(|one| one.instance_id).collect()
        };
        assert_eq!(ids(&mut watch), [7, u64::MAX]);
        assert_eq!(ids(&mut watch), [7, u64::MAX]);
        drop(big);
        assert_eq!(ids(&mut watch), [7]);
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 1);
    }

    #[test]
    fn the_dead_stay_for_a_lease() {
        let folder = tempfile::tempdir().unwrap();
        let text = serde_json::to_vec(&registration(5)).unwrap();
        std::fs::write(folder.path().join("5.json"), text).unwrap();
        let mut watch = Watch::new(folder.path(), LEASE);
        let mut other = Watch::new(folder.path(), LEASE);
        let now = Instant::now();
        assert_eq!(watch.look_at(now).len(), 1);
        let later = now + LEASE / 2;
        assert_eq!(other.look_at(later).len(), 1);
        assert_eq!(watch.look_at(later).len(), 1);
        assert!(watch.look_at(now + LEASE).is_empty());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(other.look_at(now + LEASE).is_empty());
    }

    #[test]
    fn nonsense_is_not_listed() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("1.json"), "{").unwrap();
        std::fs::write(folder.path().join("notes.txt"), "{}").unwrap();
        assert!(Watch::new(folder.path(), LEASE).look().is_empty());
    }
}
