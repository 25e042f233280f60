"""The client's end of a local execution: its socket, and the region for its tensors."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from kvplane.errors import (
    DeadlineExceededError,
    InternalError,
    KvplaneError,
    PlaneUnavailableError,
)
from kvplane.transport.local import packets
from kvplane.transport.local.spin import Spin
from kvplane.wire.error_messages import from_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2

try:
    import kvplane_kernels as native
except ImportError:  # Python code does the same
    native = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from kvplane_kernels import LayerCall


Addresses = tuple[int, int, int, int]

_JOIN_S: Final = 2.0
# How long this thread polls for an answer before it sleeps; it is shorter on an event loop, which
# serves others too.
_SPIN_S: Final = 0.002
_SPIN_ON_LOOP_S: Final = 0.0002


class LocalConnection:
    """The client's socket and region of a local execution, made by ``join``. Whatever might break
    the order of requests and answers, such as an abandoned wait, closes the connection, and every
    further call raises PlaneUnavailableError.
    """

    def __init__(
        self, peer: socket.socket, region_id: int, memory: mmap.mmap, *, cuda_device_uuid: str = ""
    ) -> None:
        """``cuda_device_uuid``: of the GPU whose memory the data plane shares; empty for none."""
        self.region_id = region_id
        self.memory = memory
        self.cuda_device_uuid = cuda_device_uuid
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._peer: socket.socket | None = peer
        self._spin, self._spin_on_loop = Spin(_SPIN_S), Spin(_SPIN_ON_LOOP_S)
        self._native = None
        if hasattr(native, "AnswerSocket"):  # older ones have none
            self._native = native.AnswerSocket(fd=peer.fileno(), spin_s=_SPIN_S)
        self._poll = select.poll()
        self._poll.register(peer, select.POLLIN)

    @classmethod
    async def join(cls, offer: local_pb2.LocalOffer) -> LocalConnection:
        """Accept a data plane's offer. Raises OSError if its socket or memory cannot be opened, and
        the KvplaneError that it answers.
        """
        peer = packets.new_socket()
        try:
            peer.connect(offer.socket_path)
            if not packets.is_same_user(peer):
                raise PermissionError("the socket is another user's")
            join = pb.ExecuteRequest(join=local_pb2.JoinExecution(secret=offer.secret))
            packets.send(peer, join.SerializeToString())
            async with asyncio.timeout(_JOIN_S):
                await _readable(peer)
            return cls(peer, *_read_joined(peer), cuda_device_uuid=offer.cuda_device_uuid)
        except BaseException:
            peer.close()
            raise

    def __del__(self) -> None:
        self.close()

    @property
    def is_open(self) -> bool:
        """Return whether requests can be sent, as far as this side knows."""
        return self._peer is not None

    def place(self, sizes_bytes: Sequence[int]) -> list[int] | None:
        """Return offsets in the region for ranges of these sizes, one after another; None if they
        do not fit.
        """
        return packets.place(sizes_bytes, len(self.memory))

    def send(self, packet: bytes) -> None:
        """Send a request. Raises PlaneUnavailableError when the connection ended."""
        try:
            packets.send(self._open_peer(), packet)
        except OSError as error:
            self.close()
            raise _broke(error) from error

    def receive(self, timeout_s: float) -> bytes:
        """Wait in this thread for the answer to the oldest request without one. Raises
        PlaneUnavailableError when the connection ended, and DeadlineExceededError.
        """
        try:
            peer = self._open_peer()
            if self._native is not None:
                return self._native.receive(timeout_s)
            deadline_s = time.monotonic() + timeout_s
            while (answer := self._receive(peer, self._spin)) is None:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise _late(timeout_s)
                self._poll.poll(1000 * left_s)
            return answer
        except OSError as error:
            self.close()
            raise _translated(error, timeout_s) from error
        except BaseException:
            self.close()
            raise

    def ask(self, packet: bytes, timeout_s: float) -> bytes:
        """Send a request, and receive the answer to the oldest one without one."""
        self.send(packet)
        return self.receive(timeout_s)

    def receive_file(self, timeout_s: float) -> tuple[bytes, int]:
        """Receive an answer with a file descriptor, which the caller closes; -1 if it has none."""
        try:
            peer = self._open_peer()
            if not self._poll.poll(1000 * timeout_s):
                raise _late(timeout_s)
            answer, file = packets.receive_file(peer)
            if not answer:
                raise PlaneUnavailableError("the local connection has ended")
            return answer, file
        except OSError as error:
            self.close()
            raise _broke(error) from error
        except BaseException:
            self.close()
            raise

    def at_end(self, forget: Callable[[], None]) -> None:
        """Register a method that ``close`` calls once, if its object is still alive: the regions'
        contents must not be used afterwards.
        """
        self._at_end.append(weakref.WeakMethod(forget))

    @property
    def is_native(self) -> bool:
        """Return whether the native library is loaded, which ``call`` needs."""
        return self._native is not None

    def call(
        self, layer: LayerCall, named: bytes, addresses: Addresses, timeout_s: float
    ) -> bytes | None:
        """Run a bound layer: copy its tensors into the region, send its packet and wait for an
        answer. If that has no receipt, copy the output from the region and return None; otherwise
        return the answer. ``named``: the end of the packet. ``addresses``: of query, key, value and
        output, each contiguous. Raises the same errors as ``send`` and ``receive``.
        """
        try:
            self._open_peer()
            assert self._native is not None
            return self._native.call(layer, named, *addresses, timeout_s)
        except OSError as error:
            self.close()
            raise _translated(error, timeout_s) from error
        except BaseException:
            self.close()
            raise

    async def receive_soon(self) -> bytes:
        """Receive an answer on an event loop, without a deadline: cancel it."""
        try:
            peer = self._open_peer()
            while (answer := self._receive(peer, self._spin_on_loop)) is None:
                await _readable(peer)
            return answer
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the connection; the data plane then releases the regions."""
        peer, self._peer = self._peer, None
        while self._at_end:
            if (forget := self._at_end.pop()()) is not None:
                forget()
        if peer is not None:
            with suppress(OSError):  # native code has the socket open too
                peer.shutdown(socket.SHUT_RDWR)
            peer.close()

    def _open_peer(self) -> socket.socket:
        if self._peer is None:
            raise PlaneUnavailableError("the local connection has ended")
        return self._peer

    def _receive(self, peer: socket.socket, spin: Spin) -> bytes | None:
        """Poll for an answer; returns it, or None if it does not come soon."""
        if not spin.look(self._look):
            return None
        try:
            return packets.receive(peer)
        except OSError as error:
            raise _broke(error) from error

    def _look(self) -> list[tuple[int, int]]:
        return self._poll.poll(0)


