//! Standard output and standard error: what is printed, and how wide it may be.
//!
//! Whoever reads may stop reading (`status | head -1`). Then nobody is told, and the work goes on:
//! verdicts stand in the evidence.

use std::fmt::Arguments;
use std::io::Write;

/// Writes to `stream`, whether or not anybody reads it.
pub(crate) fn write(mut stream: impl Write, text: Arguments<'_>) {
    let _ = stream.write_fmt(text).and_then(|()| stream.flush());
}

/// A piece of standard output.
macro_rules! out {
    ($($text:tt)*) => {
        $crate::terminal::write(std::io::stdout(), format_args!($($text)*))
    };
}

/// A line on standard output.
macro_rules! outln {
    ($($text:tt)*) => { out!("{}\n", format_args!($($text)*)) };
}

/// A line on standard error.
macro_rules! errln {
    ($($text:tt)*) => {
        $crate::terminal::write(std::io::stderr(), format_args!("{}\n", format_args!($($text)*)))
    };
}

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
