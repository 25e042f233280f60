"""What the executor refuses. Each refusal names its field; memory and tables stay as they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvplane.attention_options import AttentionOptions
from kvplane.errors import (
    BadSignatureError,
    BlockNotWritableError,
    InvalidRequestError,
    PlanConflictError,
    PlanOutOfOrderError,
    ProtocolMismatchError,
    SessionExpiredError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.wire import columns, signing
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.bad_plans import BAD_PLANS, HUGE
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    HOST,
    PlanAuthor,
    drop,
    fork,
    publications,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Sequence 1 holds 12 tokens in device blocks 0 and 1; plan 1 has run. At the end the session
    must still be able to run a plan.
    """
    rig = Rig()
    rig.admit(1)
    yield rig
    latest = rig.executor._sessions.get(1).latest
    assert latest is not None
    number = latest.number + 1
    changes = [set_blocks(50, [(7, 99)])]
    assert (
        rig.run(number, resync=True, changes=changes, spans=[span(50, 0, 3)]).plan_number == number
    )
    rig.executor.check_integrity()


@pytest.mark.parametrize("name", BAD_PLANS)
def test_a_plan_is_refused_for(rig: Rig, name: str) -> None:
    error, field, fields = BAD_PLANS[name]
    plan = rig.author.plan(**{"number": 2, "previous": 1, **fields})
    with rig.refuses(error, field):
        rig.executor.start(1, plan)
    assert rig.executor.counters.num_rejections == {error("").reason: 1}


@pytest.mark.parametrize(
    "bad",
    [
        {"changes": [set_blocks(30, [(2, 1), (99, 1)])]},
        {"transfers": [transfer(ref(99), ref(6, 3))]},
        {"spans": [span(1, 0, 99)]},
    ],
)
def test_a_refused_plan_undoes_the_changes_that_came_before_the_bad_part(
    rig: Rig, bad: dict[str, Any]
) -> None:
    rig.publish(0)
    good = [
        set_blocks(21, [(6, 3), (7, 4)]),
        fork(22, 21, 1),
        drop(21),
        set_blocks(23, [(3, 9)], tier=HOST),
        drop(1),
        set_blocks(24, [(0, 2)]),
        set_blocks(1, [(1, 1)], allocated=False),
    ]
    with rig.refuses(InvalidRequestError):
        rig.start(2, **{**bad, "changes": [*good, *bad.get("changes", [])]})
    assert rig.executor.blocks.num_published == 1
    assert rig.run(2, changes=good).plan_number == 2, "the good part alone is a plan"


