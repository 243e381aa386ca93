//! What the shared stack promises, one function a promise.

use std::collections::BTreeSet;
use std::fs;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use kvcr_phase1::failure::{Class, Failure};
use kvcr_phase1::stack::admin::{self, Outcome};
use kvcr_phase1::stack::deaths::Living;
use kvcr_phase1::stack::lease::{Lease, LeaseRequest, Progress, acquire};
use kvcr_phase1::stack::protocol::{Mode, WorkerInfo};
use rustix::process::Signal;

use crate::toy::{Manners, Toys, shm_prefix};
use crate::world::{World, eventually, get, identity_in, kill};

macro_rules! promises {
    ($($name:ident),* $(,)?) => {
        pub(crate) const ALL: &[(&str, fn())] = &[$((stringify!($name), $name)),*];
    };
}

promises![
    sixteen_processes_at_once_make_one_stack,
    everything_starts_side_by_side,
    a_lease_ends_with_its_process,
    a_killed_supervisor_is_swept_and_strangers_are_not,
    a_killed_worker_breaks_the_lease_and_the_next_one_works,
    a_failed_bring_up_is_remembered_for_the_run_only,
    shared_side_by_side_exclusive_alone_first_come_first_served,
    a_stack_stays_warm_and_stops_when_idle,
    without_keep_the_stack_goes_with_its_last_lease,
    a_leased_device_is_busy_and_an_idle_one_is_given_up,
    a_device_is_taken_over_from_a_killed_supervisor,
    a_stubborn_process_is_killed,
    a_life_is_limited,
    a_stack_that_is_put_down_ends_its_runs,
    a_death_is_heard_of_before_it_is_judged,
    down_and_status_tell_the_truth,
    down_cleans_up_after_a_dead_supervisor,
    nothing_inherits_our_pipes,
    the_environment_is_the_plans,
    a_bad_state_directory_is_said_in_one_sentence,
    a_taken_port_names_its_owner,
    the_reference_engine_comes_and_goes,
    a_failed_reference_is_remembered,
    waiting_for_the_reference_can_be_given_up,
    a_stack_that_does_not_fit_into_shared_memory_starts_nothing,
    bring_up_goes_on_when_the_last_client_leaves,
    a_bad_line_ends_only_its_own_connection,
    sigterm_stops_everything,
    a_supervisor_that_cannot_start_is_reported,
    a_log_that_is_too_large_is_begun_anew,
    what_is_in_the_way_of_the_socket_is_said_and_left_alone,
];

/// What an arm does with its lease, in a runtime of its own.
pub(crate) fn run<T>(work: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    runtime.block_on(work)
}

fn reference(lease: &Lease) -> Result<(WorkerInfo, u64), Failure> {
    run(lease.reference())
}

fn one() -> Toys {
    Toys::default().with("worker0", Manners::default())
}

fn sixteen_processes_at_once_make_one_stack() {
    let world = World::new(&one());
    let mut clients: Vec<_> = (0..16)
        .map(|i| world.client(&format!("case{i}"), Mode::Shared))
        .collect();
    let generations: BTreeSet<String> = clients
        .iter_mut()
        .map(|client| client.until("granted"))
        .collect();
    assert_eq!(generations, BTreeSet::from(["granted 1".to_owned()]));
    let status = world.status().unwrap();
    assert_eq!((status.leases.len(), status.generation), (16, 1));
    assert_eq!(
        world.log().matches("supervisor ").count(),
        1,
        "{}",
        world.log()
    );
}

fn everything_starts_side_by_side() {
    let slow = |ms| Manners {
        delay_ms: ms,
        ..Manners::default()
    };
    let toys = Toys::default()
        .with("worker0", slow(4000))
        .with("worker1", slow(4000))
        .with("worker2", slow(1000))
        .with("late", slow(0))
        .after("worker2");
    let world = World::new(&toys);
    let lease = world.lease();
    let stack = lease.stack();
    let slowest = stack
        .workers
        .iter()
        .map(|worker| worker.probes_ms)
        .max()
        .unwrap();
    assert!(
        stack.bring_up_ms <= slowest * 5 / 4,
        "{} against {slowest}",
        stack.bring_up_ms
    );
    let started = |name: &str| {
        stack
            .steps
            .iter()
            .position(|(text, _)| text.starts_with(name))
            .unwrap()
    };
    assert!(
        started("late: started") > started("worker2: probes hold"),
        "{:?}",
        stack.steps
    );
    assert!(stack.started_for_this_lease);
    assert!(!world.lease().stack().started_for_this_lease);
}

