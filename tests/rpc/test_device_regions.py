"""Memory of the data plane's GPU, shared with an engine in another process: on the emulated GPU,
whose memory both really have. What is computed in it, what is refused, and when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane import limits
from data_plane.kernels.arguments import AttentionArguments
from data_plane.kernels.backend import Kernels
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.server.local import device_regions
from data_plane.server.local.connection import LocalConnection
from kvplane.errors import InternalError, InvalidRequestError, KvplaneError, QuotaExceededError
from kvplane.wire.v1 import execution_pb2 as pb
from kvplane.wire.v1 import local_pb2
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.data.gpu_engine import GpuEngine
from tests.helpers.data.gpu_peer import num_gpu_maps
from tests.helpers.data.kernel_sets import emulated_kernels, late_kernels
from tests.helpers.local_peer import (
    LocalPeer,
    error_of,
    forget_regions_of_others,
    num_mapped,
    output_after,
    plan_of_two_tokens,
)
from tests.helpers.served import Served, served
from tests.helpers.waiting import until

REGION_BYTES = 3 << 20
NUM_REGIONS = 2
NUM_LAYERS = 2
OTHER_UUID = "GPU-00000000-0000-0000-0000-000000000000"


# An engine in a process of its own imports torch, which takes seconds. On push, layers of one and
# its session's end stand for all.
another_process = pytest.mark.nightly


@pytest.fixture(autouse=True)
def few_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "NUM_LOCAL_DEVICE_REGIONS", NUM_REGIONS)


class Rig:
    """A data plane on the emulated GPU. ``outs``: of attention, where its output was written, if
    that was asked for.
    """

    def __init__(self, served: Served, native: Any, outs: list[int | None]) -> None:
        self.server = served.server
        self.author = served.author
        self.joined = served.joined
        self.native = native
        self.outs = outs

    @property
    def uuid(self) -> str:
        return str(self.native.device_uuid(0))

    @property
    def connections(self) -> list[LocalConnection]:
        return [*self.server.local._connections.values()]

    async def sharing(self) -> LocalPeer:
        """Return an execution of a plan of two tokens, with a region on the GPU."""
        peer = await self.joined()
        await peer.ask(plan=plan_of_two_tokens(self.author))
        assert (await peer.share(self.uuid)).HasField("joined")
        return peer

    async def engine(self, engine: GpuEngine, session_id: int = 1) -> GpuEngine:
        grant = self.author.grant(session_id).SerializeToString()
        await engine.soon("open_execution", self.server.address, grant)
        return engine

    def plan(self, number: int = 1, session_id: int = 1) -> bytes:
        plan: bytes = plan_of_two_tokens(self.author, number, session_id).SerializeToString()
        return plan

    async def num_regions(self, wanted: int) -> None:
        """Wait until the data plane has so many on its GPU, and no more memory of it."""
        await until(lambda: self.server.local.num_device_regions == wanted)
        await until(lambda: num_gpu_maps() <= wanted)


def noting(kernels: Any, outs: list[int | None]) -> Kernels:
    """Return CUDA kernels that note where outputs go, of bound layers too."""
    attend, queue = kernels.paged_attention, kernels.queue

    def paged_attention(arguments: AttentionArguments, **options: Any) -> torch.Tensor:
        out = options.get("out")
        outs.append(None if out is None else out.data_ptr())
        return attend(arguments, **options)

    def queued(name: str, tensors: dict[str, torch.Tensor], **arguments: Any) -> None:
        if name == "paged_attention":
            outs.append(arguments["out"])
        queue(name, tensors, **arguments)

    kernels.paged_attention, kernels.queue = paged_attention, queued
    made: Kernels = kernels
    return made


@contextlib.asynccontextmanager
async def rig_of(folder: Path, kernels: Kernels, **settings: Any) -> AsyncIterator[Rig]:
    forget_regions_of_others()
    native = kernels._module  # type: ignore[attr-defined]
    early = native.num_early_frees()
    values = {"local_region_bytes": REGION_BYTES, "num_local_regions": 6}
    outs: list[int | None] = []
    async with served(folder, noting(kernels, outs), **values | settings) as plane:
        yield Rig(plane, native, outs)
    assert num_mapped() == 0 == num_gpu_maps()
    assert native.num_early_frees() == early


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with rig_of(tmp_path, emulated_kernels()) as rig:
        yield rig


@pytest.fixture
def engine() -> Iterator[GpuEngine]:
    engine = GpuEngine()
    yield engine
    engine.kill()


def check_outputs(outputs: list[torch.Tensor], number: int) -> None:
    """Of plan ``number``, after those before it, each with tensors of its own seed."""
    assert len(outputs) == NUM_LAYERS
    for output in outputs:
        torch.testing.assert_close(output, output_after(number), atol=1e-5, rtol=1e-5)


async def test_layers_of_another_process_are_computed_in_the_gpus_memory(
    rig: Rig, engine: GpuEngine
) -> None:
    """Also with the plan under way when the region is asked for."""
    await rig.engine(engine)
    await engine.soon("note_order")
    for number in (1, 2, 3):
        outputs = await engine.soon("run_plan", rig.plan(number), NUM_LAYERS, 100 * number)
        check_outputs(outputs, number)
    assert await engine.soon("regions") == [True]
    plan_and_layers = ["packet"] + ["wait", "packet"] * NUM_LAYERS
    # The first layer asks for the region, and each for a binding, which this GPU refuses once.
    first = ["packet", "packet"] + ["packet", "wait", "packet"] * NUM_LAYERS
    assert await engine.soon("noted_order") == [*first, *(2 * plan_and_layers)]
    (connection,) = rig.connections
    whole = connection._device_region._whole
    inside = range(whole.data_ptr(), whole.data_ptr() + REGION_BYTES)
    assert len(rig.outs) == 3 * NUM_LAYERS and all(out in inside for out in rig.outs)
    assert not connection._host_region._whole.any()  # nothing went through main memory
    assert rig.server.local.num_device_regions == 1
    del whole, connection
    await engine.soon("leave")
    await rig.num_regions(0)
    assert await engine.soon("num_maps") == 0


@another_process
async def test_an_answer_comes_once_the_gpu_has_done_the_layer(
    tmp_path: Path, engine: GpuEngine
) -> None:
    """On streams that do their work late."""
    for seed in range(3):
        kernels, runtime = late_kernels(emulated_kernels(), seed)
        runtime.early_share = 0.0
        folder = tmp_path / str(seed)
        folder.mkdir()
        async with rig_of(folder, kernels) as rig:
            await rig.engine(engine)
            check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
            assert await engine.soon("regions") == [True]
            await engine.soon("leave")
            await rig.num_regions(0)


async def test_a_region_on_another_gpu_is_refused(rig: Rig) -> None:
    peer = await rig.joined()
    assert peer.offer.cuda_device_uuid == rig.uuid
    for uuid in ("", OTHER_UUID, rig.uuid + "0", "x" * 10_000):
        error = error_of(await peer.share(uuid))
        assert (type(error), error.field) == (InvalidRequestError, "share.cuda_device_uuid")
    assert rig.server.local.num_device_regions == 0
    peer.close()


@another_process
async def test_an_engine_on_another_gpu_goes_through_main_memory(
    rig: Rig, engine: GpuEngine
) -> None:
    await rig.engine(engine)
    await engine.soon("claim_uuid", OTHER_UUID)
    check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
    assert await engine.soon("regions") == [False]
    (line,) = await engine.soon("log")
    assert "no GPU memory with" in line and OTHER_UUID in line
    assert rig.server.local.num_device_regions == 0 == num_gpu_maps()
    await engine.soon("leave")


async def test_a_data_plane_without_a_gpu_offers_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernels, num_regions in ((CpuKernels(1), 4), (emulated_kernels(), 0)):
        monkeypatch.setattr(limits, "NUM_LOCAL_DEVICE_REGIONS", num_regions)
        async with served(tmp_path, kernels, local_region_bytes=REGION_BYTES) as plane:
            peer = await plane.joined()
            assert peer.offer.cuda_device_uuid == ""
            for uuid in ("", "GPU-e0e1e2e3-e4e5-e6e7-e8e9-eaebecedeeef"):
                assert error_of(await peer.share(uuid)).field == "share.cuda_device_uuid"
            peer.close()


async def test_regions_are_bounded_and_given_once_to_a_connection(rig: Rig) -> None:
    peers = [await rig.joined(n) for n in range(1, NUM_REGIONS + 2)]
    for peer in peers[:-1]:
        assert (await peer.share(rig.uuid)).HasField("joined")
        error = error_of(await peer.share(rig.uuid))
        assert (type(error), error.field) == (InvalidRequestError, "share")
    error = error_of(await peers[-1].share(rig.uuid))
    assert (type(error), error.field) == (QuotaExceededError, "share")
    assert rig.server.local.num_device_regions == NUM_REGIONS == num_gpu_maps()
    os.close(peers[0].file)  # which lets the region go, and not the connection
    peers[0].file = -1
    assert (await peers[-1].share(rig.uuid)).HasField("joined")
    assert rig.server.local.num_device_regions == NUM_REGIONS == num_gpu_maps()
    error = error_of(await peers[0].share(rig.uuid))
    assert (type(error), error.field) == (InvalidRequestError, "share")
    for peer in peers:
        peer.close()
    await rig.num_regions(0)


@another_process
async def test_a_gpu_without_memory_leaves_main_memory(rig: Rig, engine: GpuEngine) -> None:
    rig.native.set_gpu_bytes(0)
    try:
        await rig.engine(engine)
        check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
    finally:
        rig.native.set_gpu_bytes(1 << 30)
    (line,) = await engine.soon("log")
    assert "no GPU memory with" in line and "cudaMalloc" in line
    assert not rig.server.lost.is_set()
    await engine.soon("leave")


async def test_a_region_on_the_gpu_is_not_given_over_grpc(rig: Rig) -> None:
    peer = await rig.joined()
    request = local_pb2.ShareDeviceMemory(cuda_device_uuid=rig.uuid)
    await peer.call.write(pb.ExecuteRequest(share=request))
    error = error_of(await peer.call.read())
    assert (type(error), error.field) == (InvalidRequestError, "message")
    assert rig.server.local.num_device_regions == 0
    peer.close()


@pytest.mark.parametrize(
    ("region_id", "offset_bytes"),
    [(2, REGION_BYTES), (2, REGION_BYTES - 64), (2, 2**62), (2, -64), (2, 32), (3, 0), (0, 0)],
)
async def test_what_does_not_fit_the_region_is_refused(
    rig: Rig, region_id: int, offset_bytes: int
) -> None:
    """2 MiB more than the region has may be allocated, but not used."""
    peer = await rig.joined()
    await peer.ask(plan=plan_of_two_tokens(rig.author))
    (region,) = (await peer.share(rig.uuid)).joined.regions
    assert (region.region_id, region.size_bytes) == (2, REGION_BYTES)
    for name in ("query", "key", "value", "output"):
        layer = peer.layer(0, 2)
        place = layer.output if name == "output" else getattr(layer, name).memory
        place.region_id, place.offset_bytes = region_id, offset_bytes
        error = error_of(await peer.ask(layer=layer))
        assert isinstance(error, InvalidRequestError)
        assert error.field.startswith(f"layer.{name}")
    assert not rig.outs
    peer.close()
    await rig.num_regions(0)


def in_gpus_memory(layer: pb.RunLayerRequest) -> pb.RunLayerRequest:
    """The layer with its tensors, and apart from them the output, in the region on the GPU."""
    for place in (layer.query.memory, layer.key.memory, layer.value.memory, layer.output):
        place.region_id = 2
    return layer


async def test_an_output_over_what_is_read_is_refused(rig: Rig) -> None:
    peer = await rig.sharing()
    layer = in_gpus_memory(peer.layer(0, 2))
    for i in range(3):
        layer.output.CopyFrom(tpb.MemoryRange(region_id=2, offset_bytes=4096 * i + 64))
        error = error_of(await peer.ask(layer=layer))
        assert (type(error), error.field) == (InvalidRequestError, "layer.output")
    peer.close()
    await rig.num_regions(0)


async def test_a_refused_layer_keeps_no_memory(rig: Rig) -> None:
    """Not until garbage is collected either."""
    gc.disable()
    try:
        for _ in range(2 * NUM_REGIONS):
            peer = await rig.sharing()
            error = error_of(await peer.ask(layer=in_gpus_memory(peer.layer(1, 2))))
            assert isinstance(error, KvplaneError)
            peer.close()
            await rig.num_regions(0)
    finally:
        gc.enable()


async def test_what_is_only_written_has_been_read_when_it_is_answered(tmp_path: Path) -> None:
    kernels, runtime = late_kernels(emulated_kernels(), 0)
    runtime.early_share = 0.0
    async with rig_of(tmp_path, kernels) as rig:
        peer = await rig.sharing()
        layer = in_gpus_memory(peer.layer(0, 2))
        layer.ClearField("query")
        layer.ClearField("output")
        assert (await peer.ask(layer=layer)).HasField("output")
        assert runtime.num_given == 1 and runtime.num_waiting == 0
        peer.close()
        await rig.num_regions(0)


async def test_a_session_that_ends_takes_the_region_from_its_engine(
    rig: Rig, engine: GpuEngine
) -> None:
    """Nothing is freed that the engine has open; once it lets go, all is."""
    await rig.engine(engine)
    check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
    await engine.soon("hold")
    rig.server.executor.fence(rig.author.session(1), 1)
    await until(lambda: not rig.server.local.num_regions)
    await asyncio.sleep(1.2)  # two sweeps
    assert rig.server.local.num_device_regions == 1 == num_gpu_maps()
    held = await engine.soon("held_bytes")
    other = await rig.joined(2)
    assert (await other.share(rig.uuid)).HasField("joined")
    assert await engine.soon("held_bytes") == held  # and nothing of the other's
    assert await engine.soon("run_layer", 0, 100) is None  # over gRPC, where it is refused
    await engine.soon("let_go")
    assert await engine.soon("num_maps") == 0
    other.close()
    await rig.num_regions(0)


@another_process
async def test_an_engine_that_dies_takes_no_memory_with_it(rig: Rig, engine: GpuEngine) -> None:
    await rig.engine(engine)
    check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
    assert num_gpu_maps() == 1
    engine.kill()
    await rig.num_regions(0)
    peer = await rig.joined(2)
    assert (await peer.ask(plan=plan_of_two_tokens(rig.author, session_id=2))).HasField("started")
    assert (await peer.share(rig.uuid)).HasField("joined")
    peer.close()
    await rig.num_regions(0)


UNUSABLE = (
    ({"cuda_ipc_handle": b"x" * 64}, "cudaIpcOpenMemHandle"),
    ({"cuda_ipc_handle": b"x" * 63}, "64 bytes"),
    ({"cuda_ipc_handle": b""}, "64 bytes"),
    ({"size_bytes": 4 * REGION_BYTES}, "bytes, not"),
    ({"size_bytes": 2**41}, "not what was asked for"),
    ({"size_bytes": 0}, "above 0"),
    ({"cuda_device_uuid": OTHER_UUID}, "not what was asked for"),
)


@another_process
@pytest.mark.parametrize(("fields", "why"), UNUSABLE)
async def test_an_engine_that_cannot_open_the_region_gives_it_back(
    rig: Rig, engine: GpuEngine, fields: dict[str, Any], why: str
) -> None:
    """As in a container without the machine's IPC: the rest goes on through main memory."""
    await rig.engine(engine)
    await engine.soon("change_region", **fields)
    check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
    (line,) = await engine.soon("log")
    assert "no GPU memory with" in line and why in line
    await rig.num_regions(0)
    assert len(rig.connections) == 1
    check_outputs(await engine.soon("run_plan", rig.plan(2), NUM_LAYERS, 200), 2)
    await engine.soon("leave")


