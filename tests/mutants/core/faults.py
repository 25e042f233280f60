"""Faults of the core, each of which breaks one thing that always holds.

Each takes pytest's monkeypatch and plants itself for one test.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from control_plane.blocks.block_store import ENDED, BlockStore
from control_plane.blocks.eviction import LeastRecentlyUsed
from control_plane.blocks.prefix_index import PrefixIndex
from control_plane.planning import core
from control_plane.planning.pools.publications import root_of
from control_plane.planning.sequence import Sequence
from control_plane.planning.steps import planner, publish, receipts
from control_plane.planning.steps.draft import Draft
from control_plane.planning.steps.failures import Failures
from control_plane.planning.steps.numbering import Numbering
from kvplane import columns
from kvplane.columns import INT64
from kvplane.v1 import control_pb2 as cpb


def publish_before_receipt(patch: pytest.MonkeyPatch) -> None:
    """Slots count as written as soon as they are scheduled."""

    def early(self: Draft, sequence: Sequence, num_tokens: int) -> None:
        schedule(self, sequence, num_tokens)
        sequence.num_written = sequence.num_scheduled
        self.pool.announce(self.session.root, receipts.publish(self.session, sequence))

    schedule = Draft.schedule
    patch.setattr(Draft, "schedule", early)


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
    """A shared block is written in place."""
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


def pins_released_early(patch: pytest.MonkeyPatch) -> None:
    """A transfer's source does not stay pinned until the plan has run."""

    def transfer(self: Draft, *args: Any) -> None:
        original(self, *args)
        tier, block = self._pins.pop()
        tier.unpin([block])

    original = Draft.transfer
    patch.setattr(Draft, "transfer", transfer)


def reused_blocks_published(patch: pytest.MonkeyPatch) -> None:
    """A freed sequence's blocks are published for it though its session allocated them again."""
    patch.setattr(publish, "_num_still_there", lambda session, sequence, num: num)


def duplicates_run_again(patch: pytest.MonkeyPatch) -> None:
    """A request whose number was used runs once more."""
    patch.setattr(Numbering, "repeated", lambda self, number, content: None)


def refused_numbers_stay_free(patch: pytest.MonkeyPatch) -> None:
    """A request that fails as a whole does not use its number."""

    def remember(self: Numbering, content: bytes, message: Any, error: Any = None) -> None:
        if error is None:
            original(self, content, message)
        else:
            self.last -= 1

    original = Numbering.remember
    patch.setattr(Numbering, "remember", remember)


def positions_ignored(patch: pytest.MonkeyPatch) -> None:
    """Tokens are appended where the sequence ends, whatever position the caller gave."""

    def moved(draft: Draft, message: cpb.Append, failures: Failures) -> cpb.AppendResult:
        live = draft.session.sequences
        ids = columns.read(INT64, message.sequence_ids, "sequence_ids")
        ends = [live[i].num_scheduled if i in live else 0 for i in ids]
        message.first_positions = columns.pack(INT64, ends)
        return original(draft, message, failures)

    original = planner.append
    patch.setattr(planner, "append", moved)


def namespaces_shared(patch: pytest.MonkeyPatch) -> None:
    """A tenant's namespaces share their prefixes."""
    patch.setattr(core, "root_of", lambda print_, tenant, namespace: root_of(print_, tenant, ""))


def new_parents_kept_quiet(patch: pytest.MonkeyPatch) -> None:
    """Data planes do not learn that a published block follows another one now."""
    patch.setattr(PrefixIndex, "below", lambda self, blocks: [])


QUICK = (
    copy_on_write_skipped,
    reference_leaked,
    retirement_skipped,
    generation_not_bumped,
    duplicates_run_again,
    positions_ignored,
)
SLOW = (
    refused_numbers_stay_free,
    publish_before_receipt,
    fence_ignored,
    eviction_head_first,
    pins_released_early,
    reused_blocks_published,
    namespaces_shared,
    new_parents_kept_quiet,
)
