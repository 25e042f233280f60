"""The measurements of the CPU kernels, beside torch's attention and bare loops, and their goals."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import kvplane_kernels
import torch
import torch.nn.functional as F

from benchmarks.common.memory import Memory
from benchmarks.common.report import markdown
from benchmarks.common.timing import Calls
from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory import huge_pages

HEAD_SIZE, BLOCK_SIZE, NUM_KV_HEADS = 128, 16, 8
BATCH, GROUPS, PREFILL_GROUP = 8, (1, 4, 8), 4
NUM_LAYERS = 4  # of a decode step: one call after another, each over pages of its own
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
SCALE = HEAD_SIZE**-0.5
KERNELS = CpuKernels()
BARE_ROUNDS = 100_000
SHARES_OF_READ: Final = {
    "avx512bf16": {"decode/bf16/g1": 0.85, "decode/bf16/g4": 0.65, "decode/bf16/g8": 0.50},
    "avx2": {"decode/bf16/g1": 0.70, "decode/bf16/g4": 0.60, "decode/bf16/g8": 0.35},
}
SHARES_OF_COPY: Final = {"copy_blocks": 0.80, "swap_out": 0.80, "swap_in": 0.80}
TIMES_TORCH: Final = {"decode/bf16": 2.0, "decode/fp32": 1.3, "prefill": 1.5}
HEADS: Final = ("", "rate", "of memory", "goal", "× torch", "goal")


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements."""

    context_tokens: int = 4096
    memory_bytes: int = 256 << 20
    num_blocks: int = 1024
    prefill_tokens: int = 2048


QUICK = Sizes(512, 64 << 20, 256, 512)


def random_pool(
    num_blocks: int, dtype: torch.dtype, head_size: int = HEAD_SIZE, num_layers: int = 1
) -> torch.Tensor:
    """Return a random pool [num_blocks, num_layers, 2, num_kv_heads, block_size, head_size],
    allocated as the data plane allocates it.
    """
    shape = (num_blocks, num_layers, 2, NUM_KV_HEADS, BLOCK_SIZE, head_size)
    pool = huge_pages.empty(shape, dtype)
    for block in pool:
        block.copy_(torch.randn(shape[1:]))
    return pool


