"""A client of one data plane, for a process that has only a session's grant, as a rank does."""

from __future__ import annotations

from kvplane.clients.server_info import get_server_info
from kvplane.execution.execution import Execution, Executions
from kvplane.results import ServerInfo, Signed
from kvplane.transport.connection import Connection
from kvplane.transport.opening import Opening
from kvplane.transport.tls import Tls


class DataClient:
    """A client of the data plane at ``target`` ("host:port").

    ``timeout_s``: default deadline of each call. ``shared_memory``: whether executions use memory
    that a data plane on this machine shares, if it does; otherwise their tensors travel over gRPC.
    Every call may be repeated, and is while the plane is UNAVAILABLE. Errors raised are those of
    ``kvplane.errors``: BadSignatureError, StaleError, ConflictError for payloads that do not fit,
    InvalidRequestError naming the field.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        self._target = target
        self._executions = Executions(tls=tls, timeout_s=timeout_s, shared_memory=shared_memory)
        self._connection = Connection(target, tls=tls, timeout_s=timeout_s)

    async def __aenter__(self) -> DataClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Get the release of the data plane, its part of a pool, its device, and the control plane
        that it is registered with.
        """
        return await get_server_info(self._connection, timeout_s)

    def open(self, grant: Signed, *, timeout_s: float | None = None) -> Opening[Execution]:
        """Open an execution, which runs the plans of the session of ``grant`` on this shard alone:
        ``await`` it, or enter it with ``async with``. Its receipts are the caller's to submit.
        """
        return self._executions.open(grant, [self._target], timeout_s=timeout_s)

    async def close(self) -> None:
        """End every call and every execution of this client."""
        await self._executions.close()
        await self._connection.close()
