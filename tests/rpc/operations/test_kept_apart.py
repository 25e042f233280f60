"""What token ids do not tell apart: weights and adapters, which have namespaces, and
images, whose hashes are written into the ids. KV of one is never found for another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvplane import ops
from kvplane.prefixes import ForgetScope
from tests.helpers.planning.operations_world import BLOCK, World, prompt

PAGE = Path(__file__).parents[3] / "docs" / "clients.md"
PLACEHOLDER = 32_000
CAT, DOG = (hashlib.sha256(pixels).digest() for pixels in (b"cat", b"dog"))


@pytest.fixture
async def world(start_world) -> World:
    return await start_world(num_device_blocks=32)


# Weights.


async def test_new_and_old_weights_find_only_what_they_wrote(world) -> None:
    """An engine that has not been replaced yet goes on with its own KV."""
    old, new = await world.caller("weights-1"), await world.caller("weights-2")
    await old.admit(1, prompt(1))
    await old.retain(prompt(1), time_to_live_s=60)
    assert await new.num_cached(prompt(3)) == 0
    assert await new.blocks(prompt(3)) == ()
    assert (await new.admit(1, prompt(3))).num_cached_tokens == 0
    assert not {*await old.table(1)} & {*await new.table(1)}
    assert (await old.admit(2, prompt(3))).num_cached_tokens == BLOCK
    assert (await old.table(2))[0] == (await old.table(1))[0]


async def test_each_of_two_weights_is_found_and_forgotten_where_it_is_named(world) -> None:
    old, new = await world.caller("weights-1"), await world.caller("weights-2")
    await old.cache(prompt(3))
    await new.cache(prompt(2))
    for namespace, num_blocks in (("weights-1", 3), ("weights-2", 2), ("", 0), ("weights-3", 0)):
        (match,) = await world.client.find_prefix(prompt(3), namespace=namespace)
        assert match.num_device_tokens == num_blocks * BLOCK
    await old.forget(ForgetScope.NAMESPACE)
    assert (await world.usage())["cached"] == 2
    assert await old.num_cached(prompt(3)) == 0
    assert await new.num_cached(prompt(3)) == 2 * BLOCK


# Adapters.


async def test_sessions_of_one_adapter_share_and_those_of_others_do_not(world) -> None:
    names = ["", "lora-7", "lora-7", "lora-8"]
    callers = [await world.caller(name) for name in names]
    found = [(await caller.admit(1, prompt(2))).num_cached_tokens for caller in callers]
    assert found == [0, 0, 2 * BLOCK, 0]
    base, first, second, other = [(await caller.table(1))[:2] for caller in callers]
    assert first == second
    assert len({*base, *first, *other}) == 6
    for caller in callers:  # with all of it cached, and computed further
        await caller.grow(1, *range(BLOCK))
        await caller.do(ops.free(1))
    found = [(await caller.admit(2, prompt(2))).num_cached_tokens for caller in callers]
    assert found == [2 * BLOCK] * 4


async def test_a_retention_and_its_end_concern_one_adapter(world) -> None:
    base, adapter = await world.caller(), await world.caller("lora-7")
    for caller in (base, adapter):
        await caller.admit(1, prompt(2))
        await caller.retain(prompt(2), time_to_live_s=60, priority=90)
    assert await adapter.retain(prompt(2), time_to_live_s=None) == 2
    assert [block.priority for block in await base.blocks(prompt(2))] == [90, 90]
    assert [block.priority for block in await adapter.blocks(prompt(2))] == [0, 0]


# Images.


@pytest.fixture(scope="module")
def with_images() -> Callable[..., list[int]]:
    """As the page for users has it."""
    (source,) = re.findall(
        r"```python\n((?:(?!```).)*?def with_images.*?)```", PAGE.read_text(), re.DOTALL
    )
    names: dict[str, Any] = {}
    exec(source, names)
    found: Callable[..., list[int]] = names["with_images"]
    return found


def about_an_image(position: int) -> list[int]:
    """A prompt that shows an image from this position on, and asks something about it."""
    return [*range(position), *[PLACEHOLDER] * (2 * BLOCK), *range(100, 100 + BLOCK)]


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1])
async def test_different_images_of_equal_placeholders_share_only_what_is_before_them(
    world, with_images, offset
) -> None:
    """However little of the image is in the first block that has some of it."""
    position = BLOCK + offset
    tokens = about_an_image(position)
    cat, dog = (with_images(tokens, {position: image}, BLOCK) for image in (CAT, DOG))
    differ = [first != second for first, second in zip(cat, dog, strict=True)]
    assert all(differ[BLOCK : 2 * BLOCK]), "all of the hash is in the first block with the image"
    one, other = await world.caller(), await world.caller()
    await one.admit(1, cat)
    assert (await other.admit(1, dog)).num_cached_tokens == BLOCK, "the text's first block"
    first, second = await one.table(1), await other.table(1)
    assert first[0] == second[0]
    assert not {*first[1:]} & {*second[1:]}
    full = len(tokens) // BLOCK * BLOCK
    assert (await other.admit(2, [*cat, 5])).num_cached_tokens == full
    assert (await one.admit(2, [*dog, 5])).num_cached_tokens == full


async def test_placeholders_alone_do_not_tell_images_apart(world) -> None:
    """Why the page says what to send."""
    caller = await world.caller()
    await caller.admit(1, about_an_image(BLOCK))
    assert await caller.num_cached(about_an_image(BLOCK)) >= 3 * BLOCK


async def test_the_same_images_in_another_order_are_another_prompt(world, with_images) -> None:
    """Both begin in one block."""
    caller = await world.caller()
    tokens = [*range(2), PLACEHOLDER, 3, PLACEHOLDER, *range(10, 10 + BLOCK)]
    await caller.admit(1, with_images(tokens, {2: CAT, 4: DOG}, BLOCK))
    for images in ({2: DOG, 4: CAT}, {2: CAT}, {4: DOG}, {2: CAT, 4: CAT}, {}):
        assert await caller.num_cached(with_images(tokens, images, BLOCK)) == 0
    assert await caller.num_cached(with_images(tokens, {4: DOG, 2: CAT}, BLOCK)) == BLOCK


async def test_a_router_finds_an_image_by_the_ids_that_were_sent(world, with_images) -> None:
    caller = await world.caller()
    tokens = about_an_image(3)
    await caller.admit(1, with_images(tokens, {3: CAT}, BLOCK))
    for images, num_blocks in (({3: CAT}, 3), ({3: DOG}, 0), ({}, 0)):
        (match,) = await world.client.find_prefix(with_images(tokens, images, BLOCK))
        assert match.num_device_tokens == num_blocks * BLOCK


def test_ids_with_images_are_ids_that_the_wire_takes(with_images) -> None:
    tokens = about_an_image(BLOCK - 1)
    ids = with_images(tokens, {BLOCK - 1: CAT}, BLOCK)
    assert len(ids) == len(tokens)
    assert all(0 <= token_id < 2**31 for token_id in ids)
    assert ids[BLOCK:] == tokens[BLOCK:]
    assert with_images(tokens[:3], {2: CAT}, BLOCK) != tokens[:3], "a prompt of part of a block"
