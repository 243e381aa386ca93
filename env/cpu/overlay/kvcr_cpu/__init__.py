"""What lets vLLM's KV offloading, KVCR and NIXL run on a CPU next to other work.

- ``spec``: an offloading spec that copies in host memory where upstream uses CUDA streams. Named in ``kv_connector_extra_config``
  (``spec_name`` ``CpuTieringOffloadingSpec``, ``spec_module_path`` ``kvcr_cpu.spec``).
- ``patches``: changes to upstream modules, made when they are imported. ``hooks`` makes them happen, ``idle`` holds their waiting logic.

No patch changes a result, a counter or a message; they only change when an idle thread looks again.
"""
