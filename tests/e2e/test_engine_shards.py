"""An engine on a pool of several shards: one process that talks to all, or one for each shard."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from engine_planes import Process

from engine import LLM, SamplingParams
from engine.parallel.backends import RankBackend, SharedSession
from engine.request import CompletionOutput
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.models.hf import layout_from_hf
from kvplane.results import ShardInfo
from kvplane.shard import Shard
from kvplane.sync.loop_thread import LoopThread
from kvplane.wire.v1.types_pb2 import SignedPayload
from tests.helpers.refusals import refused
from tests.helpers.same_answers import PROMPTS
from tests.helpers.sharded_pool import BY_LAYERS, POOL, Ranges, ShardedPool, by_heads

PARAMS = SamplingParams(max_tokens=24, ignore_eos=True, record_logits=True)


@contextmanager
def pool_of(model: Path, folder: Path, shards: list[Ranges]) -> Iterator[ShardedPool]:
    layout = layout_from_hf(model, block_size_tokens=16, dtype="float32")
    loop = LoopThread("pool")
    pool = ShardedPool(folder, shards, layout)
    loop.run(pool.__aenter__())
    try:
        yield pool
    finally:
        loop.run(pool.__aexit__())
        loop.close()


def engine_on(model: Path, address: str, **settings: object) -> LLM:
    defaults = {"num_threads": 1, "probe": False, "pool_id": POOL, "control_plane": address}
    return LLM(model, **{**defaults, **settings})


def answers(engine: LLM) -> list[CompletionOutput]:
    return [output.outputs[0] for output in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def expected(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[CompletionOutput]:
    """With one shard."""
    with (
        pool_of(model, tmp_path_factory.mktemp("one"), by_heads(1)) as pool,
        engine_on(model, pool.address) as engine,
    ):
        return answers(engine)


@pytest.mark.parametrize(
    "shards",
    [
        pytest.param(by_heads(2), id="2"),
        pytest.param(BY_LAYERS, id="layers"),
    ],
)
def test_one_process_on_several_shards_computes_the_same_bits(
    model, tmp_path, expected, shards
) -> None:
    with (
        pool_of(model, tmp_path, shards) as pool,
        engine_on(model, pool.address) as engine,
    ):
        for have, want in zip(answers(engine), expected, strict=True):
            assert have.token_ids == want.token_ids
            assert torch.equal(have.logits, want.logits)


def check_parallel(engine: LLM, expected: list[CompletionOutput]) -> None:
    """Check the tokens, and the logits but for rounding, as their sums have another order."""
    for have, want in zip(answers(engine), expected, strict=True):
        assert have.token_ids == want.token_ids
        torch.testing.assert_close(have.logits, want.logits, rtol=1e-4, atol=1e-4)


@pytest.mark.nightly  # three engines; the ranks of the test below are on push
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_embedded_shards_give_the_same_tokens(
    model, tmp_path, expected, num_ranks
) -> None:
    settings = {"data_plane": "embedded", "num_device_blocks": 64, "recovery_timeout_s": 100.0}
    settings["tensor_parallel"] = num_ranks
    with (
        Process("control_plane", tmp_path / "control.log") as control,
        engine_on(model, control.address, **settings) as engine,
    ):
        check_parallel(engine, expected)
        shards = engine.get_pool().shards
        assert [info.shard.index for info in shards] == list(range(num_ranks))
        check_parallel(engine, expected)


@pytest.mark.nightly  # two engines, of which one has two processes
def test_ranks_compute_with_the_frequencies_of_a_chosen_length(model, tmp_path) -> None:
    folder = shutil.copytree(model, tmp_path / "dynamic")
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 16.0}
    config |= {"max_position_embeddings": 16, "rope_parameters": rope}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"data_plane": "embedded", "num_device_blocks": 64, "recovery_timeout_s": 100.0}
    settings["max_total_tokens"] = 256
    with Process("control_plane", tmp_path / "control.log") as control:
        with engine_on(folder, control.address, pool_id="one", **settings) as engine:
            wanted = answers(engine)
        with engine_on(folder, control.address, tensor_parallel=2, **settings) as engine:
            check_parallel(engine, wanted)


def ranks_of_this_process() -> list[int]:
    """Processes that it started as ranks."""
    children = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    pids = [int(pid) for file in children for pid in file.read_text().split()]
    return [
        pid
        for pid in pids
        if b"engine.parallel.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


@pytest.mark.early
def test_ranks_use_a_shard_each_and_end_with_a_typed_error_when_one_is_killed(
    model, tmp_path, expected
) -> None:
    with pool_of(model, tmp_path, by_heads(2)) as pool:
        engine = engine_on(model, pool.address, tensor_parallel=2, recovery_timeout_s=25.0)
        with engine:
            check_parallel(engine, expected)
            (rank,) = ranks_of_this_process()
            os.kill(rank, signal.SIGKILL)
            started_s = time.monotonic()
            with pytest.raises(InternalError, match="start the engine again"):
                engine.generate(PROMPTS, PARAMS)
            assert time.monotonic() - started_s < 30
        assert ranks_of_this_process() == []


def test_a_pool_that_is_divided_otherwise_is_refused_by_each_rank(model) -> None:
    layout = layout_from_hf(model)
    shards = [
        ShardInfo(Shard(i, 2, i, 1, 0, 2), epoch=1, address="", connected=True, has_file_tier=False)
        for i in range(2)
    ]
    loop = LoopThread("ranks")
    for rank in range(2):
        backend = RankBackend(loop, 1.0, None, rank, num_ranks=2)
        with refused(InvalidRequestError, "tensor_parallel"):
            backend.open(SharedSession(SignedPayload(), shards, layout))
    loop.close()
