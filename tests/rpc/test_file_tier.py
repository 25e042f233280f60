"""Prefixes that were used twice are in files, and outlive the process that computed them."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import torch

from control_plane.pools.shards import PoolShards
from control_plane.server.server import ControlPlaneServer
from data_plane.files.disk import Disk
from data_plane.server.file_tier import FileWriter
from data_plane.server.server import DataPlaneServer
from kvplane import ControlClient, LayerGroup, Layout, ops
from kvplane.errors import InvalidRequestError, PlanOutOfOrderError
from kvplane.execution.execution import shards_of
from kvplane.prefixes import ForgetScope, PrefixLoader
from kvplane.wire.error_codec import from_rpc_error
from kvplane.wire.v1 import execution_pb2 as pb
from tests.helpers.planes_in_process import (
    LAYOUT,
    NUM_BLOCKS,
    PROMPT,
    SEQUENCE,
    Side,
    control_plane,
    data_plane,
    settings_of,
    side,
    write_layout,
)
from tests.helpers.planning.control_wire import stub_of
from tests.helpers.served import ask
from tests.helpers.tier_files import in_order
from tests.helpers.waiting import until

POOL = "files"
PATIENCE_S = 30.0
NUM_FULL = NUM_BLOCKS - 1
WINDOWED = Layout(
    "m",
    8,
    "float32",
    "float32",
    (LayerGroup("window", (0, 1, 2), 1, 8, sliding_window_tokens=16),),
)


class Machine:
    """A control plane, a folder of files, and one data plane at a time."""

    def __init__(self, folder: Path, server: ControlPlaneServer, control: ControlClient) -> None:
        self.folder = folder
        self.server = server
        self.control = control
        self.outputs: list[bytes] = []
        """What the prompt's first computation gave, of a machine that is filled."""
        self._layout = write_layout(folder)

    @asynccontextmanager
    async def plane(self, **settings: Any) -> AsyncIterator[Side]:
        files = {"file_tier_dir": self.folder / "files", "file_tier_bytes": 2**20, **settings}
        async with AsyncExitStack() as stack:
            plane = await stack.enter_async_context(
                data_plane(**settings_of(POOL, self.server.address, self._layout, **files))
            )
            if plane.files is not None:
                await asyncio.to_thread(plane.files.files.scanned.wait)
            yield await stack.enter_async_context(side(self.control, plane, POOL))
            if plane.files is not None:
                plane.files.files.check_integrity()

    async def load(self, here: Side) -> tuple[int, int]:
        """Cached tokens of the prompt then, and how many of them came from files."""
        async with (
            await self.control.open_session(POOL, here.session.layout) as session,
            PrefixLoader(self.control, session, timeout_s=PATIENCE_S) as loader,
        ):
            loaded = await loader.load(PROMPT)
        return loaded.num_cached_tokens, loaded.num_loaded_tokens


@asynccontextmanager
async def machine(folder: Path) -> AsyncIterator[Machine]:
    async with (
        control_plane() as server,
        ControlClient(server.address, timeout_s=PATIENCE_S) as control,
    ):
        yield Machine(folder, server, control)


@pytest.fixture
async def filled(tmp_path: Path) -> AsyncIterator[Machine]:
    """A machine with all full blocks of the prompt in files, and no data plane."""
    async with machine(tmp_path) as peers:
        async with peers.plane() as first:
            peers.outputs = await use_twice(first)
            await until(lambda: num_files(first.plane) == NUM_FULL)
        yield peers


def num_files(plane: DataPlaneServer) -> int:
    assert plane.files is not None
    return plane.files.files.num_files


async def find_files(here: Side) -> int:
    """Return the number of blocks of the prompt that have files."""
    (shard,) = shards_of(here.execution)
    return await shard.find_files(ops.pack_tokens(PROMPT), None)


async def finish(here: Side, sequence_id: int) -> None:
    """Free a sequence, and run the plan that drops its table."""
    plan = (await here.session.run(ops.free(sequence_id))).plan
    assert plan is not None
    await here.execution.start(plan)
    await here.session.submit_receipts()


async def use_twice(here: Side) -> list[bytes]:
    """What the prompt's first computation gave."""
    outputs = await here.run(ops.admit(SEQUENCE, PROMPT), range(len(PROMPT)))
    await here.run(ops.admit(2, PROMPT), range(8 * NUM_FULL, len(PROMPT)))
    return outputs


