//! What the simulated stack lacks, or has beyond the real one.

use std::collections::{BTreeMap, BTreeSet};

use super::document::Document;
use super::page::Family;
use super::{Recording, Surface};

/// A difference that does not matter.
#[derive(Clone, Copy, Debug)]
struct Allowed {
    /// A family; `*` at the end stands for any rest.
    what: &'static str,
    /// Why it does not matter.
    #[cfg_attr(not(test), expect(dead_code, reason = "for whoever reads the table"))]
    why: &'static str,
}

impl Allowed {
    fn covers(&self, family: &str) -> bool {
        match self.what.strip_suffix('*') {
            Some(beginning) => family.starts_with(beginning),
            None => family == self.what,
        }
    }
}

const fn allowed(what: &'static str, why: &'static str) -> Allowed {
    Allowed { what, why }
}

const UNREAD: &str = "nothing of ours reads it";

/// Families and fields that the simulated stack may lack.
#[rustfmt::skip]
const MAY_LACK: &[Allowed] = &[
    // How Dynamo's runtime and its router fare.
    allowed("dynamo_tokio_*", UNREAD),
    allowed("dynamo_work_handler_*", UNREAD),
    allowed("dynamo_transport_*", UNREAD),
    allowed("dynamo_request_plane_*", UNREAD),
    allowed("dynamo_frontend_*", "load and latency of the front door: judged at the client"),
    allowed("dynamo_component_cancellation_*", UNREAD),
    allowed("dynamo_component_gpu_cache_*", UNREAD),
    allowed("dynamo_component_inflight_requests", UNREAD),
    allowed("dynamo_component_kv_cache_hit_rate", UNREAD),
    allowed("dynamo_component_kv_cache_event_warnings", UNREAD),
    allowed("dynamo_component_ckf_*", UNREAD),
    allowed("dynamo_component_model_load_*", UNREAD),
    allowed("dynamo_component_request*", UNREAD),
    allowed("dynamo_component_response_*", UNREAD),
    allowed("dynamo_component_total_blocks", UNREAD),
    allowed("dynamo_component_uptime_*", UNREAD),
    allowed("dynamo_component_kv_publisher_*", "the front door says what it applied"),
    allowed("dynamo_component_router_active_sequence_*", "how the router counts load"),
    allowed("dynamo_component_router_approximate_*", "a policy that is not used"),
    allowed("dynamo_component_router_shared_cache_*", "a policy that is not used"),
    allowed("dynamo_component_router_input_*", UNREAD),
    allowed("dynamo_component_router_inter_*", UNREAD),
    allowed("dynamo_component_router_output_*", UNREAD),
    allowed("dynamo_component_router_kv_best_*", UNREAD),
    allowed("dynamo_component_router_kv_hit_*", UNREAD),
    allowed("dynamo_component_router_kv_selected_*", UNREAD),
    allowed("dynamo_component_router_kv_transfer_*", UNREAD),
    allowed("dynamo_component_router_kv_worker_*", UNREAD),
    allowed("dynamo_component_router_kv_zmq_ingress_batches_*", UNREAD),
    allowed("dynamo_component_router_kv_zmq_ingress_lifecycle_*", UNREAD),
    allowed("dynamo_component_router_non_max_*", UNREAD),
    allowed("dynamo_component_router_overlap_*", UNREAD),
    allowed("dynamo_component_router_requests_*", UNREAD),
    allowed("dynamo_component_router_time_*", UNREAD),
    allowed("dynamo_engine_request", UNREAD),
    allowed("dynamo_rejection_*", UNREAD),
    allowed("dynamo_request_queue", UNREAD),
    allowed("dynamo_router_*", "what the router's parts take"),
    // What the engine says of its own work.
    allowed("vllm:admission_*", UNREAD),
    allowed("vllm:mm_*", "no model of ours reads pictures"),
    allowed("vllm:estimated_*", UNREAD),
    allowed("vllm:engine_sleep_state", UNREAD),
    allowed("vllm:iteration_*", UNREAD),
    allowed("vllm:inter_token_*", "timed at the client"),
    allowed("vllm:time_to_first_token_*", "timed at the client"),
    allowed("vllm:e2e_request_*", "timed at the client"),
    allowed("vllm:request_*", UNREAD),
    allowed("vllm:num_preemptions_*", UNREAD),
    allowed("vllm:kv_offload_tiering_backpressure_*", "the tier is never slow enough"),
];

