//! Whether services that somebody else runs are still those that our workers claimed.
//!
//! A connect says it, from any namespace; the socket's file and the process behind it say whether
//! it is the same one. Nothing is sent: a service takes it for a client that changed its mind.

use std::io;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::MissedTickBehavior;

use super::{Peer, START, Sidecar, connect};
use crate::failure::Failure;
use crate::telemetry::guard::{Event, Journal};

const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Ends with the first of `sidecars` that ended or was started again, and why that ends the stack.
/// Never, where there is none.
pub(crate) fn watch(sidecars: &[Sidecar]) -> JoinSet<Failure> {
    let mut all = JoinSet::new();
    for sidecar in sidecars {
        all.spawn(until_lost(sidecar.clone()));
    }
    all
}

async fn until_lost(sidecar: Sidecar) -> Failure {
    let mut looks = tokio::time::interval(LOOK_EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        looks.tick().await;
        let seen = connect(&sidecar.external.socket).await.map(|(_, who)| who);
        if let Some(found) = lost(sidecar.who, &seen) {
            return failure(&sidecar, found);
        }
    }
}

/// What was seen instead of the service.
fn lost(was: Peer, seen: &io::Result<Peer>) -> Option<String> {
    match seen {
        Ok(who) if *who == was => None,
        Ok(_) => Some("another service listens there now".to_owned()),
        // It has more to do than it can accept.
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => Some(error.to_string()),
    }
}

/// A Guard that fails ends its service, and says so: that is the product's. Whatever else ends it is
/// not ours to judge.
fn failure(sidecar: &Sidecar, found: String) -> Failure {
    let external = &sidecar.external;
    let said = sidecar.log.since().unwrap_or_default();
    let failed = Journal::read(&said)
        .events
        .into_iter()
        .find_map(|event| match event {
            Event::Failed { line } => Some(line),
            _ => None,
        });
    match failed {
        Some(line) => Failure::product(format!(
            "{}: its Guard failed, and it stopped",
            external.name
        ))
        .cause(line, &external.log),
        None => {
            let mut failure = Failure::environment(format!(
                "{}, which somebody else runs, ended while the stack was up",
                external.name
            ))
            .expected(format!(
                "it serves as long as {}: nobody here can start it again",
                external.worker
            ))
            .found(found)
            .hint(format!("see why in its log; {START}, and run again"));
            failure.log = Some(external.log.clone());
            failure
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_process_behind_the_socket_is_another_service() {
        let was = Peer {
            file: (1, 2),
            pid: 3,
            uid: 4,
        };
        let error = |kind: io::ErrorKind| Err(io::Error::from(kind));
        assert_eq!(lost(was, &Ok(was)), None);
        assert_eq!(lost(was, &error(io::ErrorKind::WouldBlock)), None);
        for other in [
            Peer { pid: 5, ..was },
            Peer {
                file: (1, 5),
                ..was
            },
        ] {
            assert!(lost(was, &Ok(other)).unwrap().contains("another service"));
        }
        for kind in [io::ErrorKind::ConnectionRefused, io::ErrorKind::NotFound] {
            assert!(lost(was, &error(kind)).is_some(), "{kind}");
        }
    }
}
