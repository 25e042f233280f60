"""Pools that keep checkpoints of states beside keys and values: a prompt is found up to its deepest
checkpoint, in memory or in files, which is read as the state of exactly its prefix, or not at all.

A state here is a function of all tokens of its prefix, so another one is seen to be wrong.
"""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane.files.names import block_names, checkpoint_name, scope_of
from kvplane import AttentionOptions, ControlClient, Execution, Session, Tensor, ops
from kvplane.errors import (
    BlockNotWrittenError,
    InvalidRequestError,
    SequenceNotFoundError,
    UnavailableError,
)
from kvplane.execution.execution import shards_of
from kvplane.layout import LayerGroup
from kvplane.prefixes import PrefixLoader
from kvplane.results import StepResult, TierUsage
from kvplane.runtime.backend import RemoteBackend
from kvplane.runtime.states import StateShards
from kvplane.sync.loop_thread import LoopThread
from kvplane.wire.v1 import types_pb2
from tests.helpers.refusals import refused
from tests.helpers.sharded_pool import LAYOUT as PLAIN
from tests.helpers.sharded_pool import POOL, Ranges, ShardedPool, by_heads
from tests.helpers.waiting import until

SIZE = PLAIN.block_size_tokens
FULL = LayerGroup("full", (0, 2), 4, 8)
STATES = LayerGroup("states", (1, 2, 3), 4, 0, cache_kind="state", page_bytes=512)
LAYOUT = replace(PLAIN, groups=(FULL, STATES))
BY_BOTH: list[Ranges] = [
    {"num_shards": 4, "shard_index": i, "layers": layers, "kv_heads": heads}
    for i, (layers, heads) in enumerate(
        (layers, heads) for layers in ("0:2", "2:2") for heads in ("0:2", "2:2")
    )
]
DIVISIONS = {"one": by_heads(1), "heads": by_heads(2), "both": BY_BOTH}
PROMPT = [token % 251 for token in range(5 * SIZE + 3)]
OTHER = [token + 1 for token in PROMPT]


def state_of(tokens: Sequence[int]) -> torch.Tensor:
    """Return the states of all layers after ``tokens``, [num_state_layers, 1, page_bytes]."""
    rows = []
    for layer in STATES.layers:
        seed = hashlib.shake_256(f"{layer}:{[*tokens]}".encode())
        rows.append(torch.frombuffer(bytearray(seed.digest(STATES.page_bytes)), dtype=torch.uint8))
    return torch.stack(rows)[:, None]


