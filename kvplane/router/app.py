"""The HTTP application of the router.

POST /v1/completions, /v1/chat/completions     GET /v1/models, /healthz, /metrics
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    NotFoundError,
    QuotaExceededError,
    UnauthenticatedError,
)
from kvplane.router.engines import Engines
from kvplane.router.metrics import RouterMetrics
from kvplane.router.picker import Picker
from kvplane.router.prompts import PromptReader
from kvplane.router.proxy import Proxy, Relay, Request
from kvplane.serving.http_requests import (
    CLIENT_GONE,
    authenticate,
    read_body,
    refusal,
    until_gone,
)

_PATHS: Final = ("/v1/completions", "/v1/chat/completions")


class RouterApp:
    """The application, as ``asgi``. ``api_keys``: one of them is asked of every client of ``/v1``,
    unless there are none.
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
        api_keys: Sequence[str] = (),
    ) -> None:
        self._proxy = proxy
        self._engines = engines
        self._picker = picker
        self._reader = reader
        self._metrics = metrics
        self._max_requests = max_requests
        self._max_body_bytes = max_body_bytes
        self._api_keys = tuple(api_keys)
        self._num_open = 0
        self.asgi = Starlette(
            routes=[
                *(Route(path, self._route, methods=["POST"]) for path in _PATHS),
                Route("/v1/models", self._models),
                Route("/v1/models/{name:path}", self._models),
                Route("/healthz", self._health),
                Route("/metrics", self._show_metrics),
            ]
        )

    async def _route(self, http: HttpRequest) -> Response:
        relay: Relay | None = None
        self._change_open(1)
        try:
            request = await self._read(http)
            answer = await until_gone(http.receive, self._proxy.ask(request))
            pool = self._picker.pool_of[answer.pick.engine]
            relay = Relay(self._proxy, answer, pool, self._ended)
            return relay
        except KvplaneError as error:
            refused = refusal(error)
            self._metrics.requests.labels(str(refused.status_code)).inc()
            return refused
        except ClientDisconnect:
            self._metrics.requests.labels(str(CLIENT_GONE)).inc()
            return Response(status_code=CLIENT_GONE)
        finally:
            if relay is None:
                self._change_open(-1)

    def _ended(self, status: int) -> None:
        self._metrics.requests.labels(str(status)).inc()
        self._change_open(-1)

    def _change_open(self, by: int) -> None:
        self._num_open += by
        self._metrics.open.set(self._num_open)

    async def _read(self, http: HttpRequest) -> Request:
        authenticate(http, self._api_keys)
        if self._num_open > self._max_requests:
            raise QuotaExceededError(
                f"{self._max_requests} requests are open, which is the most", retry_delay_s=1.0
            )
        raw = await read_body(http, self._max_body_bytes)
        body = _json(raw)
        return Request(
            path=http.url.path,
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
