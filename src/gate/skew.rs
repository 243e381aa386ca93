//! Whether the installed releases can work together. Pure: judges what `preflight.py` reported.

use crate::environment::preflight::{PairProbe, Preflight};
use crate::failure::{Class, Failure};

/// Probes about one install rather than about releases that do not fit.
const ABOUT_THE_INSTALL: &[&str] = &["files-intact", "packages-present", "preflight"];

/// The probe's own failure to look at anything.
const NO_REPORT: &str = "preflight";

/// The reason why no stack can work with these releases, culprit first; none if nothing speaks
/// against them. A probe that found nothing to look at proves nothing, and is left to `doctor`.
pub fn preflight_failure(report: &Preflight) -> Option<Failure> {
    report
        .probes
        .iter()
        .find(|probe| broken(probe))
        .map(failure)
}

/// Whether the probe proves that something is wrong.
pub(super) fn broken(probe: &PairProbe) -> bool {
    !probe.ok && (probe.ran || probe.id == NO_REPORT)
}

/// Who has to act on it.
pub(super) fn class(probe: &PairProbe) -> Class {
    match ABOUT_THE_INSTALL.contains(&probe.id.as_str()) {
        true => Class::Environment,
        false => Class::Skew,
    }
}

fn failure(probe: &PairProbe) -> Failure {
    let class = class(probe);
    let what = match (&probe.culprit, class) {
        (Some(culprit), Class::Skew) => {
            let releases: Vec<&str> = culprit.split(" + ").collect();
            match releases.as_slice() {
                [one] => format!("{one} cannot work here"),
                [first @ .., last] => {
                    format!("{} and {last} cannot work together", first.join(", "))
                }
                [] => "the installed releases cannot work together".to_owned(),
            }
        }
        (None, Class::Skew) => "the installed releases cannot work together".to_owned(),
        (Some(culprit), _) => format!("{culprit}: not as it should be installed"),
        (None, _) => "the installed packages are not complete".to_owned(),
    };
    let found = match &probe.reference {
        Some(reference) => format!("{} ({reference})", probe.found),
        None => probe.found.clone(),
    };
    let failure = Failure::new(class, what).expected(&probe.need).found(found);
    match &probe.hint {
        Some(hint) => failure.hint(hint.trim_end_matches('.')),
        None => failure,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;

    use super::*;

    pub(in crate::gate) fn probe(id: &str, ok: bool, ran: bool, culprit: &str) -> PairProbe {
        PairProbe {
            id: id.to_owned(),
            need: "every name that vLLM's KVCR tier imports from kvcr".to_owned(),
            found: "kvcr.config has no FrameworkDramInput".to_owned(),
            ok,
            ran,
            culprit: Some(culprit.to_owned()).filter(|culprit| !culprit.is_empty()),
            hint: Some("Install a set that is known to work.".to_owned()),
            reference: Some("vllm/a.py:12".to_owned()),
        }
    }

    fn judged(probes: Vec<PairProbe>) -> Option<String> {
        let report = Preflight {
            schema: 1,
            ok: probes.iter().all(|probe| probe.ok),
            packages: BTreeMap::new(),
            probes,
        };
        preflight_failure(&report).map(|failure| failure.to_string())
    }

    #[test]
    fn the_first_proof_speaks_with_its_culprit_first() {
        let text = judged(vec![
            probe("a", true, true, ""),
            probe("b", false, false, "doubt"),
            probe("vllm-kvcr-names", false, true, "vLLM 0.31.0 + kvcr 0.1.1"),
            probe("c", false, true, "other"),
        ]);
        assert_eq!(
            text.as_deref(),
            Some(
                "Skew: vLLM 0.31.0 and kvcr 0.1.1 cannot work together; expected every name that \
                 vLLM's KVCR tier imports from kvcr; found kvcr.config has no FrameworkDramInput \
                 (vllm/a.py:12); Install a set that is known to work"
            )
        );
    }

    #[test]
    fn a_doubt_is_no_proof() {
        assert_eq!(judged(vec![probe("a", false, false, "x")]), None);
        assert_eq!(judged(vec![]), None);
    }

    #[test]
    fn a_damaged_install_is_no_skew() {
        let text = judged(vec![probe("files-intact", false, true, "kvcr 0.1.1")]).unwrap();
        assert!(
            text.starts_with("Environment: kvcr 0.1.1: not as it"),
            "{text}"
        );
        let text = judged(vec![probe("preflight", false, false, "")]).unwrap();
        assert!(
            text.starts_with("Environment: the installed packages"),
            "{text}"
        );
    }
}
