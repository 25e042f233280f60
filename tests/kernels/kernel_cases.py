"""Batches to run the kernels on, and what a right answer is.

Every slot that a kernel must not read holds NaN and every unused table entry is -1: to read one
spoils the answer or is refused. Scales of fp8 pages differ much between heads, and between keys and
values, so that a wrong one shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import oracle
import torch

from data_plane.kernels.arguments import (
    AttentionArguments,
    HostLengths,
    SharedPlans,
    WriteArguments,
)
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory.pages import PageShape
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.layout import KEYS_AND_VALUES, LATENT, LayerGroup
from kvplane.tensor import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # of pages only
make_kernels: Callable[[int], Kernels] = CpuKernels
"""The kernels under test, on so many threads."""
_INTEGERS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Case:
    """One batch. ``lens``: (query_len, context_len) of each sequence."""

    lens: tuple[tuple[int, int], ...] = ((1, 17), (5, 5), (3, 40), (0, 0), (1, 1))
    heads: tuple[int, int] = (4, 2)
    head_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    pages_dtype: torch.dtype | None = None
    window: int = 0
    alibi: bool = False
    table_dtype: torch.dtype = torch.int64
    seed: int = 0
    scales: Literal[None, "tensor", "head"] = None  # of fp8 pages only
    value_head_size: int = 0  # 0: head_size
    soft_cap: float = 0.0
    sinks: bool = False
    latent: bool = False  # a value is the first value_head_size elements of its key
    pattern: oracle.Pattern | None = None
    masked: bool = False  # a mask of the caller's in place of the pattern's stride

    def __str__(self) -> str:
        dtypes = f"{self.dtype}-{self.pages_dtype or self.dtype}".replace("torch.", "")
        dtypes += f"-{self.scales}" if self.scales else ""
        lens = "+".join(f"{q}/{c}" for q, c in self.lens[:6])
        shape = f"h{self.heads[0]}/{self.heads[1]}-d{self.head_size}-b{self.block_size}"
        options = f"-w{self.window}" * (self.window > 0) + "-alibi" * self.alibi
        options += f"-v{self.value_head_size}" * (self.value_head_size > 0)
        options += f"-cap{self.soft_cap}" * (self.soft_cap > 0) + "-sinks" * self.sinks
        options += "-latent" * self.latent
        options += f"-blocks{self.pattern}" * (self.pattern is not None) + "-masked" * self.masked
        return f"{lens}-{shape}-{dtypes}{options}"


def with_pages(case: Case, pages_dtype: torch.dtype) -> Case:
    """Return the case with pages of another type; each head of fp8 pages has a scale."""
    return replace(case, pages_dtype=pages_dtype, scales="head" if pages_dtype in FP8 else None)


@dataclass(frozen=True)
class Batch:
    """A case's tensors; shapes as in ``data_plane.kernels.arguments``."""

    query: torch.Tensor
    pages: Any  # a tensor, or two where values are smaller than keys
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    scale: float
    window: int
    alibi_slopes: torch.Tensor | None
    key: torch.Tensor  # [num_context_tokens, num_kv_heads, head_size], all sequences'
    value: torch.Tensor
    slots: torch.Tensor  # [num_context_tokens]
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    soft_cap: float = 0.0
    sinks: torch.Tensor | None = None
    latent: bool = False
    pattern: oracle.Pattern | None = None
    seen_blocks: torch.Tensor | None = None  # bool [num_sequences, num_heads, num_blocks]

    @property
    def options(self) -> AttentionOptions:
        """How the kernel attends."""
        slopes = () if self.alibi_slopes is None else tuple(self.alibi_slopes.tolist())
        sinks = () if self.sinks is None else tuple(self.sinks.tolist())
        pattern = None if self.pattern is None else BlockPattern(*self.pattern)
        seen = None
        if self.seen_blocks is not None:
            seen = Tensor.from_array(self.seen_blocks.to(torch.uint8).contiguous())
        return AttentionOptions(
            self.scale, self.window, slopes, self.soft_cap, sinks, pattern, seen
        )

    def write(self) -> None:
        """Puts the keys and values into the pages, by the kernel."""
        make_kernels(0).reshape_and_cache(self.to_write())

    def to_write(self) -> WriteArguments:
        """The arguments of the kernel that writes."""
        value = None if self.latent else self.value
        return WriteArguments(
            self.key, value, self.pages, self.slots, self.key_scales, self.value_scales
        )

    def to_attend(self) -> AttentionArguments:
        """The arguments of the kernel that attends."""
        return AttentionArguments(
            self.query,
            self.pages,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            self.options,
            self.key_scales,
            self.value_scales,
        )

    def with_lengths(
        self, plans: SharedPlans | None = None, *, tables_may_share: bool = False
    ) -> AttentionArguments:
        """The same, with lengths that the host knows too."""
        starts, contexts = self.query_starts.numpy(), self.context_lens.numpy()
        lengths = HostLengths(starts, contexts, tables_may_share)
        return replace(self.to_attend(), lengths=lengths, plans=plans)

    def attend(self, *, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel's output and lse."""
        lse = torch.full(self.query.shape[:2], torch.nan)
        return make_kernels(num_threads).paged_attention(self.to_attend(), lse=lse), lse

    def oracle(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, computed by torch in ``dtype`` on pages that the oracle wrote."""
        pages = _unwritten(self.pages)
        scales = (self.key_scales, self.value_scales)
        oracle.reshape_and_cache(self.key, self.value, pages, self.slots, *scales)
        return oracle.paged_attention(
            self.query,
            pages,
            self.block_tables,
            self.query_starts,
            self.context_lens,
            scale=self.scale,
            sliding_window_tokens=self.window,
            alibi_slopes=self.alibi_slopes,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            pattern=self.pattern,
            seen_blocks=self.seen_blocks,
            dtype=dtype,
        )

    def unquantised(self) -> torch.Tensor:
        """The output in float64, of keys and values that were never rounded to fp8."""
        pages = self.pages.to(self.query.dtype)
        exact = replace(self, pages=pages, key_scales=None, value_scales=None)
        return exact.oracle(torch.float64)[0]

    def only(self, sequences: list[int]) -> Batch:
        """The batch of just these sequences, in this order, on the same pages."""
        starts = self.query_starts.tolist()
        rows = [self.query[starts[s] : starts[s + 1]] for s in sequences]
        lens = torch.tensor([0] + [row.shape[0] for row in rows])
        return replace(
            self,
            query=torch.cat(rows),
            block_tables=self.block_tables[sequences],
            query_starts=lens.cumsum(0),
            context_lens=self.context_lens[sequences],
            seen_blocks=None if self.seen_blocks is None else self.seen_blocks[sequences],
        )


def build(case: Case) -> Batch:
    """Random tensors; the sequences' blocks lie scattered among unused ones."""
    rng = torch.Generator().manual_seed(case.seed)
    num_heads, num_kv_heads = case.heads
    context_lens = torch.tensor([context for _, context in case.lens])
    num_used = -(-context_lens // case.block_size)
    num_blocks = int(num_used.sum()) + 3
    ids = torch.randperm(num_blocks, generator=rng)
    tables = torch.full((len(case.lens), int(num_used.max()) + 2), -1)
    slots, at = [], 0
    for s, used in enumerate(num_used.tolist()):
        tables[s, :used] = ids[at : at + used]
        at += used
        i = torch.arange(int(context_lens[s]))
        slots.append(tables[s][i // case.block_size] * case.block_size + i % case.block_size)
    tokens = int(context_lens.sum())

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng).to(case.dtype)

    def scales() -> torch.Tensor | None:
        """Scales with which numbers near 1 reach the largest of e4m3; None means 1."""
        count = {None: 0, "tensor": 1, "head": num_kv_heads}[case.scales]
        return 0.008 * 4 ** torch.rand(count, generator=rng) if count else None

    batch = Batch(
        query=normal(sum(q for q, _ in case.lens), num_heads, case.head_size),
        pages=_pages_of(case, num_blocks),
        block_tables=tables.to(case.table_dtype),
        query_starts=torch.tensor([0] + [q for q, _ in case.lens]).cumsum(0),
        context_lens=context_lens,
        scale=case.head_size**-0.5,
        window=case.window,
        alibi_slopes=torch.rand(num_heads, generator=rng) / 4 if case.alibi else None,
        key=normal(tokens, num_kv_heads, case.head_size),
        value=normal(tokens, num_kv_heads, case.value_head_size or case.head_size),
        slots=torch.cat(slots),
        key_scales=scales(),
        value_scales=scales(),
        soft_cap=case.soft_cap,
        sinks=2 * torch.randn(num_heads, generator=rng) if case.sinks else None,
        latent=case.latent,
        pattern=case.pattern,
    )
    if case.masked:
        assert case.pattern is not None
        num_mask_blocks = 1 + int(context_lens.max()) // case.pattern[0]
        seen = torch.rand(len(case.lens), num_heads, num_mask_blocks, generator=rng) < 0.3
        batch = replace(batch, seen_blocks=seen)
    if case.latent:
        value = batch.key[..., : case.value_head_size]
        batch = replace(batch, value=value, value_scales=batch.key_scales)
    batch.write()
    return batch


def _pages_of(case: Case, num_blocks: int) -> Any:
    dtype = case.pages_dtype or case.dtype
    heads = (case.heads[1], case.block_size)
    if not case.value_head_size:
        return torch.full((num_blocks, 2, *heads, case.head_size), torch.nan, dtype=dtype)
    group = LayerGroup(
        "all",
        (0,),
        heads[0],
        case.head_size,
        cache_kind=LATENT if case.latent else KEYS_AND_VALUES,
        value_head_size=case.value_head_size,
    )
    shape = PageShape(group, *heads)
    return shape.keys_and_values(torch.full((num_blocks, *shape.extents), torch.nan, dtype=dtype))


def _unwritten(pages: Any) -> Any:
    if isinstance(pages, tuple):
        return tuple(torch.full_like(part, torch.nan) for part in pages)
    return torch.full_like(pages, torch.nan)


def has_bits_of_its_own(
    isa: str, dtype: torch.dtype, pages_dtype: torch.dtype, head_size: int
) -> bool:
    """Return whether an instruction set may give other bits than baseline, which fuses nothing."""
    stored = isa != "baseline" and pages_dtype != torch.float32 and head_size % 16 == 0
    return stored or (isa == "avx512bf16" and dtype == torch.bfloat16)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal in every bit, NaNs included."""
    integers = _INTEGERS[expected.element_size()]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(
        actual.contiguous().view(integers), expected.contiguous().view(integers), rtol=0, atol=0
    )


@lru_cache(maxsize=64)
def _expected(case: Case) -> tuple[torch.Tensor, torch.Tensor, float]:
    """The output and lse in float64, and torch's largest error; cached for the other kernels."""
    batch = build(case)
    exact, exact_lse = batch.oracle(torch.float64)
    rounded, _ = batch.oracle(case.dtype)
    error = (rounded.double() - exact).abs()
    return exact, exact_lse, float(error.max()) if error.numel() else 0.0


def assert_as_exact_as_torch(case: Case) -> None:
    """The error against float64 is at most twice torch's in the query's dtype, plus a little."""
    batch = build(case)
    out, lse = batch.attend()
    exact, exact_lse, torch_error = _expected(case)
    error = (out.double() - exact).abs()
    least = 1e-6 if case.dtype == torch.float32 else 1e-5
    value_head_size = case.value_head_size or case.head_size
    assert out.shape == (*batch.query.shape[:2], value_head_size) and out.dtype == case.dtype
    assert not out.isnan().any()
    worst = error.flatten().argmax() if error.numel() else 0
    assert error.numel() == 0 or error.max() <= 2 * torch_error + least, (
        f"out[{worst}] is {out.flatten()[worst]}, should be {exact.flatten()[worst]}; "
        f"torch is off by at most {torch_error}"
    )
    torch.testing.assert_close(lse.double(), exact_lse, rtol=2e-6, atol=5e-6)


def assert_as_exact_as_8_bits(case: Case) -> None:
    """Against numbers that were never rounded to fp8: at most four times torch's error with fp8."""
    batch = build(case)
    exact = batch.unquantised()
    rounded, _ = batch.oracle(case.dtype)
    torch_error = (rounded.double() - exact).abs().max()
    out, _ = batch.attend()
    assert not out.isnan().any()
    assert (out.double() - exact).abs().max() <= 4 * torch_error
