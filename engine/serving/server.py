"""``python -m engine serve``: a model over HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Final

import uvicorn

from kvplane import tracing
from kvplane.serving import logs
from kvplane.serving.settings import log_settings

from ..llm import LLM
from .app import ServingApp
from .config import ServeConfig
from .worker import EngineWorker

_LOGGER: Final = logging.getLogger("engine")
_GRACE_S: Final = 5


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    logs.setup(config.log_level, config.log_format)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    log_settings(config, _LOGGER)
    tracing.setup("kvplane-engine")
    with LLM.from_config(config) as llm:
        worker = EngineWorker(llm, config.max_requests)
        app = ServingApp(
            worker,
            config.served_name,
            encode_chat=llm.encode_chat,
            max_body_bytes=config.max_body_bytes,
            api_keys=config.api_keys(),
        )
        worker.start()
        try:
            asyncio.run(_serve(app, config))
        finally:
            worker.stop()
    return 0


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    port_file: Path | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        if self.port_file is not None:
            partial = self.port_file.with_name(self.port_file.name + ".partial")
            partial.write_text(f"{port}\n")
            partial.replace(self.port_file)  # so that a reader never sees half of it
        _LOGGER.info("listening address=%s:%d", host, port)


async def _serve(app: ServingApp, config: ServeConfig) -> None:
    host, _, port = config.bind.rpartition(":")
    server = _Server(
        uvicorn.Config(
            app.asgi,
            host=host.strip("[]"),
            port=int(port),
            log_config=None,
            access_log=False,
            lifespan="off",
            ssl_certfile=config.tls_certificate,
            ssl_keyfile=config.tls_key,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    server.port_file = config.port_file
    await server.serve()
