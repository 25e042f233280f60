"""An HTTP server of an ASGI application, until it gets a signal."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, Final

import uvicorn

from kvplane.serving.config import HttpServerSettings
from kvplane.serving.server import announce, most_connections
from kvplane.transport.renewed import renewed_context

_GRACE_S: Final = 5


class HttpServer(uvicorn.Server):
    """An HTTP server of an application; once it listens it reports its address, also in a file."""

    def __init__(
        self,
        app: Any,
        settings: HttpServerSettings,
        logger: logging.Logger,
        *,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_stop`` is called when the server stops, before it waits for open requests. Requests
        get status 503 beyond the connections that the limit of open files allows, where each client
        may need one more, to an engine.
        """
        host, _, port = settings.bind.rpartition(":")
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # bounds a request's head, as httptools does not
                ws="none",
                host=host.strip("[]"),
                port=int(port),
                log_config=None,
                access_log=False,
                lifespan="off",
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
                limit_concurrency=most_connections(),
                timeout_graceful_shutdown=_GRACE_S,
                timeout_keep_alive=settings.idle_timeout_s,  # type: ignore[arg-type]
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        self._settings = settings
        self._logger = logger
        self._on_stop = on_stop

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen. Each new connection gets the certificate that the files have then."""
        settings = self._settings
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self.config.ssl = renewed_context(settings.tls_certificate, settings.tls_key)
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        announce(address, settings.port_file, self._logger)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting connections, and give open requests a little time."""
        self._on_stop()
        await super().shutdown(sockets)
