"""What the executor refuses. Each refusal names its field; memory and tables stay as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from data_plane.execution.plan_runner import PlanLayer
from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    BlockNotWritableError,
    InvalidRequestError,
    KvplaneError,
    PlanConflictError,
    PlanOutOfOrderError,
    StaleGenerationError,
)
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    drop,
    fork,
    pack_allocations,
    pack_changes,
    pack_spans,
    pack_transfers,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)

HUGE = 2**63 - 1


def _columns(message: Any) -> dict[str, bytes]:
    """Return the columns of a message, or of changes."""
    if isinstance(message, list):
        message = pack_changes(message)
    return {field.name: value for field, value in message.ListFields()}


# A column of single bytes loses an element, so that the next column has one too many.
_BLAMED = {
    "changes.kinds": "plan.changes.sequence_ids",
    "transfers.source_tiers": "plan.transfers.source_indices",
    "allocations.tiers": "plan.allocations.indices",
}

# The tests of plans have more reasons; of each part of a plan there is one here at least.
BAD_PLANS: dict[str, tuple[type[KvplaneError], str, dict[str, Any]]] = {
    "another session": (
        InvalidRequestError,
        "plan.session.session_id",
        {"session": pb.SessionRef(incarnation=1, session_id=2)},
    ),
    "the number of another plan": (
        PlanConflictError,
        "plan.number",
        {"number": 1, "previous": 0},
    ),
    "a skipped plan": (PlanOutOfOrderError, "plan.previous", {"number": 4, "previous": 3}),
    "a span past its table": (
        InvalidRequestError,
        "plan.spans.num_tokens[0]",
        {"spans": [span(1, 12, 5)]},
    ),
    "no such device block": (
        InvalidRequestError,
        "plan.changes.indices[1]",
        {"changes": [set_blocks(2, [(2, 1), (8, 1)])]},
    ),
    "a group that is not there": (
        InvalidRequestError,
        "plan.changes.groups[1]",
        {"changes": plan_pb2.TableChanges(groups=b"\0\1", **_columns([fork(2, 1, 1), drop(1)]))},
    ),
    "a transfer from a block that an earlier one has overwritten": (
        StaleGenerationError,
        "plan.transfers.source_generations[1]",
        {
            "changes": [drop(1), set_blocks(2, [(0, 2), (2, 1)])],
            "transfers": [transfer(ref(1), ref(0, 2)), transfer(ref(0), ref(2))],
        },
    ),
    "a transfer from a block that is saved and not written yet": (
        StaleGenerationError,
        "plan.transfers.source_generations[1]",
        {
            "changes": [drop(1), set_blocks(2, [(0, 2), (2, 1), (3, 1)])],
            "transfers": [transfer(ref(0), ref(2)), transfer(ref(0, 2), ref(3))],
        },
    ),
    "a transfer into a block that another plan allocated": (
        StaleGenerationError,
        "plan.transfers.destination_generations[1]",
        {
            "allocations": [ref(2)],
            "transfers": [transfer(ref(0), ref(2)), transfer(ref(0), ref(1))],
        },
    ),
}


def _cut_columns() -> dict[str, tuple[type[KvplaneError], str, dict[str, Any]]]:
    """Yield each column of each message, one byte short."""
    whole: dict[str, Any] = {
        "changes": pack_changes([set_blocks(2, [(2, 1)]), fork(3, 2, 1)]),
        "transfers": pack_transfers([transfer(ref(0), ref(2))]),
        "spans": pack_spans([span(1, 12, 1)]),
        "allocations": pack_allocations([ref(3), ref(4)]),
    }
    cut = {}
    for part, message in whole.items():
        for name, column in _columns(message).items():
            short = {**_columns(message), name: column[:-1]}
            fields = {**whole, part: type(message)(**short)}
            cut[f"{part}.{name} one byte short"] = (
                InvalidRequestError,
                # When a column that sets the others' length is short, the first of those is named.
                _BLAMED.get(f"{part}.{name}", f"plan.{part}.{name}"),
                fields,
            )
    return cut


BAD_PLANS |= _cut_columns()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sequence 1 holds 12 tokens in device blocks 0 and 1; plan 1 has run. At the end the session
    must still be able to run a plan.
    """
    rig = Rig()
    rig.admit(1)
    yield rig
    number = of_latest(rig.executor)["plan_number"] + 1
    changes = [set_blocks(50, [(7, 99)])]
    assert rig.run(number, *changes, span(50, 0, 3), resync=True)


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_is_refused_for(rig: Rig, name: str) -> None:
    error, field, fields = BAD_PLANS[name]
    plan = rig.plan(**{"number": 2, "previous": 1, **fields})
    with rig.refuses(error, field):
        rig.executor.start(1, plan)
    assert rig.executor.counters.num_rejections == {error("").reason: 1}


