"""What is forgotten can be found no more, and nothing written before brings it back."""

from __future__ import annotations

import random
import time

import pytest

from tests.helpers.native.index_writer import Writer, blocks, checked_pool, hashes_of
from tests.helpers.native.native_pool import DEVICE, OneGroup, i32, ints, publications


def forget(
    writer: Writer, tokens: list[int], *, force: bool = False, most: int = 100
) -> tuple[int, int]:
    answer: tuple[int, int] = writer.pool.forget(writer.root, i32(tokens), force, most)
    return answer


def finish(pool: OneGroup, piece: int = 1) -> list[tuple[int, int]]:
    """Takes apart what was forgotten. Returns the device blocks to withdraw."""
    while pool.forget_some(piece):
        pass
    indices, generations = pool.take_withdrawn(10**9)
    return list(zip(ints(indices, "i"), ints(generations, "q"), strict=True))


def num_free(pool: OneGroup) -> int:
    _, free, _, _, _ = pool.usage(DEVICE)
    return free


@pytest.mark.parametrize("most", [1, 100])
def test_a_root_without_sessions_is_forgotten_and_retained_too(most: int) -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2))
        pool.end_session(writer.handle)
        pool.session_fenced(writer.handle)
        assert pool.retain(b"root", 7, i32(blocks(1, 2)), 9, 1e9, 10) == (2, 2)
        assert pool.num_retained(7) == 2
        assert pool.retain(b"none", 7, i32(blocks(1, 2)), 9, 1e9, 10) == (0, 0)
        assert pool.release_retained(b"none", 7, i32(blocks(1, 2))) == 0
        assert pool.forget(b"none", i32(blocks(1)), True, most) == (0, 0)
        assert pool.release_retained(b"root", 7, i32(blocks(1, 2))) == 2
        assert pool.forget(b"root", i32(blocks(1)), False, most)[0] == min(most, 2)
        assert pool.match(b"root", i32(blocks(1, 2)))[:2] == (0, 0)
        finish(pool)
        assert pool.roots() == [], "nobody needs it"
        assert num_free(pool) == 16


def test_a_prefix_and_what_follows_it_is_forgotten_and_nothing_else() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        for prompt in (blocks(1, 2, 3), blocks(1, 2, 4), blocks(1, 5)):
            writer.cache(prompt)
        assert forget(writer, [*blocks(1, 2), 7]) == (3, 0)
        assert writer.num_cached(blocks(1, 2, 3)) == (1, 0)
        assert writer.num_cached(blocks(1, 5)) == (2, 0)
        hashes = b"".join(hashes_of(b"root", blocks(1, 2, 3)))
        assert pool.find(b"root", hashes=hashes)[0] == (1, 0)
        assert num_free(pool) == 11
        assert len(finish(pool)) == 3
        assert num_free(pool) == 14
        assert forget(writer, blocks(1, 2)) == (0, 0)
        assert forget(writer, [1, 2]) == (0, 0)
        assert pool.counters()[10] == 3


def test_a_forgotten_prefix_can_be_cached_anew_while_the_old_is_taken_apart() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2, 3))
        forget(writer, blocks(1, 2))
        writer.cache(blocks(1, 2, 3))
        assert writer.num_cached(blocks(1, 2, 3)) == (3, 0)
        pool.check_integrity()
        finish(pool)
        assert writer.num_cached(blocks(1, 2, 3)) == (3, 0)
        (run,) = publications(pool)
        assert run[5] == b"".join(sorted(hashes_of(b"root", blocks(1, 2, 3)), key=run[5].index))


def test_blocks_in_use_are_left_unless_it_is_forced() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        running = writer.write(blocks(1, 2, 3))
        writer.cache(blocks(1, 2, 4))
        revision = pool.revision
        assert forget(writer, blocks(1, 2)) == (0, 2)
        assert pool.forget_roots([b"root", b"other"], False) == (0, 3)
        assert writer.num_cached(blocks(1, 2, 3)) == (3, 0)
        assert (pool.revision, pool.forget_some(10)) == (revision, False)
        assert forget(writer, blocks(1, 2), force=True) == (3, 2)
        assert writer.num_cached(blocks(1, 2, 3)) == (1, 0)
        finish(pool)
        _, table, _, _, _ = pool.table(writer.handle, running)
        assert len(set(ints(table, "i"))) == 3
        assert pool.usage(DEVICE)[1:4] == (13, 0, 3)
        writer.free(running)
        assert pool.usage(DEVICE)[1:4] == (15, 1, 0)


