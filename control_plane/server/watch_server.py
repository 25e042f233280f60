"""The streams of followers of prefix indexes.

A follower is woken when the index has changed, and takes what there is to tell when its stream has
room again; see ``control_plane.watching``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from control_plane.core import ControlPlane
from kvplane.serving.streams import stopping_error
from kvplane.v1 import control_pb2 as pb


class WatchServer:
    """All followers of this control plane."""

    def __init__(self, core: ControlPlane) -> None:
        self._core = core
        self._wakes: set[asyncio.Event] = set()
        self._stopping = False

    async def serve(self, request: pb.WatchRequest, tenant: str) -> AsyncIterator[pb.WatchResponse]:
        """Tell one follower, until it goes. Raises what ``ControlPlane.follow`` and
        ``Follower.take`` raise, and PlaneUnavailableError when the control plane stops.
        """
        changed = asyncio.Event()
        follower = self._core.follow(request, tenant, changed.set)
        self._wakes.add(changed)
        try:
            while not self._stopping:
                changed.clear()
                while (response := follower.take()) is not None:
                    yield response
                await changed.wait()
            raise stopping_error("control plane")
        finally:
            self._wakes.remove(changed)
            self._core.unfollow(follower)

    def stop(self) -> None:
        """End all streams; followers come back to the next control plane."""
        self._stopping = True
        for changed in self._wakes:
            changed.set()
