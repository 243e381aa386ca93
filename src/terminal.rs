//! How wide what we print may be.

/// Columns where standard output is no terminal, or does not say.
const COLUMNS: u16 = 120;

/// Columns of standard output. Without a bound a table in a CI log is as wide as its longest cell.
pub(crate) fn columns() -> u16 {
    rustix::termios::tcgetwinsize(std::io::stdout())
        .ok()
        .map(|size| size.ws_col)
        // Terminals that serial lines and some runners make up are 0 wide.
        .filter(|columns| *columns > 0)
        .unwrap_or(COLUMNS)
}
