//! `kvcr-phase1 services` and a stack that uses them, on the simulated stack: a container that
//! somebody else runs, as two commands of one machine.

use std::fs;
use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::process::{Pid, Signal, kill_process};

use crate::place::{Place, Running, Said, eventually, read_json};
use crate::promises;

promises![
    two_stacks_one_after_the_other_use_what_somebody_else_runs,
    a_service_that_ends_takes_the_stack_with_it_in_words,
    a_killed_services_command_leaves_nothing_that_the_next_does_not_remove,
    what_is_not_there_or_is_another_ends_a_bring_up_in_words,
    what_a_container_is_started_with_is_printed,
];

const SIM: &[&str] = &["--profile", "sim"];

impl Place {
    /// `kvcr-phase1 ARGS` for the services of this place.
    fn beside<'a>(&self, args: &[&'a str], directory: &'a str) -> Vec<&'a str> {
        [args, SIM, &["--external-services", directory]].concat()
    }
}

/// Starts the services, and waits until they say that they accept.
fn services(place: &Place, directory: &str) -> Running {
    let running = place
        .command(&place.beside(&["services"], directory))
        .start();
    eventually("the services accept", || {
        running
            .said_so_far()
            .contains("services accept")
            .then_some(())
    });
    running
}

fn run(place: &Place, directory: &str, args: &[&str]) -> Said {
    let args = [&["run"], args].concat();
    place.says(&place.beside(&args, directory))
}

/// Pools of the services in `directory`: they carry its name.
fn pools(printed: &Said) -> Vec<String> {
    let pool = printed.out.lines().filter_map(|line| {
        let (_, rest) = line.split_once("--pool-dir ")?;
        Some(rest.split(' ').next()?.to_owned())
    });
    pool.collect()
}

fn printed(place: &Place, directory: &str) -> Said {
    place.says(&place.beside(&["services", "--print"], directory))
}

fn two_stacks_one_after_the_other_use_what_somebody_else_runs() {
    let place = Place::bare();
    let directory = place.text("side");
    let running = services(&place, &directory);
    place
        .says(&place.beside(&["doctor"], &directory))
        .succeeds(&["service0", "nobody has claimed its pool"]);
    let arms = ["tc04::protection", "tc06::recovery", "--kills", "2"];
    run(&place, &directory, &arms).succeeds(&["Pass"]);
    place.says(&["down"]).succeeds(&["stopped"]);
    // Lines of the first stack are in the log, and its pool is another's to give back.
    let before = fs::read_to_string(place.path("side/service0.log")).expect("a log");
    assert!(before.contains("guard_promoted"), "{before}");
    place
        .says(&place.beside(&["doctor"], &directory))
        .succeeds(&["claimed before, by port"]);
    run(&place, &directory, &["tc04::replacement"]).succeeds(&["Pass"]);
    run(&place, &directory, &["tc04::guard_death"])
        .fails(101, &["services that the harness started"]);
    let after = fs::read_to_string(place.path("side/service0.log")).expect("a log");
    assert!(after.starts_with(&before) && after.len() > before.len());
    place.says(&["down"]).succeeds(&["stopped"]);
    let pools = pools(&printed(&place, &directory));
    assert!(pools.len() == 2 && pools.iter().all(|pool| Path::new(pool).exists()));
    running.terminate();
    running.end().succeeds(&["services accept at"]);
    assert!(pools.iter().all(|pool| !Path::new(pool).exists()));
    assert!(!place.path("side/service0.sock").exists());
}

