//! What a case may do to the stack that it leases alone, one function a promise.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use kvcr_phase1::failure::{Class, Failure};
use kvcr_phase1::stack::deaths::Living;
use kvcr_phase1::stack::harm::{Blow, Changes, Death, Part, Replaced, Replacement, Struck};
use kvcr_phase1::stack::lease::Lease;
use kvcr_phase1::stack::process::Ending;
use kvcr_phase1::stack::protocol::Mode;
use kvcr_phase1::stack::sweep::Identity;

use crate::behaviour::run;
use crate::toy::{Manners, Toys, shm_prefix};
use crate::world::{World, eventually, get, identity_in, kill};

macro_rules! promises {
    ($($name:ident),* $(,)?) => {
        pub(crate) const ALL: &[(&str, fn())] = &[$((stringify!($name), $name)),*];
    };
}

promises![
    a_struck_process_is_replaced_and_the_stack_is_the_same,
    an_engine_core_is_found_and_its_parent_follows,
    a_parent_that_does_not_follow_is_replaced_for_the_next_lease,
    all_of_a_process_is_killed_wherever_it_stands,
    a_death_that_nobody_asked_for_still_breaks_the_lease,
    a_death_that_was_permitted_is_data,
    a_stopped_process_stands_still_and_goes_on,
    a_process_that_was_left_stopped_goes_on_for_the_next_lease,
    a_refused_replacement_is_data,
    what_may_not_be_done_is_said_in_words,
    a_killed_client_leaves_a_whole_stack,
    a_client_killed_while_it_replaces_leaves_a_whole_stack,
    a_replacement_is_killed_too,
    two_are_replaced_side_by_side,
    whoever_starts_after_the_dead_starts_again,
    what_cannot_be_made_whole_ends_the_generation,
    a_killed_process_leaves_no_file_to_its_replacement,
    a_harmed_stack_can_be_put_down,
    a_supervisor_killed_during_a_kill_is_swept,
    a_file_of_somebody_else_is_said_and_left_alone,
];

const LONG: Duration = Duration::from_secs(120);

fn two() -> Toys {
    Toys::default()
        .with("worker0", Manners::default())
        .with("worker1", Manners::default())
}

/// A worker whose engine core is a process in a session of its own.
fn cored(file: &Path, follows: bool) -> Toys {
    let manners = Manners {
        grandchild: Some(file.to_owned()),
        follows,
        ..Manners::default()
    };
    Toys::default().with("worker0", manners)
}

fn alone(world: &World) -> Lease {
    world.try_lease("harm", "run", Mode::Exclusive).unwrap()
}

fn strike(lease: &Lease, process: &str, part: Part, blow: Blow) -> Result<Struck, Failure> {
    run(lease.strike(process, part, blow))
}

fn killed(lease: &Lease, process: &str) -> Struck {
    strike(lease, process, Part::Whole, Blow::Kill).unwrap()
}

fn death(lease: &Lease, who: Identity) -> Death {
    run(lease.death_of(who, LONG)).unwrap()
}

fn replaced(lease: &Lease, process: &str) -> Replacement {
    match run(lease.replace(process, Changes::default())).unwrap() {
        Replaced::Serving(replacement) => *replacement,
        Replaced::Refused(refusal) => panic!("{refusal:?}"),
    }
}

fn pids(lease: &Lease) -> BTreeSet<u32> {
    lease.stack().processes.iter().map(|it| it.pid).collect()
}

/// Every worker of a lease's stack answers.
fn answers(lease: &Lease) {
    for worker in &lease.stack().workers {
        assert!(
            get(&worker.metrics_url).contains("TOY="),
            "{}",
            worker.process
        );
    }
}

fn state(who: Identity) -> char {
    let stat = fs::read_to_string(format!("/proc/{}/stat", who.pid)).unwrap();
    let (_, rest) = stat.rsplit_once(") ").unwrap();
    rest.chars().next().unwrap()
}

fn a_struck_process_is_replaced_and_the_stack_is_the_same() {
    let world = World::new(&two());
    let lease = alone(&world);
    let living = Living::of(&lease);
    let before = pids(&lease);
    let struck = killed(&lease, "worker0");
    assert_eq!(struck.hit, [struck.leader]);
    assert!(before.contains(&struck.leader.pid));
    let death = death(&lease, struck.leader);
    assert_eq!(death.ending, Some(Ending::Signal(9)));
    assert!(death.monotonic_ns >= struck.monotonic_ns);
    // Nobody waits for an explanation of what the lease did itself.
    assert_eq!(living.broken(&lease), None);

    let new = replaced(&lease, "worker0");
    assert!(!before.contains(&new.process.pid));
    let old = &lease.stack().processes[0];
    assert_ne!(new.process.log, old.log, "a log of its own");
    let worker = new.worker.as_ref().unwrap();
    assert_ne!(worker.instance_id, lease.stack().workers[0].instance_id);
    assert_eq!(worker.metrics_url, lease.stack().workers[0].metrics_url);
    let times = [
        death.monotonic_ns,
        new.started_ns,
        new.probes_ns,
        new.listed_ns,
        new.canary_ns,
    ];
    assert!(times.is_sorted(), "{times:?}");
    answers(&lease);
    assert_eq!(lease.broken(), None);
    let generation = lease.stack().generation;
    drop(lease);

    let next = alone(&world);
    assert_eq!(next.stack().generation, generation);
    assert!(
        pids(&next).contains(&new.process.pid),
        "it needed no mending"
    );
    assert_eq!(next.stack().workers[0], *worker);
    assert_eq!(world.status().unwrap().processes, next.stack().processes);
}

