"""Steps that are common to all requests of HTTP servers of OpenAI's paths."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope

from kvplane.errors import (
    CapacityError,
    DeadlineExceededError,
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    NotFoundError,
    QuotaExceededError,
    UnauthenticatedError,
    UnavailableError,
)

CLIENT_GONE: Final = 499
SERVER_GONE: Final = 503
"""The status to count for what is cut by a server that stops, as ``is_cut`` says."""
CUT: Final = "kvplane.is_cut"
BODY_S: Final = 30.0
"""Seconds that a request's body may take, besides a second for each MiB of it."""
_STATUS: Final[tuple[tuple[type[KvplaneError], int], ...]] = (
    (InvalidRequestError, 400),
    (UnauthenticatedError, 401),
    (NeverFitsError, 400),
    (NotFoundError, 404),
    (QuotaExceededError, 429),
    (CapacityError, 503),
    (DeadlineExceededError, 504),
    (UnavailableError, 503),
)
_TYPES: Final = {
    400: "invalid_request_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}

T = TypeVar("T")


def authenticate(request: Request, api_keys: Sequence[str]) -> str:
    """Return the API key of the request; empty where ``api_keys`` is. Raises UnauthenticatedError
    unless it is one of them.
    """
    given = request.headers.get("authorization", "").removeprefix("Bearer ").encode()
    # All are compared, in a time that does not depend on how much of one was right.
    is_right = [hmac.compare_digest(given, key.encode()) for key in api_keys]
    if not is_right:
        return ""
    if not any(is_right):
        raise UnauthenticatedError("an API key of this server is needed")
    return api_keys[is_right.index(True)]


async def read_body(request: Request, max_bytes: int, take: Callable[[int], None]) -> bytes:
    """Read the body, up to ``max_bytes``. ``take`` counts the bytes of each part, or raises.

    Raises InvalidRequestError when it is too long or does not come in time.
    """
    body = bytearray()
    until_s = asyncio.get_running_loop().time() + BODY_S
    try:
        async with asyncio.timeout_at(until_s) as limit:
            async for part in request.stream():
                take(len(part))
                body += part
                if len(body) > max_bytes:
                    raise InvalidRequestError(f"must have at most {max_bytes} bytes", field="body")
                limit.reschedule(until_s + len(body) / (1 << 20))
    except TimeoutError:
        raise InvalidRequestError(
            f"did not come within {BODY_S:g} s and one for each MiB", field="body"
        ) from None
    return bytes(body)


def is_cut(scope: Scope) -> bool:
    """Return whether the server, and not the client, ended a request that was cancelled."""
    return bool(scope.get(CUT, bool)())


async def until_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``. If the client disconnects before, cancel the work and raise
    ClientDisconnect. The request's body must have been read.
    """

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> T:
        return await work

    working, leaving = asyncio.create_task(run()), asyncio.create_task(gone())
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def not_served(request: Request, error: Exception) -> Response:
    """Return the error response for a path or method that is not served."""
    assert isinstance(error, HTTPException)
    answer = refusal(
        NotFoundError(
            f"{request.method} {request.url.path} is not served: POST /v1/completions and"
            " /v1/chat/completions, GET /v1/models, /health, /healthz and /metrics are"
        )
    )
    answer.status_code = error.status_code
    answer.headers.update(error.headers or {})
    return answer


def refusal(error: KvplaneError) -> JSONResponse:
    """Convert an error to a response in the form of OpenAI's servers."""
    status = next((code for cls, code in _STATUS if isinstance(error, cls)), 500)
    headers = {}
    if error.retry_delay_s is not None:
        headers["Retry-After"] = str(max(1, round(error.retry_delay_s)))
    content = {
        "error": {
            "message": str(error),
            "type": _TYPES.get(status, "server_error"),
            "param": error.field or None,
            "code": error.reason.lower(),
        }
    }
    return JSONResponse(content, status_code=status, headers=headers)
