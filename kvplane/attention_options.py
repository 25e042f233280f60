"""The options of one attention call: one value from the client to the kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from kvplane.errors import InvalidRequestError
from kvplane.v1 import data_pb2 as pb

_MAX_FLOAT32: Final = (2 - 2**-23) * 2.0**127


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """How to attend; see the message of the same name.

    scale: factor of the dot products of queries and keys; 0 means 1 / sqrt(head_size).
    sliding_window_tokens: a query token sees its last that many positions, itself included; 0
        means as the layer group says; where there is no layer group, 0 means all.
    alibi_slopes: one for each query head, or none at all; slope * (key position - query position)
        is added to the scores.

    Valid by construction: raises InvalidRequestError naming the option that is out of range. Only
    the query's shape tells how many slopes there must be, so the kernels check their number.
    """

    scale: float = 0.0
    sliding_window_tokens: int = 0
    alibi_slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _require_finite(self.scale, "scale", "")
        if not 0 <= self.sliding_window_tokens < 2**31:
            raise InvalidRequestError(
                f"must be from 0 to {2**31 - 1}, is {self.sliding_window_tokens}",
                field="sliding_window_tokens",
            )
        for i, slope in enumerate(self.alibi_slopes):
            _require_finite(slope, "alibi_slopes", f"slope {i} ")

    def in_group(self, sliding_window_tokens: int) -> AttentionOptions:
        """The options with a layer group's window, which applies unless they have their own."""
        if self.sliding_window_tokens or not sliding_window_tokens:
            return self
        return replace(self, sliding_window_tokens=sliding_window_tokens)

    def to_proto(self) -> pb.AttentionOptions:
        """As a message."""
        return pb.AttentionOptions(
            scale=self.scale,
            sliding_window_tokens=self.sliding_window_tokens,
            alibi_slopes=self.alibi_slopes,
        )

    @classmethod
    def from_proto(cls, message: pb.AttentionOptions, *, field: str) -> AttentionOptions:
        """From a message. Raises InvalidRequestError naming the option as a part of ``field``."""
        try:
            return cls(message.scale, message.sliding_window_tokens, tuple(message.alibi_slopes))
        except InvalidRequestError as error:
            raise InvalidRequestError(error.message, field=f"{field}.{error.field}") from None


def _require_finite(value: float, field: str, which: str) -> None:
    """Kernels compute with float32. NaN is refused too."""
    if not abs(value) <= _MAX_FLOAT32:
        raise InvalidRequestError(f"{which}must be finite in float32, is {value}", field=field)
