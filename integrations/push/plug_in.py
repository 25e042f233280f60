"""Both directions of one data plane, as its settings ask for them."""

from __future__ import annotations

from data_plane.blocks_from_outside import BlocksFromOutside
from data_plane.server.config import DataPlaneConfig
from data_plane.server.push.counts import PushCounts
from data_plane.server.push.grpc_transport import GrpcTransport, PushChannels
from data_plane.server.push.receiver import BlockReceiver
from data_plane.server.push.sender import BlockSender
from kvplane.errors import InvalidRequestError
from kvplane.serving.callers.access import AccessList


class PushEndpoint:
    """Where a data plane takes blocks, and what sends them. ``receiver`` and ``sender`` raise where
    the settings ask for none.
    """

    def __init__(self, config: DataPlaneConfig, outside: BlocksFromOutside) -> None:
        """Bind the address. Raises OSError and, for TLS files, InvalidRequestError."""
        self.outside = outside
        self.counts = PushCounts()
        self._receiver: BlockReceiver | None = None
        self._sender: BlockSender | None = None
        if config.push_to:
            self._sender = BlockSender(
                outside,
                GrpcTransport(PushChannels(config.push_tls)),
                self.counts,
                hosts=config.push_to.split(","),
                max_pushes=config.max_pushes,
            )
        if config.push_bind:
            self._receiver = BlockReceiver(
                outside,
                AccessList(config.access_file),
                self.counts,
                bind=config.push_bind,
                advertise=config.push_advertise,
                tls=config.tls,
                max_pushes=config.max_pushes,
            )

    @property
    def receiver(self) -> BlockReceiver:
        """Raises InvalidRequestError where there is none."""
        if self._receiver is None:
            raise InvalidRequestError(
                "this data plane takes no blocks from others: start it with --push-bind"
            )
        return self._receiver

    @property
    def sender(self) -> BlockSender:
        """Raises InvalidRequestError where there is none."""
        if self._sender is None:
            raise InvalidRequestError(
                "this data plane sends no blocks to others: start it with --push-to"
            )
        return self._sender

    @property
    def num_tickets(self) -> int:
        """Tickets that were given and not used."""
        return 0 if self._receiver is None else len(self._receiver.tickets)

    def start(self) -> None:
        """Take pushes."""
        if self._receiver is not None:
            self._receiver.start()

    def stop(self, grace_s: float) -> None:
        """Take no more pushes; those under way have ``grace_s`` to end."""
        if self._receiver is not None:
            self._receiver.stop(grace_s)
