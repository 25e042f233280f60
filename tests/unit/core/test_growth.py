"""Growth that has to wait: what it waits for, how that ends, and that a grant is enough for it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvplane import ops
from kvplane.layout import Layout
from kvplane.results import SessionNews
from kvplane.slices import run_to_end
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_data_plane import Plane
from tests.helpers.core.core_messages import BLOCK
from tests.helpers.core.core_model import LATER, OK, Engine, World, only, status_of
from tests.helpers.planning.registration_messages import LAYOUT

WINDOWED = replace(
    LAYOUT,
    groups=(
        replace(LAYOUT.groups[0], layers=(0,)),
        replace(LAYOUT.groups[0], name="window", layers=(1,), sliding_window_tokens=2 * BLOCK + 4),
    ),
)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Tokens unlike those of other seeds from the first on."""
    return [1000 * (seed + 1) + i for i in range(num_tokens)]


def growth(engine: Engine, sequence_id: int, num: int = 1, ahead: int = 0) -> cpb.Operation:
    first = engine.state(sequence_id).num_scheduled_tokens
    return ops.append(sequence_id, [7] * num, num, first_positions=first, num_lookahead_slots=ahead)


def grow(engine: Engine, sequence_id: int, num: int = 1, ahead: int = 0) -> int:
    return status_of(only(engine.do(growth(engine, sequence_id, num, ahead))))


def test_a_block_that_was_granted_for_a_copy_is_used_for_it() -> None:
    world = World(num_device=8, num_host=0)
    engine = world.engine()
    engine.do(ops.admit(1, prompt(12)), ops.admit(3, prompt(8, 1)), ops.admit(4, prompt(40, 2)))
    engine.do(ops.fork(1, 2))
    assert grow(engine, 2) == LATER
    assert engine.state(2).num_awaited_blocks == 1
    engine.do(ops.free([3]))
    assert engine.state(2).num_awaited_blocks == 0
    assert grow(engine, 2) == OK
    assert engine.table(2)[0] == engine.table(1)[0] and engine.table(2)[1] != engine.table(1)[1]
    assert len(engine.table(2)) == 2
    world.core.check_integrity()


def test_blocks_behind_the_window_serve_for_the_next_ones() -> None:
    """A prompt may fill its group: the first append finds no other block."""
    world = World(num_device=(12, 7), num_host=(0, 0), layout=WINDOWED, plane=Plane)
    engine = world.engine()
    engine.admit(1, prompt(7 * BLOCK))
    assert world.usage(group=1)["held"] == 7
    (checked,) = run_checked(engine, growth(engine, 1, 9)).results
    assert not checked.failures
    assert grow(engine, 1, 9) == OK
    assert world.usage(group=1)["held"] == 5, "of 65 tokens the next sees 19"
    world.core.check_integrity()


def run_checked(engine: Engine, operation: cpb.Operation) -> cpb.StepResponse:
    """Return what ``validate_only`` answers."""
    request = cpb.StepRequest(session=engine.ref, operations=[operation], validate_only=True)
    return run_to_end(engine.world.core.validate(request, engine.tenant))


def test_lookahead_that_was_refused_waits_for_nothing_and_nobody_yields_to_it() -> None:
    world = World(num_device=8, num_host=0)
    one, other = world.engine(), world.engine("other")
    one.admit(1, prompt(25))
    other.admit(1, prompt(25, 1))
    assert grow(one, 1, ahead=16) == LATER
    assert one.state(1).num_awaited_blocks == 0
    for _ in range(6):
        world.pass_time(1, one, other)
        assert grow(one, 1) == OK
        assert not other.step().HasField("news")
    assert grow(one, 1, 2, ahead=16) == LATER
    assert one.state(1).num_awaited_blocks == 1, "for its slots alone"


@pytest.mark.parametrize("how", ["less", "truncate", "free"])
def test_what_waits_is_withdrawn_by_asking_for_less(how: str) -> None:
    world = World(num_device=8, num_host=0)
    one, other = world.engine(), world.engine("other")
    one.admit(1, prompt(25))
    other.admit(1, prompt(25, 1))
    assert grow(one, 1, 8) == LATER
    assert (one.state(1).num_awaited_blocks, other.state(1).num_awaited_blocks) == (1, 0)
    if how == "less":
        assert grow(one, 1) == OK
    else:
        one.do(ops.free([1]) if how == "free" else ops.truncate([1], [20]))
    assert how == "free" or one.state(1).num_awaited_blocks == 0
    world.pass_time(6, one, other)
    assert not other.step().HasField("news")
    world.core.check_integrity()


