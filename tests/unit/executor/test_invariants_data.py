"""The data plane's side of what always holds, by number and name."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from kvplane.errors import (
    BadSignatureError,
    BlockNotWritableError,
    InvalidRequestError,
    KvplaneError,
    PlanOutOfOrderError,
    SessionExpiredError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.wire import signing
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.plan_author import (
    HOST,
    Part,
    PlanAuthor,
    blocks_of,
    fork,
    forked,
    keep,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
    trim,
    truncate,
)


def test_2_nobody_writes_a_published_block(rig: Rig) -> None:
    rig.admit(1, num_tokens=8)
    rig.publish(0)
    with rig.refuses(BlockNotWritableError, "plan.spans.sequence_ids[0]"):
        rig.start(2, span(1, 7, 1))
    assert rig.run(2, span(1, 8, 1)).plan_number == 2, "the block after it may be written"


def test_2_nobody_writes_a_shared_block_and_the_writer_copies_it_first(rig: Rig) -> None:
    rig.admit(1)
    with rig.refuses(BlockNotWritableError, "plan.spans.sequence_ids[0]"):
        rig.start(2, fork(2, 1, 2), span(2, 12, 1))
    assert rig.run(2, *forked(2, 1, 1, 1, 3), span(2, 12, 1)).plan_number == 2


def test_2_a_block_shared_between_sessions_is_written_by_neither(rig: Rig) -> None:
    rig.admit(1)
    rig.publish(0)
    rig.open(2)
    rig.run(1, set_blocks(1, [(0, 1), (1, 1)], allocated=False), session_id=2)
    for session in (1, 2):
        with rig.refuses(BlockNotWritableError, "plan.spans.sequence_ids[0]"):
            rig.start(2, span(1, 12, 1), session_id=session)


def test_8_a_stale_or_forged_plan_never_reaches_a_kernel(rig: Rig) -> None:
    rig.admit(1)
    good: dict[str, Any] = {"number": 2, "spans": [span(1, 12, 1)]}
    stranger = PlanAuthor(rig.executor.epoch)
    signed = rig.plan(**good)
    wrong = [
        (StaleEpochError, rig.plan(**good, shard_epochs=[rig.executor.epoch - 1])),
        (StaleIncarnationError, PlanAuthor(rig.executor.epoch, 7, rig.author.key).plan(**good)),
        (InvalidRequestError, rig.plan(**good, session_id=3)),
        (PlanOutOfOrderError, rig.plan(**{**good, "number": 3})),
        (BadSignatureError, stranger.plan(**good)),
    ]
    for error, plan in wrong:
        with rig.refuses(error):
            rig.executor.start(1, plan)
    rig.executor.start(1, signed)


def test_9_an_unreceipted_plan_may_run_again_from_its_start(rig: Rig) -> None:
    rig.admit(1)
    plan = rig.plan(2, *forked(2, 1, 1, 1, 4), span(2, 12, 2))
    rig.executor.start(1, plan)
    once = [rig.layer(0, 2, seed=4)]
    state = rig.snapshot()
    for _ in range(3):
        assert rig.executor.start(1, plan).receipt is None
        assert torch.equal(rig.layer(0, 2, seed=4), once[0])
        assert rig.snapshot() == state
    rig.layer(1, 2, seed=4)
    assert rig.executor.receipt(1) is not None


def test_9_a_receipted_plan_returns_its_receipt_and_writes_nothing(rig: Rig) -> None:
    rig.admit(1)
    plan = rig.plan(2, *forked(2, 1, 1, 1, 4), span(2, 12, 2))
    rig.executor.start(1, plan)
    rig.run_layers(2)
    receipt = rig.executor.receipt(1)
    state = rig.snapshot()
    again = rig.executor.start(1, plan)
    assert (again.receipt, again.had_run) == (receipt, True)
    other = tokens(2, seed=9)
    rig.run_layer(0, None, other, other)
    assert rig.executor.receipt(1) == receipt
    blocks = torch.ones(2, 1, 2, 2, 8, 16)
    assert rig.executor.write_blocks(1, 2, 1, blocks) == receipt
    assert rig.snapshot() == state


def test_9_a_plan_that_shortens_tables_and_keeps_copies_changes_nothing_again(rig: Rig) -> None:
    rig.admit(1)
    plan = rig.plan(
        2,
        fork(2, 1, 2),
        truncate(1, 1),
        trim(2, 1),
        ref(2, 1, HOST),
        transfer(ref(0), ref(2, 1, HOST)),
    )
    receipt = rig.executor.start(1, plan).receipt
    rig.run(3, set_blocks(1, [(3, 1)], first_block=1), span(1, 8, 3))
    state = rig.snapshot()
    assert rig.executor.start(1, plan).receipt == receipt
    assert rig.snapshot() == state
    assert rig.executor.read_blocks(1, 1, range(2))[1].indices == b"\0\0\0\0\3\0\0\0"
    with rig.refuses(InvalidRequestError, "entries[0]"):
        rig.executor.read_blocks(1, 2, [0])


def test_10_publications_stay_beside_their_block_until_it_is_allocated(rig: Rig) -> None:
    rig.admit(1, num_tokens=16)
    rig.publish(0)
    rig.publish(1)
    rig.executor.install(2, signing.new_key())
    assert published(rig) == [(0, 1), (1, 1)]
    rig.author = PlanAuthor(rig.executor.epoch, incarnation=3)
    rig.executor.install(3, rig.author.key)
    rig.open(2)
    rig.run(1, set_blocks(1, [(0, 2)]), session_id=2)
    assert published(rig) == [(1, 1)]


def published(rig: Rig) -> list[tuple[int, int]]:
    return [b for part in rig.executor.report() for p in part.publications for b in blocks_of(p)]


def test_10_a_new_incarnation_stops_plans_and_drops_every_table(rig: Rig) -> None:
    rig.start(1, set_blocks(1, [(0, 1)]), span(1, 0, 2))
    old = rig.author
    rig.author = PlanAuthor(rig.executor.epoch, incarnation=2)
    rig.executor.install(2, rig.author.key)
    with rig.refuses(SessionExpiredError):
        rig.layer(0, 2)
    with rig.refuses(StaleIncarnationError):
        rig.executor.start(1, old.plan(1))
    with rig.refuses(StaleIncarnationError):
        rig.executor.open(old.grant(1))
    assert rig.executor.num_sequences == 0
    assert rig.open(1) == 1, "ordinals begin anew with the key"


def test_11_attention_is_bit_for_bit_the_same_whatever_else_is_in_the_batch(rig: Rig) -> None:
    """The same keys, values and query, alone and among others, on one thread and on two."""
    query, key, value = tokens(1, 4, seed=5), tokens(1, seed=6), tokens(1, seed=7)

    def decode(rig: Rig, neighbours: list[int]) -> torch.Tensor:
        rig.run(1, set_blocks(1, [(2, 1), (5, 1)]), span(1, 0, 11))
        changes = [set_blocks(n, [(n + 4, 1)]) for n in neighbours]
        spans = [span(n, 0, n) for n in neighbours]
        rig.start(2, *changes, *spans, span(1, 11, 1))
        before = sum(neighbours)
        other_query, other = tokens(before, 4, seed=8), tokens(before, seed=9)
        output = rig.run_layer(
            0, torch.cat([other_query, query]), torch.cat([other, key]), torch.cat([other, value])
        )
        assert output is not None
        return output[-1]

    alone = decode(rig, [])
    assert torch.equal(decode(Rig(), [2, 3]), alone)
    assert torch.equal(decode(Rig(num_threads=2), [3]), alone)


@pytest.mark.parametrize("seed", range(3))
def test_1_to_9_hold_over_random_plans_good_and_bad(seed: int) -> None:
    """Whatever is thrown at it, refused plans leave no trace and the references add up."""
    rig = Rig()
    rig.open(2)
    dice = random.Random(seed)
    numbers = {1: 0, 2: 0}
    num_run = 0
    for turn in range(1, 151):
        session = dice.choice((1, 2))
        resync = dice.random() < 0.2
        parts = _random_plan(dice, turn, resync=resync)
        number = numbers[session] + 1
        before = rig.snapshot()
        try:
            rig.run(number, *parts, session_id=session, resync=resync)
        except KvplaneError:
            assert rig.snapshot() == before
        else:
            numbers[session] = number
            num_run += 1
        rig.executor.check_integrity()
    assert num_run > 15


def _random_plan(dice: random.Random, turn: int, *, resync: bool) -> list[Part]:
    """Generations that are ``turn`` are new."""
    sequences = range(1, 4)
    parts: list[Part] = []
    if resync and dice.random() < 0.7:
        parts.append(keep(dice.choice(sequences), dice.randint(0, 1)))
    for _ in range(dice.randint(1, 2)):
        sequence = dice.choice(sequences)
        kind = dice.random()
        tier = HOST if dice.random() < 0.2 else ref(0).tier
        if kind < 0.7:
            index, generation = dice.randrange(4), dice.choice((turn, dice.randint(1, turn)))
            parts.append(
                set_blocks(
                    sequence,
                    [(index, generation)],
                    tier=tier,
                    replace=dice.random() < 0.7,
                    allocated=dice.random() < 0.8,
                )
            )
            if dice.random() < 0.4:
                source = ref(dice.randrange(4), dice.randint(1, 5))
                parts.append(transfer(source, ref(index, generation, tier)))
        elif kind < 0.85:
            parts.append(fork(sequence, dice.choice(sequences), dice.randint(0, 1)))
        elif kind < 0.92:
            parts.append(dice.choice((truncate, trim))(sequence, dice.randint(0, 1)))
        else:
            parts.append(kept := ref(dice.randrange(4), turn, HOST))
            if dice.random() < 0.5:
                source = ref(dice.randrange(4), dice.randint(max(1, turn - 9), turn))
                parts.append(transfer(source, kept))
        if dice.random() < 0.5:
            parts.append(span(sequence, dice.randrange(6), dice.randint(1, 3)))
    return parts
