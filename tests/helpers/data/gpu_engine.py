"""An engine in a process of its own, whose tensors count as being on the emulated GPU."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch

from kvplane import DataClient, Execution
from kvplane.attention_options import AttentionOptions
from kvplane.execution.execution import shards_of
from kvplane.runtime import device_region, region_layers
from kvplane.runtime.device_region import DeviceRegion
from kvplane.runtime.region_layers import RegionLayers
from kvplane.transport.local.connection import LocalConnection
from kvplane.wire.v1 import local_pb2
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers.data.gpu_peer import MemoryUser, OtherProcess
from tests.helpers.data.plan_author import tokens


class Engine(MemoryUser):
    """The engine in the other process."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.lines: SimpleQueue[logging.LogRecord] = SimpleQueue()
        self.order: list[str] = []

    def open_execution(self, address: str, grant: bytes) -> None:
        """Open an execution as the SDK does, with tensors of a GPU."""
        device_region.cuda_module = lambda: self.native  # type: ignore[assignment]
        region_layers.gpu_of = lambda tensor: 0  # type: ignore[assignment]
        handler = logging.handlers.QueueHandler(self.lines)
        logging.getLogger("kvplane").addHandler(handler)
        logging.getLogger("kvplane").setLevel(logging.INFO)

        async def opened() -> tuple[DataClient, Execution]:
            client = DataClient(address)
            return client, await client.open(SignedPayload.FromString(grant))

        self.client, self.execution = self.loop.run_until_complete(opened())
        self.shard, *_ = shards_of(self.execution)
        self.layers = RegionLayers(self.shard)

    def claim_uuid(self, uuid: str) -> None:
        """Make tensors count as being on this GPU."""
        made = SimpleNamespace(open_shared=self.native.open_shared, device_uuid=lambda _: uuid)
        device_region.cuda_module = lambda: made  # type: ignore[assignment,return-value]

    def change_region(self, **fields: Any) -> None:
        """Change fields of the data plane's offer."""
        share = device_region._share

        def changed(*asked: Any) -> tuple[local_pb2.MemoryRegion, int]:
            region, file = share(*asked)
            for name, value in fields.items():
                setattr(region, name, value)
            return region, file

        device_region._share = changed

    def run_plan(self, plan: bytes, num_layers: int, seed: int) -> list[torch.Tensor | None]:
        """Return the outputs of a plan of two tokens."""
        assert self.layers.begin(SignedPayload.FromString(plan), 2)
        return [self.run_layer(layer, seed) for layer in range(num_layers)]

    def run_layer(self, layer: int, seed: int) -> torch.Tensor | None:
        tensors = [tokens(2, 4 if i == 0 else 2, seed=seed + i) for i in range(3)]
        output = self.layers.layer(layer, *tensors, AttentionOptions())
        return None if output is None else output.clone()

    def note_order(self) -> None:
        """Note the order of waits for the GPU and of packets, from now on."""
        settle, send = DeviceRegion.settle, LocalConnection.send

        def settled(region: DeviceRegion) -> None:
            self.order.append("wait")
            settle(region)

        def sent(local: LocalConnection, packet: bytes) -> None:
            self.order.append("packet")
            send(local, packet)

        DeviceRegion.settle = settled  # type: ignore[method-assign]
        LocalConnection.send = sent  # type: ignore[method-assign]

    def noted_order(self) -> list[str]:
        return self.order

    def regions(self) -> list[bool]:
        """Return whether the GPU's memory was mapped, for each GPU looked up."""
        return [region is not None for region in self.layers._regions.values()]

    def log(self) -> list[str]:
        return [self.lines.get().getMessage() for _ in range(self.lines.qsize())]

    def hold(self) -> None:
        """Keep a tensor of the region alive."""
        (region,) = self.layers._regions.values()
        assert isinstance(region, DeviceRegion)
        self.held.append(region.whole[64:128])

    def held_bytes(self) -> bytes:
        return bytes(self.held[0].numpy())

    def leave(self) -> None:
        self.loop.run_until_complete(self.execution.close())


class GpuEngine(OtherProcess):
    """The test's end of the engine."""

    def __init__(self) -> None:
        super().__init__(Engine)
