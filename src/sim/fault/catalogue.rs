//! Every fault, in a row each.
//!
//! Sources name the public report the fault is drawn from (`vllm#51094`), or what a verdict
//! claims (`check: …`) and a liar would break.

use super::{Entry, Part};

macro_rules! catalogue {
    ($($fault:ident $name:literal $part:ident, $what:literal, $source:literal;)*) => {
        /// A lie that a simulated stack can tell.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u8)]
        pub enum Fault {
            $(#[doc = $what] $fault,)*
        }

        /// Every fault, in the order of [`Fault`].
        pub const CATALOGUE: &[Entry] = &[
            $(Entry {
                fault: Fault::$fault,
                name: $name,
                part: Part::$part,
                what: $what,
                source: $source,
            },)*
        ];
    };
}

catalogue! {
    // What a tier gives back.
    CorruptBlock "corrupt_block" Engine,
        "one byte of the first block that KVCR's own tier delivers is flipped", "vllm#45704, LMCache#4463";
    SwapBlocks "swap_blocks" Engine,
        "the first two blocks that KVCR's own tier delivers are exchanged", "vllm#45704";
    StaleBlock "stale_block" Engine,
        "KVCR's own tier delivers what another block held before", "vllm#55904";
    TruncatedBlock "truncated_block" Engine,
        "the second half of a block from KVCR's own tier is zeros", "LMCache#4463";
    MissingBlock "missing_block" Engine,
        "KVCR's own tier says a block is there and delivers zeros", "vllm#45704";
    CorruptHostBlock "corrupt_host_block" Engine,
        "one byte of the first block that the engine's host tier gives is flipped", "vllm#48412";
    CorruptDeviceBlock "corrupt_device_block" Engine,
        "one byte of the first block that the device cache gives is flipped", "vllm#42699";
    BoundaryOffByOne "boundary_off_by_one" Engine,
        "a prompt that ends exactly with a block is answered as if its last block were the one before", "vllm#51094, vllm#44599";
    RecomputeWrong "recompute_wrong" Engine,
        "a load from KVCR's own tier fails, and what is recomputed instead is wrong", "vllm#49250";

    // Hits that are not what they say.
    FalseHit "false_hit" Engine,
        "a cold request says that its first block was cached", "check: cached_tokens";
    SaltIgnored "salt_ignored" Engine,
        "the cache salt is left out of the block hashes, so that a cold request hits", "vllm#57727";
    HitBeyondReference "hit_beyond_reference" Engine,
        "a warm request says that one block more was cached than there is", "check: hit_as_reference_reuses";
    HitTooShort "hit_too_short" Engine,
        "the last block of a hit is computed again", "vllm#50507, vllm#54736";
    TierNeverHits "tier_never_hits" Engine,
        "KVCR's own tier stores blocks and finds none", "production-stack#1062";
    FillLost "fill_lost" Engine,
        "blocks are counted as stored in KVCR's own tier and are not", "check: delivered_by_own_tier";
    FillSilent "fill_silent" Engine,
        "blocks are neither stored in KVCR's own tier nor counted", "check: stored_in_own_tier";
    FillTwice "fill_twice" Engine,
        "a stored block is counted twice", "check: stored_in_own_tier";
    FillFailed "fill_failed" Engine,
        "storing in KVCR's own tier fails and is counted as failed", "check: no_failed_transfer";
    DeliverFailed "deliver_failed" Engine,
        "delivering from KVCR's own tier fails, is counted, and the blocks are computed again", "vllm#49176";
    DeviceNeverEvicts "device_never_evicts" Engine,
        "the device cache keeps everything, so that an evicted prompt hits it", "check: not_from_the_device";
    LivelockedLoad "livelocked_load" Engine,
        "a failed load is tried again for ever and the request never ends", "vllm#49176, vllm#49328";

    // Transfers between peers.
    CorruptTransfer "corrupt_transfer" Engine,
        "one byte of the first block that a peer sends is flipped", "vllm#45704";
    ShortTransfer "short_transfer" Engine,
        "a peer sends fewer blocks than it says; the rest are zeros", "check: tokens_equal_reference";
    DuplicatedTransfer "duplicated_transfer" Engine,
        "a source sends and counts every block twice", "check: source_write equals remote_deliver";
    HintIgnored "hint_ignored" Engine,
        "a hint is not followed and the prompt is computed", "dynamo#13134, kvcr#18";
    PartialAsSuccess "partial_as_success" Engine,
        "half of the blocks arrive, the rest is computed, and a success of all is counted", "check: remote_deliver";
    SuccessWithoutTransfer "success_without_transfer" Engine,
        "a remote delivery is counted and nothing was transferred", "check: source_write equals remote_deliver";
    BytesMismatch "bytes_mismatch" Engine,
        "bytes of transfers are counted one page short", "check: bytes are blocks times their size";
    WriteRefused "write_refused" Engine,
        "a source refuses to write, and the prompt is computed", "facts 4.2: control_write_refused";
    SourceDisabled "source_disabled" Engine,
        "a source says that its progress stalled and refuses every peer for good", "seen: source progress stalled";
    TransferHangs "transfer_hangs" Engine,
        "a source never answers; the target gives up after the operation timeout", "kvcr#25";
    LateSettle "late_settle" Engine,
        "a transfer that timed out is counted only at the abandon deadline", "kvcr#25";
    PartialTransfer "partial_transfer" Engine,
        "a source lacks half of the blocks and says so", "facts 4.3: opportunistic_query";
    StaleSource "stale_source" Engine,
        "a source gives whatever is in the place of blocks that it has lost", "check: no_source";
    SlowConnect "slow_connect" Engine,
        "every new connection to a peer takes half of the operation timeout", "check: hinted_and_fresh";
    FreshPulls "fresh_pulls" Engine,
        "a request without a hint asks a peer all the same", "check: no_peer_asked";

    // Hybrid models.
    StatePageMissing "state_page_missing" Engine,
        "the state pages of a hit are neither transferred nor loaded", "dynamo#16794";
    StateOverTransfer "state_over_transfer" Engine,
        "state pages of every block are transferred instead of the last one's", "dynamo#16794";
    StateOffByOne "state_off_by_one" Engine,
        "a hit takes the state page of the block before", "vllm#51094, vllm#46949";

    // Counters and pages.
    CounterMissing "counter_missing" Engine,
        "the bytes of the tiers have no series", "dynamo#4441, dynamo#13090";
    CounterRenamed "counter_renamed" Engine,
        "KVCR's block counters have another name", "vllm#52615";
    CounterReset "counter_reset" Engine,
        "every counter starts again from zero after the first cached request", "facts 4.3: restart";
    CounterNegative "counter_negative" Engine,
        "a prompt counter goes below zero", "vllm#38230";
    CounterFrozen "counter_frozen" Engine,
        "no counter moves any more", "vllm#38230";
    SourcesDisagree "sources_disagree" Engine,
        "the sources of the prompt's tokens do not add up to the prompt", "vllm#38230";
    CountersNeverSettle "counters_never_settle" Engine,
        "a counter creeps on although nothing is asked", "check: counters settle";
    GaugeStuck "gauge_stuck" Engine,
        "a gauge says that one operation is in flight for ever", "facts 4.3: pending work";
    PageCut "page_cut" Engine,
        "the metrics page ends in the middle of a line", "handed case: cut in the middle";
    PageGarbage "page_garbage" Engine,
        "a line of the metrics page is no sample", "handed case: unreadable line";
    PageDuplicate "page_duplicate" Engine,
        "a series stands on the metrics page twice, with two values", "vllm#40112";
    PageGone "page_gone" Engine,
        "the metrics page answers 500 after the first request", "dynamo#4654";
    TelemetryAbsent "telemetry_absent" Engine,
        "KVCR has no series at all", "facts 4.1: enable_telemetry";

    // What a prefill engine hands over.
    HandoverCorrupts "handover_corrupts" Engine,
        "a decode engine is handed a prompt's last block with one byte flipped", "vllm#38165";
    HandoverFails "handover_fails" Engine,
        "a decode engine cannot read what was handed over, and answers 500", "vllm#49238, vllm#55471";

    // Answers of the front door.
    WrongWorker "wrong_worker" Frontend,
        "a pinned request is served by another worker", "check: served_by_pinned_worker";
    WrongWorkerHidden "wrong_worker_hidden" Frontend,
        "a pinned request is served by another worker, and the answer says it was the right one", "check: stored_in_own_tier";
    WorkerIdAbsent "worker_id_absent" Frontend,
        "answers do not say who served them", "dynamo#11695";
    WorkerIdRounded "worker_id_rounded" Frontend,
        "worker ids lose their last digits, as in a float", "seen: 64-bit ids";
    ErrorAfter200 "error_after_200" Frontend,
        "status 200, then an error instead of an answer", "dynamo#14748";
    EmptyCompletion "empty_completion" Frontend,
        "status 200 and no token", "dynamo known issues v1.3";
    BodyCut "body_cut" Frontend,
        "the answer ends in its middle", "dynamo#10513";
    NotJson "not_json" Frontend,
        "the answer is an HTML page of a proxy", "opendatahub-tests#1485";
    Http500 "http_500" Frontend,
        "status 500", "dynamo#14661";
    Http503 "http_503" Frontend,
        "status 503 after everything was ready", "opendatahub-tests#1485";
    NeverAnswers "never_answers" Frontend,
        "a request is taken and never answered", "dynamo#13088";
    UsageOff "usage_off" Frontend,
        "the usage counts one prompt token too few", "check: sources add up";
    CachedTokensAbsent "cached_tokens_absent" Frontend,
        "the usage does not say how much was cached", "facts 4.6";
    FinishReasonAbsent "finish_reason_absent" Frontend,
        "an answer has no finish reason", "dynamo#8674";
    TokenDropped "token_dropped" Frontend,
        "one generated token is lost on the way", "check: tokens_equal_reference";
    StopsEarly "stops_early" Frontend,
        "an answer ends after half of its tokens, with finish reason stop", "check: tokens_equal_reference";
    StreamWithoutDone "stream_without_done" Frontend,
        "a stream ends without `[DONE]`", "dynamo#14662";
    StreamCut "stream_cut" Frontend,
        "a stream breaks off in a frame", "dynamo#1857";
    StreamErrorFrame "stream_error_frame" Frontend,
        "a stream carries an error frame after its first tokens", "dynamo#14748, dynamo#8674";
    StreamStalls "stream_stalls" Frontend,
        "a stream stops in its middle and stays open", "dynamo#13088";
    HintDeadPeer "hint_dead_peer" Frontend,
        "hints name an endpoint where nobody listens", "vllm#54689";
    HintMissing "hint_missing" Frontend,
        "no hint is ever attached", "dynamo#13237";
    HintLost "hint_lost" Frontend,
        "a worker that came back is hinted at no more; the next one in its place is", "findings/guard.md";
    DecodesAlone "decodes_alone" Frontend,
        "who only decodes is asked for all of a request, whatever prefill engine was pinned", "seen: before the router knows who prefills";
    RegistrationLost "registration_lost" Frontend,
        "a healthy worker is no longer listed after its first request", "dynamo#11881";
    ModelMissing "model_missing" Frontend,
        "healthy, and no model is listed", "dynamo#11178";
    FrontendDies "frontend_dies" Frontend,
        "the front door exits at the first request", "vllm#32116";

    // The reference itself.
    ReferenceWavers "reference_wavers" Engine,
        "an engine gives another answer when it is asked again", "vllm#40896, vllm#52701";
    ReferenceReusesNothing "reference_reuses_nothing" Engine,
        "an engine has no prefix cache", "vllm#42317";
    ModelDrift "model_drift" Engine,
        "an engine has other weights than its model's", "check: reference_as_pinned";
    NearTies "near_ties" Engine,
        "the two best tokens are almost equally likely", "vllm#40896";

    // Coming up.
    StartKwarg "start_kwarg" Engine,
        "the engine dies at start: unexpected keyword argument", "vllm#58087";
    StartImport "start_import" Engine,
        "the engine dies at start: cannot import name", "seen: vLLM 0.31 with kvcr 0.1.1";
    StartPortTaken "start_port_taken" Engine,
        "the engine dies at start: address already in use", "dynamo#14838";
    StartShmFull "start_shm_full" Engine,
        "the engine dies at start: /dev/shm is too small", "vllm#50358";
    StartBadAddress "start_bad_address" Engine,
        "the engine dies at start: a leftover file is in the way", "vllm#54002";
    StartSegfault "start_segfault" Engine,
        "the engine dies at start by signal 11", "vllm#39500";
    StartUnknown "start_unknown" Engine,
        "the engine dies at start with an exception nobody knows", "vllm#43884";
    StartExitsQuietly "start_exits_quietly" Engine,
        "the engine exits at start with code 0 and no word", "vllm#44751";
    StartHangs "start_hangs" Engine,
        "the engine never becomes healthy", "vllm#55000, nixl#1668";
    StartUnregistered "start_unregistered" Engine,
        "the engine is healthy and never registers", "dynamo#9200";
    GeometryLies "geometry_lies" Engine,
        "the engine says that its blocks are twice as long as they are", "seen: a hybrid model's blocks are not those that were asked for";
    StartSlow "start_slow" Engine,
        "the engine takes two seconds longer to start", "nixl#2022";

    // Life and death.
    Dies "dies" Engine,
        "the engine is killed while it generates", "kvcr#11";
    Crashes "crashes" Engine,
        "the engine dies of an assertion while it generates", "vllm#50454, vllm#43884";
    Hangs "hangs" Engine,
        "the engine is stopped (not dead) while it generates", "facts 4.6: hung worker";
    LeaksShm "leaks_shm" Engine,
        "the engine leaves its shared memory behind when it stops", "vllm#54002, vllm#51579";
    IgnoresSigterm "ignores_sigterm" Engine,
        "the engine ignores SIGTERM", "facts 4.3: shutdown can hang";
    LeavesOrphan "leaves_orphan" Engine,
        "the engine leaves a process of its own session behind", "dynamo#7122, dynamo#11970";

    // The Guard.
    PromotionNever "promotion_never" Service,
        "the Guard sees its worker die and does nothing", "kvcr#11";
    PromotionLate "promotion_late" Service,
        "the Guard serves only two seconds after its worker's death", "check: recovery time";
    PromotionCold "promotion_cold" Service,
        "the Guard serves and has recovered nothing", "facts 4.5: no recovered state";
    PromotionTwice "promotion_twice" Service,
        "the Guard says twice that it was promoted", "check: one promotion a kill";
    GuardCorrupts "guard_corrupts" Service,
        "the Guard serves blocks with one byte flipped", "vllm#45704";
    GuardDies "guard_dies" Service,
        "the Guard fails when it is promoted, and its service with it", "kvcr#11: fail-stop";
    JournalOverflow "journal_overflow" Service,
        "the journal is full: the pool can be claimed, but is cold", "facts 4.5: recovery disabled";
    ClaimRefused "claim_refused" Service,
        "a replacement is told that another worker holds the pool", "facts 4.5: claim errors";
    ClaimCold "claim_cold" Service,
        "a replacement gets its pool back empty", "facts 1.3: warm replacement is not verified upstream";
    ClaimStale "claim_stale" Service,
        "a replacement gets pages back under other keys", "vllm#55904";
    ClaimDigest "claim_digest" Service,
        "a claim is refused: the compatibility digest does not match", "facts 4.5";
    DigestIgnored "digest_ignored" Service,
        "a claim is granted whatever its compatibility digest", "check: replacement_refused_in_words";
    ClaimGranted "claim_granted" Service,
        "a pool is given to whoever asks, although its worker lives", "check: replacement_refused_in_words";
    HeartbeatIgnored "heartbeat_ignored" Service,
        "a silent worker is not taken over although a heartbeat is asked for", "facts 4.6: hung worker";
    TakesLiving "takes_living" Service,
        "a worker that is only stopped is killed and taken over, although no heartbeat is asked for", "check: living_worker_not_taken_over";
    HangsAlone "hangs_alone" Engine,
        "an engine stops answering when its kvcr_service dies", "check: request_ends";
    AgentForgets "agent_forgets" Agent,
        "the state agent forgets an owner when its engine dies", "dynamo#13237";
    AgentDies "agent_dies" Agent,
        "the state agent exits after the first event", "facts 3: single point";
}
