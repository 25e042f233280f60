"""Only what this pool's control plane signed for this very process is read."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from data_plane.plans.verifier import Verifier
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    KvplaneError,
    PoolNotReadyError,
    ProtocolMismatchError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import POOL_ID, PlanAuthor
from tests.helpers.refusals import refused

EPOCHS = {"shard_epochs": [5, 6]}


def pair() -> tuple[Verifier, PlanAuthor]:
    """Shard 1 of 2, of epoch 6, and who signs for it with incarnation 3."""
    verifier = Verifier(POOL_ID, 1, 2, epoch=6)
    author = PlanAuthor(epoch=6, incarnation=3)
    verifier.install(3, author.key)
    return verifier, author


def test_what_was_signed_for_this_process_is_read() -> None:
    verifier, author = pair()
    signed = author.plan(4, **EPOCHS)
    plan, digest = verifier.plan(signed)
    assert (plan.number, digest) == (4, hashlib.sha256(signed.payload).digest())
    assert verifier.grant(author.grant(9, **EPOCHS)).ordinal == 9


BAD: dict[str, tuple[dict[str, Any], type[KvplaneError], str]] = {
    "another version": ({"version": 9}, ProtocolMismatchError, "version"),
    "another pool": ({"pool_id": "other"}, InvalidRequestError, "pool_id"),
    "no shards": ({"shard_epochs": []}, InvalidRequestError, "shard_epochs"),
    "fewer shards": ({"shard_epochs": [6]}, InvalidRequestError, "shard_epochs"),
    "more shards": ({"shard_epochs": [5, 6, 7]}, InvalidRequestError, "shard_epochs"),
    "another epoch": ({"shard_epochs": [6, 5]}, StaleEpochError, "shard_epochs[1]"),
    **{
        name: (
            {"session": pb.SessionRef(incarnation=incarnation, session_id=1)},
            StaleIncarnationError,
            "session.incarnation",
        )
        for name, incarnation in (("an older incarnation", 2), ("a newer incarnation", 9))
    },
}


@pytest.mark.parametrize("reason", BAD)
def test_a_payload_for_others_is_refused_by_its_field(reason: str) -> None:
    verifier, author = pair()
    fields, error, field = BAD[reason]
    for read, signed, name in (
        (verifier.plan, author.plan(1, **{**EPOCHS, **fields}), "plan"),
        (verifier.grant, author.grant(1, **{**EPOCHS, **fields}), "grant"),
    ):
        with refused(error, f"{name}.{field}"):
            read(signed)


@pytest.mark.parametrize(
    ("version", "behind"), [(9, "update this data plane"), (0, "update the control plane")]
)
def test_an_unknown_payload_version_says_which_side_to_update(version: int, behind: str) -> None:
    verifier, author = pair()
    with pytest.raises(ProtocolMismatchError, match=behind):
        verifier.plan(author.plan(1, version=version, **EPOCHS))


def test_bytes_that_were_changed_or_signed_for_another_use_are_refused() -> None:
    verifier, author = pair()
    changed = author.plan(1, **EPOCHS)
    changed.payload += b"\0"
    for signed in (changed, author.grant(1, **EPOCHS)):
        with pytest.raises(BadSignatureError):
            verifier.plan(signed)


def test_signed_bytes_that_are_no_plan_or_more_than_one_are_refused() -> None:
    verifier, author = pair()
    for payload in (b"\xff", author.plan(1, **EPOCHS).payload + b"\xc2\x3e\x01x"):
        with refused(InvalidRequestError, "plan.payload"):
            verifier.plan(author.sign(signing.PLAN, payload))


def test_a_plan_of_an_earlier_key_is_called_stale_where_it_says_for_whom_it_is() -> None:
    """Opening another session helps then; a forged one is called forged."""
    verifier, _ = pair()
    other = PlanAuthor(epoch=6, incarnation=2)
    with pytest.raises(StaleIncarnationError):
        verifier.plan(other.plan(1, **EPOCHS))
    with pytest.raises(StaleEpochError):
        verifier.plan(other.plan(1, shard_epochs=[5, 4]))
    forged = PlanAuthor(epoch=6, incarnation=3)
    with pytest.raises(BadSignatureError):
        verifier.plan(forged.plan(1, **EPOCHS))


def test_nothing_is_read_before_there_is_a_key() -> None:
    verifier = Verifier(POOL_ID, 0, 1)
    assert verifier.key_id == b""
    with pytest.raises(PoolNotReadyError) as refused:
        verifier.plan(PlanAuthor(verifier.epoch).plan(1))
    assert refused.value.retry_delay_s


def test_a_replaced_control_plane_is_refused_and_its_key_not_taken() -> None:
    verifier, author = pair()
    for incarnation, key, field in ((2, signing.new_key(), "incarnation"), (4, b"short", "key")):
        with refused((StaleIncarnationError, InvalidRequestError), field):
            verifier.install(incarnation, key)
    assert (verifier.incarnation, verifier.key_id) == (3, signing.key_id(author.key))
    verifier.install(3, signing.new_key())
    assert verifier.key_id != signing.key_id(author.key)


def test_a_receipt_is_signed_by_this_process_for_its_plan() -> None:
    verifier, author = pair()
    receipt = author.read_receipt(verifier.receipt(author.session(7), 4, b"digest", version=3))
    assert receipt == plan_pb2.Receipt(
        version=3,
        session=author.session(7),
        pool_id=POOL_ID,
        shard_index=1,
        epoch=6,
        plan_number=4,
        plan_digest=b"digest",
    )


def test_each_process_and_each_verifier_in_it_has_a_higher_epoch() -> None:
    epochs = [Verifier(POOL_ID, 0, 1).epoch for _ in range(5)]
    assert epochs == sorted(set(epochs))
    with refused(InvalidRequestError, "epoch"):
        Verifier(POOL_ID, 0, 1, epoch=2**64)
