"""What token ids do not tell apart: weights and adapters, which have namespaces, and
images, whose hashes are written into the ids. KV of one is never found for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from kvplane import ops
from kvplane.prefixes import ForgetScope
from tests.helpers.documents import blocks
from tests.helpers.planning.operations_world import BLOCK, World, prompt

PLACEHOLDER = 32_000
CAT, DOG = (hashlib.sha256(pixels).digest() for pixels in (b"cat", b"dog"))


@pytest.fixture
async def world(start_world) -> World:
    return await start_world(num_device_blocks=32)


# Weights.


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
    (source,) = blocks("engine-guide.md", "python", "Images and adapters")
    names: dict[str, Any] = {}
    exec(source, names)
    found: Callable[..., list[int]] = names["with_images"]
    return found


def about_an_image(position: int) -> list[int]:
    """A prompt that shows an image from this position on, and asks something about it."""
    return [*range(position), *[PLACEHOLDER] * (2 * BLOCK), *range(100, 100 + BLOCK)]


@pytest.mark.parametrize("offset", [0, 1, BLOCK - 1])
def test_all_of_an_images_hash_is_in_the_first_block_that_has_some_of_it(
    with_images, offset
) -> None:
    """In ids that the wire takes; what is before the image is left as it is."""
    position = BLOCK + offset
    tokens = about_an_image(position)
    cat, dog = (with_images(tokens, {position: image}, BLOCK) for image in (CAT, DOG))
    differ = [first != second for first, second in zip(cat, dog, strict=True)]
    assert differ == [BLOCK <= i < 2 * BLOCK for i in range(len(tokens))]
    assert all(0 <= token_id < 2**31 for token_id in cat)
    assert with_images(tokens[: position + 1], {position: CAT}, BLOCK) != tokens[: position + 1]


def test_the_same_images_in_another_order_are_another_prompt(with_images) -> None:
    """Both begin in one block."""
    tokens = [*range(2), PLACEHOLDER, 3, PLACEHOLDER, *range(10, 10 + BLOCK)]
    ids = with_images(tokens, {2: CAT, 4: DOG}, BLOCK)
    assert with_images(tokens, {4: DOG, 2: CAT}, BLOCK) == ids
    for images in ({2: DOG, 4: CAT}, {2: CAT}, {4: DOG}, {2: CAT, 4: CAT}, {}):
        assert with_images(tokens, images, BLOCK)[:BLOCK] != ids[:BLOCK]