@another_process
async def test_a_data_plane_that_stops_frees_nothing_that_an_engine_has(
    tmp_path: Path, engine: GpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(device_regions, "_KEPT", kept)
    kernels = emulated_kernels()
    native = kernels._module  # type: ignore[attr-defined]
    early = native.num_early_frees()
    async with served(tmp_path, kernels, local_region_bytes=REGION_BYTES) as plane:
        rig = Rig(plane, native, [])
        await rig.engine(engine)
        check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
        await engine.soon("hold")
    assert len(kept) == 1 and native.num_early_frees() == early
    assert len(await engine.soon("held_bytes")) == 64
    await engine.soon("let_go")
    engine.kill()
    kept.clear()
    assert native.num_early_frees() == early


@another_process
async def test_a_gpu_that_fails_in_a_layer_is_not_answered_with_an_output(
    tmp_path: Path, engine: GpuEngine
) -> None:
    kernels, runtime = late_kernels(emulated_kernels(), 0)
    runtime.early_share = 0.0
    async with rig_of(tmp_path, kernels) as rig:
        await rig.engine(engine)
        check_outputs(await engine.soon("run_plan", rig.plan(), NUM_LAYERS, 100), 1)
        await rig.server._worker.run(lambda: setattr(runtime, "is_lost", True))
        with pytest.raises(InternalError):
            await engine.soon("run_plan", rig.plan(2), NUM_LAYERS, 200)
        async with asyncio.timeout(10):
            await rig.server.lost.wait()
        await rig.server._worker.run(lambda: setattr(runtime, "is_lost", False))
        await engine.soon("leave")
        await rig.num_regions(0)


async def test_a_gpu_that_fails_in_a_layer_of_a_finished_plan_gives_no_output(
    tmp_path: Path,
) -> None:
    """Layers may be sent again. No plan runs that could say that it failed."""
    kernels, runtime = late_kernels(emulated_kernels(), 0)
    runtime.early_share = 0.0
    async with rig_of(tmp_path, kernels) as rig:
        peer = await rig.sharing()
        for i in range(NUM_LAYERS):
            layer = in_gpus_memory(peer.layer(i, 2))
            answer = await peer.ask(layer=layer)
        assert answer.output.HasField("receipt")
        wait = runtime.wait

        def wait_once(stream: int) -> None:
            runtime.wait = wait  # type: ignore[method-assign]
            raise RuntimeError("CUDA error: unspecified launch failure")

        await rig.server._worker.run(lambda: setattr(runtime, "wait", wait_once))
        assert isinstance(error_of(await peer.ask(layer=layer)), InternalError)
        peer.close()
        await rig.num_regions(0)


async def test_a_layer_is_bound_for_as_long_as_the_region_of_its_tensors(rig: Rig) -> None:
    peer = await rig.sharing()
    in_main_memory = peer.layer(1, 2)
    assert not (await peer.bind(in_gpus_memory(peer.layer(0, 2)))).HasField("error")
    assert not (await peer.bind(in_main_memory)).HasField("error")
    assert (await peer.ask_bound(0)).output.layer == 0
    os.close(peer.file)  # which lets the region go, and not the connection
    peer.file = -1
    await rig.num_regions(0)
    assert error_of(await peer.ask_bound(0)).field == "binding"
    assert (await peer.ask_bound(1)).output.HasField("receipt")
    peer.close()