@pytest.mark.parametrize("num_forks", [1, 5])
def test_the_growth_of_forks_stands_in_line_whatever_they_share(num_forks: int) -> None:
    """Five tables of four blocks are more than a pool of 16 has, but they have the same blocks."""
    world = World(num_device=16, num_host=0)
    one, other = world.engine(), world.engine("other")
    one.admit(1, prompt(4 * BLOCK))
    for i in range(num_forks):
        one.do(ops.fork(1, 2 + i))
    for i in range(1, 13):
        other.admit(i, prompt(BLOCK, i))
    assert grow(one, 2) == LATER
    assert one.state(2).num_awaited_blocks == 1
    other.do(ops.admit(20, prompt(BLOCK, 20), wait=True))
    other.do(ops.free([1]))
    assert grow(one, 2) == OK
    assert not other.step().HasField("news"), "it waits behind growth"
    world.core.check_integrity()


class Walk:
    """Engines of a small pool that do anything, and ask again what they were granted meanwhile."""

    def __init__(self, seed: int, layout: Layout, num_device: int | tuple[int, ...]) -> None:
        self.random = random.Random(seed)
        num_host: int | tuple[int, ...] = 8 if isinstance(num_device, int) else (8, 8)
        self.world = World(num_device=num_device, num_host=num_host, layout=layout, plane=Plane)
        self.engines = [self.world.engine(tenant) for tenant in ("one", "one", "other")]
        self.families: list[dict[int, int]] = [{} for _ in self.engines]
        """Of each engine, the sequence that each live one was forked from at first."""
        self.waiting: dict[tuple[int, int], tuple[int, int]] = {}
        """By engine and family: the sequence that waits, and the slots that it asked for."""
        self.next_id = 1
        self.num_granted = 0

    def act(self) -> None:
        index = self.random.randrange(len(self.engines))
        engine, live = self.engines[index], self.families[index]
        kinds = ["admit"] + ["append"] * 6 + ["fork", "free", "truncate", "swap", "time"]
        kind = self.random.choice(kinds if live else ["admit", "time"])
        sequence_id = self.random.choice(sorted(live)) if live else 0
        if kind == "time":
            self.world.pass_time(self.random.choice([0.25, 1.5]), *self.engines)
        elif kind in ("admit", "fork"):
            self.start(index, kind, sequence_id)
        else:
            self.change(index, kind, sequence_id)
        for engine, live in zip(self.engines, self.families, strict=True):
            for cut_id in SessionNews.from_proto(engine.do().news).cut:
                live.pop(cut_id, None)
        self.ask_again()
        self.world.core.check_integrity()

    def start(self, index: int, kind: str, parent_id: int) -> None:
        engine, live = self.engines[index], self.families[index]
        new, self.next_id = self.next_id, self.next_id + 1
        tokens = prompt(self.random.randrange(1, 3 * BLOCK), self.random.randrange(3))
        start = ops.admit(new, tokens) if kind == "admit" else ops.fork(parent_id, new)
        if status_of(only(engine.do(start))) == OK:
            live[new] = new if kind == "admit" else live[parent_id]

    def change(self, index: int, kind: str, sequence_id: int) -> None:
        engine, live = self.engines[index], self.families[index]
        num, ahead = self.random.choice([1, 1, 3, BLOCK, 2 * BLOCK]), self.random.choice([0, BLOCK])
        num_left = max(1, engine.state(sequence_id).num_tokens - self.random.randrange(9))
        operation = {
            "append": growth(engine, sequence_id, num, ahead),
            "free": ops.free([sequence_id]),
            "truncate": ops.truncate([sequence_id], [num_left]),
            "swap": ops.swap([sequence_id], self.random.choice(["host", "device"])),
        }[kind]
        # Whatever comes of it, a family waits for what was asked of it last.
        self.waiting.pop((index, live[sequence_id]), None)
        status = status_of(only(engine.do(operation)))
        if kind == "append" and engine.state(sequence_id).num_awaited_blocks:
            assert status == LATER
            self.waiting[index, live[sequence_id]] = sequence_id, num
        if kind == "free" and status == OK:
            del live[sequence_id]

    def ask_again(self) -> None:
        """Ask for what is waited for no more: as nothing else ended the wait, it was granted."""
        for (index, family), (sequence_id, num) in [*self.waiting.items()]:
            engine = self.engines[index]
            if sequence_id not in self.families[index]:
                del self.waiting[index, family]
            elif not engine.state(sequence_id).num_awaited_blocks:
                del self.waiting[index, family]
                assert grow(engine, sequence_id, num) == OK, "it cannot use what it was granted"
                self.num_granted += 1


@pytest.mark.parametrize(
    ("layout", "num_device"), [(LAYOUT, 9), (WINDOWED, (9, 6))], ids=["whole", "windowed"]
)
def test_a_grant_makes_the_request_possible_that_waited(
    layout: Layout, num_device: int | tuple[int, ...]
) -> None:
    num_granted = 0
    for seed in range(6):
        walk = Walk(seed, layout, num_device)
        for _ in range(200):
            walk.act()
        num_granted += walk.num_granted
    assert num_granted > 10
