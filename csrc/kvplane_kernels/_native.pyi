"""Types of the native module; csrc/include/kvplane/params.h describes the arguments.

Addresses are integers (0: null); strides count elements. Every operation raises IndexError, before
anything is written, when an id or a length is out of range.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

class Dtype(Enum):
    FLOAT32 = 0
    FLOAT16 = 1
    BFLOAT16 = 2
    FLOAT8_E4M3 = 3
    FLOAT8_E5M2 = 4

class TensorView:
    def __init__(
        self, address: int, dtype: Dtype, shape: Sequence[int], strides: Sequence[int]
    ) -> None: ...

class PagesView:
    def __init__(self, keys: TensorView, values: TensorView) -> None: ...

class ScalesView:
    def __init__(self, key: int, value: int, key_stride: int, value_stride: int) -> None: ...

class AttentionOptions:
    def __init__(
        self,
        *,
        scale: float,
        sliding_window_tokens: int,
        alibi_slopes: int,
        logit_soft_cap: float,
        sinks: int,
        seen_blocks: int = 0,
        seen_stride: int = 0,
        num_seen_blocks: int = 1,
        block_tokens: int = 1,
        local_blocks: int = 1,
    ) -> None: ...

class BoundBatch:
    """Arguments that all layers of a plan share: csrc/bound_layers.h."""

    def __init__(
        self,
        *,
        slots: int,
        block_tables: int,
        wide_block_tables: bool,
        max_blocks: int,
        query_starts: int,
        context_lens: int,
        num_sequences: int,
        num_tokens: int,
        max_window_tokens: int,
    ) -> None: ...

class BoundLayer:
    """Arguments that a layer's calls share, for tensors of these types and strides."""

    def __init__(
        self,
        *,
        query: TensorView,
        key: TensorView,
        value: TensorView | None,
        pages: PagesView,
        scales: ScalesView,
        options: AttentionOptions,
    ) -> None: ...
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
def reshape_and_cache(
    *,
    key: TensorView,
    value: TensorView | None,
    pages: PagesView,
    scales: ScalesView,
    slots: int,
    num_threads: int,
) -> None: ...
def paged_attention(
    *,
    query: TensorView,
    out: int,
    lse: int,
    pages: PagesView,
    scales: ScalesView,
    block_tables: int,
    wide_block_tables: bool,
    max_blocks: int,
    query_starts: int,
    context_lens: int,
    num_sequences: int,
    options: AttentionOptions,
    share_reads: bool,
    num_threads: int,
) -> None: ...
def copy_blocks(
    *,
    source: int,
    destination: int,
    pairs: int,
    num_pairs: int,
    source_num_blocks: int,
    destination_num_blocks: int,
    source_block_bytes: int,
    destination_block_bytes: int,
    copy_bytes: int,
    num_threads: int,
) -> None: ...
def swap_blocks(
    *,
    source: int,
    destination: int,
    pairs: int,
    num_pairs: int,
    source_num_blocks: int,
    destination_num_blocks: int,
    source_block_bytes: int,
    destination_block_bytes: int,
    copy_bytes: int,
    num_threads: int,
) -> None: ...
def read_runs(
    *,
    memory: int,
    offsets: int,
    num_runs: int,
    run_bytes: int,
    runs_of_item: int,
    num_threads: int,
) -> int: ...
def fused_products(*, num_rounds: int, num_threads: int) -> int: ...
def gather_blocks(
    *,
    pool: int,
    blocks: int,
    block_ids: int,
    num_block_ids: int,
    num_blocks: int,
    num_layers: int,
    block_bytes: int,
    page_bytes: int,
) -> None: ...
def scatter_blocks(
    *,
    pool: int,
    blocks: int,
    block_ids: int,
    num_block_ids: int,
    num_blocks: int,
    num_layers: int,
    block_bytes: int,
    page_bytes: int,
) -> None: ...
