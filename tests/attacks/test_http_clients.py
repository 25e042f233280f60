"""Clients of the HTTP server that the router and the engine have: none keeps a place among the
open requests for nothing, or takes more memory than is set. Tests also ask as an honest client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from kvplane.integrations.router import prompts
from kvplane.integrations.router.prompts import PromptReader
from kvplane.serving import http_requests, http_server
from tests.e2e.engine_planes import save_byte_model
from tests.helpers.routed import BODY, PATIENCE_S, Engine, Routed, chunk, routed, says_yes
from tests.helpers.waiting import until

BODY_S = 3.0  # that other requests must be answered within, also on a busy machine
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


class Raw:
    """A connection that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ended(self) -> bytes:
        """Return what came until the server closed the connection."""
        got = bytearray()
        async with asyncio.timeout(PATIENCE_S):
            try:
                while part := await self.reader.read(1 << 16):
                    got += part
            except ConnectionError:
                pass
        return bytes(got)


@asynccontextmanager
async def raw(router: Routed) -> AsyncIterator[Raw]:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        yield Raw(reader, writer)
    finally:
        writer.transport.abort()


async def is_served(router: Routed) -> None:
    assert (await router.post()).status_code == 200


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the limit of 30 s be a moment."""
    monkeypatch.setattr(http_requests, "BODY_S", BODY_S)


async def test_a_body_that_does_not_come_gives_its_place_up() -> None:
    async with routed(Engine(says_yes), max_requests=1) as router, raw(router) as slow:
        await slow.say(CHUNKED + b"1\r\n{\r\n")
        await router.until_metric("kvplane_router_open_requests", 1)
        assert (await router.post()).status_code == 429
        answer = await asyncio.wait_for(slow.reader.readuntil(b"}}"), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"did not come within" in answer
        await is_served(router)


async def test_a_body_without_end_is_read_no_further_than_it_may_be_long() -> None:
    async with routed(Engine(says_yes), max_body_bytes=4096) as router, raw(router) as endless:
        answer = asyncio.create_task(endless.reader.readline())
        await endless.say(CHUNKED)
        while not answer.done():
            await endless.say(chunk(bytes(1024)))
            await asyncio.sleep(0)
        assert (await answer).startswith(b"HTTP/1.1 400 ")
        await is_served(router)


async def test_a_refused_body_that_ends_leaves_the_connection_open() -> None:
    async with routed(Engine(says_yes), max_body_bytes=1024) as router, raw(router) as client:
        body = json.dumps(BODY).encode()
        await client.say(HEAD + b"content-length: 4096\r\n\r\n" + bytes(2048))
        refused = await asyncio.wait_for(client.reader.readuntil(b"}}"), PATIENCE_S)
        assert refused.startswith(b"HTTP/1.1 400 ")
        await client.say(
            bytes(2048) + HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body
        )
        answer = await asyncio.wait_for(client.reader.readuntil(b'{"yes": 1}'), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 200 ")


async def test_a_large_body_has_longer_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_requests, "BODY_S", 1.0)
    bounds = {"max_body_bytes": 8 << 20}
    async with routed(Engine(says_yes), **bounds) as router, raw(router) as slow:
        await slow.say(CHUNKED + chunk(b" " * (4 << 20)))
        await asyncio.sleep(2.0)
        await slow.say(chunk(json.dumps(BODY).encode()) + b"0\r\n\r\n")
        answer = await asyncio.wait_for(slow.reader.readline(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("max_connections", [0, 3])
async def test_connections_that_say_nothing_are_bounded(
    monkeypatch: pytest.MonkeyPatch, max_connections: int
) -> None:
    monkeypatch.setattr(http_server, "most_connections", lambda: 3)
    async with routed(Engine(says_yes), max_connections=max_connections) as router:
        await is_served(router)  # one connection stays open for this client
        async with raw(router), raw(router), raw(router) as too_many:
            assert await too_many.ended() == b""
            await is_served(router)
        line = b""
        async with asyncio.timeout(PATIENCE_S):
            while not line.startswith(b"HTTP/1.1 404 "):  # until they are closed
                async with raw(router) as client:
                    await client.say(HEAD + b"content-length: 2\r\n\r\n{}")
                    line = await client.reader.readline()


async def test_metrics_and_liveness_answer_while_the_server_is_busy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with routed(Engine(says_yes), metrics_port=0) as router:
        (port,) = re.findall(r"metrics port=(\d+)", caplog.text)

        def ask() -> tuple[float, set[int]]:
            began_s = time.monotonic()
            paths = ("/healthz", "/metrics")
            got = {httpx2.get(f"http://127.0.0.1:{port}{path}").status_code for path in paths}
            return time.monotonic() - began_s, got

        asked = asyncio.create_task(asyncio.to_thread(ask))
        await asyncio.sleep(0)
        busy_until_s = time.monotonic() + 3.0
        while time.monotonic() < busy_until_s:
            pass
        took_s, statuses = await asked
        assert (took_s < 2.0, statuses) == (True, {200})
        await is_served(router)


@pytest.mark.parametrize(
    ("said", "status"),
    [
        pytest.param(HEAD + b"x: y\r\n" * 4096, b"400", id="head_without_end"),
        pytest.param(HEAD + b"content-length: 2\r\n\r\n{}", b"404", id="idle_after_an_answer"),
        pytest.param(b"\x16\x03\x01 no http\r\n\r\n", b"400", id="no_http"),
    ],
)
async def test_a_connection_that_says_no_more_is_answered_and_closed(
    said: bytes, status: bytes
) -> None:
    async with routed(Engine(says_yes)) as router, raw(router) as client:
        await client.say(said)
        assert (await client.ended()).startswith(b"HTTP/1.1 %s " % status)
        await is_served(router)


async def test_a_connection_may_be_idle_for_as_long_as_is_set() -> None:
    said = HEAD + b"content-length: 2\r\n\r\n{}"
    async with routed(Engine(says_yes), idle_timeout_s=0.5) as router, raw(router) as client:
        await client.say(said)
        async with asyncio.timeout(4.0):
            await client.ended()
    async with routed(Engine(says_yes), idle_timeout_s=60.0) as router, raw(router) as client:
        await client.say(said)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(6.0):
                await client.ended()


async def test_requests_that_two_servers_could_read_differently_reach_no_engine() -> None:
    """Two lengths, or a length and chunks: what the engine gets has one length, the body's."""
    engine = Engine(says_yes)
    body = json.dumps(BODY).encode()
    inner = b"0\r\n\r\nPOST /v1/collective HTTP/1.1\r\n\r\n"
    async with routed(engine) as router:
        for lengths in (
            b"content-length: 2\r\ncontent-length: 90\r\n",
            b"transfer-encoding: xchunked\r\n",
            b"transfer-encoding: chunked, identity\r\n",
            b"content-length: +2\r\n",
            b"content-length : 2\r\n",
        ):
            async with raw(router) as client:
                await client.say(HEAD + lengths + b"\r\n" + inner)
                status = (await client.ended()).split(b" ", 2)[1]
            assert status in (b"400", b"501"), lengths
        async with raw(router) as client:
            both = b"content-length: 3\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
            await client.say(HEAD + both + chunk(body) + b"0\r\n\r\n")
            assert (await client.ended()).startswith(b"HTTP/1.1 200 ")
    ((_, headers, got),) = engine.requests
    assert (int(headers["content-length"]), got) == (len(body), body)
    assert "transfer-encoding" not in headers