def rows_from(outputs: list[bytes], first: int) -> list[bytes]:
    """Return the outputs without the first tokens of the prompt."""
    row_bytes = len(outputs[0]) // len(PROMPT)
    return [output[row_bytes * first :] for output in outputs]


async def test_a_prefix_outlives_its_process_bit_for_bit(filled: Machine) -> None:
    async with filled.plane() as second:
        assert await filled.load(second) == (8 * NUM_FULL, 8 * NUM_FULL)
        assert await second.num_cached() == 8 * NUM_FULL
        rest = range(8 * NUM_FULL, len(PROMPT))
        after = await second.run(ops.admit(SEQUENCE, PROMPT), rest)
        assert after == rows_from(filled.outputs, rest.start)


async def test_only_what_is_used_twice_is_written(tmp_path: Path) -> None:
    async with machine(tmp_path) as peers, peers.plane() as here:
        once = [token + 1000 for token in PROMPT]
        await here.run(ops.admit(7, once), range(len(once)))
        await use_twice(here)
        await until(lambda: num_files(here.plane) == NUM_FULL)
        await here.run(ops.admit(3, PROMPT), range(8 * NUM_FULL, len(PROMPT)))
        await here.run(ops.admit(8, once[:17]), [16])  # two of its blocks a second time
        await until(lambda: num_files(here.plane) == NUM_FULL + 2)
        assert here.plane.files is not None
        assert here.plane.files.counts.num_blocks["written"] == NUM_FULL + 2
        here.plane.executor.check_integrity()


async def test_a_file_that_is_wrong_is_computed_again(filled: Machine, tmp_path: Path) -> None:
    bad = 1
    path = in_order(tmp_path)[bad]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    async with filled.plane() as second:
        assert second.plane.files is not None
        assert await filled.load(second) == (8 * bad, 8 * bad)
        assert second.plane.files.counts.num_misses == {"DAMAGED": 1}
        rest = range(8 * bad, len(PROMPT))
        after = await second.run(ops.admit(SEQUENCE, PROMPT), rest)
        assert after == rows_from(filled.outputs, rest.start)
        assert num_files(second.plane) == bad
        usage = (await filled.control.get_pool(POOL)).usage[0]
        assert usage.num_held_blocks == NUM_BLOCKS


async def test_what_was_used_again_in_the_host_tier_is_written(tmp_path: Path) -> None:
    async with machine(tmp_path) as peers, peers.plane(num_device_blocks=6) as here:
        await here.run(ops.admit(SEQUENCE, PROMPT), range(len(PROMPT)))
        await finish(here, SEQUENCE)
        other = [token + 1000 for token in range(48)]
        await here.run(ops.admit(2, other), range(48))  # needs all device blocks
        await finish(here, 2)
        assert num_files(here.plane) == 0
        counters = await peers.control.get_counters(POOL)
        assert counters["demoted_blocks_total"] >= NUM_FULL
        await here.run(ops.admit(3, PROMPT), range(8 * NUM_FULL, len(PROMPT)))
        counters = await peers.control.get_counters(POOL)
        assert counters['hit_tokens_total{tier="host"}'] == 8 * NUM_FULL
        await until(lambda: num_files(here.plane) == NUM_FULL)


async def test_a_full_disk_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Disk, fd: int) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    async with machine(tmp_path) as peers, peers.plane() as here:
        assert here.plane.files is not None
        errors = here.plane.files.counts.num_write_errors
        with monkeypatch.context() as patch:
            patch.setattr(Disk, "sync", full)
            before = await use_twice(here)
            await until(lambda: errors["ENOSPC"] == 1)
        assert not [*tmp_path.rglob("*.tmp")]
        rest = range(8 * NUM_FULL, len(PROMPT))
        again = await here.run(ops.admit(3, PROMPT), rest)
        assert again == rows_from(before, rest.start)
        here.plane.files._writer._paused_until_s = 0.0
        await here.run(ops.admit(4, PROMPT), rest)
        await until(lambda: num_files(here.plane) == NUM_FULL)