@pytest.mark.parametrize("error", [BlockNotWritableError, StaleGenerationError])
def test_blocks_are_not_written_to_what_was_published_or_taken_since_the_plan_began(
    rig: Rig, error: type[KvplaneError]
) -> None:
    """Nor are layers: see ``tests/rpc/test_late_layers.py``."""
    rig.start(2, span(1, 12, 1))
    if error is BlockNotWritableError:
        rig.publish(1)
    else:
        rig.open(2)
        rig.run(1, set_blocks(1, [(1, 2)]), session_id=2)
    with rig.refuses(error):
        rig.executor.write_blocks(1, 1, 1, torch.zeros(2, 1, 2, 2, 8, 16))


Q, K = tokens(1, 4), tokens(1)
BAD_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "too many tokens": ("key", {"key": tokens(2)}),
    "too many heads": ("value", {"value": tokens(1, 3)}),
    "another rank": ("key", {"key": K[0]}),
    "another head size": ("key", {"key": K[..., :8]}),
    "another dtype": ("value", {"value": K.to(torch.float16)}),
    "a strided last dimension": ("key", {"key": torch.zeros(1, 2, 32)[..., ::2]}),
    "heads that share unevenly": ("query", {"query": tokens(1, 3)}),
    "no heads": ("query", {"query": tokens(1, 0)}),
    "a query of another rank": ("query", {"query": Q[0]}),
    "a query of another dtype": ("query", {"query": Q.double()}),
    "another layer": ("layer", {"layer": 2}),
    "a negative layer": ("layer", {"layer": -1}),
    "a later layer": ("layer", {"layer": 1}),
    "too few slopes": ("options.alibi_slopes", {"options": AttentionOptions(alibi_slopes=(1.0,))}),
}


@pytest.mark.parametrize("name", BAD_LAYERS)
def test_a_layer_is_refused_for(rig: Rig, name: str) -> None:
    field, arguments = BAD_LAYERS[name]
    rig.start(2, span(1, 12, 1))
    given: dict[str, Any] = {"layer": 0, "query": Q, "key": K, "value": K, **arguments}
    tensors = given["query"], given["key"], given["value"]
    options = given.get("options", AttentionOptions())
    with rig.refuses(InvalidRequestError, field):
        rig.run_layer(given["layer"], *tensors, options=options)
    with rig.refuses(InvalidRequestError, f"in.{field}"):  # as the caller names it
        rig.executor.layer_runner.run(
            PlanLayer(1, given["layer"], 2, field="in."), tensors, options
        )
    rig.run_layers(1)


@pytest.mark.parametrize(
    ("field", "entries"),
    [
        ("entries", []),
        ("entries[0]", [-1]),
        ("entries[0]", [2]),
        ("entries[2]", [1, 0, 2]),
        ("entries[1]", [1, HUGE]),
    ],
)
def test_a_read_outside_the_table_is_refused(rig: Rig, field: str, entries: list[int]) -> None:
    with rig.refuses(InvalidRequestError, field):
        rig.executor.read_blocks(1, 1, entries)


@pytest.mark.parametrize(
    ("field", "sequence", "first", "shape"),
    [
        ("sequence_ids[0]", 9, 1, (2, 1, 2, 2, 8, 16)),
        ("entries", 1, 0, (2, 1, 2, 2, 8, 16)),
        ("entries", 1, -1, (2, 1, 2, 2, 8, 16)),
        ("entries", 1, HUGE, (2, 1, 2, 2, 8, 16)),
        ("blocks", 1, 1, (1, 1, 2, 2, 8, 16)),
        ("blocks", 1, 1, (2, 1, 2, 2, 16)),
        ("blocks", 1, 1, (2, 1, 2, 2, 8, 8)),
        ("entries", 1, 1, (2, 0, 2, 2, 8, 16)),
    ],
)
def test_blocks_that_hold_nothing_of_the_span_are_refused(
    rig: Rig, field: str, sequence: int, first: int, shape: tuple[int, ...]
) -> None:
    rig.start(2, span(1, 12, 1))
    with rig.refuses(InvalidRequestError, field):
        rig.executor.write_blocks(1, sequence, first, torch.zeros(shape))


def test_layers_that_are_not_held_are_neither_read_nor_written(rig: Rig) -> None:
    rig.start(2, span(1, 12, 1))
    with rig.refuses(InvalidRequestError, "num_layers"):
        rig.executor.read_blocks(1, 1, [0], first_layer=1, num_layers=2)
    with rig.refuses(InvalidRequestError, "first_layer"):
        rig.executor.write_blocks(1, 1, 1, torch.zeros(2, 1, 2, 2, 8, 16), first_layer=1)
