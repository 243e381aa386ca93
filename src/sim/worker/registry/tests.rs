//! The page against one that was recorded on the real product.

use super::*;
use crate::telemetry::{Page, kvcr};

pub(in crate::sim::worker) fn identity() -> Identity {
    Identity {
        namespace: "dynamo".into(),
        model: "tiny".into(),
        instance: 0x042a_a22c_0a71_1908,
        block_tokens: 64,
        state_page: None,
        device_blocks: 96,
    }
}

const ALL: Present = Present {
    tiers: true,
    kvcr: true,
    publisher: true,
};

fn page(registry: &Registry) -> Page {
    let page = Page::parse(&registry.render());
    assert!(page.problems().is_empty(), "{:?}", page.problems());
    page
}

/// A page that was recorded on the real product, after cold, warm and evicted requests.
const RECORDED: &str = include_str!("../../../cases/tc01_generation/testdata/warm_tier-after.prom");

#[test]
fn every_recorded_family_and_label_is_here() {
    let registry = Registry::new(&identity(), ALL);
    let ours: Vec<String> = registry
        .families
        .iter()
        .map(|family| {
            let kind = format!("{:?}", family.kind).to_lowercase();
            format!("# TYPE {} {kind}", family.name)
        })
        .collect();
    let declared = |page: &str| -> Vec<String> {
        page.lines()
            .filter(|line| line.starts_with("# TYPE"))
            // Series that appear with their first event bring their second header along.
            .filter(|line| !line.contains("_created gauge"))
            .map(str::to_owned)
            .collect()
    };
    for family in declared(RECORDED) {
        assert!(ours.contains(&family), "{family}");
    }
    // The recording has been stripped of the labels that all series share.
    for (series, _) in Page::parse(RECORDED).samples() {
        let family = registry.families.iter().find(|family| {
            let rest = series.name().strip_prefix(family.name);
            rest.is_some_and(|rest| ["", "_bucket", "_sum", "_count"].contains(&rest))
        });
        let Some(family) = family else {
            assert!(series.name().ends_with("_created"), "{series}");
            continue;
        };
        for (label, _) in series.labels().filter(|(label, _)| *label != "le") {
            assert!(family.labels.contains(&label), "{series}: {label}");
        }
    }
}

#[test]
fn the_first_page_shows_telemetry_and_no_events() {
    let page = page(&Registry::new(&identity(), ALL));
    assert_eq!(kvcr::telemetry_present(&page), Ok(()));
    assert!(kvcr::busy(&page).is_empty());
    let text = Registry::new(&identity(), ALL).render();
    assert!(text.contains("worker_id=\"42aa22c0a711908\""));
    assert!(!text.contains("\nvllm:kvcr_transfer_blocks_total{"));
    assert!(text.contains(",num_gpu_blocks=\"96\",num_gpu_blocks_override=\"96\","));
}

#[test]
fn families_of_what_is_off_are_absent() {
    let off = Present {
        tiers: false,
        kvcr: false,
        publisher: false,
    };
    let registry = Registry::new(&identity(), off);
    registry.add(
        "vllm:kvcr_transfer_blocks_total",
        &[("operation", "x")],
        1.0,
    );
    let text = registry.render();
    assert!(!text.contains("vllm:kvcr_") && !text.contains("vllm:kv_offload"));
    assert!(!text.contains("kv_publisher"));
    assert!(text.contains("vllm:prompt_tokens_total"));
}

#[test]
fn values_are_written_as_the_clients_write_them() {
    for (value, text) in [
        (0.0, "0.0"),
        (574.0, "574.0"),
        (2_097_152.0, "2.097152e+06"),
        (1e6, "1.0e+06"),
        (1_796_035_275.5, "1.7960352755e+09"),
    ] {
        assert_eq!(number(value, true), text);
    }
    assert_eq!(number(2.0, false), "2");
}

#[test]
fn histograms_are_cumulative_and_series_restart() {
    let registry = Registry::new(&identity(), ALL);
    let labels = [("scope", "local_fill"), ("result", "success")];
    registry.observe("vllm:kvcr_duration_seconds", &labels, 0.06);
    registry.observe("vllm:kvcr_duration_seconds", &labels, 20.0);
    let text = registry.render();
    let value = |le: &str| {
        let line = text
            .lines()
            .find(|line| line.contains("kvcr_duration_seconds_bucket") && line.contains(le))
            .unwrap();
        line.rsplit_once(' ').unwrap().1.to_owned()
    };
    assert_eq!(value("le=\"0.05\""), "0.0");
    assert_eq!(value("le=\"0.075\""), "1.0");
    assert_eq!(value("le=\"+Inf\""), "2.0");
    assert!(text.contains("vllm:kvcr_duration_seconds_created{"));
    page(&registry);
    registry.restart();
    assert!(
        registry
            .render()
            .contains("scope=\"local_fill\",worker_id=\"42aa22c0a711908\"} 0.0")
    );
}
