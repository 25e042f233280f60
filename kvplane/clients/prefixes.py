"""The calls of PrefixService that have one answer; ``prefix_feed`` has the one that follows an
index.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

from kvplane import ops
from kvplane.results import ForgetResult, PoolMatch, pool_match
from kvplane.transport.connection import Connection
from kvplane.wire.error_messages import duration_of
from kvplane.wire.v1 import prefix_pb2 as pb
from kvplane.wire.v1 import prefix_pb2_grpc

DEFAULT_PRIORITY: Final = 50
"""Priority of a retained prefix, halfway between the first and the last to be evicted."""


class ForgetScope(Enum):
    """Prefixes to forget: all of a namespace, or all of the caller's tenant."""

    NAMESPACE = pb.FORGET_SCOPE_NAMESPACE
    TENANT = pb.FORGET_SCOPE_TENANT


class PrefixCalls:
    """Calls a control plane's PrefixService over a connection. ``ControlClient`` documents them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.stub = prefix_pb2_grpc.PrefixServiceStub(connection.channel)

    async def find(
        self,
        token_ids: ops.Tokens,
        hashes: Iterable[bytes],
        namespace: str,
        pool_ids: Iterable[str],
        with_blocks: bool,
        timeout_s: float | None,
    ) -> list[PoolMatch]:
        """Call FindPrefix."""
        request = pb.FindPrefixRequest(
            token_ids=ops.pack_tokens(token_ids),
            hashes=b"".join(hashes),
            namespace=namespace,
            pool_ids=pool_ids,
            with_blocks=with_blocks,
        )
        response: pb.FindPrefixResponse = await self._connection.call(
            self.stub.FindPrefix, request, timeout_s
        )
        return [pool_match(match) for match in response.matches]

    async def retain(
        self,
        pool_id: str,
        token_ids: ops.Tokens,
        namespace: str,
        time_to_live_s: float | None,
        priority: int,
        timeout_s: float | None,
    ) -> int:
        """Call RetainPrefix; returns its number of blocks."""
        request = pb.RetainPrefixRequest(
            pool_id=pool_id,
            namespace=namespace,
            token_ids=ops.pack_tokens(token_ids),
            time_to_live=duration_of(time_to_live_s),
            priority=priority,
        )
        response: pb.RetainPrefixResponse = await self._connection.call(
            self.stub.RetainPrefix, request, timeout_s
        )
        return response.num_blocks

    async def forget(
        self,
        pool_id: str,
        what: ops.Tokens | ForgetScope,
        namespace: str,
        force: bool,
        timeout_s: float | None,
    ) -> ForgetResult:
        """Call ForgetPrefixes."""
        request = pb.ForgetPrefixesRequest(pool_id=pool_id, namespace=namespace, force=force)
        if isinstance(what, ForgetScope):
            request.scope = what.value
        else:
            request.scope = pb.FORGET_SCOPE_PREFIX
            request.token_ids = ops.pack_tokens(what)
        response: pb.ForgetPrefixesResponse = await self._connection.call(
            self.stub.ForgetPrefixes, request, timeout_s
        )
        return ForgetResult(response.num_forgotten_blocks, response.num_blocks_in_use)
