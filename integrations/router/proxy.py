"""Sends a request to the engine picked for it, and its answer back as it comes.

Another engine is tried until an answer has begun. When one side ends early, a client that goes away
or an engine that dies, the other side is ended too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import httpx2
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvplane.errors import DeadlineExceededError, NotFoundError, PlaneUnavailableError
from kvplane.serving.http_requests import CLIENT_GONE, SERVER_GONE, refusal, until_gone

from .engines import Engines
from .metrics import FIRST_BYTE, RETRIES, RouterMetrics
from .picker import Pick, Picker
from .prompts import Prompts

Headers = list[tuple[bytes, bytes]]

# Headers of one connection or one server, not of the message.
_HOP_BY_HOP: Final = {
    *(b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"),
    *(b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"),
    *(b"date", b"server"),
}
# Statuses of an engine that cannot take more now, or has lost a plane.
_TRY_ANOTHER: Final = {429, 502, 503, 504}
# A request that breaks engines must not reach all of them.
_MOST_BROKEN: Final = 2
_STATUSES: Final = range(200, 600)


@dataclass(frozen=True)
class Request:
    """A client's request. ``body``: as it came. ``model``: as far as it is known."""

    path: str
    headers: Headers
    body: bytes
    prompts: Prompts
    model: Any
    is_stream: bool


@dataclass
class Answer:
    """An engine's answer that has begun. ``first``: the part of its body that has come."""

    response: httpx2.Response
    chunks: AsyncIterator[bytes]
    first: bytes
    pick: Pick
    number: int


class _BrokenError(Exception):
    """An engine took a request, and then ended the connection or sent invalid HTTP."""


class Proxy:
    """Asks engines, and keeps the picker's account of requests and answers."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        engines: Engines,
        picker: Picker,
        metrics: RouterMetrics,
        engine_key: str,
    ) -> None:
        self._client = client
        self._engines = engines
        self._picker = picker
        self._metrics = metrics
        self._engine_key = engine_key

    async def ask(self, request: Request) -> Answer:
        """Return an engine's answer, once it has begun; that of the last one when all fail.

        Raises NotFoundError when no engine serves the model, PlaneUnavailableError when none can be
        reached or two broke the connection, DeadlineExceededError when one does not begin to
        answer.
        """
        left, answer, num_broken = self._candidates(request), None, 0
        while (pick := self._pick(request, left)) is not None:
            if answer is not None:
                await self.close(answer)
            try:
                answer = await self._ask(request, pick)
            except _BrokenError:
                answer, num_broken = None, num_broken + 1
                if num_broken == _MOST_BROKEN:
                    break
            if answer is not None and answer.response.status_code not in _TRY_ANOTHER:
                return answer
            left.discard(pick.engine)
            self._metrics[RETRIES].inc(bool(left))
        if answer is None:
            raise PlaneUnavailableError("no engine can be reached", retry_delay_s=1.0)
        return answer

    async def close(self, answer: Answer) -> None:
        """Stop reading it: the engine notices if there was more."""
        self._picker.loads[answer.pick.engine].ended(answer.number)
        await answer.response.aclose()

    def _candidates(self, request: Request) -> set[str]:
        up = self._engines.up
        left = self._engines.serving(request.model)
        if up and not left:
            raise NotFoundError(f"{str(request.model)[:64]!r} is not served", field="model")
        return left

    def _pick(self, request: Request, left: set[str]) -> Pick | None:
        return self._picker.pick(
            request.prompts.token_ids,
            time.monotonic(),
            num_unread_tokens=request.prompts.num_unread_tokens,
            among=left,
        )

    async def _ask(self, request: Request, pick: Pick) -> Answer | None:
        """Return an engine's answer, or None when it cannot be reached. Raises _BrokenError when it
        failed before there was an answer, and DeadlineExceededError.
        """
        load, began_s = self._picker.loads[pick.engine], time.monotonic()
        number = self._picker.sent(pick, began_s, is_told=request.is_stream)
        self._metrics.count_sent(pick)
        response: httpx2.Response | None = None
        has_begun = False
        try:
            response = await self._client.send(self._message(request, pick.engine), stream=True)
            if response.status_code not in _STATUSES:
                raise _BrokenError
            chunks = response.aiter_raw()
            first = await anext(chunks, b"")
            if request.is_stream and response.status_code == 200:
                load.answered(number, time.monotonic())
                self._metrics[FIRST_BYTE].observe(time.monotonic() - began_s)
            has_begun = True
            return Answer(response, chunks, first, pick, number)
        except (httpx2.ConnectError, httpx2.ConnectTimeout):
            self._engines.failed(pick.engine)
            return None
        except httpx2.ReadTimeout as error:
            raise DeadlineExceededError("the engine does not answer") from error
        except httpx2.TransportError as error:
            raise _BrokenError from error
        finally:
            if not has_begun:
                load.ended(number)
                if response is not None:
                    await response.aclose()

    def _message(self, request: Request, engine: str) -> httpx2.Request:
        headers = _passed_on(request.headers)
        names = {name for name, _ in headers}
        if b"accept-encoding" not in names:  # else the client's library would add its own
            headers.append((b"accept-encoding", b"identity"))
        if self._engine_key:
            headers = [(name, value) for name, value in headers if name != b"authorization"]
            headers.append((b"authorization", f"Bearer {self._engine_key}".encode()))
        return self._client.build_request(
            "POST", engine + request.path, headers=headers, content=request.body
        )


class Relay(Response):
    """Sends an engine's answer to the client. ``count`` is called at its end, with the status."""

    def __init__(
        self, proxy: Proxy, answer: Answer, pool: str, count: Callable[[int], None]
    ) -> None:
        super().__init__(status_code=answer.response.status_code)
        self._proxy = proxy
        self._answer = answer
        self._count = count
        self.raw_headers = _passed_on(answer.response.headers.raw)
        headers = answer.response.headers
        length = headers.get("content-length")
        if length and "transfer-encoding" not in headers:  # else the length is void
            self.raw_headers.append((b"content-length", length.encode()))
        self.raw_headers.append((b"x-kvplane-pool", pool.encode()))
        cached = answer.pick.num_cached_tokens
        self.raw_headers.append((b"x-kvplane-cached-tokens", str(cached).encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it, or as much as there is."""
        status = self.status_code
        try:
            await until_gone(receive, self._send_all(send))
        except ClientDisconnect:
            status = CLIENT_GONE
        except asyncio.CancelledError:  # by a server that stops
            status = SERVER_GONE
            raise
        except httpx2.TransportError:
            status = 502
            await self._send_error(send)
        finally:
            self._count(status)
            await self._proxy.close(self._answer)

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        await _send_body(send, self._answer.first, more=True)
        async for chunk in self._answer.chunks:
            await _send_body(send, chunk, more=True)
        await _send_body(send, b"", more=False)

    async def _send_error(self, send: Send) -> None:
        """End a stream with an error in it. Other answers are cut, as their length shows."""
        if self._answer.response.headers.get("content-type", "").startswith("text/event-stream"):
            error = refusal(PlaneUnavailableError("the engine is gone"))
            await _send_body(send, b"data: " + bytes(error.body) + b"\n\n", more=False)


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _passed_on(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Return the headers that are not of one connection only, names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        each.strip().lower()
        for name, value in lowered
        if name == b"connection"
        for each in value.split(b",")
    }
    return [(name, value) for name, value in lowered if name not in _HOP_BY_HOP | named]
