"""``python -m engine serve``: a model over HTTP, until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Final

from kvplane import tracing
from kvplane.errors import InternalError
from kvplane.serving.http_server import HttpServer
from kvplane.serving.observability import logs
from kvplane.serving.settings import log_settings
from kvplane.sync.passing_thread import call_in_passing

from ..llm import LLM
from .app import ServingApp
from .config import ServeConfig
from .worker import EngineWorker

_LOGGER: Final = logging.getLogger("engine")


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT; the exit code. Raises InternalError when the engine's thread
    has ended by an exception: only a new process can serve then.
    """
    logs.setup(config.log_level, config.log_format)
    log_settings(config, _LOGGER)
    tracing.setup("kvplane-engine")
    with call_in_passing(partial(LLM.from_config, config)) as llm:
        worker = EngineWorker(llm, config.max_requests)
        app = ServingApp(
            worker,
            config.served_name,
            encode_chat=llm.encode_chat,
            max_body_bytes=config.max_body_bytes,
            max_received_bytes=config.max_received_bytes,
            api_keys=config.api_keys(),
        )
        worker.start()
        try:
            asyncio.run(_serve(app, config, worker))
        finally:
            worker.stop()
    if worker.has_failed:
        raise InternalError("the engine failed, see the log: only a new process can serve")
    return 0


async def _serve(app: ServingApp, config: ServeConfig, worker: EngineWorker) -> None:
    server = HttpServer(
        app.asgi,
        config.bind,
        certificate=config.tls_certificate,
        key=config.tls_key,
        port_file=config.port_file,
        logger=_LOGGER,
        when_told=worker.give_up,
    )

    def end() -> None:
        server.should_exit = True

    worker.when_failed(end)
    await server.serve()
