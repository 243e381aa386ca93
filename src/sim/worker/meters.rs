//! Which event of an engine moves which series: the only file here that spells their names.

use std::sync::Arc;
use std::time::Duration;

use super::registry::Registry;
use crate::sim::kvcr::Telemetry;

/// Tier labels of the tiering series.
pub const HOST: &str = "0:primary";
/// See [`HOST`].
pub const KVCR: &str = "1:kvcr";

/// How one request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ended {
    /// Tokens of the prompt.
    pub prompt: u64,
    /// Of these, found in the device cache.
    pub device: u64,
    /// Found in the engine's host tier.
    pub host: u64,
    /// Found in KVCR, or handed over by a prefill engine.
    pub external: u64,
    /// Tokens generated.
    pub generated: u64,
    /// Tokens asked for.
    pub max_tokens: u64,
    /// Until the first token.
    pub to_first: Duration,
    /// All of it.
    pub took: Duration,
    /// Whether the client went away.
    pub aborted: bool,
}

/// Counts what an engine does.
#[derive(Clone, Debug)]
pub struct Meters {
    registry: Arc<Registry>,
}

impl Meters {
    /// Counts into `registry`.
    pub fn new(registry: Arc<Registry>) -> Self {
        Self { registry }
    }

    fn add(&self, name: &str, labels: &[(&str, &str)], by: u64) {
        self.registry.add(name, labels, by as f64);
    }

    /// A request was taken: `running` are in flight.
    pub fn running(&self, running: i64) {
        let running = running as f64;
        self.registry.set("vllm:num_requests_running", &[], running);
        self.registry
            .set("dynamo_component_inflight_requests", &[], running);
        self.registry
            .set("dynamo_work_handler_pool_active_tasks", &[], running);
    }

    /// Where the prompt's tokens came from. Counted when the first token is there, as the real
    /// engine counts them: a client that goes away later does not take them back.
    pub fn prompt(&self, ended: &Ended) {
        let cached = ended.device + ended.host + ended.external;
        self.add("vllm:prompt_tokens_total", &[], ended.prompt);
        let by_source = "vllm:prompt_tokens_by_source_total";
        for (source, tokens) in [
            ("local_compute", ended.prompt.saturating_sub(cached)),
            ("local_cache_hit", ended.device),
            ("external_kv_transfer", ended.host + ended.external),
        ] {
            self.add(by_source, &[("source", source)], tokens);
        }
        self.add("vllm:prompt_tokens_cached_total", &[], cached);
        let cached_by_source = "vllm:prompt_tokens_cached_by_source_total";
        for (source, tokens) in [
            ("device", ended.device),
            ("host", ended.host),
            ("external_unspecified", ended.external),
        ] {
            self.add(cached_by_source, &[("source", source)], tokens);
        }
        self.add("vllm:prefix_cache_queries_total", &[], ended.prompt);
        self.add("vllm:prefix_cache_hits_total", &[], ended.device);
        let asked = ended.prompt - ended.device.min(ended.prompt);
        self.add("vllm:external_prefix_cache_queries_total", &[], asked);
        self.add(
            "vllm:external_prefix_cache_hits_total",
            &[],
            ended.host + ended.external,
        );
        let computed = ended.prompt.saturating_sub(cached) as f64;
        self.registry
            .observe("vllm:request_prefill_kv_computed_tokens", &[], computed);
        let first = ended.to_first.as_secs_f64();
        self.registry
            .observe("vllm:time_to_first_token_seconds", &[], first);
        self.registry.observe(
            "dynamo_work_handler_time_to_first_response_seconds",
            &[],
            first,
        );
    }