def test_what_is_written_but_not_published_yet_stays_private() -> None:
    with checked_pool(32) as pool:
        writer = Writer(pool)
        writer.late = True
        early = writer.write(blocks(1, 2))
        freed = writer.write(blocks(1, 3))
        writer.free(freed)
        assert forget(writer, blocks(1)) == (0, 0)
        follower = writer.write(blocks(1, 2, 3))  # must not share what `early` has written
        tables = [ints(pool.table(writer.handle, i)[1], "i") for i in (early, follower)]
        assert not set(tables[0]) & set(tables[1])
        pool.receipted(writer.handle, 3)
        assert writer.num_cached(blocks(1, 2)) == (0, 0)
        writer.catch_up()
        assert writer.num_cached(blocks(1, 2, 3)) == (3, 0)
        writer.free(early, follower)


def test_an_aborted_sequence_stays_private() -> None:
    with checked_pool(32) as pool:
        writer = Writer(pool)
        running = writer.write(blocks(1, 2))
        forget(writer, blocks(1), force=True)
        writer.late = True
        writer.append(running, 8, blocks(3))
        pool.abort(writer.handle, 50)
        writer.late = False
        writer.append(running, 8, blocks(3))
        finish(pool)
        assert writer.num_cached(blocks(1, 2, 3)) == (0, 0)


def test_all_of_several_roots_is_forgotten_or_nothing() -> None:
    with checked_pool(32) as pool:
        one, two, three = (Writer(pool, root) for root in (b"one", b"two", b"three"))
        for writer in (one, two, three):
            writer.cache(blocks(1, 2))
        running = two.write(blocks(1, 2, 3))
        assert pool.forget_roots([b"one", b"two"], False) == (0, 3)
        assert one.num_cached(blocks(1, 2)) == (2, 0)
        assert pool.forget_roots([b"one", b"two", b"two", b"none"], True) == (5, 3)
        assert [w.num_cached(blocks(1, 2))[0] for w in (one, two, three)] == [0, 0, 2]
        pool.check_integrity()
        two.append(running, 12, blocks(4))
        two.cache(blocks(1, 2))
        assert two.num_cached(blocks(1, 2, 3, 4)) == (2, 0)
        finish(pool)
        assert two.num_cached(blocks(1, 2, 3, 4)) == (2, 0)
        three.end()
        assert pool.forget_roots([b"three"], False) == (2, 0)
        finish(pool)
        assert three.num_cached(blocks(1)) == (0, 0)


def test_publications_of_what_is_forgotten_are_not_announced() -> None:
    with checked_pool(32) as pool:
        writer, other = Writer(pool), Writer(pool, b"other")
        writer.cache(blocks(1, 2))
        other.cache(blocks(3))
        forget(writer, blocks(1, 2))
        pool.forget_roots([b"other"], False)
        (run,) = pool.take_publications(100)
        assert run[5] == hashes_of(b"root", blocks(1))[0]


def test_what_was_announced_and_is_forgotten_is_named_to_be_withdrawn() -> None:
    with checked_pool(32) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2))
        (run,) = pool.take_publications(100)
        pool.forget_roots([b"root"], False)
        wanted = zip(ints(run[1], "i"), ints(run[2], "q"), strict=True)
        assert sorted(finish(pool)) == sorted(wanted)


def test_retention_and_spares_go_too() -> None:
    with checked_pool(32, 4) as pool:
        one, other = Writer(pool), Writer(pool)
        one.late = other.late = True
        running = [one.write(blocks(1, 2)), other.write(blocks(1, 2))]
        one.catch_up()
        other.catch_up()
        pool.retain(one.root, one.owner, i32(blocks(1, 2)), 9, 1e9, 10)
        assert forget(one, blocks(1)) == (0, 4)
        assert forget(one, blocks(1), force=True) == (4, 4)
        assert pool.num_retained(1) == 0
        finish(pool)
        one.late = other.late = False
        one.free(running[0])
        other.free(running[1])
        assert num_free(pool) == 32


def test_a_large_prefix_is_gone_at_once_though_its_blocks_are_not_counted() -> None:
    with checked_pool(32) as pool:
        writer = Writer(pool)
        pool.watch_enable(100)
        for last in (3, 4, 5):
            writer.cache(blocks(1, 2, last))
        running = writer.write(blocks(1, 2, 5))
        pool.retain(writer.root, writer.owner, i32(blocks(1, 2, 3)), 9, 1e9, 10)
        assert forget(writer, blocks(1, 2), most=1) == (0, 2)
        assert forget(writer, blocks(1, 2), most=1, force=True) == (2, 2)
        assert pool.num_retained(1) == 0
        assert writer.num_cached(blocks(1, 2, 3)) == (1, 0)
        assert forget(writer, blocks(1, 2), most=1) == (0, 0)
        assert pool.changes_since(pool.revision, b"root", 9) is None, "nothing is logged now"
        writer.cache(blocks(1, 2, 3))
        pool.check_integrity()
        finish(pool)
        assert pool.counters()[10] == 5
        assert writer.num_cached(blocks(1, 2, 3)) == (3, 0)
        writer.cache(blocks(6))
        assert len(pool.changes_since(pool.revision - 1, b"root", 9)[1]) == 1
        writer.free(running)
        assert num_free(pool) == 32 - 4


