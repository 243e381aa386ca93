//! What can go wrong before an engine serves, told in the real programs' words.

use rustix::process::Signal;

use super::{death, host};
use crate::sim::fault::{Fault, Faults};

/// How a start ends that ends badly.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Ending {
    /// The engine core dies of this exception; exit code 1.
    Exception(String),
    /// Nothing is said; exit code 0.
    Quietly,
    /// This signal ends it.
    Signal(Signal),
}

/// The bad end that this start is told to have, if any.
pub fn told(faults: &Faults, events_port: Option<u16>, primary_bytes: u64) -> Option<Ending> {
    let exceptions = [
        (
            Fault::StartKwarg,
            "TypeError: KVCRSecondaryTierManager.__init__() got an unexpected keyword argument 'backpressure_detector'".to_owned(),
        ),
        (
            Fault::StartImport,
            "ImportError: cannot import name 'FrameworkDramInput' from 'kvcr.config' (/env/site-packages/kvcr/config.py)".to_owned(),
        ),
        (Fault::StartPortTaken, events_port_taken(events_port.unwrap_or(0))),
        (Fault::StartShmFull, host::full(primary_bytes.div_ceil(1 << 20), 0)),
        (Fault::StartBadAddress, "OSError: [Errno 14] Bad address".to_owned()),
        (
            Fault::StartUnknown,
            "vllm.v1.core.sched.exceptions.UnheardOfError: the frobnicator does not converge".to_owned(),
        ),
    ];
    for (fault, exception) in exceptions {
        if faults.tell(fault) {
            return Some(Ending::Exception(exception));
        }
    }
    if faults.tell(Fault::StartExitsQuietly) {
        return Some(Ending::Quietly);
    }
    faults
        .tell(Fault::StartSegfault)
        .then_some(Ending::Signal(Signal::SEGV))
}

/// Ends as said; returns the exit code where a signal does not make it unnecessary.
pub fn end(ending: &Ending) -> u8 {
    match ending {
        Ending::Exception(exception) => {
            outln!("{}", death::lines(exception));
            1
        }
        Ending::Quietly => 0,
        Ending::Signal(signal) => {
            death::by(*signal);
            1
        }
    }
}

/// The exception of a KV-events port that somebody else has.
pub fn events_port_taken(port: u16) -> String {
    format!("zmq.error.ZMQError: Address already in use (addr='tcp://*:{port}')")
}

/// The exception of a control port that somebody else has.
pub fn control_port_taken(listen: &str) -> String {
    let (host, port) = listen.rsplit_once(':').unwrap_or((listen, "0"));
    format!(
        "OSError: [Errno 98] Address already in use (while attempting to bind on address ('{host}', {port}))"
    )
}

/// The exception of a model that is not there.
pub fn no_model(path: &std::path::Path) -> String {
    format!(
        "huggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{}'. Use `repo_type` argument if needed.",
        path.display()
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::engine::vllm::marks::explain_text;
    use crate::failure::Class;

    fn of(fault: &str) -> Option<Ending> {
        let faults = Faults::new("worker0", vec![fault.parse().unwrap()], None);
        told(&faults, Some(20_004), 32 << 20)
    }

    #[test]
    fn every_exception_is_understood_by_who_reads_logs() {
        for (fault, class, cause) in [
            ("start_kwarg", Class::Skew, "backpressure_detector"),
            ("start_import", Class::Skew, "FrameworkDramInput"),
            ("start_port_taken", Class::Environment, "tcp://*:20004"),
            ("start_shm_full", Class::Environment, "32 MiB required"),
            ("start_bad_address", Class::Environment, "Bad address"),
            ("start_unknown", Class::Product, "frobnicator"),
        ] {
            let Some(Ending::Exception(exception)) = of(fault) else {
                panic!("{fault}");
            };
            let text = death::lines(&exception);
            let failure = explain_text("worker0", Some("exit code 1"), &text, Path::new("log"));
            assert_eq!(failure.class, class, "{fault}: {failure}");
            assert!(failure.cause.unwrap().contains(cause), "{fault}");
        }
    }

    #[test]
    fn others_end_without_a_word() {
        assert_eq!(of("start_exits_quietly"), Some(Ending::Quietly));
        assert_eq!(of("start_segfault"), Some(Ending::Signal(Signal::SEGV)));
        assert_eq!(of("start_slow"), None);
    }
}
