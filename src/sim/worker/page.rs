//! The metrics page as it leaves the process: the registry's, or a lie about it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use super::registry::Registry;
use crate::sim::fault::{Fault, Faults};

/// A page of a registry that can lie.
#[derive(Debug)]
pub struct MetricsPage {
    registry: Arc<Registry>,
    faults: Arc<Faults>,
    memory: Mutex<Memory>,
}

#[derive(Debug, Default)]
struct Memory {
    /// Counters as they were when they froze.
    frozen: Option<HashMap<String, String>>,
    /// Pages that were given with a creeping counter.
    crept: u64,
}

impl MetricsPage {
    /// The page of `registry`.
    pub fn new(registry: Arc<Registry>, faults: Arc<Faults>) -> Self {
        Self {
            registry,
            faults,
            memory: Mutex::default(),
        }
    }

    /// The text, or `None` where the page answers 500. `asked`: whether there was a request.
    pub fn render(&self, asked: bool) -> Option<String> {
        if asked && self.faults.tell(Fault::PageGone) {
            return None;
        }
        let tells = |fault| self.faults.tell(fault);
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let mut page = self.registry.render();
        if tells(Fault::TelemetryAbsent) {
            page = without(&page, &["vllm:kvcr_"]);
        }
        if tells(Fault::CounterMissing) {
            page = without(
                &page,
                &[
                    "vllm:kv_offload_tiering_read_bytes",
                    "vllm:kv_offload_tiering_write_bytes",
                ],
            );
        }
        if tells(Fault::CounterRenamed) {
            page = page.replace("vllm:kvcr_transfer_blocks", "vllm:kvcr_moved_blocks");
        }
        if tells(Fault::CounterNegative) {
            page = with_value(&page, LOCAL_COMPUTE, |_| -1.0);
        }
        if tells(Fault::SourcesDisagree) {
            page = with_value(&page, LOCAL_COMPUTE, |value| value * 2.0);
        }
        if tells(Fault::CountersNeverSettle) {
            memory.crept += 1;
            let crept = memory.crept as f64;
            page = with_value(&page, "vllm:generation_tokens_total{", |value| {
                value + crept
            });
        }
        if tells(Fault::GaugeStuck) {
            page = with_value(&page, "resource=\"in_flight_ops\"", |_| 1.0);
        }
        if tells(Fault::CounterFrozen) {
            let frozen = memory.frozen.get_or_insert_with(|| counters(&page));
            page = freeze(&page, frozen);
        } else {
            memory.frozen = None;
        }
        if tells(Fault::PageGarbage) {
            page.push_str("vllm:prompt_tokens_total{engine=\"0\" twelve\n");
        }
        if tells(Fault::PageDuplicate) {
            let line = page
                .lines()
                .find(|line| line.starts_with("vllm:prompt_tokens_total{"));
            if let Some((series, _)) = line.and_then(|line| line.rsplit_once(' ')) {
                page = format!("{page}{series} 1.0\n");
            }
        }
        if tells(Fault::PageCut) {
            let middle = page
                .find("vllm:prompt_tokens_total{")
                .unwrap_or(page.len() / 2);
            page.truncate(middle + "vllm:prompt_tokens_total{".len());
        }
        Some(page)
    }
}

const LOCAL_COMPUTE: &str = "source=\"local_compute\"";

fn lines(page: &str, change: impl FnMut(&str) -> Option<String>) -> String {
    page.lines()
        .filter_map(change)
        .flat_map(|line| [line, "\n".to_owned()])
        .collect()
}

/// The page without the families whose names begin so.
fn without(page: &str, names: &[&str]) -> String {
    lines(page, |line| {
        let subject = ["# HELP ", "# TYPE "]
            .iter()
            .find_map(|mark| line.strip_prefix(mark))
            .unwrap_or(line);
        let gone = names.iter().any(|name| subject.starts_with(name));
        (!gone).then(|| line.to_owned())
    })
}

/// The page with another value in every sample, creation times aside, that contains `words`.
fn with_value(page: &str, words: &str, change: impl Fn(f64) -> f64) -> String {
    lines(page, |line| {
        Some(match line.rsplit_once(' ') {
            Some((series, value))
                if series.contains(words)
                    && !series.starts_with('#')
                    && !series.contains("_created{") =>
            {
                format!("{series} {:?}", change(value.parse().unwrap_or(0.0)))
            }
            _ => line.to_owned(),
        })
    })
}

fn is_counter(series: &str) -> bool {
    let name = series.split('{').next().unwrap_or_default();
    ["_total", "_count", "_sum", "_bucket"]
        .iter()
        .any(|end| name.ends_with(end))
}

