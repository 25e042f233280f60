"""The measurements of the CPU kernels, with torch's attention beside them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmarks.common.calls import Calls
from benchmarks.common.memory import page_offsets, read_runs
from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory import huge_pages

HEAD_SIZE, BLOCK_SIZE, NUM_KV_HEADS = 128, 16, 8
BATCH, GROUPS, PREFILL_GROUP = 8, (1, 4, 8), 4
NUM_LAYERS = 4  # of a decode step: one call after another, each over pages of its own
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
SCALE = HEAD_SIZE**-0.5
KERNELS = CpuKernels()


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements, and the number of rounds."""

    context_tokens: int = 4096
    memory_bytes: int = 256 << 20
    num_blocks: int = 1024
    prefill_tokens: int = 2048
    num_rounds: int = 15


QUICK = Sizes(512, 64 << 20, 256, 512, 3)


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
    runs, run_bytes = page_offsets(pool, tables), pool[0, 0, 0, 0].nbytes

    def read() -> object:
        return read_runs(pool, runs, run_bytes, KERNELS.num_threads or torch.get_num_threads())

    rows = [Calls(f"read_pages/{name}", "GB/s", pool.nbytes, read)]
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
            rows.append(Calls(f"torch/{name}/g{group}", "GB/s", pool.nbytes, torchs))
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
        Calls("torch_prefill", "tokens/s", num_tokens, torchs),
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
