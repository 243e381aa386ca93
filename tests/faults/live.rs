//! A stack that runs already is told to lie, and to stop.

use kvcr_phase1::failure::Class;
use kvcr_phase1::verdict::Outcome;

use crate::told::{Machine, printed};

pub(crate) fn a_running_stack_is_told_to_lie_and_to_stop() {
    let machine = Machine::new();
    let up = machine.phase1(&["up", "--detach"]);
    assert!(up.status.success(), "{}", printed(&up));
    let outcome = || {
        let output = machine.phase1(&["run", "tc01::warm_tier"]);
        let verdict = machine
            .verdicts()
            .remove("tc01::warm_tier")
            .expect("a verdict");
        (verdict.outcome, printed(&output))
    };
    let (before, text) = outcome();
    assert_eq!(before, Outcome::Pass, "{text}");
    let told = machine.phase1(&["sim", "tell", "corrupt_block@worker0"]);
    assert!(told.status.success(), "{}", printed(&told));
    let (lying, text) = outcome();
    assert_eq!(lying, Outcome::Fail(Class::Product), "{text}");
    let honest = machine.phase1(&["sim", "honest"]);
    assert!(honest.status.success(), "{}", printed(&honest));
    let (after, text) = outcome();
    assert_eq!(after, Outcome::Pass, "{text}");
}
