"""What an engine of the walk knows: its sequences, its plans, what it sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import torch
from planes_values import Values
from planes_world import DataProcess

from kvplane.errors import KvplaneError
from kvplane.v1 import control_pb2 as cpb
from kvplane.v1 import types_pb2 as tpb
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST


@dataclass
class Known:
    """A sequence as its engine knows it. ``tokens``: also those not submitted yet."""

    admitted_by: int
    tokens: list[int]
    num_known: int
    num_scheduled: int
    tier: int = DEVICE


class Span(NamedTuple):
    """The tokens that a plan computes for a sequence."""

    sequence_id: int
    first: int
    num_tokens: int


class Deferred(NamedTuple):
    """Deferred tokens of a sequence."""

    sequence_id: int
    admitted_by: int
    first: int
    tokens: list[int]


def deferred_of(message: cpb.DeferredTokens) -> list[Deferred]:
    """Deferred tokens, sequence by sequence."""
    token_ids = iter(columns.read(INT32, message.token_ids, ""))
    return [
        Deferred(i, step, first, list(islice(token_ids, num)))
        for i, step, first, num in zip(
            columns.read(INT64, message.sequence_ids, ""),
            columns.read(INT64, message.admitted_by, ""),
            columns.read(INT64, message.first_positions, ""),
            columns.read(INT32, message.num_tokens, ""),
            strict=True,
        )
    ]


@dataclass
class ShardRun:
    """A plan on one shard."""

    process: DataProcess
    next_layer: int = 0
    finished: bool = False


@dataclass
class Made:
    """A plan, and what all positions scheduled so far hold once it has run."""

    signed: tpb.SignedPayload
    plan: tpb.Plan
    values: dict[int, Values]
    runs: dict[int, ShardRun] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.plan.number

    @property
    def spans(self) -> list[Span]:
        message = self.plan.spans
        each = zip(
            columns.read(INT64, message.sequence_ids, "sequence_ids"),
            columns.read(INT64, message.first_positions, "first_positions"),
            columns.read(INT32, message.num_tokens, "num_tokens"),
            strict=True,
        )
        return [Span(*values) for values in each]


@dataclass
class Sent:
    """A request with a number, and what came of it."""

    method: str
    request: Any
    arrived: bool = False
    answer: Any = None
    error: KvplaneError | None = None


class LayerCall(NamedTuple):
    """What one layer's message said, and what it wrote, to be sent again."""

    process: DataProcess
    plan_number: int
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
