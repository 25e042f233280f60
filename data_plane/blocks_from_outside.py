"""Lets a service read and write blocks of a data plane, such as blocks computed elsewhere.

The names in ``__all__`` are as public as the package ``kvplane``: a service outside of the product
may import them, and nothing else of the data plane. Each method that returns a Future may be called
from any thread; it runs as a command on the worker thread, in the caller's turn.
A ``PlugIn`` is such a service in the data plane's own process.

    open ──► start ──► span ──► write, until there is a receipt
       └───► read
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Final, Protocol, TypeVar

import torch
from google.protobuf.descriptor import ServiceDescriptor

from data_plane.execution.executor import Executor
from data_plane.execution.plan_runner import StartedPlan
from data_plane.execution.table_blocks import BlockRange
from data_plane.kernels.device.cuda_streams import device_errors
from data_plane.memory.pool import TORCH_DTYPES
from data_plane.memory.upload import upload
from data_plane.server.fair_queue import Lane
from data_plane.server.worker_thread import WorkerThread
from data_plane.tier_keys import check_group, tier_key_of
from kvplane.errors import InvalidRequestError, PlaneUnavailableError
from kvplane.serving.callers.identity import caller, payer
from kvplane.serving.config import ServerSettings
from kvplane.serving.observability.metrics import Declaration, Samples
from kvplane.transport.tls import Tls
from kvplane.wire.v1 import types_pb2 as pb

__all__ = ["BlockRange", "BlocksFromOutside", "Lane", "PlugIn", "StartedPlan"]

PLUG_INS: Final = "kvplane.data_plane_services"

T = TypeVar("T")


class BlocksFromOutside:
    """Access to the blocks of one data plane, which ``layout`` and ``shard`` describe.

    A ``Lane`` is an open session, and the caller who is charged for its commands' time.
    """

    def __init__(
        self,
        executor: Executor,
        worker: WorkerThread,
        serving: ServerSettings,
        peer_tls: Tls | None,
    ) -> None:
        """``serving``: the data plane's settings for serving, also valid for any port of a plug-in.
        ``peer_tls``: how to connect to other data planes, with the identity that this one has at
        the control plane; None for plain text.
        """
        self.layout, self.shard = executor.layout, executor.shard
        self.serving, self.peer_tls = serving, peer_tls
        self._executor = executor
        self._worker = worker

    def open(self, grant: pb.SignedPayload) -> Future[Lane]:
        """Open the session of ``grant`` for the caller of the gRPC call that is being served. Safe
        to repeat. Raises the same errors as ``Executor.open``.
        """
        tenant = caller().tenant if self.serving.knows_callers else None
        paid_by = payer()

        def command() -> Lane:
            return Lane(paid_by, self._executor.open(grant, tenant=tenant))

        return self._submit(command, Lane(paid_by))

    def start(self, lane: Lane, plan: pb.SignedPayload) -> Future[StartedPlan]:
        """Start a plan of the session. Raises the same errors as ``Executor.start``."""
        return self._submit(partial(self._executor.start, lane.session_id, plan), lane)

    def span(self, lane: Lane, sequence_id: int, plan_number: int) -> Future[range]:
        """Return the table entries that the session's latest plan, which must have this number,
        computes for a sequence, the same in each layer group. Raises as ``TableBlocks.of_span``.
        """

        def command() -> range:
            span, _, _ = self._executor.blocks.of_span(lane.session_id, sequence_id, plan_number)
            return span

        return self._submit(command, lane)

    def read(self, lane: Lane, blocks: BlockRange) -> Future[memoryview]:
        """Read written blocks of the session, as bytes in the order of
        ``ReadBlocksResponse.blocks``. Raises the same errors as ``Executor.read_blocks``.
        """

        def command() -> memoryview:
            entries = range(blocks.first_block, blocks.first_block + blocks.num_blocks)
            data, _ = self._executor.blocks.read(
                lane.session_id, blocks, entries, only_written=True
            )
            with device_errors():
                here = data.cpu().contiguous()
            return here.view(torch.uint8).flatten().numpy().data

        return self._submit(command, lane)

    def write(
        self, lane: Lane, blocks: BlockRange, data: bytes, plan_number: int, *, field: str
    ) -> Future[pb.SignedPayload | None]:
        """Write slots of the session's latest plan, whose number must be ``plan_number``. ``data``:
        in the form that ``read`` returns. ``field``: the prefix of fields in errors.
        Returns the receipt once every slot of the plan is written, and None before. Raises
        InvalidRequestError for the wrong number of bytes, and as ``Executor.write_blocks``.
        """
        group = check_group(blocks.group, self.layout, f"{field}.group")
        held = self.shard.group_layers(self.layout, group)
        layer_bytes = self.shard.block_bytes(self.layout, group) // len(held)
        wanted = layer_bytes * blocks.num_layers * blocks.num_blocks
        if min(blocks.num_layers, blocks.num_blocks) < 1 or len(data) != wanted:
            raise InvalidRequestError(
                f"must have {wanted} bytes for so many blocks and layers, has {len(data)}",
                field=f"{field}.data",
            )
        command = partial(
            write_bytes, self._executor, lane.session_id, blocks, bytearray(data), plan_number
        )
        return self._submit(command, lane)

    def _submit(self, command: Callable[[], T], lane: Lane) -> Future[T]:
        try:
            return self._worker.submit(command, lane)
        except RuntimeError as error:
            raise PlaneUnavailableError("the data plane is stopping") from error


def write_bytes(
    executor: Executor, session_id: int, blocks: BlockRange, data: bytearray, plan_number: int
) -> pb.SignedPayload | None:
    """Write ``data``, whole blocks of the layers that ``blocks`` names. Has to run on the worker
    thread as a command. Raises the same errors as ``Executor.write_blocks``.
    """
    flat = torch.frombuffer(data, dtype=TORCH_DTYPES[executor.layout.stored_dtype(blocks.group)])
    page = executor.pools.tier(tier_key_of(blocks.group, pb.TIER_DEVICE)).shape[2:]
    here = flat.reshape(blocks.num_layers, blocks.num_blocks, *page)
    if executor.device.type != "cpu":
        with device_errors():
            here = upload([here], executor.device)[0]
    return executor.blocks.write(session_id, [blocks], here, plan_number)


class PlugIn(Protocol):
    """A gRPC service that an installed package adds to the data plane. An entry point of the group
    ``PLUG_INS`` makes it from a ``BlocksFromOutside``; its settings are environment variables.
    Raises OSError and InvalidRequestError.
    """

    service: ServiceDescriptor
    """The service's descriptor; it shares the data plane's address, TLS, roles and limits."""
    declarations: Sequence[Declaration]
    """Declarations of the plug-in's metrics."""

    def add_to(self, server: Any) -> None:
        """Register the servicer with a server of ``grpc.aio``."""

    def start(self) -> None:
        """Begin background work, if there is any. Called before the server accepts calls."""

    def stop(self, grace_s: float) -> None:
        """End background work within ``grace_s`` seconds; not called on the event loop."""

    def read(self, samples: Samples) -> None:
        """Add the values of the metrics in ``declarations``. Called on the thread of a scrape."""


def load_plug_ins(names: str, outside: BlocksFromOutside) -> list[PlugIn]:
    """Load the plug-ins named, separated by commas. Raises InvalidRequestError for one that is not
    installed, and as a plug-in does.
    """
    plug_ins: list[PlugIn] = []
    for name in filter(None, names.split(",")):
        found = [*entry_points(group=PLUG_INS, name=name)]
        if not found:
            raise InvalidRequestError(f"no plug-in {name!r} is installed", field="plug_ins")
        plug_ins.append(found[0].load()(outside))
    return plug_ins