    /// A request ended.
    pub fn finished(&self, ended: &Ended) {
        let reason = if ended.aborted { "abort" } else { "length" };
        self.add(
            "vllm:request_success_total",
            &[("finished_reason", reason)],
            1,
        );
        self.add("vllm:generation_tokens_total", &[], ended.generated);
        self.add("dynamo_component_requests_total", &[], 1);
        if ended.aborted {
            self.add("dynamo_component_cancellation_total", &[], 1);
        }
        let (whole, first) = (ended.took.as_secs_f64(), ended.to_first.as_secs_f64());
        let decode = (whole - first).max(0.0);
        for (name, value) in [
            ("vllm:request_prompt_tokens", ended.prompt as f64),
            ("vllm:request_generation_tokens", ended.generated as f64),
            (
                "vllm:request_max_num_generation_tokens",
                ended.generated as f64,
            ),
            ("vllm:request_params_max_tokens", ended.max_tokens as f64),
            ("vllm:request_params_n", 1.0),
            ("vllm:request_num_preemptions", 0.0),
            (
                "vllm:iteration_tokens_total",
                (ended.prompt + ended.generated) as f64,
            ),
            ("vllm:e2e_request_latency_seconds", whole),
            ("vllm:request_inference_time_seconds", whole),
            ("vllm:request_queue_time_seconds", 0.0),
            ("vllm:request_prefill_time_seconds", first),
            ("vllm:request_decode_time_seconds", decode),
            ("dynamo_component_request_duration_seconds", whole),
            ("dynamo_work_handler_network_transit_seconds", 0.0),
        ] {
            self.registry.observe(name, &[], value);
        }
        if ended.generated > 1 {
            let gap = decode / (ended.generated - 1) as f64;
            self.registry
                .observe("vllm:request_time_per_output_token_seconds", &[], gap);
            for _ in 1..ended.generated {
                self.registry
                    .observe("vllm:inter_token_latency_seconds", &[], gap);
            }
        }
    }

    /// One request's prompt was looked up behind the device, however short it is.
    pub fn asked(&self) {
        self.registry
            .observe("vllm:kv_offload_lookup_sync_delay_seconds", &[], 2e-5);
    }

    /// Chunk lookups of one request in `tier`, and how many of them hit.
    pub fn looked_up(&self, tier: &str, queries: u64, hits: u64) {
        let labels = [("tier", tier)];
        if queries > 0 {
            self.add(
                "vllm:kv_offload_tiering_chunk_queries_total",
                &labels,
                queries,
            );
            for _ in 0..queries {
                self.registry.observe(
                    "vllm:kv_offload_tiering_lookup_sync_delay_seconds",
                    &labels,
                    2e-6,
                );
            }
        }
        if hits > 0 {
            self.add("vllm:kv_offload_tiering_chunk_hits_total", &labels, hits);
        }
    }

    /// A request's load from behind the device.
    pub fn loaded(&self, bytes: u64, took: Duration) {
        if bytes == 0 {
            return;
        }
        self.transferred("CPU_to_GPU", bytes, took);
        self.add("vllm:kv_offload_load_bytes_total", &[], bytes);
        self.registry
            .add("vllm:kv_offload_load_time_total", &[], took.as_secs_f64());
        self.registry
            .observe("vllm:kv_offload_load_size", &[], bytes as f64);
        self.registry.observe(
            "vllm:kv_offload_lookup_async_delay_seconds",
            &[],
            took.as_secs_f64(),
        );
    }

    /// Pages were offered to the host tier: it had no room yet for so many, of so many bytes.
    pub fn offloaded(&self, pages: u64, bytes: u64) {
        self.registry
            .observe("vllm:kv_offload_cpu_allocation_size", &[], pages as f64);
        if pages == 0 {
            return;
        }
        self.transferred("GPU_to_CPU", bytes, Duration::from_micros(50));
        self.add("vllm:kv_offload_store_bytes_total", &[], bytes);
        self.registry
            .add("vllm:kv_offload_store_time_total", &[], 5e-5);
        self.registry
            .observe("vllm:kv_offload_store_size", &[], bytes as f64);
    }

