//! Ctrl-C once: finish the evidence and take the stack down. Twice: go at once, and have the
//! supervisor take the stack down without us.
//!
//! SIGTERM (a nextest timeout) finishes the evidence too, but leaves the stack to the other tests.

use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};

use tokio::sync::watch;

use crate::failure::Failure;

/// Why a run has to end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Cause {
    /// Ctrl-C: the person wants everything gone.
    Interrupt,
    /// SIGTERM: this process has to go, the stack need not.
    Terminate,
}

impl Cause {
    /// What to write into the evidence.
    #[must_use]
    pub fn failure(self) -> Failure {
        match self {
            Self::Interrupt => Failure::inconclusive("interrupted by Ctrl-C before a verdict"),
            Self::Terminate => Failure::inconclusive("terminated (SIGTERM) before a verdict").hint(
                "if a runner's timeout did this, raise it: the harness has deadlines of its own",
            ),
        }
    }
}

/// A signal that was seen, shared with everything that waits.
#[derive(Clone, Debug)]
pub struct Interrupt {
    seen: Arc<AtomicU8>,
    flag: Arc<AtomicBool>,
    changed: watch::Receiver<Option<Cause>>,
}

impl Interrupt {
    /// Installs the handlers, once a process. `last_words` runs on the second Ctrl-C, just before
    /// the process ends; it must not wait for anything.
    pub fn install(last_words: impl Fn() + Send + 'static) -> Self {
        static INSTALLED: OnceLock<Interrupt> = OnceLock::new();
        INSTALLED
            .get_or_init(|| {
                let (tell, changed) = watch::channel(None);
                let seen = Arc::new(AtomicU8::new(0));
                let flag = Arc::new(AtomicBool::new(false));
                let (counter, raised) = (Arc::clone(&seen), Arc::clone(&flag));
                std::thread::Builder::new()
                    .name("signals".into())
                    .spawn(move || listen(&tell, &counter, &raised, &last_words))
                    .expect("a thread for signals");
                Self {
                    seen,
                    flag,
                    changed,
                }
            })
            .clone()
    }

    /// What was seen so far.
    #[must_use]
    pub fn cause(&self) -> Option<Cause> {
        match self.seen.load(Ordering::SeqCst) {
            0 => None,
            1 => Some(Cause::Interrupt),
            _ => Some(Cause::Terminate),
        }
    }

    /// Raised with the first signal, for code that polls.
    #[must_use]
    pub fn flag(&self) -> &AtomicBool {
        &self.flag
    }

    /// Resolves when a signal was seen.
    pub async fn seen(&self) -> Cause {
        let mut changed = self.changed.clone();
        loop {
            if let Some(cause) = *changed.borrow_and_update() {
                return cause;
            }
            if changed.changed().await.is_err() {
                // The listener is gone, and with it any signal to come.
                std::future::pending::<()>().await;
            }
        }
    }
}

fn listen(
    tell: &watch::Sender<Option<Cause>>,
    seen: &AtomicU8,
    flag: &AtomicBool,
    last_words: &dyn Fn(),
) {
    use tokio::signal::unix::{SignalKind, signal};
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime for signals");
    runtime.block_on(async {
        let (Ok(mut int), Ok(mut term)) = (
            signal(SignalKind::interrupt()),
            signal(SignalKind::terminate()),
        ) else {
            return;
        };
        loop {
            let cause = tokio::select! {
                _ = int.recv() => Cause::Interrupt,
                _ = term.recv() => Cause::Terminate,
            };
            if seen.load(Ordering::SeqCst) != 0 {
                errln!("interrupted again: leaving now, the supervisor stops the stack");
                last_words();
                #[expect(
                    clippy::disallowed_methods,
                    reason = "the person asked twice; evidence written so far is on disk, and the lease ends with the process"
                )]
                std::process::exit(130);
            }
            if cause == Cause::Interrupt {
                errln!("interrupted: finishing the evidence; Ctrl-C again leaves at once");
            }
            seen.store(if cause == Cause::Interrupt { 1 } else { 2 }, Ordering::SeqCst);
            flag.store(true, Ordering::SeqCst);
            let _ = tell.send(Some(cause));
        }
    });
}
