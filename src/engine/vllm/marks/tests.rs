//! Excerpts of logs, and what must be made of them. Those without a reference were written by
//! the released versions of `real-stack.md` when the cause named was brought about.

use std::path::Path;

use proptest::prelude::*;

use super::*;
use crate::failure::Class::{self, Environment, Product, Skew};

fn of(ending: Option<&str>, text: &str) -> Failure {
    explain_text("worker0", ending, text, Path::new("/logs/worker0.log"))
}

struct Case {
    ending: Option<&'static str>,
    text: &'static str,
    class: Class,
    /// Part of the line that must be quoted; empty where the log has none.
    cause: &'static str,
    /// Part of the sentence.
    what: &'static str,
}

#[test]
fn excerpts() {
    let exit = Some("exit code 1");
    let cases = [
        Case {
            ending: exit,
            text: r#"Triton is installed, but doesn't include CPU backend. Disabling Triton.
2026-11-30T10:52:37.535756Z  WARN __init__: dynamo.nixl_connect: Failed to load CuPy for GPU acceleration, utilizing numpy to provide CPU based operations.
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "/env/site-packages/dynamo/vllm/embedding_worker_processes.py", line 32, in <module>
    from vllm.v1.engine.utils import get_engine_zmq_addresses, launch_core_engines
ImportError: cannot import name 'get_engine_zmq_addresses' from 'vllm.v1.engine.utils' (/env/site-packages/vllm/v1/engine/utils.py). Did you mean: 'get_engine_zmq_bind_addresses'?
"#,
            class: Skew,
            cause: "ImportError: cannot import name 'get_engine_zmq_addresses'",
            what: "worker0 ended with exit code 1: Dynamo and vLLM do not fit",
        },
        // The engine's own process says it first, the parent's traceback comes last.
        Case {
            ending: exit,
            text: r#"(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510] EngineCore failed to start.
(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510]   File "/env/vllm/v1/kv_offload/tiering/factory.py", line 70, in create
(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510]     return cls(**kwargs)
(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510]            ^^^^^^^^^^^^^
(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510] TypeError: KVCRSecondaryTierManager.__init__() got an unexpected keyword argument 'backpressure_detector'
Traceback (most recent call last):
  File "/env/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"#,
            class: Skew,
            cause: "TypeError: KVCRSecondaryTierManager.__init__() got an unexpected keyword argument 'backpressure_detector'",
            what: "vLLM and kvcr do not fit",
        },
        Case {
            ending: exit,
            text: "(EngineCore pid=7) ERROR 11-30 10:00:00 [core.py:1] ImportError: cannot import name 'FrameworkDramInput' from 'kvcr.config' (/env/kvcr/config.py)",
            class: Skew,
            cause: "FrameworkDramInput",
            what: "vLLM and kvcr do not fit",
        },
        Case {
            ending: exit,
            text: "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory",
            class: Skew,
            cause: "libcudart.so.12",
            what: "nixl and the CUDA runtime do not fit",
        },
        Case {
            ending: Some("exit code 2"),
            text: "usage: __main__.py [-h] [--shutdown-timeout SHUTDOWN_TIMEOUT]\n                   [--enable-log-requests | --no-enable-log-requests]\n__main__.py: error: unrecognized arguments: --nonsense\n",
            class: Skew,
            cause: "__main__.py: error: unrecognized arguments: --nonsense",
            what: "this version does not know an argument",
        },
        Case {
            ending: exit,
            text: "ValueError: KVCR compatibility digest does not match the service",
            class: Skew,
            cause: "compatibility digest",
            what: "another layout",
        },
        Case {
            ending: exit,
            text: "RuntimeError: KVCR Guard 0 is held by another worker",
            class: Environment,
            cause: "KVCR Guard 0 is held by another worker",
            what: "another worker holds the pool",
        },
        // The errors before it are health checks of ours.
        Case {
            ending: exit,
            text: "\u{1b}[2m2026-11-30T10:33:46.370886Z\u{1b}[0m \u{1b}[31mERROR\u{1b}[0m \u{1b}[2mtower_http::trace::on_failure\u{1b}[0m\u{1b}[2m:\u{1b}[0m response failed \u{1b}[3mclassification\u{1b}[0m\u{1b}[2m=\u{1b}[0mStatus code: 503 Service Unavailable
(Worker pid=24149) ERROR 11-30 10:57:04 [multiproc_executor.py:953] WorkerProc failed to start.
(Worker pid=24149) ERROR 11-30 10:57:04 [multiproc_executor.py:953] Traceback (most recent call last):
(Worker pid=24149) ERROR 11-30 10:57:04 [multiproc_executor.py:953]     with safe_open(st_file, framework=\"pt\") as f:
(Worker pid=24149) ERROR 11-30 10:57:04 [multiproc_executor.py:953] safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered
(EngineCore pid=23584) ERROR 11-30 10:57:07 [core.py:1510] Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause.
",
            class: Environment,
            cause: "SafetensorError: Error while deserializing header",
            what: "the model's weights are damaged",
        },
        Case {
            ending: exit,
            text: "Traceback (most recent call last):\n  File \"/env/hub.py\", line 133, in validate_repo_id\n    raise HFValidationError(\nhuggingface_hub.errors.HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/nonexistent/model'. Use `repo_type` argument if needed.",
            class: Environment,
            cause: "huggingface_hub.errors.HFValidationError: Repo id",
            what: "the model is not there",
        },
        Case {
            ending: exit,
            text: "2026-11-30T10:57:14.161511Z  INFO dynamo_llm::http::service::service_v2: Starting HTTP(S) service protocol=\"HTTP\"
2026-11-30T10:57:14.161607Z ERROR dynamo_llm::http::service::service_v2: Failed to bind server to address protocol=HTTP address=127.0.0.1:28473 error=Address already in use (os error 98)
Exception: Failed to start HTTP server: port 28473 already in use. Use --http-port to specify a different port.",
            class: Environment,
            cause: "Failed to bind server to address protocol=HTTP address=127.0.0.1:28473",
            what: "a port is taken",
        },
        // A worker whose system port is taken goes on as if nothing had happened.
        Case {
            ending: None,
            text: "2026-11-30T10:57:26.272034Z ERROR dynamo_runtime::system_status_server: Failed to bind to address 0.0.0.0:28473: Failed to bind to address: Address already in use (os error 98)
2026-11-30T10:57:49.200463Z  INFO dynamo_runtime::pipeline::network::ingress::shared_tcp_endpoint: Registered endpoint 'dynamo.backend.generate'",
            class: Environment,
            cause: "Failed to bind to address 0.0.0.0:28473",
            what: "worker0 did not become ready: a port is taken",
        },
        // Warnings count only where nothing worse is said.
        Case {
            ending: None,
            text: "2026-11-30T10:53:01.667341Z  WARN dynamo_runtime::transports::etcd: etcd not reachable yet; retrying startup connection error=Unable to create lease. Check etcd server status at http://127.0.0.1:28999 retry_in=1s",
            class: Environment,
            cause: "Unable to create lease",
            what: "etcd does not answer",
        },
        Case {
            ending: exit,
            text: "2026-11-30T10:53:01.667341Z  WARN dynamo_runtime::transports::etcd: etcd not reachable yet; retrying startup connection
RuntimeError: Insufficient space in /dev/shm for CPU KV offload shared region in /dev/shm: 32 MiB required, 12 MiB free.",
            class: Environment,
            cause: "Insufficient space in /dev/shm",
            what: "a file system is full",
        },
        // vllm#50358
        Case {
            ending: Some("signal 7"),
            text: "Fatal Python error: Bus error\n\nThread 0x00007f (most recent call first):\n",
            class: Environment,
            cause: "Bus error",
            what: "shared memory ran out under the engine",
        },
        Case {
            ending: Some("signal 7"),
            text: "INFO 11-30 10:00:00 [core.py:1] loading\n",
            class: Environment,
            cause: "",
            what: "worker0 ended with signal 7: shared memory ran out under it",
        },
        Case {
            ending: Some("signal 9"),
            text: "Traceback (most recent call last):\n  File \"x.py\", line 1\nKeyError: 'handled long ago'\n",
            class: Environment,
            cause: "",
            what: "killed from outside",
        },
        // vllm#39500
        Case {
            ending: Some("signal 11"),
            text: "(EngineCore pid=7) INFO 11-30 10:00:00 [core.py:1] step\n",
            class: Product,
            cause: "",
            what: "it crashed in native code",
        },
        // vllm#37230
        Case {
            ending: exit,
            text: "ValueError: Free memory on device cuda:0 (3.2/139.8 GiB) on startup is less than desired GPU memory utilization (0.35, 48.9 GiB).",
            class: Environment,
            cause: "Free memory on device",
            what: "the device's memory is taken",
        },
        // dynamo#814
        Case {
            ending: exit,
            text: "nixl_cu13._bindings.nixlBackendError: NIXL_ERR_BACKEND",
            class: Environment,
            cause: "NIXL_ERR_BACKEND",
            what: "NIXL cannot open its transport",
        },
        Case {
            ending: exit,
            text: "[1764500000.123456] [host:7:0]    ucp_context.c:1234 UCX  ERROR exceeded transports/devices limit (up to 128 are supported)\nnixlBackendError: NIXL_ERR_BACKEND",
            class: Environment,
            cause: "exceeded transports/devices limit",
            what: "UCX sees too many network devices",
        },
        // Any other exception: vllm#50454.
        Case {
            ending: exit,
            text: "WARNING 11-30 10:00:00 [x.py:1] AssertionError: not this one
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:1510] EngineCore encountered a fatal error.
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:1510] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:1510]   File \"/env/vllm/scheduler.py\", line 9, in update_state_after_alloc
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:1510]     assert request.block_ids
(EngineCore pid=7) ERROR 11-30 10:00:01 [core.py:1510] AssertionError
vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above) for the root cause.",
            class: Product,
            cause: "[core.py:1510] AssertionError",
            what: "worker0 ended with exit code 1: an exception",
        },
        // Of chained exceptions the first is the cause.
        Case {
            ending: exit,
            text: "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'first'\n\nDuring handling of the above exception, another exception occurred:\n\nTraceback (most recent call last):\n  File \"a.py\", line 2, in g\nRuntimeError: second\n",
            class: Product,
            cause: "KeyError: 'first'",
            what: "an exception",
        },
        Case {
            ending: Some("exit code 3"),
            text: "",
            class: Product,
            cause: "",
            what: "its log names no cause",
        },
        Case {
            ending: None,
            text: "INFO 11-30 10:00:00 [core.py:1] still loading: out of memory is only a word here\n",
            class: Environment,
            cause: "",
            what: "worker0 did not become ready: its log names no cause",
        },
    ];
    for case in cases {
        let failure = of(case.ending, case.text);
        let shown = format!("{failure}\n{}", case.text);
        assert_eq!(failure.class, case.class, "{shown}");
        assert!(failure.what.contains(case.what), "{shown}");
        match (&failure.cause, case.cause) {
            (None, "") => {}
            (Some(cause), expected) => assert!(cause.contains(expected), "{shown}"),
            (None, _) => panic!("no cause: {shown}"),
        }
        assert_eq!(failure.log.as_deref(), Some(Path::new("/logs/worker0.log")));
    }
}

