//! Whether what was told is what the table expects. Pure.

use kvcr_phase1::failure::Class;
use kvcr_phase1::verdict::{Outcome, Verdict};

use crate::table::{ARMS, Cell, Row};
use crate::told::Told;

/// Compares a row, and proves that each of its cells is needed: with any one reversed, the
/// comparison fails.
pub(crate) fn row(row: &Row, told: &Told) -> Result<(), String> {
    let cells = row.cells();
    compare(row, &cells, told)?;
    for at in 0..cells.len() {
        let mut reversed = cells;
        reversed[at] = reverse(cells[at]);
        if compare(row, &reversed, told).is_ok() {
            return Err(format!(
                "{}: the cell of {} may be anything",
                row.name(),
                ARMS[at]
            ));
        }
    }
    Ok(())
}

fn reverse(cell: Cell) -> Cell {
    match cell {
        Cell::Pass => Cell::Red(Class::Product, ""),
        Cell::Red(..) | Cell::NotRun => Cell::Pass,
    }
}

fn compare(row: &Row, cells: &[Cell; ARMS.len()], told: &Told) -> Result<(), String> {
    let mut wrong = Vec::new();
    for (arm, cell) in ARMS.iter().zip(cells) {
        match (told.verdicts.get(*arm), cell) {
            (None, Cell::NotRun) => {}
            (None, _) => wrong.push(format!("{arm}: no verdict")),
            (Some(verdict), _) => wrong.extend(differs(arm, *cell, verdict)),
        }
    }
    for (text, words) in [(&told.printed, row.prints), (&told.log, row.logs)] {
        if !text.contains(words) {
            wrong.push(format!("{words:?} is not said in:\n{text}"));
        }
    }
    wrong.extend(told.left.clone());
    if wrong.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{}\n  as a row:  {}\n{}",
        wrong.join("\n"),
        as_cells(told),
        told.printed
    ))
}

fn differs(arm: &str, cell: Cell, verdict: &Verdict) -> Option<String> {
    let found = found(verdict);
    let held = match (cell, verdict.outcome) {
        (Cell::Pass, outcome) => outcome == Outcome::Pass,
        (Cell::Red(class, check), Outcome::Fail(found)) => {
            found == class && names(verdict, class).contains(&check)
        }
        (Cell::Red(..) | Cell::NotRun, _) => false,
    };
    (!held).then(|| format!("{arm}: expected {cell:?}, found {found}"))
}

/// Checks of the deciding class that did not hold.
fn names(verdict: &Verdict, class: Class) -> Vec<&str> {
    let failed = verdict.checks.iter().filter(|check| !check.held);
    failed
        .filter(|check| check.class == class)
        .map(|check| check.name.as_str())
        .collect()
}

fn found(verdict: &Verdict) -> String {
    match verdict.outcome {
        Outcome::Fail(class) => format!("{class:?} {:?}", names(verdict, class)),
        _ => "Pass".to_owned(),
    }
}

/// What was found, in the words of the table.
fn as_cells(told: &Told) -> String {
    let cells = ARMS.map(|arm| match told.verdicts.get(arm) {
        None => "NotRun".to_owned(),
        Some(verdict) => match verdict.outcome {
            Outcome::Fail(class) => format!(
                "Red({class:?}, {:?})",
                names(verdict, class).first().unwrap_or(&"")
            ),
            _ => "Pass".to_owned(),
        },
    });
    format!("[{}]", cells.join(", "))
}