def query_dtype_of(pages_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of queries for pages of a dtype."""
    return torch.bfloat16 if pages_dtype.itemsize == 1 else pages_dtype


def decode_rows(name: str, dtype: torch.dtype, context_tokens: int) -> list[Calls]:
    """Measure one query token for each sequence in each layer, over pages in random order; torch
    over contiguous KV.

    Queries of fp8 pages are bf16. Torch has no attention over fp8 to compare with.
    """
    num_blocks = BATCH * context_tokens // BLOCK_SIZE
    pool = random_pool(num_blocks, dtype, num_layers=NUM_LAYERS)
    tables = torch.randperm(num_blocks).view(BATCH, -1)
    starts, lens = torch.arange(BATCH + 1), torch.full((BATCH,), context_tokens)
    shape = (NUM_LAYERS, BATCH, NUM_KV_HEADS, context_tokens, HEAD_SIZE)
    query_dtype = query_dtype_of(dtype)
    keys, values = torch.randn(shape).to(query_dtype), torch.randn(shape).to(query_dtype)
    rows = []
    for group in GROUPS:
        query = torch.randn(BATCH, NUM_KV_HEADS * group, HEAD_SIZE).to(query_dtype)
        packed = query.view(BATCH, NUM_KV_HEADS, group, HEAD_SIZE)
        layers = [
            AttentionArguments(query, pages, tables, starts, lens) for pages in pool.unbind(1)
        ]

        def ours(layers: list[AttentionArguments] = layers) -> None:
            for layer in layers:
                KERNELS.paged_attention(layer)

        def torchs(packed: torch.Tensor = packed) -> None:
            for key, value in zip(keys, values, strict=True):
                F.scaled_dot_product_attention(packed, key, value, scale=SCALE)

        rows.append(Calls(f"decode/{name}/g{group}", "GB/s", pool.nbytes, ours))
        if query_dtype == dtype:
            rows.append(Calls(f"torch/decode/{name}/g{group}", "GB/s", pool.nbytes, torchs))
    return rows


def prefill_rows(num_tokens: int) -> list[Calls]:
    """Measure one prompt in bf16, nothing cached; torch with its causal flag and own grouping."""
    dtype, num_heads = torch.bfloat16, NUM_KV_HEADS * PREFILL_GROUP
    num_blocks = num_tokens // BLOCK_SIZE
    pages = random_pool(num_blocks, dtype)[:, 0]
    query = torch.randn(num_tokens, num_heads, HEAD_SIZE).to(dtype)
    tables = torch.randperm(num_blocks)[None]
    starts, lens = torch.tensor([0, num_tokens]), torch.tensor([num_tokens])
    shape = (1, NUM_KV_HEADS, num_tokens, HEAD_SIZE)
    key, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    heads_first = query.transpose(0, 1)[None].contiguous()
    arguments = AttentionArguments(query, pages, tables, starts, lens)

    def ours() -> object:
        return KERNELS.paged_attention(arguments)

    def torchs() -> object:
        return F.scaled_dot_product_attention(
            heads_first, key, value, is_causal=True, scale=SCALE, enable_gqa=True
        )

    return [
        Calls("prefill", "tokens/s", num_tokens, ours),
        Calls("torch/prefill", "tokens/s", num_tokens, torchs),
    ]


def block_rows(num_blocks: int) -> list[Calls]:
    """Measure bf16 blocks in random order: inside a pool, between pools, and written by token."""
    dtype = torch.bfloat16
    device, host = random_pool(2 * num_blocks, dtype), random_pool(num_blocks, dtype)
    ids = torch.randperm(2 * num_blocks)
    inside = ids.view(2, num_blocks).T.contiguous()
    out = torch.stack((ids[:num_blocks], torch.randperm(num_blocks)), dim=1)
    back = out.flip(1).contiguous()
    num_bytes = num_blocks * device[0].nbytes
    offsets = torch.arange(BLOCK_SIZE)
    slots = (ids[: num_blocks // 4, None] * BLOCK_SIZE + offsets).flatten()
    qkv = torch.randn(slots.shape[0], 3, NUM_KV_HEADS, HEAD_SIZE).to(dtype)
    _, key, value = qkv.unbind(1)

    def write() -> None:
        KERNELS.reshape_and_cache(WriteArguments(key, value, device[:, 0], slots))

    return [
        Calls("copy_blocks", "GB/s", num_bytes, lambda: KERNELS.copy_blocks(device, inside)),
        Calls("swap_out", "GB/s", num_bytes, lambda: KERNELS.swap_blocks(device, host, out)),
        Calls("swap_in", "GB/s", num_bytes, lambda: KERNELS.swap_blocks(host, device, back)),
        Calls("reshape_and_cache", "GB/s", key.nbytes + value.nbytes, write),
    ]


def bare_rows(num_threads: int, num_rounds: int = BARE_ROUNDS) -> list[Calls]:
    """Return the bare loop of products; no row where the instruction set has no fused products."""

    def multiply() -> int:
        return kvplane_kernels.fused_products(num_rounds=num_rounds, num_threads=num_threads)

    num_products = multiply()
    return [Calls("fused_products", "10^9 products/s", num_products, multiply)] * bool(num_products)


def kernel_rows(sizes: Sizes, num_threads: int) -> list[Calls]:
    """Return all rows, to be measured by turns."""
    memory = Memory(sizes.memory_bytes, num_threads)
    rows = [memory.read_calls(), memory.copy_calls()]
    for name, dtype in DTYPES.items():
        rows += decode_rows(name, dtype, sizes.context_tokens)
    rows += block_rows(sizes.num_blocks)
    return rows + prefill_rows(sizes.prefill_tokens) + bare_rows(num_threads)


def table(rows: Sequence[Calls], isa: str) -> Iterator[str]:
    """Yield the table, by wall time. ``isa``: the instruction set, which has goals of its own."""
    rates = {row.name: row.rate() for row in rows}
    ours = [row for row in rows if not row.name.startswith("torch")]
    return markdown(HEADS, (_cells(row, isa, rates) for row in ours))


def _cells(row: Calls, isa: str, rates: dict[str, float]) -> list[str]:
    return [
        row.name if row.unit == "GB/s" else f"{row.name}, {row.unit}",
        f"{rates[row.name]:,.1f}",
        *_of_memory(row, isa, rates),
        *_of_torch(row, rates),
    ]


def _of_memory(row: Calls, isa: str, rates: dict[str, float]) -> list[str]:
    """Return the share of the memory's rate in the same passes, and the goal."""
    if row.unit != "GB/s" or row.name in ("read_bandwidth", "memcpy"):
        return ["", ""]
    whole = "read_bandwidth" if row.name.startswith("decode") else "memcpy"
    share = rates[row.name] / rates[whole]
    goal = (SHARES_OF_READ.get(isa, {}) | SHARES_OF_COPY).get(row.name)
    return [f"{share:.1%} of {whole.partition('_')[0]}", _goal(share, goal)]


def _of_torch(row: Calls, rates: dict[str, float]) -> list[str]:
    """Return our figure divided by torch's, and the goal."""
    torchs = rates.get(f"torch/{row.name}")
    if torchs is None:
        return ["", ""]
    times = rates[row.name] / torchs
    return [f"{times:.2f}", _goal(times, TIMES_TORCH.get(row.name.rpartition("/")[0] or row.name))]


def _goal(reached: float, goal: float | None) -> str:
    return "" if goal is None else f"{goal:g}: {'met' if reached >= goal else 'missed'}"
