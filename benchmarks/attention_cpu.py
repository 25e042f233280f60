"""What the CPU kernels reach of the memory's speed, beside torch's attention, in one run.

    python -m benchmarks.attention_cpu [--quick] [--threads N] [--json OUT]

All measurements take turns in rounds, so that noise from elsewhere meets them alike: compare rows
of one run, not of two. ``GB/s`` count each byte once that has to be read or written: of decode the
keys and values, of a copy what is copied, not its two ways over the bus.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.core_step import cpu_name
from data_plane import huge_pages, kernels

HEAD_SIZE, BLOCK_SIZE, NUM_KV_HEADS = 128, 16, 8
BATCH, CONTEXT_TOKENS, GROUPS = 8, 4096, (1, 4, 8)
PREFILL_TOKENS, PREFILL_GROUP = 2048, 4
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
SCALE = HEAD_SIZE**-0.5
NEVER = 255  # a byte that the memory that is read does not hold

_libc = ctypes.CDLL(None)
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memchr.restype = ctypes.c_void_p


@dataclass
class Row:
    """One measurement. ``amount``: bytes, or tokens, of one call; ``unit``: of that per second."""

    name: str
    unit: str
    amount: float
    run: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Time one call."""
        cpu, began = time.process_time(), time.perf_counter()
        self.run()
        self.seconds.append(time.perf_counter() - began)
        self.cpu_seconds.append(time.process_time() - cpu)

    def rate(self, quantile: float) -> float:
        """Of the calls' rates, by the nearest rank: 0 = the slowest call's."""
        slowest_first = sorted(self.seconds, reverse=True)
        at = min(len(slowest_first) - 1, int(quantile * len(slowest_first)))
        return self._scaled(self.amount / slowest_first[at])

    def rate_of_cpu_time(self) -> float:
        """The best call's, a second of one core's time: what other programs took does not count."""
        return self._scaled(self.amount / min(self.cpu_seconds))

    def _scaled(self, rate: float) -> float:
        return rate / 1e9 if self.unit == "GB/s" else rate


class Memory:
    """The speed of memory itself, through the C library, on every thread at once."""

    def __init__(self, num_bytes: int, num_threads: int) -> None:
        self._source = huge_pages.empty((num_bytes,), torch.uint8).fill_(1)
        self._target = huge_pages.empty((num_bytes,), torch.uint8).fill_(2)
        self._share = num_bytes // num_threads
        self._threads = ThreadPoolExecutor(num_threads)
        self._offsets = [i * self._share for i in range(num_threads)]

    def rows(self) -> list[Row]:
        """``read_bandwidth`` and ``memcpy``."""
        num_bytes = self._share * len(self._offsets)
        return [
            Row("read_bandwidth", "GB/s", num_bytes, lambda: self._on_all(self._read)),
            Row("memcpy", "GB/s", num_bytes, lambda: self._on_all(self._copy)),
        ]

    def _on_all(self, work: Callable[[int], None]) -> None:
        list(self._threads.map(work, self._offsets))

    def _read(self, offset: int) -> None:
        """To look for what is not there is the C library's fastest way to read memory."""
        _libc.memchr(self._source.data_ptr() + offset, NEVER, self._share)

    def _copy(self, offset: int) -> None:
        at = self._target.data_ptr() + offset
        ctypes.memmove(at, self._source.data_ptr() + offset, self._share)


def random_pool(num_blocks: int, dtype: torch.dtype, head_size: int = HEAD_SIZE) -> torch.Tensor:
    """[num_blocks, 1, 2, num_kv_heads, block_size, head_size] as the data plane allocates it."""
    shape = (num_blocks, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, head_size)
    pool = huge_pages.empty(shape, dtype)
    for block in pool:
        block.copy_(torch.randn(shape[1:]))
    return pool


def query_dtype_of(pages_dtype: torch.dtype) -> torch.dtype:
    """Of queries on such pages."""
    return torch.bfloat16 if pages_dtype.itemsize == 1 else pages_dtype


def decode_rows(name: str, dtype: torch.dtype, context_tokens: int) -> list[Row]:
    """One query token a sequence, over pages in random order; torch over contiguous KV.

    Queries of fp8 pages are bf16. Torch has no attention over fp8 to compare with.
    """
    num_blocks = BATCH * context_tokens // BLOCK_SIZE
    pages = random_pool(num_blocks, dtype)[:, 0]
    tables = torch.randperm(num_blocks).view(BATCH, -1)
    starts, lens = torch.arange(BATCH + 1), torch.full((BATCH,), context_tokens)
    shape = (BATCH, NUM_KV_HEADS, context_tokens, HEAD_SIZE)
    query_dtype = query_dtype_of(dtype)
    key, value = torch.randn(shape).to(query_dtype), torch.randn(shape).to(query_dtype)
    rows = []
    for group in GROUPS:
        query = torch.randn(BATCH, NUM_KV_HEADS * group, HEAD_SIZE).to(query_dtype)
        packed = query.view(BATCH, NUM_KV_HEADS, group, HEAD_SIZE)

        def ours(query: torch.Tensor = query) -> object:
            return kernels.paged_attention(query, pages, tables, starts, lens, scale=SCALE)

        def torchs(packed: torch.Tensor = packed) -> object:
            return F.scaled_dot_product_attention(packed, key, value, scale=SCALE)

        rows.append(Row(f"decode/{name}/g{group}", "GB/s", pages.nbytes, ours))
        if query_dtype == dtype:
            rows.append(Row(f"torch/{name}/g{group}", "GB/s", key.nbytes + value.nbytes, torchs))
    return rows


