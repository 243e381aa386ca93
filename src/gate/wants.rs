//! What an arm wants of the profile, whatever the machine can do. Pure.
//!
//! A machine that lacks something is a matter of [`super::needs`]. Here the stack itself is
//! another one: some situations exist only in a stack with Guards, some only in one without.

use crate::config::Profile;
use crate::geometry::Geometry;

use super::Decision;

/// A kind of stack that an arm is told on.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Wants {
    /// Any.
    #[default]
    Any,
    /// One whose router hints.
    Hints,
    /// The same, with a dense model: the story counts blocks where a hybrid model has pages.
    DenseHints,
    /// The same, where the router goes on hinting at what a peer's tiers have lost.
    StaleHints,
    /// One with a hybrid model: a hit stands on the state at its end, too.
    States,
    /// One in which a Guard stands behind each of at least two workers.
    Guards,
    /// The same, with services that the harness started: the story ends one of them.
    OwnServices,
}

impl Wants {
    /// Whether a stack of `profile` will do.
    #[must_use]
    pub fn decide(self, profile: &Profile) -> Decision {
        let guarded = profile.kvcr.guard;
        let states = Geometry::of(profile).state_groups.unwrap_or(0);
        let gated = |need: &str, found: String, hint: &str| Decision::Gated {
            need: need.to_owned(),
            found,
            hint: hint.to_owned(),
        };
        match self {
            Self::Hints | Self::DenseHints if guarded && states > 0 => gated(
                "a stack without a state agent: with one the router hints no prompt whose states are stored",
                format!("kvcr.guard = true, {states} state groups"),
                "leave --guard out for this case",
            ),
            Self::StaleHints if guarded => gated(
                "a stack without a state agent: with one the router does not hint at what a peer's tiers have lost",
                "kvcr.guard = true".to_owned(),
                "leave --guard out for this case",
            ),
            Self::DenseHints | Self::StaleHints if states > 0 => gated(
                "a dense model: the caches are filled by the block",
                format!("{states} state groups"),
                "use a profile with a dense model",
            ),
            Self::States if states == 0 => gated(
                "a hybrid model",
                "no state groups".to_owned(),
                "use cpu-hybrid or sim-hybrid",
            ),
            Self::Guards | Self::OwnServices if !guarded => gated(
                "a Guard beside each worker",
                "kvcr.guard = false".to_owned(),
                "pass --guard (PHASE1_GUARD=true)",
            ),
            Self::Guards | Self::OwnServices if profile.topology.workers < 2 => gated(
                "two workers: one that dies and one that lives",
                format!("topology.workers = {}", profile.topology.workers),
                "pass --workers=2",
            ),
            Self::OwnServices if profile.topology.external_services.is_some() => gated(
                "services that the harness started: the story kills one, and nobody signals what somebody else runs",
                "topology.external_services is set".to_owned(),
                "leave --external-services out for this case, and pass --guard",
            ),
            Self::Any
            | Self::Hints
            | Self::DenseHints
            | Self::StaleHints
            | Self::States
            | Self::Guards
            | Self::OwnServices => Decision::Runnable,
        }
    }

    /// Whether requests may carry a cache salt: where a state agent runs, the router hints none
    /// that does.
    #[must_use]
    pub fn salted(self, profile: &Profile) -> bool {
        let hints = matches!(
            self,
            Self::Hints | Self::DenseHints | Self::StaleHints | Self::Guards | Self::OwnServices
        );
        !(hints && profile.kvcr.guard)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::testing::cpu;

    #[test]
    fn an_arm_is_told_on_its_kind_of_stack_only() {
        let decide = |wants: Wants, flags: &[&str]| match wants.decide(&cpu(flags).profile) {
            Decision::Runnable => None,
            Decision::Gated { found, .. } => Some(found),
        };
        for flags in [&[][..], &["--guard"]] {
            assert_eq!(decide(Wants::Any, flags), None);
        }
        for flags in [&[][..], &["--guard"]] {
            assert_eq!(decide(Wants::Hints, flags), None);
            assert_eq!(decide(Wants::DenseHints, flags), None);
        }
        assert_eq!(decide(Wants::StaleHints, &[]), None);
        assert_eq!(
            decide(Wants::StaleHints, &["--guard"]).as_deref(),
            Some("kvcr.guard = true")
        );
        let hybrid = &[
            "--block-tokens=256",
            "--hit-block-tokens=256",
            "--ssm-groups=3",
        ];
        assert_eq!(decide(Wants::Hints, hybrid), None);
        for wants in [Wants::DenseHints, Wants::StaleHints] {
            assert_eq!(decide(wants, hybrid).as_deref(), Some("3 state groups"));
        }
        let guarded = [&hybrid[..], &["--guard"]].concat();
        assert_eq!(
            decide(Wants::Hints, &guarded).as_deref(),
            Some("kvcr.guard = true, 3 state groups")
        );
        assert_eq!(decide(Wants::Guards, &["--guard"]), None);
        assert_eq!(
            decide(Wants::Guards, &[]).as_deref(),
            Some("kvcr.guard = false")
        );
        assert_eq!(
            decide(Wants::Guards, &["--guard", "--workers=1"]).as_deref(),
            Some("topology.workers = 1")
        );
    }

    #[test]
    fn what_somebody_else_runs_is_not_killed() {
        let found = |wants: Wants, flags: &[&str]| match wants.decide(&cpu(flags).profile) {
            Decision::Runnable => None,
            Decision::Gated { found, .. } => Some(found),
        };
        let elsewhere = &["--external-services=/run/s"];
        assert_eq!(found(Wants::Guards, elsewhere), None);
        assert_eq!(found(Wants::OwnServices, &["--guard"]), None);
        let why = found(Wants::OwnServices, elsewhere).unwrap();
        assert!(why.contains("external_services"), "{why}");
        let bare = found(Wants::OwnServices, &[]).unwrap();
        assert_eq!(bare, "kvcr.guard = false");
    }

    #[test]
    fn only_a_state_agent_keeps_hinted_requests_from_their_salt() {
        let salted = |wants: Wants, flags: &[&str]| wants.salted(&cpu(flags).profile);
        for wants in [Wants::Any, Wants::Hints, Wants::DenseHints, Wants::States] {
            assert!(salted(wants, &[]), "{wants:?}");
        }
        assert!(salted(Wants::Any, &["--guard"]));
        for wants in [
            Wants::Hints,
            Wants::DenseHints,
            Wants::Guards,
            Wants::OwnServices,
        ] {
            assert!(!salted(wants, &["--guard"]), "{wants:?}");
        }
    }
}
