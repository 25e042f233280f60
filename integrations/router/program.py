"""``kvplane router``: routes until a signal."""

from __future__ import annotations

import asyncio
import logging
import signal
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from http.cookiejar import CookieJar, DefaultCookiePolicy
from types import FrameType
from typing import Final

import httpx2

from kvplane.clients.control_client import ControlClient
from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.serving.http_server import HttpServer
from kvplane.serving.observability import logs
from kvplane.serving.settings import EXIT_BAD_SETTINGS, log_settings, parse

from . import metrics as of
from .app import RouterApp
from .config import RouterSettings
from .engines import Engines
from .feeds import PoolFeeds
from .metrics import RouterMetrics
from .picker import Picker
from .prompts import PromptReader
from .proxy import Proxy

_LOGGER: Final = logging.getLogger("router")
_CONNECT_TIMEOUT_S: Final = 5.0
# Shorter than servers keep idle connections: a request on one that is being closed would fail.
_KEPT_IDLE_S: Final = 2.0
# Longest wait for the indexes before serving. Until they are known, queues alone decide.
_FEEDS_TIMEOUT_S: Final = 10.0


def run(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the program; return its exit code: 0 after a signal, 1 cannot serve, 2 bad settings."""
    config = parse(RouterSettings, "router", argv, environ)
    logs.setup(config.log_level, config.log_format)
    if config.log_level == "info":  # a line for each request, and for each look at an engine
        logging.getLogger("httpx2").setLevel(logging.WARNING)
    log_settings(config, _LOGGER)
    _on_signal(lambda *_: sys.exit(0))
    try:
        asyncio.run(_route(config))
    except asyncio.CancelledError:  # by a signal, before it served
        return 0
    except (KvplaneError, OSError) as error:
        print(f"router: error: {error}", file=sys.stderr)
        return EXIT_BAD_SETTINGS if isinstance(error, InvalidRequestError) else 1
    except SystemExit as end:  # by a signal, or by uvicorn: the address cannot be bound
        return int(bool(end.code))
    return 0


async def _route(config: RouterSettings) -> None:
    reader = PromptReader(config.tokenizer)
    pools = config.pools()
    picker = Picker(pools, needs_pools=config.engines_need_pools)
    async with AsyncExitStack() as stack:
        stack.callback(reader.close)
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        _on_signal(lambda *_: loop.call_soon_threadsafe(task.cancel))
        client = await stack.enter_async_context(engine_client(config))
        control = ControlClient(config.control_plane, tls=config.client_tls)
        await stack.enter_async_context(control)
        engines = Engines(client, pools, config.check_interval_s, config.engine_key())
        feeds = PoolFeeds(control, config.namespace, picker.indexes, picker.lost)
        metrics = RouterMetrics()
        stack.push_async_callback(engines.stop)
        stack.push_async_callback(feeds.stop)
        feeds.follow(pools.values())
        _watch(metrics, picker, engines, feeds)
        await engines.start()
        await feeds.wait(_FEEDS_TIMEOUT_S)
        app = RouterApp(
            Proxy(client, engines, picker, metrics, config.engine_key()),
            engines,
            picker,
            reader,
            metrics,
            max_requests=config.max_requests,
            max_body_bytes=config.max_body_bytes,
            max_received_bytes=config.max_received_bytes,
            api_keys=config.api_keys(),
        )
        server = HttpServer(app.asgi, config, _LOGGER, metrics.registry)
        # While it serves, uvicorn handles signals, and raises them again when it has ended.
        _on_signal(server.handle_exit)
        await server.serve()


def _on_signal(handler: Callable[[int, FrameType | None], object]) -> None:
    """Have SIGTERM and SIGINT handled by ``handler``."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handler)


def engine_client(config: RouterSettings) -> httpx2.AsyncClient:
    """Return the client that asks engines. Raises InvalidRequestError for a bad authority file."""
    try:
        context = ssl.create_default_context(cafile=config.engine_ca)
    except OSError as error:
        raise InvalidRequestError(
            f"{config.engine_ca} cannot be read: {error}", field="engine_ca"
        ) from error
    return httpx2.AsyncClient(
        cookies=CookieJar(
            DefaultCookiePolicy(allowed_domains=[])
        ),  # one client's cookies are not another's
        verify=context,
        trust_env=False,
        timeout=httpx2.Timeout(config.engine_timeout_s, connect=_CONNECT_TIMEOUT_S),
        limits=httpx2.Limits(
            max_connections=None, max_keepalive_connections=100, keepalive_expiry=_KEPT_IDLE_S
        ),
    )


def _watch(metrics: RouterMetrics, picker: Picker, engines: Engines, feeds: PoolFeeds) -> None:
    """Have the gauges read at each scrape, which may be on another thread."""
    indexes = picker.indexes
    for url, load in picker.loads.items():
        wait_s = metrics[of.ENGINE_WAIT].labels(url)
        wait_s.set_function(lambda load=load: load.copied().wait_s(time.monotonic()))
        metrics[of.ENGINE_UP].labels(url).set_function(lambda url=url: url in engines.up)
        metrics[of.ENGINE_RATE].labels(url).set_function(lambda load=load: load.tokens_per_s)
    for pool in feeds.caught_up:
        num_blocks = metrics[of.POOL_BLOCKS].labels(pool)
        num_blocks.set_function(lambda pool=pool: pool in indexes and indexes[pool].num_blocks)
        metrics[of.POOL_FOLLOWED].labels(pool).set_function(lambda pool=pool: feeds.caught_up[pool])
        metrics[of.POOL_LOST].labels(pool).set_function(lambda pool=pool: pool in picker.lost)
