"""The options of one attention call: one value from the client to the kernel."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass, replace
from typing import Final

from kvplane.errors import InvalidRequestError
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

    Valid by construction: raises InvalidRequestError naming the option that is out of range. Only
    the query's shape tells how many slopes and sinks there must be, so the kernels check that.
    """

    scale: float = 0.0
    sliding_window_tokens: int = 0
    alibi_slopes: tuple[float, ...] = ()
    logit_soft_cap: float = 0.0
    sinks: tuple[float, ...] = ()

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

    def in_group(self, sliding_window_tokens: int) -> AttentionOptions:
        """Return the options with a layer group's window, unless they have their own."""
        if self.sliding_window_tokens or not sliding_window_tokens:
            return self
        return replace(self, sliding_window_tokens=sliding_window_tokens)

    def of_heads(self, heads: Sequence[range]) -> AttentionOptions:
        """Return the options restricted to these ranges of query heads, which are joined."""
        if not (self.alibi_slopes or self.sinks):
            return self
        slopes = tuple(x for each in heads for x in self.alibi_slopes[each.start : each.stop])
        sinks = tuple(x for each in heads for x in self.sinks[each.start : each.stop])
        return replace(self, alibi_slopes=slopes, sinks=sinks)

    def to_proto(self) -> pb.AttentionOptions:
        """Convert the options to their message."""
        return pb.AttentionOptions(
            scale=self.scale,
            sliding_window_tokens=self.sliding_window_tokens,
            alibi_slopes=self.alibi_slopes,
            logit_soft_cap=self.logit_soft_cap,
            sinks=self.sinks,
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
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field=f"{field}.{error.field}") from None


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
