//! Lines as Python's logging writes them: `LEVEL:logger:text`.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// How much a line matters.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum Level {
    Debug,
    Info,
    Warning,
    Error,
    Critical,
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Debug => "DEBUG",
            Self::Info => "INFO",
            Self::Warning => "WARNING",
            Self::Error => "ERROR",
            Self::Critical => "CRITICAL",
        })
    }
}

impl FromStr for Level {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.to_ascii_uppercase().as_str() {
            "DEBUG" => Ok(Self::Debug),
            "INFO" => Ok(Self::Info),
            "WARNING" => Ok(Self::Warning),
            "ERROR" => Ok(Self::Error),
            "CRITICAL" => Ok(Self::Critical),
            _ => Err("one of DEBUG, INFO, WARNING, ERROR, CRITICAL".to_owned()),
        }
    }
}

/// Where lines go, from a level on.
#[derive(Clone)]
pub(super) struct Log {
    level: Level,
    sink: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Log {
    pub(super) fn to_stderr(level: Level) -> Self {
        Self::new(level, |line| errln!("{line}"))
    }

    pub(super) fn new(level: Level, sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self {
            level,
            sink: Arc::new(sink),
        }
    }

    fn write(&self, level: Level, logger: &str, text: &str) {
        if level >= self.level {
            (self.sink)(&format!("{level}:{logger}:{text}"));
        }
    }

    /// A line of a library that has its own logging.
    pub(super) fn foreign(&self, line: &str) {
        (self.sink)(line);
    }

    pub(super) fn debug(&self, logger: &str, text: &str) {
        self.write(Level::Debug, logger, text);
    }

    pub(super) fn info(&self, logger: &str, text: &str) {
        self.write(Level::Info, logger, text);
    }

    pub(super) fn warning(&self, logger: &str, text: &str) {
        self.write(Level::Warning, logger, text);
    }

    pub(super) fn critical(&self, logger: &str, text: &str) {
        self.write(Level::Critical, logger, text);
    }
}
