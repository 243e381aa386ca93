//! TC-04: what a worker stored outlives it. Its Guard serves it to peers, and gives it back to a
//! replacement.
//!
//! Every arm has the supervisor strike a process of the running stack, judges what follows, and
//! starts again what died. Requests that nobody can answer any more are counted and noted; those
//! to a worker that lives are owed an answer, and every answer is the reference's.
//!
//! - `survival`: a worker dies, and its blocks do not.
//! - `replacement`: a worker comes back, once, twice, both of them.
//! - `refusal`: a worker comes back that must not.
//! - `silence`: what is not dead but silent, and what dies beside the workers.

mod refusal;
mod replacement;
mod silence;
mod survival;

use super::{Arm, Case};
use crate::gate::Wants;
use crate::stack::protocol::Mode;

/// The case.
pub const CASE: Case = Case {
    id: "tc04",
    title: "Guard protection, takeover, replacement",
    arms: &[
        arm(
            "tc04::protection",
            "every block that was stored before the kill is recovered, and served to a peer afterwards",
            survival::protection,
        ),
        arm(
            "tc04::takeover",
            "requests in flight, right after the kill and after the takeover end, and every answer is the reference's",
            survival::takeover,
        ),
        arm(
            "tc04::replacement",
            "a replacement takes its pool back: its first requests are warm, and the Guard stands by again",
            replacement::replacement,
        ),
        arm(
            "tc04::second_failure",
            "the replacement is killed too, and neither its predecessor's blocks nor its own are lost",
            replacement::second_failure,
        ),
        arm(
            "tc04::guard_death",
            "a kvcr_service that dies takes no answer with it, and the worker comes back with a new one",
            silence::guard_death,
        )
        .wanting(Wants::OwnServices),
        arm(
            "tc04::hung_worker",
            "a worker that is stopped, not dead, is taken over if and only if a heartbeat is asked for",
            silence::hung_worker,
        ),
        arm(
            "tc04::digest_mismatch",
            "a replacement of another layout is refused in words, and the Guard serves on",
            refusal::digest_mismatch,
        ),
        arm(
            "tc04::claim_refused",
            "a replacement that asks for the pool of a living worker is refused in words, and harms neither",
            refusal::claim_refused,
        ),
        arm(
            "tc04::both_die",
            "source and target are killed together, and both come back warm",
            replacement::both_die,
        ),
    ],
};

const fn arm(name: &'static str, claim: &'static str, story: super::Story) -> Arm {
    Arm {
        name,
        claim,
        mode: Mode::Exclusive,
        wants: Wants::Guards,
        story,
    }
}
