"""Writes of new tokens, copies of blocks, and swaps. Each is checked before it is timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks.gpu.cases.shapes import KV_DTYPES
from benchmarks.gpu.measurement import Measurement
from benchmarks.gpu.verdict import COPIES, SWAPS
from data_plane.kernels.arguments import WriteArguments


@dataclass(frozen=True)
class Blocks:
    """Blocks of ``2 * layers * kv_heads * tokens * head`` elements, and the number to copy."""

    layers: int
    num_copied: int
    kv_heads: int = 8
    tokens: int = 16
    head: int = 128
    kv_dtype: str = "bfloat16"

    @property
    def block_bytes(self) -> int:
        itemsize = KV_DTYPES[self.kv_dtype].itemsize
        return 2 * self.layers * self.kv_heads * self.tokens * self.head * itemsize

    @property
    def copied_bytes(self) -> int:
        return self.num_copied * self.block_bytes

    def random(self, num_blocks: int, device: torch.device) -> torch.Tensor:
        """Return a pool of random bytes that are not a NaN of any type."""
        shape = (num_blocks, self.layers, 2, self.kv_heads, self.tokens, self.head)
        pool = torch.empty(shape, dtype=KV_DTYPES[self.kv_dtype], device=device)
        as_bytes(pool).random_(0, 0x70)
        return pool


# Blocks of an 8B model with all of its layers: 2 MiB, or 1 MiB in fp8; and small ones.
INSIDE: Final = (
    Blocks(32, 400),
    Blocks(32, 800, kv_dtype="float8_e4m3fn"),
    Blocks(1, 8192),
)
SWAPPED: Final = (
    Blocks(32, 256),
    Blocks(2, 2048),  # 128 KiB
    Blocks(1, 4096),  # 64 KiB
    Blocks(1, 8192, kv_heads=1),  # 8 KiB
)
CACHED_TOKENS: Final = (256, 16384)
TINY_INSIDE: Final = (Blocks(2, 5, 2, 3, 8), Blocks(2, 5, 1, 3, 8, "float8_e4m3fn"))
TINY_SWAPPED: Final = (Blocks(2, 5, 2, 3, 8), Blocks(2, 4, 8, 16, 256))
TINY_CACHED_TOKENS: Final = (9,)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def measure_copies(m: Measurement, *, tiny: bool = False) -> None:
    """Add rows for each operation and block size."""
    for num_tokens in TINY_CACHED_TOKENS if tiny else CACHED_TOKENS:
        for kv_dtype in KV_DTYPES:
            name = f"reshape_and_cache {num_tokens} {kv_dtype}"
            m.attempt(name, partial(_reshape_and_cache, m, num_tokens, kv_dtype), is_ours=True)
    for blocks in TINY_INSIDE if tiny else INSIDE:
        cases = [_case(name, blocks, "scattered") for name in COPIES]
        m.attempt(f"copies of {blocks}", partial(_inside, m, blocks), is_ours=True, cases=cases)
    for blocks in TINY_SWAPPED if tiny else SWAPPED:
        for order in ("scattered", "runs"):
            cases = [_case(name, blocks, order) for name in SWAPS]
            work = partial(_swaps, m, blocks, order)
            m.attempt(f"swaps of {blocks}", work, is_ours=True, cases=cases)


def _reshape_and_cache(m: Measurement, num_tokens: int, kv_dtype: str) -> None:
    device, kv_heads, head, block = m.machine.device, 8, 128, 16
    num_blocks = 2 * num_tokens // block + 1
    pages = Blocks(1, 0, kv_heads, block, head, kv_dtype).random(num_blocks, device)[:, 0]
    # Keys and values as the output of a projection: side by side, after the queries.
    qkv = torch.randn((num_tokens, 6, kv_heads, head), dtype=torch.bfloat16, device=device)
    key, value = qkv[:, 4], qkv[:, 5]
    slots = torch.randperm(num_blocks * block, device=device)[:num_tokens]
    is_fp8 = pages.dtype != key.dtype
    scales = torch.tensor([0.125], device=device) if is_fp8 else None
    kernels = m.machine.kernels()

    def run() -> None:
        kernels.reshape_and_cache(WriteArguments(key, value, pages, slots, scales, scales))

    run()
    kernels.check_faults()
    right = True
    for kv, given in enumerate((key, value)):
        wanted = (given.float() / 0.125).to(pages.dtype) if is_fp8 else given
        cached = as_bytes(pages)[slots // block, kv, :, slots % block]
        right = right and torch.equal(cached, as_bytes(wanted.contiguous()))
    name = f"reshape_and_cache {num_tokens} {kv_dtype}"
    if not m.is_right(name, right):
        return
    seconds = m.machine.watch.seconds(run)
    num_bytes = 2 * num_tokens * kv_heads * head * (key.element_size() + pages.element_size())
    about = {"tokens": num_tokens, "kv_dtype": kv_dtype, "us": float(f"{seconds * 1e6:.5g}")}
    m.add("reshape_and_cache", "GB/s", num_bytes / seconds / 1e9, **about)


def _case(name: str, blocks: Blocks, order: str) -> dict[str, Any]:
    about = {"block_bytes": blocks.block_bytes, "num_blocks": blocks.num_copied, "order": order}
    return {"name": name, **about, "kv_dtype": blocks.kv_dtype}


def _time(
    m: Measurement, case: dict[str, Any], num_bytes: int, run: Callable[[], None], in_graph: bool
) -> None:
    seconds = m.machine.watch.seconds(run, in_graph=in_graph)
    about = {**case, "us": float(f"{seconds * 1e6:.5g}")}
    m.add(about.pop("name"), "GB/s", num_bytes / seconds / 1e9, **about)


def _check_and_time(
    m: Measurement,
    case: dict[str, Any],
    num_bytes: int,
    run: Callable[[], None],
    is_right: Callable[[], bool],
    *,
    in_graph: bool,
) -> None:
    """Check and time one case. If it fails, earlier rows stay and later cases are tried."""
    said = f"{case['name']} {case['order']} {case['num_blocks']} of {case['block_bytes']} bytes"

    def work() -> None:
        run()
        if m.is_right(said, is_right(), cases=[case]):
            _time(m, case, num_bytes, run, in_graph)

    m.attempt(said, work, is_ours=True, cases=[case])


def _inside(m: Measurement, blocks: Blocks) -> None:
    """Measure copies in the pool, to the canonical order and back; reads and writes both count."""
    kernels, count = m.machine.kernels(), blocks.num_copied
    pool = blocks.random(2 * count + 1, m.machine.device)
    ids = torch.randperm(2 * count)
    there = ids.to(m.machine.device)
    pairs = torch.stack((ids[:count], ids[count:]), dim=1)
    canonical = torch.empty(0)

    def gather() -> None:
        nonlocal canonical
        canonical = kernels.gather_blocks(pool, ids[:count])

    def scatter() -> None:
        kernels.scatter_blocks(pool, ids[count:], canonical)

    def copied() -> bool:
        return torch.equal(as_bytes(pool)[there[count:]], as_bytes(pool)[there[:count]])

    def gathered() -> bool:
        wanted = as_bytes(pool)[there[:count]].transpose(0, 1)
        return torch.equal(as_bytes(canonical), wanted)

    steps: tuple[tuple[str, Callable[[], None], Callable[[], bool]], ...] = (
        ("copy_blocks", lambda: kernels.copy_blocks(pool, pairs), copied),
        ("gather_blocks", gather, gathered),
        ("scatter_blocks", scatter, copied),
    )
    for name, run, is_right in steps:
        if name != "gather_blocks":
            as_bytes(pool)[there[count:]] = 0
        # A graph captures only what allocates no memory.
        in_graph = name != "gather_blocks"
        case = _case(name, blocks, "scattered")
        _check_and_time(m, case, 2 * blocks.copied_bytes, run, is_right, in_graph=in_graph)


def _swaps(m: Measurement, blocks: Blocks, order: str) -> None:
    """Measure swaps to pinned memory and back; each byte counts once, as the link moves it."""
    kernels, count = m.machine.kernels(), blocks.num_copied
    pool = blocks.random(2 * count, m.machine.device)
    host = m.machine.host_empty((count, *pool.shape[1:]), pool.dtype)
    as_bytes(host).fill_(0)
    ids = torch.randperm(2 * count)[:count] if order == "scattered" else torch.arange(count)
    out = torch.stack((ids, torch.arange(count)), dim=1)
    back = out.flip(1).contiguous()
    there = ids.to(m.machine.device)
    before = as_bytes(pool)[there].cpu()

    def swapped_out() -> bool:
        m.machine.wait()
        return torch.equal(as_bytes(host), before)

    def swapped_in() -> bool:
        return torch.equal(as_bytes(pool)[there].cpu(), before)

    steps: tuple[tuple[str, Callable[[], None], Callable[[], bool]], ...] = (
        ("swap_out", lambda: kernels.swap_blocks(pool, host, out), swapped_out),
        ("swap_in", lambda: kernels.swap_blocks(host, pool, back), swapped_in),
    )
    for name, run, is_right in steps:
        if name == "swap_in":
            as_bytes(pool)[there] = 0
        case = _case(name, blocks, order)
        _check_and_time(m, case, blocks.copied_bytes, run, is_right, in_graph=False)
