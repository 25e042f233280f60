"""The batches of attention to measure, and the bytes and operations that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any, Final

import torch

from benchmarks.gpu.verdict import is_held

KV_DTYPES: Final = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
SPLITS: Final = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Shape:
    """A batch: ``new`` query tokens of each of ``batch`` sequences of ``context`` tokens, these
    included. The first ``shared`` ones are in blocks that all sequences have.
    """

    batch: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head: int = 128
    block: int = 16
    kv_dtype: str = "bfloat16"
    new: int = 1
    shared: int = 0

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values."""
        return 2 * KV_DTYPES[self.kv_dtype].itemsize * self.kv_heads * self.head

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values, all of which have to be read once."""
        return self.token_bytes * (self.shared + self.batch * (self.context - self.shared))

    @property
    def num_shared_blocks(self) -> int:
        return self.shared // self.block

    @property
    def num_blocks(self) -> int:
        own = -(-self.context // self.block) - self.num_shared_blocks
        return self.num_shared_blocks + self.batch * own

    @property
    def flops(self) -> int:
        """Operations of the two products, over the tokens that each query token attends to."""
        seen = self.new * (self.context - self.new) + self.new * (self.new + 1) // 2
        return 4 * self.batch * self.heads * self.head * seen

    def named(self) -> dict[str, Any]:
        return asdict(self)


def by_target(decodes: Sequence[Shape]) -> tuple[list[Shape], list[Shape]]:
    """Return the shapes that have a target, each bf16 with its fp8, and the others."""
    held = [shape for shape in decodes if is_held(shape.named())]
    return held, [shape for shape in decodes if shape not in held]


def in_bf16(shape: Shape) -> Shape:
    """Return the same batch in bf16."""
    return replace(shape, kv_dtype="bfloat16")


def _with_fp8(shapes: Iterator[Shape]) -> Iterator[Shape]:
    """Yield each shape in bf16 and, right after it, in fp8."""
    for shape in shapes:
        for name in KV_DTYPES:
            yield replace(shape, kv_dtype=name)


def _decodes() -> Iterator[Shape]:
    for batch in (16, 64, 256):
        for context in (4096, 8192, 32768):
            yield Shape(batch, context)
    for batch, context in ((16, 8192), (64, 4096)):
        for heads, kv_heads in ((64, 8), (28, 4), (32, 32)):
            yield Shape(batch, context, heads, kv_heads)
        for head in (64, 256):
            yield Shape(batch, context, head=head)
        yield Shape(batch, context, block=64)
    yield Shape(16, 32768, 64, 8, head=64, block=64)
    yield Shape(64, 4096, 28, 4, head=256, block=64)
    for batch in (16, 64):
        yield Shape(batch, 131072)
    for batch in (1, 4):
        for context in (512, 2048, 8192, 32768, 131072):
            yield Shape(batch, context)
    for batch in (16, 64, 256):
        for context in (512, 2048):
            yield Shape(batch, context)


def _slices() -> Iterator[Shape]:
    """Yield the batches of one of eight GPUs that share a model: each GPU has one KV head."""
    for batch in (1, 16, 64, 256):
        for context in (4096, 32768):
            yield Shape(batch, context, 8, 1)
    for block in (16, 64):
        yield Shape(16, 131072, 8, 1, block=block)


def _published() -> Iterator[Shape]:
    """Yield batches of which TileOPs has published times on an H200."""
    yield Shape(32, 4096)
    yield Shape(1, 4096, 32, 4)


def _appends() -> Iterator[Shape]:
    yield Shape(1, 64 + 100_000, new=64)
    yield Shape(4, 64 + 100_000, new=64)
    for batch, context in ((1, 32768), (16, 4096), (64, 4096)):
        for new in (4, 8):
            yield Shape(batch, new + context, new=new)
    yield Shape(1, 4096, new=4096)
    yield Shape(8, 1024, new=1024)
    yield Shape(8, 256 + 8192, new=256)
    yield Shape(4, 512 + 32768, new=512)
    yield Shape(64, 16 + 4096, new=16)
    yield Shape(4, 2048, head=64, new=2048)
    yield Shape(4, 2048, head=256, new=2048)


# A long document with many questions about it, and a system prompt. Both in whole splits.
SHARED: Final = (Shape(128, 32768 + 256, shared=32768), Shape(16, 8192 + 1024, shared=8192))
DECODES: Final = tuple(_with_fp8(chain(_decodes(), _published(), _slices())))
APPENDS: Final = tuple(_with_fp8(_appends()))
QUICK_DECODES: Final = tuple(
    _with_fp8(iter((Shape(64, 8192), Shape(16, 32768), Shape(1, 8192), Shape(64, 4096, 28, 4))))
)
QUICK_APPENDS: Final = APPENDS[:2]
# The first shapes to look at, with each split: in a few seconds.
SURVEY: Final = (
    Shape(16, 4096),
    Shape(64, 4096, kv_dtype="float8_e4m3fn"),
    Shape(64, 4096, 8, 1),
    Shape(1, 131072),
    Shape(64, 4 + 4096, new=4),
    Shape(1, 64 + 100_000, new=64),
)
# To test the code: a group of five, two splits, a last block that is not full.
TINY_DECODES: Final = tuple(_with_fp8(iter((Shape(3, 300, 10, 2, 64), Shape(2, 40, 4, 4, 32, 8)))))
TINY_SHARED: Final = (Shape(3, 520, 2, 1, 32, shared=512),)
TINY_APPENDS: Final = tuple(_with_fp8(iter((Shape(2, 90, 4, 2, 32, new=70),))))
