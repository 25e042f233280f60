"""Types of the native module, but for the operations, which ``NativeKernels`` calls by name:
csrc/include/kvplane/params.h describes their arguments.

Addresses are integers (0: null); strides count elements. Every operation raises IndexError, before
anything is written, when an id or a length is out of range.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

class BoundBatch:
    """Arguments that all layers of a plan share: csrc/bound_layers.h."""

class BoundLayer:
    """Arguments that a layer's calls share, for tensors of these types and strides."""

    def write_and_attend(
        self, batch: BoundBatch, query: int, key: int, value: int, out: int, num_threads: int
    ) -> float: ...

Int64s = NDArray[np.int64]
SpanRows = tuple[Int64s, Int64s, NDArray[np.int32], Int64s, Int64s, Int64s, Int64s, int, int | None]

def span_rows(
    first_positions: Int64s,
    num_tokens: Int64s,
    num_trimmed: Int64s,
    tables: Sequence[NDArray[np.int32]],
    block_size: int,
    most_tokens: int,
    most_entries: int,
) -> SpanRows | None:
    """Return a plan's spans as the kernels take them, or None if the tables have no slots for them:
    csrc/span_rows.h.
    """

def note_written(
    num_written: NDArray[np.int32],
    generations: Int64s,
    blocks: Int64s,
    num_slots: Int64s,
    planned: Int64s,
) -> None:
    """Raise the counts of blocks that a plan has written: csrc/span_rows.h."""

class LayerServer:
    """Answers packets on ``fd`` that ask for bound layers: csrc/local/layer_server.h."""

    def __init__(self, *, fd: int, spin_s: float, most_s: float) -> None: ...
    def clear(self) -> None: ...
    def bind(
        self,
        *,
        binding: int,
        index: int,
        group: int,
        num_tokens: int,
        layer: BoundLayer,
        query: int,
        key: int,
        value: int,
        out: int,
    ) -> None: ...
    def unbind(self, binding: int) -> None: ...
    def begin(
        self, batches: Sequence[BoundBatch], next: int, end: int, num_threads: int, named: bytes
    ) -> None: ...
    def asks_for_layer(self, named: bytes) -> int | None: ...
    def look(self, epoll: int, waits: bool) -> bool: ...
    def serve(self, epoll: int, waits: bool) -> None: ...
    def take(self) -> bytes | None: ...
    def take_ran(self) -> list[tuple[int, float, float]]: ...

class LayerCall:
    """A bound layer's packet without the part that names its plan and pass, and where its tensors
    are: address and bytes of each.
    """

    def __init__(
        self,
        *,
        head: bytes,
        query: tuple[int, int],
        key: tuple[int, int],
        value: tuple[int, int],
        output: tuple[int, int],
    ) -> None: ...

class AnswerSocket:
    """Waits for answers on a copy of ``fd``: csrc/local/layer_call.h. Raises OSError and
    TimeoutError.
    """

    def __init__(self, *, fd: int, spin_s: float) -> None: ...
    def receive(self, timeout_s: float) -> bytes: ...
    def call(
        self,
        layer: LayerCall,
        named: bytes,
        query: int,
        key: int,
        value: int,
        out: int,
        timeout_s: float,
    ) -> bytes | None: ...

def cpu_isa() -> str: ...
def cpu_isas() -> list[str]: ...
def use_cpu_isa(isa: str) -> None: ...
