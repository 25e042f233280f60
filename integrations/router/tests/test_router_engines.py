"""Engines that answer the router as they should not: what one does harms neither the router nor
clients of others.
"""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from contextlib import suppress

import pytest

from kvplane.integrations.router import engines as of_engines
from tests.helpers.routed import BODY, STREAM, Engine, Script, chunk, routed, says_yes, whole

SHORT_S = 0.5


async def gives_a_cookie(
    engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    number = len(engine.requests)
    writer.write(whole(b"{}", headers=f"set-cookie: whose{number}=that; Path=/\r\n"))


async def test_a_cookie_of_one_client_is_not_shown_for_another() -> None:
    engine = Engine(gives_a_cookie)
    async with routed(engine) as router:
        for _ in range(3):
            answer = await router.post()
            router.http.cookies.clear()
            assert "set-cookie" in answer.headers
    assert len(engine.requests) == 3
    assert all("cookie" not in headers for _, headers, _ in engine.requests)


async def breaks(engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()


async def test_a_request_that_breaks_engines_comes_to_two_and_no_more() -> None:
    engines = [Engine(breaks) for _ in range(4)]
    async with routed(*engines) as router:
        answer = await router.post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "plane_unavailable")
    assert sum(len(engine.requests) for engine in engines) == 2


def says(*parts: bytes) -> Script:
    async def script(engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
        writer.transport.close()

    return script


@pytest.mark.parametrize(
    "script",
    [
        says(b"HTTP/1.1 999 What\r\ncontent-length: 2\r\n\r\n{}"),
        says(b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\n\r\n"),
        says(*[b"HTTP/1.1 100 Continue\r\n\r\n"] * 100, b"HTTP/1.1 000 \r\n\r\n"),
        says(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 100_000 + b"\r\n"),
        says(b"HTTP/1.1 200 OK\r\nx: a\x00b\r\n\r\n{}"),
        says(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n{}"),
        says(b"SSH-2.0-x\r\n\r\n"),
        says(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"),
    ],
    ids=range(8),
)
async def test_what_is_no_answer_is_not_passed_on(
    script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Engine(script), Engine(says_yes)
    async with routed(bad, good) as router:
        answer = await router.post()
        assert (answer.status_code, answer.json()) == (200, {"yes": 1})
        assert (await router.post(BODY | {"model": "m"})).status_code == 200
        assert await router.metric("kvplane_router_open_requests") == 0
        assert all(load.num_open <= 1 for load in router.picker.loads.values())
    assert "Traceback" not in caplog.text


async def test_a_length_that_is_not_that_of_the_body_harms_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = STREAM.replace(b"\r\n\r\n", b"\r\ncontent-length: 1\r\n\r\n")
    end = b"0\r\n\r\n"
    async with routed(Engine(says(two + chunk(b"data: 1\n\n") + end))) as router:
        answer = await router.post()
        assert (answer.status_code, answer.content) == (200, b"data: 1\n\n")
    assert "Traceback" not in caplog.text


async def gives_models(writer: asyncio.StreamWriter, parts: list[bytes], wait_s: float) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n")
    with suppress(ConnectionError):
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(wait_s)
    writer.transport.abort()


@pytest.mark.parametrize(
    ("parts", "wait_s", "is_up"),
    [
        ([b"[" * 100_000], 0.0, True),
        ([b'{"data":[' + b"{}," * 5000 + b"{}]}"], 0.0, True),
        ([b" " * (1 << 20)] * 64, 0.0, True),
        ([b" "] * 1000, SHORT_S / 5, False),
    ],
    ids=["deep", "many", "large", "slow"],
)
async def test_a_list_of_models_is_read_in_time_and_in_bounds(
    parts: list[bytes], wait_s: float, is_up: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that does not say what it serves may be asked for anything."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await gives_models(writer, parts, wait_s)

    good = Engine(says_yes)
    async with routed(good) as router:
        monkeypatch.setattr(of_engines, "_CHECK_TIMEOUT_S", SHORT_S)
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        tracemalloc.start()
        try:
            async with asyncio.timeout(20 * SHORT_S):
                await router.engines._check(url)
            _, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            server.close()
        assert most_bytes < 16 << 20
        assert (url in router.engines.up) == is_up
        assert router.engines.models() == [{"id": "m", "object": "model"}]
        assert (await router.post()).status_code == 200
    assert json.loads(good.requests[0][2]) == BODY
