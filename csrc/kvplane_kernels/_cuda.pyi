"""Types of the CUDA module, which exists if the package was built with CUDA.

As in ``_native``: addresses are integers (0: null), strides count elements, IndexError is raised
before anything is written. ``stream`` is a cudaStream_t as an integer; calls do not wait for it.
Tensors are on the current device, except ``pairs`` and ``block_ids``, which are on the host and are
read before the call returns. ``faults`` is an int32 on the device, in which kernels set a bit
BAD_... for each kind of bad tensor that they find.
"""

from collections.abc import Sequence
from enum import Enum

BAD_BLOCK_TABLES: int
BAD_QUERY_STARTS: int
BAD_CONTEXT_LENS: int
BAD_SLOTS: int
BAD_KEY_SCALES: int
BAD_VALUE_SCALES: int
BAD_WORKSPACE: int

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

class AttentionPlan: ...

class SharedMemory:
    """Memory of one GPU, open in two processes. It lives as long as its tensors."""

    def handle(self) -> bytes:
        """Return 64 bytes for ``open_shared`` in another process; none for opened memory."""

    def dlpack(self) -> object:
        """Return a capsule: uint8 [num_bytes]."""

def allocate_shared(*, device: int, num_bytes: int) -> SharedMemory:
    """Zeros. Raises RuntimeError where the device refuses, ValueError for the size."""

def open_shared(*, device: int, handle: bytes, num_bytes: int, file: int) -> SharedMemory:
    """A copy of ``file`` is closed after the memory is; -1: none. Raises as ``allocate_shared``,
    also ValueError for a handle of another length and for memory that is smaller.
    """

def device_uuid(device: int) -> str: ...
def device_count() -> int: ...
def reshape_and_cache(
    *,
    key: TensorView,
    value: TensorView,
    pages: PagesView,
    scales: ScalesView,
    slots: int,
    faults: int,
    stream: int,
) -> None: ...
def count_partials(
    *,
    query: TensorView,
    pages: PagesView,
    options: AttentionOptions,
    split_tokens: int,
    query_starts: int,
    context_lens: int,
    num_sequences: int,
    counts: int,
) -> None: ...
def max_partials(
    *,
    query: TensorView,
    pages: PagesView,
    max_blocks: int,
    num_sequences: int,
    options: AttentionOptions,
    split_tokens: int,
    max_query_len: int,
) -> int: ...
def attention_workspace_bytes(
    *,
    query: TensorView,
    pages: PagesView,
    num_sequences: int,
    num_partials: int,
) -> int: ...
def attention_plan_bytes(*, num_sequences: int) -> int: ...
def plan_attention(
    *,
    query: TensorView,
    pages: PagesView,
    block_tables: int,
    wide_block_tables: bool,
    max_blocks: int,
    query_starts: int,
    context_lens: int,
    num_sequences: int,
    share_reads: bool,
    is_padded: bool,
    options: AttentionOptions,
    max_query_len: int,
    max_short_query_len: int,
    split_tokens: int,
    num_partials: int,
    memory: int,
    faults: int,
    stream: int,
) -> AttentionPlan: ...
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
    share_reads: bool,
    is_padded: bool,
    options: AttentionOptions,
    max_query_len: int,
    max_short_query_len: int,
    split_tokens: int,
    workspace: int,
    workspace_bytes: int,
    plan: AttentionPlan | None,
    faults: int,
    stream: int,
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
    stream: int,
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
    stream: int,
) -> None: ...
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
    stream: int,
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
    stream: int,
) -> None: ...
def probe(*, name: str, inputs: int, outputs: int, count: int, stream: int) -> None: ...
