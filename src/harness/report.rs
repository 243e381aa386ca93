//! What a person sees while arms run: bring-up as a spinner on a terminal, as lines elsewhere.

use crate::environment::progress::{self, Reporter};
use crate::stack::lease;

/// One reporter for installation and bring-up.
pub struct Progress(Box<dyn Reporter + Send>);

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Progress")
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self(progress::reporter())
    }
}

impl Progress {
    /// For installation.
    pub fn steps(&mut self) -> &mut dyn Reporter {
        self.0.as_mut()
    }
}

impl lease::Reporter for Progress {
    fn report(&mut self, progress: lease::Progress) {
        self.0.step(&progress.to_string());
    }
}
