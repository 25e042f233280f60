"""Runs ten times more sessions than a pool has room for, twice, between times of normal load.

    python -m benchmarks.engine.soak --seconds 60 --json OUT

A control plane as a process, and engines that each want one sequence after another: a prompt that
nobody else has, then a token every step, until it is finished and freed. In normal load all fit the
pool; in overload most wait in the queue. The data plane is simulated: a step takes
``STEP_S``, and only the control plane's work is measured. Goodput counts the tokens of
finished sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import grpc.aio

from benchmarks.common.processes import start_control_plane
from benchmarks.common.report import machine, markdown, said, save
from benchmarks.control_plane import messages
from benchmarks.control_plane.over_grpc import DataPlane
from kvplane import ops
from kvplane.results import news_of
from kvplane.wire import columns
from kvplane.wire.plane.v1 import registration_pb2 as rpb
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import session_pb2_grpc

MIN_PROMPT_TOKENS: Final = 40
MAX_PROMPT_TOKENS: Final = 72
NUM_NEW_TOKENS: Final = 16
MEAN_TOKENS: Final = (MIN_PROMPT_TOKENS + MAX_PROMPT_TOKENS) // 2 + NUM_NEW_TOKENS
STEP_S: Final = 0.2
POLL_S: Final = 5.0
NUM_NORMAL: Final = 40
OVERLOAD: Final = 10
# Overload comes twice, to distinguish memory that the first one leaves from a leak.
LOADS: Final = (
    ("normal", NUM_NORMAL, 0.1),
    ("overload", NUM_NORMAL * OVERLOAD, 0.35),
    ("normal again", NUM_NORMAL, 0.1),
    ("overload again", NUM_NORMAL * OVERLOAD, 0.35),
    ("normal at last", NUM_NORMAL, 0.1),
)
# Room for the sequences of normal load, and a little for headroom.
NUM_BLOCKS: Final = NUM_NORMAL * (MEAN_TOKENS // messages.BLOCK_SIZE_TOKENS + 1) * 21 // 20
WARM_UP_S: Final = 3.0
START_S: Final = 60.0
SESSIONS_A_CONNECTION: Final = 20
_OWN_CONNECTION: Final = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(slots=True)
class Counts:
    """Totals over engines, while ``is_counting``."""

    is_counting: bool = False
    finished: Counter[int] = field(default_factory=Counter)
    num_tokens: int = 0
    num_yielded: int = 0
    latencies_s: list[float] = field(default_factory=list)


class Engine:
    """One session that works until it is stopped."""

    def __init__(self, index: int, stub: Any, session: Any, key: bytes, counts: Counts) -> None:
        self._index = index
        self._session = session
        self._key = key
        self._counts = counts
        self._stub = stub
        self._stream = stub.StreamSteps()
        self._answers: asyncio.Queue[cpb.StreamStepsResponse] = asyncio.Queue()
        self._news: asyncio.Queue[cpb.News] = asyncio.Queue()
        self._number = 0
        self._sequence_id = 0
        self._receipts: list[Any] = []
        self.stopping = False

    async def run(self) -> None:
        """Run sequence after sequence."""
        reader = asyncio.create_task(self._read())
        num_sequences = 0
        try:
            while not self.stopping:
                num_sequences += 1
                seed = self._index * 65_536 + num_sequences
                spread = MAX_PROMPT_TOKENS - MIN_PROMPT_TOKENS + 1
                packed = messages.prompt(seed, MIN_PROMPT_TOKENS + 7 * seed % spread)
                tokens = [*columns.read(columns.INT32, packed, "prompt")]
                num_wanted = len(tokens) + NUM_NEW_TOKENS
                while len(tokens) < num_wanted and not self.stopping:
                    await self._generate(tokens, num_wanted)
                if len(tokens) == num_wanted and self._counts.is_counting:
                    self._counts.finished[self._index] += 1
                    self._counts.num_tokens += num_wanted
            await self._step(ops.free([self._sequence_id]))
            await self._step()  # with the last receipt, so that the next load has all blocks
            await self._stub.CloseSession(cpb.CloseSessionRequest(session=self._session))
        finally:
            reader.cancel()

    async def _generate(self, tokens: list[int], num_wanted: int) -> None:
        """Add tokens until there are enough. If the sequence's blocks go to others, admit it again;
        published blocks are found cached.
        """
        former, self._sequence_id = self._sequence_id, self._sequence_id + 1
        operations = [ops.free([former])] if former else []
        admission = ops.admit(self._sequence_id, tokens, max_total_tokens=num_wanted, wait=True)
        answer = await self._step(*operations, admission)
        num_done, num_sent = len(tokens), len(tokens)
        if answer.results[-1].failures:
            num_cached = await self._granted(answer.news)
            if num_cached is None:
                return
            num_done = num_cached
        while len(tokens) < num_wanted and not self.stopping:
            await asyncio.sleep(STEP_S)
            if num_done == len(tokens):
                tokens.append(7)
            num_new = len(tokens) - num_done
            append = ops.append(
                self._sequence_id, tokens[num_sent:], num_new, first_positions=num_done
            )
            answer = await self._step(append)
            if self._must_yield(answer.news):
                return
            if answer.results[0].failures:
                if num_done == len(tokens) - 1 and num_sent == num_done:
                    tokens.pop()  # it was not added
                continue
            num_done = num_sent = len(tokens)

    async def _granted(self, news: cpb.News) -> int | None:
        """Wait in the queue; return the tokens found cached, or None if it was given up."""
        while not self.stopping:
            for grant in news_of(news).granted:
                if grant.sequence_id == self._sequence_id:
                    return grant.num_cached_tokens
            if self._must_yield(news):
                return None
            if self._receipts:  # others get the freed blocks once it is there
                news = (await self._step()).news
                continue
            try:
                async with asyncio.timeout(POLL_S):
                    news = await self._news.get()
            except TimeoutError:
                news = (await self._step()).news  # renews the lease too
        return None

    def _must_yield(self, news: cpb.News) -> bool:
        """Return whether the sequence was cut, or a notice asks for its blocks, at which an engine
        yields them.
        """
        cut = columns.read(columns.INT64, news.cut_sequence_ids, "cut_sequence_ids")
        asked = columns.read(columns.INT64, news.asked_sequence_ids, "asked_sequence_ids")
        yields = self._sequence_id in cut or self._sequence_id in asked
        self._counts.num_yielded += yields and self._counts.is_counting
        return yields

    async def _step(self, *operations: cpb.Operation) -> cpb.StepResponse:
        self._number += 1
        request = cpb.StepRequest(
            session=self._session,
            number=self._number,
            operations=operations,
            receipts=self._receipts,
        )
        self._receipts = []
        begin_s = time.perf_counter()
        await self._stream.write(cpb.StreamStepsRequest(step=request))
        answer = await self._answers.get()
        if answer.HasField("error"):
            raise RuntimeError(f"a step was refused: {answer.error}")
        result = answer.step
        if self._counts.is_counting:
            self._counts.latencies_s.append(time.perf_counter() - begin_s)
        if result.HasField("plan"):
            self._receipts = [messages.receipt(self._key, self._session, self._number, result.plan)]
        while not self._news.empty():  # arrived meanwhile
            result.news.MergeFrom(self._news.get_nowait())
        return result

    async def _read(self) -> None:
        while (response := await self._stream.read()) is not grpc.aio.EOF:
            if response.HasField("news"):
                self._news.put_nowait(response.news)
            else:
                self._answers.put_nowait(response)


@dataclass(slots=True)
class Phase:
    """The figures of one load. Latencies are of steps, in milliseconds, memory in bytes."""

    name: str
    num_sessions: int
    seconds: float = 0.0
    goodput_tokens_per_s: float = 0.0
    num_finished: int = 0
    num_yielded: int = 0
    fewest_finished: int = 0
    most_finished: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    rss_bytes: int = 0
    num_descriptors: int = 0


async def soak(address: str, process_id: int, seconds: float) -> list[Phase]:
    """Run each of LOADS for its share of the time."""
    phases = []
    async with DataPlane(address, messages.hello(NUM_BLOCKS, 0)) as plane:
        await plane.report([rpb.RegisterRequest(report=rpb.BlockReport(last=True))])
        for name, num_sessions, share in LOADS:
            phase = Phase(name, num_sessions, seconds * share)
            async with AsyncExitStack() as stack:
                stubs = [
                    session_pb2_grpc.SessionServiceStub(
                        await stack.enter_async_context(
                            grpc.aio.insecure_channel(address, options=_OWN_CONNECTION)
                        )
                    )
                    for _ in range(num_sessions // SESSIONS_A_CONNECTION)
                ]
                await _load(stubs, plane.key, phase)
                _inspect(process_id, phase)
            phases.append(phase)
    return phases


async def _load(stubs: list[Any], key: bytes, phase: Phase) -> None:
    counts, engines = Counts(), []
    for i in range(phase.num_sessions):
        stub = stubs[i % len(stubs)]
        opened = await stub.OpenSession(messages.open_session())
        engines.append(Engine(i + 1, stub, opened.session, key, counts))
    tasks = [asyncio.create_task(engine.run()) for engine in engines]
    await asyncio.sleep(WARM_UP_S)
    counts.is_counting, begin_s = True, time.perf_counter()
    await asyncio.sleep(phase.seconds)
    counts.is_counting, phase.seconds = False, time.perf_counter() - begin_s
    for engine in engines:
        engine.stopping = True
    await asyncio.gather(*tasks)
    phase.num_finished, phase.num_yielded = counts.finished.total(), counts.num_yielded
    phase.goodput_tokens_per_s = counts.num_tokens / phase.seconds
    of_engines = [counts.finished[i] for i in range(1, phase.num_sessions + 1)]
    phase.fewest_finished, phase.most_finished = min(of_engines), max(of_engines)
    cuts = statistics.quantiles(counts.latencies_s, n=100)
    phase.p50_ms, phase.p99_ms = 1e3 * cuts[49], 1e3 * cuts[98]


def _inspect(process_id: int, phase: Phase) -> None:
    """Return the figures of the control plane's process."""
    folder = Path(f"/proc/{process_id}")
    for line in (folder / "status").read_text().splitlines():
        if line.startswith("VmRSS"):
            phase.rss_bytes = int(line.split()[1]) * 1024
    phase.num_descriptors = len([*(folder / "fd").iterdir()])


