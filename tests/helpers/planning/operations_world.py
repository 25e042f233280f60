"""Engines of one pool over a socket, which check that a refused operation changes nothing.

The control plane is a real server on a loopback port. The data plane is simulated: it signs a
receipt for every plan, and runs none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

import pytest
from kvplane_blocks import Pool as NativePool

from control_plane import queries
from control_plane.pools.pool import Pool
from control_plane.server.server import ControlPlaneServer
from control_plane.steps.operations import OPERATIONS
from kvplane import ControlClient, Layout, Session, ops
from kvplane.errors import KvplaneError
from kvplane.prefixes import ForgetScope
from kvplane.results import (
    CachedBlock,
    ForgetResult,
    PoolMatch,
    StepResult,
)
from kvplane.wire import columns
from kvplane.wire.columns import INT64
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.native.native_pool import find
from tests.helpers.outcomes import is_refused, outcomes
from tests.helpers.planning.control_wire import RawShard, Stub
from tests.helpers.planning.registration_messages import LAYOUT

POOL = "pool"
BLOCK = LAYOUT.block_size_tokens
DEVICE, HOST = tpb.TIER_DEVICE, tpb.TIER_HOST
CACHING_ID = 12
"""Sequence that computes a prompt to leave it cached."""

Block = tuple[int, int, int]
"""Tier, index and generation."""


class World:
    """The pool, and the callers that lease from it."""

    def __init__(self, server: ControlPlaneServer, client: ControlClient, stub: Stub) -> None:
        self.server = server
        self.client = client
        self.stub = stub
        self.shard: RawShard

    async def register(self, layout: Layout = LAYOUT, **hello: Any) -> RawShard:
        """Register a data plane's pool, ``POOL`` unless ``hello`` says otherwise."""
        shard = await RawShard.joined(self.stub, layout=layout.to_proto(), **hello)
        if shard.hello.pool_id == POOL:
            self.shard, self.layout = shard, layout
        return shard

    async def caller(self, namespace: str = "") -> Caller:
        """Return another engine."""
        session = await self.client.open_session(POOL, self.layout, namespace=namespace)
        return Caller(self, session)

    async def usage(self, tier: int = DEVICE, group: int = 0) -> dict[str, int]:
        """Return the blocks of a layer group's tier by state."""
        tiers = (await self.client.get_pool(POOL)).usage
        (usage,) = (usage for usage in tiers if (usage.tier, usage.group) == (tier, group))
        return {
            "free": usage.num_free_blocks,
            "cached": usage.num_cached_blocks,
            "held": usage.num_held_blocks,
            "retired": usage.num_retired_blocks,
        }

    async def counters(self) -> dict[str, int]:
        return await self.client.get_counters(POOL)

    def state(self) -> tuple[Any, ...]:
        """Return what a refusal must leave unchanged: the pool's usage, every sequence and its
        tables, and what is cached and how it is retained, by session.
        """
        core = self.server.core
        pool, shown = core._pools[POOL], []
        for session in core.sessions.admission_of(pool).sessions.values():
            states = queries.states(session)
            ids = columns.read(INT64, states.sequence_ids, "sequence_ids").tolist()
            tables = [group.table(session.handle, i) for i in ids for group in pool.groups]
            shown.append((states.SerializeToString(), tables, cached(pool, session.root)))
        return [*core.get_pool(POOL).usage], shown


