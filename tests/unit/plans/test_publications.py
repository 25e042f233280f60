"""What is published of blocks: the last of each block's present generation, parents first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_plane.plans.tables.block_tables import Publications
from kvplane.errors import InvalidRequestError
from kvplane.wire import columns
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from tests.helpers.data.plan_author import BLOCK_SIZE, blocks_of, int32, int64, publications
from tests.helpers.refusals import refused

NUM_BLOCKS = 6
PRESENT = np.array([1, 2, 3, 1, 2, 0])
MESSAGES = st.tuples(
    st.sampled_from(["ann", "bob"]),
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 3)), unique_by=lambda b: b[0], max_size=5),
)


def in_scope(tenant: str, *blocks: tuple[int, int]) -> plan_pb2.Publications:
    message = publications(*blocks)
    message.tenant = tenant
    return message


@given(st.lists(MESSAGES, max_size=6), st.integers(1, 4))
def test_a_report_has_the_last_publication_of_each_block_in_order(
    messages: list[tuple[str, list[tuple[int, int]]]], blocks_per_message: int
) -> None:
    kept, model = Publications(NUM_BLOCKS, BLOCK_SIZE), dict[int, tuple[str, bytes]]()
    for tenant, blocks in messages:
        of_present = [(index, own) for index, own in blocks if PRESENT[index] == own]
        version = kept.version
        message = in_scope(tenant, *blocks)
        assert kept.keep(message, PRESENT, "publications") == len(of_present)
        assert (kept.version != version) == bool(of_present), "an old check is known to be old"
        hashes = columns.fixed(message.hashes, 16)
        for (index, own), hash_ in zip(blocks, hashes, strict=True):
            if PRESENT[index] == own:
                model.pop(index, None)
                model[index] = (tenant, hash_)
    assert len(kept) == len(model)
    for tenant in ("ann", "bob"):
        reported = []
        for message in kept.report(PRESENT, blocks_per_message):
            assert len(blocks_of(message)) <= blocks_per_message
            if message.tenant == tenant:
                reported += zip(blocks_of(message), columns.fixed(message.hashes, 16), strict=True)
        assert reported == [
            ((index, PRESENT[index]), hash_)
            for index, (owner, hash_) in model.items()
            if owner == tenant
        ]


def test_what_is_reported_is_what_came() -> None:
    kept = Publications(NUM_BLOCKS, BLOCK_SIZE)
    chain = publications((2, 3), (0, 1), (4, 2))
    kept.keep(chain, PRESENT, "publications")
    assert list(kept.report(PRESENT, 9)) == [chain]


def withdrawal(*blocks: tuple[int, int]) -> rpb.WithdrawBlocks:
    indices, generations = zip(*blocks, strict=True)
    return rpb.WithdrawBlocks(indices=int32(*indices), generations=int64(*generations))


def test_what_is_withdrawn_is_not_reported_unless_it_is_of_a_later_generation() -> None:
    kept = Publications(NUM_BLOCKS, BLOCK_SIZE)
    kept.keep(publications((2, 3), (0, 1), (4, 2)), PRESENT, "publications")
    message = withdrawal((0, 2), (2, 2), (3, 1))
    assert kept.withdraw(message, PRESENT, "withdraw") == 1
    assert kept.withdraw(message, PRESENT, "withdraw") == 0
    reported = [block for message in kept.report(PRESENT, 9) for block in blocks_of(message)]
    assert reported == [(2, 3), (4, 2)]
    assert kept.keep(publications((0, 1)), PRESENT, "publications") == 0, "it came again"
    later = [3, *PRESENT[1:]]
    assert kept.keep(publications((0, 3)), np.array(later), "publications") == 1


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (rpb.WithdrawBlocks(indices=b"123"), "indices"),
        (
            rpb.WithdrawBlocks(indices=bytes(8), generations=b"\x01" + bytes(7)),
            "generations",
        ),
        (withdrawal((0, 1), (6, 1)), "indices[1]"),
        (withdrawal((0, 1), (2, 0)), "generations[1]"),
    ],
)
def test_a_malformed_withdrawal_is_refused_by_its_field_and_drops_nothing(
    message: rpb.WithdrawBlocks, field: str
) -> None:
    kept = Publications(NUM_BLOCKS, BLOCK_SIZE)
    kept.keep(publications((0, 1), (2, 3)), PRESENT, "publications")
    with refused(InvalidRequestError, f"withdraw.{field}"):
        kept.withdraw(message, PRESENT, "withdraw")
    assert len(kept) == 2


# What is wrong in a message: the field in its place, and the field that is named.
BAD: dict[str, tuple[dict[str, object], str]] = {
    "a long tenant": ({"tenant": "t" * 257}, "tenant"),
    "a long namespace": ({"namespace": "n" * 257}, "namespace"),
    "a long algorithm": ({"hash_algorithm": "h" * 257}, "hash_algorithm"),
    "no such block": ({"indices": int32(2, 6)}, "indices[1]"),
    "a negative block": ({"indices": int32(-1, 0)}, "indices[0]"),
    "generation 0": ({"generations": int64(3, 0)}, "generations[1]"),
    "fewer generations": ({"generations": int64(3)}, "generations"),
    "no such parent": ({"parent_indices": int32(-2, 2)}, "parent_indices[0]"),
    "a parent past the last block": ({"parent_indices": int32(-1, 6)}, "parent_indices[1]"),
    "a cut column": ({"indices": bytes(7)}, "indices"),
    "a parent of a negative generation": (
        {"parent_generations": int64(0, -1)},
        "parent_generations[1]",
    ),
    "a parent of no generation": ({"parent_generations": int64(0, 0)}, "parent_generations[1]"),
    "no parent of a generation": ({"parent_generations": int64(1, 3)}, "parent_generations[0]"),
    "a short hash": ({"hashes": bytes(31)}, "hashes"),
    "a short block of tokens": ({"token_ids": bytes(4 * 15)}, "token_ids"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_malformed_message_is_refused_by_its_field_and_keeps_nothing(reason: str) -> None:
    fields, field = BAD[reason]
    message, kept = publications((2, 3), (0, 1)), Publications(NUM_BLOCKS, BLOCK_SIZE)
    for name, value in fields.items():
        setattr(message, name, value)
    with refused(InvalidRequestError, f"publish.publications.{field}"):
        kept.keep(message, PRESENT, "publish.publications")
    assert (len(kept), kept.version) == (0, 0)