class Engine:
    """One session, which keeps states in its own memory and checkpoints in the pool."""

    def __init__(self, session: Session, execution: Execution) -> None:
        self.session, self.execution = session, execution
        parts = [info.shard for info in session.shards]
        self.states = StateShards(shards_of(execution), parts, session.layout)
        self.tokens: dict[int, list[int]] = {}

    async def step(self, *operations: ops.Operation) -> StepResult:
        """Make a step, all of whose operations are done."""
        result = await self.session.step(operations)
        result.raise_for_status()
        return result

    async def run_layers(self) -> None:
        dtype = LAYOUT.dtype
        for layer in self.execution.layers:
            zeros = Tensor.zeros(dtype, self.execution.key_shape(layer))
            await self.execution.layer(layer, zeros, zeros, zeros)

    async def keep(self, checkpoints: Mapping[int, int]) -> None:
        """Write checkpoints of the plan that was started: by sequence, where each is."""
        ids = [*checkpoints]
        entries = [position // SIZE - 1 for position in checkpoints.values()]
        pages = [state_of(self.tokens[i][:position]) for i, position in checkpoints.items()]
        await self.states.write(ids, entries, torch.cat(pages, dim=1))

    async def run(
        self, *operations: ops.Operation, checkpoints: Mapping[int, int] | None = None
    ) -> StepResult:
        """Make a step and run its plan to its receipt, with these checkpoints."""
        result = await self.step(*operations)
        await self.execution.start(result.plan)
        await self.run_layers()
        if checkpoints:
            assert not self.execution.has_run, "a receipt came before the checkpoint"
            await self.keep(checkpoints)
        assert self.execution.has_run
        await self.session.submit_receipts()
        return result

    async def admit(self, i: int, tokens: Sequence[int], checkpoint: int = 0) -> int:
        """Admit and compute a prompt; return how many of its tokens were found."""
        self.tokens[i] = [*tokens]
        operation = ops.admit(i, tokens, checkpoint_position=checkpoint)
        result = await self.step(operation)
        (admitted,) = [each.admit for each in result.results]
        assert admitted is not None
        await self.execution.start(result.plan)
        if num_cached := admitted.num_cached_tokens:
            assert torch.equal(await self.state(i, num_cached), state_of(tokens[:num_cached]))
        await self.run_layers()
        if checkpoint > num_cached:
            await self.keep({i: checkpoint})
        assert self.execution.has_run
        await self.session.submit_receipts()
        return num_cached

    async def state(self, i: int, position: int) -> torch.Tensor:
        return await self.states.read([i], [position // SIZE - 1])

    async def usage(self) -> Sequence[TierUsage]:
        """Return how the pool's blocks on the device are used, by group."""
        used = (await self.session.step([])).usage
        return [each for each in used if each.tier == types_pb2.TIER_DEVICE]

    async def checkpoint_of(self, i: int) -> int:
        (state,) = await self.session.list_sequences([i])
        return state.checkpoint_position


@asynccontextmanager
async def engine_of(pool: ShardedPool) -> AsyncIterator[Engine]:
    async with (
        ControlClient(pool.address) as control,
        control.open_session(pool.pool_id) as session,
        session.open_execution() as execution,
    ):
        yield Engine(session, execution)


@pytest.fixture(params=DIVISIONS)
async def engine(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Engine]:
    shards = DIVISIONS[request.param]
    async with ShardedPool(tmp_path, shards, LAYOUT) as pool, engine_of(pool) as made:
        yield made


@pytest.fixture
async def alone(tmp_path: Path) -> AsyncIterator[Engine]:
    async with ShardedPool(tmp_path, by_heads(1), LAYOUT) as pool, engine_of(pool) as made:
        yield made


@asynccontextmanager
async def pool_with_files(folder: Path, **settings: Any) -> AsyncIterator[ShardedPool]:
    """A pool of two shards, which have looked at the files that an earlier one left."""
    data = {"file_tier_dir": folder / "files", "file_tier_bytes": 2**20, **settings}
    async with ShardedPool(folder, by_heads(2), LAYOUT, data=data) as pool:
        tiers = [plane.files.files for plane in pool.planes.values() if plane.files]
        for tier in tiers:
            await asyncio.to_thread(tier.scanned.wait)
        yield pool
        for tier in tiers:
            tier.check_integrity()


def nums_of_files(pool: ShardedPool) -> list[int]:
    return [plane.files.files.num_files for plane in pool.planes.values() if plane.files]


async def test_a_prompt_is_found_up_to_its_deepest_checkpoint(engine: Engine) -> None:
    assert engine.execution.layers == [0, 2]
    assert await engine.admit(1, PROMPT, 3 * SIZE) == 0
    assert await engine.admit(2, PROMPT) == 3 * SIZE
    assert await engine.admit(3, [*PROMPT[: 3 * SIZE], 9]) == 3 * SIZE
    # The last token is computed again, from a state before it.
    assert await engine.admit(4, PROMPT[: 3 * SIZE]) == 0
    assert await engine.admit(5, [*PROMPT[: 2 * SIZE], 9, *PROMPT[2 * SIZE :]]) == 0
    assert await engine.admit(6, PROMPT, 5 * SIZE) == 3 * SIZE
    assert await engine.admit(7, PROMPT) == 5 * SIZE
    assert await engine.admit(8, PROMPT[: 4 * SIZE]) == 3 * SIZE


async def test_the_receipt_waits_for_every_checkpoint(engine: Engine) -> None:
    engine.tokens = {1: PROMPT, 2: OTHER}
    await engine.run(
        ops.admit(1, PROMPT, checkpoint_position=SIZE),
        ops.admit(2, OTHER, checkpoint_position=2 * SIZE),
        checkpoints={1: SIZE, 2: 2 * SIZE},
    )
    # Written before the layers, one of them at a time.
    tokens = [PROMPT + [7] * SIZE, OTHER + [7] * SIZE]
    engine.tokens = dict(enumerate(tokens, 1))
    result = await engine.step(
        ops.append(
            [1, 2], [7] * 2 * SIZE, SIZE, num_tokens=SIZE, first_positions=len(PROMPT),
            checkpoint_positions=6 * SIZE,
        )
    )  # fmt: skip
    await engine.execution.start(result.plan)
    with pytest.raises(BlockNotWrittenError):
        await engine.state(1, 6 * SIZE)
    await engine.keep({1: 6 * SIZE})
    await engine.run_layers()
    assert not engine.execution.has_run
    await engine.keep({2: 6 * SIZE})
    assert engine.execution.has_run
    for i in (1, 2):
        assert torch.equal(await engine.state(i, 6 * SIZE), state_of(tokens[i - 1][: 6 * SIZE]))


async def test_an_abort_goes_back_to_the_last_written_checkpoint(alone: Engine) -> None:
    await alone.admit(1, PROMPT, 2 * SIZE)
    alone.tokens[1] = [*PROMPT, *[7] * SIZE]
    grow = ops.append(
        1, [7] * SIZE, SIZE, first_positions=len(PROMPT), checkpoint_positions=6 * SIZE
    )
    result = await alone.step(grow)
    await alone.execution.start(result.plan)
    await alone.keep({1: 6 * SIZE})  # its plan never has a receipt
    assert await alone.checkpoint_of(1) == 2 * SIZE
    await alone.session.abort_plans()
    assert await alone.checkpoint_of(1) == 2 * SIZE
    alone.tokens[1] = [*PROMPT[: 2 * SIZE], *[8] * 4 * SIZE]
    await alone.run(
        ops.truncate(1, 2 * SIZE),
        ops.append(
            1, [8] * 4 * SIZE, 4 * SIZE, first_positions=2 * SIZE, checkpoint_positions=6 * SIZE
        ),
        checkpoints={1: 6 * SIZE},
    )
    assert torch.equal(await alone.state(1, 6 * SIZE), state_of(alone.tokens[1][: 6 * SIZE]))
    assert await alone.admit(2, [*PROMPT, *[7] * SIZE, 7]) == 2 * SIZE
    assert await alone.admit(3, [*alone.tokens[1], 7]) == 6 * SIZE


async def test_a_deeper_checkpoint_takes_the_place_of_the_one_before(alone: Engine) -> None:
    await alone.admit(1, PROMPT, 2 * SIZE)
    alone.tokens[1] = [*PROMPT, *[7] * SIZE]
    await alone.run(
        ops.append(1, [7] * SIZE, SIZE, first_positions=len(PROMPT), checkpoint_positions=6 * SIZE),
        checkpoints={1: 6 * SIZE},
    )
    assert await alone.checkpoint_of(1) == 6 * SIZE
    with refused(InvalidRequestError, "operations[0].truncate.num_tokens[0]"):
        await alone.step(ops.truncate(1, SIZE))
    await alone.run(ops.append(1, [7], 1, first_positions=len(alone.tokens[1])))
    with refused(InvalidRequestError, "entries[0]", match="no checkpoint"):
        await alone.state(1, 2 * SIZE)  # it is cached, and no longer in the table
    with refused(InvalidRequestError, "operations[0].truncate.num_tokens[0]"):
        await alone.step(ops.truncate(1, 6 * SIZE - 1))
    assert await alone.admit(2, PROMPT) == 2 * SIZE


async def test_forks_share_a_checkpoint_and_then_have_their_own(alone: Engine) -> None:
    await alone.admit(1, PROMPT, 3 * SIZE)
    result = await alone.step(ops.fork(1, 2))
    await alone.execution.start(result.plan)
    await alone.session.submit_receipts()
    alone.tokens = {1: [*PROMPT, *[7] * SIZE], 2: [*PROMPT, *[8] * SIZE]}
    await alone.run(
        ops.append(
            [1, 2], [*[7] * SIZE, *[8] * SIZE], SIZE, num_tokens=SIZE,
            first_positions=len(PROMPT), checkpoint_positions=[6 * SIZE, 6 * SIZE],
        ),
        checkpoints={1: 6 * SIZE, 2: 6 * SIZE},
    )  # fmt: skip
    for i in (1, 2):
        assert torch.equal(await alone.state(i, 6 * SIZE), state_of(alone.tokens[i][: 6 * SIZE]))
        assert torch.equal(await alone.state(i, 3 * SIZE), state_of(PROMPT[: 3 * SIZE]))


async def test_evicted_checkpoints_come_back_from_the_host_tier(tmp_path: Path) -> None:
    data = {"num_device_blocks": 64, "num_host_blocks": 64}
    async with pool_with_files(tmp_path, **data) as pool, engine_of(pool) as engine:
        for i in range(1, 20):  # the pool has 16 checkpoints
            await engine.admit(i, [i] * (SIZE + 1), SIZE)
            await engine.run(ops.free(i))
        assert await engine.admit(1, [1] * (SIZE + 1)) == SIZE
        await until(lambda: nums_of_files(pool) == [2, 2])  # of the block and its checkpoint


async def test_checkpoints_out_of_place_are_refused(alone: Engine) -> None:
    await alone.admit(1, PROMPT)
    at = "operations[0].append.checkpoint_positions[0]"
    for position in (-SIZE, SIZE, 5 * SIZE, 5 * SIZE + 3, 6 * SIZE - 1, 7 * SIZE):
        grow = ops.append(
            1, [7] * SIZE, SIZE, first_positions=len(PROMPT), checkpoint_positions=position
        )
        with refused(InvalidRequestError, at):
            await alone.step(grow)
    at = "operations[0].admit.checkpoint_position"
    for position in (-SIZE, SIZE - 1, 6 * SIZE):
        with refused(InvalidRequestError, at):
            await alone.step(ops.admit(2, PROMPT, checkpoint_position=position))
    with refused(InvalidRequestError, "operations[0].swap.tier"):
        await alone.step(ops.swap(1, "host"))
    result = await alone.step(
        ops.append(1, [7] * SIZE, SIZE, first_positions=len(PROMPT), checkpoint_positions=6 * SIZE)
    )
    await alone.execution.start(result.plan)
    alone.tokens = {1: PROMPT, 2: PROMPT}
    for checkpoints in ({1: 5 * SIZE}, {2: 6 * SIZE}):
        with refused(InvalidRequestError, "entries[0]", match="keeps no checkpoint"):
            await alone.keep(checkpoints)
    with refused(InvalidRequestError, "states"):
        await alone.states.write([1], [5], state_of(PROMPT)[:, :, :-1])
    with pytest.raises(SequenceNotFoundError):
        await alone.state(2, SIZE)


@asynccontextmanager
async def engine_after_restart(pool: ShardedPool) -> AsyncIterator[Engine]:
    """Open a session of the pool's next control plane, once it has all blocks."""
    await asyncio.sleep(0.2)  # until they are announced
    await pool.restart_control()
    for _ in range(100):
        try:
            async with ControlClient(pool.address) as control:
                await control.wait_ready(pool.pool_id, 10)
            break
        except UnavailableError:
            await asyncio.sleep(0.1)
    async with engine_of(pool) as engine:
        yield engine


@pytest.mark.parametrize("division", DIVISIONS)
async def test_a_later_control_plane_finds_the_same(tmp_path: Path, division: str) -> None:
    async with ShardedPool(tmp_path, DIVISIONS[division], LAYOUT) as pool:
        async with engine_of(pool) as engine:
            await engine.admit(1, PROMPT, 3 * SIZE)
            await engine.admit(2, OTHER, SIZE)
            await engine.admit(3, PROMPT, 5 * SIZE)
        for _ in range(2):  # and the one after it
            async with engine_after_restart(pool) as engine:
                assert await engine.admit(1, PROMPT) == 5 * SIZE
                assert await engine.admit(2, OTHER) == SIZE
                assert await engine.admit(3, [*PROMPT[: 4 * SIZE], 9]) == 3 * SIZE
                # Computed again, as no checkpoint is of its prefix.
                assert await engine.admit(4, [9, *PROMPT[1:]]) == 0


async def test_a_later_control_plane_finds_what_was_computed_again(tmp_path: Path) -> None:
    """Blocks of keys and values were evicted, and their checkpoint was not."""
    data = {"num_device_blocks": 64, "num_host_blocks": 0}
    async with ShardedPool(tmp_path, by_heads(1), LAYOUT, data=data) as pool:
        async with engine_of(pool) as engine:
            await engine.admit(1, PROMPT, 5 * SIZE)
            await engine.run(ops.free(1))
            num_blocks = {usage.group: usage.num_blocks for usage in (await engine.usage())}
            for i in range(num_blocks[0]):
                await engine.admit(2, [i] * SIZE)
                await engine.run(ops.free(2))
            assert await engine.admit(3, PROMPT) == 0
            assert await engine.admit(4, PROMPT) == 5 * SIZE
        async with engine_after_restart(pool) as engine:
            assert await engine.admit(1, PROMPT) == 5 * SIZE


async def test_a_retained_prefix_keeps_its_checkpoint(tmp_path: Path) -> None:
    data = {"num_device_blocks": 64, "num_host_blocks": 0}
    async with (
        ShardedPool(tmp_path, by_heads(1), LAYOUT, data=data) as pool,
        engine_of(pool) as engine,
        ControlClient(pool.address) as control,
    ):
        await engine.admit(1, PROMPT, 5 * SIZE)
        await engine.run(ops.free(1))
        retained = await control.retain_prefix(pool.pool_id, PROMPT, priority=1, time_to_live_s=60)
        assert retained == 5
        for i in range(100, 120):  # the pool has 16 checkpoints
            await engine.admit(2, [i] * (SIZE + 1), SIZE)
            await engine.run(ops.free(2))
        assert await engine.admit(2, [100] * (SIZE + 1)) == 0
        assert await engine.admit(3, PROMPT) == 5 * SIZE


async def test_without_a_block_no_checkpoint_is_kept(tmp_path: Path) -> None:
    """The others of the step are, and so is the next one when there is room."""
    data = {"num_device_blocks": 64, "num_host_blocks": 0}
    async with (
        ShardedPool(tmp_path, by_heads(1), LAYOUT, data=data) as pool,
        engine_of(pool) as engine,
    ):
        num = {usage.group: usage.num_blocks for usage in (await engine.usage())}[1]
        prompts = {i: [i] * (SIZE + 1) for i in range(1, num + 3)}
        engine.tokens = dict(prompts)
        admits = [ops.admit(i, tokens, checkpoint_position=SIZE) for i, tokens in prompts.items()]
        result = await engine.run(*admits, checkpoints=dict.fromkeys([*prompts][:num], SIZE))
        kept = [[*each.checkpoint_positions] for each in result.results]
        assert kept == [[SIZE]] * num + [[0]] * 2
        for i in prompts:
            engine.tokens[i] = [i] * (2 * SIZE + 1)
        grow = ops.append(
            [1, num + 1], [1] * SIZE + [num + 1] * SIZE, SIZE, num_tokens=SIZE,
            first_positions=SIZE + 1, checkpoint_positions=2 * SIZE,
        )  # fmt: skip
        result = await engine.run(ops.free(num), grow, checkpoints={1: 2 * SIZE})
        assert [*result.results[1].checkpoint_positions] == [2 * SIZE, 0]
        assert torch.equal(await engine.state(1, 2 * SIZE), state_of(engine.tokens[1][: 2 * SIZE]))
        with pytest.raises(SequenceNotFoundError):  # it has no checkpoint
            await engine.state(num + 1, 2 * SIZE)


async def test_a_backend_reads_and_writes_checkpoints(tmp_path: Path) -> None:
    async with (
        ShardedPool(tmp_path, by_heads(2), LAYOUT) as pool,
        ControlClient(pool.address) as control,
        control.open_session(pool.pool_id) as session,
    ):
        result = await session.run(ops.admit(1, PROMPT, checkpoint_position=3 * SIZE))
        for receipt in await asyncio.to_thread(_run_in_backend, session, result):
            session.add_receipt(receipt)
        await session.submit_receipts()
        (state,) = await session.list_sequences([1])
        assert state.checkpoint_position == 3 * SIZE


def _run_in_backend(session: Session, result: StepResult) -> Any:
    loop = LoopThread("backend")
    backend = RemoteBackend(loop, 10.0)
    backend.open(session)
    assert result.plan is not None
    backend.start(result.plan, len(PROMPT))
    page = state_of(PROMPT[: 3 * SIZE])
    with pytest.raises(BlockNotWrittenError):
        backend.read_states([1], [2])
    backend.write_states([1], [2], page)
    for layer in (0, 2):
        rows = torch.zeros(len(PROMPT), 4, 8)
        backend.layer(layer, rows, rows, rows, options=AttentionOptions())
    receipts = list(backend.finish())
    assert torch.equal(backend.read_states([1], [2]), page)
    backend.stop()
    loop.close()
    return receipts


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a pool that has ended: in files are a prompt with checkpoints after 3 blocks
    and after 5, and one with a checkpoint after 5.
    """
    folder = tmp_path_factory.mktemp("written")

    async def write() -> None:
        async with pool_with_files(folder) as pool, engine_of(pool) as engine:
            for i, (tokens, depth) in enumerate([(PROMPT, 3), (PROMPT, 5), (OTHER, 5)]):
                await engine.admit(2 * i + 1, tokens, depth * SIZE)
                assert await engine.admit(2 * i + 2, tokens) == depth * SIZE
            await until(lambda: nums_of_files(pool) == [5 + 2 + 5 + 1] * 2)

    asyncio.run(write())
    return folder


def file_of(
    folder: Path, depth: int, shard: int = 1, tokens: list[int] = PROMPT, *, of_block: bool = False
) -> Path:
    """Return the file of a prompt's checkpoint after ``depth`` blocks, or of the last of these."""
    root = scope_of(LAYOUT.fingerprint, "default", "").root
    *_, name = block_names(root, ops.pack_tokens(tokens[: depth * SIZE]), SIZE)
    stem = (name if of_block else checkpoint_name(name)).hex()
    return sorted(folder.rglob(f"{stem}.block"))[shard]


def lose(*files: tuple[int, int], of_block: bool = False) -> Callable[[Path], None]:
    """Remove files, given by the depth and the shard."""
    return lambda folder: [file_of(folder, *file, of_block=of_block).unlink() for file in files]


def flip(folder: Path) -> None:
    content = bytearray(file_of(folder, 5).read_bytes())
    content[-1] ^= 1
    file_of(folder, 5).write_bytes(content)


def put(*other: Any) -> Callable[[Path], None]:
    """Put another checkpoint's file, given as ``file_of`` takes it, in place of the deepest."""
    return lambda folder: shutil.copy(file_of(folder, *other), file_of(folder, 5))


FAULTS: dict[str, tuple[int, Callable[[Path], Any]]] = {
    "none": (5, lose()),
    "a checkpoint is lost": (3, lose((5, 1))),
    "its block is lost": (3, lose((5, 1), of_block=True)),
    "no checkpoint is left in both shards": (0, lose((3, 0), (5, 1))),
    "a byte is flipped": (3, flip),
    "of another prefix": (3, put(5, 1, OTHER)),
    "of fewer blocks": (3, put(3)),
    "of another shard": (3, put(5, 0)),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["before a start", "while it runs"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_files_give_a_prompt_up_to_its_deepest_checkpoint(
    written: Path, tmp_path: Path, fault: str, is_late: bool
) -> None:
    (depth, spoil), folder = FAULTS[fault], tmp_path / "pool"
    shutil.copytree(written, folder)
    if not is_late:
        spoil(folder)
    async with pool_with_files(folder) as pool, engine_of(pool) as engine:
        if is_late:
            spoil(folder)
        async with (
            ControlClient(pool.address) as control,
            control.open_session(POOL) as session,
            PrefixLoader(control, session) as loader,
        ):
            loaded = await loader.load(PROMPT)
            assert (loaded.num_cached_tokens, loaded.num_loaded_tokens) == (depth * SIZE,) * 2
            assert await engine.admit(1, PROMPT) == depth * SIZE
            # The last token is computed again, from a state before it.
            for num in (1, 5 * SIZE):
                assert (await loader.load(OTHER[:num])).num_cached_tokens == 0
            assert (await loader.load(OTHER[: 5 * SIZE + 1])).num_cached_tokens == 5 * SIZE
            assert await engine.admit(2, OTHER) == 5 * SIZE


async def test_a_forgotten_prefix_leaves_no_checkpoint_in_files(
    written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, folder := tmp_path / "pool")
    async with pool_with_files(folder) as pool, ControlClient(pool.address) as control:
        await control.wait_ready(POOL, 10)
        await control.forget_prefixes(POOL, PROMPT[: 5 * SIZE])
        await until(lambda: nums_of_files(pool) == [4 + 1 + 5 + 1] * 2)
        await control.forget_prefixes(POOL, OTHER[:SIZE])
        await until(lambda: nums_of_files(pool) == [4 + 1] * 2)
    assert len([*folder.rglob("*.block")]) == 2 * (4 + 1)


async def test_where_no_checkpoint_has_room_nothing_is_loaded(
    written: Path, tmp_path: Path
) -> None:
    shutil.copytree(written, folder := tmp_path / "pool")
    async with (
        pool_with_files(folder, num_device_blocks=64, num_host_blocks=0) as pool,
        engine_of(pool) as engine,
        ControlClient(pool.address) as control,
        control.open_session(POOL) as session,
        PrefixLoader(control, session) as loader,
    ):
        num = {usage.group: usage.num_blocks for usage in (await engine.usage())}[1]
        for i in range(1, num + 1):
            await engine.admit(i, [i] * (SIZE + 1), SIZE)
        assert (await loader.load(PROMPT)).num_cached_tokens == 0
        await engine.run(ops.free(1))
        assert (await loader.load(PROMPT)).num_cached_tokens == 5 * SIZE
