//! The report for people. ASCII: it is read in logs and over thin lines.

use comfy_table::{ContentArrangement, Table, presets};

use super::{Report, Status};

/// Narrower tables break every word.
const LEAST: u16 = 60;
/// Wider ones are hard to follow.
const MOST: u16 = 120;

pub(super) fn render(report: &Report, width: u16) -> String {
    let mut table = Table::new();
    table
        .load_style(presets::NOTHING)
        .set_content_arrangement(ContentArrangement::Dynamic)
        .set_width(width.clamp(LEAST, MOST))
        .set_header(["", "NEED", "FOUND", "WHAT TO DO"]);
    for row in &report.rows {
        let mark = match row.status {
            Status::Met => "ok",
            Status::Unmet => "NO",
            Status::Note => "note",
        };
        let hint = row.hint.as_deref().unwrap_or_default();
        table.add_row([mark, &row.need, &row.found, hint]);
    }
    let profile = &report.profile;
    let unmet = report
        .rows
        .iter()
        .filter(|row| row.status == Status::Unmet)
        .count();
    let class = report
        .class
        .map(|class| format!(" ({class})"))
        .unwrap_or_default();
    let verdict = match unmet {
        0 => format!("The `{profile}` profile can run here."),
        1 => format!("The `{profile}` profile cannot run here{class}: one need is not met."),
        _ => format!("The `{profile}` profile cannot run here{class}: {unmet} needs are not met."),
    };
    format!("{}\n\n{verdict}", table.trim_fmt())
}