def run(seconds: float) -> list[Phase]:
    """Start a control plane, and put the loads on it."""
    with ExitStack() as stack:
        flags = ("--heartbeat-s", "60", "--lease-s", "60")
        process, address = start_control_plane(stack, *flags)
        return asyncio.run(soak(address, process.pid, seconds))


def table(phases: list[Phase]) -> Iterator[str]:
    """Yield the table in the form of docs/reliability.md."""
    heads = ("load", "sessions", "goodput, tokens/s", "finished by each", "yielded", "step p50")
    rows = (
        (
            *(p.name, p.num_sessions, f"{p.goodput_tokens_per_s:.0f}"),
            *(f"{p.fewest_finished} to {p.most_finished}", p.num_yielded, f"{p.p50_ms:.1f} ms"),
            *(f"{p.p99_ms:.1f} ms", f"{p.rss_bytes / 2**20:.0f} MiB", p.num_descriptors),
        )
        for p in phases
    )
    return markdown((*heads, "p99", "memory", "descriptors"), rows)


def main() -> None:
    """Print the table, write the JSON."""
    parser = argparse.ArgumentParser(description="Overload a control plane for a while.")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()
    phases = run(arguments.seconds)
    described = machine()
    print(said(described))
    print(*table(phases), sep="\n")
    save(arguments.json, {"machine": described, "phases": [asdict(phase) for phase in phases]})


if __name__ == "__main__":
    main()
