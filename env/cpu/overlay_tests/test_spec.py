"""Host copies, byte for byte, against a plain model of what a transfer means: block n of a request lies in chunk n // blocks_per_chunk."""

import unittest
from types import SimpleNamespace
from unittest import mock

from support import missing

REASON = missing("torch", "vllm.v1.kv_offload.tiering.spec")
if not REASON:
    import numpy as np
    import torch
    from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
    from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

    from kvcr_cpu import spec

PAGE = 48  # bytes of a device page; not a power of two, so that a wrong stride shows


def pages(rows: int, width: int, stride: int | None = None, seed: int = 1) -> "torch.Tensor":
    """Random int8 rows; ``stride`` larger than ``width`` gives the padded rows of the shared region."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-128, 128, (rows, stride or width), dtype=torch.int8, generator=generator)
    return whole[:, :width]


class FakeRegion:
    """Hands out views as ``SharedOffloadRegion`` does: one row a chunk, the tensors side by side in it."""

    def __init__(self, chunks: int, widths: list[int], padding: int = 16) -> None:
        self.base = torch.zeros((chunks, sum(widths) + padding), dtype=torch.int8)
        self.used = 0
        self.cleaned = 0

    def create_next_worker_view(self, tensor_page_size: int) -> "torch.Tensor":
        view = self.base[:, self.used : self.used + tensor_page_size]
        self.used += tensor_page_size
        return view

    def cleanup(self) -> None:
        self.cleaned += 1


@unittest.skipIf(REASON, REASON)
class GroupSlices(unittest.TestCase):
    def slices(self, *arguments):
        return [(g, n, (s.start, s.stop), (d.start, d.stop), ss, ds) for g, n, s, d, ss, ds in spec.group_slices(*arguments)]

    def test_one_block_a_chunk(self):
        self.assertEqual(self.slices([3], [5], 1, 1), [(0, 3, (0, 3), (0, 3), 0, 0)])

    def test_first_and_last_chunk_in_part(self):
        # blocks 3..6 of a request in chunks of four: the end of chunk 0 and the start of chunk 1
        self.assertEqual(self.slices([4], [3], 1, 4), [(0, 4, (0, 4), (0, 2), 0, 3)])
        self.assertEqual(self.slices([4], [3], 4, 1), [(0, 4, (0, 2), (0, 4), 3, 0)])

    def test_empty_groups_take_nothing(self):
        self.assertEqual(
            self.slices([2, 0, 1], [0, 7, 3], 1, 2),
            [(0, 2, (0, 2), (0, 1), 0, 0), (2, 1, (2, 3), (1, 2), 0, 1)],
        )

    def test_lengths_must_agree(self):
        with self.assertRaises(ValueError):
            self.slices([1], [0, 0], 1, 1)


@unittest.skipIf(REASON, REASON)
class HostCopies(unittest.TestCase):
    def worker(self, *, blocks_per_chunk: int = 1, tensors: int = 1, groups: list[list[int]] | None = None, used: int = PAGE):
        """A worker with ``tensors`` device tensors of 12 pages and 8 chunks; ``groups`` lists the tensors of each KV cache group."""
        self.device = [pages(12, PAGE, seed=10 + t) for t in range(tensors)]
        caches = CanonicalKVCaches(
            tensors=[CanonicalKVCacheTensor(tensor=t, page_size_bytes=PAGE) for t in self.device],
            group_data_refs=[
                [CanonicalKVCacheRef(tensor_idx=t, page_size_bytes=used) for t in group] for group in groups or [list(range(tensors))]
            ],
        )
        self.region = FakeRegion(8, [PAGE * blocks_per_chunk] * tensors)
        return spec.HostOffloadingWorker(caches, blocks_per_chunk, self.region)

    def chunk(self, tensor: int, chunk: int, part: int, blocks_per_chunk: int) -> "torch.Tensor":
        start = (tensor * blocks_per_chunk + part) * PAGE
        return self.region.base[chunk, start : start + PAGE]

    def test_store_then_load_elsewhere(self):
        worker = self.worker(tensors=3)
        original = [t.clone() for t in self.device]
        self.assertTrue(worker.submit_store(1, GPULoadStoreSpec([2, 7, 4], [3], [0]), CPULoadStoreSpec([5, 0, 6])))
        self.assertTrue(worker.submit_load(2, CPULoadStoreSpec([6, 5]), GPULoadStoreSpec([9, 11], [2], [1])))
        for t, was in enumerate(original):
            self.assertTrue(torch.equal(self.device[t][9], was[4]))
            self.assertTrue(torch.equal(self.device[t][11], was[2]))
            untouched = [row for row in range(12) if row not in (9, 11)]
            self.assertTrue(torch.equal(self.device[t][untouched], was[untouched]))
            self.assertTrue(torch.equal(self.chunk(t, 0, 0, 1), was[7]))
        self.assertEqual(self.region.base[[1, 2, 3, 4, 7]].abs().sum().item(), 0)
        self.assertEqual(self.region.base[:, -16:].abs().sum().item(), 0)  # the padding of a row belongs to nobody

    def test_results_are_handed_out_once_in_order_with_exact_bytes(self):
        worker = self.worker(tensors=2)
        worker.submit_load(7, CPULoadStoreSpec([0]), GPULoadStoreSpec([0], [1], [0]))
        worker.submit_store(8, GPULoadStoreSpec([1, 2], [2], [0]), CPULoadStoreSpec([1, 2]))
        worker.submit_store(9, GPULoadStoreSpec([3], [1], [0]), CPULoadStoreSpec([3]))
        worker.wait({7, 8, 9})
        results = worker.get_finished()
        self.assertEqual([(r.job_id, r.success, r.transfer_size) for r in results], [(8, True, 4 * PAGE), (9, True, 2 * PAGE), (7, True, 2 * PAGE)])
        self.assertTrue(all(r.transfer_time >= 0 for r in results))
        self.assertEqual(worker.get_finished(), [])

    def test_partial_chunks_keep_the_rest_of_the_chunk(self):
        for per_chunk in (2, 3, 4):
            for first in range(2 * per_chunk):
                for count in range(1, 6):
                    with self.subTest(per_chunk=per_chunk, first=first, count=count):
                        worker = self.worker(blocks_per_chunk=per_chunk, tensors=2)
                        device_ids = [(3 * n + 1) % 12 for n in range(count)]
                        spanned = range(first // per_chunk, (first + count - 1) // per_chunk + 1)
                        chunk_of = {logical: 7 - i for i, logical in enumerate(spanned)}
                        before = self.region.base.clone()
                        worker.submit_store(1, GPULoadStoreSpec(device_ids, [count], [first]), CPULoadStoreSpec(list(chunk_of.values())))
                        wanted = before
                        for n, device_id in enumerate(device_ids):
                            logical = first + n
                            for t in range(2):
                                start = (t * per_chunk + logical % per_chunk) * PAGE
                                wanted[chunk_of[logical // per_chunk], start : start + PAGE] = self.device[t][device_id]
                        self.assertTrue(torch.equal(self.region.base, wanted))
                        kept = [t.clone() for t in self.device]
                        for t in self.device:
                            t[device_ids] = 0
                        worker.submit_load(2, CPULoadStoreSpec(list(chunk_of.values())), GPULoadStoreSpec(device_ids, [count], [first]))
                        for t, was in zip(self.device, kept, strict=True):
                            self.assertTrue(torch.equal(t, was))

    def test_groups_use_their_own_tensors_and_offsets(self):
        per_chunk = 2
        worker = self.worker(blocks_per_chunk=per_chunk, tensors=3, groups=[[0, 2], [1], [1, 2]])
        # group 0: blocks 1..3 (chunks 4, 5), group 1: none, group 2: block 4 (chunk 6)
        worker.submit_store(1, GPULoadStoreSpec([3, 8, 1, 10], [3, 0, 1], [1, 5, 4]), CPULoadStoreSpec([4, 5, 6]))
        for tensor in (0, 2):
            self.assertTrue(torch.equal(self.chunk(tensor, 4, 1, per_chunk), self.device[tensor][3]))
            self.assertTrue(torch.equal(self.chunk(tensor, 5, 0, per_chunk), self.device[tensor][8]))
            self.assertTrue(torch.equal(self.chunk(tensor, 5, 1, per_chunk), self.device[tensor][1]))
        for tensor in (1, 2):
            self.assertTrue(torch.equal(self.chunk(tensor, 6, 0, per_chunk), self.device[tensor][10]))
        self.assertEqual(self.chunk(1, 4, 1, per_chunk).abs().sum().item(), 0)
        self.assertEqual(worker.get_finished()[0].transfer_size, (3 * 2 + 1 * 2) * PAGE)

    def test_only_the_used_bytes_of_a_padded_page_are_copied(self):
        worker = self.worker(used=PAGE - 8)
        worker.submit_store(1, GPULoadStoreSpec([5], [1], [0]), CPULoadStoreSpec([2]))
        self.assertTrue(torch.equal(self.chunk(0, 2, 0, 1)[: PAGE - 8], self.device[0][5][: PAGE - 8]))
        self.assertEqual(self.chunk(0, 2, 0, 1)[PAGE - 8 :].abs().sum().item(), 0)
        self.assertEqual(worker.get_finished()[0].transfer_size, PAGE - 8)

    def test_same_as_upstreams_descriptors(self):
        """The pointers upstream would hand to the device copy, for the same job."""
        from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Upstream

        per_chunk = 3
        worker = self.worker(blocks_per_chunk=per_chunk, tensors=2, groups=[[0, 1], [1]])
        chunks = worker._store._dst_tensors
        handler = Upstream.__new__(Upstream)
        handler.src_tensors, handler.dst_tensors = self.device, chunks
        handler.src_blocks_per_chunk, handler.dst_blocks_per_chunk = 1, per_chunk
        handler.layer_refs_per_group = worker._store._refs_per_group
        source, target = GPULoadStoreSpec([1, 2, 3, 4, 5, 6], [4, 2], [2, 5]), CPULoadStoreSpec([7, 3, 0, 5])
        want: list[tuple[int, int, int]] = []
        src, dst, sizes = (np.empty(100, dtype=np.int64) for _ in range(3))
        at = 0
        for group, size, s, d, skip_s, skip_d in spec.group_slices(source.group_sizes, source.block_indices, 1, per_chunk):
            at, _ = handler._fill_direct_ops(group, source.block_ids[s], target.block_ids[d], size, skip_s, skip_d, src, dst, sizes, at)
        want = list(zip(dst[:at].tolist(), src[:at].tolist(), sizes[:at].tolist(), strict=True))
        with mock.patch.object(spec.ctypes, "memmove") as memmove:
            worker.submit_store(1, source, target)
        self.assertEqual([call.args for call in memmove.call_args_list], want)

    def test_jobs_that_do_not_fit_are_refused_before_they_touch_memory(self):
        for device, chunks, error in (
            (([12], [1], [0]), [0], IndexError),
            (([0], [1], [0]), [8], IndexError),
            (([-1], [1], [0]), [0], IndexError),
            (([0, 1], [2], [0]), [0], ValueError),
            (([0], [1], [0]), [0, 1], ValueError),
            (([0, 1], [1, 1], [0, 0]), [0, 1], ValueError),
        ):
            with self.subTest(device=device, chunks=chunks):
                worker = self.worker()
                with self.assertRaises(error), mock.patch.object(spec.ctypes, "memmove") as memmove:
                    worker.submit_store(1, GPULoadStoreSpec(*device), CPULoadStoreSpec(chunks))
                if error is IndexError:
                    memmove.assert_not_called()
                self.assertEqual(worker.get_finished(), [])

    def test_tensors_of_another_kind_are_refused(self):
        good = pages(4, PAGE)
        for src in (good.to(torch.float32), good.view(-1), good.t(), pages(4, PAGE + 1)):
            with self.subTest(tuple(src.shape)), self.assertRaises(ValueError):
                spec.HostCopier([src], [good], 1, 1, [])

    def test_shutdown_lets_go_of_the_region_once(self):
        worker = self.worker(tensors=2)
        worker.shutdown()
        worker.shutdown()
        self.assertEqual((self.region.cleaned, worker._store._src_tensors, worker._load._dst_tensors), (1, [], []))


@unittest.skipIf(REASON, REASON)
class Spec(unittest.TestCase):
    def made(self, *, canonical: bool = False, replicated: bool = False):
        made = spec.CpuTieringOffloadingSpec.__new__(spec.CpuTieringOffloadingSpec)
        made.config = SimpleNamespace(canonical_layout=canonical, parallel=SimpleNamespace(rank=3))
        made.replicated_layout = replicated
        made._worker = None
        made._engine_id, made.num_chunks, made.kv_bytes_per_chunk, made.cpu_page_size_per_worker = "cookie-w0", 8, 4096, 64
        made.blocks_per_chunk = 1
        return made

    def test_region_is_upstreams_and_the_worker_is_made_once(self):
        for replicated, rank in ((False, 3), (True, 0)):
            made = self.made(replicated=replicated)
            with mock.patch.object(spec, "SharedOffloadRegion") as region, mock.patch.object(spec, "HostOffloadingWorker") as worker:
                self.assertIs(made.get_worker("caches"), made.get_worker("caches"))
            region.assert_called_once_with(engine_id="cookie-w0", num_chunks=8, rank=rank, kv_bytes_per_chunk=4096, cpu_page_size=64)
            worker.assert_called_once_with("caches", 1, region.return_value)

    def test_a_worker_that_fails_leaves_no_region(self):
        with mock.patch.object(spec, "SharedOffloadRegion") as region, mock.patch.object(spec, "HostOffloadingWorker", side_effect=ValueError):
            with self.assertRaises(ValueError):
                self.made().get_worker("caches")
        region.return_value.cleanup.assert_called_once_with()

    def test_canonical_layout_is_refused_by_name(self):
        with self.assertRaisesRegex(ValueError, "canonical_layout is not supported"):
            self.made(canonical=True).get_worker("caches")

    def test_another_vllm_is_refused_by_name(self):
        def other(block_ids, output, tensor):
            pass

        with mock.patch.object(spec, "compute_sub_block_ptrs", other), self.assertRaisesRegex(spec.OverlayError, "cpu-offload-spec.*vllm"):
            spec._check_shape()


if __name__ == "__main__":
    unittest.main()
