"""vLLM's tiers on a CPU: its own worker copies between a GPU and main memory alone."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies blocks between the engine's KV cache and the tier above kvplane's, at once."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self.region, self.blocks_per_chunk = region, blocks_per_chunk
        self.refs = kv_caches.group_data_refs
        self.done: list[TransferResult] = []
        self.engine, self.tier = [], []
        for each in kv_caches.tensors:
            size = each.page_size_bytes
            self.engine.append(each.tensor.view(torch.int8).view(-1, size))
            self.tier.append(region.create_next_worker_view(size * blocks_per_chunk))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, is_store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, is_store=False)

    def get_finished(self) -> list[TransferResult]:
        done, self.done = self.done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self.tier.clear()  # views of the region
        self.region.cleanup()

    def _copy(self, job_id: int, blocks: Any, chunks: Any, *, is_store: bool) -> bool:
        began_s, num_bytes, num_blocks, num_chunks = time.monotonic(), 0, 0, 0
        for refs, size, first in zip(
            self.refs, blocks.group_sizes, blocks.block_indices, strict=True
        ):
            skipped = first % self.blocks_per_chunk if size else 0
            for i in range(size):
                chunk, place = divmod(skipped + i, self.blocks_per_chunk)
                block = int(blocks.block_ids[num_blocks + i])
                row = int(chunks.block_ids[num_chunks + chunk])
                for ref in refs:
                    engine, tier = self.engine[ref.tensor_idx], self.tier[ref.tensor_idx]
                    page = engine.shape[1]
                    pair = engine[block], tier[row, place * page : (place + 1) * page]
                    (pair[1] if is_store else pair[0]).copy_(pair[0] if is_store else pair[1])
                    num_bytes += page
            num_blocks += size
            num_chunks += -(-(size + skipped) // self.blocks_per_chunk)
        taken_s = time.monotonic() - began_s
        self.done.append(TransferResult(job_id, True, num_bytes, taken_s))
        return True


class CpuTieringSpec(TieringOffloadingSpec):
    """``TieringOffloadingSpec`` with that worker."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker
