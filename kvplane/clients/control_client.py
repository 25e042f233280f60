"""A client of the control plane: its pools, their cached prefixes, and sessions on them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Iterable
from enum import Enum
from typing import Final
from weakref import WeakSet

from kvplane import ops
from kvplane.clients.prefix_feed import PrefixEvent, follow
from kvplane.clients.server_info import get_server_info
from kvplane.errors import (
    DeadlineExceededError,
    KvplaneError,
    PlaneUnavailableError,
    PoolNotFoundError,
    PoolNotReadyError,
    UnavailableError,
)
from kvplane.execution.execution import Executions
from kvplane.layout import Layout
from kvplane.results import (
    ForgetResult,
    PoolInfo,
    PoolMatch,
    SequenceState,
    ServerInfo,
    SessionSummary,
)
from kvplane.session import Session
from kvplane.session.sequences import list_sequences
from kvplane.transport.connection import Connection
from kvplane.transport.opening import Opening
from kvplane.transport.tls import Tls
from kvplane.wire.error_messages import duration_of
from kvplane.wire.v1 import pool_pb2, pool_pb2_grpc, prefix_pb2, prefix_pb2_grpc, session_pb2_grpc
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.types_pb2 import SessionRef

DEFAULT_PRIORITY: Final = 50
"""Priority of a retained prefix, halfway between the first and the last to be evicted."""
_POLL_S: Final = 0.2
CONTROL_PLANE_SERVICE: Final = "kvplane.v1.SessionService"


class ForgetScope(Enum):
    """Which prefixes to forget: all of a namespace, or all of the caller's tenant."""

    NAMESPACE = prefix_pb2.FORGET_SCOPE_NAMESPACE
    TENANT = prefix_pb2.FORGET_SCOPE_TENANT


