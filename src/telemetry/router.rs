//! The router's own series, by name: what it knows of the workers' caches.
//!
//! The names are those of Dynamo 1.6.1, as measured. They stand on the front door's page.

use super::Page;

const EVENTS: &str = "dynamo_component_kv_cache_events_applied";

/// Stored blocks that the router has taken notice of, over all workers; `None` before the first.
#[must_use]
pub fn stored_blocks(page: &Page) -> Option<u64> {
    page.read(EVENTS, &[("event_type", "stored"), ("status", "ok")])
        .exact()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_stored_and_taken_counts() {
        let page = Page::parse(
            "# TYPE dynamo_component_kv_cache_events_applied counter\n\
             dynamo_component_kv_cache_events_applied{event_type=\"stored\",status=\"ok\"} 17\n\
             dynamo_component_kv_cache_events_applied{event_type=\"removed\",status=\"ok\"} 3\n\
             dynamo_component_kv_cache_events_applied{event_type=\"stored\",status=\"parent_block_not_found\"} 1\n",
        );
        assert_eq!(stored_blocks(&page), Some(17));
        assert_eq!(stored_blocks(&Page::parse("")), None);
    }
}
