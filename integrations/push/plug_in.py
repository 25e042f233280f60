"""The plug-in: both directions of one data plane, as its settings ask for them, and the calls by
which engines have blocks moved. The data plane hosts these beside its own. Settings are variables:
KVPLANE_PUSH_BIND and so on.
"""

from __future__ import annotations

import logging
import os
from asyncio import wrap_future
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from data_plane.blocks_from_outside import BlocksFromOutside
from kvplane.errors import InvalidRequestError
from kvplane.serving.callers.access import AccessList
from kvplane.serving.config import ANY_HOST, check_address
from kvplane.serving.observability.metrics import Samples
from kvplane.serving.settings import log_settings, parse, setting

from . import push_pb2 as pb
from .metrics import DECLARATIONS, PushCounts
from .push_pb2_grpc import add_PushServiceServicer_to_server
from .receiver import BlockReceiver
from .sender import BlockSender

PROGRAM: Final = "push"


class PushPlugIn:
    """A ``data_plane.blocks_from_outside.PlugIn``. ``receiver`` and ``sender`` raise where the
    settings ask for none.
    """

    service = pb.DESCRIPTOR.services_by_name["PushService"]
    declarations = DECLARATIONS

    def __init__(self, outside: BlocksFromOutside, environ: Mapping[str, str] = os.environ) -> None:
        """Bind the address. Raises OSError and, for TLS files and addresses that are not safe,
        InvalidRequestError.
        """
        config, serving = PushSettings.read(environ), outside.serving
        self.counts = PushCounts()
        self._outside = outside
        self._receiver: BlockReceiver | None = None
        self._sender: BlockSender | None = None
        if config.to:
            tls = outside.peer_tls
            self._sender = BlockSender(
                outside,
                self.counts,
                tls=None if tls is None else replace(tls, server_name=config.name),
                hosts=config.to.split(","),
                max_pushes=config.max_pushes,
            )
        if config.bind:
            serving.check_safe(config.bind, "KVPLANE_PUSH_BIND")
            self._receiver = BlockReceiver(
                outside,
                AccessList(serving.access_file),
                self.counts,
                bind=config.bind,
                advertise=config.advertise,
                tls=serving.server_tls,
                max_pushes=config.max_pushes,
            )

    @property
    def receiver(self) -> BlockReceiver:
        """Raises InvalidRequestError where there is none."""
        if self._receiver is None:
            raise InvalidRequestError(
                "this data plane takes no blocks from others: set KVPLANE_PUSH_BIND"
            )
        return self._receiver

    @property
    def sender(self) -> BlockSender:
        """Raises InvalidRequestError where there is none."""
        if self._sender is None:
            raise InvalidRequestError(
                "this data plane sends no blocks to others: set KVPLANE_PUSH_TO"
            )
        return self._sender

    def add_to(self, server: Any) -> None:
        """Have a server of ``grpc.aio`` serve engines."""
        add_PushServiceServicer_to_server(self, server)

    def start(self) -> None:
        """Take pushes."""
        if self._receiver is not None:
            self._receiver.start()

    def stop(self, grace_s: float) -> None:
        """Take no more pushes; those under way have ``grace_s`` to end."""
        if self._receiver is not None:
            self._receiver.stop(grace_s)

    def read(self, samples: Samples) -> None:
        """Add the metrics to a scrape."""
        receiver = self._receiver
        self.counts.tell(samples, 0 if receiver is None else len(receiver.tickets))

    async def ReceiveBlocks(
        self, request: pb.ReceiveBlocksRequest, context: Any
    ) -> pb.ReceiveBlocksResponse:
        receiver, outside = self.receiver, self._outside
        lane = await wrap_future(outside.open(request.grant))
        started = await wrap_future(outside.start(lane, request.plan))
        if started.receipt is not None:
            return pb.ReceiveBlocksResponse(receipt=started.receipt)
        blocks = await wrap_future(outside.span(lane, request.sequence_id, started.number))
        ticket = receiver.give(lane, started.number, request.sequence_id, blocks)
        return pb.ReceiveBlocksResponse(ticket=ticket)

    async def SendBlocks(
        self, request: pb.SendBlocksRequest, context: Any
    ) -> pb.SendBlocksResponse:
        sender = self.sender
        return await sender.send(await wrap_future(self._outside.open(request.grant)), request)


@dataclass(frozen=True, kw_only=True)
class PushSettings:
    """Blocks sent to other data planes, and taken from them."""

    bind: str = setting(
        "",
        help="Address to take blocks from other data planes at, host:port; port 0 picks a free one,"
        " and empty takes none.",
    )
    advertise: str = setting(
        "", help="Address for them to connect to, host:port; empty means the one bound."
    )
    to: str = setting(
        "",
        help="Hosts of other data planes that blocks may be sent to, with commas; * for any, and"
        " empty for none. Over TLS where the data plane serves TLS, trusting --tls-ca.",
    )
    name: str = setting(
        "", help="Name that their certificates must have, where it is not the host."
    )
    max_pushes: int = setting(
        4,
        help="Pushes of blocks of one caller at one time, of each direction; one more is left to"
        " other callers.",
        unit="pushes",
        minimum=1,
        maximum=256,
    )

    def __post_init__(self) -> None:
        if self.bind:
            check_address(self.bind, "bind")
            if self.bind.rpartition(":")[0] in ANY_HOST and not self.advertise:
                raise InvalidRequestError(
                    f"must be given, because {self.bind} binds all addresses", field="advertise"
                )
        if self.advertise:
            check_address(self.advertise, "advertise")

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> PushSettings:
        """Those in ``environ``. Exits for what is wrong there."""
        config = parse(cls, PROGRAM, [], environ)
        log_settings(config, logging.getLogger(PROGRAM))
        return config
