//! What an installed Dynamo does that a plan has to know, read from its source: no Python runs,
//! and no version is compared.

use std::path::PathBuf;

/// The modules that look for the tiers of a worker, and for its state agent.
const READERS: [&str; 2] = ["dynamo/vllm/kv_hints.py", "dynamo/vllm/state_agent.py"];
/// The setting of a `MultiConnector` that holds what it consists of.
const INSIDE: &str = "\"connectors\"";

/// Whether it looks for them inside a `MultiConnector` too (dynamo#16778). One that does not has to
/// be told them outside; one that does would find them twice. `site`: where packages are installed.
pub(super) fn reads_nested_tiers(site: &[PathBuf]) -> bool {
    READERS.iter().all(|reader| {
        let found = site.iter().map(|directory| directory.join(reader));
        let source = found
            .into_iter()
            .find_map(|path| std::fs::read_to_string(path).ok());
        source.is_some_and(|source| source.contains(INSIDE))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_has_to_look_inside_for_both() {
        let place = tempfile::tempdir().unwrap();
        let site = [place.path().join("first"), place.path().join("second")];
        let write = |reader: &str, text: &str| {
            let path = site[1].join(reader);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        assert!(!reads_nested_tiers(&site));
        let [hints, agent] = READERS;
        write(hints, "tiers = extra.get(\"secondary_tiers\")");
        write(agent, "section = extra.get(\"dynamo_state_agent\")");
        assert!(!reads_nested_tiers(&site));
        write(hints, "for inner in extra.get(\"connectors\", []):");
        assert!(!reads_nested_tiers(&site));
        write(agent, "for inner in extra.get(\"connectors\", []):");
        assert!(reads_nested_tiers(&site));
    }
}
