"""An HTTP server of an ASGI application, until it gets a signal.

Stopping: new requests get status 503, open ones have ``grace_s`` to end. Then streams end with an
error and ``[DONE]``; requests without a response get status 503.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from typing import Any, Final

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvplane.errors import PlaneUnavailableError
from kvplane.serving.config import HttpServerSettings
from kvplane.serving.http_requests import CUT, refusal
from kvplane.serving.listener import BoundedListener
from kvplane.serving.observability.metrics_endpoint import MetricsEndpoint, serve_metrics
from kvplane.serving.server import announce, most_connections
from kvplane.transport.renewed import renewed_context

_SERVED_TO_THE_END: Final = ("/healthz", "/metrics")
# How long a client may take to read the end of its response.
_END_S: Final = 5


class HttpServer(uvicorn.Server):
    """An HTTP server of an application; once it listens it reports its address, also in a file."""

    def __init__(
        self,
        app: ASGIApp,
        settings: HttpServerSettings,
        logger: logging.Logger,
        registry: CollectorRegistry,
        *,
        is_alive: Callable[[], bool] = lambda: True,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """``registry`` and ``is_alive``: for /metrics and /healthz on a port of their own.
        ``on_stop`` is called when the server stops, before it waits for open requests.
        """
        certificate, key = settings.certificate
        super().__init__(
            uvicorn.Config(
                self._serve_request,
                interface="asgi3",
                http="h11",  # bounds a request's head, as httptools does not
                ws="none",
                log_config=None,
                access_log=False,
                lifespan="off",
                ssl_certfile=certificate,
                ssl_keyfile=key,
                timeout_graceful_shutdown=_END_S,
                timeout_keep_alive=settings.idle_timeout_s,  # type: ignore[arg-type]
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._app, self._registry, self._is_alive = app, registry, is_alive
        self._open: set[asyncio.Task[Any]] = set()
        self._is_over = False
        self._endpoint: MetricsEndpoint | None = None
        self.is_stopping = False
        self._settings = settings
        self._logger = logger
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. Each new connection gets the certificate that the files have then.
        Raises OSError when an address cannot be bound.
        """
        settings = self._settings
        certificate, key = settings.certificate
        if certificate is not None and key is not None:
            self.config.ssl = renewed_context(certificate, key)
        host, _, bind_port = settings.bind.rpartition(":")
        if settings.metrics_port >= 0:
            self._endpoint = serve_metrics(
                self._registry,
                self._is_alive,
                settings.metrics_host or host,
                settings.metrics_port,
                settings.metrics_access,
            )
            self._logger.info("metrics port=%d", self._endpoint.port)
        most = settings.max_connections or most_connections()
        listener = BoundedListener(host.strip("[]"), int(bind_port), most)
        await super().startup([listener])
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        announce(address, settings.port_file, self._logger)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop (see the module's docstring)."""
        self.is_stopping = True
        self._on_stop()
        until_s = time.monotonic() + self._settings.grace_s
        while self._open and time.monotonic() < until_s and not self.force_exit:
            await asyncio.sleep(0.05)
        self._is_over = True
        for task in self._open:
            task.cancel()
        await super().shutdown(sockets)
        if self._endpoint is not None:
            self._endpoint.close()

    async def _serve_request(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.is_stopping and scope["path"] not in _SERVED_TO_THE_END:
            await _stopping()(scope, receive, send)
            return
        sent: list[Message] = []  # the first message, and the last one

        async def note(message: Message) -> None:
            sent[1:] = [message]
            await send(message)

        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            await self._app({**scope, CUT: lambda: self._is_over}, receive, note)
        except asyncio.CancelledError:
            if not self._is_over:
                raise
            task.uncancel()
            if not sent:
                await _stopping()(scope, receive, send)
            elif _is_stream(sent[0]) and sent[-1].get("more_body", True):
                end = b"data: " + bytes(_stopping().body) + b"\n\ndata: [DONE]\n\n"
                await send({"type": "http.response.body", "body": end})
        finally:
            self._open.discard(task)


def _is_stream(start: Message) -> bool:
    kind: bytes = dict(start["headers"]).get(b"content-type", b"")
    return kind.startswith(b"text/event-stream")


def _stopping() -> Response:
    error = PlaneUnavailableError("the server is stopping", retry_delay_s=1.0)
    response = refusal(error)
    response.headers["Connection"] = "close"
    return response