fn a_lease_ends_with_its_process() {
    let world = World::new(&one());
    let mut holder = world.client("holder", Mode::Exclusive);
    holder.until("granted");
    let mut next = world.client("next", Mode::Exclusive);
    assert_eq!(next.until("queued"), "queued holder");
    holder.kill();
    next.until("granted");
}

fn a_killed_supervisor_is_swept_and_strangers_are_not() {
    let files = tempfile::tempdir().unwrap();
    let grandchild_file = files.path().join("grandchild");
    let unnamed = format!("toy-{}", uuid::Uuid::new_v4().simple());
    let toys = Toys::default()
        .with(
            "worker0",
            Manners {
                grandchild: Some(grandchild_file.clone()),
                shm: Some("{}pool".to_owned()),
                ..Manners::default()
            },
        )
        .with(
            "worker1",
            Manners {
                // Not the plan's prefix: only the inventory knows it.
                shm: Some(unnamed.clone()),
                ..Manners::default()
            },
        );
    let world = World::new(&toys);
    let lease = world.lease();
    let grandchild = identity_in(&grandchild_file);
    let cookie = format!("{}:1", world.spec.fingerprint);
    let ours = [
        Path::new("/dev/shm").join(format!("{}pool", shm_prefix(&cookie))),
        Path::new("/dev/shm").join(unnamed),
    ];
    assert!(ours[0].exists());
    let old_file = fs::metadata(&ours[1]).unwrap().ino();
    // Strangers: one that has nothing of ours, one that has another stack's cookie, one whose
    // stack has our fingerprint in another state directory.
    let stranger = |stack: &str, home: &str| {
        Command::new("sleep")
            .arg("1000")
            .env("KVCR_PHASE1_STACK", stack)
            .env("KVCR_PHASE1_STATE", home)
            .spawn()
            .unwrap()
    };
    let home = world.dir().path().display().to_string();
    let mut strangers = [
        stranger("", ""),
        stranger(&format!("{}0:1", world.spec.fingerprint), &home),
        stranger(&cookie, "/elsewhere"),
    ];
    let strange_file = tempfile::Builder::new()
        .prefix("stranger-")
        .tempfile_in("/dev/shm")
        .unwrap()
        .into_temp_path();

    kill(world.status().unwrap().supervisor_pid);
    eventually("the lease is broken", || lease.broken().is_some());
    assert_eq!(lease.broken().unwrap().class, Class::Inconclusive);
    assert!(grandchild.is_alive(), "a death signal does not reach it");

    let again = world.lease();
    assert_eq!(again.stack().generation, 2);
    assert!(!grandchild.is_alive());
    assert!(!ours[0].exists());
    // The new worker made a file of that name again: a new one, so the old one was removed.
    assert_ne!(fs::metadata(&ours[1]).unwrap().ino(), old_file);
    assert!(strange_file.exists());
    for stranger in &mut strangers {
        assert!(
            stranger.try_wait().unwrap().is_none(),
            "a stranger was killed"
        );
        stranger.kill().unwrap();
        stranger.wait().unwrap();
    }
}

fn a_killed_worker_breaks_the_lease_and_the_next_one_works() {
    let toys = one().with("worker1", Manners::default());
    let world = World::new(&toys);
    let lease = world.lease();
    kill(lease.stack().processes[1].pid);
    eventually("the lease is broken", || lease.broken().is_some());
    let failure = lease.broken().unwrap();
    assert_eq!(failure.class, Class::Environment);
    assert!(
        failure
            .what
            .contains("worker1 was killed by signal 9 from outside"),
        "{failure}"
    );
    world.until_nothing_is_left();
    assert_eq!(world.lease().stack().generation, 2);
}