/// Families whose labels are settings of the engine, and those labels that mean something to us.
const SETTINGS: &[(&str, &[&str])] = &[(
    "vllm:cache_config_info",
    &[
        "block_size",
        "engine",
        "mamba_cache_mode",
        "mamba_page_size_padded",
        "model_name",
        "num_gpu_blocks",
        "worker_id",
    ],
)];

/// Everything in which `sim` is not like `real`, one sentence each; what may be lacking is left
/// out. Excerpts, versions and dates are not compared.
pub fn differences(real: &Recording, sim: &Recording) -> Vec<String> {
    let mut out = Vec::new();
    for (name, real) in &real.surfaces {
        match sim.surfaces.get(name) {
            None => out.push(format!("{name}: missing")),
            Some(sim) => surface(name, real, sim, &mut out),
        }
    }
    for name in sim.surfaces.keys() {
        if !real.surfaces.contains_key(name) {
            out.push(format!("{name}: the real stack has no such surface"));
        }
    }
    out
}

fn surface(name: &str, real: &Surface, sim: &Surface, out: &mut Vec<String>) {
    match (real, sim) {
        (Surface::Page { families: real }, Surface::Page { families: sim }) => {
            pages(name, real, sim, out);
        }
        (
            Surface::Response {
                status,
                content_type,
                document,
                ..
            },
            Surface::Response {
                status: sim_status,
                content_type: sim_type,
                document: sim,
                ..
            },
        ) => {
            equal(name, "status", status, sim_status, out);
            equal(name, "content type", content_type, sim_type, out);
            documents(name, document, sim, out);
        }
        (
            Surface::Stream {
                status,
                content_type,
                frames,
                document,
                ..
            },
            Surface::Stream {
                status: sim_status,
                content_type: sim_type,
                frames: sim_frames,
                document: sim,
                ..
            },
        ) => {
            equal(name, "status", status, sim_status, out);
            equal(name, "content type", content_type, sim_type, out);
            equal(
                name,
                "frames",
                &frames.join(", "),
                &sim_frames.join(", "),
                out,
            );
            documents(name, document, sim, out);
        }
        (Surface::Log { lines: real }, Surface::Log { lines: sim }) => {
            sets(name, "line", real, sim, out);
        }
        _ => out.push(format!("{name}: of another kind")),
    }
}

fn equal<T: PartialEq + std::fmt::Display>(
    name: &str,
    what: &str,
    real: &T,
    sim: &T,
    out: &mut Vec<String>,
) {
    if real != sim {
        out.push(format!("{name}: {what}: really {real}, simulated {sim}"));
    }
}

fn pages(
    name: &str,
    real: &BTreeMap<String, Family>,
    sim: &BTreeMap<String, Family>,
    out: &mut Vec<String>,
) {
    for (family, real) in real {
        let Some(sim) = sim.get(family) else {
            if !may_lack(family) {
                out.push(format!("{name}: {family}: missing ({real})"));
            }
            continue;
        };
        let at = format!("{name}: {family}");
        equal(&at, "type", &real.kind, &sim.kind, out);
        equal(&at, "dated by _created", &real.created, &sim.created, out);
        let mut labels = real.labels.clone();
        if let Some((_, needed)) = SETTINGS.iter().find(|(name, _)| name == family) {
            labels.retain(|label| needed.contains(&label.as_str()) || sim.labels.contains(label));
        }
        sets(&at, "label", &labels, &sim.labels, out);
        sets(&at, "sample", &real.samples, &sim.samples, out);
    }
    for family in sim.keys().filter(|family| !real.contains_key(*family)) {
        out.push(format!(
            "{name}: {family}: the real stack has no such family"
        ));
    }
}

fn documents(name: &str, real: &Document, sim: &Document, out: &mut Vec<String>) {
    for (path, kinds) in real {
        match sim.get(path) {
            None => out.push(format!("{name}: {path}: missing ({kinds})")),
            Some(sim) => equal(name, path, kinds, sim, out),
        }
    }
    for path in sim.keys().filter(|path| !real.contains_key(*path)) {
        out.push(format!("{name}: {path}: the real stack has no such field"));
    }
}

fn sets(
    name: &str,
    what: &str,
    real: &BTreeSet<String>,
    sim: &BTreeSet<String>,
    out: &mut Vec<String>,
) {
    for lacking in real.difference(sim) {
        out.push(format!("{name}: {what} missing: {lacking}"));
    }
    for beyond in sim.difference(real) {
        // It says on its own that it is simulated.
        if !beyond.starts_with("kvcr-phase1 sim:") {
            out.push(format!(
                "{name}: {what} that the real stack has not: {beyond}"
            ));
        }
    }
}

