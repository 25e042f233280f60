"""The engine's thread behind the HTTP server, over both planes' cores."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.request import Delta, RequestOutput, SamplingParams
from engine.serving.worker import EngineWorker
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    PlaneUnavailableError,
    QuotaExceededError,
)
from tests.helpers.engine_harness import Engine, prompt_of
from tests.helpers.refusals import refused
from tests.helpers.waiting import until

PROMPT = prompt_of(9, 1)


class Served:
    """As ``engine.LLM``, over an engine without processes."""

    def __init__(self, folder: Path) -> None:
        self.engine = Engine(folder)
        self.core = self.engine.core
        self.take_output, self.abort = self.core.take_output, self.core.abort
        self.give_up = self.core.give_up

    def submit(self, prompt: Any, params: SamplingParams) -> str:
        self.core.check_prompt(list(prompt), params, field="prompt")
        return self.core.add_request("", list(prompt), params)

    def step(self) -> list[Delta]:
        return self.core.step()

    @property
    def has_work(self) -> bool:
        return self.core.has_work


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    served = Served(folder)
    yield served
    for request_id in list(served.core._live):  # a worker that stopped leaves them to the session
        served.core.abort(request_id)
    served.engine.run()


@asynccontextmanager
async def worker_of(
    served: Served, max_requests: int = 8, num_keys: int = 0
) -> AsyncIterator[EngineWorker]:
    worker = EngineWorker(served, max_requests, num_keys)
    worker.start()
    try:
        yield worker
    finally:
        await asyncio.to_thread(worker.stop)


async def ask(worker: EngineWorker, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    """The answer, of which the deltas were the parts."""
    tokens: list[int] = []
    async with aclosing(worker.stream(lambda: prompt, SamplingParams(**params))) as events:
        async for event in events:
            if isinstance(event, Delta):
                tokens += event.token_ids
    assert isinstance(event, RequestOutput)
    assert tokens == event.outputs[0].token_ids
    return event


async def test_requests_come_and_go_while_others_run(served: Served) -> None:
    async with worker_of(served) as worker:
        alone = await ask(worker, max_tokens=20)
        together = await asyncio.gather(
            *(ask(worker, max_tokens=20 - i) for i in range(3)), ask(worker, prompt_of(5, 2))
        )
        assert worker.num_open == 0
    wanted = alone.outputs[0].token_ids
    for i, output in enumerate(together[:3]):
        assert output.outputs[0].token_ids == wanted[: 20 - i]


async def test_a_stream_that_is_closed_aborts_its_request(served: Served) -> None:
    async with worker_of(served) as worker:
        async with aclosing(worker.stream(lambda: PROMPT, SamplingParams(max_tokens=200))) as it:
            assert isinstance(await anext(it), Delta)
        waiting = asyncio.create_task(ask(worker, max_tokens=200))
        await asyncio.sleep(0)  # it has begun, and is not submitted yet or only just
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert worker.num_open == 0
        await ask(worker, max_tokens=4)
        await until(lambda: not served.has_work)
    assert served.core.stats.num_generated_tokens < 200


async def test_prompts_that_take_long_to_check_come_between_steps(
    served: Served, monkeypatch: Any
) -> None:
    num_steps: list[int] = []
    submit = served.submit

    def submit_slowly(prompt: Any, params: SamplingParams) -> str:
        num_steps.append(served.core.stats.num_steps)
        time.sleep(0.02)
        return submit(prompt, params)

    async with worker_of(served) as worker:
        running = worker.stream(lambda: PROMPT, SamplingParams(max_tokens=100))
        async with aclosing(running):
            await anext(running)
            monkeypatch.setattr(served, "submit", submit_slowly)
            await asyncio.gather(*(ask(worker, max_tokens=2) for _ in range(6)))
    assert len({*num_steps}) == 6


async def test_a_long_text_is_read_beside_steps_and_after_shorter_ones(served: Served) -> None:
    is_over, read = threading.Event(), []

    async def ask_for(worker: EngineWorker, num_characters: int) -> None:
        def note() -> Any:
            read.append(num_characters)
            is_over.wait()
            return PROMPT

        events = worker.stream(note, SamplingParams(max_tokens=1), num_characters=num_characters)
        async with aclosing(events):
            async for _ in events:
                pass

    async with worker_of(served) as worker:
        running = worker.stream(lambda: PROMPT, SamplingParams(max_tokens=20))
        async with aclosing(running):
            await anext(running)
            asked = [asyncio.create_task(ask_for(worker, 900))]
            await until(lambda: read)
            asked += [asyncio.create_task(ask_for(worker, num)) for num in (800, 700, 5)]
            assert not isinstance([event async for event in running][-1], Delta)
            assert read == [900]
            is_over.set()
            await asyncio.gather(*asked)
    assert read == [900, 5, 700, 800]


async def test_a_prompt_that_is_refused_leaves_the_others_alone(served: Served) -> None:
    def unreadable() -> Any:
        raise RuntimeError("planted")

    async with worker_of(served) as worker:
        other = asyncio.create_task(ask(worker, max_tokens=30))
        with refused(InvalidRequestError, "prompt"):
            await ask(worker, [])
        with pytest.raises(InternalError, match="the prompt was not read: RuntimeError"):
            await anext(worker.stream(unreadable, SamplingParams()))
        assert len((await other).outputs[0].token_ids) == 30


async def test_too_many_requests_are_refused(served: Served) -> None:
    async with worker_of(served, max_requests=2) as worker:
        two = [asyncio.create_task(ask(worker, max_tokens=50)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QuotaExceededError):
            await ask(worker)
        await asyncio.gather(*two)
        await ask(worker)


async def test_one_key_cannot_have_all_places(served: Served) -> None:
    async with worker_of(served, max_requests=2, num_keys=2) as worker:
        greedy = worker.stream(lambda: PROMPT, SamplingParams(max_tokens=200), key="greedy")
        async with aclosing(greedy):
            await anext(greedy)
            with pytest.raises(QuotaExceededError, match="of one key"):
                await anext(worker.stream(lambda: PROMPT, SamplingParams(), key="greedy"))
            await ask(worker, max_tokens=2)


async def test_a_failure_that_does_not_pass_fails_what_is_open_alone(served: Served) -> None:
    async with worker_of(served) as worker:
        faults = [PlaneUnavailableError("planted") for _ in range(6)]
        served.engine.link.faults = list(faults)
        with pytest.raises(PlaneUnavailableError, match="planted"):
            await ask(worker)
        assert worker.is_alive
        assert (await ask(worker, max_tokens=5)).outputs[0].finish_reason == "length"


async def test_what_comes_while_planes_are_waited_for_fails_with_what_waits(
    served: Served, monkeypatch: Any
) -> None:
    waits, is_over = threading.Event(), threading.Event()

    def step() -> list[Delta]:
        if is_over.is_set():
            return served.core.step()
        waits.set()
        is_over.wait()
        raise PlaneUnavailableError("planted")

    async with worker_of(served) as worker:
        monkeypatch.setattr(served, "step", step)
        first = asyncio.create_task(ask(worker))
        await asyncio.to_thread(waits.wait)
        second = asyncio.create_task(ask(worker))
        await until(lambda: worker._incoming)
        is_over.set()
        for each in (first, second):
            with pytest.raises(PlaneUnavailableError, match="planted"):
                await each


async def test_stopping_fails_what_is_open_and_what_comes(served: Served) -> None:
    async with worker_of(served) as worker:
        open_request = worker.stream(lambda: PROMPT, SamplingParams(max_tokens=200))
        await anext(open_request)
    with pytest.raises(PlaneUnavailableError, match="the engine is stopping"):
        async for _ in open_request:
            pass
    assert not worker.is_alive
    with pytest.raises(PlaneUnavailableError, match="the engine is stopping"):
        await ask(worker)


async def test_a_bug_ends_the_worker_and_says_so(served: Served, monkeypatch: Any) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    async with worker_of(served) as worker:
        monkeypatch.setattr(served, "step", broken)
        with pytest.raises(PlaneUnavailableError):
            await ask(worker)
        assert not worker.is_alive
    monkeypatch.undo()