fn a_service_that_ends_takes_the_stack_with_it_in_words() {
    let place = Place::bare();
    let directory = place.text("side");
    let running = services(&place, &directory);
    let up = place.command(&place.beside(&["up"], &directory)).start();
    eventually("the stack is held", || {
        up.said_so_far().contains("held").then_some(())
    });
    kill(&running.so_far(), "service1");
    // Its sibling follows it, and may be missed first.
    up.end().fails(
        101,
        &[
            "Environment: service",
            ", which somebody else runs, ended while the stack was up",
        ],
    );
    // The command that ran it says which, and ends with it.
    running
        .end()
        .fails(101, &["service1 was killed by signal 9 from outside"]);
    assert!(!place.path("side/service0.sock").exists());
    // Whether or not a worker had one mapped.
    for pool in pools(&printed(&place, &directory)) {
        assert!(!Path::new(&pool).exists(), "{pool}");
    }
}

/// Kills a process that a command of ours said it had started.
fn kill(said: &str, name: &str) {
    let marker = format!("{name}: started as ");
    let (_, rest) = said.split_once(&marker).expect("it was started");
    let pid = rest.lines().next().and_then(|text| text.parse().ok());
    let pid = pid.and_then(Pid::from_raw).expect("a pid");
    kill_process(pid, Signal::KILL).expect("it runs");
}

fn a_killed_services_command_leaves_nothing_that_the_next_does_not_remove() {
    let place = Place::bare();
    let directory = place.text("side");
    let running = services(&place, &directory);
    place
        .says(&place.beside(&["services"], &directory))
        .fails(101, &["services run in", "already"]);
    running.kill();
    // They die with it: nobody accepts any more.
    eventually("the services are gone", || {
        UnixStream::connect(place.path("side/service0.sock"))
            .is_err()
            .then_some(())
    });
    let stale = run(&place, &directory, &["tc04::protection", "--bring-up", "1"]);
    stale.fails(
        101,
        &[
            "Environment: service0",
            "which an ended service left behind",
        ],
    );
    let again = services(&place, &directory);
    assert!(
        again.so_far().contains("files of pools"),
        "{}",
        again.so_far()
    );
    again.terminate();
    again.end().succeeds(&[]);
    for pool in pools(&printed(&place, &directory)) {
        assert!(!Path::new(&pool).exists(), "{pool}");
    }
}

fn what_is_not_there_or_is_another_ends_a_bring_up_in_words() {
    let place = Place::bare();
    let directory = place.text("side");
    let fails = |flags: &[&str], words: &[&str]| {
        let args = [&["tc04::protection", "--bring-up", "1"], flags].concat();
        run(&place, &directory, &args).fails(101, &[&["Environment: "], words].concat());
    };
    fails(&[], &["service0", "there is no directory"]);
    fs::create_dir(place.path("side")).expect("a directory");
    // Somebody who speaks another language.
    let listener = UnixListener::bind(place.path("side/service0.sock")).expect("a socket");
    let foreigner = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("somebody");
        let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        // Until it has been heard.
        let _ = std::io::Read::read_to_end(&mut stream, &mut Vec::new());
    });
    fails(&[], &["no kvcr_service that we know"]);
    foreigner.join().expect("it was asked");
    fs::remove_file(place.path("side/service0.sock")).expect("a socket");
    let running = services(&place, &directory);
    fails(
        &["--dtype", "bfloat16"],
        &["service0 was started for another stack"],
    );
    let result = read_json(&place.path("runs/latest/tc04__protection/result.json"));
    assert_eq!(result["failure"]["class"], "environment");
    place.says(&["down", "--force"]);
    running.terminate();
    running.end().succeeds(&[]);
}

fn what_a_container_is_started_with_is_printed() {
    let place = Place::bare();
    let directory = place.text("with a space");
    let said = printed(&place, &directory);
    said.succeeds(&["kvcr.kvcr_service", "--log-level DEBUG", "--guard-count 1"]);
    let lines: Vec<&str> = said.out.lines().collect();
    assert_eq!(lines.len(), 2);
    assert!(
        lines[1].contains(&format!("'{directory}/service1.sock'")),
        "{}",
        lines[1]
    );
    assert!(
        !place.path("with a space").exists(),
        "nothing is started, nothing made"
    );
    place
        .says(&["services", "--profile", "sim"])
        .fails(2, &["services need a directory", "--external-services DIR"]);
}
