"""Both directions of one data plane, as its settings ask for them."""

from __future__ import annotations

import logging
from typing import Final

from data_plane.executor import Executor
from data_plane.server.config import DataPlaneConfig
from data_plane.server.push import chunks
from data_plane.server.push.counts import PushCounts
from data_plane.server.push.grpc_transport import GrpcTransport, PushChannels
from data_plane.server.push.nixl.agent import library
from data_plane.server.push.nixl.staging import Staging
from data_plane.server.push.nixl.transport import NixlTransport
from data_plane.server.push.receiver import BlockReceiver
from data_plane.server.push.sender import BlockSender, Transport
from data_plane.server.push.slots import NUM_RESERVED
from data_plane.server.worker_thread import WorkerThread
from kvplane.errors import InvalidRequestError
from kvplane.serving.callers.access import AccessList
from kvplane.serving.config import is_loopback
from kvplane.serving.limits.byte_quota import ByteQuota

_LOGGER: Final = logging.getLogger(__name__)


class PushEndpoint:
    """Where a data plane takes blocks, and what sends them. ``receiver`` and ``sender`` raise where
    the settings ask for none.
    """

    def __init__(
        self,
        config: DataPlaneConfig,
        executor: Executor,
        worker: WorkerThread,
        quota: ByteQuota,
    ) -> None:
        """Bind the address. ``quota`` counts the bytes of callers' blocks, both ways.

        Raises OSError and, for TLS files, InvalidRequestError.
        """
        self.counts = PushCounts()
        self._staging = _staging(config, executor)
        self._receiver: BlockReceiver | None = None
        self._sender: BlockSender | None = None
        if config.push_to:
            self._sender = BlockSender(
                executor,
                worker,
                self._transport(config),
                self.counts,
                quota=quota,
                hosts=config.push_to.split(","),
                max_pushes=config.max_pushes,
            )
        if config.push_bind:
            self._receiver = BlockReceiver(
                executor,
                worker,
                AccessList(config.access_file),
                self.counts,
                quota=quota,
                bind=config.push_bind,
                advertise=config.push_advertise,
                tls=config.tls,
                max_pushes=config.max_pushes,
                staging=self._staging,
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
    def takes_nixl(self) -> bool:
        """Whether blocks may come and go by NIXL."""
        return self._staging is not None

    @property
    def num_tickets(self) -> int:
        """Tickets that were given and not used."""
        return 0 if self._receiver is None else len(self._receiver.tickets)

    def start(self) -> None:
        """Take pushes."""
        if self._staging is not None:
            self._staging.start()
        if self._receiver is not None:
            self._receiver.start()

    def stop(self, grace_s: float) -> None:
        """Take no more pushes; those under way have ``grace_s`` to end."""
        if self._receiver is not None:
            self._receiver.stop(grace_s)
        if self._staging is not None:
            self._staging.close()

    def _transport(self, config: DataPlaneConfig) -> Transport:
        channels = PushChannels(config.push_tls)
        if self._staging is None:
            return GrpcTransport(channels)
        only = config.push_transfer == "nixl"
        return NixlTransport(self._staging, channels, self.counts, only=only)


def _staging(config: DataPlaneConfig, executor: Executor) -> Staging | None:
    """For NIXL; None where blocks go by gRPC."""
    if config.push_transfer == "grpc":
        return None
    if library() is None:
        if config.push_transfer == "auto":
            _LOGGER.info("NIXL is not installed: blocks are pushed by gRPC")
            return None
        raise InvalidRequestError(
            "NIXL is not installed: pip install 'kvplane[nixl]', or give auto",
            field="push_transfer",
        )
    return Staging(
        config.max_pushes + NUM_RESERVED,
        chunks.max_chunk_bytes(executor.layout, executor.shard),
        only_loopback=is_loopback(config.push_bind or config.bind),
    )
