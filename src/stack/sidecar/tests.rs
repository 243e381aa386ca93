//! Against listeners of this process: who is there, who is not, and who is somebody else.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;

use super::*;
use crate::failure::Class;

const SHORT: Duration = Duration::from_millis(300);

/// A directory of a test, its own in `/dev/shm` beside it.
struct Place {
    folder: tempfile::TempDir,
    shm: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
            shm: tempfile::tempdir_in("/dev/shm").unwrap(),
        }
    }

    fn external(&self) -> External {
        let path = |name: &str| self.folder.path().join(name);
        External {
            name: "service0".into(),
            worker: "worker0".into(),
            socket: path("s.sock"),
            log: path("s.log"),
            pool_dir: self.shm.path().to_owned(),
            pool_bytes: 4096,
            digest: "abc".into(),
            control_port: "worker0-control".into(),
        }
    }

    /// A pool that somebody holds, and a log.
    fn pool(&self, bytes: u64) -> File {
        let pool = File::create(self.shm.path().join("kvcr-pool_0-00")).unwrap();
        pool.set_len(bytes).unwrap();
        flock(&pool, FlockOperation::NonBlockingLockShared).unwrap();
        fs::write(self.external().log, "INFO:__main__:KVCR service ready\n").unwrap();
        pool
    }

    /// Somebody who answers every question with these bytes.
    fn answers(&self, bytes: Vec<u8>) {
        let listener = UnixListener::bind(self.external().socket).unwrap();
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let _ = stream.read(&mut [0; 4096]);
                let _ = stream.write_all(&bytes);
            }
        });
    }

    fn refuses(&self, words: &str) {
        self.answers(claim::refusal(words.to_owned()));
    }
}

async fn awaited(external: External) -> Result<Vec<Sidecar>, Failure> {
    await_all(vec![external], SHORT, &|_| {}).await
}

#[track_caller]
fn environment(found: Result<Vec<Sidecar>, Failure>, words: &[&str]) {
    let failure = found.unwrap_err();
    assert_eq!(failure.class, Class::Environment, "{failure}");
    for word in words {
        assert!(failure.to_string().contains(word), "no {word:?}: {failure}");
    }
}

const FREE: &str = "KVCR Guard 0 control listener 192.0.2.1:9 is unavailable: [Errno 99]";

#[tokio::test]
async fn a_free_pool_may_be_claimed_and_one_that_was_claimed_says_where() {
    let place = Place::new();
    let _pool = place.pool(4096);
    place.refuses(FREE);
    let found = awaited(place.external()).await.unwrap();
    assert_eq!(found[0].control, None);
    let other = Place::new();
    let _pool = other.pool(4096);
    other.refuses("KVCR Guard 0 answers on 127.0.0.1:21290 and cannot be moved to 192.0.2.1:9");
    let found = awaited(other.external()).await.unwrap();
    assert_eq!(found[0].control, Some(21290));
}

#[tokio::test]
async fn a_file_is_no_service_and_nobody_waits_for_ever() {
    let place = Place::new();
    let socket: PathBuf = place.external().socket;
    environment(awaited(place.external()).await, &["there is no socket"]);
    fs::write(&socket, "").unwrap();
    environment(awaited(place.external()).await, &["is no socket"]);
    fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    environment(
        awaited(place.external()).await,
        &["does not answer a claim"],
    );
    drop(listener);
    environment(
        awaited(place.external()).await,
        &["nobody listens", "left behind"],
    );
    let nowhere = External {
        socket: "/nonexistent/s.sock".into(),
        ..place.external()
    };
    environment(awaited(nowhere).await, &["no directory /nonexistent"]);
}

#[tokio::test]
async fn each_refusal_is_said_for_what_it_is() {
    for (words, said) in [
        (
            "KVCR compatibility digest does not match the service",
            "started for another stack",
        ),
        (
            "worker pidfd does not match socket peer",
            "cannot watch our processes",
        ),
        (
            "KVCR Guard 0 is held by another worker",
            "a living worker has its pool",
        ),
        (
            "KVCR Guard 0 answers on 10.0.0.9:4 and cannot be moved to 192.0.2.1:9",
            "another address",
        ),
        (
            "internal KVCR service error",
            "no kvcr_service that we know",
        ),
    ] {
        let place = Place::new();
        let _pool = place.pool(4096);
        place.refuses(words);
        environment(awaited(place.external()).await, &["service0", said]);
    }
    let place = Place::new();
    place.answers(b"HTTP/1.1 400 Bad Request\r\n\r\n".to_vec());
    environment(
        awaited(place.external()).await,
        &["no kvcr_service that we know"],
    );
    let silent = Place::new();
    silent.answers(Vec::new());
    environment(awaited(silent.external()).await, &["hung up on a claim"]);
}

