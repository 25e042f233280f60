"""The examples do what they say, on two pools of one control plane."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvplane import ControlClient, DataClient, ops
from kvplane.results import total_of
from tests.helpers.both_planes import LAYOUT, Planes, StartServer, run_step

ROOT = Path(__file__).parents[2]
POOLS = ("east", "west")
PATIENCE_S = 60.0


def example(name: str, folder: str = "examples") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture
async def two_pools(
    start_control_plane: StartServer, tmp_path: Path
) -> AsyncIterator[ControlClient]:
    planes = Planes(start_control_plane, tmp_path)
    await planes.start(POOLS[0])
    first = planes.data
    await planes.start_data("127.0.0.1:0", POOLS[1])
    async with ControlClient(planes.control.address) as control:
        for pool_id in POOLS:
            await control.wait_ready(pool_id)
        yield control
    await first.stop()
    await planes.data.stop()


async def cache(control: ControlClient, pool_id: str, prompt: list[int]) -> None:
    """Compute a prompt in a pool and leave it cached."""
    session = await control.open_session(pool_id, LAYOUT)
    data = DataClient(session.shards[0].address)
    async with session, data, await data.open(session.grant) as execution:
        await run_step(session, execution, ops.admit(1, prompt))
        await session.submit_receipts()


async def until(holds: Callable[[], bool]) -> None:
    """The feed is not waited for by anybody."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


async def test_the_router_sends_a_prompt_where_most_of_it_is(two_pools: ControlClient) -> None:
    rng = random.Random(3)
    prompt = rng.choices(range(1000), k=48)
    router = example("example", "integrations/router").Router(two_pools)
    await cache(two_pools, "east", prompt[:16])
    await router.start()
    assert router.choose(prompt) == ("east", 16)
    await cache(two_pools, "west", prompt[:40])
    await until(lambda: router.choose(prompt) == ("west", 40))
    matches = {
        match.pool_id: match.num_device_tokens for match in await two_pools.find_prefix(prompt)
    }
    assert matches == {"east": 16, "west": 40}
    assert router.choose(prompt) == ("west", 40)
    assert router.choose(prompt[:7]) == ("east", 0)
    await two_pools.forget_prefixes("west", prompt[:8])
    await until(lambda: router.choose(prompt) == ("east", 16))
    assert router.choose(prompt) == ("east", 16)
    await router.stop()


def unpaged(model: Any, tokens: list[int]) -> int:
    """The token after ``tokens``, from attention over arrays that are made anew."""
    hidden = model.embed(tokens, range(len(tokens)))
    for layer in range(len(model.weights)):
        query, key, value = (each.swapaxes(0, 1) for each in model.inputs(hidden, layer))
        scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = weights / weights.sum(axis=-1, keepdims=True) @ value
        hidden = hidden + attended.swapaxes(0, 1).reshape(hidden.shape)
    return int(model.answers(hidden[-1:])[0])


FULL = pytest.param(16, id="without_room", marks=pytest.mark.nightly)  # takes several seconds


@pytest.mark.parametrize("num_prompts", [pytest.param(3, id="with_room"), FULL])
async def test_an_engine_with_the_adapter_answers_as_without_pages(
    two_pools: ControlClient, capsys: pytest.CaptureFixture[str], num_prompts: int
) -> None:
    adapter = example("engine_adapter")
    address = two_pools._connection.target
    answers = await asyncio.to_thread(adapter.main, address, POOLS[0], num_prompts)
    model = adapter.Model(LAYOUT)
    for tokens in answers:
        for end in range(len(tokens) - 24, len(tokens)):
            assert tokens[end] == unpaged(model, tokens[:end])
    assert len({tuple(tokens[-8:]) for tokens in answers}) > 1
    printed = capsys.readouterr().out
    assert printed.endswith("room: 0\n") == (num_prompts == 3)
    counters = await two_pools.get_counters(POOLS[0])
    assert total_of(counters, "hit_tokens_total") > 0
    assert total_of(counters, "sequences") == 0
