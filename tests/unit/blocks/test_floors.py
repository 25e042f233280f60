"""Floors: what an owner has cached is not evicted below its floor for others."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kvplane_blocks._native import GroupedPool, Pool
from native_pool import DEVICE, Caller, Code, i32, new_pool

ANN, BOB, CID = 1, 2, 3
NAMES = {ANN: b"ann", BOB: b"bob", CID: b"cid"}
NUM_BLOCKS = 12


def prompt(number: int, num_blocks: int) -> list[int]:
    """So many full blocks, and a token more."""
    return [100 * number + i for i in range(4 * num_blocks + 1)]


def compute(caller: Caller, tokens: list[int]) -> tuple[int, ...]:
    """Admit a prompt, compute it and free it: what the admission was answered."""
    caller.begin()
    answer = caller.admit(1, tokens)
    caller.finish()
    if len(answer) == 3:
        caller.receipted()
        caller.begin()
        caller.free(1)
        caller.finish()
        caller.receipted()
    return answer


def num_cached(pool: Pool, owner: int, tokens: list[int]) -> int:
    found: int = pool.match(NAMES[owner], i32(tokens))[0]
    return found


def opened(pool: Pool, *owners: int) -> list[Caller]:
    return [Caller(pool, NAMES[owner], owner) for owner in owners]


def test_a_flood_leaves_an_owner_its_floor() -> None:
    pool = new_pool(NUM_BLOCKS)
    ann, bob = opened(pool, ANN, BOB)
    pool.set_floor(ANN, 3)
    compute(ann, prompt(1, 4))
    for number in range(2, 40):
        assert len(compute(bob, prompt(number, 5))) == 3
    assert num_cached(pool, ANN, prompt(1, 4)) == 3
    compute(ann, prompt(50, 11))  # of its own it may take all
    assert num_cached(pool, ANN, prompt(1, 4)) == 0
    pool.check_integrity()


def test_what_only_a_floor_is_in_the_way_of_is_answered_so() -> None:
    pool = new_pool(NUM_BLOCKS)
    ann, bob, cid = opened(pool, ANN, BOB, CID)
    pool.set_floor(ANN, 4)
    compute(ann, prompt(1, 4))
    assert compute(bob, prompt(2, 8))[:4] == (0, Code.NEVER_FLOOR, 9, 8)
    assert compute(bob, prompt(2, 12))[:4] == (0, Code.NEVER, 13, 12)
    assert [pool.num_usable(c.slot, DEVICE) for c in (ann, bob)] == [12, 8]
    assert [pool.num_obtainable(c.slot, DEVICE) for c in (ann, bob)] == [12, 8]
    cid.begin()
    assert len(cid.admit(1, prompt(3, 3))) == 3
    cid.finish()
    assert compute(bob, prompt(2, 6))[:4] == (0, Code.LATER_FLOOR, 7, 4)
    bob.begin()
    assert len(bob.admit(1, prompt(2, 3))) == 3
    bob.finish()
    bob.begin()
    values, (failure,) = bob.append((1, 13, 9, range(9), 0))
    assert (values, failure[1:4]) == ([0], (Code.LATER_FLOOR, 2, 0))
    bob.finish()
    pool.check_integrity()


def test_blocks_in_use_count_towards_the_floor() -> None:
    pool = new_pool(NUM_BLOCKS)
    ann, bob = opened(pool, ANN, BOB)
    pool.set_floor(ANN, 4)
    compute(ann, prompt(1, 4))
    ann.begin()
    ann.admit(1, prompt(1, 2))
    ann.finish()
    ann.receipted()
    assert pool.num_reserved(ANN) == 2
    for number in range(2, 9):
        compute(bob, prompt(number, 6))
    ann.begin()
    ann.free(1)
    ann.finish()
    ann.receipted()
    assert num_cached(pool, ANN, prompt(1, 4)) == 4
    pool.check_integrity()


def test_a_floor_that_is_raised_protects_what_is_cached_beginning_with_heads() -> None:
    pool = new_pool(NUM_BLOCKS)
    ann, bob = opened(pool, ANN, BOB)
    compute(ann, prompt(1, 5))
    pool.set_floor(ANN, 3)
    assert pool.num_reserved(ANN) == 3
    pool.check_integrity()
    for number in range(2, 9):
        compute(bob, prompt(number, 7))
    assert num_cached(pool, ANN, prompt(1, 5)) == 3
    pool.set_floor(ANN, 1)
    pool.check_integrity()
    compute(bob, prompt(9, 10))
    assert num_cached(pool, ANN, prompt(1, 5)) == 1
    pool.set_floor(ANN, 0)
    compute(bob, prompt(10, 11))
    assert num_cached(pool, ANN, prompt(1, 5)) == 0
    pool.check_integrity()


def test_an_owner_evicts_what_it_retains_last_of_its_own() -> None:
    pool = new_pool(NUM_BLOCKS)
    ann, bob = opened(pool, ANN, BOB)
    pool.set_floor(ANN, 8)
    compute(ann, prompt(1, 2))
    pool.retain(ann.slot, i32(prompt(1, 2)), 50, 100.0, 100)
    compute(ann, prompt(2, 6))
    compute(ann, prompt(3, 3))
    assert pool.num_reserved(ANN) == 8
    compute(bob, prompt(4, 3))
    assert num_cached(pool, ANN, prompt(1, 2)) == 2
    compute(ann, prompt(5, 9))
    assert num_cached(pool, ANN, prompt(2, 6)) == 0
    assert num_cached(pool, ANN, prompt(1, 2)) == 2
    pool.check_integrity()


def test_what_is_forgotten_is_not_protected() -> None:
    pool = new_pool(NUM_BLOCKS)
    ann, bob = opened(pool, ANN, BOB)
    pool.set_floor(ANN, 4)
    compute(ann, prompt(1, 4))
    pool.forget_roots([b"ann"], False)
    while pool.forget_some(2):
        pool.check_integrity()
    assert pool.num_reserved(ANN) == 0
    assert len(compute(bob, prompt(2, 7))) == 3
    compute(ann, prompt(3, 3))  # under the root's new entry
    assert pool.num_reserved(ANN) == 3
    pool.check_integrity()


def test_a_root_without_a_session_is_its_owners() -> None:
    pool = new_pool(NUM_BLOCKS)
    (nobody,) = opened(pool, CID)
    compute(nobody, prompt(1, 3))
    pool.own_root(b"cid", ANN)
    pool.set_floor(ANN, 2)
    assert pool.num_reserved(ANN) == 2
    pool.own_root(b"no such root", ANN)
    pool.check_integrity()


def test_groups_say_what_fits_in_each() -> None:
    cores = [new_pool(12), new_pool(24)]
    grouped = GroupedPool(cores)
    bob = Caller(grouped, b"bob", BOB)
    for core, floor in zip(cores, (3, 6), strict=True):
        core.set_floor(ANN, floor)
    assert grouped.num_usable(bob.slot, DEVICE) == 9
    bob.begin()
    assert bob.admit(1, prompt(1, 9))[:4] == (0, Code.NEVER_FLOOR, 10, 9)


@pytest.mark.parametrize(("owner", "num_blocks"), [(2**20, 1), (1, NUM_BLOCKS + 1)])
def test_what_cannot_be_a_floor_is_refused(owner: int, num_blocks: int) -> None:
    with pytest.raises(ValueError, match="must be"):
        new_pool(NUM_BLOCKS).set_floor(owner, num_blocks)


class FloorMachine(RuleBasedStateMachine):
    """Beside a naive model: the newest cached blocks of an owner are its reserve, and what that
    pushes out waits with all others, the oldest first. Blocks are (owner, prompt, place).
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = new_pool(NUM_BLOCKS)
        self.callers = dict(zip(NAMES, opened(self.pool, *NAMES), strict=True))
        self.floors = dict.fromkeys(NAMES, 0)
        self.reserves: dict[int, deque[tuple[int, int, int]]] = {o: deque() for o in NAMES}
        self.waiting: deque[tuple[int, int, int]] = deque()

    @property
    def cached(self) -> set[tuple[int, int, int]]:
        return {*self.waiting, *(each for own in self.reserves.values() for each in own)}

    def num_found(self, owner: int, number: int, num_blocks: int) -> int:
        cached = self.cached
        for i in range(num_blocks):
            if (owner, number, i) not in cached:
                return i
        return num_blocks

    @rule(owner=st.sampled_from([*NAMES]), number=st.integers(1, 4), num=st.integers(1, 8))
    def compute(self, owner: int, number: int, num: int) -> None:
        answer = compute(self.callers[owner], prompt(number, num))
        usable = NUM_BLOCKS - sum(self.floors.values()) + self.floors[owner]
        if num + 1 > usable:
            assert answer[1] == Code.NEVER_FLOOR
            return
        found = self.num_found(owner, number, num)
        assert answer[0] == 4 * found
        for i in range(found):
            block = (owner, number, i)
            (self.waiting if block in self.waiting else self.reserves[owner]).remove(block)
        num_free = NUM_BLOCKS - len(self.cached) - found
        for _ in range(num + 1 - found - num_free):
            (self.waiting or self.reserves[owner]).popleft()
        for i in reversed(range(num)):
            self.reserves[owner].append((owner, number, i))
            if len(self.reserves[owner]) > self.floors[owner]:
                self.waiting.append(self.reserves[owner].popleft())

    @rule(owner=st.sampled_from([*NAMES]), num_blocks=st.integers(0, 4))
    def set_floor(self, owner: int, num_blocks: int) -> None:
        if num_blocks > self.floors[owner] and any(block[0] == owner for block in self.waiting):
            return  # which blocks join the reserve is not the model's
        self.pool.set_floor(owner, num_blocks)
        self.floors[owner] = num_blocks
        while len(self.reserves[owner]) > num_blocks:
            self.waiting.append(self.reserves[owner].popleft())

    @invariant()
    def is_as_the_model_says(self) -> None:
        self.pool.check_integrity()
        for owner in NAMES:
            assert self.pool.num_reserved(owner) == len(self.reserves[owner])
            for number in range(1, 5):
                found = num_cached(self.pool, owner, prompt(number, 8))
                assert found == self.num_found(owner, number, 8)


def test_floors_beside_a_naive_model() -> None:
    run_state_machine_as_test(
        FloorMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
