"""Patterns of block-sparse attention: which blocks of keys a query sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from kvplane.errors import InvalidRequestError
from kvplane.wire.v1 import types_pb2 as pb

UNIT_TOKENS: Final = 16
"""Block sizes of patterns are multiples of this, so that kernels hide parts of tiles."""
_MAX_BLOCK_TOKENS: Final = 1 << 16
_MAX_STRIDE: Final = 1024


@dataclass(frozen=True, slots=True)
class BlockPattern:
    """A pattern of block-sparse attention, as vLLM 0.6 has it; see the message of the same name.

    Valid by construction: raises InvalidRequestError naming the field that is out of range.
    """

    block_tokens: int
    local_blocks: int
    vertical_stride: int = 0
    head_sliding_step: int = 0

    def __post_init__(self) -> None:
        if self.block_tokens % UNIT_TOKENS:
            raise InvalidRequestError(
                f"must be a multiple of {UNIT_TOKENS}, is {self.block_tokens}", field="block_tokens"
            )
        for name, least, most in (
            ("block_tokens", UNIT_TOKENS, _MAX_BLOCK_TOKENS),
            ("local_blocks", 1, 2**31 - 1),
            ("vertical_stride", 0, _MAX_STRIDE),
            ("head_sliding_step", 1 - 2**31, 2**31 - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise InvalidRequestError(f"must be from {least} to {most}, is {value}", field=name)

    def check_fits(self, block_size_tokens: int, prefix: str) -> None:
        """Raise InvalidRequestError, naming the field after ``prefix``, unless the pattern's blocks
        are whole blocks of a pool.
        """
        if self.block_tokens % block_size_tokens:
            raise InvalidRequestError(
                f"must be a multiple of the pool's block size {block_size_tokens}, is "
                f"{self.block_tokens}",
                field=f"{prefix}block_tokens",
            )

    def seen_blocks(self, num_heads: int, kv_heads: range) -> list[list[bool]]:
        """Return for each query head of ``kv_heads``, the model's numbers of these KV heads, which
        blocks it sees wherever the query is: [num_heads, vertical_stride], a row that repeats.
        """
        group, step = num_heads // len(kv_heads), self.head_sliding_step
        rows = []
        for head in range(num_heads):
            of_query = kv_heads.start * group + head
            offset = 1 + (of_query * step if step >= 0 else kv_heads[head // group] * -step)
            stride = self.vertical_stride or 1
            is_any = self.vertical_stride > 0
            rows.append([is_any and (block + offset) % stride == 0 for block in range(stride)])
        return rows

    def to_proto(self) -> pb.BlockPattern:
        """Convert the pattern to its message."""
        return pb.BlockPattern(
            block_tokens=self.block_tokens,
            local_blocks=self.local_blocks,
            vertical_stride=self.vertical_stride,
            head_sliding_step=self.head_sliding_step,
        )

    @classmethod
    def of_field(cls, message: Any, field: str) -> BlockPattern | None:
        """Parse the ``block_pattern`` of a message; None where it has none. Raises
        InvalidRequestError naming the part of it, in ``field``.
        """
        if not message.HasField("block_pattern"):
            return None
        given: pb.BlockPattern = message.block_pattern
        try:
            return cls(
                given.block_tokens,
                given.local_blocks,
                given.vertical_stride,
                given.head_sliding_step,
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(
                error.message, field=".".join(filter(None, (field, "block_pattern", error.field)))
            ) from None