fn a_failed_bring_up_is_remembered_for_the_run_only() {
    let files = tempfile::tempdir().unwrap();
    let broken = files.path().join("broken");
    fs::write(&broken, "").unwrap();
    let toys = one().with(
        "worker1",
        Manners {
            fails_while: Some(broken.clone()),
            ..Manners::default()
        },
    );
    let world = World::new(&toys);
    let lease = |case: &str, run: &str| world.try_lease(case, run, Mode::Shared);
    let first = lease("case1", "run1").unwrap_err();
    assert!(
        first
            .to_string()
            .contains("exit code 3; first cause: toy: ImportError"),
        "{first}"
    );
    assert!(
        world.leftovers().processes().is_empty(),
        "all is stopped when the failure is told"
    );
    let second = lease("case2", "run1").unwrap_err();
    assert_eq!(first, second);
    let failed = world.status().unwrap();
    assert_eq!(
        (failed.state.as_str(), failed.failure),
        ("failed", Some(first.clone()))
    );
    // The cause is gone, but the run has its answer.
    fs::remove_file(&broken).unwrap();
    assert_eq!(lease("case3", "run1").unwrap_err(), first);
    assert_eq!(world.log().matches("generation 1").count(), 1);
    let retried = lease("case1", "run2").unwrap();
    assert_eq!(retried.stack().generation, 2);
}

fn shared_side_by_side_exclusive_alone_first_come_first_served() {
    let world = World::new(&one());
    let line = |cases: Vec<String>| -> Vec<String> {
        cases
            .iter()
            .map(|text| text.split(' ').next().unwrap().to_owned())
            .collect()
    };
    let check = |held: &[&str], waiting: &[&str]| {
        let status = world.status().unwrap();
        assert_eq!(
            (line(status.leases), line(status.queued)),
            (
                held.iter().map(|s| (*s).to_owned()).collect(),
                waiting.iter().map(|s| (*s).to_owned()).collect()
            )
        );
    };
    let mut one = world.client("s1", Mode::Shared);
    one.until("granted");
    let mut two = world.client("s2", Mode::Shared);
    two.until("granted");
    let mut alone = world.client("x1", Mode::Exclusive);
    assert_eq!(alone.until("queued"), "queued s1,s2");
    let mut late = world.client("s3", Mode::Shared);
    late.until("queued");
    let mut last = world.client("x2", Mode::Exclusive);
    last.until("queued");
    check(&["s1", "s2"], &["x1", "s3", "x2"]);
    one.kill();
    two.kill();
    alone.until("granted");
    check(&["x1"], &["s3", "x2"]);
    alone.kill();
    late.until("granted");
    check(&["s3"], &["x2"]);
    late.kill();
    last.until("granted");
    check(&["x2"], &[]);
}

fn a_stack_stays_warm_and_stops_when_idle() {
    let mut world = World::new(&one());
    world.spec.keep_seconds = 2;
    let first = world.lease();
    assert_eq!((first.stack().generation, first.stack().variant), (1, 0));
    drop(first);
    let second = world.lease();
    assert_eq!(
        (second.stack().generation, second.stack().variant),
        (1, 1),
        "warm, and said to be"
    );
    drop(second);
    world.until_nothing_is_left();
    assert!(world.log().contains("exit: nobody needs the stack"));
    assert!(world.status().is_none());
    assert!(!world.dir().socket().exists());
    assert_eq!(world.lease().stack().generation, 2);
}

fn without_keep_the_stack_goes_with_its_last_lease() {
    let mut world = World::new(&one());
    world.spec.keep_seconds = 0;
    drop(world.lease());
    world.until_nothing_is_left();
    drop(world.lease());
    world.until_nothing_is_left();
}