fn an_engine_core_is_found_and_its_parent_follows() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("core");
    let world = World::new(&cored(&file, true));
    let lease = alone(&world);
    let core = identity_in(&file);
    let struck = strike(&lease, "worker0", Part::EngineCore, Blow::Kill).unwrap();
    assert_eq!(struck.hit, [core]);
    let (core, leader) = (death(&lease, core), death(&lease, struck.leader));
    assert_eq!(core.ending, None, "it is nobody's child here");
    assert_eq!(leader.ending, Some(Ending::Code(1)));
    assert!(core.monotonic_ns >= struck.monotonic_ns);
    fs::remove_file(&file).unwrap();
    replaced(&lease, "worker0");
    assert_ne!(identity_in(&file), struck.hit[0]);
    assert_eq!(lease.deaths().len(), 2);
}

fn a_parent_that_does_not_follow_is_replaced_for_the_next_lease() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("core");
    let world = World::new(&cored(&file, false));
    let lease = alone(&world);
    let generation = lease.stack().generation;
    let struck = strike(&lease, "worker0", Part::EngineCore, Blow::Kill).unwrap();
    death(&lease, struck.hit[0]);
    assert!(struck.leader.is_alive());
    fs::remove_file(&file).unwrap();
    drop(lease);
    let next = alone(&world);
    assert_eq!(next.stack().generation, generation);
    assert!(!struck.leader.is_alive());
    assert!(identity_in(&file).is_alive());
    answers(&next);
}

fn all_of_a_process_is_killed_wherever_it_stands() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("core");
    let world = World::new(&cored(&file, false));
    let lease = alone(&world);
    let core = identity_in(&file);
    // Whoever is hit more than once dies once.
    for blow in [Blow::Stop, Blow::Continue] {
        strike(&lease, "worker0", Part::Whole, blow).unwrap();
    }
    let struck = killed(&lease, "worker0");
    let hit: BTreeSet<Identity> = struck.hit.iter().copied().collect();
    assert_eq!(hit, BTreeSet::from([core, struck.leader]));
    for who in hit {
        death(&lease, who);
        assert!(!who.is_alive());
    }
    fs::remove_file(&file).unwrap();
    replaced(&lease, "worker0");
    assert_eq!(lease.deaths().len(), 2);
}

fn a_death_that_nobody_asked_for_still_breaks_the_lease() {
    let world = World::new(&two());
    let lease = alone(&world);
    let struck = killed(&lease, "worker0");
    death(&lease, struck.leader);
    kill(lease.stack().processes[1].pid);
    eventually("the lease is broken", || lease.broken().is_some());
    let text = lease.broken().unwrap().to_string();
    assert!(text.contains("worker1 was killed by signal 9"), "{text}");
    // Whoever asks for more hears of it, too.
    let failure = run(lease.replace("worker0", Changes::default())).unwrap_err();
    assert_eq!(failure.to_string(), text);
    let generation = lease.stack().generation;
    drop(lease);
    assert_eq!(alone(&world).stack().generation, generation + 1);
}

fn a_death_that_was_permitted_is_data() {
    let world = World::new(&two());
    let lease = alone(&world);
    run(lease.permit("worker1")).unwrap();
    let who = Identity::of(lease.stack().processes[1].pid).unwrap();
    kill(who.pid);
    assert_eq!(death(&lease, who).process, "worker1");
    assert_eq!(lease.broken(), None);
    drop(lease);
    // A permission ends with its lease.
    let lease = alone(&world);
    answers(&lease);
    kill(lease.stack().processes[0].pid);
    eventually("the lease is broken", || lease.broken().is_some());
}

fn a_stopped_process_stands_still_and_goes_on() {
    let world = World::new(&two());
    let lease = alone(&world);
    let struck = strike(&lease, "worker0", Part::Whole, Blow::Stop).unwrap();
    eventually("it stands still", || state(struck.leader) == 'T');
    let again = strike(&lease, "worker0", Part::Whole, Blow::Continue).unwrap();
    eventually("it goes on", || state(struck.leader) != 'T');
    assert_eq!(again.leader, struck.leader);
    answers(&lease);
    assert_eq!(lease.deaths(), []);
}