def prefill_rows(num_tokens: int) -> list[Row]:
    """One prompt in bf16, nothing cached; torch with its causal flag, and its own grouping."""
    dtype, num_heads = torch.bfloat16, NUM_KV_HEADS * PREFILL_GROUP
    num_blocks = num_tokens // BLOCK_SIZE
    pages = random_pool(num_blocks, dtype)[:, 0]
    query = torch.randn(num_tokens, num_heads, HEAD_SIZE).to(dtype)
    tables = torch.randperm(num_blocks)[None]
    starts, lens = torch.tensor([0, num_tokens]), torch.tensor([num_tokens])
    shape = (1, NUM_KV_HEADS, num_tokens, HEAD_SIZE)
    key, value = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    heads_first = query.transpose(0, 1)[None].contiguous()

    def ours() -> object:
        return kernels.paged_attention(query, pages, tables, starts, lens, scale=SCALE)

    def torchs() -> object:
        return F.scaled_dot_product_attention(
            heads_first, key, value, is_causal=True, scale=SCALE, enable_gqa=True
        )

    return [
        Row("prefill", "tokens/s", num_tokens, ours),
        Row("torch_prefill", "tokens/s", num_tokens, torchs),
    ]


def block_rows(num_blocks: int) -> list[Row]:
    """Blocks in bf16, in random order: inside a pool, between pools, and written token by token."""
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
        kernels.reshape_and_cache(key, value, device[:, 0], slots)

    return [
        Row("copy_blocks", "GB/s", num_bytes, lambda: kernels.copy_blocks(device, inside)),
        Row("swap_out", "GB/s", num_bytes, lambda: kernels.swap_blocks(device, host, out)),
        Row("swap_in", "GB/s", num_bytes, lambda: kernels.swap_blocks(host, device, back)),
        Row("reshape_and_cache", "GB/s", key.nbytes + value.nbytes, write),
    ]


def machine(num_threads: int) -> dict[str, object]:
    """Where this runs."""
    return {
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": num_threads,
        "isa": kernels.cpu_isa(),
        "load_average": round(os.getloadavg()[0], 2),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def measure(*, quick: bool, num_threads: int) -> list[Row]:
    """All rows, measured in rounds after one round that does not count."""
    context_tokens = CONTEXT_TOKENS // 8 if quick else CONTEXT_TOKENS
    scale = 4 if quick else 1
    rows = Memory((256 << 20) // scale, num_threads).rows()
    for name, dtype in DTYPES.items():
        rows += decode_rows(name, dtype, context_tokens)
    rows += block_rows(1024 // scale)
    rows += prefill_rows(PREFILL_TOKENS // scale)
    for round in range(4 if quick else 16):
        for row in rows:
            row.measure()
            if round == 0:
                row.seconds.clear()
                row.cpu_seconds.clear()
    return rows


def as_json(rows: list[Row], described: dict[str, object]) -> dict[str, object]:
    """What the table says, for programs. ``p99``: the rate that 99 of 100 calls reach."""
    return {
        "machine": described,
        "rows": [
            {
                "name": row.name,
                "unit": row.unit,
                "p50": round(row.rate(0.5), 2),
                "p99": round(row.rate(0.01), 2),
                "best": round(row.rate(1.0), 2),
                "per_cpu_s": round(row.rate_of_cpu_time(), 2),
                "num_samples": len(row.seconds),
            }
            for row in rows
        ],
    }


def print_table(rows: list[Row], described: dict[str, object]) -> None:
    """One line a row, and beside it what the memory gave in the same run."""
    print(", ".join(f"{name} {value}" for name, value in described.items()))
    limits = {row.name: row.rate(0.5) for row in rows}
    print(f"{'':20}{'unit':>10}{'p50':>10}{'p99':>10}{'best':>10}{'per cpu s':>10}{'of limit':>10}")
    for row in rows:
        reads = row.name.startswith(("read", "decode", "torch"))
        limit = limits["read_bandwidth" if reads else "memcpy"]
        share = f"{row.rate(0.5) / limit:>10.0%}" if row.unit == "GB/s" else ""
        cells = (row.rate(0.5), row.rate(0.01), row.rate(1.0), row.rate_of_cpu_time())
        print(f"{row.name:20}{row.unit:>10}" + "".join(f"{c:>10,.1f}" for c in cells) + share)


def main() -> None:
    """Run it, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the CPU kernels.")
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens, few rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path, default=Path("benchmarks/out/attention_cpu.json"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    described = machine(arguments.threads)
    rows = measure(quick=arguments.quick, num_threads=arguments.threads)
    print_table(rows, described)
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(as_json(rows, described), indent=2) + "\n")
    print(f"saved to {arguments.json}")


if __name__ == "__main__":
    main()