fn may_lack(family: &str) -> bool {
    MAY_LACK.iter().any(|allowed| allowed.covers(family))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recording(surfaces: &[(&str, Surface)]) -> Recording {
        Recording {
            stack: String::new(),
            recorded: String::new(),
            versions: BTreeMap::new(),
            surfaces: surfaces
                .iter()
                .map(|(name, surface)| ((*name).to_owned(), surface.clone()))
                .collect(),
        }
    }

    fn found(real: Surface, sim: Surface) -> Vec<String> {
        differences(&recording(&[("x", real)]), &recording(&[("x", sim)]))
    }

    #[test]
    fn equal_shapes_have_no_differences_whatever_their_values() {
        let page =
            |value: u32| Surface::page(&format!("# TYPE a counter\na{{tier=\"1\"}} {value}\n"));
        assert!(found(page(1), page(2)).is_empty());
        let answer =
            |id: u32| Surface::response(200, "application/json", &format!("{{\"id\":{id}}}"));
        assert!(found(answer(1), answer(2)).is_empty());
    }

    #[test]
    fn families_labels_and_samples_are_compared_both_ways() {
        let real = "# TYPE a counter\na{tier=\"0\",m=\"x\"} 1\n# TYPE b gauge\nb 1\n# TYPE vllm:mm_x counter\n";
        let sim = "# TYPE a gauge\na{tier=\"1\"} 1\n# TYPE c gauge\nc 1\n";
        assert_eq!(
            found(Surface::page(real), Surface::page(sim)),
            [
                "x: a: type: really counter, simulated gauge",
                "x: a: label missing: m",
                "x: a: sample missing: tier=0",
                "x: a: sample that the real stack has not: tier=1",
                "x: b: missing (gauge {})",
                "x: c: the real stack has no such family",
            ]
        );
    }

    #[test]
    fn responses_streams_and_logs_are_compared() {
        let response = |status, body| Surface::response(status, "application/json", body);
        assert_eq!(
            found(
                response(400, r#"{"a":1}"#),
                response(500, r#"{"a":"1","b":2}"#)
            ),
            [
                "x: status: really 400, simulated 500",
                "x: /a: really integer, simulated string",
                "x: /b: the real stack has no such field",
            ]
        );
        let stream = |body| Surface::response(200, "text/event-stream", body);
        assert_eq!(
            found(stream("data: [DONE]\n\n"), stream(": x\n\n")),
            ["x: frames: really [DONE], simulated comment"]
        );
        assert_eq!(
            found(
                Surface::log("KVCR_EVENT a b=1"),
                Surface::log("kvcr-phase1 sim: x")
            ),
            ["x: line missing: KVCR_EVENT a b="]
        );
        assert_eq!(
            found(stream(""), response(200, "{}")),
            ["x: of another kind"]
        );
    }

    #[test]
    fn a_setting_may_be_unsaid_unless_it_means_something() {
        let real = "vllm:cache_config_info{block_size=\"64\",is_attention_free=\"x\"} 1\n";
        let sim = "vllm:cache_config_info{made_up=\"1\"} 1\n";
        assert_eq!(
            found(Surface::page(real), Surface::page(sim)),
            [
                "x: vllm:cache_config_info: label missing: block_size",
                "x: vllm:cache_config_info: label that the real stack has not: made_up",
            ]
        );
    }

    #[test]
    fn every_allowance_is_of_use() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read(root.join("tests/fixtures/real/cpu.json")).unwrap();
        let real: Recording = serde_json::from_slice(&text).unwrap();
        assert!(differences(&real, &real).is_empty());
        let families: BTreeSet<&str> = real
            .surfaces
            .values()
            .filter_map(|surface| match surface {
                Surface::Page { families } => Some(families.keys().map(String::as_str)),
                _ => None,
            })
            .flatten()
            .collect();
        for allowed in MAY_LACK {
            let used = families.iter().any(|family| allowed.covers(family));
            assert!(used, "{} ({})", allowed.what, allowed.why);
        }
    }

    #[test]
    fn whole_surfaces_are_missed_and_noticed() {
        let (real, sim) = (Surface::log(""), Surface::log(""));
        assert_eq!(
            differences(&recording(&[("a", real)]), &recording(&[("b", sim)])),
            ["a: missing", "b: the real stack has no such surface"]
        );
    }
}
