"""Measures the ways of an engine's layers to a data plane: in the same process, through shared
memory and over gRPC.

    python -m benchmarks.transport [--steps 200] [--threads 1] [--json OUT]

Both planes are processes, except with "embedded". Each side has a session of its own and the same
decode steps, by turns: a plan, then eight layers of 8 heads of 64, whose tensors are made up. The
layer's time is the whole call, attention over 64 tokens and more included. "between" is how long
the engine computes between two layers, as it does in its model: the data plane may have gone to
sleep.

"empty" layers have one head of 16 over a few tokens, so that there is next to nothing to copy and
to compute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path

import torch

from benchmarks.common.report import machine, save
from benchmarks.common.timing import quantile
from kvplane import LayerGroup, Layout, ops
from kvplane.attention_options import AttentionOptions
from kvplane.runtime.backend import DataBackend, RemoteBackend
from kvplane.runtime.embedded import start_planes
from kvplane.runtime.link import ControlLink
from kvplane.sync.loop_thread import LoopThread
from scripts.planes import run_planes

NUM_LAYERS = 8
NUM_DEVICE_BLOCKS = 4096
TIMEOUT_S = 30.0
BATCHES = (1, 8, 64)
BETWEEN_S = (0.0, 0.001)
OPTIONS = AttentionOptions()


@dataclass(frozen=True)
class Shape:
    """The shape of a layer's tensors, and of the prompts that are decoded after."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    prompt_tokens: int

    @property
    def layout(self) -> Layout:
        """The layout of a pool for such layers."""
        return Layout(
            model_id="benchmark",
            block_size_tokens=16,
            dtype="float32",
            kv_dtype="float32",
            groups=(
                LayerGroup("full", tuple(range(NUM_LAYERS)), self.num_kv_heads, self.head_size),
            ),
        )


EMPTY = Shape(num_heads=1, num_kv_heads=1, head_size=16, prompt_tokens=1)
USUAL = Shape(num_heads=8, num_kv_heads=4, head_size=64, prompt_tokens=64)


@dataclass
class Times:
    """Times of one side in one case, in seconds."""

    layer_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    """From the plan's start to the receipt, without the pauses between layers."""


class Side:
    """A session, and the backend that runs its plans."""

    def __init__(self, name: str, shape: Shape, link: ControlLink, backend: DataBackend) -> None:
        self.name = name
        self._shape = shape
        self._link = link
        self._backend = backend
        layout = link.pool_layout(TIMEOUT_S)
        backend.open(link.open(layout))
        self._next_id = 1

    def admit(self, num_sequences: int) -> list[int]:
        """Admit new sequences, and compute their prompts."""
        ids = list(range(self._next_id, self._next_id + num_sequences))
        self._next_id += num_sequences
        # Unlike any other side's: one on the same pool would find them cached.
        first = [hash((self.name, i)) % 2**31 for i in ids]
        length = self._shape.prompt_tokens
        prompts = [ops.pack_tokens([token, *range(1, length)]) for token in first]
        plan = self._link.step([ops.admit(*each) for each in zip(ids, prompts, strict=True)]).plan
        self._run(plan, num_sequences * length, 0.0, Times())
        return ids

    def decode(self, ids: list[int], step: int, between_s: float, times: Times) -> None:
        """Decode one token more of each sequence, which have decoded ``step`` so far."""
        position = self._shape.prompt_tokens + step
        append = ops.append(ids, [1] * len(ids), 1, first_positions=position, num_tokens=1)
        self._run(self._link.step([append]).plan, len(ids), between_s, times)

    def free(self, ids: list[int]) -> None:
        """Free the sequences."""
        plan = self._link.step([ops.free(ids)]).plan
        self._link.add_receipts(self._backend.start(plan).receipts)

    def _run(self, plan: object, num_tokens: int, between_s: float, times: Times) -> None:
        of = self._shape
        query = torch.randn(num_tokens, of.num_heads, of.head_size)
        key, value = (torch.randn(num_tokens, of.num_kv_heads, of.head_size) for _ in range(2))
        began_s = time.perf_counter()
        self._backend.start(plan, num_tokens)
        plan_s, layers_s = time.perf_counter() - began_s, []
        for layer in range(NUM_LAYERS):
            compute(between_s)
            began_s = time.perf_counter()
            self._backend.layer(layer, query, key, value, options=OPTIONS)
            layers_s.append(time.perf_counter() - began_s)
        times.layer_s += layers_s
        times.step_s.append(plan_s + sum(layers_s))
        self._link.add_receipts(self._backend.finish())


