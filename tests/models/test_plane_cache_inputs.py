"""Keys and values that depend on more than token ids: images, token types, arguments of a model's
own. Each answer is compared with that of eager attention, the first and one that finds it cached.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from kvplane import LayerGroup, Layout
from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, close_planes
from tests.e2e.engine_planes import Pair
from tests.helpers import plane_cache_checks as checks
from tests.helpers.plane_cache_checks import ATOL, BLOCK_SIZE, tiny_llama
from tests.helpers.programs import run
from tests.helpers.refusals import refused
from tests.models import tiny_pictures as tiny
from tests.models.model_states import off_by
from tests.models.tiny_models import tiny_model
from tests.models.tiny_pictures import (
    FIRST,
    IMAGE,
    NUM_COLUMNS,
    NUM_OF_IMAGE,
    picture,
    prompt,
)

WHOLE = (NUM_COLUMNS - 1) // BLOCK_SIZE * BLOCK_SIZE
BEFORE_IMAGE = FIRST // BLOCK_SIZE * BLOCK_SIZE

Answer = Callable[..., list[int]]


def check(model: PreTrainedModel, cache: PlaneCache, **how: Any) -> list[int]:
    """Compare an answer with eager attention's. Returns what was found cached."""
    want = checks.answer(model, None, **how)
    assert off_by(checks.answer(model, cache, **how), want) < ATOL
    return cache.num_cached_tokens


def check_forward(model: PreTrainedModel, **how: Any) -> list[int]:
    """Compare one forward pass without ``generate``. Returns what was found cached."""
    want = checks.forward(model, None, **how).logits
    with PlaneCache(model, num_device_blocks=256) as cache:
        got = checks.forward(model, cache, **how).logits
        torch.testing.assert_close(got, want, atol=ATOL, rtol=0)
        return cache.num_cached_tokens


@pytest.fixture
def in_pool() -> Iterator[Callable[[PreTrainedModel], Answer]]:
    """Answers of a model, each from a cache of its own on one pool, which is intact at the end."""
    models: list[PreTrainedModel] = []

    def begin(model: PreTrainedModel) -> Answer:
        models.append(model)

        def answer(**how: Any) -> list[int]:
            with PlaneCache(model, num_device_blocks=256) as cache:
                return check(model, cache, **how)

        return answer

    yield begin
    for model in models:
        with PlaneCache(model, num_device_blocks=256) as cache:
            tiers = cache.get_pool().usage
            assert sum(tier.num_held_blocks for tier in tiers) == 0
            cache._planes.backend._executor.check_integrity()  # type: ignore[union-attr]
        close_planes(model)


# Images.


def test_an_image_is_found_by_itself_and_no_other(in_pool: Any) -> None:
    model = tiny.llava()
    answer = in_pool(model)
    num_computed: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(
        lambda _, arguments: num_computed.append(arguments[0].shape[1])
    )
    for seed, found in ((1, 0), (2, BEFORE_IMAGE), (1, WHOLE), (2, WHOLE)):
        num_computed.clear()
        assert answer(input_ids=prompt(), pixel_values=picture(seed)) == [found]
        of_prompts = [num for num in num_computed if num > 1]
        assert of_prompts[-1] == NUM_COLUMNS - found


def test_an_image_of_which_only_a_part_is_cached_is_computed_whole(in_pool: Any) -> None:
    answer = in_pool(tiny.llava())
    end_of_block = BEFORE_IMAGE + BLOCK_SIZE
    assert FIRST < end_of_block < FIRST + NUM_OF_IMAGE
    other = prompt()
    other[:, FIRST + NUM_OF_IMAGE :] += 1
    assert answer(input_ids=prompt(), pixel_values=picture(1)) == [0]
    assert answer(input_ids=other, pixel_values=picture(1)) == [end_of_block]
    assert answer(input_ids=other, pixel_values=picture(1)) == [WHOLE]


