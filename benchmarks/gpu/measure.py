"""What the CUDA kernels do on this machine's GPU, beside its own bandwidth and what is installed.

    python -m benchmarks.gpu.measure [--quick] [--out FOLDER]

Needs a GPU and a build of csrc with KVPLANE_CUDA=ON; benchmarks/gpu/run.sh makes one. GB/s count
each byte that has to be moved once: keys and values of the contexts for decode, both sides of a
copy. Contexts lie in blocks in random order. A line is printed for each row, and all are saved.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.peers import flashinfer_decode, sdpa_decode, sdpa_prefill
from benchmarks.gpu.timing import Stopwatch
from data_plane.device_kernels import DeviceKernels

GIB = 1 << 30
KV_SHARE = 0.3  # of the GPU's free memory; the peers have as much again
DTYPE = torch.bfloat16
# batch, context, query heads, KV heads, head size, block size
DECODES = [
    *((b, c, 32, 8, 128, 16) for b in (1, 16, 64, 256) for c in (512, 4096, 8192, 32768)),
    (1, 131072, 32, 8, 128, 16),
    (16, 131072, 32, 8, 128, 16),
    *((64, 8192, *heads, 128, 16) for heads in ((64, 8), (28, 4), (32, 32))),
    *((64, 8192, 32, 8, head_size, 16) for head_size in (64, 256)),
    (64, 8192, 32, 8, 128, 64),
]
# batch, tokens of each prompt, tokens cached before them
PREFILLS = [(1, 4096, 0), (8, 1024, 0), (8, 256, 8192), (64, 16, 4096)]


class Measurement:
    """The rows so far, and the tools to make more."""

    def __init__(self, num_runs: int) -> None:
        native = import_module("kvplane_kernels._cuda")
        self.device = torch.device("cuda")
        self.kernels = {
            split: DeviceKernels(native, self.device, split_tokens=split)
            for split in (512, 1024, 2048)
        }
        self.watch = Stopwatch(num_runs)
        self.rows: list[dict[str, Any]] = []

    def add(self, name: str, unit: str, value: float, **shape: Any) -> None:
        """Prints and keeps a row."""
        row = {"name": name, "unit": unit, "p50": round(value, 3), **shape}
        print(json.dumps(row), flush=True)
        self.rows.append(row)

    def attempt(self, name: str, work: Callable[[], None]) -> None:
        """Runs a part that need not be possible here; says why when it is not."""
        try:
            work()
        except Exception as error:
            print(f"{name}: left out: {type(error).__name__}: {error}", flush=True)
        torch.cuda.empty_cache()


def bandwidths(m: Measurement) -> None:
    """The machine's own copy, read and link bandwidth."""
    source = torch.ones(GIB, dtype=torch.float32, device=m.device)
    destination = torch.empty_like(source)
    num_bytes = source.numel() * 4
    seconds = m.watch.seconds(lambda: destination.copy_(source))
    m.add("copy_bandwidth", "GB/s", 2 * num_bytes / seconds / 1e9)
    seconds = m.watch.seconds(source.sum)
    m.add("read_bandwidth", "GB/s", num_bytes / seconds / 1e9, by="torch.sum")
    host = torch.empty(GIB // 4, dtype=torch.float32, pin_memory=True)
    part = source[: host.numel()]
    for name, run in (
        ("link_out", lambda: host.copy_(part, non_blocking=True)),
        ("link_in", lambda: part.copy_(host, non_blocking=True)),
    ):
        seconds = m.watch.seconds(run, in_graph=False)
        m.add(name, "GB/s", host.numel() * 4 / seconds / 1e9)


def decode(m: Measurement, shape: tuple[int, int, int, int, int, int]) -> None:
    """One row of each sequence over its context, ours and the peers'."""
    batch, context, num_heads, num_kv_heads, head_size, block_size = shape
    num_bytes = 2 * 2 * batch * context * num_kv_heads * head_size
    if num_bytes > KV_SHARE * torch.cuda.mem_get_info()[0]:
        print(f"decode {shape}: left out, as it needs {num_bytes / GIB:.0f} GiB", flush=True)
        return
    named = dict(
        zip(("batch", "context", "heads", "kv_heads", "head", "block"), shape, strict=True)
    )
    num_blocks = batch * (context // block_size)
    pages = torch.randn(
        (num_blocks, 2, num_kv_heads, block_size, head_size), dtype=DTYPE, device=m.device
    )
    tables = torch.randperm(num_blocks, device=m.device).int().view(batch, -1)
    query = torch.randn((batch, num_heads, head_size), dtype=DTYPE, device=m.device)
    starts = torch.arange(batch + 1, device=m.device)
    lens = torch.full((batch,), context, device=m.device)
    out, scale = torch.empty_like(query), head_size**-0.5
    for split, kernels in m.kernels.items():
        num_workspace_bytes = kernels.attention_workspace_bytes(query, pages, tables)
        workspace = torch.empty(num_workspace_bytes, dtype=torch.uint8, device=m.device)

        def run(kernels: DeviceKernels = kernels, workspace: torch.Tensor = workspace) -> None:
            kernels.paged_attention(
                query,
                pages,
                tables,
                starts,
                lens,
                scale=scale,
                max_query_len=1,
                out=out,
                workspace=workspace,
            )

        seconds = m.watch.seconds(run)
        m.add("decode", "GB/s", num_bytes / seconds / 1e9, split=split, us=seconds * 1e6, **named)
        kernels.check_faults()

    def peer(name: str, run: Callable[[], object]) -> None:
        seconds = m.watch.seconds(run)
        m.add(name, "GB/s", num_bytes / seconds / 1e9, us=seconds * 1e6, **named)

    m.attempt(
        "flashinfer", lambda: peer("flashinfer_decode", flashinfer_decode(query, pages, tables))
    )
    for backend in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        m.attempt(
            backend,
            lambda backend=backend: peer(  # type: ignore[misc]
                f"sdpa_decode_{backend.lower()}",
                sdpa_decode(query, batch, num_kv_heads, context, backend),
            ),
        )


def prefill(m: Measurement, shape: tuple[int, int, int]) -> None:
    """Prompts over cached prefixes; SDPA where there is no prefix."""
    batch, num_new, num_cached = shape
    num_heads, num_kv_heads, head_size, block_size = 32, 8, 128, 16
    context = num_new + num_cached
    num_blocks = batch * (context // block_size)
    pages = torch.randn(
        (num_blocks, 2, num_kv_heads, block_size, head_size), dtype=DTYPE, device=m.device
    )
    tables = torch.randperm(num_blocks, device=m.device).int().view(batch, -1)
    query = torch.randn((batch * num_new, num_heads, head_size), dtype=DTYPE, device=m.device)
    starts = torch.arange(batch + 1, device=m.device) * num_new
    lens = torch.full((batch,), context, device=m.device)
    kernels, out = m.kernels[512], torch.empty_like(query)
    num_workspace_bytes = kernels.attention_workspace_bytes(query, pages, tables)
    workspace = torch.empty(num_workspace_bytes, dtype=torch.uint8, device=m.device)

    def run() -> None:
        kernels.paged_attention(
            query,
            pages,
            tables,
            starts,
            lens,
            scale=head_size**-0.5,
            max_query_len=num_new,
            out=out,
            workspace=workspace,
        )

    named = {"batch": batch, "new": num_new, "cached": num_cached}
    seconds = m.watch.seconds(run)
    m.add("prefill", "tokens/s", batch * num_new / seconds, us=seconds * 1e6, **named)
    kernels.check_faults()
    if num_cached == 0:
        seconds = m.watch.seconds(sdpa_prefill(batch, num_new, num_heads, num_kv_heads, head_size))
        m.add("sdpa_prefill", "tokens/s", batch * num_new / seconds, us=seconds * 1e6, **named)


def copies(m: Measurement) -> None:
    """Caching, copies of blocks inside the pool, to and from the host, and gathering."""
    kernels, num_tokens = m.kernels[512], 8192
    pool = torch.randn((1024, 16, 2, 8, 16, 128), dtype=DTYPE, device=m.device)
    key, value = torch.randn((2, num_tokens, 8, 128), dtype=DTYPE, device=m.device).unbind()
    slots = torch.randperm(1024 * 16, device=m.device)[:num_tokens]
    seconds = m.watch.seconds(lambda: kernels.reshape_and_cache(key, value, pool[:, 3], slots))
    m.add("reshape_and_cache", "GB/s", 2 * 2 * key.numel() * 2 / seconds / 1e9)
    ids = torch.randperm(1024)
    pairs = torch.stack((ids[:400], ids[400:800]), dim=1)
    num_bytes = 400 * pool[0].numel() * 2
    seconds = m.watch.seconds(lambda: kernels.copy_blocks(pool, pairs))
    m.add("copy_blocks", "GB/s", 2 * num_bytes / seconds / 1e9)
    seconds = m.watch.seconds(lambda: kernels.gather_blocks(pool, ids[:400]))
    m.add("gather_blocks", "GB/s", 2 * num_bytes / seconds / 1e9)
    host = torch.empty((400, *pool.shape[1:]), dtype=DTYPE, pin_memory=True)
    out = torch.stack((ids[:400], torch.arange(400)), dim=1)
    for name, run in (
        ("swap_out", lambda: kernels.swap_blocks(pool, host, out)),
        ("swap_in", lambda: kernels.swap_blocks(host, pool, out.flip(1).contiguous())),
    ):
        seconds = m.watch.seconds(run, in_graph=False)
        m.add(name, "GB/s", num_bytes / seconds / 1e9, block_bytes=pool[0].numel() * 2)


def main() -> None:
    """Measures all of it and saves <GPU>-<date>.json."""
    parser = argparse.ArgumentParser(description="Measure the CUDA kernels.")
    parser.add_argument("--quick", action="store_true", help="fewer shapes, fewer runs")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    arguments = parser.parse_args()
    m = Measurement(5 if arguments.quick else 20)
    bandwidths(m)
    for shape in DECODES[::4] if arguments.quick else DECODES:
        decode(m, shape)
        torch.cuda.empty_cache()
    for lens in PREFILLS[:1] if arguments.quick else PREFILLS:
        prefill(m, lens)
    copies(m)
    gpu = torch.cuda.get_device_name()
    machine = {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "cache": "L2 filled with other bytes before each run",
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{gpu.lower().replace(' ', '-')}-{machine['date']}.json"
    path.write_text(json.dumps({"machine": machine, "rows": m.rows}, indent=2) + "\n")
    print(f"saved to {path}")


if __name__ == "__main__":
    main()
