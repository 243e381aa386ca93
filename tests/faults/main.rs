//! What every fault of the simulated stack must look like to every case: the proof that the
//! harness goes red when the product lies, and only then.
//!
//! `table` is the expectation as data, `told` runs the program as a user would, `judge`
//! compares. A row is a trial of its own; what is common to all rows is checked beside them.

mod judge;
mod live;
mod table;
mod told;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

fn main() -> ExitCode {
    let mut args = Arguments::from_args();
    // A row waits four fifths of its time, for counters to settle and operations to be given up.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    args.test_threads.get_or_insert(3 * cores);
    let rows = table::ROWS.iter().map(|row| {
        Trial::test(format!("row::{}", row.name()), move || {
            let told = told::run(row);
            judge::row(row, &told).map_err(Failed::from)
        })
    });
    let beside = [
        (
            "table::every_fault_has_a_row",
            table::every_fault_has_a_row as fn(),
        ),
        (
            "table::what_no_case_sees_says_why",
            table::what_no_case_sees_says_why,
        ),
        (
            "live::a_running_stack_is_told_to_lie_and_to_stop",
            live::a_running_stack_is_told_to_lie_and_to_stop,
        ),
    ]
    .map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    });
    libtest_mimic::run(&args, rows.chain(beside).collect()).exit_code()
}
