"""Plans that an executor must refuse: the reason, the error, the field it names, and the fault.

They follow plan 1, which admitted sequence 1 to device blocks 0 and 1 and wrote 12 tokens.
"""

from __future__ import annotations

from typing import Any

from kvplane.errors import (
    BlockNotWritableError,
    InvalidRequestError,
    KvplaneError,
    PlanOutOfOrderError,
    ProtocolMismatchError,
    SequenceNotFoundError,
    SequenceSwappedError,
    StaleEpochError,
    StaleGenerationError,
    StaleIncarnationError,
)
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import (
    HOST,
    Change,
    drop,
    fork,
    pack_changes,
    pack_spans,
    pack_transfers,
    ref,
    set_blocks,
    span,
    transfer,
    trim,
    truncate,
)

HUGE = 2**63 - 1
HUGE_INDEX = 2**31 - 1


def _columns(message: Any) -> dict[str, bytes]:
    """Return the columns of a message, or of changes."""
    if isinstance(message, list):
        message = pack_changes(message)
    return {field.name: value for field, value in message.ListFields()}


# A column of single bytes loses an element, so that the next column has one too many.
_BLAMED = {
    "changes.kinds": "plan.changes.sequence_ids",
    "transfers.source_tiers": "plan.transfers.source_indices",
}

BAD_PLANS: dict[str, tuple[type[KvplaneError], str, dict[str, Any]]] = {
    "no version": (ProtocolMismatchError, "plan.version", {"version": 0}),
    "a later version": (ProtocolMismatchError, "plan.version", {"version": 2}),
    "another pool": (InvalidRequestError, "plan.pool_id", {"pool_id": "other"}),
    "no epochs": (InvalidRequestError, "plan.shard_epochs", {"shard_epochs": []}),
    "too many epochs": (InvalidRequestError, "plan.shard_epochs", {"shard_epochs": [1, 2]}),
    "an older epoch": (StaleEpochError, "plan.shard_epochs[0]", {"shard_epochs": [1]}),
    "an older incarnation": (
        StaleIncarnationError,
        "plan.session.incarnation",
        {"session": pb.SessionRef(incarnation=0, session_id=1)},
    ),
    "a newer incarnation": (
        StaleIncarnationError,
        "plan.session.incarnation",
        {"session": pb.SessionRef(incarnation=9, session_id=1)},
    ),
    "another session": (
        InvalidRequestError,
        "plan.session.session_id",
        {"session": pb.SessionRef(incarnation=1, session_id=2)},
    ),
    "number 0": (InvalidRequestError, "plan.number", {"number": 0}),
    "a negative number": (InvalidRequestError, "plan.number", {"number": -5}),
    "the largest number": (InvalidRequestError, "plan.number", {"number": HUGE}),
    "a skipped plan": (PlanOutOfOrderError, "plan.previous", {"number": 4, "previous": 3}),
    "an earlier branch": (PlanOutOfOrderError, "plan.previous", {"previous": 0}),
}

_SPANS = "plan.spans"
BAD_PLANS |= {
    "a span of an unknown sequence": (
        SequenceNotFoundError,
        f"{_SPANS}.sequence_ids[0]",
        {"spans": [span(9, 0, 1)]},
    ),
    "a sequence in two spans": (
        InvalidRequestError,
        f"{_SPANS}.sequence_ids[1]",
        {"spans": [span(1, 12, 1), span(1, 13, 1)]},
    ),
    "a span past its table": (
        InvalidRequestError,
        f"{_SPANS}.num_tokens[0]",
        {"spans": [span(1, 12, 5)]},
    ),
    "a span of no tokens": (
        InvalidRequestError,
        f"{_SPANS}.num_tokens[0]",
        {"spans": [span(1, 12, 0)]},
    ),
    "a span of negative tokens": (
        InvalidRequestError,
        f"{_SPANS}.num_tokens[0]",
        {"spans": [span(1, 12, -1)]},
    ),
    "a huge span": (
        InvalidRequestError,
        f"{_SPANS}.num_tokens[0]",
        {"spans": [span(1, 0, HUGE_INDEX)]},
    ),
    "a negative position": (
        InvalidRequestError,
        f"{_SPANS}.first_positions[0]",
        {"spans": [span(1, -1, 1)]},
    ),
    "a huge position": (
        InvalidRequestError,
        f"{_SPANS}.first_positions[0]",
        {"spans": [span(1, HUGE_INDEX, 1)]},
    ),
    "a span on the host tier": (
        SequenceSwappedError,
        f"{_SPANS}.sequence_ids[0]",
        {"changes": [set_blocks(2, [(0, 1)], tier=HOST)], "spans": [span(2, 0, 1)]},
    ),
    "a span of an empty table": (
        InvalidRequestError,
        f"{_SPANS}.first_positions[0]",
        {"changes": [set_blocks(2, [])], "spans": [span(2, 0, 1)]},
    ),
    "a write to a shared block": (
        BlockNotWritableError,
        f"{_SPANS}.sequence_ids[0]",
        {"changes": [fork(2, 1, 2)], "spans": [span(2, 12, 1)]},
    ),
}

