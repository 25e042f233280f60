"""Explains UNIMPLEMENTED to a caller that has mixed up the planes' addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc
import grpc.aio

_OURS: Final = "/kvplane."


class WrongServiceInterceptor(grpc.aio.ServerInterceptor):
    """Answers calls of the other plane's service, UNIMPLEMENTED here, with what is served here."""

    def __init__(self, service_name: str) -> None:
        """``service_name``: the full name of the service that is served."""
        self._served = service_name.rpartition(".")[2]

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        wanted = handler_call_details.method
        if handler is not None or not wanted.startswith(_OURS):
            return handler
        service = wanted.rpartition("/")[0].rpartition(".")[2]
        if service == self._served:
            text = f"{service} has no such method here: update this server"
        else:
            text = f"{self._served} is served here: are the planes' addresses swapped?"

        async def refuse(requests: Any, context: Any) -> AsyncIterator[bytes]:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
            yield b""

        # A stream, whatever was called: on the wire a call that is refused looks the same.
        return grpc.stream_stream_rpc_method_handler(refuse)
