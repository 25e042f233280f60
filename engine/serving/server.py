"""``kvplane serve``: serves a model over HTTP until a signal.

The HTTP application has OpenAI's paths, health and metrics.

POST /v1/completions, /v1/chat/completions     GET /v1/models, /health, /healthz, /metrics
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, closing
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Scope

from kvplane import tracing
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    NotFoundError,
    UnauthenticatedError,
)
from kvplane.serving.http_requests import (
    CLIENT_GONE,
    SERVER_GONE,
    authenticate,
    is_cut,
    not_served,
    read_body,
    refusal,
    until_gone,
)
from kvplane.serving.http_server import HttpServer
from kvplane.serving.limits.open_requests import share_of_one
from kvplane.serving.limits.receive_budget import ReceiveBudget, Received
from kvplane.serving.observability import logs
from kvplane.serving.settings import log_settings
from kvplane.sync.short_thread import call_in_short_thread

from ..llm import LLM
from ..request import Delta, RequestOutput
from . import metrics
from .answers import Answer
from .config import ServeSettings
from .metrics import ServingMetrics
from .requests import Chat, CompletionRequest, Prompt, read_chat, read_completion
from .worker import EngineWorker

_LOGGER: Final = logging.getLogger("engine")


class _ServingApp:
    """The ASGI application for one model. ``max_received_bytes`` of ``config`` limits requests that
    are not answered, or whose stream has not begun.
    """

    def __init__(self, worker: EngineWorker, config: ServeSettings, llm: LLM) -> None:
        self._worker = worker
        self._llm = llm
        self._asked_health: asyncio.Future[bool] | None = None
        self._model = config.served_name
        self._max_body_bytes = config.max_body_bytes
        self._api_keys = config.api_keys()
        most_of_one = share_of_one(config.max_received_bytes, len(self._api_keys))
        self._budget = ReceiveBudget(config.max_received_bytes, most_of_one)
        self._created = int(time.time())
        self.metrics = ServingMetrics(lambda: worker.num_open)
        self.asgi = Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/health", self._health),
                Route("/healthz", self._live),
                Route("/metrics", self._metrics),
            ],
            exception_handlers={HTTPException: not_served},
        )

    async def _completions(self, request: Request) -> Response:
        return await self._counted(request, read_completion, is_chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._counted(request, read_chat, is_chat=True)

    async def _models(self, request: Request) -> Response:
        try:
            authenticate(request, self._api_keys)
        except UnauthenticatedError as error:
            return refusal(error)
        name = request.path_params.get("name")
        entry = {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvplane",
        }
        if name is None:
            return JSONResponse({"object": "list", "data": [entry]})
        return JSONResponse(entry) if name == self._model else refusal(self._unknown(name))

    async def _health(self, _: Request) -> Response:
        """Return 200 while requests can be served. One question to the planes is for all probes."""
        if self._asked_health is None or self._asked_health.done():
            self._asked_health = asyncio.wrap_future(self._llm.is_ready())
        try:
            is_ready = self._worker.is_alive and await asyncio.shield(self._asked_health)
        except KvplaneError:
            is_ready = False
        return Response(status_code=200 if is_ready else 503)

    async def _live(self, _: Request) -> Response:
        return Response(status_code=200 if self._worker.is_alive else 503)

    async def _metrics(self, _: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def _counted(
        self, request: Request, read: Callable[[Any], CompletionRequest], *, is_chat: bool
    ) -> Response:
        """Return a request's response, of an error too, and count it; streams at their end."""
        began_s = time.monotonic()
        count = partial(self._count, request.scope, began_s)
        try:
            client = authenticate(request, self._api_keys)
            with closing(Received(self._budget, client)) as received:
                asked = read(await self._body(request, received))
                if asked.model != self._model:
                    raise self._unknown(asked.model)
                answer = Answer(self._model, len(asked.prompts), asked.params.n, is_chat=is_chat)
                events = self._events(asked, began_s, client)
                if asked.stream:
                    first = await until_gone(request.receive, anext(events))
                    pieces = self._pieces(asked, answer, first, events, count)
                    return StreamingResponse(pieces, media_type="text/event-stream")
                await until_gone(request.receive, self._collect(answer, events))
        except KvplaneError as error:
            response = refusal(error)
            count(None, response.status_code)
            return response
        except ClientDisconnect:
            count(None, CLIENT_GONE)
            return Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:  # by a server that stops
            count(None, SERVER_GONE)
            raise
        count(answer, 200)
        return JSONResponse(answer.whole())

    def _count(self, scope: Scope, began_s: float, answer: Answer | None, status: int) -> None:
        if status == CLIENT_GONE and is_cut(scope):
            status = SERVER_GONE
        self.metrics[metrics.REQUESTS].labels(scope["path"], str(status)).inc()
        self.metrics[metrics.DURATION].observe(time.monotonic() - began_s)
        if answer is not None:
            self.metrics[metrics.PROMPT_TOKENS].inc(answer.num_prompt_tokens)
            self.metrics[metrics.CACHED_TOKENS].inc(answer.num_cached_tokens)
            self.metrics[metrics.GENERATED_TOKENS].inc(answer.num_generated_tokens)

    async def _collect(self, answer: Answer, events: _Events) -> None:
        async with aclosing(events):
            async for prompt, event in events:
                answer.add(prompt, event)

    async def _pieces(
        self,
        asked: CompletionRequest,
        answer: Answer,
        first: tuple[int, Delta | RequestOutput],
        events: _Events,
        count: Callable[[Answer | None, int], None],
    ) -> AsyncIterator[str]:
        """Yield a stream's server-sent events. An error after the first one is an event too."""
        status = CLIENT_GONE
        try:
            async with aclosing(events):
                for piece in [*answer.opening(), *answer.add(*first)]:
                    yield _event(piece)
                async for prompt, event in events:
                    for piece in answer.add(prompt, event):
                        yield _event(piece)
            if asked.include_usage:
                yield _event(answer.closing())
            yield "data: [DONE]\n\n"
            status = 200
        except KvplaneError as error:
            refused = refusal(error)
            status = refused.status_code
            yield f"data: {bytes(refused.body).decode()}\n\n"
        finally:
            count(answer, status)

    async def _events(
        self, asked: CompletionRequest, began_s: float, client: str
    ) -> AsyncGenerator[tuple[int, Delta | RequestOutput], None]:
        """Yield (prompt number, event) until all prompts are answered. Closing it aborts all."""
        queue: asyncio.Queue[tuple[int, Delta | RequestOutput] | KvplaneError] = asyncio.Queue()

        async def follow(number: int, prompt: Prompt | Chat) -> None:
            try:
                if isinstance(prompt, Chat):
                    read = partial(self._llm.encode_chat, prompt.messages)
                else:
                    read = partial(self._llm.encode, prompt)
                stream = self._worker.stream(
                    read, asked.params, num_characters=len(prompt), key=client
                )
                async with aclosing(stream):
                    async for event in stream:
                        queue.put_nowait((number, event))
            except KvplaneError as error:
                queue.put_nowait(error)

        tasks = [asyncio.create_task(follow(*each)) for each in enumerate(asked.prompts)]
        num_left, is_first = len(tasks), True
        try:
            while num_left:
                item = await queue.get()
                if isinstance(item, KvplaneError):
                    raise item
                if is_first:
                    self.metrics[metrics.FIRST_TOKEN].observe(time.monotonic() - began_s)
                    is_first = False
                num_left -= isinstance(item[1], RequestOutput)
                yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _body(self, request: Request, received: Received) -> Any:
        """Read and parse a request's JSON body, up to its limit."""
        try:
            return json.loads(await read_body(request, self._max_body_bytes, received.take))
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError("is not JSON", field="body") from error

    def _unknown(self, name: str) -> NotFoundError:
        return NotFoundError(f"{name[:64]!r} is not served, {self._model!r} is", field="model")


_Events = AsyncGenerator[tuple[int, Delta | RequestOutput], None]


def _event(piece: dict[str, Any]) -> str:
    return f"data: {json.dumps(piece, ensure_ascii=False)}\n\n"


def run(config: ServeSettings) -> int:
    """Run the HTTP server until SIGTERM or SIGINT; returns the exit code. Raises InternalError when
    the engine's thread has ended by an exception: only a new process can serve then.
    """
    logs.setup(config.log_level, config.log_format)
    log_settings(config, _LOGGER)
    tracing.setup("kvplane-engine")
    with call_in_short_thread(partial(LLM.from_config, config)) as llm:
        worker = EngineWorker(llm, config.max_requests, len(config.api_keys()))
        app = _ServingApp(worker, config, llm)
        worker.start()
        try:
            asyncio.run(_serve(app, config, worker))
        finally:
            worker.stop()
    if worker.has_failed:
        raise InternalError("the engine failed, see the log: only a new process can serve")
    return 0


async def _serve(app: _ServingApp, config: ServeSettings, worker: EngineWorker) -> None:
    server = HttpServer(
        app.asgi,
        config,
        _LOGGER,
        app.metrics.registry,
        is_alive=lambda: worker.is_alive,
        on_stop=worker.give_up,
    )

    def end() -> None:
        server.should_exit = True

    worker.when_failed(end)
    await server.serve()
