"""The gRPC service of cached prefixes, which needs no session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Final, cast

import grpc.aio

from control_plane.core import ControlPlane
from control_plane.server.service import TURNS_OF_A_CALL, idempotency_key
from kvplane.serving.callers.identity import caller, payer
from kvplane.serving.streams import stopping_error
from kvplane.v1 import prefix_pb2 as contract
from kvplane.wire.v1 import prefix_pb2 as pb
from kvplane.wire.v1 import prefix_pb2_grpc

PREFIX: Final = contract.DESCRIPTOR.services_by_name["PrefixService"]

_Context = grpc.aio.ServicerContext[Any, Any]


class PrefixService(prefix_pb2_grpc.PrefixServiceServicer):
    """The gRPC service that finds, retains, forgets and watches the cached prefixes of one core.

    A watcher of an index is woken when it has changed, and takes the changes when its stream has
    room again; see ``control_plane.watching``.
    """

    def __init__(self, core: ControlPlane, flush: Callable[[], None]) -> None:
        """``flush`` sends the messages that the core has queued for data planes and sessions."""
        self._core = core
        self._flush = flush
        self._wakes: set[asyncio.Event] = set()
        self._stopping = False
        self._searching = asyncio.Lock()  # one at a time, or many would leave others little

    def stop(self) -> None:
        """End all watchers' streams; their clients reconnect to the next control plane."""
        self._stopping = True
        for changed in self._wakes:
            changed.set()

    async def FindPrefix(
        self, request: pb.FindPrefixRequest, context: _Context
    ) -> pb.FindPrefixResponse:
        slices = self._core.find_prefix(request, caller().tenant)
        try:
            next(slices)
            while True:
                async with self._searching:  # for a slice only: others take turns with it
                    for _ in range(TURNS_OF_A_CALL):
                        await asyncio.sleep(0)
                    next(slices)
        except StopIteration as end:
            return cast(pb.FindPrefixResponse, end.value)

    async def RetainPrefix(
        self, request: pb.RetainPrefixRequest, context: _Context
    ) -> pb.RetainPrefixResponse:
        return self._core.retain_prefix(request, caller().tenant, idempotency_key(context))

    async def ForgetPrefixes(
        self, request: pb.ForgetPrefixesRequest, context: _Context
    ) -> pb.ForgetPrefixesResponse:
        response = self._core.forget_prefixes(request, caller().tenant, idempotency_key(context))
        self._flush()
        return response

    async def WatchPrefixes(
        self, request: pb.WatchPrefixesRequest, context: _Context
    ) -> AsyncIterator[pb.WatchPrefixesResponse]:
        """Serve one watcher until it leaves. Raises what ``ControlPlane.watch`` and
        ``Watcher.take`` raise, and PlaneUnavailableError when the control plane stops.
        """
        changed = asyncio.Event()
        watcher = self._core.watch(request, caller().tenant, changed.set, payer())
        self._wakes.add(changed)
        try:
            while not self._stopping:
                changed.clear()
                while (response := watcher.take()) is not None:
                    yield response
                await changed.wait()
            raise stopping_error("control plane")
        finally:
            self._wakes.remove(changed)
            self._core.unwatch(watcher)