/// The patterns are constants, so compiling them once proves the `expect`s.
#[test]
fn every_pattern_compiles_and_says_something_useful() {
    assert_eq!(PATTERNS.len(), MARKS.len());
    assert_eq!(NOISE_PATTERNS.len(), NOISE.len());
    for regex in [&ANSI, &PREFIX, &LEVEL, &EXCEPTION] {
        assert!(!regex.as_str().is_empty());
    }
    for mark in MARKS {
        assert!(!mark.hint.is_empty() && !mark.what.is_empty(), "{mark:?}");
        assert!(
            !mark.what.ends_with('.') && !mark.hint.ends_with('.'),
            "{mark:?}"
        );
    }
}

#[test]
fn a_huge_log_is_read_at_both_ends() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut bytes = b"first\n".to_vec();
    bytes.extend(std::iter::repeat_n(b'x', 500));
    bytes.extend(b"\nlast \xff\n");
    std::fs::write(file.path(), &bytes).unwrap();
    let text = read_ends(file.path(), 20).unwrap();
    assert!(text.starts_with("first\n"), "{text}");
    assert!(text.ends_with("\nlast \u{fffd}\n"), "{text}");
    assert!(text.contains("[474 bytes left out]"), "{text}");
    let whole = read_ends(file.path(), 1 << 10).unwrap();
    assert!(!whole.contains("left out"));
}

#[test]
fn a_missing_log_is_said() {
    let failure = explain("worker0", Some("signal 9"), Path::new("/nowhere/x.log"));
    assert_eq!(failure.class, Environment);
    assert!(
        failure.to_string().contains("its log cannot be read"),
        "{failure}"
    );
}

#[test]
fn a_long_line_is_cut() {
    let text = format!("ERROR 11-30 10:00:00 [x.py:1] {}", "é".repeat(2000));
    let cause = of(Some("exit code 1"), &text).cause.unwrap();
    assert_eq!(cause.chars().count(), QUOTE_CHARS + 1);
}

proptest! {
    #[test]
    fn no_log_panics(text in "(.{0,40}\n?){0,8}", signal in prop::option::of(any::<u32>())) {
        let ending = signal.map(|number| format!("signal {number}"));
        let _ = of(ending.as_deref(), &text);
    }
}