_CHANGES = "plan.changes"
BAD_PLANS |= {
    "no such device block": (
        InvalidRequestError,
        f"{_CHANGES}.indices[1]",
        {"changes": [set_blocks(2, [(2, 1), (8, 1)])]},
    ),
    "a negative block": (
        InvalidRequestError,
        f"{_CHANGES}.indices[0]",
        {"changes": [set_blocks(2, [(-1, 1)])]},
    ),
    "no such host block": (
        InvalidRequestError,
        f"{_CHANGES}.indices[2]",
        {"changes": [set_blocks(2, [(4, 1), (5, 1)]), set_blocks(3, [(4, 1)], tier=HOST)]},
    ),
    "more blocks than the pool": (
        InvalidRequestError,
        f"{_CHANGES}.num_blocks[0]",
        {"changes": [set_blocks(2, [(0, 1)] * 9, allocated=False)]},
    ),
    "no tier": (
        InvalidRequestError,
        f"{_CHANGES}.tiers[0]",
        {"changes": [set_blocks(2, [(0, 1)], tier=pb.TIER_UNSPECIFIED)]},
    ),
    "another tier without replace": (
        InvalidRequestError,
        f"{_CHANGES}.tiers[0]",
        {"changes": [set_blocks(1, [(0, 1)], tier=HOST)]},
    ),
    "a tier to drop from": (
        InvalidRequestError,
        f"{_CHANGES}.tiers[0]",
        {"changes": [Change(plan_pb2.TABLE_CHANGE_KIND_DROP, 1, tier=HOST)]},
    ),
    "a gap in a table": (
        InvalidRequestError,
        f"{_CHANGES}.first_blocks[0]",
        {"changes": [set_blocks(1, [(2, 1)], first_block=3)]},
    ),
    "an entry that was trimmed": (
        InvalidRequestError,
        f"{_CHANGES}.first_blocks[1]",
        {"changes": [trim(1, 1), set_blocks(1, [(2, 1)])]},
    ),
    "a table too long to be": (
        InvalidRequestError,
        f"{_CHANGES}.num_blocks[0]",
        {"changes": [set_blocks(1, [(2, 1)], first_block=2**31 - 1, replace=True)]},
    ),
    "a truncation to more than there is": (
        InvalidRequestError,
        f"{_CHANGES}.num_blocks[0]",
        {"changes": [truncate(1, 3)]},
    ),
    "a trim of more than there is": (
        InvalidRequestError,
        f"{_CHANGES}.num_blocks[0]",
        {"changes": [trim(1, 3)]},
    ),
    "a trim of nothing": (
        SequenceNotFoundError,
        f"{_CHANGES}.sequence_ids[1]",
        {"changes": [truncate(1, 2), trim(4, 0)]},
    ),
    "a negative first block": (
        InvalidRequestError,
        f"{_CHANGES}.first_blocks[0]",
        {"changes": [set_blocks(1, [(2, 1)], first_block=-1)]},
    ),
    "a negative number of blocks": (
        InvalidRequestError,
        f"{_CHANGES}.num_blocks[1]",
        {
            "changes": [
                set_blocks(2, [(2, 1)]),
                Change(plan_pb2.TABLE_CHANGE_KIND_SET, 3, tier=HOST, num_blocks=-1),
            ]
        },
    ),
    "an old generation": (
        StaleGenerationError,
        f"{_CHANGES}.generations[0]",
        {"changes": [set_blocks(2, [(0, 2)], allocated=False)]},
    ),
    "a block never allocated": (
        StaleGenerationError,
        f"{_CHANGES}.generations[0]",
        {"changes": [set_blocks(2, [(5, 0)], allocated=False)]},
    ),
    "generation 0 of a block that the plan allocates": (
        StaleGenerationError,
        f"{_CHANGES}.generations[0]",
        {
            "changes": [
                set_blocks(2, [(5, 0)], allocated=False),
                drop(2),
                set_blocks(3, [(5, 1)]),
            ]
        },
    ),
    "an allocated block of its present generation": (
        StaleGenerationError,
        f"{_CHANGES}.generations[0]",
        {"changes": [set_blocks(2, [(0, 1)])]},
    ),
    "an allocated block of the largest generation": (
        StaleGenerationError,
        f"{_CHANGES}.generations[0]",
        {"changes": [set_blocks(2, [(5, HUGE)])]},
    ),
    "a block allocated twice of one generation": (
        StaleGenerationError,
        f"{_CHANGES}.generations[1]",
        {"changes": [set_blocks(2, [(5, 1)]), set_blocks(2, [(5, 1)], replace=True)]},
    ),
    "an allocated block that an own table keeps referring to": (
        StaleGenerationError,
        f"{_CHANGES}.generations[0]",
        {"changes": [set_blocks(2, [(0, 2)])]},
    ),
    "a former generation in a table that stays": (
        StaleGenerationError,
        f"{_CHANGES}.generations[1]",
        {"changes": [set_blocks(2, [(5, 1)]), set_blocks(3, [(5, 2)])]},
    ),
    "a group that is not there": (
        InvalidRequestError,
        f"{_CHANGES}.groups[1]",
        {"changes": plan_pb2.TableChanges(groups=b"\0\1", **_columns([fork(2, 1, 1), drop(1)]))},
    ),
    "a change of no kind": (
        InvalidRequestError,
        f"{_CHANGES}.kinds[0]",
        {"changes": [Change(0, 1)]},
    ),
    "a change of an unknown kind": (
        InvalidRequestError,
        f"{_CHANGES}.kinds[0]",
        {"changes": [Change(7, 1)]},
    ),
    "sequence 0": (
        InvalidRequestError,
        f"{_CHANGES}.sequence_ids[0]",
        {"changes": [drop(0)]},
    ),
    "a drop of nothing": (
        SequenceNotFoundError,
        f"{_CHANGES}.sequence_ids[0]",
        {"changes": [drop(4)]},
    ),
    "a fork of nothing": (
        SequenceNotFoundError,
        f"{_CHANGES}.parent_sequence_ids[0]",
        {"changes": [fork(2, 7, 1)]},
    ),
    "a fork of itself": (
        InvalidRequestError,
        f"{_CHANGES}.parent_sequence_ids[1]",
        {"changes": [fork(2, 1, 1), fork(1, 1, 1)]},
    ),
    "a fork of more than there is": (
        InvalidRequestError,
        f"{_CHANGES}.num_blocks[0]",
        {"changes": [fork(2, 1, 3)]},
    ),
}

