"""The HTTP application of the router.

POST /v1/completions, /v1/chat/completions     GET /v1/models, /health, /healthz, /metrics
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NotFoundError,
    UnauthenticatedError,
)
from kvplane.serving.http_requests import (
    CLIENT_GONE,
    SERVER_GONE,
    authenticate,
    not_served,
    read_body,
    refusal,
    until_gone,
)
from kvplane.serving.limits.open_requests import OpenRequests, share_of_one
from kvplane.serving.limits.receive_budget import ReceiveBudget, Received

from .engines import Engines
from .metrics import OPEN, REQUESTS, RouterMetrics
from .picker import Picker
from .prompts import PromptReader
from .proxy import Proxy, Relay, Request

_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


class RouterApp:
    """The application, as ``asgi``. ``api_keys``: every client of ``/v1`` must have one of them,
    unless there are none. ``max_received_bytes``: limit for requests before an engine's answer.
    """

    def __init__(
        self,
        proxy: Proxy,
        engines: Engines,
        picker: Picker,
        reader: PromptReader,
        metrics: RouterMetrics,
        *,
        max_requests: int,
        max_body_bytes: int,
        max_received_bytes: int = 1 << 28,
        api_keys: Sequence[str] = (),
    ) -> None:
        self._proxy = proxy
        self._engines = engines
        self._picker = picker
        self._reader = reader
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._api_keys = tuple(api_keys)
        num_keys = len(self._api_keys)
        self._open = OpenRequests(max_requests, num_keys)
        self._budget = ReceiveBudget(max_received_bytes, share_of_one(max_received_bytes, num_keys))
        self.asgi = Starlette(
            routes=[
                *(Route(path, self._route, methods=["POST"]) for path in _PATHS),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/health", self._health),
                Route("/healthz", self._live),
                Route("/metrics", self._show_metrics),
            ],
            exception_handlers={HTTPException: not_served},
        )

    async def _route(self, http: HttpRequest) -> Response:
        try:
            client = authenticate(http, self._api_keys)
            self._open.begin(client)
        except KvplaneError as error:
            return self._refuse(error)
        relay: Relay | None = None
        self._metrics[OPEN].set(len(self._open))
        try:
            with closing(Received(self._budget, client)) as received:
                request = await self._read(http, received)
                answer = await until_gone(http.receive, self._proxy.ask(request))
            pool = self._picker.pool_of[answer.pick.engine]
            relay = Relay(self._proxy, answer, pool, partial(self._ended, client))
            return relay
        except KvplaneError as error:
            return self._refuse(error)
        except ClientDisconnect:
            self._metrics[REQUESTS].labels(str(CLIENT_GONE)).inc()
            return Response(status_code=CLIENT_GONE)
        except asyncio.CancelledError:  # by a server that stops
            self._metrics[REQUESTS].labels(str(SERVER_GONE)).inc()
            raise
        finally:
            if relay is None:
                self._end(client)

    def _refuse(self, error: KvplaneError) -> Response:
        refused = refusal(error)
        self._metrics[REQUESTS].labels(str(refused.status_code)).inc()
        return refused

    def _ended(self, client: str, status: int) -> None:
        self._metrics[REQUESTS].labels(str(status)).inc()
        self._end(client)

    def _end(self, client: str) -> None:
        self._open.end(client)
        self._metrics[OPEN].set(len(self._open))

    async def _read(self, http: HttpRequest, received: Received) -> Request:
        raw = await read_body(http, self._max_body_bytes, received.take)
        body = _json(raw)
        return Request(
            path=http.scope["path"],  # of the served paths: a Host header cannot change it
            headers=http.headers.raw,
            body=raw,
            prompts=await self._reader.read(body),
            model=body.get("model"),
            is_stream=body.get("stream") is True,
        )

    async def _models(self, http: HttpRequest) -> Response:
        try:
            authenticate(http, self._api_keys)
        except UnauthenticatedError as error:
            return refusal(error)
        models = self._engines.models()
        name = http.path_params.get("name")
        if name is None:
            return JSONResponse({"object": "list", "data": models})
        for model in models:
            if model.get("id") == name:
                return JSONResponse(model)
        return refusal(NotFoundError(f"{name[:64]!r} is not served", field="model"))

    async def _health(self, _: HttpRequest) -> Response:
        return Response(status_code=200 if self._engines.up else 503)

    async def _live(self, _: HttpRequest) -> Response:
        return Response()

    async def _show_metrics(self, _: HttpRequest) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


def _json(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError("is not JSON", field="body") from error
    if not isinstance(body, dict):
        raise InvalidRequestError("must be a JSON object", field="body")
    return body