async def test_memory_that_is_short_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []

    def short(self: FileWriter, group: int, block: int, generation: int) -> bytes:
        tries.append(block)
        raise torch.OutOfMemoryError("no memory")

    async with machine(tmp_path) as peers, peers.plane() as here:
        assert here.plane.files is not None
        writer = here.plane.files._writer
        with monkeypatch.context() as patch:
            patch.setattr(FileWriter, "_read", short)
            await use_twice(here)
            await until(lambda: len(tries) == 1 and writer._paused_until_s > 0)
        writer._paused_until_s = 0.0
        await here.run(ops.admit(3, PROMPT), range(8 * NUM_FULL, len(PROMPT)))
        await until(lambda: num_files(here.plane) == NUM_FULL)


async def test_what_is_forgotten_once_it_is_read_has_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FileWriter._read
    reads: list[int] = []

    def forgotten(self: FileWriter, group: int, block: int, generation: int) -> bytes | None:
        data = original(self, group, block, generation)
        if not reads:
            self._files.forget(everything=True)
        reads.append(block)
        return data

    monkeypatch.setattr(FileWriter, "_read", forgotten)
    async with machine(tmp_path) as peers, peers.plane() as here:
        await use_twice(here)
        await until(lambda: bool(reads))
        assert here.plane.files is not None
        await asyncio.to_thread(here.plane.files._writer.stop)
        assert num_files(here.plane) == 0


@pytest.mark.parametrize("what", [PROMPT[:16], ForgetScope.TENANT], ids=["prefix", "tenant"])
async def test_what_is_forgotten_is_in_no_file(
    filled: Machine, tmp_path: Path, what: list[int] | ForgetScope
) -> None:
    async with filled.plane() as second:  # where nothing of it is in memory
        await filled.control.forget_prefixes(POOL, what)
        left = 0 if isinstance(what, ForgetScope) else 1
        await until(lambda: num_files(second.plane) == left)
        assert await filled.load(second) == (8 * left, 8 * left)
        (pool,) = filled.server.core._pools.values()
        await until(lambda: not pool.shards.file_forgets.of_shard(0))
    assert len([*tmp_path.rglob("*.block")]) == left


async def test_a_namespace_finds_its_own_files_alone(filled: Machine) -> None:
    async with filled.plane() as second:
        layout = second.session.layout
        async with (
            await filled.control.open_session(POOL, layout, namespace="other") as session,
            PrefixLoader(filled.control, session) as loader,
        ):
            assert (await loader.load(PROMPT)).num_cached_tokens == 0


async def test_files_are_found_by_a_later_control_plane_too(tmp_path: Path) -> None:
    async with machine(tmp_path) as peers, peers.plane() as here:
        await use_twice(here)
        await until(lambda: num_files(here.plane) == NUM_FULL)
    async with machine(tmp_path) as peers, peers.plane() as later:
        assert await peers.load(later) == (8 * NUM_FULL, 8 * NUM_FULL)


async def test_what_is_cached_is_not_loaded_and_there_may_be_no_files(tmp_path: Path) -> None:
    async with machine(tmp_path) as peers:
        async with peers.plane() as here:
            await use_twice(here)
            await until(lambda: num_files(here.plane) == NUM_FULL)
            assert await peers.load(here) == (8 * NUM_FULL, 0)
        async with peers.plane(file_tier_dir=None, file_tier_bytes=0) as without:
            assert await peers.load(without) == (0, 0)
            with pytest.raises(InvalidRequestError, match="--file-tier-dir"):
                await find_files(without)


async def test_without_a_plan_blocks_are_counted_and_none_is_written(filled: Machine) -> None:
    async with filled.plane() as second:
        grant, executor = second.session.grant, second.plane.executor
        plan = (await second.session.run(ops.admit(9, PROMPT[: 8 * NUM_FULL]))).plan
        assert plan is not None
        await second.execution.start(plan)
        tier = executor.pools.device_tier.view(torch.uint8)  # it may hold NaNs
        before = tier.clone()
        request = pb.LoadFileBlocksRequest(grant=grant, token_ids=ops.pack_tokens(PROMPT))
        (shard,) = shards_of(second.execution)
        counted = await shard._blocks.LoadFileBlocks(request)
        assert counted == pb.LoadFileBlocksResponse(num_blocks=NUM_FULL)
        request.sequence_id = 9
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await shard._blocks.LoadFileBlocks(request)
        assert from_rpc_error(caught.value).field == "sequence_id"
        assert torch.equal(tier, before)
        assert await second.num_cached() == 0