def test_images_in_a_batch_are_found_with_the_batch(in_pool: Any) -> None:
    """A row is behind padding, and the images are in other columns."""
    answer = in_pool(tiny.llava())
    ids = torch.cat([prompt(1), prompt(2, first=30)])
    mask = torch.ones_like(ids)
    ids[0, :3], mask[0, :3] = 0, 0
    for pictures, found in (((1, 2), 0), ((2, 1), BLOCK_SIZE), ((1, 2), None)):
        pixels = torch.cat([picture(seed) for seed in pictures])
        cached = answer(input_ids=ids, attention_mask=mask, pixel_values=pixels)
        assert cached == [found] * 2 if found is not None else min(cached) >= WHOLE - BLOCK_SIZE


def test_a_row_without_an_image_is_right_in_a_batch_with_one(in_pool: Any) -> None:
    answer = in_pool(tiny.llava())
    text = prompt(2)
    text[text == IMAGE] = 7
    for seed in (1, 2, 1):
        answer(input_ids=torch.cat([prompt(), text]), pixel_values=picture(seed))


def test_two_images_that_share_the_first_are_right(in_pool: Any) -> None:
    answer = in_pool(tiny.llava())
    ids = prompt(first=4)
    ids[:, 30 : 30 + NUM_OF_IMAGE] = IMAGE
    for second in (2, 3, 2):
        answer(input_ids=ids, pixel_values=torch.cat([picture(1), picture(second)]))


@pytest.mark.parametrize("how", [{"prefill_chunk_size": 40}, {"num_beams": 3}], ids=str)
def test_images_are_right_however_a_prompt_is_computed(in_pool: Any, how: Any) -> None:
    answer = in_pool(tiny.llava())
    for seed in (1, 2, 1):
        answer(input_ids=prompt(), pixel_values=picture(seed), **how)


def test_pixels_may_be_given_to_the_model_itself(in_pool: Any) -> None:
    """Without ``generate``, which encodes images before it calls the model."""
    model = tiny.llava()
    in_pool(model)
    for seed, found in ((1, 0), (2, BEFORE_IMAGE), (1, WHOLE)):
        how = {"input_ids": prompt(), "pixel_values": picture(seed), "logits_to_keep": 1}
        assert check_forward(model, **how) == [found]


def test_an_image_in_a_later_turn_is_not_that_of_another_branch(in_pool: Any) -> None:
    model = tiny.llava()
    in_pool(model)
    turn = torch.cat([prompt(3), prompt(4, first=10)], dim=1)
    with PlaneCache(model, num_device_blocks=256) as cache:
        first = {"input_ids": prompt(3), "pixel_values": picture(1)}
        checks.answer(model, cache, **first, max_new_tokens=1)
        for seed in (2, 3, 2):
            branch = copy.deepcopy(cache)
            both = torch.cat([picture(1), picture(seed)])
            want = checks.answer(model, None, input_ids=turn, pixel_values=both)
            got = checks.answer(model, branch, input_ids=turn, pixel_values=picture(seed))
            assert off_by(got, want) < ATOL
            branch.close()
    for seed in (3, 2):  # prompts whose ids are those that the branches wrote
        both = torch.cat([picture(1), picture(seed)])
        with PlaneCache(model, num_device_blocks=256) as cache:
            check(model, cache, input_ids=turn, pixel_values=both)


# Nightly: that processes find what equal contents left is in test_model_states.py on each push.
@pytest.mark.nightly
def test_two_processes_on_one_pool_share_an_image_and_never_two(tmp_path: Path) -> None:
    group = LayerGroup("full", tuple(range(tiny.NUM_LAYERS)), 2, 16)
    layout = Layout("llava", BLOCK_SIZE, "float32", "float32", (group,))
    found = []
    with Pair(layout, tmp_path, pool_id="default") as pair:
        for seeds in (["1"], ["2", "1", "2"]):
            done = run("tests.models.tiny_pictures", pair.control.address, *seeds)
            assert done.returncode == 0, done.stderr
            for answer in json.loads(done.stdout.splitlines()[-1]):
                assert answer["off"] < ATOL
                found += answer["found"]
    assert found == [0, BEFORE_IMAGE, WHOLE, WHOLE]


