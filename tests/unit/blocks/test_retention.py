"""Retained prefixes are evicted last, lowest priorities first, for as long as was asked."""

from __future__ import annotations

import random

import pytest

from tests.helpers.native.index_writer import Writer, blocks, checked_pool
from tests.helpers.native.native_pool import DEVICE, OneGroup, i32

TOO_MANY_ENTRIES = 24
FOREVER = 1e9


def retain(
    writer: Writer, tokens: list[int], priority: int, *, until: float = FOREVER, most: int = 1000
) -> tuple[int, ...]:
    answer: tuple[int, ...] = writer.pool.retain(
        writer.root, writer.owner, i32(tokens), priority, until, most
    )
    return answer


def release(writer: Writer, tokens: list[int]) -> int:
    return writer.pool.release_retained(writer.root, writer.owner, i32(tokens))


def test_retained_blocks_are_evicted_after_all_others_and_tails_first() -> None:
    with checked_pool(8) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2, 3))
        assert retain(writer, blocks(1, 2, 3), 50) == (3, 3)
        for i in range(10, 40, 5):
            writer.cache(blocks(*range(i, i + 5)))  # all that is not retained
        assert writer.num_cached(blocks(1, 2, 3)) == (3, 0)
        writer.cache(blocks(*range(50, 57)))
        assert writer.num_cached(blocks(1, 2, 3)) == (1, 0)
        assert pool.num_retained(1) == 1


def test_a_lower_priority_goes_first() -> None:
    with checked_pool(6) as pool:
        writer = Writer(pool)
        for first, priority in ((1, 30), (2, 10), (3, 20)):
            writer.cache(blocks(first, first + 100))
            retain(writer, blocks(first, first + 100), priority)
        for num, left in ((2, [2, 0, 2]), (4, [2, 0, 0])):
            writer.cache(blocks(*range(50, 50 + num)))
            assert [writer.num_cached(blocks(i, i + 100))[0] for i in (1, 2, 3)] == left


def test_a_running_sequence_gets_retained_blocks() -> None:
    with checked_pool(4) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2, 3, 4))
        retain(writer, blocks(1, 2, 3, 4), 100)
        assert pool.num_obtainable(writer.handle, DEVICE) == 4
        writer.write(blocks(5, 6, 7, 8))
        assert pool.num_retained(1) == 0


def test_release_ends_a_retention_that_was_made_before_all_blocks_were_cached() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1))
        assert retain(writer, blocks(1, 2, 3), 10) == (1, 1)
        writer.cache(blocks(1, 2, 3))
        assert release(writer, blocks(1)) == 0
        assert release(writer, blocks(1, 2, 3)) == 1
        assert retain(writer, blocks(7), 10) == (0, 0)


def test_an_owner_retains_so_many_blocks_at_most_and_a_refusal_changes_nothing() -> None:
    with checked_pool(16) as pool:
        writer, other = Writer(pool), Writer(pool, owner=2)
        for tail in (2, 3):
            writer.cache(blocks(1, tail))
        assert retain(writer, blocks(1, 2), 10, most=2) == (2, 2)
        assert retain(writer, blocks(1, 3), 10, most=2) == (0, TOO_MANY_ENTRIES, 2, 2, 1)
        assert writer.priorities(blocks(1, 3)) == [10, 0]
        assert retain(other, blocks(1, 3), 10, most=2) == (2, 2)
        assert retain(writer, blocks(1, 2), 10, most=2) == (2, 0)
        assert (pool.num_retained(1), pool.num_retained(2)) == (2, 2)


def test_a_time_that_has_come_retains_nothing() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2))
        pool.set_time(50)
        assert retain(writer, blocks(1, 2), 10, until=50) == (0, 0)
        assert writer.priorities(blocks(1, 2)) == [0, 0]


@pytest.mark.parametrize("priority", [0, 101, -1])
def test_a_priority_out_of_range_is_refused(priority: int) -> None:
    with checked_pool(4) as pool, pytest.raises(ValueError, match="from 1 to 100"):
        retain(Writer(pool), blocks(1), priority)


