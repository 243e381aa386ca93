//! Lines that say why an engine did not start, as data.
//!
//! A row is a pattern, who has to act, what happened in a clause, and what to do. Rows come from
//! failures that were seen or reported; the reference stands beside those that have one. Where
//! two rows match one line, the earlier row counts.

use crate::failure::Class::{self, Environment, Product, Skew};

/// One known line.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    /// Matches the line without its time, level and process.
    pub(super) pattern: &'static str,
    /// Who has to act.
    pub(super) class: Class,
    /// What happened.
    pub(super) what: &'static str,
    /// What to do about it.
    pub(super) hint: &'static str,
    /// Whether the line means this even at warning level, if nothing worse is said.
    pub(super) warned: bool,
}

const fn mark(class: Class, pattern: &'static str, what: &'static str, hint: &'static str) -> Mark {
    Mark {
        pattern,
        class,
        what,
        hint,
        warned: false,
    }
}

const fn even_warned(mut mark: Mark) -> Mark {
    mark.warned = true;
    mark
}

/// Every known line.
#[rustfmt::skip]
pub(super) const MARKS: &[Mark] = &[
    // Pairs of versions by name.
    mark(Skew, r"unexpected keyword argument 'backpressure_detector'",
        "vLLM and kvcr do not fit", "this vLLM passes what kvcr 0.1.0 does not accept (vllm#58087); pair vLLM 0.32 with kvcr 0.1.1"),
    mark(Skew, r"cannot import name 'FrameworkDramInput' from 'kvcr",
        "vLLM and kvcr do not fit", "vLLM 0.31 was written for another kvcr; pair vLLM 0.32 with kvcr 0.1.1"),
    mark(Skew, r"cannot import name 'get_engine_zmq_addresses'",
        "Dynamo and vLLM do not fit", "Dynamo 1.6.1 pairs with vLLM 0.31; with 0.32 it needs the overlay's alias (environment.overlay = true)"),
    mark(Skew, r"KVCR\w*(\.__init__)?\(\) got an unexpected keyword argument",
        "vLLM and kvcr do not fit", "vLLM's KVCR adapter and the kvcr package are of different revisions"),
    mark(Skew, r"KVCRStore: the installed \S+ is missing",
        "the engine and kvcr do not fit", "the engine's KVCR adapter and the kvcr package are of different revisions"),
    mark(Skew, r"cannot import name '\w+' from '(partially initialized module )?(vllm|kvcr|dynamo|nixl)\b",
        "two packages do not fit", "the module named last is of another version than its importer expects"),
    mark(Skew, r"No module named '(vllm|kvcr|dynamo|nixl|torch)\b",
        "a package is missing", "the environment is incomplete, or a package of another version expects a module that is gone"),
    mark(Skew, r"module '(vllm|kvcr|dynamo|nixl)[\w.]*' has no attribute",
        "two packages do not fit", "the module named is of another version than its user expects"),
    mark(Skew, r"libcud(art|nn)\S*\.so\S*: cannot open shared object file",
        "nixl and the CUDA runtime do not fit", "nixl's cu12 and cu13 wheels need their own CUDA runtime; install the one that torch brings"),
    mark(Skew, r"undefined symbol: ",
        "two binary packages do not fit", "a compiled extension was built against another version of the library"),
    mark(Skew, r"error: unrecognized arguments: |error: argument \S+: invalid choice",
        "this version does not know an argument", "the flag belongs to another version, or engine.args has a typing error"),
    mark(Skew, r"CPU Offloading is currently only supported on CUDA-alike",
        "vLLM has no offloading for host memory", "the CPU device needs the overlay (environment.overlay = true)"),
    mark(Skew, r"compatibility digest does not match",
        "KVCR's service holds pools of another layout", "restart the service, or give both sides the same compatibility digest"),
    mark(Skew, r"KVCR secondary tier requires router capabilities|KVCR local G2/G3 inventory requires|must be configured together|control_ports must contain|pool was claimed with another tier configuration|abandon_timeout_ms must be at least",
        "kvcr refuses the tier's configuration", "the adapter's rules changed between revisions; compare its versions with the lock"),

    // The machine.
    mark(Environment, r"(?i)address (is )?already in use|EADDRINUSE|\[Errno 98\]|\(os error 98\)",
        "a port is taken", "something else listens there; see who with `ss -ltnp`"),
    mark(Environment, r"(?i)no space left on device|\[Errno 28\]|ENOSPC|Insufficient space in /dev/shm",
        "a file system is full", "look at `df -h /dev/shm /tmp`; leftovers of killed engines are /dev/shm/vllm_offload_*.mmap"),
    mark(Environment, r"Fatal Python error: Bus error|\bSIGBUS\b",
        "shared memory ran out under the engine", "/dev/shm is smaller than what was mapped in it; remount it larger"),
    mark(Environment, r"(?i)Free memory on device .*less than desired",
        "the device's memory is taken", "another process holds it; see who with `nvidia-smi`"),
    mark(Environment, r"(?i)cannot allocate memory|\[Errno 12\]|\bMemoryError\b|OutOfMemoryError|out of memory",
        "memory ran out", "free memory, or lower device_blocks, primary_bytes or dram_slots"),
    mark(Environment, r"(?i)exceeded transports/devices limit",
        "UCX sees too many network devices", "name the ones to use with UCX_NET_DEVICES in engine.env"),
    mark(Environment, r"ibv_reg_mr|nvidia_peermem",
        "the network card cannot register device memory", "load nvidia_peermem, or set UCX_TLS=cuda_copy,cuda_ipc,sm,tcp in engine.env"),
    mark(Environment, r"NIXL_ERR_BACKEND",
        "NIXL cannot open its transport", "UCX found no usable device; check UCX_NET_DEVICES and UCX_TLS in engine.env"),
    mark(Environment, r"KVCR progress initialization timed out",
        "NIXL did not come up in time", "the host stalls, or UCX enumerates many network cards; name one with UCX_NET_DEVICES in engine.env"),
    even_warned(mark(Environment, r"Unable to create lease\. Check etcd|Unable to connect to etcd|etcd not reachable",
        "etcd does not answer", "see etcd's own log beside this one")),
    mark(Environment, r"AF_UNIX path too long|path must be shorter than SUN_LEN|ipc path .* is longer than",
        "a socket's path is too long", "name a shorter directory: --state-dir DIR or PHASE1_STATE_DIR=DIR"),
    mark(Environment, r"\[Errno 14\]|Bad address",
        "a leftover shared-memory file is in the way", "remove /dev/shm/vllm_offload_*.mmap of dead engines (vllm#54002)"),
    mark(Environment, r"\[Errno 24\]|Too many open files",
        "the limit of open files is too low", "raise it with `ulimit -n`"),
    mark(Environment, r"\[Errno 13\]|\bPermission denied\b",
        "a file may not be opened", "check the owner and mode of the path that is named"),
    mark(Environment, r"HFValidationError|RepositoryNotFoundError|LocalEntryNotFoundError|is not a local folder|does not appear to have (a file named|files named)|Cannot find any model weights|Incorrect path_or_model_id",
        "the model is not there", "check model.path; nothing is downloaded"),
    mark(Environment, r"SafetensorError|deserializing header|MetadataIncompleteBuffer|(?i)incomplete metadata",
        "the model's weights are damaged", "a download or copy was cut short; build or fetch the model again"),
    mark(Environment, r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler",
        "the engine wants a compiler", "install g++, or set TORCHDYNAMO_DISABLE=1 in engine.env"),
    mark(Environment, r"(?i)CUDA driver version is insufficient|no CUDA-capable device|Found no NVIDIA driver",
        "the CUDA driver does not serve this engine", "compare `nvidia-smi` with the CUDA version of torch"),
    mark(Environment, r"KVCR Guard \d+ is held by another worker",
        "another worker holds the pool", "stop that worker, or give this one a socket and an owner id of its own"),
    mark(Environment, r"control listener .* is unavailable",
        "KVCR's control port is taken", "something else listens there; see who with `ss -ltnp`"),

    // Promises that were broken. Any other exception is the product's too.
    mark(Product, r"Fatal Python error: (Segmentation fault|Aborted|Illegal instruction)",
        "the engine crashed in native code", "the stack of every thread follows in the log"),
    mark(Product, r"Duplicated timeseries in CollectorRegistry",
        "two connectors register the same metrics", "vllm#40112"),
];

/// Lines that look like causes and never are.
///
/// Health checks of ours that come before an endpoint is there are logged as errors, and what
/// only says that something else failed is not the first cause.
pub(super) const NOISE: &[&str] = &[
    r"tower_http::trace::on_failure: response failed",
    r"http response sent|request completed",
    r"See root cause above|See stack trace for root cause",
    r"EngineDeadError|Engine core initialization failed|EngineCore failed to start|WorkerProc initialization failed|WorkerProc failed to start",
];
