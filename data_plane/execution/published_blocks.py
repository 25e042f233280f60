"""Published blocks of an executor as a file tier needs them: which are found again, and what they
hold.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from data_plane.execution.commands import Commands
from data_plane.execution.plan_runner import PlanRunner
from data_plane.execution.shards.shard_kernels import ShardKernels
from data_plane.kernels.arguments import require
from data_plane.places import place_of
from data_plane.plans.contents.reused_blocks import ReusedBlocks, ReusedPrefix
from data_plane.plans.sessions import Sessions
from data_plane.plans.tables.block_tables import BlockTables
from kvplane.v1 import types_pb2 as pb

_DEVICE = place_of(0, pb.TIER_DEVICE)


class PublishedBlocks:
    """Thread-safe: each method is a command of the executor."""

    def __init__(
        self,
        layers: range,
        tables: BlockTables,
        sessions: Sessions,
        plans: PlanRunner,
        compute: ShardKernels,
        command: Commands,
    ) -> None:
        """``layers``: of the shard, in the first group. ``command``: in which a method runs, by its
        name.
        """
        self._layers = layers
        self._tables = tables
        self._sessions = sessions
        self._plans = plans
        self._compute = compute
        self._command = command

    @property
    def num_blocks(self) -> int:
        """Device blocks with a publication, of all layer groups."""
        return sum(map(len, self._tables.publications))

    @property
    def is_watched(self) -> bool:
        """Whether a file tier writes and loads blocks."""
        return self._plans.reused is not None

    def watch_reuse(self, on_reuse: Callable[[], None]) -> None:
        """Note from now on which prefixes new sequences find. ``on_reuse`` is called, inside a
        command, when ``take_reused`` may have more.
        """
        with self._command.lock, self._command("watch_reuse"):
            reused = self._plans.reused = ReusedBlocks(self._tables, on_reuse)
            self._tables.publications[0].on_keep = reused.published

    def take_reused(self) -> list[ReusedPrefix]:
        """The prefixes that were noted, each once."""
        with self._command.lock, self._command("take_reused"):
            return [] if self._plans.reused is None else self._plans.reused.take()

    def drop_reused(self, tenant: str | None) -> None:
        """Drop the prefixes that were noted of a tenant, or with None of all."""
        with self._command.lock, self._command("drop_reused"):
            if self._plans.reused is not None:
                self._plans.reused.drop(tenant)

    def read(self, block: int, generation: int) -> torch.Tensor | None:
        """All layers of a published device block, [num_layers, 1, ...] as of
        ``Executor.read_blocks``; None when it is not published any more, or of another generation.
        """
        with self._command.lock, self._command("read_published"):
            is_present = self._tables.generations[_DEVICE][block] == generation
            if not is_present or not self._tables.publications[0].published[block]:
                return None
            full = np.array([self._tables.block_size_tokens])
            return self._compute.read(_DEVICE, np.array([block], np.int32), self._layers, full)

    def scope_of(self, session_id: int) -> tuple[str, str]:
        """Tenant and namespace of a session. Raises SessionExpiredError, InvalidRequestError."""
        with self._command.lock, self._command("scope_of"):
            session = self._sessions.get(session_id)
            require(session.namespace is not None, "must say the namespace", "grant.namespace")
            return session.tenant, session.namespace or ""