fn a_leased_device_is_busy_and_an_idle_one_is_given_up() {
    let mut here = World::new(&one());
    here.spec.devices = vec!["GPU-1".to_owned(), "GPU-0".to_owned()];
    let mut there = World::beside(&here, &one());
    there.spec.devices = vec!["GPU-0".to_owned()];
    let lease = here.try_lease("tc01::cold", "run", Mode::Shared).unwrap();
    let busy = there.try_lease("other", "run", Mode::Shared).unwrap_err();
    assert_eq!(busy.class, Class::Environment);
    let text = busy.to_string();
    assert!(
        text.contains("GPU-0") && text.contains("tc01::cold") && text.contains(&here.spec.profile),
        "{text}"
    );
    assert!(lease.broken().is_none(), "the holder was not disturbed");
    drop(lease);
    let taken = there.try_lease("other", "run", Mode::Shared).unwrap();
    here.until_nothing_is_left();
    let back = here
        .try_lease("tc01::cold", "run", Mode::Shared)
        .unwrap_err();
    assert!(back.to_string().contains("other"), "{back}");
    drop(taken);
}

fn a_device_is_taken_over_from_a_killed_supervisor() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("grandchild");
    let toys = Toys::default().with(
        "worker0",
        Manners {
            grandchild: Some(file.clone()),
            ..Manners::default()
        },
    );
    let mut here = World::new(&toys);
    here.spec.devices = vec!["GPU-0".to_owned()];
    let mut there = World::beside(&here, &one());
    there.spec.devices = here.spec.devices.clone();
    let _lease = here.lease();
    let grandchild = identity_in(&file);
    kill(here.status().unwrap().supervisor_pid);
    let _taken = there.lease();
    assert!(
        !grandchild.is_alive(),
        "it could still have held the device"
    );
    here.until_nothing_is_left();
}

fn a_life_is_limited() {
    let mut world = World::new(&one());
    world.spec.max_lifetime_seconds = 5;
    let lease = world.lease();
    eventually("the lease is broken", || lease.broken().is_some());
    assert!(lease.broken().unwrap().to_string().contains("max_lifetime"));
    world.until_nothing_is_left();
}

fn a_stubborn_process_is_killed() {
    let toys = Toys::default()
        .with(
            "worker0",
            Manners {
                stubborn: true,
                ..Manners::default()
            },
        )
        .stop_seconds(1);
    let world = World::new(&toys);
    drop(world.lease());
    let downed = admin::down(&world.spec.state_dir, None, false).unwrap();
    assert_eq!(downed[0].outcome, Outcome::Stopped);
    world.until_nothing_is_left();
}

fn down_and_status_tell_the_truth() {
    let world = World::new(&one());
    assert!(world.status().is_none());
    let lease = world.lease();
    let status = world.status().unwrap();
    assert_eq!(status.state, "ready");
    assert_eq!(status.processes, lease.stack().processes);
    assert_eq!(
        status.frontend_url.as_ref(),
        Some(&lease.stack().plan.frontend_url)
    );
    assert_eq!(status.idle_stop_in_seconds, None);
    let down = |force| {
        admin::down(&world.spec.state_dir, None, force)
            .unwrap()
            .remove(0)
            .outcome
    };
    assert!(matches!(down(false), Outcome::Busy { holder } if holder.contains("case")));
    assert!(lease.broken().is_none());
    assert_eq!(down(true), Outcome::Stopped);
    assert_eq!(lease.broken().unwrap().class, Class::Inconclusive);
    assert!(world.status().is_none());
    assert_eq!(down(false), Outcome::Nothing);
    world.until_nothing_is_left();
}

fn a_stack_that_is_put_down_ends_its_runs() {
    let world = World::new(&one());
    let held = world.try_lease("first", "run", Mode::Exclusive).unwrap();
    let mut waiting = world.client("second", Mode::Exclusive);
    waiting.until("queued");
    let downed = admin::down(&world.spec.state_dir, None, true).unwrap();
    assert_eq!(downed[0].outcome, Outcome::Stopped);
    // Neither who held it, nor who waited, nor the run's next arm brings it up again.
    assert_eq!(held.broken().unwrap().class, Class::Inconclusive);
    let said = waiting.until("failed");
    assert!(said.contains("stopped under this run"), "{said}");
    let next = world.try_lease("third", "run", Mode::Shared).unwrap_err();
    assert_eq!(next.class, Class::Inconclusive);
    assert!(next.to_string().contains("earlier in this run"), "{next}");
    assert!(world.status().is_none());
    // Another run may.
    let other = world.try_lease("first", "another", Mode::Shared).unwrap();
    assert_eq!(other.stack().generation, 2);
}

