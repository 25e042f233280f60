"""An engine of the soak: a simulated data plane, and one sequence after another."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import grpc.aio

from benchmarks.control_plane import messages
from kvplane import ops
from kvplane.results import news_of
from kvplane.wire import columns
from kvplane.wire.v1 import session_pb2 as cpb

MIN_PROMPT_TOKENS: Final = 40
MAX_PROMPT_TOKENS: Final = 72
NUM_NEW_TOKENS: Final = 16
MEAN_TOKENS: Final = (MIN_PROMPT_TOKENS + MAX_PROMPT_TOKENS) // 2 + NUM_NEW_TOKENS
STEP_S: Final = 0.2
POLL_S: Final = 5.0


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
        self._answers: asyncio.Queue[cpb.StepResponse] = asyncio.Queue()
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
        await self._stream.write(request)
        result = (await self._answers.get()).result
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
