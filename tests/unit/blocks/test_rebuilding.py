"""A pool is rebuilt from what all its shards report, and from nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from kvplane_blocks import ColumnError, Pool, Rebuild, chained_hash, root_hash

from tests.helpers.native.index_writer import BLOCK_TOKENS, Writer, blocks, hashes_of
from tests.helpers.native.native_pool import (
    DEVICE,
    HOST,
    OneGroup,
    find,
    i32,
    i64,
    ints,
    publications,
)


@dataclass(frozen=True)
class Published:
    """What a shard says of a block."""

    root: bytes
    generation: int
    parent: int
    parent_generation: int
    hash: bytes
    token_ids: bytes


@dataclass
class Report:
    """What a shard says."""

    num_device: int
    num_host: int = 0
    generations: dict[int, dict[int, int]] = field(default_factory=lambda: {DEVICE: {}, HOST: {}})
    published: dict[int, Published] = field(default_factory=dict)


def tell(rebuild: Rebuild, shard: int, report: Report, piece: int = 3) -> None:
    rebuild.start_shard(shard, report.num_device, report.num_host)
    for tier, generations in report.generations.items():
        rebuild.add_blocks(shard, tier, i32(generations), i64(generations.values()))
    items = list(report.published.items())
    for root in dict.fromkeys(p.root for p in report.published.values()):
        of_root = [(block, p) for block, p in items if p.root == root]
        for i in range(0, len(of_root), piece):
            tell_published(rebuild, shard, root, dict(of_root[i : i + piece]))


def tell_published(
    rebuild: Rebuild, shard: int, root: bytes, published: dict[int, Published]
) -> None:
    values = published.values()
    rebuild.add_publications(
        shard,
        root,
        i32(published),
        i64(p.generation for p in values),
        i32(p.parent for p in values),
        i64(p.parent_generation for p in values),
        b"".join(p.hash for p in values),
        b"".join(p.token_ids for p in values),
    )


def built(
    reports: list[Report],
    *,
    known: tuple[list[int], list[int]] = ([], []),
    step: int = 1000,
    policy: str = "lru",
) -> OneGroup:
    rebuild = Rebuild(BLOCK_TOKENS, len(reports))
    for shard, report in enumerate(reports):
        tell(rebuild, shard, report)
    generations = {"device_generations": i64(known[0]), "host_generations": i64(known[1])}
    rebuild.begin(eviction_policy=policy, **generations)
    while not rebuild.step(step):
        pass
    pool = OneGroup(rebuild.take())
    pool.check_integrity()
    return pool


def chain(root: bytes, firsts: list[int], at: list[int], generation: int = 1) -> Report:
    """Blocks ``at`` hold a prompt, as a shard would report."""
    tokens = blocks(*firsts)
    report = Report(64)
    for i, (block, hash_) in enumerate(zip(at, hashes_of(root, tokens), strict=True)):
        parent, parent_generation = (at[i - 1], generation) if i else (-1, 0)
        own = i32(tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS])
        report.published[block] = Published(root, generation, parent, parent_generation, hash_, own)
        report.generations[DEVICE][block] = generation
    return report


def num_found(pool: OneGroup, firsts: list[int], root: bytes = b"r") -> int:
    num: int = pool.match(root, i32(blocks(*firsts)))[0]
    return num


def test_prefixes_are_found_again_in_the_same_blocks_and_tails_are_evicted_first() -> None:
    report = chain(b"r", [1, 2, 3], [5, 9, 2], generation=7)
    pool = built([report, report])
    assert ints(pool.explain(b"r", i32(blocks(1, 2, 3)))[2], "i") == [5, 9, 2]
    assert pool.usage(DEVICE) == (64, 61, 3, 0, 0)
    assert ints(pool.generations(DEVICE), "q")[:10] == [0, 0, 7, 0, 0, 7, 0, 0, 0, 7]
    writer = Writer(pool, b"r")
    running = writer.write(blocks(*range(10, 72)))
    assert num_found(pool, [1, 2, 3]) == 2
    assert not {5, 9} & set(ints(pool.table(writer.handle, running)[1], "i"))
    pool.check_integrity()


def test_generations_go_on_from_the_highest_that_anybody_knows() -> None:
    small, large = Report(3, 1), Report(5, 2)
    small.generations = {DEVICE: {0: 4, 2: 1}, HOST: {0: 2}}
    large.generations = {DEVICE: {0: 3, 1: 8, 4: 6}, HOST: {0: 1, 1: 9}}
    pool = built([small, large], known=([1, 1, 1, 1, 7, 3], [5]), step=1)
    assert ints(pool.generations(DEVICE), "q") == [4, 8, 1, 1, 7, 3]
    assert ints(pool.generations(HOST), "q") == [5, 9]
    assert (pool.usage(DEVICE)[0], pool.usage(HOST)[0]) == (3, 1)


Change = Callable[[Published], Published]
CHANGES: dict[str, Change] = {
    "root": lambda p: replace(p, root=b"s"),
    "generation": lambda p: replace(p, generation=2),
    "parent": lambda p: replace(p, parent=0),
    "parent_generation": lambda p: replace(p, parent_generation=9),
    "hash": lambda p: replace(p, hash=bytes(16)),
    "token_ids": lambda p: replace(p, token_ids=i32(range(4))),
}


def test_a_block_that_was_allocated_again_since_is_left_out() -> None:
    reports = [chain(b"r", [1, 2], [5, 9]) for _ in range(2)]
    reports[1].generations[DEVICE][9] = 2
    pool = built(reports)
    assert num_found(pool, [1, 2]) == 1
    assert pool.take_withdrawn(9) == (i32([9]), i64([2]))
    reports = [chain(b"r", [1, 2], [5, 9])]
    assert num_found(built(reports, known=([0] * 9 + [3], [])), [1, 2]) == 1
    del reports[0].generations[DEVICE][9]
    assert num_found(built(reports, known=([0] * 9 + [1], [])), [1, 2]) == 1


def test_blocks_beyond_the_smallest_shard_are_left_out() -> None:
    reports = [chain(b"r", [1, 2, 3], [5, 9, 2]) for _ in range(2)]
    reports[1].num_device = 9
    for block in (9, 2):  # what follows cannot name its parent
        del reports[1].published[block]
    del reports[1].generations[DEVICE][9]
    pool = built(reports)
    assert num_found(pool, [1, 2, 3]) == 1
    assert pool.take_withdrawn(9) == (i32([2]), i64([1]))


def test_of_blocks_with_one_prefix_one_is_restored_and_cycles_are_not() -> None:
    report, twin = chain(b"r", [1, 2], [5, 9]), chain(b"r", [1, 3], [6, 8])
    report.published |= twin.published
    report.generations[DEVICE] |= twin.generations[DEVICE]
    pool = built([report])
    assert sorted([num_found(pool, [1, 2]), num_found(pool, [1, 3])]) == [1, 2]
    assert len(ints(pool.take_withdrawn(9)[0], "i")) == 2
    looped = chain(b"r", [1, 2], [5, 9])
    looped.published[5] = replace(looped.published[5], parent=9, parent_generation=1)
    assert built([looped]).usage(DEVICE)[2] == 0


def test_what_is_told_again_replaces_what_was_told_before() -> None:
    rebuild = Rebuild(BLOCK_TOKENS, 1)
    tell(rebuild, 0, chain(b"r", [1, 2], [5, 9]))
    tell(rebuild, 0, chain(b"r", [3, 4], [6, 7]))  # the shard began anew
    tell_published(rebuild, 0, b"r", {7: chain(b"r", [3, 8], [6, 7]).published[7]})
    rebuild.begin(5.0)
    while not rebuild.step(7):
        pass
    assert rebuild.num_restored == 2
    pool = OneGroup(rebuild.take())
    assert [num_found(pool, firsts) for firsts in ([1, 2], [3, 4], [3, 8])] == [0, 1, 2]
    assert ints(pool.explain(b"r", i32(blocks(3)))[6], "q") == [0]  # as old as the pool
    pool.check_integrity()


def num_found_with_states(whole: Report, states: Report, firsts: list[int]) -> int:
    """Return how many blocks of a prompt a pool finds that is rebuilt from these reports."""
    first = Rebuild(BLOCK_TOKENS, 1)
    second = Rebuild(BLOCK_TOKENS, 1, first)
    tell(first, 0, whole)
    tell(second, 0, states)
    second.begin(holds_states=True)
    first.begin()
    assert not second.step(1000), "built before the group that it names"
    while not first.step(3):
        pass
    while not second.step(1):
        pass
    groups = [first.take(), second.take()]
    pool = Pool(groups)
    for group in groups:
        group.check_integrity()
    (num, behind), _ = find(pool, groups[0], b"r", i32([*blocks(*firsts), 0]))
    assert not behind
    published = [run[1:5] for run in groups[1].publications_in(0, 64)[0]]
    kept = [block for run in published for block in ints(run[0], "i")]
    assert len(kept) == groups[1].usage(DEVICE)[2], "some cannot be announced again"
    return num


def checkpoints(whole: Report, *places: tuple[int, int]) -> Report:
    """Checkpoints of the prefixes that blocks of ``whole`` end: (its block, that one's)."""
    report = Report(8)
    for block, named in places:
        at = whole.published[named]
        report.published[block] = replace(at, generation=3, parent=named, parent_generation=1)
        report.generations[DEVICE][block] = 3
    return report


def test_checkpoints_are_found_by_the_blocks_of_their_prefixes() -> None:
    whole = chain(b"r", [1, 2, 3, 4], [50, 9, 2, 60])
    states = checkpoints(whole, (7, 2), (4, 9))
    assert num_found_with_states(whole, states, [1, 2, 3, 4]) == 3
    assert num_found_with_states(whole, states, [1, 2, 4]) == 2
    assert num_found_with_states(whole, states, [1, 4]) == 0
    other = chain(b"r", [5], [8])
    del whole.published[9]  # nor is what comes after it
    whole.published |= other.published
    whole.generations[DEVICE] |= other.generations[DEVICE]
    assert num_found_with_states(whole, states, [1, 2, 3, 4]) == 0


@pytest.mark.parametrize("what", [*CHANGES, "no_parent"])
def test_a_checkpoint_that_is_not_of_the_block_that_it_names_is_left_out(what: str) -> None:
    whole = chain(b"r", [1, 2, 3], [5, 9, 0])
    states = checkpoints(whole, (7, 9))
    change = CHANGES.get(what, lambda p: replace(p, parent=-1, parent_generation=0))
    states.published[7] = change(states.published[7])
    assert num_found_with_states(whole, states, [1, 2, 3]) == 0


def test_a_group_of_states_names_blocks_of_one_of_its_pool() -> None:
    whole = Rebuild(BLOCK_TOKENS, 2)
    for block_size, num_shards, named in (
        (8, 2, whole),
        (BLOCK_TOKENS, 1, whole),
        (BLOCK_TOKENS, 2, Rebuild(BLOCK_TOKENS, 2, whole)),
    ):
        with pytest.raises(ValueError, match="whole must be"):
            Rebuild(block_size, num_shards, named)
    states = Rebuild(BLOCK_TOKENS, 2, whole)
    states.start_shard(0, 8, 0)
    whole.start_shard(0, 4, 0)
    with pytest.raises(ColumnError) as raised:
        tell_published(states, 0, b"r", {1: Published(b"r", 1, 4, 1, bytes(16), bytes(16))})
    assert raised.value.args[:2] == ("parent_indices", 0)


def test_roots_that_no_block_names_any_more_are_dropped() -> None:
    rebuild = Rebuild(BLOCK_TOKENS, 1)
    report = chain(b"kept", [1, 2], [5, 9])
    tell(rebuild, 0, report)
    most = 0
    for i in range(3000):
        root = b"namespace %d" % i
        generation = i + 1
        last = chain(root, [4], [7], generation).published
        tell_published(rebuild, 0, root, last)
        most = max(most, rebuild.num_roots)
    assert 3 < most <= 1024
    rebuild.add_blocks(0, DEVICE, i32([7]), i64([generation]))
    rebuild.begin()
    while not rebuild.step(7):
        pass
    pool = OneGroup(rebuild.take())
    assert num_found(pool, [1, 2], b"kept") == 2
    assert [num_found(pool, [4], b"namespace %d" % i) for i in (0, 1500, 2999)] == [0, 0, 1]
    pool.check_integrity()


@pytest.mark.parametrize(
    ("column", "value", "index", "what"),
    [
        ("indices", i32([0, 64]), 1, "must be from 0 to 63, the tier's blocks"),
        ("indices", i32([-1, 1]), 0, "must be from 0 to 63, the tier's blocks"),
        ("parent_indices", i32([-1, 64]), 1, "must be from -1 to 63, the tier's blocks"),
        ("parent_indices", i32([-2, 0]), 0, "must be from -1 to 63, the tier's blocks"),
        ("generations", i64([1]), -1, "must have 2 elements"),
        ("hashes", bytes(31), -1, "must hold 16 bytes for each block"),
        ("token_ids", bytes(31), -1, "must be a multiple of 4 bytes"),
        ("token_ids", bytes(36), -1, "must hold each block's tokens"),
        ("token_ids", i32([*range(7), -1]), 7, "must not be negative"),
    ],
)
def test_columns_that_cannot_be_read_are_named_and_change_nothing(
    column: str, value: bytes, index: int, what: str
) -> None:
    rebuild = Rebuild(BLOCK_TOKENS, 1)
    tell(rebuild, 0, chain(b"r", [1, 2], [0, 1]))
    columns = {
        "indices": i32([0, 1]),
        "generations": i64([1, 1]),
        "parent_indices": i32([-1, 0]),
        "parent_generations": i64([0, 1]),
        "hashes": bytes(32),
        "token_ids": i32(range(8)),
    }
    with pytest.raises(ColumnError) as raised:
        rebuild.add_publications(0, b"r", **(columns | {column: value}))
    assert raised.value.args[:2] == (column, index)
    assert raised.value.args[2].startswith(what)
    rebuild.begin()
    while not rebuild.step(10**6):
        pass
    assert num_found(OneGroup(rebuild.take()), [1, 2]) == 2


@pytest.mark.parametrize(
    ("indices", "generations", "at"),
    [([0, 4], [1, 1], ("indices", 1)), ([0, 1], [1, 0], ("generations", 1)),
     ([0, 1], [2**62 + 1, 1], ("generations", 0))],
)  # fmt: skip
def test_blocks_that_cannot_be_are_named(
    indices: list[int], generations: list[int], at: tuple[str, int]
) -> None:
    rebuild = Rebuild(BLOCK_TOKENS, 1)
    rebuild.start_shard(0, 9, 4)
    with pytest.raises(ColumnError) as raised:
        rebuild.add_blocks(0, HOST, i32(indices), i64(generations))
    assert raised.value.args[:2] == at


def test_nothing_is_built_before_all_shards_have_begun_to_report() -> None:
    rebuild = Rebuild(BLOCK_TOKENS, 2)
    rebuild.start_shard(0, 4, 0)
    with pytest.raises(ValueError, match="each shard must be started"):
        rebuild.begin()
    rebuild.start_shard(1, 4, 0)
    with pytest.raises(IndexError, match="no such shard"):
        rebuild.start_shard(2, 4, 0)
    assert not rebuild.step(10)
    with pytest.raises(ValueError, match="no eviction policy is called newest"):
        rebuild.begin(eviction_policy="newest")
    rebuild.begin()
    with pytest.raises(ValueError, match="is being built"):
        rebuild.start_shard(1, 4, 0)
    with pytest.raises(ValueError, match="is not complete"):
        rebuild.take()


def expected(reports: list[Report]) -> dict[int, int]:
    """Restored blocks and their parents, as the rules say; no two blocks hold one prefix."""
    num = min(report.num_device for report in reports)
    final = [max(r.generations[DEVICE].get(b, 0) for r in reports) for b in range(num)]
    agreed = {
        b: p
        for b, p in reports[0].published.items()
        if b < num
        and p.generation == final[b] == reports[0].generations[DEVICE].get(b)
        and all(other.published.get(b) == p for other in reports)
    }
    restored: dict[int, int] = {}
    found = True
    while found:
        found = False
        for b, p in agreed.items():
            before = agreed.get(p.parent)
            is_next = p.parent == -1 or (
                before is not None
                and p.parent in restored
                and before.generation == p.parent_generation
                and before.root == p.root
            )
            above = before.hash if before is not None else root_hash(p.root)
            if b not in restored and is_next and chained_hash(above, p.token_ids) == p.hash:
                restored[b] = p.parent
                found = True
    return restored


@pytest.mark.parametrize("seed", range(30))
def test_random_reports_are_restored_as_the_rules_say(seed: int) -> None:
    rng = random.Random(seed)
    report, free = Report(64), list(range(62))
    rng.shuffle(free)
    for root in (b"r", b"s"):
        for prompt in range(4):  # a trie: each prompt leaves the one before it somewhere
            shared = rng.randrange(prompt + 1)
            firsts = [*[1, 2][:shared], 100 + prompt, 101 + prompt, 102 + prompt]
            holds = {p.hash: b for b, p in report.published.items()}
            hashes = hashes_of(root, blocks(*firsts))
            at = [holds[h] if h in holds else free.pop() for h in hashes]
            part = chain(root, firsts, at, 1)
            report.published |= part.published
            report.generations[DEVICE] |= part.generations[DEVICE]
    reports = [
        Report(64 - shard, 0, {DEVICE: dict(report.generations[DEVICE]), HOST: {}},
               dict(report.published))
        for shard in range(3)
    ]  # fmt: skip
    for _ in range(rng.randrange(8)):
        victim = rng.choice(reports)
        block = rng.choice(list(victim.published))
        if rng.random() < 0.3:
            victim.generations[DEVICE][block] = 2
        elif rng.random() < 0.3 and len(victim.published) > 20:
            del victim.published[block]
        else:
            change = rng.choice(list(CHANGES.values()))
            for other in rng.choice([[victim], reports]):
                if block in other.published:
                    other.published[block] = change(other.published[block])
    pool = built(reports, step=rng.choice([1, 5, 1000]), policy=rng.choice(["lru", "reuse-rate"]))
    restored = {}
    for run in publications(pool):
        restored |= dict(zip(ints(run[1], "i"), ints(run[3], "i"), strict=True))
    assert restored == expected(reports)
