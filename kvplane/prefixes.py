"""Cached prefixes: the events of ``ControlClient.watch_prefixes``, what ``forget_prefixes`` takes,
and a loader of blocks that data planes keep in files, so that an admission finds them cached.

find, of each shard ──► admit ──► plan ──► each shard loads ──► receipts ──► cached ──► free
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from kvplane import ops
from kvplane.clients.control_client import DEFAULT_PRIORITY, ControlClient, ForgetScope
from kvplane.clients.prefix_feed import (
    BlocksRemoved,
    BlocksStored,
    CaughtUp,
    IndexCleared,
    PrefixEvent,
    StoredBlock,
)
from kvplane.errors import CapacityError, KvplaneError, PoolFullError
from kvplane.execution.execution import Execution, all_of, shards_of
from kvplane.results import Signed, StepResult
from kvplane.session.session import Session
from kvplane.transport.retry import Deadline

__all__ = [
    "DEFAULT_PRIORITY",
    "BlocksRemoved",
    "BlocksStored",
    "CaughtUp",
    "ForgetScope",
    "IndexCleared",
    "Loaded",
    "PrefixEvent",
    "PrefixLoader",
    "StoredBlock",
    "tokens_of",
]

MAX_NAME_BYTES: Final = 36
"""Bytes of the longest name that ``tokens_of`` keeps exactly."""
_NAME_TOKENS: Final = 16
_NAME_BITS: Final = 18
_HASHED: Final = MAX_NAME_BYTES + 1
_INT32_BYTES: Final = 4
# Each failure removes a file from the tier, so another try asks for less.
_MAX_TRIES: Final = 3


def tokens_of(name: bytes) -> list[int]:
    """Turn a name, such as an engine's own hash, into 16 token ids: a prompt of one block, by which
    a block can be stored and found under that name.

    Names of up to ``MAX_NAME_BYTES`` bytes are kept exactly, so that no two have the same ids. A
    longer one is replaced by its SHA-256, whose ids no shorter name has.
    """
    size = len(name)
    if size > MAX_NAME_BYTES:
        name, size = hashlib.sha256(name).digest(), _HASHED
    bits = int.from_bytes(name, "big")
    mask = (1 << _NAME_BITS) - 1
    ids = [bits >> _NAME_BITS * i & mask for i in reversed(range(_NAME_TOKENS))]
    ids[0] |= size << _NAME_BITS  # names of other lengths are other names
    return ids


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of ``PrefixLoader.load``: tokens that are in the pool, and those from files."""

    num_cached_tokens: int
    num_loaded_tokens: int


