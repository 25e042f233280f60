"""Random walks over the native core, which is checked after every step; see native_machine.py."""

from __future__ import annotations

from random import Random

import pytest

from tests.helpers.native.native_machine import GROUPED_SHAPES, SHAPES, Shape, Walk


def walk(seed: int, shape: Shape, num_steps: int) -> None:
    walk = Walk(Random(seed), shape)
    for _ in range(num_steps):
        walk.act()
        walk.world.check()
    walk.finish()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_walks(shape: Shape) -> None:
    for seed in range(10):
        walk(seed, shape, num_steps=120)


@pytest.mark.parametrize("shape", GROUPED_SHAPES, ids=str)
def test_walks_of_several_groups(shape: Shape) -> None:
    for seed in range(10):
        walk(seed, shape, num_steps=120)


def test_what_a_plan_swaps_out_to_and_gives_up_it_does_not_allocate_again() -> None:
    (shape,) = (shape for shape in SHAPES if str(shape).startswith("1-200+40w70"))
    walk(107, shape, num_steps=1000)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("shape", [*SHAPES, *GROUPED_SHAPES], ids=str)
def test_long_walks(shape: Shape) -> None:
    for seed in range(100, 150):
        walk(seed, shape, num_steps=1000)
