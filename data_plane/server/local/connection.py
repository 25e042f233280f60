"""One client on this machine: its socket and its regions, until either side ends them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Final

from data_plane.execution.executor import Executor
from data_plane.server.execute_stream import ExecuteStream
from data_plane.server.local.device_regions import DeviceRegion, DeviceRegions
from data_plane.server.local.layer_server import LayerServer
from data_plane.server.local.region import HostRegion
from data_plane.server.worker_thread import NOTHING, WaitResult
from kvplane.errors import InternalError, InvalidRequestError, KvplaneError
from kvplane.serving.observability.logs import frames_of
from kvplane.slices import Slices
from kvplane.transport.local import packets
from kvplane.wire.error_messages import to_wire
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2

_LOGGER: Final = logging.getLogger(__name__)


class LocalConnection:
    """Serves one client by its socket and its regions. Used on the worker thread."""

    def __init__(
        self,
        peer: socket.socket,
        region: HostRegion,
        stream: ExecuteStream,
        executor: Executor,
        *,
        device_regions: DeviceRegions,
        spin_s: float,
        admit: Callable[[], None],
        on_error: Callable[[KvplaneError], None],
        on_end: Callable[[LocalConnection], None],
    ) -> None:
        """``spin_s``: how long ``wait`` polls before it sleeps. ``admit`` raises once the caller is
        not admitted any longer. ``on_error`` gets every error that is answered; ``on_end`` is
        called once, before the socket is closed.
        """
        self.stream = stream
        self.session_id = stream.session_id
        self._peer = peer
        self._executor = executor
        self._admit = admit
        self._on_error = on_error
        self._on_end = on_end
        self._has_ended = False
        self._device_regions = device_regions
        self._device_region: DeviceRegion | None = None
        self._has_shared = False  # once, since it makes the GPU's other work wait
        self._new_file = False  # whether the next answer brings that region's
        self._host_region: HostRegion | None = region
        self._use_regions()
        self._layers = LayerServer(peer.fileno(), stream, executor, spin_s=spin_s)
        self._num_answered = 0  # here
        self._packet: bytes | None = None  # found by ``wait``

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._peer.fileno()

    def serve(self) -> Slices[None]:
        """Answer a packet, if one has come. Ends if the peer has gone or reads no answers."""
        if self._has_ended:
            return
        try:
            packet, self._packet = self._packet, None
            if packet is None:
                packet = self._serve_layers(-1, waits=False)
            if packet is not None:
                self._num_answered += 1
                self._send((yield from self._answer(packet)))
        except OSError:
            self.end()

    def wait(self, epoll: int) -> WaitResult:
        """Wait for packets, and answer those of bound layers, until there is another packet or
        something else is ready at ``epoll``.
        """
        if self._has_ended:
            return NOTHING
        busy_s = self._layers.busy_s
        try:
            self._packet = self._serve_layers(epoll, waits=True)
        except OSError:
            self.end()
        return WaitResult(self._layers.busy_s - busy_s, self._packet is not None)

    @property
    def num_packets(self) -> int:
        """Number of packets answered."""
        return self._num_answered + self._layers.num_served

    def _serve_layers(self, epoll: int, *, waits: bool) -> bytes | None:
        """Answer packets of bound layers; returns one that the caller has to answer, if any."""
        layers = self._layers
        try:
            if not layers.look(epoll, waits=waits):
                return None
            try:
                self._admit()
            except KvplaneError:
                return layers.take()
            return layers.serve(epoll, waits=waits)
        except OSError:
            raise
        except Exception as error:  # a bug: the thread, which all share, has to survive it
            _log(error)
            raise ConnectionError("internal error") from error

    def end(self) -> None:
        """Close the socket and release the regions. Harmless when called again."""
        if not self._has_ended:
            self._has_ended = True
            self._host_region = self._device_region = self._packet = None
            self.stream.use_regions([])
            self._layers.close()
            self._on_end(self)
            self._peer.close()

    def end_if_due(self) -> None:
        """End the connection if the session has ended or the caller is no longer admitted."""
        try:
            self._admit()
        except Exception as error:
            if not isinstance(error, KvplaneError):
                _log(error)
            self.end()
        if not self._is_of_session():
            self.end()

    def end_use(self, region: DeviceRegion) -> None:
        """Stop using a region that its client has closed, if it is this connection's."""
        if region is self._device_region:
            self._device_region = None
            self._layers.forget_in_place()
            self._use_regions()

    def _use_regions(self) -> None:
        regions = [r for r in (self._host_region, self._device_region) if r is not None]
        self.stream.use_regions(regions, self._share)

    def _share(self, request: local_pb2.ShareDeviceMemory) -> pb.ExecuteResponse:
        """Answer a client's request for a region on the GPU, of which it gets one."""
        if self._has_shared:
            raise InvalidRequestError("a region on the GPU was given already", field="share")
        region = self._device_regions.new(request)
        self._device_region, self._has_shared, self._new_file = region, True, True
        self._use_regions()
        return pb.ExecuteResponse(joined=local_pb2.ExecutionJoined(regions=[region.message]))

    def _send(self, answer: bytes) -> None:
        region = self._device_region
        if region is None or not self._new_file:
            packets.send(self._peer, answer)
            return
        self._new_file = False
        try:
            socket.send_fds(self._peer, [answer], [region.file], packets.NO_WAIT)
        finally:
            region.close_file()

    def _is_of_session(self) -> bool:
        """Whether the region's session is still open, and still the stream's."""
        session_id = self.session_id
        return session_id == self.stream.session_id and self._executor.is_open(session_id)

    def _answer(self, packet: bytes) -> Slices[bytes]:
        try:
            self._admit()
            if packet[:1] != b"\0":
                return (yield from self.stream.answer_packet(packet))
            kind, binding, rest = packets.read_head(packet)
            if kind == packets.BIND_LAYER:
                return self._layers.bind(binding, rest)
            return (yield from self._layers.run(binding, rest))
        except Exception as error:
            return self._refusal(error)

    # Not part of `_answer`: a variable of a frame in the error's traceback would keep the frames,
    # and their tensors, alive until garbage collection.
    def _refusal(self, error: Exception) -> bytes:
        if isinstance(error, KvplaneError):
            self._on_error(error)
            public = error
        else:
            _log(error)
            public = InternalError("internal error; the server's log has more")
        if isinstance(public, InternalError):
            self._executor.device_watch.check()  # copies are not commands of the executor
        return pb.ExecuteResponse(error=to_wire(public)).SerializeToString()


def _log(error: Exception) -> None:
    """Log an error, if only a bug can have caused it."""
    _LOGGER.error("unexpected error method=local error=%s", frames_of(error))
