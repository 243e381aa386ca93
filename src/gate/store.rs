//! The decisions of one run, kept where all its processes find them.
//!
//! nextest asks for the list of tests twice at once and then runs each test in a process of its
//! own, and knows only the skips of the list. So the first process that lists decides for the
//! whole run, the others read what it wrote, and a machine that has changed since is a failure:
//! a test that quietly skips itself would count as passed.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use crate::atomic;
use crate::failure::Failure;
use crate::stack::state_dir::{ELSEWHERE, StateDir};

use super::Decision;

const FILE: &str = "gates.json";
const SCHEMA: u32 = 2;

/// Runs older than this have ended.
const KEEP: Duration = Duration::from_secs(48 * 3600);

/// What was decided when the tests were listed.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Gates {
    /// Version of the document.
    pub schema: u32,
    /// The run that it belongs to.
    pub run_id: String,
    /// The profile that was chosen.
    pub profile: String,
    /// When it was decided.
    pub decided: jiff::Timestamp,
    /// By test name: `tc03::hinted_and_fresh`.
    pub decisions: BTreeMap<String, Decision>,
}

/// The decisions of run `run_id`: those that are kept, or those of `decide`, kept from now on.
/// Whoever is first wins; everybody returns the same.
pub fn of_run(
    state: &Path,
    run_id: &str,
    profile: &str,
    decide: impl FnOnce() -> BTreeMap<String, Decision>,
) -> Result<Gates, Failure> {
    // Others may have made it, where the default is below /tmp: what is in it decides what runs.
    let state = StateDir::open(state)?;
    let directory = directory(state.path(), run_id);
    let path = directory.join(FILE);
    if let Some(gates) = read(&path)? {
        return Ok(gates);
    }
    let gates = Gates {
        schema: SCHEMA,
        run_id: run_id.to_owned(),
        profile: profile.to_owned(),
        decided: jiff::Timestamp::now(),
        decisions: decide(),
    };
    let kept = write_first(&directory, &path, &gates).map_err(|error| {
        Failure::environment(format!("cannot keep the gates at {}", path.display()))
            .expected("a writable state directory")
            .found(error)
            .hint(ELSEWHERE)
    })?;
    prune(state.path());
    match kept {
        true => Ok(gates),
        false => read(&path)?.ok_or_else(|| unreadable(&path, "it was removed")),
    }
}

/// Compares what was decided for `test` with what is true now.
pub fn drift(stored: &Gates, test: &str, profile: &str, now: &Decision) -> Option<Failure> {
    if stored.profile != profile {
        let what = format!("gate drift: {test} was listed with another profile");
        return Some(
            Failure::environment(what)
                .expected(format!("{} (decided {})", stored.profile, stored.decided))
                .found(profile)
                .hint("name one: PHASE1_PROFILE, or --profile; an environment came or went during the run"),
        );
    }
    let then = stored.decisions.get(test);
    let same = match (then, now) {
        (Some(Decision::Runnable), Decision::Runnable) => true,
        // Free bytes and the like may differ; what is missing may not.
        (Some(Decision::Gated { need: then, .. }), Decision::Gated { need: now, .. }) => {
            then == now
        }
        _ => false,
    };
    if same {
        return None;
    }
    let then = then.map_or_else(|| "not listed".to_owned(), ToString::to_string);
    Some(
        Failure::environment(format!("gate drift: {test} is not what it was when listed"))
            .expected(format!("{then} (decided {})", stored.decided))
            .found(now)
            .hint("find what changed on the machine during the run, and run it again"),
    )
}

fn directory(state: &Path, run_id: &str) -> PathBuf {
    // `config` made a name of the id: it is never a path.
    state.join("runs").join(format!("run-{run_id}"))
}

fn read(path: &Path) -> Result<Option<Gates>, Failure> {
    let text = match std::fs::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(path, &error.to_string())),
    };
    let gates: Gates =
        serde_json::from_slice(&text).map_err(|error| unreadable(path, &error.to_string()))?;
    match gates.schema {
        SCHEMA => Ok(Some(gates)),
        other => Err(unreadable(path, &format!("schema {other}"))),
    }
}

fn unreadable(path: &Path, why: &str) -> Failure {
    Failure::environment(format!("cannot read the gates at {}", path.display()))
        .expected(format!("schema {SCHEMA}"))
        .found(why)
        .hint("remove that file, and start the run again")
}

/// Keeps them, unless somebody else was faster: `false`.
fn write_first(directory: &Path, path: &Path, gates: &Gates) -> io::Result<bool> {
    std::fs::create_dir_all(directory)?;
    atomic::create(path, &atomic::json(gates)?)
}