async def test_a_load_that_is_aborted_publishes_nothing(filled: Machine) -> None:
    async with filled.plane() as second:
        session, tokens = second.session, PROMPT[: 8 * NUM_FULL]
        plan = (await session.run(ops.admit(9, tokens))).plan
        assert plan is not None
        await session.abort_plans(session.last_number)
        resynced = await session.abort_plans(whole_tables=True)
        await second.execution.start(resynced.plan)
        with pytest.raises(PlanOutOfOrderError):
            (shard,) = shards_of(second.execution)
            stub = stub_of(shard._connection.channel)
            token_ids = ops.pack_tokens(tokens)
            call = {"grant": session.grant, "plan": plan, "sequence_id": 9, "token_ids": token_ids}
            await ask(stub, "LoadFileBlocks", **call)
        assert await second.num_cached() == 0


# Each starts three planes; the first call is that which leaves the most behind.
CALLS = [0, *(pytest.param(i, marks=pytest.mark.nightly) for i in (1, 2, 3))]


@pytest.mark.parametrize("call", CALLS, ids=["admit", "receipts", "free", "receipt_of_free"])
async def test_a_load_that_is_cancelled_leaves_nothing_behind(tmp_path: Path, call: int) -> None:
    other = [token + 1000 for token in PROMPT]
    async with machine(tmp_path) as peers:
        async with peers.plane() as first:
            await use_twice(first)
            await first.run(ops.admit(3, other), range(len(other)))
            await first.run(ops.admit(4, other), range(8 * NUM_FULL, len(other)))
            await until(lambda: num_files(first.plane) == 2 * NUM_FULL)
        async with (
            peers.plane() as second,
            await peers.control.open_session(POOL, second.session.layout) as session,
            PrefixLoader(peers.control, session, timeout_s=PATIENCE_S) as loader,
        ):
            original, num_calls = session._call, 0

            async def cancelled(*arguments: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                if num_calls == call + 1:
                    loading.cancel()  # when the call has been numbered, as it first waits
                return await original(*arguments)

            session._call = cancelled  # type: ignore[method-assign]
            loading = asyncio.create_task(loader.load(PROMPT))
            with pytest.raises(asyncio.CancelledError):
                await loading
            assert num_calls > call
            counters = await peers.control.get_counters(POOL)
            assert counters['sequences{state="device"}'] == 0
            assert counters['blocks{state="held",tier="device"}'] == 0
            for prompt in (other, PROMPT):
                assert (await loader.load(prompt)).num_cached_tokens == 8 * NUM_FULL
            counters = await peers.control.get_counters(POOL)
            assert counters['sequences{state="device"}'] == 0
            assert counters['blocks{state="retired",tier="device"}'] == 0


@pytest.mark.parametrize(
    ("first", "num", "field"), [(0, 8, "token_ids"), (0, 25, "token_ids"), (1, 24, "sequence_id")]
)
async def test_a_load_that_fits_no_span_is_refused(
    tmp_path: Path, first: int, num: int, field: str
) -> None:
    async with machine(tmp_path) as peers, peers.plane() as here:
        session = here.session
        plan = (await session.run(ops.admit(9, PROMPT[:24]))).plan
        assert plan is not None
        await here.execution.start(plan)
        with pytest.raises(InvalidRequestError) as caught:
            await here.execution.load_files(9 + first, PROMPT[:num])
        assert field in caught.value.field


async def test_a_grant_without_a_namespace_finds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier control plane does not say it: namespaces must not be taken for each other."""
    monkeypatch.setattr(PoolShards, "file_tiers", property(lambda self: []))
    async with machine(tmp_path) as peers, peers.plane() as here:
        with pytest.raises(InvalidRequestError) as caught:
            await find_files(here)
        assert caught.value.field == "grant.namespace"


async def test_settings_that_cannot_be_are_refused_by_name(tmp_path: Path) -> None:
    settings: list[tuple[Layout, dict[str, Any], str]] = [
        (LAYOUT, {"file_tier_bytes": 100}, "file_tier_bytes"),
        (LAYOUT, {"file_tier_dir": None}, "file_tier_dir"),
        (WINDOWED, {}, "file_tier_dir"),
    ]
    async with machine(tmp_path) as peers:
        for layout, changed, field in settings:
            write_layout(tmp_path, layout)
            with pytest.raises(InvalidRequestError) as caught:
                async with peers.plane(**changed):
                    pytest.fail(field)
            assert caught.value.field == field
