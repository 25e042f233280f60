"""Requests at the edges of what pool and model can take, beside what transformers says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_planes import POOL, Pair, save_byte_model
from transformers import AutoModelForCausalLM

from engine import LLM, SamplingParams
from kvplane import ControlClient, ops
from kvplane.errors import InvalidRequestError
from kvplane.results import total_of

NUM_DEVICE_BLOCKS = 24
MAX_POSITIONS = 512  # of the model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("logs")
    with Pair(model, logs, num_device_blocks=NUM_DEVICE_BLOCKS, num_host_blocks=24) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: Path, pair: Pair) -> Iterator[LLM]:
    with LLM(model, control_plane=pair.control.address, pool_id=POOL, timeout_s=30.0) as opened:
        yield opened


def check_nothing_is_held(llm: LLM) -> None:
    for tier in llm.get_pool().usage:
        assert tier.num_held_blocks == tier.num_retired_blocks == 0
        assert tier.num_free_blocks + tier.num_cached_blocks == tier.num_blocks


def want(model: Path, ids: list[int], num_tokens: int) -> list[int]:
    """Greedy tokens by transformers, whose own end token is not heeded."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = torch.tensor([ids])
    out = reference.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=num_tokens,
        min_new_tokens=0,
        do_sample=False,
        eos_token_id=None,
    )
    return list(out[0, len(ids) :].tolist())


def test_an_answer_ends_at_the_last_position_of_the_model(model: Path, tmp_path: Path) -> None:
    with (
        Pair(model, tmp_path, num_device_blocks=40) as pair,
        LLM(model, control_plane=pair.control.address, pool_id=POOL) as llm,
    ):
        prompt = [5 + i % 90 for i in range(MAX_POSITIONS - 20)]
        params = SamplingParams(max_tokens=10_000, ignore_eos=True)
        (output,) = llm.generate([prompt], params)
        assert output.outputs[0].finish_reason == "length"
        assert output.outputs[0].token_ids == want(model, prompt, 20)
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate([prompt + prompt[:20]], params)
        assert caught.value.field == "prompts[0]"
        check_nothing_is_held(llm)


def test_four_continuations_of_many_prompts_are_the_same_in_a_pool_that_must_swap(
    llm: LLM, model: Path, tmp_path: Path
) -> None:
    prompts = [f"prompt number {i}, of some length; " * (1 + i % 3) for i in range(6)]
    params = [
        SamplingParams(max_tokens=40, ignore_eos=True, n=4, temperature=1.0, seed=i)
        for i in range(6)
    ]
    tight = llm.generate(prompts, params)
    counters = llm.get_counters()
    assert counters['swapped_blocks_total{direction="out"}'] > 0
    assert counters['swapped_blocks_total{direction="in"}'] > 0
    assert counters["copies_on_write_total"] > 0
    check_nothing_is_held(llm)
    with (
        Pair(model, tmp_path, num_device_blocks=400) as pair,
        LLM(model, control_plane=pair.control.address, pool_id=POOL) as roomy_llm,
    ):
        roomy = roomy_llm.generate(prompts, params)
        assert total_of(roomy_llm.get_counters(), "swapped_blocks_total") == 0
    for a, b in zip(tight, roomy, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


def test_a_stop_string_is_found_wherever_the_tokens_part_it(llm: LLM) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    (whole,) = llm.generate(["cut me anywhere"], params)
    text = whole.outputs[0].text
    for size in (1, 2, 3, 5):
        for at in range(0, len(text) - size, 7):
            stop = text[at : at + size]
            cut = SamplingParams(max_tokens=40, ignore_eos=True, stop=(stop, "never said"))
            (output,) = llm.generate(["cut me anywhere"], cut)
            assert output.outputs[0].text == text[: text.find(stop)]
    check_nothing_is_held(llm)


def test_a_full_pool_says_later_and_takes_the_same_prompt_once_something_was_freed(
    llm: LLM, pair: Pair
) -> None:
    async def fill() -> None:
        async with ControlClient(pair.control.address) as client:
            layout = (await client.get_pool(POOL)).layout
            async with await client.open_session(POOL, layout) as session:
                admissions = [ops.admit(i, [i] * 40) for i in range(1, 10)]
                results = (await session.step(admissions)).results
                full = [[f.is_later for f in r.failures] == [True] for r in results]
                first = full.index(True)
                assert first >= NUM_DEVICE_BLOCKS // 3 - 1
                assert all(full[first:])
                shortage = results[first].failures[0]
                assert shortage.num_blocks_needed == 3 > shortage.num_blocks_available
                # Blocks of a plan that has not run come back to the session at once.
                (await session.step([ops.free([1]), admissions[first]])).raise_for_status()

    asyncio.run(fill())
    llm.generate(["and it serves"], SamplingParams(max_tokens=2, ignore_eos=True))
    check_nothing_is_held(llm)
