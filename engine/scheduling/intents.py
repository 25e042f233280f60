"""The operations that the scheduler asks of one step, and their outcome."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from kvplane import ops
from kvplane.errors import KvplaneError
from kvplane.results import ItemFailure

from .sequence import EngineSequence


class Kind(Enum):
    """The purpose of an operation, such as an admission or an append."""

    FORK = "fork"
    FREE = "free"
    SWAP_OUT = "swap_out"
    APPEND = "append"
    SWAP_IN = "swap_in"
    ADMIT = "admit"


@dataclass(frozen=True, slots=True)
class Intent:
    """An operation that the scheduler wants in a step. ``sequences``: those that its items concern,
    in order.

    An APPEND has for each of them ``num_slots``, the slots that it computes, and ``num_known``, the
    tokens that the control plane knows afterwards. ``in_passes``: each slot's token is sampled from
    the slot before, so they are computed one after another. ``kv_ids``: of each, its id when it was
    asked for.
    """

    kind: Kind
    operation: ops.Operation
    sequences: tuple[EngineSequence, ...] = ()
    num_slots: tuple[int, ...] = ()
    num_known: tuple[int, ...] = ()
    in_passes: bool = False
    kv_ids: tuple[int, ...] = ()


Failures = dict[int, ItemFailure]
"""The items of an operation that were not done, by index."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``[first_position, first_position + num_tokens)`` of ``sequence``, computed in this
    step.

    ``is_last``: it ends with the sequence's last known token, whose logits give the next one. No
    token is taken for a sequence that ended after it was planned. ``kv_id``: of the sequence when
    it was planned. ``checkpoint_position``: where the plan keeps a checkpoint of it; 0 for none.
    """

    sequence: EngineSequence
    first_position: int
    num_tokens: int
    is_last: bool
    kv_id: int = 0
    checkpoint_position: int = 0

    @property
    def ends_at_checkpoint(self) -> bool:
        """Return whether the state after the span is kept."""
        return self.checkpoint_position == self.first_position + self.num_tokens


@dataclass(slots=True)
class Outcome:
    """The outcome of a step: spans to compute, in the plan's order, and failed sequences."""

    spans: list[Span] = field(default_factory=list)
    in_passes: bool = False
    """True if the spans are computed one token at a time, in passes."""
    failed: list[tuple[EngineSequence, KvplaneError]] = field(default_factory=list)
