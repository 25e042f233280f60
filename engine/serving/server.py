"""``python -m engine serve``: a model over HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import uvicorn

from engine.llm import LLM
from engine.serving.app import ServingApp
from engine.serving.config import ServeConfig
from engine.serving.worker import EngineWorker
from kvplane.serving import logs
from kvplane.serving.settings import log_settings

_LOGGER: Final = logging.getLogger("engine")
_GRACE_S: Final = 5


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    logs.setup(config.log_level)
    log_settings(config, _LOGGER)
    with LLM.from_config(config) as llm:
        worker = EngineWorker(llm, config.max_requests)
        app = ServingApp(
            worker,
            config.served_name,
            encode_chat=llm.encode_chat,
            max_body_bytes=config.max_body_bytes,
        )
        worker.start()
        try:
            asyncio.run(_serve(app, config))
        finally:
            worker.stop()
    return 0


async def _serve(app: ServingApp, config: ServeConfig) -> None:
    host, _, port = config.bind.rpartition(":")
    settings = uvicorn.Config(
        app.asgi,
        host=host.strip("[]"),
        port=int(port),
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=_GRACE_S,
    )
    socket = settings.bind_socket()
    with socket:
        bound = socket.getsockname()[1]
        if config.port_file is not None:
            partial = config.port_file.with_name(config.port_file.name + ".partial")
            partial.write_text(f"{bound}\n")
            partial.replace(config.port_file)
        _LOGGER.info("listening address=http://%s:%d", host, bound)
        await uvicorn.Server(settings).serve(sockets=[socket])