SPOILERS: dict[str, Callable[[pb.SignedPayload], pb.SignedPayload]] = {
    "a flipped bit": lambda s: pb.SignedPayload(
        type=s.type,
        payload=s.payload[:-1] + bytes([s.payload[-1] ^ 1]),
        signature=s.signature,
    ),
    "truncated bytes": lambda s: pb.SignedPayload(
        type=s.type, payload=s.payload[:-3], signature=s.signature
    ),
    "no bytes": lambda s: pb.SignedPayload(type=s.type, signature=s.signature),
    "no signature": lambda s: pb.SignedPayload(type=s.type, payload=s.payload),
    "half a signature": lambda s: pb.SignedPayload(
        type=s.type, payload=s.payload, signature=s.signature[:16]
    ),
    "another type": lambda s: pb.SignedPayload(
        type=signing.RECEIPT, payload=s.payload, signature=s.signature
    ),
    "no type": lambda s: pb.SignedPayload(payload=s.payload, signature=s.signature),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_plan_and_a_grant_are_refused_with(rig: Rig, name: str) -> None:
    plan = rig.author.plan(2, spans=[span(1, 12, 1)])
    with rig.refuses(BadSignatureError):
        rig.executor.start(1, SPOILERS[name](plan))
    with rig.refuses(BadSignatureError):
        rig.executor.open(SPOILERS[name](rig.author.grant(2)))


def test_a_plan_signed_with_another_key_is_refused(rig: Rig) -> None:
    forger = PlanAuthor(rig.executor.epoch)
    with rig.refuses(BadSignatureError, "plan.signature"):
        rig.executor.start(1, forger.plan(2, spans=[span(1, 12, 1)]))


def test_a_receipt_does_not_pass_for_a_plan(rig: Rig) -> None:
    receipt = rig.executor.receipt(1)
    assert receipt is not None
    with rig.refuses(BadSignatureError, "plan.type"):
        rig.executor.start(1, receipt)
    as_plan = pb.SignedPayload(
        type=signing.PLAN, payload=receipt.payload, signature=receipt.signature
    )
    with rig.refuses(BadSignatureError, "plan.signature"):
        rig.executor.start(1, as_plan)


def test_signed_bytes_that_are_no_plan_are_refused(rig: Rig) -> None:
    with rig.refuses(InvalidRequestError, "plan.payload"):
        rig.executor.start(1, rig.author.sign(signing.PLAN, b"\xff\xff\xff"))


def test_a_plan_of_an_earlier_run_is_called_stale_and_not_forged(rig: Rig) -> None:
    former = PlanAuthor(epoch=12345)
    with rig.refuses(StaleEpochError):
        rig.executor.start(1, former.plan(2))
    former = PlanAuthor(rig.executor.epoch, incarnation=0)
    with rig.refuses(StaleIncarnationError):
        rig.executor.start(1, former.plan(2))


def test_the_same_number_with_another_content_is_a_conflict(rig: Rig) -> None:
    with rig.refuses(PlanConflictError, "plan.number"):
        rig.start(1, previous=0)
    rig.start(2, spans=[span(1, 12, 1)])
    with rig.refuses(PlanConflictError, "plan.number"):
        rig.start(2, spans=[span(1, 12, 2)])


def test_a_replayed_plan_of_a_closed_session_is_refused(rig: Rig) -> None:
    rig.open(2)
    plan = rig.author.plan(1, 2, changes=[set_blocks(1, [(5, 1)])])
    rig.executor.start(2, plan)
    rig.fence(2)
    with rig.refuses(SessionExpiredError):
        rig.executor.start(2, plan)
    with rig.refuses(SessionExpiredError):
        rig.executor.start(rig.author.grant(2), plan)


def test_a_plan_is_refused_while_another_runs(rig: Rig) -> None:
    rig.start(2, spans=[span(1, 12, 1)])
    with rig.refuses(PlanOutOfOrderError, "plan.previous"):
        rig.start(3, spans=[span(1, 13, 1)])


def test_a_write_to_a_block_published_after_the_plan_started_is_refused(rig: Rig) -> None:
    rig.start(2, spans=[span(1, 12, 1)])
    rig.publish(1)
    with rig.refuses(BlockNotWritableError):
        rig.layer(0, 1)
    with rig.refuses(BlockNotWritableError):
        rig.executor.layer(1, 0, None, tokens(1), tokens(1), **of_latest(rig.executor))
    with rig.refuses(BlockNotWritableError):
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
    rig.start(2, spans=[span(1, 12, 1)])
    values: dict[str, Any] = {"layer": 0, "query": Q, "key": K, "value": K, **arguments}
    with rig.refuses(InvalidRequestError, field):
        rig.executor.layer(1, **values, **of_latest(rig.executor))
    rig.layer(0, 1)
    rig.layer(1, 1)


def test_a_layer_that_was_not_written_is_not_attended(rig: Rig) -> None:
    rig.start(2, spans=[span(1, 12, 1)])
    with rig.refuses(InvalidRequestError, "layer"):
        rig.executor.layer(1, 0, Q, None, None, **of_latest(rig.executor))
    rig.layer(0, 1)
    assert rig.executor.layer(1, 0, Q, None, None, **of_latest(rig.executor)) is not None
    with rig.refuses(InvalidRequestError, "layer"):
        rig.executor.layer(1, 1, Q, None, None, **of_latest(rig.executor))


def test_a_layer_for_another_plan_than_the_latest_is_refused(rig: Rig) -> None:
    rig.start(2, spans=[span(1, 12, 1)])
    with rig.refuses(PlanOutOfOrderError, "plan_number"):
        rig.executor.layer(1, 0, Q, K, K, plan_number=1)


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
        ("sequence_id", 9, 1, (2, 1, 2, 2, 8, 16)),
        ("entries", 1, 0, (2, 1, 2, 2, 8, 16)),
        ("entries", 1, -1, (2, 1, 2, 2, 8, 16)),
        ("entries", 1, HUGE, (2, 1, 2, 2, 8, 16)),
        ("blocks", 1, 1, (1, 1, 2, 2, 8, 16)),
        ("blocks", 1, 1, (2, 1, 2, 2, 16)),
        ("entries", 1, 1, (2, 0, 2, 2, 8, 16)),
    ],
)
def test_blocks_that_hold_nothing_of_the_span_are_refused(
    rig: Rig, field: str, sequence: int, first: int, shape: tuple[int, ...]
) -> None:
    rig.start(2, spans=[span(1, 12, 1)])
    with rig.refuses(InvalidRequestError, field):
        rig.executor.write_blocks(1, sequence, first, torch.zeros(shape))


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("grant.pool_id", {"pool_id": "other"}),
        ("grant.session.session_id", {"session": pb.SessionRef(incarnation=1)}),
        (
            "grant.session.session_id",
            {"session": pb.SessionRef(incarnation=1, session_id=2**53)},
        ),
        ("grant.ordinal", {"ordinal": 0}),
        ("grant.ordinal", {"ordinal": HUGE}),
        ("grant.max_plans_in_flight", {"max_plans_in_flight": 0}),
        ("grant.max_plans_in_flight", {"max_plans_in_flight": 2**31 - 1}),
        ("grant.shard_epochs", {"shard_epochs": []}),
    ],
)
def test_a_grant_is_refused_for(rig: Rig, field: str, fields: dict[str, Any]) -> None:
    with rig.refuses(InvalidRequestError, field):
        rig.executor.open(rig.author.grant(**{"session_id": 2, **fields}))