_TRANSFERS = "plan.transfers"
BAD_PLANS |= {
    "a transfer from a block that an earlier one has overwritten": (
        StaleGenerationError,
        f"{_TRANSFERS}.source_generations[1]",
        {
            "changes": [drop(1), set_blocks(2, [(0, 2), (2, 1)])],
            "transfers": [transfer(ref(1), ref(0, 2)), transfer(ref(0), ref(2))],
        },
    ),
    "a transfer from a block that is saved and not written yet": (
        StaleGenerationError,
        f"{_TRANSFERS}.source_generations[1]",
        {
            "changes": [drop(1), set_blocks(2, [(0, 2), (2, 1), (3, 1)])],
            "transfers": [transfer(ref(0), ref(2)), transfer(ref(0, 2), ref(3))],
        },
    ),
    "a transfer into a block that another plan allocated": (
        StaleGenerationError,
        f"{_TRANSFERS}.destination_generations[1]",
        {
            "allocations": [ref(2)],
            "transfers": [transfer(ref(0), ref(2)), transfer(ref(0), ref(1))],
        },
    ),
    "a transfer into a block not allocated": (
        StaleGenerationError,
        f"{_TRANSFERS}.destination_generations[0]",
        {"transfers": [transfer(ref(0), ref(1))]},
    ),
    "a transfer into another generation": (
        StaleGenerationError,
        f"{_TRANSFERS}.destination_generations[0]",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(0), ref(2, 2))]},
    ),
    "a transfer from an old generation": (
        StaleGenerationError,
        f"{_TRANSFERS}.source_generations[0]",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(0, 7), ref(2))]},
    ),
    "a transfer from a block never allocated": (
        StaleGenerationError,
        f"{_TRANSFERS}.source_generations[0]",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(5, 0), ref(2))]},
    ),
    "a transfer from nowhere": (
        InvalidRequestError,
        f"{_TRANSFERS}.source_indices[0]",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(HUGE_INDEX), ref(2))]},
    ),
    "a transfer to no tier": (
        InvalidRequestError,
        f"{_TRANSFERS}.destination_tiers[0]",
        {"transfers": [transfer(ref(0), ref(2, 1, pb.TIER_UNSPECIFIED))]},
    ),
    "a transfer to itself": (
        InvalidRequestError,
        f"{_TRANSFERS}.destination_indices[0]",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(2), ref(2))]},
    ),
    "a transfer inside the host tier": (
        InvalidRequestError,
        f"{_TRANSFERS}.destination_tiers[0]",
        {
            "changes": [set_blocks(2, [(0, 1), (1, 1)], tier=HOST)],
            "transfers": [transfer(ref(0, 1, HOST), ref(1, 1, HOST))],
        },
    ),
    "a transfer of another group": (
        InvalidRequestError,
        f"{_TRANSFERS}.groups[0]",
        {
            "changes": [set_blocks(2, [(2, 1)])],
            "transfers": plan_pb2.Transfers(
                groups=b"\1", **_columns(pack_transfers([transfer(ref(0), ref(2))]))
            ),
        },
    ),
}


def _cut_columns() -> dict[str, tuple[type[KvplaneError], str, dict[str, Any]]]:
    """Yield each column of each message, one byte short."""
    whole: dict[str, Any] = {
        "changes": pack_changes([set_blocks(2, [(2, 1)]), fork(3, 2, 1)]),
        "transfers": pack_transfers([transfer(ref(0), ref(2))]),
        "spans": pack_spans([span(1, 12, 1)]),
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
