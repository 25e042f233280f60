"""Tracks the engines behind the router: which of them answer, and which models they serve."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterable
from typing import Any, Final

import httpx2

_LOGGER: Final = logging.getLogger(__name__)
_CHECK_TIMEOUT_S: Final = 5.0
_MAX_BYTES: Final = 1 << 20
_MAX_MODELS: Final = 1024


class Engines:
    """Asks each engine for its models again and again: an engine that answers is up."""

    def __init__(
        self, client: httpx2.AsyncClient, urls: Iterable[str], interval_s: float, key: str
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        # None: unknown models. A missing engine is down.
        self._models: dict[str, list[dict[str, Any]] | None] = {}
        # Those that say of themselves that they cannot serve requests now.
        self._unready: set[str] = set()
        self._urls = tuple(urls)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def up(self) -> set[str]:
        """The engines that answered when they were asked last, and have not failed since."""
        return {*self._models}

    def serving(self, model: Any) -> set[str]:
        """Return the engines that are up and serve a model, as far as they list their models;
        without those that are not ready, if there are others.
        """
        found = {
            url
            for url, models in self._models.items()
            if models is None or any(each.get("id") == model for each in models)
        }
        return found - self._unready or found

    def models(self) -> list[dict[str, Any]]:
        """Return the models of all engines, as objects of OpenAI's list; each model once."""
        found: dict[str, dict[str, Any]] = {}
        for models in self._models.values():
            for model in models or ():
                found.setdefault(str(model.get("id")), model)
        return [*found.values()]

    def failed(self, url: str) -> None:
        """Note that an engine could not be reached: it is down until it answers again."""
        if url in self._models:
            del self._models[url]
            _LOGGER.warning("engine=%s is down", url)

    async def start(self) -> None:
        """Ask all engines once, and keep asking."""
        await asyncio.gather(*map(self._check, self._urls))
        self._tasks = [asyncio.create_task(self._watch(url)) for url in self._urls]

    async def stop(self) -> None:
        """Stop asking."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, url: str) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._check(url)

    async def _check(self, url: str) -> None:
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                status, body = await self._ask(f"{url}/v1/models")
                health, _ = await self._ask(f"{url}/health")
        except (httpx2.RequestError, TimeoutError):
            self.failed(url)
            return
        if status >= 500:
            self.failed(url)
            return
        if url not in self._models:
            _LOGGER.info("engine=%s is up", url)
        self._models[url] = _models(body) if status == 200 else None
        (self._unready.add if health == 503 else self._unready.discard)(url)

    async def _ask(self, url: str) -> tuple[int, bytes]:
        """Return the status and the body, read up to the length of a list of models."""
        headers = {"accept-encoding": "identity", **self._headers}
        body = bytearray()
        async with self._client.stream(
            "GET", url, headers=headers, timeout=_CHECK_TIMEOUT_S
        ) as response:
            async for part in response.aiter_raw():
                body += part
                if len(body) > _MAX_BYTES:
                    break
        return response.status_code, bytes(body)


def _models(body: bytes) -> list[dict[str, Any]] | None:
    """Return the models of a list; None if it is no such list."""
    try:
        models = json.loads(body)["data"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_list = isinstance(models, list) and all(isinstance(each, dict) for each in models)
    return models if is_list and len(models) <= _MAX_MODELS else None
