"""Sets of kernels for an executor under test: emulated, and on streams that run late."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cuda import CudaKernels
from data_plane.kernels.device.cuda_streams import DeviceStreams
from tests.helpers.data.kernel_faults import with_operations

_KERNEL_TESTS = Path(__file__).parents[2] / "kernels"


def emulated_kernels(*, split_tokens: int = 64) -> Kernels:
    """Return the CUDA kernels on the CPU, their threads in the order of seed 0."""
    if str(_KERNEL_TESTS) not in sys.path:
        sys.path.append(str(_KERNEL_TESTS))
    from emulated_build import emulated_module

    native = emulated_module()
    native.set_seed(0)
    kernels = CudaKernels(native, torch.device("cpu"), split_tokens=split_tokens)
    kernels.backend = "emulated"
    return kernels


class LateRuntime:
    """A device whose streams do their work in any order that ``order`` allows.

    Work stays in its stream until it is waited for; some of it, by chance, is done earlier.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._queues: list[deque[tuple[str, Any]]] = [deque()]
        self._passed: set[object] = set()
        self._current = 0
        self.num_given = 0
        self.early_share = 0.3
        """The probability that new work causes some that waits to be done."""
        self.failures: deque[Exception] = deque()
        """What the next calls that give work or wait raise, in order."""
        self.is_lost = False
        """Whether every such call fails."""

    def current_stream(self) -> int:
        self._raise_failure()
        return self._current

    def new_stream(self, *, urgent: bool = False) -> int:
        self._queues.append(deque())
        return len(self._queues) - 1

    def set_stream(self, stream: int) -> None:
        self._current = stream

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def order(self, before: int, after: int) -> None:
        event = object()
        self._queues[before].append(("pass", event))
        self._queues[after].append(("await", event))

    def wait(self, stream: int) -> None:
        self._raise_failure()
        while self._queues[stream]:
            self._do_one()

    def wait_for_all(self) -> None:
        self._raise_failure()
        while any(self._queues):
            self._do_one()

    def give(self, work: Callable[[], None]) -> None:
        """Put work on the current stream."""
        self.num_given += 1
        self._queues[self._current].append(("do", work))
        while self._random.random() < self.early_share and any(self._queues):
            self._do_one()

    @property
    def num_waiting(self) -> int:
        """Slices of work that were given and not done."""
        return sum(kind == "do" for queue in self._queues for kind, _ in queue)

    def _raise_failure(self) -> None:
        if self.is_lost:
            raise RuntimeError("unspecified launch failure")
        if self.failures:
            raise self.failures.popleft()

    def _do_one(self) -> None:
        able = [
            queue
            for queue in self._queues
            if queue and (queue[0][0] != "await" or queue[0][1] in self._passed)
        ]
        assert able, "every stream waits for another"
        kind, what = self._random.choice(able).popleft()
        if kind == "do":
            what()
        elif kind == "pass":
            self._passed.add(what)


def late_kernels(kernels: Kernels, seed: int) -> tuple[Kernels, LateRuntime]:
    """Return ``kernels`` with every call put on a stream, its results set only when it is done."""
    runtime = LateRuntime(seed)

    def late(call: Callable[..., None]) -> Callable[..., None]:
        return lambda *args, **options: runtime.give(lambda: call(*args, **options))

    def paged_attention(
        arguments: AttentionArguments, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        out = torch.empty_like(arguments.query) if out is None else out
        out.fill_(torch.nan)
        runtime.give(lambda: _fill(out, kernels.paged_attention(arguments)))
        return out

    def gather_blocks(pool: torch.Tensor, block_ids: torch.Tensor) -> torch.Tensor:
        _, num_layers, *page = pool.shape
        out = torch.full((num_layers, len(block_ids), *page), torch.nan, dtype=pool.dtype)
        runtime.give(lambda: _fill(out, kernels.gather_blocks(pool, block_ids)))
        return out

    made = with_operations(
        kernels,
        reshape_and_cache=late(kernels.reshape_and_cache),
        paged_attention=paged_attention,
        copy_blocks=late(kernels.copy_blocks),
        swap_blocks=late(kernels.swap_blocks),
        gather_blocks=gather_blocks,
        clear_blocks=late(kernels.clear_blocks),
    )
    made.streams = DeviceStreams(runtime)  # type: ignore[misc]
    return made, runtime


def _fill(out: torch.Tensor, result: torch.Tensor) -> None:
    out.copy_(result)
