"""Plans that an executor must refuse: why, the error, the field it names, and what is wrong.

They follow plan 1, which admitted sequence 1 to device blocks 0 and 1 and wrote 12 tokens.
"""

from __future__ import annotations

from typing import Any

from plan_author import DEVICE, HOST, drop, fork, ref, row, set_blocks, transfer

from kvplane.errors import (
    BlockNotWritableError,
    InvalidRequestError,
    KvplaneError,
    PlanOutOfOrderError,
    SequenceNotFoundError,
    SequenceSwappedError,
    StaleEpochError,
    StaleGenerationError,
    StaleIncarnationError,
)
from kvplane.v1 import types_pb2 as pb

HUGE = 2**63 - 1

BAD_PLANS: dict[str, tuple[type[KvplaneError], str, dict[str, Any]]] = {
    "another pool": (InvalidRequestError, "plan.pool_id", {"pool_id": "other"}),
    "no epochs": (InvalidRequestError, "plan.shard_epochs", {"shard_epochs": []}),
    "too many epochs": (InvalidRequestError, "plan.shard_epochs", {"shard_epochs": [1, 2]}),
    "an older epoch": (StaleEpochError, "plan.shard_epochs[0]", {"shard_epochs": [1]}),
    "an older incarnation": (StaleIncarnationError, "plan.incarnation", {"incarnation": 0}),
    "a newer incarnation": (StaleIncarnationError, "plan.incarnation", {"incarnation": 9}),
    "another session": (InvalidRequestError, "plan.session_id", {"session_id": 2}),
    "number 0": (InvalidRequestError, "plan.number", {"number": 0}),
    "a negative number": (InvalidRequestError, "plan.number", {"number": -5}),
    "the largest number": (InvalidRequestError, "plan.number", {"number": HUGE}),
    "a skipped plan": (PlanOutOfOrderError, "plan.previous", {"number": 4, "previous": 3}),
    "an earlier branch": (PlanOutOfOrderError, "plan.previous", {"previous": 0}),
    "an unknown sequence in a row": (
        SequenceNotFoundError,
        "plan.rows[0].sequence_id",
        {"rows": [row(9, 0, 1)]},
    ),
    "a sequence in two rows": (
        InvalidRequestError,
        "plan.rows[1].sequence_id",
        {"rows": [row(1, 12, 1), row(1, 13, 1)]},
    ),
    "a row past its table": (
        InvalidRequestError,
        "plan.rows[0].num_tokens",
        {"rows": [row(1, 12, 5)]},
    ),
    "a row of no tokens": (
        InvalidRequestError,
        "plan.rows[0].num_tokens",
        {"rows": [row(1, 12, 0)]},
    ),
    "a row of negative tokens": (
        InvalidRequestError,
        "plan.rows[0].num_tokens",
        {"rows": [row(1, 12, -1)]},
    ),
    "a huge row": (InvalidRequestError, "plan.rows[0].num_tokens", {"rows": [row(1, 0, HUGE)]}),
    "a negative position": (
        InvalidRequestError,
        "plan.rows[0].first_position",
        {"rows": [row(1, -1, 1)]},
    ),
    "a huge position": (
        InvalidRequestError,
        "plan.rows[0].first_position",
        {"rows": [row(1, HUGE, 1)]},
    ),
    "a row on the host tier": (
        SequenceSwappedError,
        "plan.rows[0].sequence_id",
        {"changes": [set_blocks(2, [(0, 1)], tier=HOST)], "rows": [row(2, 0, 1)]},
    ),
    "no such device block": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.indices[1]",
        {"changes": [set_blocks(2, [(2, 1), (8, 1)])]},
    ),
    "a negative block": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.indices[0]",
        {"changes": [set_blocks(2, [(-1, 1)])]},
    ),
    "no such host block": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.indices[0]",
        {"changes": [set_blocks(2, [(4, 1)], tier=HOST)]},
    ),
    "more blocks than the pool": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.indices",
        {"changes": [set_blocks(2, [(i % 8, 1) for i in range(9)])]},
    ),
    "no tier": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.tier",
        {"changes": [set_blocks(2, [(0, 1)], tier=pb.TIER_UNSPECIFIED)]},
    ),
    "another tier without replace": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.tier",
        {"changes": [set_blocks(1, [(0, 1)], tier=HOST)]},
    ),
    "a gap in a table": (
        InvalidRequestError,
        "plan.changes[0].set.first_block",
        {"changes": [set_blocks(1, [(2, 1)], first_block=3)]},
    ),
    "a negative first block": (
        InvalidRequestError,
        "plan.changes[0].set.first_block",
        {"changes": [set_blocks(1, [(2, 1)], first_block=-1)]},
    ),
    "fewer generations than blocks": (
        InvalidRequestError,
        "plan.changes[0].set.blocks.generations",
        {
            "changes": [
                pb.TableChange(
                    sequence_id=2,
                    set=pb.SetBlocks(blocks=pb.Blocks(tier=DEVICE, indices=[2]), fresh=[True]),
                )
            ]
        },
    ),
    "fewer flags than blocks": (
        InvalidRequestError,
        "plan.changes[0].set.fresh",
        {"changes": [set_blocks(2, [(2, 1)], fresh=[])]},
    ),
    "an old generation": (
        StaleGenerationError,
        "plan.changes[0].set.blocks.generations[0]",
        {"changes": [set_blocks(2, [(0, 2)], fresh=False)]},
    ),
    "a block never handed out": (
        StaleGenerationError,
        "plan.changes[0].set.blocks.generations[0]",
        {"changes": [set_blocks(2, [(5, 0)], fresh=False)]},
    ),
    "a fresh block of its present generation": (
        StaleGenerationError,
        "plan.changes[0].set.blocks.generations[0]",
        {"changes": [set_blocks(2, [(0, 1)])]},
    ),
    "a fresh block of the largest generation": (
        StaleGenerationError,
        "plan.changes[0].set.blocks.generations[0]",
        {"changes": [set_blocks(2, [(5, HUGE)])]},
    ),
    "a fresh block that an own table keeps naming": (
        StaleGenerationError,
        "plan.changes",
        {"changes": [set_blocks(2, [(0, 2)])]},
    ),
    "a group that is not there": (
        InvalidRequestError,
        "plan.changes[0].group",
        {"changes": [pb.TableChange(sequence_id=1, group=1, drop=pb.DropTable())]},
    ),
    "a change of nothing": (
        InvalidRequestError,
        "plan.changes[0].change",
        {"changes": [pb.TableChange(sequence_id=1)]},
    ),
    "sequence 0": (InvalidRequestError, "plan.changes[0].sequence_id", {"changes": [drop(0)]}),
    "a drop of nothing": (
        SequenceNotFoundError,
        "plan.changes[0].sequence_id",
        {"changes": [drop(4)]},
    ),
    "a fork of nothing": (
        SequenceNotFoundError,
        "plan.changes[0].fork.parent_sequence_id",
        {"changes": [fork(2, 7, 1)]},
    ),
    "a fork of itself": (
        InvalidRequestError,
        "plan.changes[0].fork.parent_sequence_id",
        {"changes": [fork(1, 1, 1)]},
    ),
    "a fork of more than there is": (
        InvalidRequestError,
        "plan.changes[0].fork.num_blocks",
        {"changes": [fork(2, 1, 3)]},
    ),
    "a write to a shared block": (
        BlockNotWritableError,
        "plan.rows[0]",
        {"changes": [fork(2, 1, 2)], "rows": [row(2, 12, 1)]},
    ),
    "a transfer into a block not handed out": (
        StaleGenerationError,
        "plan.transfers[0].destination.generation",
        {"transfers": [transfer(ref(0), ref(1))]},
    ),
    "a transfer from an old generation": (
        StaleGenerationError,
        "plan.transfers[0].source.generation",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(0, 7), ref(2))]},
    ),
    "a transfer from nowhere": (
        InvalidRequestError,
        "plan.transfers[0].source.index",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(HUGE), ref(2))]},
    ),
    "a transfer to itself": (
        InvalidRequestError,
        "plan.transfers[0].destination.index",
        {"changes": [set_blocks(2, [(2, 1)])], "transfers": [transfer(ref(2), ref(2))]},
    ),
    "a transfer inside the host tier": (
        InvalidRequestError,
        "plan.transfers[0].destination.tier",
        {
            "changes": [set_blocks(2, [(0, 1), (1, 1)], tier=HOST)],
            "transfers": [transfer(ref(0, 1, HOST), ref(1, 1, HOST))],
        },
    ),
    "a transfer of another group": (
        InvalidRequestError,
        "plan.transfers[0].group",
        {
            "changes": [set_blocks(2, [(2, 1)])],
            "transfers": [pb.Transfer(group=1, source=ref(0), destination=ref(2))],
        },
    ),
}