#[tokio::test]
async fn what_a_claim_needs_beside_the_answer_is_looked_at() {
    let place = Place::new();
    place.refuses(FREE);
    environment(
        awaited(place.external()).await,
        &["pool cannot be seen", "none there", "same /dev/shm"],
    );
    let pool = place.pool(2048);
    environment(
        awaited(place.external()).await,
        &["its pool is too small", "2048 bytes"],
    );
    pool.set_len(4096).unwrap();
    fs::remove_file(place.external().log).unwrap();
    environment(
        awaited(place.external()).await,
        &["its log cannot be read", "s.log"],
    );
    drop(pool);
    environment(awaited(place.external()).await, &["which nobody uses"]);
    let unshared = External {
        pool_dir: "/dev/shm/kvcr-phase1-nobody-has-this".into(),
        ..place.external()
    };
    environment(awaited(unshared).await, &["pool cannot be seen"]);
}

#[test]
fn only_the_same_user_or_root_may_open_a_pool() {
    let external = Place::new().external();
    assert_eq!(wrong_user(&external, 7, 7), None);
    assert_eq!(wrong_user(&external, 7, 0), None);
    let text = wrong_user(&external, 0, 7).unwrap().to_string();
    assert!(text.contains("belongs to another user"), "{text}");
}

#[tokio::test]
async fn a_log_without_the_lines_of_a_claim_is_said() {
    let place = Place::new();
    let _pool = place.pool(4096);
    place.refuses(FREE);
    let lines = "DEBUG:kvcr.guard:KVCR_EVENT primary_attached guard=0 pool=pool_0 control=a\n";
    let log = place.external().log;
    // Of an earlier stack: it does not count.
    fs::write(&log, lines).unwrap();
    let (stream, who) = connect(&place.external().socket).await.unwrap();
    drop(stream);
    let sidecars = [Sidecar {
        external: place.external(),
        control: None,
        who,
        log: Mark::now(&log),
    }];
    let failure = attached_within(SHORT, &sidecars, &|_| {})
        .await
        .unwrap_err();
    assert_eq!(failure.class, Class::Environment);
    assert!(
        failure.to_string().contains("--log-level DEBUG"),
        "{failure}"
    );
    let handed = "DEBUG:kvcr.guard:KVCR_EVENT guard_promotion_stage stage=handback_done\n";
    fs::write(&log, [lines, handed, lines].concat()).unwrap();
    let said = std::sync::Mutex::new(Vec::new());
    attached_within(SHORT, &sidecars, &|text| said.lock().unwrap().push(text))
        .await
        .unwrap();
    assert!(said.lock().unwrap()[0].contains("an earlier stack"));
    fs::write(&log, "").unwrap();
    let failure = attached_within(SHORT, &sidecars, &|_| {})
        .await
        .unwrap_err()
        .to_string();
    assert!(failure.contains("truncated"), "{failure}");
}

#[tokio::test]
async fn whoever_ends_is_lost_and_a_guard_that_failed_is_the_products() {
    for (line, class) in [
        ("", Class::Environment),
        ("CRITICAL:kvcr.guard:KVCR Guard 0 failed\n", Class::Product),
    ] {
        let place = Place::new();
        let external = place.external();
        let listener = UnixListener::bind(&external.socket).unwrap();
        fs::write(&external.log, "").unwrap();
        let (stream, who) = connect(&external.socket).await.unwrap();
        drop(stream);
        let sidecar = Sidecar {
            log: Mark::now(&external.log),
            external: external.clone(),
            control: None,
            who,
        };
        let mut lost = watch(&[sidecar]);
        fs::write(&external.log, line).unwrap();
        drop(listener);
        let failure = lost.join_next().await.unwrap().unwrap();
        assert_eq!(failure.class, class, "{failure}");
        assert!(failure.to_string().contains("service0"), "{failure}");
    }
}