class ControlClient:
    """A client of the control plane at ``target``: "host:port", or several with commas, of which
    one leads.

    ``timeout_s``: default deadline of each call. Errors raised are those of ``kvplane.errors``. A
    call without an answer by its deadline raises PlaneUnavailableError when the last attempt did
    not reach the plane, and DeadlineExceededError when it still waited for the answer. Closing ends
    the renewal of all leases, and closes the executions of all sessions.

    ``tls``, ``timeout_s``, ``shared_memory``: also for executions of ``Session.open_execution``, as
    of ``DataClient``.
    """

    def __init__(
        self,
        target: str,
        *,
        tls: Tls | None = None,
        timeout_s: float = 10.0,
        shared_memory: bool = True,
    ) -> None:
        self._connection = Connection(
            target, tls=tls, timeout_s=timeout_s, health_of=CONTROL_PLANE_SERVICE
        )
        self._tls = tls
        self._shared_memory = shared_memory
        self._stub = session_pb2_grpc.SessionServiceStub(self._connection.channel)
        self._pools = pool_pb2_grpc.PoolServiceStub(self._connection.channel)
        self._prefixes = prefix_pb2_grpc.PrefixServiceStub(self._connection.channel)
        # A session is kept alive by the task that renews its lease, not by the client.
        self._sessions: WeakSet[Session] = WeakSet()

    async def __aenter__(self) -> ControlClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def get_server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        """Get the release and the incarnation of the control plane."""
        return await get_server_info(self._connection, timeout_s)

    async def list_pools(self, *, timeout_s: float | None = None) -> list[str]:
        """List the ids of the pools that have registered, ascending."""
        request = pool_pb2.ListPoolsRequest()
        pages = self._connection.pages(self._pools.ListPools, request, timeout_s)
        return [pool_id async for page in pages for pool_id in page.pool_ids]

    async def get_pool(self, pool_id: str, *, timeout_s: float | None = None) -> PoolInfo:
        """Get a pool's layout, shards, usage. Raises PoolNotFoundError if none has registered."""
        response: pool_pb2.GetPoolResponse = await self._connection.call(
            self._pools.GetPool, pool_pb2.GetPoolRequest(pool_id=pool_id), timeout_s
        )
        return PoolInfo.from_proto(response)

    async def get_counters(self, pool_id: str, *, timeout_s: float | None = None) -> dict[str, int]:
        """Get what a pool holds and has done, over all tenants, by the names of its metrics: such
        as "publications_total" and 'swapped_blocks_total{direction="out"}'
        (docs/reference/metrics.md). Needs the role operator. Raises PoolNotFoundError.
        """
        response: pool_pb2.GetPoolCountersResponse = await self._connection.call(
            self._pools.GetPoolCounters,
            pool_pb2.GetPoolCountersRequest(pool_id=pool_id),
            timeout_s,
        )
        return dict(response.counters)

    async def list_sessions(
        self, pool_id: str, *, timeout_s: float | None = None
    ) -> list[SessionSummary]:
        """List the open sessions of the caller's tenant, ids ascending. Needs the role operator.
        Raises PoolNotFoundError.
        """
        request = pool_pb2.ListSessionsRequest(pool_id=pool_id)
        pages = self._connection.pages(self._pools.ListSessions, request, timeout_s)
        return [SessionSummary.from_proto(each) async for page in pages for each in page.sessions]

    async def list_sequences(
        self, session: SessionSummary, *, timeout_s: float | None = None
    ) -> list[SequenceState]:
        """Get the states of all sequences of a session of the caller's tenant, such as
        ``list_sessions`` finds, ids ascending. Renews no lease.
        """
        ref = SessionRef(incarnation=session.incarnation, session_id=session.session_id)
        return await list_sequences(self._connection, self._stub, ref, (), timeout_s)

    async def wait_ready(self, pool_id: str, timeout_s: float | None = None) -> PoolInfo:
        """Wait until sessions can be opened on the pool.

        Also waits for the plane itself to come up. Raises PoolNotReadyError, or
        PlaneUnavailableError when the plane itself did not answer.
        """
        deadline = self._connection.deadline(timeout_s)
        while True:
            missing: KvplaneError = PoolNotReadyError("not all its shards have reported")
            try:
                pool = await self.get_pool(pool_id, timeout_s=deadline.remaining_s)
                if pool.ready:
                    return pool
            except (PoolNotFoundError, UnavailableError, DeadlineExceededError) as error:
                missing = error
            delay_s = random.uniform(_POLL_S / 2, _POLL_S)
            if delay_s >= deadline.remaining_s:
                cls: type[UnavailableError] = PoolNotReadyError
                if not isinstance(missing, PoolNotReadyError | PoolNotFoundError):
                    cls = PlaneUnavailableError
                text = f"pool {pool_id!r} is not ready after {deadline.timeout_s:g} s: {missing}"
                raise cls(text) from missing
            await asyncio.sleep(delay_s)

    async def find_prefix(
        self,
        token_ids: ops.Tokens = (),
        *,
        hashes: Iterable[bytes] = (),
        namespace: str = "",
        pool_ids: Iterable[str] = (),
        with_blocks: bool = False,
        timeout_s: float | None = None,
    ) -> list[PoolMatch]:
        """Get how much of a prompt each pool has cached, ids ascending: a hint, nothing is held.

        The prompt is given by its tokens or by the hashes of its leading full blocks, 16 bytes
        each. ``pool_ids``: none means all. ``with_blocks``: whether to get the blocks too. Raises
        PoolNotFoundError.
        """
        request = prefix_pb2.FindPrefixRequest(
            token_ids=ops.pack_tokens(token_ids),
            hashes=b"".join(hashes),
            namespace=namespace,
            pool_ids=pool_ids,
            with_blocks=with_blocks,
        )
        response: prefix_pb2.FindPrefixResponse = await self._connection.call(
            self._prefixes.FindPrefix, request, timeout_s
        )
        return [PoolMatch.from_proto(match) for match in response.matches]

    async def retain_prefix(
        self,
        pool_id: str,
        token_ids: ops.Tokens,
        *,
        namespace: str = "",
        time_to_live_s: float | None,
        priority: int = DEFAULT_PRIORITY,
        timeout_s: float | None = None,
    ) -> int:
        """Retain a prompt's cached prefix; returns the number of its leading blocks that are
        retained now. With ``time_to_live_s`` None, end the retention of the same prompt; returns
        the number of blocks that are not retained any more.

        Retained blocks are evicted after all other idle ones, and never withheld from a sequence.
        ``priority``: among retained blocks, from 1, evicted first, to 100. A repeat never shortens
        the time or lowers the priority. A prefix is cached once the receipts of its plan are
        submitted: a session that has just computed it calls ``Session.submit_receipts`` first.

        Raises PoolNotFoundError, PoolNotReadyError, QuotaExceededError.
        """
        request = prefix_pb2.RetainPrefixRequest(
            pool_id=pool_id,
            namespace=namespace,
            token_ids=ops.pack_tokens(token_ids),
            time_to_live=duration_of(time_to_live_s),
            priority=priority,
        )
        response: prefix_pb2.RetainPrefixResponse = await self._connection.call(
            self._prefixes.RetainPrefix, request, timeout_s, once=True
        )
        return response.num_blocks

    async def forget_prefixes(
        self,
        pool_id: str,
        what: ops.Tokens | ForgetScope,
        *,
        namespace: str = "",
        force: bool = False,
        timeout_s: float | None = None,
    ) -> ForgetResult:
        """Remove prefixes and their files, so that no lookup finds them again: either those that
        begin with the tokens of these whole blocks, or all those of a scope.

        ``force``: also forget blocks that sequences refer to, which otherwise raise
        BlockInUseError; those sequences keep reading them. A session that has just computed a
        prefix must call ``Session.submit_receipts`` first, as for ``retain_prefix``.

        Raises PoolNotFoundError, PoolNotReadyError, BlockInUseError.
        """
        request = prefix_pb2.ForgetPrefixesRequest(
            pool_id=pool_id, namespace=namespace, force=force
        )
        if isinstance(what, ForgetScope):
            request.scope = what.value
        else:
            request.scope = prefix_pb2.FORGET_SCOPE_PREFIX
            request.token_ids = ops.pack_tokens(what)
        response: prefix_pb2.ForgetPrefixesResponse = await self._connection.call(
            self._prefixes.ForgetPrefixes, request, timeout_s, once=True
        )
        return ForgetResult(response.num_forgotten_blocks, response.num_blocks_in_use)

    def watch_prefixes(
        self, pool_id: str, namespace: str = "", *, timeout_s: float | None = None
    ) -> AsyncGenerator[PrefixEvent, None]:
        """Yield what the caller's tenant has cached in a pool, and every later change to it (see
        ``kvplane.prefixes``), until the generator is closed.

        ``timeout_s``: how long the plane may be away before PlaneUnavailableError is raised. Raises
        PoolNotFoundError.
        """
        patience_s = self._connection.timeout_s if timeout_s is None else timeout_s
        return follow(self._prefixes.WatchPrefixes, pool_id, namespace, patience_s)

    def open_session(
        self,
        pool_id: str,
        layout: Layout | None = None,
        client_name: str = "",
        *,
        namespace: str = "",
        timeout_s: float | None = None,
    ) -> Opening[Session]:
        """Open a session on a pool, once the pool is ready: ``await`` it, or enter it with ``async
        with``.

        ``layout``: must be the pool's; None takes it as it is. Prefixes are shared inside
        ``namespace`` and never across. Raises LayoutMismatchError, PoolNotReadyError,
        QuotaExceededError, and PoolNotFoundError when a layout is given and no such pool has
        registered.
        """
        return Opening(
            lambda: self._open_session(pool_id, layout, client_name, namespace, timeout_s)
        )

    async def _open_session(
        self,
        pool_id: str,
        layout: Layout | None,
        client_name: str,
        namespace: str,
        timeout_s: float | None,
    ) -> Session:
        deadline = self._connection.deadline(timeout_s)
        if layout is None:
            layout = (await self.wait_ready(pool_id, timeout_s)).layout
        request = pb.OpenSessionRequest(
            pool_id=pool_id,
            layout=layout.to_proto(),
            client_name=client_name,
            namespace=namespace,
        )
        response: pb.OpenSessionResponse = await self._connection.call(
            self._stub.OpenSession, request, deadline.remaining_s, once=True
        )

        async def open_again(timeout_s: float) -> Session:
            deadline = self._connection.deadline(timeout_s)
            await self.wait_ready(pool_id, timeout_s)
            return await self._open_session(
                pool_id, layout, client_name, namespace, deadline.remaining_s
            )

        executions = Executions(
            tls=self._tls,
            timeout_s=self._connection.timeout_s,
            shared_memory=self._shared_memory,
        )
        session = Session(open_again, self._connection, self._stub, request, response, executions)
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        """End every call and renewal. Sessions that are open end when their leases run out."""
        for session in list(self._sessions):
            await session.detach()
        await self._connection.close()
