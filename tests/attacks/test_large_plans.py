"""Plans of a few bytes that claim gigabytes, signed with the pool's key: refused by name and
counted, before memory is taken for what they claim.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    fork,
    pack_changes,
    set_blocks,
    span,
)
from tests.helpers.served import served

NUM_BLOCKS = 2048
NUM_FORKS = 1000
MAX_GROWTH_BYTES = 48 << 20


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def entries_that_are_not_sent() -> dict[str, object]:
    changes = pack_changes([set_blocks(1, [])] * 4)
    changes.num_blocks = columns.pack(columns.INT32, [1 << 22] * 4)
    return {"changes": changes}


def trimmed_entries() -> dict[str, object]:
    num = 100
    return {
        "changes": plan_pb2.TableChanges(
            kinds=bytes([plan_pb2.TABLE_CHANGE_KIND_REPLACE]) * num,
            sequence_ids=columns.pack(columns.INT64, range(1, num + 1)),
            tiers=bytes([DEVICE]) * num,
            first_blocks=columns.pack(columns.INT32, [1 << 20] * num),
            num_blocks=bytes(4 * num),
        )
    }


def slots_that_are_not_there() -> dict[str, object]:
    """Each of many forks is to write all that they share."""
    ids = range(2, NUM_FORKS + 2)
    blocks = [(i, 1) for i in range(NUM_BLOCKS)]
    return {
        "changes": [set_blocks(1, blocks), *(fork(i, 1, NUM_BLOCKS) for i in ids)],
        "spans": [span(i, 0, NUM_BLOCKS * BLOCK_SIZE) for i in ids],
    }


CLAIMS = {
    "plan.changes.indices": entries_that_are_not_sent,
    "plan.changes.first_blocks": trimmed_entries,
    "plan.spans.num_tokens": slots_that_are_not_there,
}


@pytest.mark.parametrize("field", CLAIMS)
async def test_a_claim_is_refused_before_memory_is_taken(tmp_path: Path, field: str) -> None:
    async with served(tmp_path, num_device_blocks=NUM_BLOCKS) as plane:
        plan = plane.author.plan(1, **CLAIMS[field]())
        tracemalloc.reset_peak()
        begin_bytes, _ = tracemalloc.get_traced_memory()
        with pytest.raises(InvalidRequestError) as refused:
            await plane.ask("CopyBlocks", plan=plan)
        _, peak_bytes = tracemalloc.get_traced_memory()
        assert refused.value.field.partition("[")[0] == field
        assert plane.server.metrics.rpc.rejected.values["INVALID_REQUEST",] == 1
        assert peak_bytes - begin_bytes < MAX_GROWTH_BYTES
        honest = plane.author.plan(1, changes=[set_blocks(1, [(0, 1)])])
        await plane.ask("CopyBlocks", plan=honest)