def test_images_whose_tokens_see_each_other_are_refused_and_text_is_not(in_pool: Any) -> None:
    model = tiny.gemma3()
    answer = in_pool(model)
    text = prompt()
    text[text == IMAGE] = 7
    for found in (0, WHOLE):
        types = torch.zeros_like(text)
        assert answer(input_ids=text, token_type_ids=types) == [found]
    behind_text = prompt(first=2 * BLOCK_SIZE + 3)  # of which two blocks are cached
    behind_text[:, : 2 * BLOCK_SIZE] = text[:, : 2 * BLOCK_SIZE]
    for ids in (prompt(), behind_text):
        how = {
            "input_ids": ids,
            "pixel_values": picture(1),
            "token_type_ids": (ids == IMAGE).long(),
        }
        with (
            PlaneCache(model, num_device_blocks=256) as cache,
            refused(InvalidRequestError, "attention_mask", match="lets a token see later ones"),
        ):
            checks.answer(model, cache, **how)


def test_images_with_positions_of_several_dimensions_are_refused() -> None:
    model = tiny.qwen2_vl()
    how = {"pixel_values": torch.zeros(4, 1176), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    with (
        PlaneCache(model, num_device_blocks=64) as cache,
        refused(InvalidRequestError, "image_grid_thw", match="positions of several dimensions"),
    ):
        checks.forward(model, cache, input_ids=prompt(), **how)
    close_planes(model)


def test_an_encoder_of_images_that_was_told_to_use_kvplane_says_so() -> None:
    model = tiny.llava()
    model.set_attn_implementation("kvplane")
    with (
        PlaneCache(model, num_device_blocks=64) as cache,
        torch.no_grad(),
        refused(InvalidRequestError, "model", match=r"CLIPAttention .*vision_config"),
    ):
        model(input_ids=prompt(), pixel_values=picture(1), **{checks.ARGUMENT: cache})
    close_planes(model)


# Token types, and arguments of a model's own.


def test_token_types_are_a_part_of_the_key(in_pool: Any) -> None:
    answer = in_pool(tiny_model("gpt2"))
    ids = prompt() % 60 + 3
    half = (torch.arange(NUM_COLUMNS) >= 2 * BLOCK_SIZE).long()[None]
    kinds: list[dict[str, Any]] = [{}, *({"token_type_ids": t} for t in (half, 0 * half, 2 * half))]
    for how, found in zip(kinds, (0, 0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE), strict=True):
        assert answer(input_ids=ids, **how) == [found]
    for how in kinds:
        assert answer(input_ids=ids, **how) == [WHOLE]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda types: types + 7, "from 0 to 6"),
        (lambda types: types - 1, "from 0 to 6"),
        (lambda types: types[:, 1:], r"integers \[1, 61\]"),
    ],
)
def test_token_types_without_room_in_an_id_are_refused(change: Any, message: str) -> None:
    model = tiny_model("gpt2")
    ids = prompt() % 60 + 3
    with (
        PlaneCache(model, num_device_blocks=64) as cache,
        refused(InvalidRequestError, "token_type_ids", match=message),
    ):
        checks.forward(model, cache, input_ids=ids, token_type_ids=change(torch.zeros_like(ids)))
    close_planes(model)


class Steered(LlamaForCausalLM):
    """Has an argument that nobody here has heard of, which moves every token."""

    def forward(self, input_ids: Any = None, steering: Any = None, **how: Any) -> Any:
        def move(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
            return embedded if steering is None else embedded + steering["by"][0]

        handle = self.get_input_embeddings().register_forward_hook(move)
        try:
            return super().forward(input_ids=input_ids, **how)
        finally:
            handle.remove()


def test_an_unknown_argument_is_a_part_of_the_key(in_pool: Any) -> None:
    llama = tiny_llama()
    model = Steered(llama.config).train(False)
    model.load_state_dict(llama.state_dict())
    model.generation_config.eos_token_id = None
    answer = in_pool(model)
    ids = prompt() % 60 + 3
    moves = [torch.zeros(64), torch.linspace(-1, 1, 64)]
    for by, found in zip((*moves, *moves), (0, 0, WHOLE, WHOLE), strict=True):
        how = {"input_ids": ids, "steering": {"by": [by]}, "logits_to_keep": 1}
        assert check_forward(model, **how) == [found]
    assert answer(input_ids=ids) == [0]
    with (
        PlaneCache(model, num_device_blocks=256) as cache,
        refused(InvalidRequestError, "steering", match=r"holds a object \(steering\.by\)"),
    ):
        checks.forward(model, cache, input_ids=ids, steering={"by": object()})