fn a_process_that_was_left_stopped_goes_on_for_the_next_lease() {
    let world = World::new(&two());
    let lease = alone(&world);
    let before = pids(&lease);
    strike(&lease, "worker0", Part::Whole, Blow::Stop).unwrap();
    drop(lease);
    let lease = alone(&world);
    assert_eq!(pids(&lease), before);
    answers(&lease);
}

fn a_refused_replacement_is_data() {
    let world = World::new(&two());
    let lease = alone(&world);
    killed(&lease, "worker0");
    let changes = Changes {
        digest: Some("f".repeat(64)),
        ..Changes::default()
    };
    let Replaced::Refused(refusal) = run(lease.replace("worker0", changes)).unwrap() else {
        panic!("it was not refused");
    };
    assert_eq!(refusal.death.ending, Some(Ending::Code(4)));
    assert_eq!(refusal.lines, ["toy: the digest does not match"]);
    let text = refusal.failure.to_string();
    assert!(text.contains("the digest does not match"), "{text}");
    assert!(refusal.death.monotonic_ns >= refusal.started_ns);
    assert_eq!(lease.broken(), None);
    replaced(&lease, "worker0");
    answers(&lease);
}

fn what_may_not_be_done_is_said_in_words() {
    let world = World::new(&two());
    let shared = world.lease();
    let said = |failure: Failure, words: &str| {
        assert_eq!(failure.class, Class::Inconclusive);
        assert!(failure.to_string().contains(words), "{failure}");
    };
    let failure = strike(&shared, "worker0", Part::Whole, Blow::Kill).unwrap_err();
    said(failure, "may not be harmed on this lease");
    drop(shared);
    let lease = alone(&world);
    let failure = strike(&lease, "worker7", Part::Whole, Blow::Kill).unwrap_err();
    said(failure, "no process called worker7");
    let failure = strike(&lease, "worker0", Part::EngineCore, Blow::Kill).unwrap_err();
    said(failure, "worker0 has no engine core");
    let failure = run(lease.replace("worker0", Changes::default())).unwrap_err();
    said(failure, "worker0 runs, and nobody struck it");
    let struck = killed(&lease, "worker0");
    death(&lease, struck.leader);
    let failure = strike(&lease, "worker0", Part::Whole, Blow::Kill).unwrap_err();
    said(failure, "worker0 is dead already");
    let changes = Changes {
        owner_of: Some(1),
        ..Changes::default()
    };
    let failure = run(lease.replace("worker0", changes)).unwrap_err();
    said(failure, "toys have no owners");
    assert_eq!(lease.broken(), None);
}

fn a_killed_client_leaves_a_whole_stack() {
    let world = World::new(&two());
    let mut client = world.client("kills worker0", Mode::Exclusive);
    client.until("killed");
    client.kill();
    let lease = alone(&world);
    assert_eq!(lease.stack().generation, 1);
    answers(&lease);
}

fn a_client_killed_while_it_replaces_leaves_a_whole_stack() {
    let files = tempfile::tempdir().unwrap();
    let gate = files.path().join("gate");
    fs::write(&gate, "").unwrap();
    let manners = Manners {
        gate: Some(gate.clone()),
        ..Manners::default()
    };
    let world = World::new(&Toys::default().with("worker0", manners));
    let first = alone(&world);
    let before = pids(&first);
    drop(first);
    let mut client = world.client("replaces worker0", Mode::Exclusive);
    client.until("granted");
    fs::remove_file(&gate).unwrap();
    client.until("killed");
    eventually("the replacement starts", || {
        world.log().matches("worker0: started as").count() == 2
    });
    client.kill();
    fs::write(&gate, "").unwrap();
    let lease = alone(&world);
    assert_eq!(lease.stack().generation, 1);
    assert!(pids(&lease).is_disjoint(&before));
    answers(&lease);
}

fn a_replacement_is_killed_too() {
    let world = World::new(&two());
    let lease = alone(&world);
    let mut seen = BTreeSet::new();
    for _ in 0..3 {
        let struck = killed(&lease, "worker0");
        assert!(seen.insert(struck.leader), "each is another process");
        death(&lease, struck.leader);
        replaced(&lease, "worker0");
    }
    let ended: BTreeSet<Identity> = lease.deaths().iter().map(|death| death.who).collect();
    assert_eq!(ended, seen);
    answers(&lease);
}

