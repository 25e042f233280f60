"""Planted faults of the core, each a small lie about one thing that always holds.

Each takes pytest's monkeypatch and plants itself for one test.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from control_plane.blocks.block_store import ENDED, BlockStore
from control_plane.blocks.eviction import LeastRecentlyUsed
from control_plane.planning import planner, publish, receipts
from control_plane.planning.sequence import Sequence


def publish_before_receipt(patch: pytest.MonkeyPatch) -> None:
    """Slots count as written as soon as they are scheduled."""
    row = planner.Planner._row

    def early(self: planner.Planner, sequence: Sequence, num_tokens: int) -> None:
        row(self, sequence, num_tokens)
        sequence.num_written = sequence.num_scheduled
        self._pool.announce(self._session.tenant, receipts.publish(self._session, sequence))

    patch.setattr(planner.Planner, "_row", early)


def retirement_skipped(patch: pytest.MonkeyPatch) -> None:
    """A freed block is free at once, whatever still runs."""
    patch.setattr(BlockStore, "touched_until", lambda self, blocks, session_id, plan: None)


def fence_ignored(patch: pytest.MonkeyPatch) -> None:
    """An ended session's blocks are free before its data planes have fenced it."""

    def release(self: BlockStore, blocks: Iterable[int], session_id: int, plan: int) -> int:
        released = original(self, blocks, session_id, plan)
        if plan == ENDED:
            self.session_fenced(session_id)
        return released

    original = BlockStore.release
    patch.setattr(BlockStore, "release", release)


def copy_on_write_skipped(patch: pytest.MonkeyPatch) -> None:
    """A shared block is written where it stands."""
    patch.setattr(BlockStore, "is_writable", lambda self, block: True)


def generation_not_bumped(patch: pytest.MonkeyPatch) -> None:
    """A block that is allocated again keeps its generation."""

    def allocate(self: BlockStore, session_id: int, num_blocks: int) -> list[int]:
        blocks = original(self, session_id, num_blocks)
        for block in blocks:
            self.generation[block] = max(1, self.generation[block] - 1)
        return blocks

    original = BlockStore.allocate
    patch.setattr(BlockStore, "allocate", allocate)


def eviction_head_first(patch: pytest.MonkeyPatch) -> None:
    """The block cached last is evicted first."""

    def pop(self: Any) -> int:
        block: int = self._blocks.popitem(last=True)[0]
        return block

    patch.setattr(LeastRecentlyUsed, "pop", pop)
    patch.setattr(LeastRecentlyUsed, "__iter__", lambda self: reversed(self._blocks))


def reference_leaked(patch: pytest.MonkeyPatch) -> None:
    """The last block of a table keeps its reference when the table goes."""

    def release(self: BlockStore, blocks: Iterable[int], session_id: int, plan: int) -> int:
        return original(self, list(blocks)[1:], session_id, plan)

    original = BlockStore.release
    patch.setattr(BlockStore, "release", release)


def pins_let_go_early(patch: pytest.MonkeyPatch) -> None:
    """A transfer's source is not held until the plan has run."""

    def transfer(self: planner.Planner, *args: Any) -> None:
        original(self, *args)
        tier, block = self._pins.pop()
        tier.unpin([block])

    original = planner.Planner._transfer
    patch.setattr(planner.Planner, "_transfer", transfer)


def reused_blocks_published(patch: pytest.MonkeyPatch) -> None:
    """A freed sequence's blocks are published for it though its session allocated them again."""
    patch.setattr(publish, "_num_still_there", lambda session, sequence, num: num)


QUICK = (copy_on_write_skipped, reference_leaked, retirement_skipped, generation_not_bumped)
SLOW = (
    publish_before_receipt,
    fence_ignored,
    eviction_head_first,
    pins_let_go_early,
    reused_blocks_published,
)
