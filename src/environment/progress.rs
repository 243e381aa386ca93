//! What the user sees while something is made ready: an environment, a stack.
//!
//! Everything goes to standard error: standard output is for answers (tables, JSON, and the
//! list that nextest reads).

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Is told what is going on.
pub trait Reporter {
    /// A step begins; it lasts until the next one or [`Self::done`].
    fn step(&mut self, text: &str);

    /// Something worth knowing that is not a step: a choice and its reason.
    fn note(&mut self, text: &str);

    /// All steps are over.
    fn done(&mut self, text: &str);
}

/// A reporter that suits standard error: a spinner on a terminal, lines elsewhere.
pub fn reporter() -> Box<dyn Reporter + Send> {
    if std::io::stderr().is_terminal() {
        Box::new(Spinner::new())
    } else {
        Box::new(Lines::new())
    }
}

/// The same for a stack that may be simulated: then every line is marked.
pub fn reporter_of(simulated: bool) -> Box<dyn Reporter + Send> {
    match simulated {
        true => Box::new(Marked(reporter())),
        false => reporter(),
    }
}

/// Marks every line as a simulated stack's.
struct Marked(Box<dyn Reporter + Send>);

impl Reporter for Marked {
    fn step(&mut self, text: &str) {
        self.0.step(&format!("[sim] {text}"));
    }

    fn note(&mut self, text: &str) {
        self.0.note(&format!("[sim] {text}"));
    }

    fn done(&mut self, text: &str) {
        self.0.done(&format!("[sim] {text}"));
    }
}

/// Says nothing.
#[derive(Debug, Default)]
pub struct Silent;

impl Reporter for Silent {
    fn step(&mut self, _: &str) {}
    fn note(&mut self, _: &str) {}
    fn done(&mut self, _: &str) {}
}

/// One line a step, with the time since the beginning: for logs and CI.
struct Lines {
    started: Instant,
    last: String,
}

impl Lines {
    fn new() -> Self {
        Self {
            started: Instant::now(),
            last: String::new(),
        }
    }

    fn line(&mut self, text: &str) {
        // A wait reports the same step again and again; a log needs it once.
        if self.last != text {
            errln!("[{:6.1}s] {text}", self.started.elapsed().as_secs_f64());
            self.last = text.to_owned();
        }
    }
}

impl Reporter for Lines {
    fn step(&mut self, text: &str) {
        self.line(text);
    }

    fn note(&mut self, text: &str) {
        self.line(text);
    }

    fn done(&mut self, text: &str) {
        self.line(text);
    }
}

/// A spinner with the elapsed time; finished steps stay above it.
struct Spinner {
    bar: ProgressBar,
    step: Option<(String, Instant)>,
}

impl Spinner {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        if let Ok(style) = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(120));
        Self { bar, step: None }
    }

    fn finish_step(&mut self) {
        if let Some((text, since)) = self.step.take() {
            let seconds = since.elapsed().as_secs_f64();
            self.bar.println(format!("  {text} ({seconds:.1} s)"));
        }
    }
}

impl Reporter for Spinner {
    fn step(&mut self, text: &str) {
        if self.step.as_ref().is_some_and(|(now, _)| now == text) {
            return;
        }
        self.finish_step();
        self.bar.reset_elapsed();
        self.bar.set_message(text.to_owned());
        self.step = Some((text.to_owned(), Instant::now()));
    }

    fn note(&mut self, text: &str) {
        self.bar.println(format!("  {text}"));
    }

    fn done(&mut self, text: &str) {
        self.finish_step();
        self.bar.finish_and_clear();
        errln!("{text}");
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