fn counters(page: &str) -> HashMap<String, String> {
    page.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.rsplit_once(' '))
        .filter(|(series, _)| is_counter(series))
        .map(|(series, value)| (series.to_owned(), value.to_owned()))
        .collect()
}

/// Counters as they were; those that were not there yet stay away.
fn freeze(page: &str, frozen: &HashMap<String, String>) -> String {
    lines(page, |line| match line.rsplit_once(' ') {
        Some((series, _)) if !line.starts_with('#') && is_counter(series) => {
            frozen.get(series).map(|value| format!("{series} {value}"))
        }
        _ => Some(line.to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::registry::Present;
    use super::super::registry::tests::identity;
    use super::*;
    use crate::telemetry::{Page, kvcr};

    fn page(faults: &[&str]) -> (Arc<Registry>, MetricsPage) {
        let present = Present {
            tiers: true,
            kvcr: true,
            publisher: true,
        };
        let registry = Arc::new(Registry::new(&identity(), present));
        registry.add(
            "vllm:kvcr_transfer_blocks_total",
            &[("operation", "local_fill")],
            8.0,
        );
        registry.add(
            "vllm:kv_offload_tiering_read_bytes_total",
            &[("tier", "1:kvcr")],
            9.0,
        );
        registry.add("vllm:prompt_tokens_total", &[], 5.0);
        registry.add(
            "vllm:prompt_tokens_by_source_total",
            &[("source", "local_compute")],
            5.0,
        );
        let switches = faults.iter().map(|fault| fault.parse().unwrap()).collect();
        let faults = Arc::new(Faults::new("worker0", switches, None));
        (registry.clone(), MetricsPage::new(registry, faults))
    }

    fn text(fault: &str) -> String {
        page(&[fault]).1.render(true).unwrap()
    }

    fn read(page: &Page, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        page.read(name, labels).counted()
    }

    #[test]
    fn an_honest_page_is_the_registrys() {
        let (_, honest) = page(&[]);
        let parsed = Page::parse(&honest.render(true).unwrap());
        assert!(parsed.problems().is_empty());
        assert_eq!(read(&parsed, "vllm:prompt_tokens_total", &[]), Some(5.0));
    }

    #[test]
    fn what_is_missing_is_missing() {
        assert!(!text("telemetry_absent").contains("vllm:kvcr_"));
        assert!(!text("counter_missing").contains("tiering_read_bytes"));
        let renamed = text("counter_renamed");
        assert!(!renamed.contains("kvcr_transfer_blocks") && renamed.contains("kvcr_moved_blocks"));
        assert_eq!(page(&["page_gone"]).1.render(true), None);
        assert!(page(&["page_gone"]).1.render(false).is_some());
    }

    #[test]
    fn what_cannot_be_read_cannot_be_read() {
        for fault in ["page_cut", "page_garbage", "page_duplicate"] {
            let parsed = Page::parse(&text(fault));
            assert!(!parsed.problems().is_empty(), "{fault}");
        }
    }

    #[test]
    fn values_lie() {
        let source = [("source", "local_compute")];
        let value = |fault: &str| {
            let parsed = Page::parse(&text(fault));
            assert!(parsed.problems().is_empty());
            read(&parsed, "vllm:prompt_tokens_by_source_total", &source)
        };
        assert_eq!(value("counter_negative"), Some(-1.0));
        assert_eq!(value("sources_disagree"), Some(10.0));
        let stuck = Page::parse(&text("gauge_stuck"));
        assert_eq!(kvcr::busy(&stuck), ["in_flight_ops 1"]);
    }

    #[test]
    fn a_frozen_page_stands_still_and_a_creeping_one_does_not() {
        let (registry, frozen) = page(&["counter_frozen"]);
        let first = frozen.render(true).unwrap();
        registry.add("vllm:prompt_tokens_total", &[], 7.0);
        registry.add(
            "vllm:kvcr_transfer_blocks_total",
            &[("operation", "new")],
            7.0,
        );
        let second = Page::parse(&frozen.render(true).unwrap());
        assert_eq!(read(&second, "vllm:prompt_tokens_total", &[]), Some(5.0));
        assert_eq!(
            counters(&first).len(),
            counters(&frozen.render(true).unwrap()).len()
        );

        let (_, creeping) = page(&["counters_never_settle"]);
        let tokens = || {
            let parsed = Page::parse(&creeping.render(true).unwrap());
            read(&parsed, "vllm:generation_tokens_total", &[]).unwrap()
        };
        assert!(tokens() < tokens());
    }
}
