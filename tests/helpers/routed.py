"""A router before small servers that answer by script."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from kvplane.integrations.router.app import RouterApp
from kvplane.integrations.router.config import RouterSettings
from kvplane.integrations.router.engines import Engines
from kvplane.integrations.router.metrics import RouterMetrics
from kvplane.integrations.router.picker import Picker
from kvplane.integrations.router.program import engine_client
from kvplane.integrations.router.prompts import PromptReader
from kvplane.integrations.router.proxy import Proxy
from kvplane.serving.http_server import HttpServer

Script = Callable[["Engine", asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
PATIENCE_S = 60.0
BODY = {"model": "m", "prompt": "x"}


def whole(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body


STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


@dataclass
class Engine:
    """Answers posts by its script. ``gone`` is set when the other side has closed. ``health``: the
    status that it gives.
    """

    script: Script
    model: str = "m"
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    health: str = "200 OK"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if first.startswith("GET /health"):
                    writer.write(whole(b"", self.health))
                elif first.startswith("GET"):
                    models = {"data": [{"id": self.model, "object": "model"}]}
                    writer.write(whole(json.dumps(models).encode()))
                else:
                    self.requests.append((first.split()[1], headers, body))
                    await self.script(self, reader, writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


async def says_yes(engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"yes": 1}', headers="x-engine: kept\r\nkeep-alive: timeout=5\r\n"))


async def is_full(engine: Engine, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(whole(b'{"full": 1}', "503 Service Unavailable"))


@dataclass
class Routed:
    """A router, and a client of it."""

    http: httpx2.AsyncClient
    picker: Picker
    engines: Engines
    port: int
    server: HttpServer
    metrics: RouterMetrics

    async def post(self, body: Any = BODY, **how: Any) -> httpx2.Response:
        return await self.http.post("/v1/completions", json=body, **how)

    async def metric(self, name: str) -> float:
        lines = (await self.http.get("/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    async def until_metric(self, name: str, wanted: float) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.metric(name) != wanted:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def routed(*engines: Engine, engine_key: str = "", **how: Any) -> AsyncIterator[Routed]:
    """Run a router that picks the first engine first, then the next."""
    servers = [await asyncio.start_server(engine.serve, "127.0.0.1", 0) for engine in engines]
    for engine, server in zip(engines, servers, strict=True):
        engine.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    picker = Picker({engine.url: f"pool-{i}" for i, engine in enumerate(engines)})
    for i, engine in enumerate(engines):
        picker.loads[engine.url].num_open = i  # of equal ones the one with the fewest is picked
    first = f"{engines[0].url}=pool"
    settings = RouterSettings(
        engine=first,
        bind="127.0.0.1:0",
        engine_timeout_s=how.pop("read_timeout_s", PATIENCE_S),
        idle_timeout_s=how.pop("idle_timeout_s", 5.0),
        max_connections=how.pop("max_connections", 0),
        grace_s=how.pop("grace_s", 5.0),
        metrics_port=how.pop("metrics_port", -1),
    )
    client = engine_client(settings)
    known = Engines(client, picker.loads, 3600.0, engine_key)
    await known.start()
    metrics, reader = RouterMetrics(), PromptReader(None)
    proxy = Proxy(client, known, picker, metrics, engine_key)
    bounds = {"max_requests": 8, "max_body_bytes": 4096} | how
    app = RouterApp(proxy, known, picker, reader, metrics, **bounds)
    router = HttpServer(app.asgi, settings, logging.getLogger("router"), metrics.registry)
    serving = asyncio.create_task(router._serve())  # without the handling of signals
    async with asyncio.timeout(PATIENCE_S):
        while not router.started:
            await asyncio.sleep(0.01)
    port = router.servers[0].sockets[0].getsockname()[1]
    try:
        async with httpx2.AsyncClient(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S
        ) as http:
            yield Routed(http, picker, known, port, router, metrics)
    finally:
        router.should_exit = True
        await serving
        await known.stop()
        await client.aclose()
        reader.close()
        for each in servers:
            each.close()