fn prune(state: &Path) {
    let now = SystemTime::now();
    for entry in state
        .join("runs")
        .read_dir()
        .into_iter()
        .flatten()
        .flatten()
    {
        let ours = entry.file_name().to_string_lossy().starts_with("run-");
        let age = entry
            .metadata()
            .and_then(|found| found.modified())
            .ok()
            .and_then(|made| now.duration_since(made).ok());
        if ours && age.is_some_and(|age| age > KEEP) {
            let _ = std::fs::remove_dir_all(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gated(need: &str, found: &str) -> Decision {
        Decision::Gated {
            need: need.to_owned(),
            found: found.to_owned(),
            hint: "h".to_owned(),
        }
    }

    fn one(decision: Decision) -> BTreeMap<String, Decision> {
        BTreeMap::from([("tc01::cold".to_owned(), decision)])
    }

    #[test]
    fn the_first_decides_for_all() {
        let state = tempfile::tempdir().unwrap();
        let answers: Vec<Gates> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8)
                .map(|number| {
                    let decision = gated("n", &number.to_string());
                    let state = state.path();
                    scope.spawn(move || of_run(state, "a-b", "cpu", || one(decision)).unwrap())
                })
                .collect();
            threads.into_iter().map(|it| it.join().unwrap()).collect()
        });
        assert!(answers.iter().all(|gates| *gates == answers[0]));
        let other = of_run(state.path(), "other", "cpu", || one(Decision::Runnable)).unwrap();
        assert_ne!(other, answers[0]);
        let directory = state.path().join("runs/run-a-b");
        assert_eq!(
            directory.read_dir().unwrap().count(),
            1,
            "no temporary files"
        );
    }

    #[test]
    fn a_directory_that_is_not_ours_decides_nothing() {
        let place = tempfile::tempdir().unwrap();
        let link = place.path().join("link");
        std::os::unix::fs::symlink(place.path(), &link).unwrap();
        let text = of_run(&link, "r", "cpu", BTreeMap::new)
            .unwrap_err()
            .to_string();
        assert!(text.contains("cannot be trusted"), "{text}");
        assert!(text.contains("--state-dir"), "{text}");
    }

    #[test]
    fn what_cannot_be_read_is_a_failure_not_a_new_decision() {
        let state = tempfile::tempdir().unwrap();
        of_run(state.path(), "r", "cpu", BTreeMap::new).unwrap();
        let path = state.path().join("runs/run-r").join(FILE);
        std::fs::write(&path, "{").unwrap();
        let text = of_run(state.path(), "r", "cpu", BTreeMap::new)
            .unwrap_err()
            .to_string();
        assert!(text.contains("cannot read the gates"), "{text}");
        let blocked = state.path().join("file");
        std::fs::write(&blocked, "").unwrap();
        assert!(of_run(&blocked, "r", "cpu", BTreeMap::new).is_err());
    }

    #[test]
    fn drift_is_a_change_of_the_decision_not_of_a_number() {
        let state = tempfile::tempdir().unwrap();
        let run = |id: &str, then: Decision, now: &Decision| {
            let gates = of_run(state.path(), id, "cpu", || one(then)).unwrap();
            drift(&gates, "tc01::cold", "cpu", now).map(|failure| failure.to_string())
        };
        assert_eq!(run("1", Decision::Runnable, &Decision::Runnable), None);
        assert_eq!(run("2", gated("x", "1"), &gated("x", "2")), None);
        assert!(run("3", gated("x", "1"), &gated("y", "1")).is_some());
        assert!(run("4", gated("x", "1"), &Decision::Runnable).is_some());
        let text = run("5", Decision::Runnable, &gated("etcd", "none")).unwrap();
        assert!(
            text.starts_with("Environment: gate drift: tc01::cold"),
            "{text}"
        );
        assert!(text.contains("expected runnable (decided "), "{text}");
        assert!(text.contains("found needs etcd; found none"), "{text}");
        let gates = of_run(state.path(), "6", "cpu", BTreeMap::new).unwrap();
        assert!(drift(&gates, "tc09", "cpu", &Decision::Runnable).is_some());
    }

    #[test]
    fn another_profile_than_was_listed_is_drift() {
        let state = tempfile::tempdir().unwrap();
        let gates = of_run(state.path(), "r", "sim", || one(Decision::Runnable)).unwrap();
        assert_eq!(
            drift(&gates, "tc01::cold", "sim", &Decision::Runnable),
            None
        );
        let failure = drift(&gates, "tc01::cold", "cpu", &Decision::Runnable).unwrap();
        let text = failure.to_string();
        assert!(
            text.contains("listed with another profile; expected sim (decided "),
            "{text}"
        );
        assert!(text.contains("found cpu"), "{text}");
    }

    #[test]
    fn old_runs_are_forgotten() {
        let state = tempfile::tempdir().unwrap();
        of_run(state.path(), "old", "cpu", BTreeMap::new).unwrap();
        let old = state.path().join("runs/run-old");
        let long_ago = SystemTime::now() - KEEP - Duration::from_secs(60);
        std::fs::File::open(&old)
            .unwrap()
            .set_modified(long_ago)
            .unwrap();
        of_run(state.path(), "new", "cpu", BTreeMap::new).unwrap();
        assert!(!old.exists());
        assert!(state.path().join("runs/run-new").exists());
    }
}
