"""Steps per second of 64 sequences with many engines, and one engine beside another's prompts.

Over gRPC the engines are spread over processes of their own, one fewer than there are cores. Each
sends its next step when it has the answer to the last one.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import time
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import uvloop

from benchmarks.common.timing import quantile
from benchmarks.control_plane.engine import Engine, World
from benchmarks.control_plane.messages import Decoding, prompt
from benchmarks.control_plane.over_grpc import Connection, OverGrpc
from benchmarks.control_plane.report import STEPS_PER_S, Row
from benchmarks.control_plane.sizes import Sizes
from kvplane import ops
from kvplane.wire.v1 import session_pb2 as cpb

NUM_SEQUENCES: Final = 64
_NUM_POOL_BLOCKS: Final = 100_000  # 64 engines hold 74,000 at the end of a round
_STEPS_PER_ROUND: Final = 256  # after which its sequences are freed and new ones are admitted
_NUM_WINDOWS: Final = 20
_BARRIER_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True)
class Client:
    """The work of one client process. ``prompt_tokens``: length of prompts admitted without pause;
    0 for decode steps.
    """

    address: str
    key: bytes
    first_engine: int
    num_engines: int
    seconds: float
    prompt_tokens: int = 0


@dataclass(frozen=True)
class Samples:
    """Steps of a client: when each was answered, and its latency. The client was at work from
    ``begin_s`` to ``end_s``, on a clock that processes share.
    """

    begin_s: float
    end_s: float
    ends_s: array[float]
    seconds: array[float]

    def add(self, seconds: float) -> bool:
        """Add a step that was answered now; return whether there is time for another."""
        now_s = time.perf_counter()
        self.ends_s.append(now_s)
        self.seconds.append(seconds)
        return now_s < self.end_s


_barrier: Any = None


def rate_name(num_engines: int) -> str:
    """Return the case's name for so many engines."""
    return f"steps_per_s_{num_engines}_engine" + ("s" if num_engines > 1 else "")


async def steps_per_s(world: World, sizes: Sizes, num_engines: int) -> list[Row]:
    """Measure decode steps of 64 sequences each, with the receipts of the steps before."""
    name = rate_name(num_engines)
    async with world.pool(_NUM_POOL_BLOCKS) as pool:
        if not isinstance(pool, Connection):
            engines = [await pool.engine() for _ in range(num_engines)]
            return [await _rate_in_process(name, engines, sizes)]
        samples = await _run(_clients(pool, sizes, num_engines))
    return [_rate(name, samples), _latencies(f"{name}/latency", samples)]


def _clients(pool: Connection, sizes: Sizes, num_engines: int) -> list[Client]:
    """Return the clients that the engines are spread over."""
    num_processes = max(1, min(num_engines, (os.cpu_count() or 2) - 1))
    shares = [len(range(i, num_engines, num_processes)) for i in range(num_processes)]
    firsts = itertools.accumulate(shares, initial=0)
    return [
        Client(pool.address, pool.key, first, num, sizes.rate_s)
        for first, num in zip(firsts, shares, strict=False)
    ]


async def decode_beside_32k_admissions(world: World, sizes: Sizes) -> list[Row]:
    """Measure a decode step of 64 sequences while another engine admits prompts without pause."""
    assert isinstance(world, OverGrpc), "measured over gRPC only"
    name = "decode_beside_32k_admissions"
    async with world.pool(_NUM_POOL_BLOCKS) as pool:
        decoding = Client(pool.address, pool.key, 0, 1, sizes.rate_s)
        admitting = Client(pool.address, pool.key, 1, 1, sizes.rate_s, sizes.prompt_tokens)
        decoded, admitted = await _run([decoding, admitting])
    return [_latencies(name, [decoded]), _latencies(f"{name}/admission", [admitted])]


async def _rate_in_process(name: str, engines: Sequence[Engine], sizes: Sizes) -> Row:
    """Return the rate that the core's time alone allows, engines by turns."""
    decodings = [await _start(engine) for engine in engines]
    seconds = []
    for _ in range(sizes.num_rate_steps // len(engines)):
        for engine, decoding in zip(engines, decodings, strict=True):
            seconds.append(await engine.step(decoding.append()))
    p50, p99 = (1 / quantile(seconds, q) for q in (0.5, 0.99))
    return Row(name, STEPS_PER_S, p50, p99, len(seconds))


async def _run(clients: Sequence[Client]) -> list[Samples]:
    """Run clients in a process each; they begin together."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(clients))
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(
        len(clients), mp_context=context, initializer=_set_barrier, initargs=(barrier,)
    ) as processes:
        runs = [loop.run_in_executor(processes, _client, client) for client in clients]
        return await asyncio.gather(*runs)


def _set_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _client(client: Client) -> Samples:
    return uvloop.run(_drive(client))


async def _drive(client: Client) -> Samples:
    connection = Connection(client.address, client.key, first_engine=client.first_engine)
    async with connection:
        engines = [await connection.engine() for _ in range(client.num_engines)]
        is_decoding = not client.prompt_tokens
        decodings = [await _start(engine) for engine in engines] if is_decoding else []
        _barrier.wait(_BARRIER_TIMEOUT_S)
        begin_s = time.perf_counter()
        samples = Samples(begin_s, begin_s + client.seconds, array("d"), array("d"))
        if is_decoding:
            pairs = zip(engines, decodings, strict=True)
            loops = [_decode(engine, decoding, samples) for engine, decoding in pairs]
        else:
            loops = [_admit(engine, client.prompt_tokens, samples) for engine in engines]
        await asyncio.gather(*loops)
    return samples


async def _start(engine: Engine) -> Decoding:
    decoding = Decoding(engine.new_ids(NUM_SEQUENCES))
    await engine.step(*decoding.admits())
    return decoding


async def _decode(engine: Engine, decoding: Decoding, samples: Samples) -> None:
    while True:
        for _ in range(_STEPS_PER_ROUND):
            if not samples.add(await engine.step(decoding.append())):
                return
        await engine.step(ops.free(decoding.ids))
        decoding = await _start(engine)


async def _admit(engine: Engine, num_tokens: int, samples: Samples) -> None:
    """Free the prompt before and admit a new one in each step."""
    operations: list[cpb.Operation] = []
    while True:
        (sequence_id,) = engine.new_ids(1)
        operations.append(ops.admit(sequence_id, prompt(sequence_id, num_tokens)))
        if not samples.add(await engine.step(*operations)):
            return
        operations = [ops.free([sequence_id])]


def _latencies(name: str, samples: Sequence[Samples]) -> Row:
    return Row.of_seconds(name, [s for each in samples for s in each.seconds])


def _rate(name: str, samples: Sequence[Samples]) -> Row:
    """Return all engines' steps per second, by windows of the time in which all were at work."""
    begin_s = max(each.begin_s for each in samples)
    end_s = min(each.end_s for each in samples)
    ends_s = sorted(end for each in samples for end in each.ends_s)
    window_s = (end_s - begin_s) / _NUM_WINDOWS
    edges = [bisect_left(ends_s, begin_s + i * window_s) for i in range(_NUM_WINDOWS + 1)]
    slowest_first = [(after - before) / window_s for before, after in itertools.pairwise(edges)]
    p50, p99 = (quantile(slowest_first, q) for q in (0.5, 0.01))
    return Row(name, STEPS_PER_S, p50, p99, edges[-1] - edges[0])
