"""A client's connection to one plane: a channel, a default deadline, and typed errors."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc.aio
from google.protobuf.message import Message

from kvplane import tracing
from kvplane.errors import CancelledError, PlaneUnavailableError
from kvplane.transport.retry import Deadline, retry_until
from kvplane.transport.tls import Tls, open_channel
from kvplane.wire.error_codec import from_rpc_error

# gRPC's message, with the status INTERNAL, when a call is used while its connection closes.
BROKEN_CALL: Final = "Internal error from Core"


class Connection:
    """Calls to one plane, on one channel. Each has a deadline, and a typed error if it fails."""

    def __init__(
        self, target: str, *, tls: Tls | None, timeout_s: float, health_of: str = ""
    ) -> None:
        """``target``, ``health_of``: as for ``open_channel``."""
        Deadline.after(timeout_s)  # raises unless it is a valid timeout
        self.target = target
        self.timeout_s = timeout_s
        self.channel = open_channel(target, tls, health_of=health_of)

    def deadline(self, timeout_s: float | None) -> Deadline:
        """Return the deadline ``timeout_s`` from now, the default when None."""
        return Deadline.after(self.timeout_s if timeout_s is None else timeout_s)

    async def call(
        self,
        method: Callable[..., Any],
        request: Message,
        timeout_s: float | None = None,
        *,
        once: bool = False,
    ) -> Any:
        """Make a unary call, repeated while the peer is UNAVAILABLE. Returns its answer. ``once``:
        with an idempotency key, by which the control plane does one of its copies.
        """
        deadline = self.deadline(timeout_s)
        key = (("idempotency-key", secrets.token_hex(16)),) if once else ()
        async with deadline.guard():
            return await retry_until(
                deadline, lambda: self.attempt(method, request, deadline, metadata=key)
            )

    async def pages(
        self, method: Callable[..., Any], request: Any, timeout_s: float | None = None
    ) -> AsyncGenerator[Any, None]:
        """Yield all pages of a list, within ``timeout_s`` in all."""
        deadline = self.deadline(timeout_s)
        while True:
            page = await self.call(method, request, deadline.remaining_s)
            yield page
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def attempt(
        self,
        method: Callable[..., Any],
        request: Message,
        deadline: Deadline,
        *,
        metadata: tuple[tuple[str, str], ...] = (),
    ) -> Any:
        """Try a unary call once. Returns its answer."""
        with typed_errors():
            metadata += tracing.to_metadata() or ()
            return await method(request, timeout=deadline.remaining_s, metadata=metadata)

    async def close(self) -> None:
        """End all calls; those still waiting raise CancelledError of ``kvplane.errors``."""
        await self.channel.close()


@contextmanager
def typed_errors() -> Iterator[None]:
    """Convert any error of gRPC in the body to a KvplaneError."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        if error.details() == BROKEN_CALL:
            raise PlaneUnavailableError("the connection broke") from error
        raise from_rpc_error(error) from error
    except asyncio.InvalidStateError as error:
        raise PlaneUnavailableError("the call has ended") from error
    except grpc.aio.UsageError as error:
        raise CancelledError("the client is closed: make a new one") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # gRPC cancelled the call: its channel was closed.
        raise CancelledError("the client was closed during the call") from error