def test_what_is_forgotten_first_is_taken_apart_first() -> None:
    with checked_pool(32) as pool:
        writer, other = Writer(pool), Writer(pool, b"other")
        writer.cache(blocks(1, 2, 3))
        other.cache(blocks(1, 2))
        forget(writer, blocks(1), most=1)
        writer.end()
        assert pool.forget_roots([b"root", b"other"], False) == (5, 0)
        pool.check_integrity()
        revisions = []
        for _ in range(4):  # down to the last entry, and then up
            assert pool.forget_some(1)
            pool.check_integrity()
            revisions.append(len(pool.take_withdrawn(10)[0]) // 4)
        assert revisions == [0, 0, 0, 1]
        assert len(finish(pool)) == 4
        assert num_free(pool) == 32


def test_what_an_ended_session_was_to_publish_is_taken_apart_before_its_release() -> None:
    with checked_pool(16) as pool:
        writer = Writer(pool)
        writer.cache(blocks(1, 2))
        prompt = blocks(1, 2, 3, 4)
        pool.begin(writer.handle, 100)
        assert len(pool.grant(writer.handle, 1, 50, i32(prompt), b"", -1, 0, False, 0)) == 3
        assert pool.end_session(writer.handle, 0)
        assert pool.forget_roots([b"root"], False) == (2, 0)
        num_calls = 1
        while pool.forget_some(1):
            pool.check_integrity()
            num_calls += 1
            assert num_calls < 20, "it goes down to the same entry again and again"
        assert num_calls == 9, "each entry and the root once down and once up, at most"
        other = Writer(pool)
        other.cache(blocks(1, 2, 5))  # may get the entries that the session led
        assert not pool.end_some(writer.handle, 1)
        pool.check_integrity()
        pool.session_fenced(writer.handle)
        assert other.num_cached(blocks(1, 2, 5)) == (3, 0)


def test_a_large_root_is_forgotten_in_pieces() -> None:
    num_sequences, num_each = 500, 80
    with checked_pool(num_sequences * num_each) as pool:
        writer = Writer(pool)
        for i in range(num_sequences):
            writer.cache(blocks(*range(i * num_each, (i + 1) * num_each)))
        started = time.perf_counter()
        assert pool.forget_roots([b"root"], False) == (num_sequences * num_each, 0)
        assert time.perf_counter() - started < 0.1
        num_pieces = 1
        while pool.forget_some(1000):
            num_pieces += 1
        assert num_pieces > 40
        assert num_free(pool) == num_sequences * num_each


@pytest.mark.parametrize("policy", ["lru", "reuse-rate"])
def test_forgetting_at_random_leaves_the_index_sound(policy: str) -> None:
    rng = random.Random(11)
    with checked_pool(48, 16, policy=policy) as pool:
        writers = [Writer(pool, root) for root in (b"a", b"a", b"b")]
        live: list[tuple[Writer, int]] = []
        for turn in range(500):
            writer = rng.choice(writers)
            writer.late = rng.random() < 0.5
            prompt = blocks(*[rng.randrange(3) for _ in range(rng.randrange(1, 6))])
            action = rng.randrange(6)
            if action < 2 and len(live) < 4:
                live.append((writer, writer.write(prompt)))
            elif action == 2 and live:
                holder, sequence_id = live.pop(rng.randrange(len(live)))
                holder.free(sequence_id)
            elif action == 3:
                pool.retain(
                    writer.root, writer.owner, i32(prompt), rng.randrange(1, 9), turn + 9.0, 100
                )
            elif action == 4:
                before = writer.num_cached(prompt)
                found, _ = forget(writer, prompt, force=rng.random() < 0.5)
                after = writer.num_cached(prompt)
                assert sum(after) <= max(0, len(prompt) // 4 - 1) if found else after == before
            elif rng.random() < 0.3:
                pool.forget_roots([writer.root], True)
                assert writer.num_cached(prompt) == (0, 0)
            pool.forget_some(rng.randrange(4))
            pool.set_time(float(turn))
            pool.check_integrity()
        for writer in writers:
            writer.end()
        pool.forget_roots([b"a", b"b"], True)
        finish(pool)
        assert num_free(pool) == 48
        assert pool.memory()[2] == 0
