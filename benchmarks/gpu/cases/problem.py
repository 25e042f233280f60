"""A batch for attention, and how its results are checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from benchmarks.gpu.cases.shapes import KV_DTYPES, Shape
from data_plane.kernels.arguments import AttentionArguments, HostLengths
from data_plane.kernels.backends.cuda import CudaKernels
from kvplane.attention_options import AttentionOptions

MAX_ERROR: Final = 0.01
"""‖answer - right‖ / ‖right‖, with ``right`` in float64 from the stored keys and values. Results in
bf16 have about 0.003."""
FP8_KEY_SCALE: Final = 1 / 16
FP8_VALUE_SCALE: Final = 1 / 32
_PART_BYTES: Final = 1 << 30


@dataclass(frozen=True)
class Call:
    """A call of our kernels, with all memory allocated beforehand."""

    run: Callable[[], torch.Tensor]
    """Attends with the plan that was made before."""
    plan: Callable[[], object]
    """Makes the plan again, as the first layer of a step does."""


class Problem:
    """Random queries, and keys and values in blocks in random order."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.is_fp8 = shape.kv_dtype != "bfloat16"
        self.pages = torch.empty(
            (shape.num_blocks, 2, shape.kv_heads, shape.block, shape.head),
            dtype=KV_DTYPES[shape.kv_dtype],
            device=device,
        )
        blocks_of_part = max(1, _PART_BYTES // (2 * self.pages[0].numel()))
        for first in range(0, shape.num_blocks, blocks_of_part):
            part = self.pages[first : first + blocks_of_part]
            numbers = torch.randn(part.shape, dtype=torch.bfloat16, device=device)
            if self.is_fp8:
                numbers[:, 0] /= FP8_KEY_SCALE
                numbers[:, 1] /= FP8_VALUE_SCALE
            part.copy_(numbers)
        ids = torch.randperm(shape.num_blocks, device=device).int()
        shared = ids[: shape.num_shared_blocks].expand(shape.batch, -1)
        own = ids[shape.num_shared_blocks :].view(shape.batch, -1)
        self.tables = torch.cat((shared, own), dim=1)
        rows = (shape.batch * shape.new, shape.heads, shape.head)
        self.query = torch.randn(rows, dtype=torch.bfloat16, device=device)
        self.starts = torch.arange(shape.batch + 1, device=device) * shape.new
        self.lens = torch.full((shape.batch,), shape.context, device=device)
        self.lengths = HostLengths(
            np.arange(shape.batch + 1, dtype=np.int64) * shape.new,
            np.full(shape.batch, shape.context, dtype=np.int64),
            tables_may_share=shape.shared > 0,
        )
        self.scale = shape.head**-0.5
        self.key_scales, self.value_scales = (
            torch.tensor([scale], device=device) if self.is_fp8 else None
            for scale in (FP8_KEY_SCALE, FP8_VALUE_SCALE)
        )

    def arguments(self) -> AttentionArguments:
        """Return the arguments of our kernels, with lengths on the host, as in the executor."""
        return AttentionArguments(
            self.query,
            self.pages,
            self.tables,
            self.starts,
            self.lens,
            AttentionOptions(self.scale),
            self.key_scales,
            self.value_scales,
            self.shape.new,
            self.lengths,
        )

    def attention(self, kernels: CudaKernels) -> Call:
        """Return our kernels' call. The plan is not timed, as for peers that plan: the layers of a
        step share one.
        """
        out = torch.full_like(self.query, torch.nan)
        arguments = self.arguments()
        num_partials = int(kernels.count_partials(arguments).sum())
        memory = kernels.empty(kernels.plan_bytes(arguments))
        plan = kernels.plan(arguments, memory=memory, num_partials=num_partials)
        workspace = kernels.empty(plan.workspace_bytes)

        def run() -> torch.Tensor:
            # Made for each call, as the executor does: the host's time includes the checks.
            there = self.arguments()
            return kernels.paged_attention(there, out=out, workspace=workspace, plan=plan)

        def plan_again() -> object:
            return kernels.plan(arguments, memory=memory, num_partials=num_partials)

        return Call(run, plan_again)

    def kv_of(self, sequence: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a sequence's keys and values, scaled, [2, kv_heads, context, head]."""
        # Not every device can index fp8, so bytes are indexed instead.
        integers = torch.uint8 if self.is_fp8 else torch.int16
        taken = self.pages.view(integers)[self.tables[sequence].long()].view(self.pages.dtype)
        kv = taken.to(torch.float32 if self.is_fp8 else dtype).to(dtype)
        kv = kv.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : self.shape.context]
        if self.key_scales is not None and self.value_scales is not None:
            scales = torch.stack((self.key_scales, self.value_scales)).to(dtype)
            kv = kv * scales.view(2, 1, 1, 1)
        return kv

    def rows_to_check(self) -> list[tuple[int, int]]:
        """Return (sequence, row) pairs: the first, the middle and the last of each."""
        shape = self.shape
        sequences = sorted({0, shape.batch // 2, shape.batch - 1})
        rows = sorted({0, shape.new // 2, shape.new - 1})
        return [(sequence, row) for sequence in sequences for row in rows]

    def right_rows(self) -> torch.Tensor:
        """Return the expected results of ``rows_to_check``, float64 [num_rows, heads, head]."""
        shape, answers = self.shape, []
        kv, kv_is_of = torch.empty(0), -1
        for sequence, row in self.rows_to_check():
            if sequence != kv_is_of:
                kv, kv_is_of = self.kv_of(sequence, torch.float64), sequence
            key, value = kv[:, :, : shape.context - shape.new + row + 1]
            query = self.query[sequence * shape.new + row].double()
            query = query.view(shape.kv_heads, -1, shape.head)
            weights = torch.softmax(self.scale * (query @ key.transpose(1, 2)), dim=-1)
            answers.append((weights @ value).view(shape.heads, shape.head))
        return torch.stack(answers)

    def error(self, answer: torch.Tensor, right: torch.Tensor) -> float:
        """Return the largest relative error of the rows to check; NaN if they have one."""
        taken = [sequence * self.shape.new + row for sequence, row in self.rows_to_check()]
        off = (answer[taken].double() - right).flatten(1).norm(dim=1)
        return float((off / right.flatten(1).norm(dim=1)).max())