    fn transferred(&self, direction: &str, bytes: u64, took: Duration) {
        let labels = [("transfer_type", direction)];
        self.add("vllm:kv_offload_total_bytes_total", &labels, bytes);
        self.registry.add(
            "vllm:kv_offload_total_time_total",
            &labels,
            took.as_secs_f64(),
        );
        self.registry
            .observe("vllm:kv_offload_size", &labels, bytes as f64);
    }

    /// Bytes that KVCR gave to the host tier. How long it took the real engine never says: the
    /// family is declared and stays empty.
    pub fn read_from_kvcr(&self, bytes: u64) {
        if bytes > 0 {
            let labels = [("tier", KVCR)];
            self.add("vllm:kv_offload_tiering_read_bytes_total", &labels, bytes);
        }
    }

    /// Bytes that the host tier gave to KVCR; see [`Self::read_from_kvcr`].
    pub fn written_to_kvcr(&self, bytes: u64) {
        if bytes > 0 {
            let labels = [("tier", KVCR)];
            self.add("vllm:kv_offload_tiering_write_bytes_total", &labels, bytes);
        }
    }

    /// A load or a store of the tier failed.
    pub fn job_failed(&self, load: bool) {
        let name = if load {
            "vllm:kv_offload_tiering_promotion_job_failures_total"
        } else {
            "vllm:kv_offload_tiering_cascade_job_failures_total"
        };
        self.add(name, &[("tier", KVCR)], 1);
    }

    /// KV events were published: `stored` or `removed`.
    pub fn events(&self, kind: &str, count: u64) {
        if count > 0 {
            for stage in ["received", "accepted"] {
                let labels = [("event_type", kind), ("stage", stage)];
                self.add(
                    "dynamo_component_kv_publisher_zmq_events_total",
                    &labels,
                    count,
                );
            }
        }
    }

    /// Blocks of KVCR's tier were stored: the relay sees that, and passes on only what an engine
    /// owns itself.
    pub fn events_of_kvcr(&self, stored: u64) {
        if stored > 0 {
            let (kind, received) = (("event_type", "stored"), ("stage", "received"));
            let seen = "dynamo_component_kv_publisher_zmq_events_total";
            self.add(seen, &[kind, received], stored);
            let filtered = "dynamo_component_kv_publisher_zmq_filtered_events_total";
            let reason = ("reason", "unsupported_ownership");
            self.add(filtered, &[kind, reason], stored);
        }
    }

    /// Share of the device cache in use, 0 to 1.
    pub fn device_usage(&self, share: f64) {
        self.registry
            .set("dynamo_component_gpu_cache_usage_percent", &[], share);
    }

    /// Slots of KVCR's own pool.
    pub fn pool(&self, used: usize, slots: usize) {
        for (resource, value) in [
            ("block_records", used),
            ("local_g2_total_slots", slots),
            ("local_g2_free_slots", slots.saturating_sub(used)),
            ("local_g2_allocated_slots", used),
            ("local_g2_evictable_slots", used),
        ] {
            self.gauge(resource, value as i64);
        }
    }

    /// Every counter begins again.
    pub fn restart(&self) {
        self.registry.restart();
    }
}

impl Telemetry for Meters {
    fn ended(&self, scope: &str, result: &str, took: Duration) {
        let labels = [("result", result), ("scope", scope)];
        self.registry
            .observe("vllm:kvcr_duration_seconds", &labels, took.as_secs_f64());
    }

    fn moved(&self, operation: &str, blocks: u64, bytes: Option<u64>) {
        let labels = [("operation", operation)];
        self.add("vllm:kvcr_transfer_blocks_total", &labels, blocks);
        if let Some(bytes) = bytes {
            self.add("vllm:kvcr_transfer_bytes_total", &labels, bytes);
        }
    }

    fn gauge(&self, resource: &str, value: i64) {
        self.registry
            .set("vllm:kvcr_state", &[("resource", resource)], value as f64);
    }
}
