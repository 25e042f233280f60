"""Deferred tokens: ids of tokens whose slots were reserved and written without them."""

from __future__ import annotations

import pytest

from control_plane.steps.requests import take_deferred_tokens
from kvplane import ops
from kvplane.errors import InvalidRequestError, KvplaneError, SequenceNotFoundError
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import pack
from tests.helpers.core.core_model import Engine, World
from tests.helpers.refusals import refused


def test_a_fork_that_is_given_other_tokens_for_shared_slots_leaves_no_entry_behind() -> None:
    """One of both is wrong, and nobody knows which: only the first is published."""
    engine = World().engine()
    engine.admit(1, range(10))
    engine.step(engine.growth(1, num_slots=6))
    engine.step(ops.fork(1, 2))
    engine.run_all()
    one = ops.deferred_tokens([1], [1], [10], [6], pack([50] * 6))
    engine.submit(engine.receipts, deferred=one)
    native = engine.world.pool.groups[0]
    *_, num_entries = native.memory()
    other = ops.deferred_tokens([2], [engine.state(2).admitted_by], [10], [6], pack([60] * 6))
    engine.submit(deferred=other)
    assert native.memory()[-1] == num_entries
    assert engine.lookup([*range(8), 8, 9, *[50] * 6, 1]) == 16
    assert engine.lookup([*range(8), 8, 9, *[60] * 6, 1]) == 8


def test_slots_reserved_without_tokens_are_published_when_the_tokens_come() -> None:
    engine = written_without_tokens()
    prompt = [*range(7), 1, 9]
    assert engine.lookup(prompt) == 0
    engine.submit(deferred=True)
    assert engine.lookup(prompt) == 8
    engine.submit(deferred=ops.deferred_tokens([1], [1], [7], [1], [1]))  # again: nothing new
    engine = written_without_tokens()
    engine.step(engine.growth(1, [7]), ops.free([1]))
    assert engine.lookup(range(9)) == 8, "an append may bring them, in the step that frees it"


def written_without_tokens() -> Engine:
    """Sequence 1 knows tokens 0 to 6, and a slot more of it is written."""
    engine = World().engine()
    engine.admit(1, range(7))
    engine.step(engine.growth(1, num_slots=1))
    engine.run_all()
    receipts, engine.receipts = engine.receipts, []
    engine.submit(receipts)
    return engine


@pytest.mark.parametrize(
    ("deferred", "error", "field"),
    [
        (ops.deferred_tokens([9], [1], [6], [1], [0]), SequenceNotFoundError, "sequence_ids[0]"),
        (ops.deferred_tokens([1], [3], [6], [1], [0]), SequenceNotFoundError, "admitted_by[0]"),
        (ops.deferred_tokens([1], [1], [7], [1], [0]), InvalidRequestError, "first_positions[0]"),
        (ops.deferred_tokens([1], [1], [-1], [1], [0]), InvalidRequestError, "first_positions[0]"),
        (ops.deferred_tokens([1], [1], [6], [3], [0] * 3), InvalidRequestError, "num_tokens[0]"),
        (ops.deferred_tokens([1], [1], [6], [0], []), InvalidRequestError, "num_tokens[0]"),
        (ops.deferred_tokens([1], [1], [6], [1], [-2]), InvalidRequestError, "token_ids[0]"),
        (ops.deferred_tokens([1], [1], [6], [1], []), InvalidRequestError, "token_ids"),
        (ops.deferred_tokens([1], [1], [5], [2], [9, 9]), InvalidRequestError, "token_ids[0]"),
        (ops.deferred_tokens([1], [], [6], [1], [9]), InvalidRequestError, "admitted_by"),
        (ops.deferred_tokens([1], [1], [], [1], [9]), InvalidRequestError, "first_positions"),
        (ops.deferred_tokens([1], [1], [6], [], [9]), InvalidRequestError, "num_tokens"),
        (
            ops.deferred_tokens([1, 1], [1, 1], [6, 8], [1, 1], [9, 9]),
            InvalidRequestError,
            "first_positions[1]",
        ),
    ],
)
def test_wrong_deferred_tokens_fail_the_request_and_name_their_column(
    deferred: cpb.DeferredTokens, error: type[KvplaneError], field: str
) -> None:
    engine = World().engine()
    engine.admit(1, range(6))
    engine.send(engine.growth(1, num_slots=2))
    before = engine.everything()
    with refused(error, f"deferred_tokens.{field}"):
        engine.submit(deferred=deferred)
    assert engine.everything() == before


def test_one_wrong_item_spoils_the_others_and_nothing_is_known() -> None:
    engine = World().engine()
    engine.admit(1, range(6))
    second = engine.number + 1
    engine.admit(2, range(6))
    engine.send(engine.growth(1, num_slots=2), engine.growth(2, num_slots=2))
    session = engine.session
    message = ops.deferred_tokens([1, 2], [1, 9], [6, 6], [1, 1], [6, 6])
    with pytest.raises(SequenceNotFoundError):
        take_deferred_tokens(session, message, max_items=2)
    assert engine.state(1).num_tokens == 6
    message = ops.deferred_tokens([1, 1], [1, 1], [6, 7], [1, 1], [6, 7])
    take_deferred_tokens(session, message, max_items=2)
    assert engine.state(1).num_tokens == 8, "an item may follow an earlier one of its request"
    take_deferred_tokens(session, ops.deferred_tokens([2], [second], [6], [1], [6]), max_items=2)
    assert engine.state(2).num_tokens == 7
