"""Routers before two engines with a pool each, as OpenAI's own client sees them."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from transformers import AutoTokenizer

from tests.e2e.engine_planes import Process, save_byte_model
from tests.helpers.http_programs import HttpProgram
from tests.helpers.waiting import wait_until

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
ROUTER = "kvplane.integrations.router"
POOLS = ("first", "second")
NUMBERS = itertools.count()  # of prompts: none is cached when it is sent first
# Two engines start, and two routers.
pytestmark = pytest.mark.timeout(400)


class Fleet:
    """Two engines and two routers."""

    def __init__(self, folder: Path) -> None:
        model = save_byte_model(folder / "byte-model")
        tokenizer = AutoTokenizer.from_pretrained(model)
        tokenizer.chat_template = TEMPLATE
        tokenizer.save_pretrained(model)
        self.control = Process("control_plane", folder / "control.log").start()
        control = ("--control-plane", self.control.address)
        self.engines = [
            HttpProgram(
                *(folder, pool, "engine", "serve", "--model", str(model), *control),
                *("--data-plane", "embedded", "--pool-id", pool, "--num-device-blocks", "64"),
                *("--num-host-blocks", "0", "--num-threads", "1", "--no-probe"),
            )
            for pool in POOLS
        ]
        for engine in self.engines:
            engine.start()
        for engine in self.engines:
            engine.wait()
        listed = [f"{e.url}={pool}" for e, pool in zip(self.engines, POOLS, strict=True)]
        self.routers = [
            HttpProgram(
                *(
                    folder,
                    name,
                    ROUTER,
                    "--engine",
                    ",".join(listed),
                    *control,
                ),
                *("--check-interval-s", "0.2", *reads),
            )
            for name, reads in (("reads", ("--tokenizer", str(model))), ("reads-ids-alone", ()))
        ]
        for router in self.routers:
            router.start()
        for router in self.routers:
            router.wait()

    def stop(self) -> None:
        for program in (*self.routers, *self.engines):
            program.stop()
        self.control.stop()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    running = Fleet(tmp_path_factory.mktemp("router"))
    yield running
    running.stop()


def client(program: HttpProgram) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{program.url}/v1", api_key="none", max_retries=0)


def complete(program: HttpProgram, prompt: Any, **how: Any) -> tuple[Any, str, int]:
    """Return the completion, the pool that it came from, and how much of it was known there."""
    how = {"max_tokens": 8, "temperature": 0} | how
    with client(program) as openai_client:
        raw = openai_client.completions.with_raw_response.create(
            model="byte-model", prompt=prompt, **how
        )
        pool, cached = raw.headers["x-kvplane-pool"], raw.headers["x-kvplane-cached-tokens"]
        return raw.parse(), pool, int(cached)


def test_a_prompt_goes_where_it_is_cached(fleet: Fleet) -> None:
    router = fleet.routers[0]

    def num_known(pool: str) -> float:
        return router.metric(f'kvplane_router_pool_blocks{{pool="{pool}"}}')

    for _ in range(4):
        prompt = f"{next(NUMBERS)} is a prompt of more than three blocks of sixteen tokens"
        blocks = len(prompt.encode()) // 16 * 16
        before = {pool: num_known(pool) for pool in POOLS}
        want, pool, cached = complete(router, prompt)
        assert cached == 0
        # Asking again before the index is known could have the prompt computed in both pools.
        enough = before[pool] + blocks // 16
        wait_until(lambda pool=pool, enough=enough: num_known(pool) >= enough, 90.0)
        again, other, cached = complete(router, prompt)
        assert (again.choices[0].text, other, cached) == (want.choices[0].text, pool, blocks)
        assert again.usage.prompt_tokens_details.cached_tokens == blocks
        other_engine = fleet.engines[1 - POOLS.index(pool)]
        with client(other_engine) as direct:
            answer = direct.completions.create(
                model="byte-model", prompt=prompt, max_tokens=8, temperature=0
            )
        assert answer.choices[0].text == want.choices[0].text


def test_chats_and_streams_pass_through(fleet: Fleet) -> None:
    messages: Any = [{"role": "user", "content": "hello, which is not so short a greeting"}]
    how: Any = {"model": "byte-model", "messages": messages, "max_tokens": 8, "temperature": 0}
    with client(fleet.engines[0]) as direct, client(fleet.routers[0]) as routed:
        want = direct.chat.completions.create(**how).choices[0].message.content
        chunks = list(routed.chat.completions.create(stream=True, **how))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == want
        assert len(chunks) > 2
        whole = routed.chat.completions.create(**how)
        assert whole.choices[0].message.content == want
        assert [model.id for model in routed.models.list()] == ["byte-model"]
        with pytest.raises(openai.BadRequestError, match="temperature"):
            routed.chat.completions.create(**how | {"temperature": -1})
        with pytest.raises(openai.NotFoundError, match="'other' is not served"):
            routed.chat.completions.create(**how | {"model": "other"})
    assert fleet.routers[0].request("GET", "/healthz")[0] == 200
    assert fleet.routers[0].metric("kvplane_router_first_byte_seconds_count") >= 1


def test_two_routers_agree_also_after_one_has_started_again(fleet: Fleet) -> None:
    one, two = fleet.routers
    prompts: list[list[int]] = []

    def known(router: HttpProgram) -> list[tuple[str, int]]:
        return [complete(router, prompt, max_tokens=1)[1:] for prompt in prompts]

    def send_others() -> list[tuple[str, int]]:
        """Return each new prompt's pool, and how much should be found there: all but a token."""
        prompts.clear()
        sent = []
        for _ in range(3):
            text = f"{next(NUMBERS):03} is known to each router"
            text += "." * (49 - len(text))
            sent.append((complete(one, text)[1], 48))
            prompts.append([byte + 3 for byte in text.encode()])
        return sent

    want: list[tuple[str, int]] = []

    def agree() -> bool:
        # With other prompts each time: one that was asked for before its index was known is
        # computed in both pools, and then goes to either.
        want[:] = send_others()
        return all(known(router) == want for router in (one, two))  # the second has sent none

    wait_until(agree, 90.0)
    two.process.kill()
    two.process.wait()
    two.start()
    two.wait()
    assert known(two) == known(one) == want


def test_the_engine_that_is_left_answers(fleet: Fleet) -> None:
    router = fleet.routers[1]
    os.kill(fleet.engines[0].process.pid, signal.SIGKILL)
    for _ in range(4):
        answer, pool, _ = complete(router, f"{next(NUMBERS)} goes to whoever is left")
        assert (pool, answer.usage.completion_tokens) == (POOLS[1], 8)
    assert router.request("GET", "/healthz")[0] == 200
    assert router.stop() == 0
    log = router.log.read_text()
    assert "Traceback" not in log
    assert "HTTP Request" not in log, "a line for each request would hide the others"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_router_that_waits_for_its_pools_ends_when_it_is_told_to(
    tmp_path: Path, number: signal.Signals
) -> None:
    flags = ("--engine", "http://127.0.0.1:9=first", "--control-plane", "127.0.0.1:9")
    router = HttpProgram(tmp_path, "router", ROUTER, *flags, "--log-level", "debug")
    router.start()
    wait_until(lambda: router.log.exists() and "is not described" in router.log.read_text())
    router.process.send_signal(number)
    assert router.process.wait(5.0) == 0
    printed = router.log.read_text()
    assert "listening" not in printed
    assert "Traceback" not in printed