fn two_are_replaced_side_by_side() {
    let world = World::new(&two());
    let lease = alone(&world);
    killed(&lease, "worker0");
    killed(&lease, "worker1");
    let (one, other) = run(async {
        tokio::join!(
            lease.replace("worker0", Changes::default()),
            lease.replace("worker1", Changes::default()),
        )
    });
    for replaced in [one, other] {
        assert!(matches!(replaced, Ok(Replaced::Serving(_))), "{replaced:?}");
    }
    answers(&lease);
}

fn whoever_starts_after_the_dead_starts_again() {
    let toys = two().with("late", Manners::default()).after("worker0");
    let world = World::new(&toys);
    let lease = alone(&world);
    let before = pids(&lease);
    killed(&lease, "worker0");
    drop(lease);
    let lease = alone(&world);
    let same: Vec<u32> = pids(&lease).intersection(&before).copied().collect();
    assert_eq!(same, [lease.stack().processes[1].pid]);
    answers(&lease);
    // Also where the case itself replaced it.
    let before = pids(&lease);
    killed(&lease, "worker0");
    let new = replaced(&lease, "worker0").process.pid;
    drop(lease);
    let lease = alone(&world);
    assert!(pids(&lease).contains(&new));
    let late = lease.stack().processes.iter().find(|it| it.name == "late");
    assert!(!before.contains(&late.unwrap().pid));
}

fn what_cannot_be_made_whole_ends_the_generation() {
    let files = tempfile::tempdir().unwrap();
    let broken = files.path().join("broken");
    let manners = Manners {
        fails_while: Some(broken.clone()),
        ..Manners::default()
    };
    let world = World::new(&Toys::default().with("worker0", manners));
    let lease = alone(&world);
    killed(&lease, "worker0");
    fs::write(&broken, "").unwrap();
    drop(lease);
    world.until_nothing_is_left();
    fs::remove_file(&broken).unwrap();
    let lease = alone(&world);
    assert_eq!(lease.stack().generation, 2);
    answers(&lease);
}

fn a_killed_process_leaves_no_file_to_its_replacement() {
    let unnamed = format!("toy-{}", uuid::Uuid::new_v4().simple());
    let holds = |name: &str| Manners {
        shm: Some(name.to_owned()),
        ..Manners::default()
    };
    let toys = Toys::default()
        .with("worker0", holds("{}pool"))
        .with("worker1", holds(&unnamed));
    let world = World::new(&toys);
    let lease = alone(&world);
    let shm = Path::new("/dev/shm");
    let named = shm.join(format!(
        "{}pool",
        shm_prefix(&format!("{}:1", world.spec.fingerprint))
    ));
    let files = [named, shm.join(unnamed)];
    let old = files.clone().map(|file| fs::metadata(file).unwrap().ino());
    for (worker, file) in ["worker0", "worker1"].into_iter().zip(&files) {
        let struck = killed(&lease, worker);
        death(&lease, struck.leader);
        assert!(file.exists(), "a kill leaves it behind");
        replaced(&lease, worker);
    }
    let new = files.map(|file| fs::metadata(file).unwrap().ino());
    assert!(old.iter().all(|ino| !new.contains(ino)), "{old:?} {new:?}");
}

fn a_harmed_stack_can_be_put_down() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("core");
    let world = World::new(&cored(&file, false));
    let lease = alone(&world);
    let struck = strike(&lease, "worker0", Part::Whole, Blow::Stop).unwrap();
    drop(lease);
    let all =
        kvcr_phase1::stack::admin::down(&world.spec.state_dir, Some(&world.spec.fingerprint), true);
    assert!(all.unwrap().iter().all(|one| one.is_down()));
    world.until_nothing_is_left();
    assert!(struck.hit.iter().all(|who| !who.is_alive()));
}

fn a_supervisor_killed_during_a_kill_is_swept() {
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("core");
    let world = World::new(&cored(&file, false));
    let lease = alone(&world);
    let struck = strike(&lease, "worker0", Part::Whole, Blow::Stop).unwrap();
    kill(world.status().unwrap().supervisor_pid);
    eventually("the lease is broken", || lease.broken().is_some());
    drop(lease);
    fs::remove_file(&file).unwrap();
    let lease = alone(&world);
    assert_eq!(lease.stack().generation, 2);
    assert!(struck.hit.iter().all(|who| !who.is_alive()));
    answers(&lease);
}

fn a_file_of_somebody_else_is_said_and_left_alone() {
    let world = World::new(&two());
    let name = format!(
        "{}pool",
        shm_prefix(&format!("{}:1", world.spec.fingerprint))
    );
    let file = Path::new("/dev/shm").join(name);
    fs::write(&file, "").unwrap();
    let failure = world.try_lease("harm", "run", Mode::Exclusive).unwrap_err();
    let there = file.exists();
    fs::remove_file(&file).unwrap();
    assert!(there);
    assert_eq!(failure.class, Class::Environment);
    assert!(
        failure.to_string().contains(file.to_str().unwrap()),
        "{failure}"
    );
}