fn a_death_is_heard_of_before_it_is_judged() {
    let world = World::new(&one());
    let lease = world.lease();
    let living = Living::of(&lease);
    assert_eq!(living.broken(&lease), None);
    kill(lease.stack().processes[0].pid);
    let failure = living.broken(&lease).unwrap();
    assert!(failure.to_string().contains("worker0"), "{failure}");
}

fn down_cleans_up_after_a_dead_supervisor() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("grandchild");
    let toys = Toys::default().with(
        "worker0",
        Manners {
            grandchild: Some(file.clone()),
            ..Manners::default()
        },
    );
    let world = World::new(&toys);
    let _lease = world.lease();
    let grandchild = identity_in(&file);
    kill(world.status().unwrap().supervisor_pid);
    eventually("the lock is free", || {
        world.dir().try_lock().unwrap().is_some()
    });
    // The cookie alone is enough.
    fs::remove_file(world.dir().generation(1).join("inventory.json")).unwrap();
    assert_eq!(world.status().unwrap().state, "dead");
    let outcome = admin::down(&world.spec.state_dir, None, false)
        .unwrap()
        .remove(0)
        .outcome;
    assert!(matches!(outcome, Outcome::Swept(swept) if swept.processes >= 1));
    assert!(!grandchild.is_alive());
    world.until_nothing_is_left();
}

fn nothing_inherits_our_pipes() {
    let world = World::new(&one());
    // As a careless shell: standard output once more, under a number nobody knows of.
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", "exec 7>&1; exec \"$@\"", "sh"])
        .arg(&world.spec.exe);
    let mut client = world.client_by(shell, "case", Mode::Shared);
    client.until("granted");
    client.kill();
    // EOF, although the supervisor and its toys live.
    let reader = thread::spawn(move || client.lines.next().is_none());
    eventually("the pipe ends", || reader.is_finished());
    assert!(reader.join().unwrap());
    assert_eq!(world.status().unwrap().state, "ready");
}

fn the_environment_is_the_plans() {
    let world = World::new(&one());
    let mut command = Command::new(&world.spec.exe);
    command
        .env("CARGO_TOY", "leaked")
        .env("LD_LIBRARY_PATH", "/leaked")
        .env("NEXTEST_RUN_ID", "leaked")
        .env("RUNNER_TRACKING_ID", "on purpose");
    let mut client = world.client_by(command, "case", Mode::Shared);
    client.until("granted");
    let environment = get(&world.status().unwrap().frontend_url.unwrap());
    assert!(
        !environment.contains("leaked") && !environment.contains("CARGO"),
        "{environment}"
    );
    assert!(environment.contains("TOY=worker0\n"));
    assert!(environment.contains("RUNNER_TRACKING_ID=on purpose\n"));
    assert!(environment.contains(&format!("KVCR_PHASE1_STACK={}:1\n", world.spec.fingerprint)));
}

fn a_bad_state_directory_is_said_in_one_sentence() {
    let mut world = World::new(&one());
    let good = world.spec.state_dir.clone();
    world.spec.state_dir = world.files.path().join("x".repeat(100));
    let long = world.try_lease("case", "run", Mode::Shared).unwrap_err();
    assert_eq!(long.class, Class::Environment);
    assert!(
        long.to_string().contains("too long for a unix socket"),
        "{long}"
    );
    let file = world.file("file");
    fs::write(&file, "").unwrap();
    // Not even root writes below a file, or into a kernel's directory.
    for bad in [file.join("below"), file, "/proc/phase1".into()] {
        world.spec.state_dir = bad;
        let failure = world.try_lease("case", "run", Mode::Shared).unwrap_err();
        assert_eq!(failure.class, Class::Environment, "{failure}");
        assert!(failure.hint.is_some(), "{failure}");
    }
    world.spec.state_dir = good;
}

