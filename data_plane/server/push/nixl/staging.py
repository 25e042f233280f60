"""Memory through which blocks go to and from NIXL, and nothing else: a share for each push.

What a peer can write is a share. It may write it at any time, so bytes are taken out before they
are looked at: ``Incoming.read`` copies.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from data_plane.server.push.nixl import packets
from data_plane.server.push.nixl.outgoing import Outgoing, Stalls
from data_plane.server.push.nixl.process import AgentProcess
from kvplane.errors import InvalidRequestError, PlaneUnavailableError, QuotaExceededError
from kvplane.v1 import push_pb2

_LOGGER: Final = logging.getLogger(__name__)
# Chunks on the way at one time: one is written to the peer while one is read and one is taken out.
NUM_SLOTS: Final = 3
# A process that ended is followed by another one, but not more often.
_RESTART_S: Final = 5.0


class Staging:
    """Shares of ``NUM_SLOTS`` slots each, as many for each direction, and the agent process."""

    def __init__(self, num_pushes: int, slot_bytes: int, *, only_loopback: bool) -> None:
        """``num_pushes``: of each direction at one time. ``slot_bytes``: the most that a chunk has.
        ``only_loopback``: use no other network device.
        """
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_shares = num_pushes
        self._share_bytes = NUM_SLOTS * self.slot_bytes
        self._only_loopback = only_loopback
        size = 2 * num_pushes * self._share_bytes
        self._fd = os.memfd_create("kvplane-nixl-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        # Reading what the other process had cut off would end this one.
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self._memory = memoryview(mmap.mmap(self._fd, size))
        self._lock = threading.Lock()
        # Apart: an agent process that is waited for gives shares back when it ends.
        self._shares_lock = threading.Lock()
        self._free = {True: set(range(num_pushes)), False: set(range(num_pushes))}
        self._stalls = Stalls()
        self._num_stalled = 0
        self._agent: AgentProcess | None = None
        self._started_s = -_RESTART_S
        self._is_closed = False

    def start(self) -> None:
        """Start the agent process, so that the first push need not wait for it."""
        with suppress(PlaneUnavailableError):
            self._running()

    def wait_until_ready(self) -> None:
        """A moment, until the agent process can be asked. Raises PlaneUnavailableError."""
        self._running().wait_until_ready()

    def close(self) -> None:
        """End the agent process, and with it what is under way."""
        with self._lock:
            self._is_closed = True
            if self._agent is not None:
                self._agent.close()
        os.close(self._fd)

    @contextmanager
    def incoming(self) -> Iterator[Incoming]:
        """A share that one peer writes. Raises PlaneUnavailableError, QuotaExceededError."""
        with self._share(incoming=True) as share:
            agent = self._running()
            agent.wait_until_ready()
            body = packets.SHARE.pack(share)
            answer = agent.call(packets.LEASE, body)
            try:
                yield Incoming(self._slots(share * self._share_bytes), answer)
            finally:
                with suppress(PlaneUnavailableError):
                    agent.call(packets.RELEASE, body)

    @contextmanager
    def outgoing(self, to: push_pb2.Staging) -> Iterator[Outgoing]:
        """A share from which is written to ``to``, which a peer has said. A write that outlasts its
        push keeps the share, of which it may still send, and its peer's agent. Raises
        PlaneUnavailableError, also while the process starts, and QuotaExceededError.
        """
        if to.num_slots < 1 or not 0 < len(to.metadata) <= packets.MAX_METADATA_BYTES:
            raise PlaneUnavailableError("the receiving data plane has no staging memory free")
        if to.slot_bytes < self.slot_bytes or to.address + to.num_slots * to.slot_bytes >= 2**64:
            raise PlaneUnavailableError("the staging memory of the receiving data plane is no such")
        with ExitStack() as stack:
            share = stack.enter_context(self._share(incoming=False))
            agent = self._running()
            name = agent.call(packets.CONNECT, to.metadata)
            stack.callback(agent.tell, packets.FORGET, name)
            self._stalls.check(name)
            begin = (self._num_shares + share) * self._share_bytes
            outgoing = Outgoing(agent, name, to, begin, self._slots(begin), self._stalls)
            try:
                yield outgoing
            finally:
                if outgoing.stalled is not None:
                    self._free_later(stack.pop_all(), outgoing.stalled)

    def _free_later(self, share: ExitStack, write: Future[bytes]) -> None:
        def ended(_: object) -> None:
            with self._shares_lock:
                self._num_stalled -= 1
            share.close()

        with self._shares_lock:
            self._num_stalled += 1
        write.add_done_callback(ended)

    @contextmanager
    def _share(self, *, incoming: bool) -> Iterator[int]:
        free = self._free[incoming]
        with self._shares_lock:
            if not free:
                self._end_if_useless()
                raise QuotaExceededError("all staging memory is in use", retry_delay_s=0.1)
            share = free.pop()
        try:
            yield share
        finally:
            with self._shares_lock:
                free.add(share)

    def _end_if_useless(self) -> None:
        """An agent process that has nothing but writes which do not end frees all by its end."""
        nobody_writes = len(self._free[True]) == self._num_shares
        if self._agent is not None and nobody_writes and self._num_stalled == self._num_shares:
            self._agent.end()

    def _slots(self, begin: int) -> list[memoryview]:
        size = self.slot_bytes
        return [self._memory[begin + i * size :][:size] for i in range(NUM_SLOTS)]

    def _running(self) -> AgentProcess:
        with self._lock:
            if self._is_closed:
                raise PlaneUnavailableError("the data plane is stopping")
            if self._agent is None or self._agent.has_ended:
                if time.monotonic() - self._started_s < _RESTART_S:
                    raise PlaneUnavailableError("the process that speaks NIXL has just ended")
                if self._agent is not None:
                    _LOGGER.warning("the process that speaks NIXL has ended: starting another")
                    self._agent.close()
                self._started_s = time.monotonic()
                try:
                    self._agent = AgentProcess(
                        self._fd,
                        self._num_shares,
                        self._share_bytes,
                        only_loopback=self._only_loopback,
                    )
                except OSError as error:
                    text = f"the process that speaks NIXL cannot be started: {error}"
                    raise PlaneUnavailableError(text) from error
            return self._agent


class Incoming:
    """What a peer writes."""

    def __init__(self, slots: list[memoryview], answer: bytes) -> None:
        self._slots = slots
        (address,) = packets.ADDRESS.unpack_from(answer)
        self.message = push_pb2.Staging(
            metadata=answer[packets.ADDRESS.size :],
            address=address,
            slot_bytes=len(slots[0]),
            num_slots=len(slots),
        )
        """For the peer."""

    def read(self, slot: int, num_bytes: int) -> bytearray:
        """A copy of the first bytes of a slot. Raises InvalidRequestError."""
        if not 0 <= slot < len(self._slots):
            raise InvalidRequestError(
                f"must be below the {len(self._slots)} slots of the push", field="chunk.slot"
            )
        if not 0 <= num_bytes <= len(self._slots[slot]):
            raise InvalidRequestError(
                f"a slot has {len(self._slots[slot])} bytes, and so many blocks have {num_bytes}",
                field="chunk.num_blocks",
            )
        return bytearray(self._slots[slot][:num_bytes])
