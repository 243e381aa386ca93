//! `kvcr-phase1 strike` on the simulated stack: a kill as a case deals it, as a person sees it.

use crate::place::Place;
use crate::promises;

promises![
    a_killed_engine_core_is_promoted_and_replaced_and_the_stack_is_the_same,
    what_cannot_be_struck_is_said,
];

const GUARDED: &[&str] = &["--profile", "sim", "--guard"];

fn strike<'a>(args: &[&'a str]) -> Vec<&'a str> {
    [&["strike"], args, GUARDED].concat()
}

fn a_killed_engine_core_is_promoted_and_replaced_and_the_stack_is_the_same() {
    let place = Place::bare();
    let said = place.says(&strike(&["worker0", "--core", "--times", "2"]));
    said.succeeds(&[
        "its parent followed: exit code 1",
        "guard_promotion_stage stage=death_observed",
        "guard_promoted guard=0",
        "its canary completed",
    ]);
    let rounds = said.out.matches("guard_promoted").count();
    assert_eq!(rounds, 2, "{said:?}");
    let status = place.says(&["status"]);
    status.succeeds(&["generation 1,", "worker0-3.log", "worker1.log"]);
    // What was left to the supervisor is done before the next one has the stack.
    place
        .says(&strike(&["service0"]))
        .succeeds(&["service0 struck"]);
    place
        .says(&strike(&["worker1"]))
        .succeeds(&["guard_promoted"]);
    let status = place.says(&["status"]);
    status.succeeds(&[
        "generation 1,",
        "service0-2.log",
        "worker0-4.log",
        "worker1-2.log",
    ]);
    place.says(&["down"]).succeeds(&["stopped"]);
    place
        .says(&["status"])
        .succeeds(&["no stack runs, and none left anything behind"]);
}

fn what_cannot_be_struck_is_said() {
    let place = Place::bare();
    place
        .says(&strike(&["worker7"]))
        .fails(101, &["the stack has no process called worker7"]);
    place
        .says(&strike(&["frontend", "--core"]))
        .fails(101, &["frontend has no engine core"]);
    place.says(&["down"]).succeeds(&["stopped"]);
}
