"""The options of one attention call: one value from the client to the kernel."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Final

from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError
from kvplane.tensor import Tensor
from kvplane.wire.v1 import execution_pb2 as pb

MAX_QUERY_HEADS: Final = 1 << 20
_MAX_FLOAT32: Final = (2 - 2**-23) * 2.0**127
_OF_HEADS: Final = ("alibi_slopes", "sinks")


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Options of one attention call; see the message of the same name.

    scale: factor of the dot products of queries and keys; 0 means 1 / sqrt(head_size).
    sliding_window_tokens: a query token sees its last that many positions, itself included; 0
        means as the layer group says; where there is no layer group, 0 means all.
    alibi_slopes: one for each query head, or none at all; slope * (key position - query position)
        is added to the scores.
    logit_soft_cap: scores become cap * tanh(score / cap), after the scale and before ALiBi; 0 means
        that they stay as they are.
    sinks: one for each query head, or none at all; exp(sink) is added to the sum of a softmax.
    block_pattern: which blocks of keys a query sees; None means as the layer group says.
    seen_blocks: uint8 [num_sequences, num_heads, num_blocks], a mask of the caller's own: beside
        the pattern's local blocks, a query sees those that are not 0. Only with a pattern, which
        has no vertical stride. None means that the pattern is all.

    Valid by construction: raises InvalidRequestError naming the option that is out of range. Only
    the query's shape tells how many slopes and sinks there must be, so the kernels check that.
    """

    scale: float = 0.0
    sliding_window_tokens: int = 0
    alibi_slopes: tuple[float, ...] = ()
    logit_soft_cap: float = 0.0
    sinks: tuple[float, ...] = ()
    block_pattern: BlockPattern | None = None
    seen_blocks: Tensor | None = None

    def __post_init__(self) -> None:
        _require_finite(self.scale, "scale", "")
        if not 0 <= self.sliding_window_tokens < 2**31:
            raise InvalidRequestError(
                f"must be from 0 to {2**31 - 1}, is {self.sliding_window_tokens}",
                field="sliding_window_tokens",
            )
        if not 0.0 <= self.logit_soft_cap <= _MAX_FLOAT32:
            raise InvalidRequestError(
                f"must be finite in float32 and at least 0, is {self.logit_soft_cap}",
                field="logit_soft_cap",
            )
        for name in _OF_HEADS:
            of_heads = getattr(self, name)
            _require_few(of_heads, name)
            for i, number in enumerate(of_heads):
                _require_finite(number, name, f"number {i} ")
        if self.seen_blocks is not None:
            _check_mask(self.seen_blocks, self.block_pattern)

    def in_group(
        self, sliding_window_tokens: int, block_pattern: BlockPattern | None
    ) -> AttentionOptions:
        """Return the options with a layer group's window and pattern, unless they have their
        own.
        """
        window = self.sliding_window_tokens or sliding_window_tokens
        pattern = self.block_pattern or block_pattern
        if window == self.sliding_window_tokens and pattern is self.block_pattern:
            return self
        return replace(self, sliding_window_tokens=window, block_pattern=pattern)

    def of_heads(self, heads: Sequence[range]) -> AttentionOptions:
        """Return the options restricted to these ranges of query heads, which are joined. A pattern
        stays as it is: a shard knows which KV heads of the model are its own.
        """
        if not (self.alibi_slopes or self.sinks or self.seen_blocks):
            return self
        slopes = tuple(x for each in heads for x in self.alibi_slopes[each.start : each.stop])
        sinks = tuple(x for each in heads for x in self.sinks[each.start : each.stop])
        seen = self.seen_blocks and self.seen_blocks.of_heads(heads)
        return replace(self, alibi_slopes=slopes, sinks=sinks, seen_blocks=seen)

    def of_sequences(self, first: int, end: int) -> AttentionOptions:
        """Return the options restricted to sequences ``first`` to ``end`` - 1 of a batch."""
        if self.seen_blocks is None:
            return self
        _, *shape = self.seen_blocks.shape
        size = shape[0] * shape[1]
        part = memoryview(self.seen_blocks.data)[first * size : end * size]
        return replace(self, seen_blocks=Tensor("uint8", (end - first, *shape), part))

    def to_proto(self) -> pb.AttentionOptions:
        """Convert the options to their message."""
        return pb.AttentionOptions(
            scale=self.scale,
            sliding_window_tokens=self.sliding_window_tokens,
            alibi_slopes=self.alibi_slopes,
            logit_soft_cap=self.logit_soft_cap,
            sinks=self.sinks,
            block_pattern=None if self.block_pattern is None else self.block_pattern.to_proto(),
            seen_blocks=None if self.seen_blocks is None else self.seen_blocks.to_proto(),
        )

    @classmethod
    def from_proto(cls, message: pb.AttentionOptions, *, field: str) -> AttentionOptions:
        """Parse a message. Raises InvalidRequestError naming the option as a part of ``field``."""
        try:
            for name in _OF_HEADS:
                _require_few(getattr(message, name), name)
            return cls(
                message.scale,
                message.sliding_window_tokens,
                tuple(message.alibi_slopes),
                message.logit_soft_cap,
                tuple(message.sinks),
                BlockPattern.of_field(message, ""),
                Tensor.from_proto(message.seen_blocks, field="seen_blocks")
                if message.HasField("seen_blocks")
                else None,
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field=f"{field}.{error.field}") from None


def _check_mask(seen_blocks: Tensor, pattern: BlockPattern | None) -> None:
    """Check a caller's mask beside the pattern that says what its blocks are. Raises
    InvalidRequestError.
    """
    if pattern is None:
        raise InvalidRequestError(
            "must be given with seen_blocks, and say how many tokens a block has",
            field="block_pattern",
        )
    if pattern.vertical_stride or pattern.head_sliding_step:
        raise InvalidRequestError(
            "must not have a vertical stride or a step where seen_blocks takes its place",
            field="block_pattern",
        )
    if seen_blocks.dtype != "uint8" or len(seen_blocks.shape) != 3 or not seen_blocks.shape[2]:
        raise InvalidRequestError(
            f"must be uint8 [num_sequences, num_heads, num_blocks], is {seen_blocks.dtype} "
            f"{list(seen_blocks.shape)}",
            field="seen_blocks",
        )


def _require_few(of_heads: Sized, field: str) -> None:
    """Raise InvalidRequestError for too many values, before each of them is checked."""
    if len(of_heads) > MAX_QUERY_HEADS:
        raise InvalidRequestError(
            f"must be at most {MAX_QUERY_HEADS}, one for each query head, are {len(of_heads)}",
            field=field,
        )


def _require_finite(value: float, field: str, which: str) -> None:
    """Raise InvalidRequestError for NaN and for what overflows float32, the kernels' type."""
    if not abs(value) <= _MAX_FLOAT32:
        raise InvalidRequestError(f"{which}must be finite in float32, is {value}", field=field)