class Caller:
    """An engine, whose plans have run and whose receipts are in as soon as a step is answered."""

    def __init__(self, world: World, session: Session) -> None:
        self.world = world
        self.session = session

    async def step(self, *operations: pb.Operation) -> StepResult:
        """Run a step whose items may be refused one by one."""
        result = await self.session.step(operations)
        if result.plan is not None:
            self.session.add_receipt(self.world.shard.receipt(result.plan))
            await self.session.submit_receipts()
        return result

    async def do(self, *operations: pb.Operation) -> StepResult:
        """Run a step whose operations must all succeed."""
        result = await self.step(*operations)
        failures = [failure for outcome in outcomes(result) for failure in outcome.failures]
        assert not failures, failures
        return result

    async def admit(self, sequence_id: int, token_ids: Sequence[int], **how: Any) -> pb.AdmitResult:
        result = await self.do(ops.admit(sequence_id, token_ids, **how))
        return result.results[0].admit

    async def grow(self, sequence_id: int, *token_ids: int) -> StepResult:
        """Compute these tokens after the last one."""
        state = (await self.session.list_sequences([sequence_id]))[0]
        operation = ops.append(
            sequence_id, token_ids, len(token_ids), first_positions=state.num_scheduled_tokens
        )
        return await self.do(operation)

    async def cache(self, token_ids: Sequence[int]) -> None:
        """Leave the prompt's full blocks cached, and no sequence of them."""
        await self.admit(CACHING_ID, token_ids)
        await self.do(ops.free(CACHING_ID))

    async def refuse(self, operation: pb.Operation) -> list[pb.ItemFailure]:
        """Return the failures of a refused operation; nothing must have changed."""
        before = self.world.state()
        result = await self.session.step([operation])
        (outcome,) = outcomes(result)
        assert outcome.failures, "it was done"
        assert result.plan is None
        name = operation.WhichOneof("operation")
        if name not in OPERATIONS or OPERATIONS[name].is_one_item:
            assert is_refused(outcome)
        assert self.world.state() == before
        return list(outcome.failures)

    async def table(self, sequence_id: int) -> tuple[Block, ...]:
        """Return the tables of all layer groups, one after the other."""
        found: list[Block] = []
        for table in await self.session.get_block_table(sequence_id):
            blocks = zip(table.indices, table.generations, strict=True)
            found += ((table.tier, *each) for each in blocks)
        return tuple(found)

    async def num_cached(self, token_ids: Sequence[int]) -> int:
        """Return how many tokens an admission of this prompt would find cached now."""
        (match,) = await self.find(token_ids)
        return min(match.num_cached_tokens, len(token_ids) - 1)

    async def blocks(self, token_ids: Sequence[int]) -> Sequence[CachedBlock]:
        """Return the cached blocks of this prompt."""
        (match,) = await self.find(token_ids, with_blocks=True)
        return match.blocks

    async def find(self, token_ids: Sequence[int], **how: Any) -> list[PoolMatch]:
        """Look the prompt up in the pool."""
        return await self.world.client.find_prefix(
            token_ids, namespace=self.session.namespace, pool_ids=[POOL], **how
        )

    async def retain(self, token_ids: ops.Tokens, **how: Any) -> int:
        """Retain the prompt's prefix, or end its retention."""
        return await self.world.client.retain_prefix(
            POOL, token_ids, namespace=self.session.namespace, **how
        )

    async def forget(self, what: ops.Tokens | ForgetScope, *, force: bool = False) -> ForgetResult:
        """Forget a prefix, or all of a scope."""
        return await self.world.client.forget_prefixes(
            POOL, what, namespace=self.session.namespace, force=force
        )

    async def denied(
        self, call: Awaitable[object], kind: type[KvplaneError], field: str
    ) -> KvplaneError:
        """Assert that the call fails by this field; nothing must have changed."""
        before = self.world.state()
        with pytest.raises(KvplaneError) as refused:
            await call
        assert (type(refused.value), refused.value.field) == (kind, field), repr(refused.value)
        assert self.world.state() == before
        return refused.value


def prompt(num_blocks: int, seed: int = 0, extra: int = 1) -> list[int]:
    """Return tokens of ``num_blocks`` full blocks and ``extra`` more; different for every seed."""
    return [1000 * seed + position for position in range(num_blocks * BLOCK + extra)]


def cached(pool: Pool, root: bytes) -> tuple[Any, ...]:
    """Return the blocks that can be found under a root, and how those of each prefix are kept.
    Asking counts as no use; the time that a retention still lasts is not shown.
    """
    _, revision, tiers, hashes, parents, _ = pool.primary.snapshot(root, 0, 1 << 20)
    starts = range(0, len(hashes), 16)
    parent_of = {hashes[i : i + 16]: parents[i : i + 16] for i in starts}
    kept = {}
    for last in parent_of.keys() - set(parent_of.values()):
        chain, block_hash = b"", last
        while block_hash in parent_of:
            chain, block_hash = block_hash + chain, parent_of[block_hash]
        _, blocks = find(NativePool([pool.primary]), pool.primary, root, hashes=chain)
        *known, _, _, priorities = blocks
        kept[last] = (*known, priorities)
    return revision, tiers, hashes, kept