def compute(seconds: float) -> None:
    """Keep this thread busy."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass


@contextmanager
def sides(shape: Shape, num_threads: int) -> Iterator[list[Side]]:
    """Yield all sides, over planes of their own."""
    with ExitStack() as closing, tempfile.TemporaryDirectory() as folder:
        layout = Path(folder) / "layout.json"
        layout.write_text(json.dumps(asdict(shape.layout)))
        flags = ["--layout", str(layout), "--num-device-blocks", str(NUM_DEVICE_BLOCKS)]
        flags += ["--num-threads", str(num_threads)]
        # Before gRPC has threads: a process with them should not fork.
        planes = closing.enter_context(run_planes(Path(folder), flags))
        found: list[Side] = []
        loop = LoopThread("benchmark")
        closing.callback(loop.close)
        address, embedded = start_planes(
            closing,
            shape.layout,
            device="cpu",
            pool_id="default",
            num_device_blocks=NUM_DEVICE_BLOCKS,
            num_threads=num_threads,
            start_timeout_s=TIMEOUT_S,
        )
        backends: list[tuple[str, str, DataBackend]] = [("embedded", address, embedded)]
        for name, shared_memory in (("shared memory", True), ("grpc", False)):
            remote = RemoteBackend(loop, TIMEOUT_S, shared_memory=shared_memory)
            closing.callback(remote.stop)
            backends.append((name, planes.control.address, remote))
        for name, address, backend in backends:
            link = ControlLink(loop, address, "default", TIMEOUT_S)
            closing.callback(link.close)
            found.append(Side(name, shape, link, backend))
        yield found


def measure(of: Sequence[Side], batch: int, between_s: float, num_steps: int) -> dict[str, Times]:
    """Time steps of all sides, by turns. The first tenth warms up and is not counted."""
    times = {side.name: Times() for side in of}
    ids = {side.name: side.admit(batch) for side in of}
    for step in range(num_steps + num_steps // 10):
        for side in of:
            counted = times[side.name] if step >= num_steps // 10 else Times()
            side.decode(ids[side.name], step, between_s, counted)
    for side in of:
        side.free(ids[side.name])
    return times


def row_of(times: Times) -> dict[str, float]:
    """Return a line's figures, in microseconds."""
    return {
        "layer_p50": 1e6 * quantile(times.layer_s, 0.5),
        "layer_p99": 1e6 * quantile(times.layer_s, 0.99),
        "step_p50": 1e6 * quantile(times.step_s, 0.5),
    }


def cells(texts: Iterable[str]) -> str:
    """Return the columns of figures."""
    return "".join(f"{text:>11}" for text in texts)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print as it goes, write the JSON."""
    parser = argparse.ArgumentParser(description="Measure the transports of a layer.")
    parser.add_argument("--steps", type=int, default=200, help="decode steps of each case")
    parser.add_argument("--threads", type=int, default=1, help="threads of a kernel")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="sizes of batches")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = []
    print(f"{'microseconds':58}{cells(('layer p50', 'p99', 'step p50'))}")
    batches = [int(batch) for batch in arguments.batches.split(",")]
    for kind, shape, sizes in (("empty", EMPTY, [1]), ("usual", USUAL, batches)):
        with sides(shape, arguments.threads) as of:
            for batch, between_s in product(sizes, BETWEEN_S):
                name = f"{kind}, batch {batch}, {1000 * between_s:g} ms between"
                for side, times in measure(of, batch, between_s, arguments.steps).items():
                    row = row_of(times)
                    figures = cells(f"{each:,.0f}" for each in row.values())
                    print(f"{name:36}{side:22}{figures}", flush=True)
                    rows.append({"case": name, "side": side, "unit": "us", **row})
    save(arguments.json, {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
