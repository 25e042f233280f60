"""Faults of pools that are divided among shards, each of which a test of them must notice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from control_plane import core
from control_plane.pools.pool import Pool
from control_plane.pools.shards import PoolShards
from control_plane.sessions import silent_shards
from control_plane.sessions.session import Session
from control_plane.sessions.sessions import Sessions
from engine.parallel import model_part
from kvplane import AttentionOptions, Tensor
from kvplane.errors import KvplaneError
from kvplane.execution import execution
from kvplane.shard import QueryHeads
from tests.helpers.patched_faults import Run, alone, assert_noticed, load

SILENT = load("unit/registration/test_silent_shards.py")
SHARDS = load("unit/registration/test_shards.py")
EXECUTION = load("rpc/test_sharded_execution.py")
PARTS = load("models/test_model_parts.py")


def long_plans_are_lost(patch: pytest.MonkeyPatch) -> None:
    """A plan that nobody has receipted yet counts as one that a shard has not."""

    def is_late(session: Session, since_s: float) -> bool:
        return any(record.made_s <= since_s for record in session.plans.values())

    patch.setattr(silent_shards, "_is_late", is_late)


def one_session_ends_all(patch: pytest.MonkeyPatch) -> None:
    """What a session says of a shard is believed, for all others too."""

    def lost(pool: Pool, sessions: list[Session], timeout_s: float) -> list[Session]:
        return sessions if silent_shards.lost_sessions(pool, sessions, timeout_s) else []

    patch.setattr(core, "lost_sessions", lost)


def closed_sessions_accuse_shards(patch: pytest.MonkeyPatch) -> None:
    """A shard that does not fence a closed session counts as silent."""

    def end(self: Sessions, session: Session, reason: type[KvplaneError]) -> None:
        original(self, session, reason)
        session.pool.shards.ended[session.id].lacks_receipt = True

    original = Sessions.end
    patch.setattr(Sessions, "end", end)


def silent_shards_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A shard that neither receipts nor fences holds up its pool forever."""
    patch.setattr(Pool, "silent_shards", property(lambda self: set()))


def copies_may_lack_the_first(patch: pytest.MonkeyPatch) -> None:
    """A pool is ready although nobody computes some of its query heads."""
    patch.setattr(PoolShards, "_hold_everything", lambda self: len(self.states) == self.num_shards)


def copies_compute_the_same_heads(patch: pytest.MonkeyPatch) -> None:
    """Every copy of a KV head computes all its query heads."""

    def ranges(self: QueryHeads, num_heads: int) -> list[range]:
        of_kv_head = num_heads // self.num_model_kv_heads
        return [range(self.kv_heads.start * of_kv_head, self.kv_heads.stop * of_kv_head)]

    patch.setattr(QueryHeads, "ranges", ranges)


def outputs_joined_as_they_come(patch: pytest.MonkeyPatch) -> None:
    """Shards' outputs are put one after another, tokens and heads."""

    def join(parts: list[tuple[Tensor, list[range]]]) -> Tensor:
        first = parts[0][0]
        num_heads = sum(tensor.shape[1] for tensor, _ in parts)
        data = b"".join(bytes(tensor.data) for tensor, _ in parts)
        return Tensor(first.dtype, (first.shape[0], num_heads, first.shape[2]), data)

    patch.setattr(execution, "join_heads", join)


def options_of_the_first_heads(patch: pytest.MonkeyPatch) -> None:
    """Every shard attends with the slopes and sinks of the first."""
    original = AttentionOptions.of_heads

    def of_heads(self: AttentionOptions, heads: list[range]) -> AttentionOptions:
        return original(self, [range(sum(len(each) for each in heads))])

    patch.setattr(AttentionOptions, "of_heads", of_heads)


def biases_added_by_all(patch: pytest.MonkeyPatch) -> None:
    """Each rank adds the bias of a layer whose outputs are summed."""

    def cut(module, part, group) -> None:
        bias = module.bias
        original(module, part, group)
        module.bias = bias

    original = model_part._cut_rows
    patch.setattr(model_part, "_cut_rows", cut)


def same_bits(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Layouts with and without copies."""
    for layout in (EXECUTION.LAYOUT, EXECUTION.LATENT_LIKE):
        test = EXECUTION.test_attention_has_the_same_bits_however_the_pool_is_divided
        asyncio.run(test(folder, layout))


def biased_model(folder: Path, patch: pytest.MonkeyPatch) -> None:
    PARTS.test_the_parts_compute_what_the_whole_does(folder, "starcoder2")


NOTICED_BY: dict[Callable[[pytest.MonkeyPatch], None], Run] = {
    long_plans_are_lost: alone(SILENT.test_a_plan_that_no_shard_has_receipted_is_only_long),
    one_session_ends_all: alone(SILENT.test_a_missing_receipt_ends_its_session_alone),
    closed_sessions_accuse_shards: alone(SILENT.test_a_session_that_closes_slowly_harms_nobody),
    silent_shards_are_waited_for: alone(
        SILENT.test_a_shard_that_does_not_fence_such_a_session_either_ends_all
    ),
    copies_may_lack_the_first: alone(
        SHARDS.test_copies_of_a_part_do_not_overlap_and_are_numbered_without_gaps
    ),
    copies_compute_the_same_heads: same_bits,
    outputs_joined_as_they_come: same_bits,
    options_of_the_first_heads: same_bits,
    biases_added_by_all: biased_model,
}


@pytest.mark.parametrize("fault", NOTICED_BY, ids=lambda fault: fault.__name__)
def test_a_fault_of_shards_is_noticed(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert_noticed(fault, NOTICED_BY[fault], monkeypatch, tmp_path)