def _late(timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(f"no answer within {timeout_s:g} s")


def _broke(error: OSError) -> PlaneUnavailableError:
    return PlaneUnavailableError(f"the local connection broke: {error}")


def _translated(error: OSError, timeout_s: float) -> KvplaneError:
    """Convert an error of native code to a KvplaneError."""
    return _late(timeout_s) if isinstance(error, TimeoutError) else _broke(error)


async def _readable(peer: socket.socket) -> None:
    """Wait until the socket can be read."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(peer.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(peer.fileno())


def _read_joined(peer: socket.socket) -> tuple[int, mmap.mmap]:
    """Receive the region that the data plane gives. Raises the same errors as ``join``."""
    packet, file = packets.receive_file(peer)
    try:
        answer = packets.parse(pb.ExecuteResponse, packet)
        if answer.HasField("error"):
            raise from_wire(answer.error)
        regions = [r for r in answer.joined.regions if not r.cuda_ipc_handle]
        if len(regions) != 1 or file < 0:
            raise InternalError(f"expected one region, got {len(regions)}; its file: {file}")
        size_bytes = regions[0].size_bytes
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
        if os.fstat(file).st_size != size_bytes or not seals & fcntl.F_SEAL_SHRINK:
            raise InternalError("the region is not what the data plane says it is")
        return regions[0].region_id, mmap.mmap(file, size_bytes)
    finally:
        if file >= 0:
            os.close(file)
