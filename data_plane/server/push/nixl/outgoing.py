"""What goes from staging memory to a peer, and which peers take nothing at the moment."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTimeError
from typing import Final

from data_plane.server.push.nixl import packets
from data_plane.server.push.nixl.process import AgentProcess
from kvplane.errors import PlaneUnavailableError
from kvplane.v1 import push_pb2

# How long a peer may take for a write. With a request to the agent process before and one after it
# less than a receiver waits for its sender, so that the blocks can still go by gRPC.
WRITE_S: Final = 4.0


class Outgoing:
    """What is written to a peer. ``num_slots``: of it and of the peer."""

    def __init__(
        self,
        agent: AgentProcess,
        name: bytes,
        to: push_pb2.Staging,
        begin: int,
        slots: list[memoryview],
        stalls: Stalls,
    ) -> None:
        self.num_slots = min(len(slots), to.num_slots)
        self.stalled: Future[bytes] | None = None
        """A write that did not end in time, which was the last one."""
        self._agent = agent
        self._name = name
        self._to = to
        self._begin = begin
        self._slots = slots
        self._stalls = stalls

    def write(self, slot: int, data: memoryview) -> None:
        """Have ``data`` written to a slot of the peer; it is there when this returns. Raises
        PlaneUnavailableError, and does at once while the peer takes nothing.
        """
        self._stalls.check(self._name)
        mine = self._slots[slot]
        mine[: len(data)] = data
        body = packets.WRITE_BODY.pack(
            self._begin + slot * len(mine),
            len(data),
            self._to.address + slot * self._to.slot_bytes,
        )
        write = self._agent.begin(packets.WRITE, body + self._name)
        try:
            write.result(WRITE_S)
        except NotInTimeError as error:
            self.stalled = write
            self._stalls.add(self._name, write)
            self._agent.call(packets.PING)  # if it is the agent that hangs it is ended
            raise PlaneUnavailableError(
                f"the other agent took nothing for {WRITE_S:g} s: it is left alone until it does"
            ) from error


class Stalls:
    """Peers that have kept a write waiting for too long, until it ends: the agent process goes on
    for the others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_writes: Counter[bytes] = Counter()

    def add(self, name: bytes, write: Future[bytes]) -> None:
        """``name``: of the peer's agent."""
        with self._lock:
            self._num_writes[name] += 1
        write.add_done_callback(lambda _: self._ended(name))

    def check(self, name: bytes) -> None:
        """Raise PlaneUnavailableError for such a peer."""
        with self._lock:
            if self._num_writes[name]:
                raise PlaneUnavailableError("the other agent has yet to take an earlier write")

    def _ended(self, name: bytes) -> None:
        with self._lock:
            self._num_writes -= Counter((name,))