@pytest.mark.parametrize("host", ["x/collective_rpc?", "x#", "[::1", "a@b/..", "x\\y", "x:99999/z"])
async def test_a_host_header_does_not_choose_the_path(host: str) -> None:
    engine = Engine(says_yes)
    async with routed(engine) as router:
        answer = await router.post(headers={"host": host})
        assert answer.status_code == 200
    assert [path for path, _, _ in engine.requests] == ["/v1/completions"]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions/../../sleep", "/v1//completions", "/v1/completions%2f..%2fsleep"),
        *("//evil/v1/completions", "/V1/COMPLETIONS", "/v1/completions;x", "/sleep"),
    ],
)
async def test_other_paths_reach_no_engine(path: str) -> None:
    engine = Engine(says_yes)
    async with routed(engine) as router, raw(router) as client:
        start = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode()
        await client.say(start + b"content-length: 2\r\n\r\n{}")
        assert (await client.ended()).startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 405 "))
    assert engine.requests == []


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 4000,
        b'{"prompt":' * 400,
        b'{"prompt":[' + b"9" * 4000 + b"]}",
        b'{"prompt":[1e999,-1,2147483648]}',
        b'{"prompt":"\\ud800"}',
        b"\xff\xfe",
        b"null",
    ],
    ids=range(7),
)
async def test_json_that_is_deep_or_large_is_refused_or_passed_on(body: bytes) -> None:
    async with routed(Engine(says_yes), max_body_bytes=8192) as router:
        answer = await router.http.post("/v1/completions", content=body)
        assert answer.status_code in (400, 404)
        assert await router.metric('kvplane_router_requests_total{status="500"') == 0
        await is_served(router)


