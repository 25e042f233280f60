"""A check says what the step that follows answers, and changes nothing, in random states."""

from __future__ import annotations

from collections import Counter
from random import SystemRandom

import pytest

from control_plane.steps.operations import OPERATIONS
from tests.helpers.core.checked_walk import PAIRS_OF_A_WORLD, CheckedWalk

OFTEN_SEEN = (
    *(f"{name}: OK" for name in OPERATIONS),
    *(f"{name}: INVALID_REQUEST" for name in OPERATIONS if name != "free"),
    *(f"admit: LATER {why}" for why in ("BLOCKS", "GROWTH", "QUEUE")),
    *(f"fork: {why}" for why in ("QUOTA_EXCEEDED", "SEQUENCE_EXISTS", "SEQUENCE_NOT_FOUND")),
    *(f"swap: {why}" for why in ("LATER BLOCKS", "NEVER BLOCKS", "SEQUENCE_SWAPPED")),
    "admit: SEQUENCE_EXISTS",
    "append: LATER BLOCKS",
    "append: SEQUENCE_SWAPPED",
    "append: TOO_MANY_PLANS_IN_FLIGHT",
    "swap: LATER QUEUE",
)
SELDOM_SEEN = (
    *(f"{name}: LATER {why}" for name in ("admit", "swap") for why in ("HEADROOM", "QUOTA")),
    *(f"append: {why}" for why in ("LATER QUOTA", "NEVER BLOCKS", "NEVER QUOTA")),
    *(f"{name}: SEQUENCE_REVOKED" for name in ("append", "fork", "truncate")),
    *(f"admit: NEVER {why}" for why in ("BLOCKS", "QUOTA")),
    "free: INVALID_REQUEST",
    "swap: LATER GROWTH",
)


def walk_worlds(first_seed: int, num_worlds: int) -> Counter[str]:
    """Walk in worlds of these seeds; return how often each kind of answer was seen."""
    seen: Counter[str] = Counter()
    for seed in range(first_seed, first_seed + num_worlds):
        walk = CheckedWalk(seed)
        walk.walk(PAIRS_OF_A_WORLD)
        seen += walk.seen
    return seen


def assert_seen(seen: Counter[str], kinds: tuple[str, ...]) -> None:
    """Assert that there was an answer of each kind, or the walk proves nothing of it."""
    missing = [kind for kind in kinds if not seen[kind]]
    assert not missing, seen


def test_a_check_says_what_the_step_answers() -> None:
    assert_seen(walk_worlds(0, 12), OFTEN_SEEN)


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_check_says_what_the_step_answers_in_many_worlds() -> None:
    """Takes 10^5 pairs, other ones each night. A failure is printed with its seed."""
    assert_seen(walk_worlds(SystemRandom().randrange(2**40), 400), OFTEN_SEEN + SELDOM_SEEN)