fn a_taken_port_names_its_owner() {
    let squatter = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = squatter.local_addr().unwrap().port();
    let mut toys = one();
    toys.fixed = vec![("worker0".to_owned(), port)];
    let world = World::new(&toys);
    let failure = world.try_lease("case", "run", Mode::Shared).unwrap_err();
    assert_eq!(failure.class, Class::Environment);
    let text = failure.to_string();
    assert!(text.contains(&format!("port {port}")), "{text}");
    assert!(
        text.contains(&format!("pid {}", std::process::id())),
        "{text}"
    );
}

fn the_reference_engine_comes_and_goes() {
    let toys = one()
        .with("reference", Manners::default())
        .in_reference_group();
    let mut world = World::new(&toys);
    world.spec.reference_keep_seconds = 1;
    let first = world.lease();
    let reference_runs = || world.leftovers().processes().len() == 2;
    assert!(!reference_runs(), "nobody asked yet");
    let (worker, start_ms) = reference(&first).unwrap();
    assert_eq!(worker.process, "reference");
    assert!(start_ms > 0);
    assert!(get(&worker.metrics_url).contains("TOY=reference"));
    assert_eq!(
        reference(&first).unwrap(),
        (worker.clone(), start_ms),
        "asked once a lease"
    );
    let second = world.lease();
    assert_eq!(reference(&second).unwrap(), (worker, 0), "shared");
    drop(first);
    assert!(reference_runs(), "the second lease still needs it");
    drop(second);
    eventually("the reference stops", || !reference_runs());
    assert_eq!(
        world.status().unwrap().state,
        "ready",
        "the stack itself stays"
    );
    assert!(reference(&world.lease()).unwrap().1 > 0, "started again");
}

fn a_failed_reference_is_remembered() {
    let files = tempfile::tempdir().unwrap();
    let broken = files.path().join("broken");
    fs::write(&broken, "").unwrap();
    let manners = Manners {
        fails_while: Some(broken.clone()),
        ..Manners::default()
    };
    let world = World::new(&one().with("reference", manners).in_reference_group());
    let lease = world.lease();
    let first = reference(&lease).unwrap_err();
    assert!(first.to_string().contains("exit code 3"), "{first}");
    assert!(lease.broken().is_none(), "the stack itself is well");
    fs::remove_file(&broken).unwrap();
    assert_eq!(reference(&world.lease()).unwrap_err(), first);
    let other_run = world.try_lease("case", "run2", Mode::Shared).unwrap();
    assert!(reference(&other_run).is_ok());
}

fn waiting_for_the_reference_can_be_given_up() {
    let files = tempfile::tempdir().unwrap();
    let manners = Manners {
        gate: Some(files.path().join("never there")),
        ..Manners::default()
    };
    let world = World::new(&one().with("reference", manners).in_reference_group());
    let lease = world.lease();
    let waited =
        run(async { tokio::time::timeout(Duration::from_millis(300), lease.reference()).await });
    assert!(waited.is_err(), "{waited:?}");
    assert!(lease.broken().is_none(), "and nothing else happened");
}

fn a_stack_that_does_not_fit_into_shared_memory_starts_nothing() {
    let world = World::new(&Toys {
        shm_bytes: u64::MAX,
        ..one()
    });
    let failure = world.try_lease("case", "run", Mode::Shared).unwrap_err();
    assert_eq!(failure.class, Class::Environment);
    let text = failure.to_string();
    assert!(
        text.contains("no room for this stack in /dev/shm"),
        "{text}"
    );
    assert!(!world.log().contains("worker0: started"), "{}", world.log());
}

fn bring_up_goes_on_when_the_last_client_leaves() {
    let files = tempfile::tempdir().unwrap();
    let gate = files.path().join("gate");
    let manners = Manners {
        gate: Some(gate.clone()),
        ..Manners::default()
    };
    let world = World::new(&Toys::default().with("worker0", manners));
    let cancel = AtomicBool::new(false);
    let request = LeaseRequest {
        run_id: "run".to_owned(),
        case: "case".to_owned(),
        mode: Mode::Shared,
    };
    thread::scope(|scope| {
        let waiting = scope.spawn(|| acquire(&world.spec, &request, &mut |_| {}, &cancel));
        eventually("the toy is started", || {
            world.log().contains("worker0: started")
        });
        cancel.store(true, Ordering::Relaxed);
        let failure = waiting.join().unwrap().unwrap_err();
        assert!(failure.what.contains("interrupted"), "{failure}");
    });
    eventually("the client is gone", || {
        world.log().contains("left the queue")
    });
    fs::write(&gate, "").unwrap();
    eventually("it is ready all the same", || {
        world.status().unwrap().state == "ready"
    });
    let lease = world.lease();
    assert_eq!(
        (
            lease.stack().generation,
            lease.stack().started_for_this_lease
        ),
        (1, false)
    );
}