@pytest.mark.parametrize("version", [0, 2])
def test_a_grant_of_another_version_is_refused(rig: Rig, version: int) -> None:
    with rig.refuses(ProtocolMismatchError, "grant.version"):
        rig.executor.open(rig.author.grant(2, version=version))


# Field 99, of the wire type of numbers, and field 98 inside of field 8: a column of tomorrow.
UNKNOWN = {"a field": b"\x98\x06\x01", "a column": b"\x42\x04\x92\x06\x01\x00"}


@pytest.mark.parametrize(
    ("name", "at"), [("a field", "plan.payload"), ("a column", "plan.payload.changes")]
)
def test_a_plan_with_a_field_unknown_here_is_refused(rig: Rig, name: str, at: str) -> None:
    payload = rig.author.plan(2, spans=[span(1, 12, 1)]).payload + UNKNOWN[name]
    with rig.refuses(InvalidRequestError, at):
        rig.executor.start(1, rig.author.sign(signing.PLAN, payload))


def test_a_grant_with_a_field_unknown_here_is_refused(rig: Rig) -> None:
    payload = rig.author.grant(2).payload + UNKNOWN["a field"]
    with rig.refuses(InvalidRequestError, "grant.payload"):
        rig.executor.open(rig.author.sign(signing.GRANT, payload))


@pytest.mark.parametrize(
    ("field", "spoiled"),
    [
        ("indices[1]", {"indices": columns.pack(columns.INT32, [0, 8])}),
        ("indices[0]", {"indices": columns.pack(columns.INT32, [-1, 1])}),
        ("indices", {"indices": b"\0" * 7}),
        ("generations[1]", {"generations": columns.pack(columns.INT64, [1, 0])}),
        ("generations", {"generations": b"\0" * 8}),
        ("parent_indices[0]", {"parent_indices": columns.pack(columns.INT32, [-2, 0])}),
        ("parent_indices[1]", {"parent_indices": columns.pack(columns.INT32, [-1, 8])}),
        (
            "parent_generations[1]",
            {"parent_generations": columns.pack(columns.INT64, [0, 0])},
        ),
        (
            "parent_generations[1]",
            {"parent_generations": columns.pack(columns.INT64, [0, -1])},
        ),
        ("group", {"group": 1}),
        ("hashes", {"hashes": b"short"}),
        ("token_ids", {"token_ids": b"\0" * 4}),
        ("namespace", {"namespace": "n" * 257}),
    ],
)
def test_publications_are_refused_whole_for(rig: Rig, field: str, spoiled: dict[str, Any]) -> None:
    message = publications((0, 1), (1, 1))
    for name, value in spoiled.items():
        setattr(message, name, value)
    with rig.refuses(InvalidRequestError, f"publications.{field}"):
        rig.executor.publish(message)


@pytest.mark.parametrize(
    ("field", "layers"),
    [
        ("first_layer", {"first_layer": 1}),
        ("first_layer", {"first_layer": 2, "num_layers": 1}),
        ("first_layer", {"first_layer": -1, "num_layers": 1}),
        ("num_layers", {"first_layer": 1, "num_layers": 2}),
        ("num_layers", {"num_layers": -1}),
    ],
)
def test_layers_that_are_not_held_are_neither_read_nor_written(
    rig: Rig, field: str, layers: dict[str, int]
) -> None:
    rig.start(2, spans=[span(1, 12, 1)])
    with rig.refuses(InvalidRequestError, field):
        rig.executor.read_blocks(1, 1, [0], **layers)
    with rig.refuses(InvalidRequestError, field):
        rig.executor.write_blocks(1, 1, 1, torch.zeros(2, 1, 2, 2, 8, 16), **layers)