class PrefixLoader:
    """Loads prefixes from data planes' files into their pool, by a session of its own: a session
    that computes could not continue meanwhile. Loads run one after another. ``control``: finds what
    is cached. ``timeout_s``: for all of a load.
    """

    def __init__(
        self,
        control: ControlClient,
        session: Session,
        *,
        timeout_s: float = 60.0,
    ) -> None:
        self._control = control
        self._session = session
        self._timeout_s = timeout_s
        self._has_states = session.layout.state_group is not None
        self._has_files = all(shard.has_file_tier for shard in session.shards)
        self._execution: Execution | None = None  # opened by the first load
        self._opening = asyncio.Lock()
        self._turn = asyncio.Lock()
        self._last_id = 0
        self._is_behind = False  # whether the session may have sequences, or plans that did not run

    async def __aenter__(self) -> PrefixLoader:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def load(self, tokens: ops.Tokens) -> Loaded:
        """Load the part of a prompt after its cached tokens, as far as all shards have it in files.
        It is cached when this returns, but may be evicted again like any other prefix. In a pool
        that keeps states, that is up to the deepest checkpoint before the prompt's last token.

        Files that cannot be used, or a pool without room, are no errors: less is loaded then.
        Raises the errors of planes that are away, and of a session that is over.
        """
        column = ops.pack_tokens(tokens)
        if self._has_states:
            column = column[:-_INT32_BYTES]  # a hit leaves a token to compute
        if len(column) < self._session.layout.block_size_tokens * _INT32_BYTES:
            return Loaded(0, 0)
        async with Deadline.after(self._timeout_s).guard():
            num_cached = await self._num_cached(column)
            for _ in range(_MAX_TRIES if self._has_files else 0):
                num_tokens = await self._num_in_files(column)
                if num_tokens <= num_cached:
                    break
                async with self._turn:
                    before = await self._num_cached(column)  # others may have loaded it
                    try:
                        is_loaded = before >= num_tokens or await self._try_to_load(
                            [column[: num_tokens * _INT32_BYTES]]
                        )
                    except CapacityError:
                        return Loaded(before, 0)
                if is_loaded:
                    num_cached = max(before, num_tokens)
                    return Loaded(num_cached, num_cached - before)
                num_cached = await self._num_cached(column)
        return Loaded(num_cached, 0)

    async def load_blocks(self, prompts: Sequence[ops.Tokens]) -> None:
        """Load prompts of one block, such as names, by one plan: those that are in files. They must
        not be cached. Otherwise like ``load``; where the pool has no room for all, none is loaded.
        """
        columns = [ops.pack_tokens(prompt) for prompt in prompts]
        async with Deadline.after(self._timeout_s).guard():
            for _ in range(_MAX_TRIES if self._has_files else 0):
                found = await all_of([self._num_in_files(column) for column in columns])
                columns = [column for column, num in zip(columns, found, strict=True) if num]
                async with self._turn:
                    try:
                        if not columns or await self._try_to_load(columns, are_cached=False):
                            return
                    except CapacityError:
                        return

    async def close(self) -> None:
        """End every call of the loader. Its session stays open."""
        if self._execution is not None:
            await self._execution.close()

    async def _num_in_files(self, column: bytes) -> int:
        """Return how many leading tokens of a prompt all shards have in files."""
        shards = shards_of(await self._opened())
        size = self._session.layout.block_size_tokens
        while True:
            found = await all_of([each.find_files(column, self._timeout_s) for each in shards])
            least = min(found)
            if least in (0, max(found)):
                return least * size
            column = column[: least * size * _INT32_BYTES]  # all have a checkpoint there?

    async def _opened(self) -> Execution:
        async with self._opening:
            if self._execution is None:
                self._execution = await self._session.open_execution(timeout_s=self._timeout_s)
            return self._execution

    async def _num_cached(self, column: bytes) -> int:
        session = self._session
        (match,) = await self._control.find_prefix(
            column, namespace=session.namespace, pool_ids=[session.pool_id]
        )
        return match.num_cached_tokens

    async def _try_to_load(self, columns: Sequence[bytes], *, are_cached: bool = True) -> bool:
        """Load ``columns``, each of whole blocks, by one plan. ``are_cached``: whether leading
        blocks may be. Returns whether all of them are cached now. Raises CapacityError where there
        is no room.
        """
        if self._is_behind:
            await self._free_all()
        ids = range(self._last_id + 1, self._last_id + 1 + len(columns))
        self._last_id = ids[-1]
        is_loaded = False
        self._is_behind = True
        try:
            result = await self._session.step(
                [
                    ops.admit(
                        i,
                        column,
                        skip_prefix_lookup=not are_cached,
                        checkpoint_position=len(column) // _INT32_BYTES if self._has_states else 0,
                    )
                    for i, column in zip(ids, columns, strict=True)
                ]
            )
            self._is_behind = result.plan is not None or not all(
                each.failures for each in result.results
            )
            result.raise_for_status()
            if any(0 in each.checkpoint_positions for each in result.results):
                raise PoolFullError("the pool has no room for a checkpoint")
            is_loaded = await self._fill(result, ids, columns)
            if is_loaded:
                with suppress(KvplaneError):
                    await self._free(ids)
                    self._is_behind = False
        finally:
            if self._is_behind:
                with suppress(KvplaneError):
                    await self._free_all()
        return is_loaded

    async def _fill(self, result: StepResult, ids: Sequence[int], columns: Sequence[bytes]) -> bool:
        plan = result.plan
        if plan is None:
            return False
        execution = await self._opened()
        await execution.start(plan, timeout_s=self._timeout_s)
        await all_of(
            [
                execution.load_files(i, column, timeout_s=self._timeout_s)
                for i, column in zip(ids, columns, strict=True)
            ]
        )
        if execution.has_run:
            await self._session.submit_receipts()
        return execution.has_run

    async def _free_all(self) -> None:
        """Free the sequences of an interrupted load, whose last call's outcome may be unknown."""
        aborted = await self._session.abort_plans(whole_tables=True)
        self._session.take_abandoned()  # their plans are aborted, or have run
        assert aborted.plan is not None
        await self._run(aborted.plan)
        await self._free([each.sequence_id for each in aborted.sequences])
        self._is_behind = False

    async def _free(self, sequence_ids: Sequence[int]) -> None:
        """Free sequences. Their blocks stay cached, if they were published."""
        if sequence_ids:
            plan = (await self._session.step([ops.free(sequence_ids)])).plan
            if plan is not None:
                await self._run(plan)
        await self._session.submit_receipts()

    async def _run(self, plan: Signed) -> None:
        """Run a plan that computes nothing: it drops tables, or names those that are left."""
        await (await self._opened()).start(plan, timeout_s=self._timeout_s)
