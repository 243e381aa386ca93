//! The verdict table for people. Says nothing that `result.json` does not.

use comfy_table::{ContentArrangement, Table, presets};

use crate::config::profile::EngineKind;
use crate::evidence::result::ArmResult;

/// One row an arm: name, verdict, what did not hold, seconds. `width` columns at most.
#[must_use]
pub fn verdicts(results: &[ArmResult], width: u16) -> String {
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY);
    table.set_content_arrangement(ContentArrangement::Dynamic);
    table.set_width(width);
    table.set_header([
        "arm",
        "verdict",
        "checks",
        "first that did not hold",
        "seconds",
    ]);
    for result in results {
        let held = result
            .verdict
            .checks
            .iter()
            .filter(|check| check.held)
            .count();
        table.add_row([
            marked(result.engine, &result.name),
            result.verdict.outcome.to_string(),
            format!("{held}/{}", result.verdict.checks.len()),
            reason(result).unwrap_or_default(),
            format!("{:.1}", result.timings.wall / 1000.0),
        ]);
    }
    table.to_string()
}

/// What every line of the simulated stack begins with; nothing for the product.
#[must_use]
pub fn mark(engine: EngineKind) -> &'static str {
    match engine {
        EngineKind::Vllm => "",
        EngineKind::Sim => "[sim] ",
    }
}

/// The name of an arm, marked where the simulated stack was judged.
#[must_use]
pub fn marked(engine: EngineKind, name: &str) -> String {
    format!("{}{name}", mark(engine))
}

/// Why an arm did not pass, or what known defect it saw, in one line.
#[must_use]
pub fn reason(result: &ArmResult) -> Option<String> {
    if let Some(failure) = &result.failure {
        return Some(failure.what.clone());
    }
    if let Some(check) = result.verdict.failed().first() {
        return Some(format!(
            "{}: expected {}, found {}",
            check.name, check.expected, check.found
        ));
    }
    let known = result.verdict.known();
    let check = known.first()?;
    let because = check.known.as_deref().unwrap_or_default();
    Some(format!("known: {}: {because}", check.name))
}
