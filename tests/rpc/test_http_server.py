"""The HTTP server of the engine and the router: how it ends, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from kvplane.serving.config import HttpServerSettings
from kvplane.serving.http_requests import is_cut
from kvplane.serving.http_server import HttpServer
from tests.helpers.waiting import until

BEGUN = "data: 1\n\n"
DONE = "data: [DONE]\n\n"


class Served:
    """A server of a stream, at /v1/stream, and of an answer, at /v1/answer: both come when
    ``go_on`` is set.
    """

    def __init__(self, **settings: Any) -> None:
        self.go_on = asyncio.Event()
        self.num_asked = 0
        self.cut: list[bool] = []
        """Of each stream that ended: whether it was cut by the server."""
        routes = [Route("/v1/stream", self._stream), Route("/v1/answer", self._answer)]
        settings = {"bind": "127.0.0.1:0"} | settings
        self.server = HttpServer(
            Starlette(routes=[*routes, Route("/healthz", lambda _: Response())]),
            HttpServerSettings(**settings),
            logging.getLogger(__name__),
            CollectorRegistry(),
        )

    async def _stream(self, request: Request) -> Response:
        async def pieces() -> AsyncIterator[str]:
            try:
                yield BEGUN
                await self.go_on.wait()
                yield DONE
            finally:
                self.cut.append(is_cut(request.scope))

        return StreamingResponse(pieces(), media_type="text/event-stream")

    async def _answer(self, _: Request) -> Response:
        self.num_asked += 1
        await self.go_on.wait()
        return Response("answered")

    @property
    def port(self) -> int:
        return int(self.server.servers[0].sockets[0].getsockname()[1])


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[Served, httpx2.AsyncClient]]:
    one = Served(**settings)
    running = asyncio.create_task(one.server._serve())  # without the handling of signals
    await until(lambda: one.server.started)
    url = f"http://127.0.0.1:{one.port}"
    async with httpx2.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as client:
        yield one, client
        one.server.should_exit = True
        await running


def message(text: str) -> str:
    return str(json.loads(text)["error"]["message"])


@pytest.mark.parametrize("lasts", [True, False], ids=["lasts", "is_too_short"])
async def test_a_stream_has_its_time_to_end_and_then_ends_with_an_error(lasts: bool) -> None:
    async with served(grace_s=30.0 if lasts else 0.2) as (one, client):
        waiting = asyncio.create_task(client.get("/v1/answer"))
        await until(lambda: one.num_asked == 1)
        async with client.stream("GET", "/v1/stream") as stream:
            pieces = stream.aiter_text()
            assert await anext(pieces) == BEGUN
            one.server.should_exit = True
            await until(lambda: one.server.is_stopping)
            async with httpx2.AsyncClient(trust_env=False, base_url=client.base_url) as another:
                refused = await another.get("/v1/answer")
                alive = await another.get("/healthz")
            assert (refused.status_code, refused.headers["connection"]) == (503, "close")
            assert "stopping" in message(refused.text)
            assert alive.status_code == 200
            if lasts:
                one.go_on.set()
            rest = "".join([piece async for piece in pieces])
        answer = await waiting
    assert one.cut == [not lasts]
    if lasts:
        assert (rest, answer.text) == (DONE, "answered")
    else:
        assert rest.endswith("\n\n" + DONE)
        assert "stopping" in message(rest.removeprefix("data: ").removesuffix("\n\n" + DONE))
        assert answer.status_code == 503
        assert "stopping" in message(answer.text)


async def test_a_client_that_leaves_is_not_taken_for_a_server_that_stops() -> None:
    async with served() as (one, client):
        async with client.stream("GET", "/v1/stream") as stream:
            assert await anext(stream.aiter_text()) == BEGUN
        await until(lambda: one.cut == [False])
