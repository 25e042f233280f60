"""Lets clients on this machine continue without gRPC, with memory regions that both sides map.

    Execute stream (gRPC)  ── offer: path, secret ──►  client
    Unix socket            ◄── join: secret ─────────  same user only
                           ─── region, sealed ──────►

An offer names one execution, to the caller that opened it over gRPC, once. The region ends with the
execution's session, its stream or its socket, or when the caller is no longer admitted.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from data_plane.execution.executor import Executor
from data_plane.server.execute_stream import ExecuteStream
from data_plane.server.fair_queue import Lane
from data_plane.server.local.connection import LocalConnection
from data_plane.server.local.device_regions import DeviceRegion, DeviceRegions
from data_plane.server.local.region import HostRegion
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    QuotaExceededError,
    UnauthenticatedError,
)
from kvplane.transport.local import packets
from kvplane.wire.error_messages import to_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2

MAX_REGIONS_PER_SESSION: Final = 4
_MAX_JOINING: Final = 64
_JOIN_S: Final = 2.0
_OFFER_S: Final = 10.0
_SWEEP_INTERVAL_S: Final = 0.5
_NAME: Final = "socket"


@dataclass(frozen=True, slots=True)
class _Offer:
    stream: ExecuteStream
    admit: Callable[[], None]
    payer: str
    expires_s: float


class LocalEndpoint:
    """Accepts clients on the event loop, and serves them on the worker thread."""

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        *,
        folder: Path | None,
        num_regions: int,
        region_bytes: int,
        num_device_regions: int = 0,
        on_error: Callable[[KvplaneError], None],
    ) -> None:
        """``folder``: where the socket's folder is made; None for the system's temporary files.
        ``num_regions``: how many, of ``region_bytes`` each, may exist at the same time;
        ``num_device_regions``: how many of that size on the executor's GPU. ``on_error`` is called
        on the worker thread with each error that a client is answered.

        Raises InvalidRequestError if the socket cannot be made in ``folder``.
        """
        self._num_packets = 0  # of connections that have ended
        self._executor = executor
        self._worker = worker
        self._num_regions = num_regions
        self._region_bytes = region_bytes
        self._on_error = on_error
        self._host_id = packets.host_id()
        self._offers: dict[bytes, _Offer] = {}
        self._joining: dict[socket.socket, asyncio.TimerHandle] = {}
        self._connections: dict[ExecuteStream, LocalConnection] = {}
        self._device_regions = DeviceRegions(
            executor.kernels,
            num_regions=num_device_regions,
            region_bytes=region_bytes,
            end_use=self._end_use,
        )
        self._folder, self._listener = _listen(folder)
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def num_packets(self) -> int:
        """Number of packets answered."""
        return self._num_packets + sum(
            connection.num_packets for connection in list(self._connections.values())
        )

    @property
    def num_regions(self) -> int:
        """Number of regions in use."""
        return len(self._connections)

    @property
    def num_bytes(self) -> int:
        """Size of the regions in use, in bytes."""
        return len(self._connections) * self._region_bytes

    @property
    def num_device_regions(self) -> int:
        """Number of regions on the GPU, also those kept open after their connection's end."""
        return self._device_regions.num_regions

    def start(self) -> None:
        """Start to accept clients on the running event loop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._listener.fileno(), self._accept)
        self._sweeper = loop.create_task(self._sweep_often())

    def stop(self) -> None:
        """Stop accepting, end all connections and remove the socket. Harmless when called again."""
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._worker.post(self._end_all)
        for peer in list(self._joining):
            self._no_longer_joining(peer).close()
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def offer(
        self, stream: ExecuteStream, host_id: str, admit: Callable[[], None], payer: str
    ) -> local_pb2.LocalOffer | None:
        """Return an offer with which the caller of ``stream`` can join; None for a caller on
        another machine. ``admit`` raises once the caller is not admitted any longer. ``payer`` is
        charged for its commands.
        """
        if not host_id or host_id != self._host_id:
            return None
        self.withdraw(stream)
        secret = secrets.token_bytes(packets.SECRET_BYTES)
        self._offers[secret] = _Offer(stream, admit, payer, time.monotonic() + _OFFER_S)
        return local_pb2.LocalOffer(
            socket_path=str(self._folder / _NAME),
            secret=secret,
            cuda_device_uuid=self._device_regions.cuda_device_uuid,
        )

    def withdraw(self, stream: ExecuteStream) -> None:
        """Withdraw the offer for ``stream``, or end its connection if the offer was taken."""
        for secret, offer in list(self._offers.items()):
            if offer.stream is stream:
                del self._offers[secret]
        self._worker.post(partial(self._end, stream))

    def _accept(self) -> None:
        """Accept a process of this user, and wait ``_JOIN_S`` for the offer that it takes."""
        try:
            peer, _ = self._listener.accept()
        except OSError:
            return
        peer.setblocking(False)
        if len(self._joining) >= _MAX_JOINING or not packets.is_same_user(peer):
            peer.close()
            return
        loop = asyncio.get_running_loop()
        loop.add_reader(peer.fileno(), self._greet, peer)
        self._joining[peer] = loop.call_later(
            _JOIN_S, lambda: self._no_longer_joining(peer).close()
        )

    def _greet(self, peer: socket.socket) -> None:
        """Read the client's first packet, or close the socket if the client has gone."""
        self._no_longer_joining(peer)
        try:
            packet = packets.receive(peer)
        except OSError:
            packet = None
        if packet is None:
            peer.close()
        else:
            self._worker.post(partial(self._join, peer, packet))

    def _no_longer_joining(self, peer: socket.socket) -> socket.socket:
        self._joining.pop(peer).cancel()
        asyncio.get_running_loop().remove_reader(peer.fileno())
        return peer

    # On the worker thread.

    def _join(self, peer: socket.socket, packet: bytes) -> None:
        """Answer a client's first packet with a region, and serve it from now on; or an error."""
        try:
            offer = self._take(packet)
            region = self._new_region(offer.stream)
        except KvplaneError as error:
            self._on_error(error)
            refusal = pb.ExecuteResponse(error=to_wire(error)).SerializeToString()
            with peer, suppress(OSError):
                packets.send(peer, refusal)
            return
        shared = local_pb2.MemoryRegion(region_id=region.id, size_bytes=region.size_bytes)
        joined = pb.ExecuteResponse(joined=local_pb2.ExecutionJoined(regions=[shared]))
        connection = LocalConnection(
            peer,
            region,
            offer.stream,
            self._executor,
            device_regions=self._device_regions,
            spin_s=self._worker.spin_s,
            admit=offer.admit,
            on_error=self._on_error,
            on_end=self._forget,
        )
        self._connections[offer.stream] = connection
        lane = Lane(offer.payer, connection.session_id)
        self._worker.watch(peer.fileno(), lane, connection.serve, connection.wait)
        try:
            socket.send_fds(peer, [joined.SerializeToString()], [region.fd], packets.NO_WAIT)
        except OSError:
            connection.end()
        finally:
            region.close_fd()

    def _take(self, packet: bytes) -> _Offer:
        """Remove and return the offer that a packet names. Raises KvplaneError."""
        join = packets.parse(pb.ExecuteRequest, packet).join
        offer = self._offers.pop(join.secret, None)
        if offer is None or offer.expires_s < time.monotonic():
            raise UnauthenticatedError(
                "belongs to no offer, or to one that was taken or expired: open another execution",
                field="join.secret",
            )
        offer.admit()
        return offer

    def _new_region(self, stream: ExecuteStream) -> HostRegion:
        """Allocate a region. Raises QuotaExceededError, and InternalError for lack of memory."""
        of_session = [c for c in self._connections.values() if c.session_id == stream.session_id]
        if len(of_session) >= MAX_REGIONS_PER_SESSION:
            raise QuotaExceededError(
                f"a session may have {MAX_REGIONS_PER_SESSION} regions", field="join"
            )
        if len(self._connections) >= self._num_regions:
            raise QuotaExceededError(
                f"all {self._num_regions} regions of this data plane are in use", field="join"
            )
        try:
            return HostRegion(self._region_bytes)
        except OSError as error:
            raise InternalError(f"no shared memory: {error}") from error

    def _end(self, stream: ExecuteStream) -> None:
        if stream in self._connections:
            self._connections[stream].end()

    def _end_all(self) -> None:
        for connection in list(self._connections.values()):
            connection.end()
        self._device_regions.close()

    def _forget(self, connection: LocalConnection) -> None:
        del self._connections[connection.stream]
        self._num_packets += connection.num_packets
        self._worker.unwatch(connection.fileno())

    def _sweep(self) -> None:
        """End the connections of ended sessions and of callers that are no longer admitted, and
        free the regions on the GPU that clients have closed.
        """
        for connection in list(self._connections.values()):
            connection.end_if_due()
        self._device_regions.sweep()

    def _end_use(self, region: DeviceRegion) -> None:
        for connection in self._connections.values():
            connection.end_use(region)

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_INTERVAL_S)
            now_s = time.monotonic()
            for secret, offer in list(self._offers.items()):
                if offer.expires_s < now_s:
                    self._offers.pop(secret, None)
            if self._connections or self.num_device_regions:
                self._worker.post(self._sweep)


def _listen(folder: Path | None) -> tuple[Path, socket.socket]:
    """Make a folder for this user alone, and a socket that listens in it."""
    try:
        own = Path(tempfile.mkdtemp(prefix="kvplane-", dir=folder))
        listener = packets.new_socket()
        try:
            listener.bind(str(own / _NAME))
            listener.listen()
        except BaseException:
            listener.close()
            shutil.rmtree(own, ignore_errors=True)
            raise
    except OSError as error:
        raise InvalidRequestError(
            f"there can be no Unix socket in {folder or tempfile.gettempdir()}: {error}",
            field="local_folder",
        ) from error
    return own, listener
