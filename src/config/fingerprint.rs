//! Which stack a configuration needs, as a short hash.
//!
//! Two runs with the same fingerprint may share one running stack. So everything that changes
//! what runs is in it, and nothing that does not: run ids, evidence directories and how long an
//! unused stack is kept stay out.

use serde_json::{Value, json};

use super::Config;
use crate::environment::Installed;
use crate::hash;
use crate::plan::Plan;
use crate::stack::protocol::PROTOCOL;

/// Hex digits of a fingerprint: 64 bits. It names directories, and unix-socket paths below them
/// may not be longer than 107 bytes.
const DIGITS: usize = 16;

impl Config {
    /// The hash of what runs: `canonical` is the plan with placeholder ports and directories, see
    /// [`crate::plan::Bindings::canonical`].
    pub fn fingerprint(&self, canonical: &Plan, installed: &Installed) -> String {
        let document = json!({
            "protocol": PROTOCOL,
            "plan": canonical,
            "environment": installed.key,
            "model": installed.model_digest,
            "devices": self.profile.devices,
            // Compared with what the engines state when they come up, and then no more.
            "geometry": self.profile.geometry,
        });
        let mut text = String::new();
        write_canonical(&document, &mut text);
        let mut hex = hash::sha256(&text);
        hex.truncate(DIGITS);
        hex
    }
}

/// JSON with sorted keys and no spaces.
fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(map) => {
            let mut entries: Vec<_> = map.iter().collect();
            entries.sort_by_key(|(key, _)| key.as_str());
            out.push('{');
            for (at, (key, value)) in entries.into_iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                *out += &Value::from(key.as_str()).to_string();
                out.push(':');
                write_canonical(value, out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                if at > 0 {
                    out.push(',');
                }
                write_canonical(item, out);
            }
            out.push(']');
        }
        leaf => *out += &leaf.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::cpu;
    use super::*;
    use crate::engine::vllm::VllmBlueprint;
    use crate::plan::testing::installed;

    fn of(config: Config, installed: Installed) -> String {
        VllmBlueprint::new(config, installed).fingerprint().unwrap()
    }

    #[test]
    fn what_changes_the_plan_changes_it() {
        let base = of(cpu(&[]), installed());
        assert_eq!(base.len(), DIGITS);
        for flags in [
            ["--device-blocks", "225"],
            ["--block-tokens", "128"],
            ["--dtype", "bfloat16"],
            ["--dram-slots", "7"],
            ["--primary-bytes", "67108864"],
            ["--operation-timeout-ms", "4000"],
            ["--opportunistic-query", "true"],
            ["--served-name", "other"],
            ["--workers", "3"],
            ["--discovery", "file"],
            ["--frontend-port", "8000"],
            ["--engine-env", "A=1"],
            ["--engine-args=--seed 1", "--exact"],
            ["--max-model-len", "2048"],
            ["--ssm-groups", "3"],
        ] {
            assert_ne!(of(cpu(&flags), installed()), base, "{flags:?}");
        }
    }

    #[test]
    fn what_runs_elsewhere_or_otherwise_changes_it() {
        let base = of(cpu(&[]), installed());
        let mut other = installed();
        other.key = "other".into();
        assert_ne!(of(cpu(&[]), other), base);
        let mut other = installed();
        other.model_digest = "other".into();
        assert_ne!(of(cpu(&[]), other), base);
    }

    #[test]
    fn what_does_not_run_leaves_it_alone() {
        let base = of(cpu(&[]), installed());
        for flags in [
            ["--keep", "5"],
            ["--runs-dir", "/x"],
            ["--state-dir", "/x"],
            ["--max-tokens", "3"],
            ["--deadline", "3"],
            ["--require", "all"],
            ["--title", "x"],
            ["--repeats", "9"],
            ["--local-ttft-ratio-max", "0.5"],
        ] {
            assert_eq!(of(cpu(&flags), installed()), base, "{flags:?}");
        }
        let (one, two) = (cpu(&[]), cpu(&[]));
        assert_ne!(one.run_id, two.run_id);
        assert_eq!(of(one, installed()), of(two, installed()));
    }

    #[test]
    fn key_order_does_not_count_and_item_order_does() {
        let write = |text: &str| {
            let mut out = String::new();
            write_canonical(&serde_json::from_str(text).unwrap(), &mut out);
            out
        };
        assert_eq!(
            write(r#"{"b": 1, "a": {"d": [1, 2], "c": "x\"y"}}"#),
            r#"{"a":{"c":"x\"y","d":[1,2]},"b":1}"#
        );
        assert_eq!(
            write(r#"{"a":{"c":"x\"y","d":[1,2]},"b":1}"#),
            write(r#"{"b":1,"a":{"d":[1,2],"c":"x\"y"}}"#)
        );
        assert_ne!(write("[1,2]"), write("[2,1]"));
    }
}