fn a_bad_line_ends_only_its_own_connection() {
    let world = World::new(&one());
    let lease = world.lease();
    let endless = [b'x'; 64 * 1024];
    let bad: [&[u8]; 4] = [
        b"not json\n",
        b"{\"say\":\"unheard-of\"}\n",
        b"{\"say\":\"reference\"}\n",
        &endless,
    ];
    for line in bad {
        let mut stream = UnixStream::connect(world.dir().socket()).unwrap();
        // It may hang up before all of it is written.
        let _ = stream.write_all(line);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.is_empty());
    }
    assert!(lease.broken().is_none());
    assert_eq!(world.status().unwrap().leases.len(), 1);
}

fn sigterm_stops_everything() {
    let world = World::new(&one());
    let lease = world.lease();
    let supervisor = world.status().unwrap().supervisor_pid;
    assert!(
        kvcr_phase1::stack::sweep::Identity::of(supervisor)
            .unwrap()
            .signal(Signal::TERM)
    );
    eventually("the lease is broken", || lease.broken().is_some());
    world.until_nothing_is_left();
    assert!(world.log().contains("exit: SIGTERM"));
}

fn a_supervisor_that_cannot_start_is_reported() {
    let mut world = World::new(&one());
    world.spec.exe = "/bin/false".into();
    fs::write(world.dir().log(), "earlier\nits last words\n").unwrap();
    let request = LeaseRequest {
        run_id: "run".to_owned(),
        case: "case".to_owned(),
        mode: Mode::Shared,
    };
    let mut again = 0;
    let mut report = |progress| again += u32::from(progress == Progress::Again);
    let failure = acquire(&world.spec, &request, &mut report, &AtomicBool::new(false)).unwrap_err();
    assert_eq!(again, 5, "{failure}");
    assert!(failure.to_string().contains("its last words"), "{failure}");
    assert_eq!(failure.class, Class::Environment);
    assert!(
        failure.to_string().contains("ends before it answers"),
        "{failure}"
    );
    world.spec.exe = "/nonexistent".into();
    let failure = world.try_lease("case", "run", Mode::Shared).unwrap_err();
    assert!(
        failure
            .to_string()
            .contains("/nonexistent to be executable"),
        "{failure}"
    );
    assert!(!world.dir().socket().exists());
}

fn a_log_that_is_too_large_is_begun_anew() {
    let mut world = World::new(&one());
    world.spec.exe = "/bin/false".into();
    let log = fs::File::create(world.dir().log()).unwrap();
    log.set_len(64 * 1024 * 1024).unwrap();
    world.try_lease("case", "run", Mode::Shared).unwrap_err();
    assert_eq!(log.metadata().unwrap().len(), 0);
}

fn what_is_in_the_way_of_the_socket_is_said_and_left_alone() {
    let world = World::new(&one());
    let (dir, socket) = (world.dir(), world.dir().socket());
    let refused = || {
        let failure = world.try_lease("case", "run", Mode::Shared).unwrap_err();
        assert_eq!(failure.class, Class::Environment, "{failure}");
        let text = failure.to_string();
        assert!(text.contains(socket.to_str().unwrap()), "{text}");
        assert!(!dir.launch().exists(), "nothing is begun");
    };
    fs::create_dir(&socket).unwrap();
    refused();
    fs::remove_dir(&socket).unwrap();
    // Nobody can say whether somebody listens at the end of a link that has none.
    std::os::unix::fs::symlink(&socket, &socket).unwrap();
    refused();
    assert!(socket.is_symlink());
}
