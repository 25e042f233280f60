"""An engine's view in the walk: its sequences, its plans, its requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import torch

from control_plane.core import ControlPlane
from control_plane.sessions.silent_shards import num_missing_receipts
from kvplane.errors import KvplaneError
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.native.native_pool import Span, decoded
from tests.helpers.native.native_sessions import Known
from tests.helpers.planes.planes_values import BLOCK, Values
from tests.helpers.planes.planes_world import DataProcess

DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST


class Deferred(NamedTuple):
    """Deferred tokens of a sequence."""

    sequence_id: int
    admitted_by: int
    first: int
    tokens: list[int]


def deferred_of(message: cpb.DeferredTokens) -> list[Deferred]:
    """Yield deferred tokens, sequence by sequence."""
    token_ids = iter(columns.read(INT32, message.token_ids, ""))
    return [
        Deferred(i, step, first, list(islice(token_ids, num)))
        for i, step, first, num in zip(
            columns.read(INT64, message.sequence_ids, ""),
            columns.read(INT64, message.admitted_by, ""),
            columns.read(INT32, message.first_positions, ""),
            columns.read(INT32, message.num_tokens, ""),
            strict=True,
        )
    ]


def unseen_cuts(core: ControlPlane, session_id: int) -> set[int]:
    """Return sequences cut from a session that the next answer to its steps reports."""
    session = core.sessions.by_id.get(session_id)
    if session is None or session.news is None:
        return set()
    return set(columns.read(INT64, session.news.cut_sequence_ids, ""))


def lacks_a_receipt(core: ControlPlane, session_id: int) -> bool:
    """Return whether a missing receipt ends the session in time: of a plan that other shards have
    receipted, or for blocks that somebody may wait for.
    """
    session = core.sessions.by_id.get(session_id)
    if session is None:
        return False
    num_retired = session.native.num_own_retired(session.handle, DEVICE)
    return num_retired > 0 or any(num_missing_receipts(len(session.receipted), [session]))


def extend(sequences: dict[int, Known], append: cpb.Append, failed: set[int]) -> None:
    """Believe the answer to an append. ``failed``: items that were refused."""
    token_ids, begin = list(columns.read(INT32, append.token_ids, "")), 0
    items = zip(
        columns.read(INT64, append.sequence_ids, ""),
        columns.read(INT32, append.first_positions, ""),
        columns.read(INT32, append.num_slots, ""),
        columns.read(INT32, append.num_tokens, ""),
        strict=True,
    )
    for item, (i, first, slots, num_tokens) in enumerate(items):
        tokens, begin = token_ids[begin : begin + num_tokens], begin + num_tokens
        known = sequences.get(i)
        if known is None or first != known.num_scheduled:
            assert item in failed, "an append at another position was done"
        if item in failed:
            continue
        assert known is not None
        end = known.num_known + num_tokens
        known.tokens[known.num_known : end] = tokens
        known.num_known = end
        known.num_scheduled += slots
        # Tokens of slots beyond those known: this engine knows them first.
        while len(known.tokens) < known.num_scheduled:
            known.tokens.append(len(known.tokens) % 3)


@dataclass(eq=False)
class Pin:
    """Whole blocks that were pinned at ``since_s``, and the grant to read them."""

    grant: tpb.SignedPayload
    tokens: list[int]
    since_s: float


@dataclass
class ShardRun:
    """A plan on one shard."""

    process: DataProcess
    next_layer: int = 0
    finished: bool = False
    in_passes: bool = False
    pass_index: int | None = None  # the present pass; None before the first, and of a whole plan


@dataclass
class Made:
    """A plan, and the values of all positions scheduled so far once it has run."""

    signed: tpb.SignedPayload
    plan: plan_pb2.Plan
    values: dict[int, Values]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    runs: dict[int, ShardRun] = field(default_factory=dict)
    stamps: dict[int, int] = field(default_factory=dict)
    """By sequence, the number in its slots that this plan writes."""

    @property
    def number(self) -> int:
        return self.plan.number

    @cached_property
    def spans(self) -> list[Span]:
        return decoded(self.signed.payload).spans

    @property
    def has_readers(self) -> bool:
        """Whether a span's sequence begins with tokens that another span computes: the sequences
        of a session may share those blocks.
        """
        return any(
            i != j
            and (end := (first // BLOCK + 1) * BLOCK) <= read
            and self.tokens[i][:end] == self.tokens[j][:end]
            for i, first, _ in self.spans
            for j, read, _ in self.spans
        )

    def spans_of(self, pass_index: int | None) -> list[Span]:
        """Return what a pass computes: one token of each span that is long enough."""
        if pass_index is None:
            return self.spans
        spans = (Span(i, first + pass_index, num - pass_index) for i, first, num in self.spans)
        return [span._replace(num=1) for span in spans if span.num > 0]

    def left_of(self, pass_index: int) -> dict[int, Span]:
        """Return what the passes from ``pass_index`` on compute, by sequence."""
        done = ((i, first, num, min(num, pass_index)) for i, first, num in self.spans)
        return {i: Span(i, first + end, num - end) for i, first, num, end in done}


@dataclass
class Sent:
    """A request with a number, and its outcome."""

    method: str
    request: Any
    arrived: bool = False
    answer: Any = None
    error: KvplaneError | None = None


class LayerCall(NamedTuple):
    """One layer's message and the values that it wrote, to be sent again."""

    process: DataProcess
    plan_number: int
    pass_index: int | None
    layer: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