async def test_bodies_take_no_more_memory_than_is_set() -> None:
    """The limit is of requests that no engine has begun to answer; others wait."""
    engine = Engine(says_nothing_until_told)
    body = {"model": "m", "prompt": list(range(100, 13_000))}
    num_bytes = len(json.dumps(body))
    bounds = {"max_requests": 64, "max_body_bytes": 1 << 17, "max_received_bytes": 4 * num_bytes}
    async with routed(engine, **bounds) as router:
        tracemalloc.start()
        try:
            asked = [asyncio.create_task(router.post(body)) for _ in range(16)]
            await until(lambda: sum(task.done() for task in asked) >= 12)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert {task.result().status_code for task in asked if task.done()} == {429}
        assert most_bytes < 100 * num_bytes
        engine.go_on.set()
        answers = await asyncio.gather(*asked)
        assert sorted(answer.status_code for answer in answers) == [200] * 4 + [429] * 12
        assert (await router.post(body)).status_code == 200


async def says_nothing_until_told(
    engine: Engine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    await engine.go_on.wait()
    await says_yes(engine, reader, writer)


async def test_one_key_cannot_have_all_places() -> None:
    engine = Engine(says_nothing_until_told)
    async with routed(engine, max_requests=4, api_keys=("greedy", "honest")) as router:
        greedy, honest = ({"authorization": f"Bearer {key}"} for key in ("greedy", "honest"))
        asked = [asyncio.create_task(router.post(headers=greedy)) for _ in range(4)]
        await until(lambda: sum(task.done() for task in asked) >= 2)
        assert {task.result().status_code for task in asked if task.done()} == {429}
        served = asyncio.create_task(router.post(headers=honest))
        await router.until_metric("kvplane_router_open_requests", 3)
        engine.go_on.set()
        assert (await served).status_code == 200
        await asyncio.gather(*asked)


async def test_long_texts_do_not_keep_others_from_the_tokenizer(tmp_path: Path) -> None:
    """A text that would wait for long is sent to an engine unread."""
    reader = PromptReader(save_byte_model(tmp_path))
    text = "a" * (prompts.MAX_WAITING_CHARACTERS - 1000)
    try:
        flood = [asyncio.create_task(reader.read({"prompt": text})) for _ in range(16)]
        flood += [asyncio.create_task(reader.read({"messages": [{}] * 10_000})) for _ in range(16)]
        await asyncio.sleep(0)
        honest = await reader.read({"prompt": "hello"})
        assert honest.num_unread_tokens == 0
        assert len(honest.token_ids[0]) > 0
        told = await asyncio.gather(*flood)
        assert sum(bool(each.token_ids) for each in told) == 1
        assert sum(each.num_unread_tokens > 0 for each in told) == 15
        many = await reader.read({"prompt": [[1, 2, 3]] * 100_000})
        assert len(many.token_ids) == prompts.MAX_PROMPTS
    finally:
        reader.close()