def test_a_spare_that_takes_a_blocks_place_is_retained_too() -> None:
    with checked_pool(8) as pool:
        one, other = Writer(pool), Writer(pool)
        one.late = other.late = True
        first, second = one.write(blocks(1, 2)), other.write(blocks(1, 2))
        one.catch_up()
        other.catch_up()
        retain(one, blocks(1, 2), 30)
        one.late = False
        one.free(first)
        assert pool.explain(b"root", i32(blocks(1, 2)))[4] == bytes(8)  # idle, and there are spares
        one.write(blocks(*range(10, 16)))
        assert one.priorities(blocks(1, 2)) == [30, 30]
        other.late = False
        other.free(second)


def test_the_copy_in_the_host_tier_is_retained_as_well() -> None:
    with checked_pool(64, 8) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2))
        retain(writer, blocks(1, 2), 30)
        running = [writer.write(blocks(*range(500, 562)))]  # nothing else is idle
        running += [writer.write(blocks(i)) for i in (600, 601)]
        assert writer.num_cached(blocks(1, 2)) == (0, 2)
        assert writer.priorities(blocks(1, 2)) == [30, 30]
        assert pool.num_retained(1) == 2
        writer.free(*running)


def test_random_retentions_are_those_of_a_model() -> None:
    rng = random.Random(7)
    with checked_pool(4096) as pool:
        writers = [Writer(pool, owner=1), Writer(pool, owner=2)]
        prefixes = [blocks(*[rng.randrange(2) for _ in range(6)]) for _ in range(30)]
        for prefix in prefixes:
            writers[0].cache(prefix)
        held: dict[tuple[int, tuple[int, ...], int], float] = {}
        now = 0.0
        for _ in range(600):
            owner, prefix = rng.randrange(2), rng.choice(prefixes)
            part = prefix[: 4 * rng.randrange(1, 7)]
            if rng.random() < 0.6:
                priority, until = rng.randrange(1, 6), now + rng.randrange(1, 40)
                retain(writers[owner], part, priority, until=until)
                key = (owner, tuple(part), priority)
                held[key] = max(held.get(key, 0), until)
            elif rng.random() < 0.3:
                release(writers[owner], part)
                held = {k: t for k, t in held.items() if k[:2] != (owner, tuple(part))}
            now += rng.random()
            pool.set_time(now)
            held = {k: t for k, t in held.items() if t > now}
            assert_as_held(pool, writers[0], prefixes, list(held))
        assert held
        pool.check_integrity()


def assert_as_held(
    pool: OneGroup,
    writer: Writer,
    prefixes: list[list[int]],
    held: list[tuple[int, tuple[int, ...], int]],
) -> None:
    for prefix in prefixes[:3]:
        wanted = [
            max([p for _, of, p in held if list(of[:end]) == prefix[:end]], default=0)
            for end in range(4, 25, 4)
        ]
        assert writer.priorities(prefix) == wanted
    for owner in (0, 1):
        retained = {of[:end] for o, of, _ in held if o == owner for end in range(4, len(of) + 1, 4)}
        assert pool.num_retained(owner + 1) == len(retained)


@pytest.mark.parametrize("policy", ["lru", "reuse-rate"])
def test_pressure_on_random_retentions_leaves_the_index_sound(policy: str) -> None:
    rng = random.Random(3)
    with checked_pool(40, 12, policy=policy) as pool:
        writer, other = Writer(pool), Writer(pool, owner=2)
        for turn in range(400):
            tokens = blocks(*[rng.randrange(3) for _ in range(rng.randrange(1, 7))], turn % 17)
            writer.cache(tokens)
            retain(rng.choice([writer, other]), tokens, rng.randrange(1, 5), until=turn + 30)
            if turn % 5 == 0:
                release(writer, tokens)
            pool.set_time(turn)
            pool.check_integrity()
        pool.set_time(1000)
        assert (pool.num_retained(1), pool.num_retained(2)) == (0, 0)
