"""The blocks of one tier of a pool: who holds each, who may still touch it, and who gets it next.

Every block is in exactly one state:

    FREE ──take──► HELD ──the last table drops it──► PINNED    while a transfer reads it
     ▲              ▲                                  │ the transfer has run
     │              │ share (a prefix hit)             ▼
     │              ├────────────────────────────── LIMBO      while an unfinished plan may touch it
     │              │                                  │ its fences are lifted
     ├── not published ◄───────────────────────────────┤
     │              │                                  ▼
     │              └────────────────────────────── CACHED     published: the next to be evicted

- ``tables[b]``: table entries that name it, over all sessions; ``pins[b]``: unreceipted transfers
  that read it.
- ``fences[b]``: {session: plan}: until that plan has run, the session's resident tables may still
  name the block. A fence does not stop its own session, whose plans run in order: its limbo is
  handed back to it at once, to others only when lifted.

Invariant: states, counts and containers agree for every block; a cached block comes out of the
policy before its cached ancestors. All operations are O(blocks named in the call); nothing scans
the tier. Callers check for room first; nothing here fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from control_plane.eviction import EvictionPolicy, LeastRecentlyUsed
from control_plane.model import BlockRef, PoolCounters, Tier
from control_plane.prefix_index import NO_BLOCK, Entry, PrefixIndex

FREE, CACHED, LIMBO, PINNED, HELD = range(5)

# A fence that no receipt lifts: only the data planes' word that they have quit the session.
ENDED: Final = 2**63


class OwnLimbo:
    """Limbo blocks that only one session's plans may still touch: it may have them back at once."""

    __slots__ = ("published", "unpublished")

    def __init__(self) -> None:
        self.unpublished: dict[int, None] = {}
        self.published: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.unpublished) + len(self.published)


class BlockTier:
    """All blocks of one tier."""

    __slots__ = (
        "_fenced",
        "_limbo",
        "counters",
        "entries",
        "fences",
        "free",
        "generation",
        "index",
        "num_blocks",
        "num_in",
        "pins",
        "policy",
        "state",
        "tables",
        "tier",
    )

    def __init__(
        self, tier: Tier, generations: list[int], index: PrefixIndex, counters: PoolCounters
    ) -> None:
        """``generations[b]``: the last life of block b, 0 if it was never handed out."""
        num_blocks = len(generations)
        self.tier = tier
        self.num_blocks = num_blocks
        self.generation = generations
        self.index = index
        self.tables = [0] * num_blocks
        self.pins = [0] * num_blocks
        self.entries: list[Entry | None] = [None] * num_blocks
        self.fences: list[dict[int, int] | None] = [None] * num_blocks
        self.state = [FREE] * num_blocks
        self.num_in = [num_blocks, 0, 0, 0, 0]
        self.free = list(range(num_blocks - 1, -1, -1))
        self.policy: EvictionPolicy = LeastRecentlyUsed()
        self.counters = counters
        self._limbo: dict[int, OwnLimbo] = {}
        # Per session and plan, the blocks fenced by it in the order of their drops, tails first.
        self._fenced: dict[int, dict[int, list[int]]] = {}

    def restore(self, published: Iterable[tuple[int, Entry]]) -> None:
        """Make blocks of a fresh tier cached, the next to be evicted first."""
        for block, entry in published:
            entry.block = block
            self.entries[block] = entry
            self.state[block] = CACHED
            self.num_in[FREE] -= 1
            self.num_in[CACHED] += 1
            self.policy.add(block)
        self.free = [b for b in self.free if self.state[b] == FREE]

    # What there is

    def ref(self, block: int) -> BlockRef:
        """The block by its full name."""
        return BlockRef(self.tier, block, self.generation[block])

    def num_held(self) -> int:
        """Blocks that a table or a transfer names."""
        return self.num_in[HELD] + self.num_in[PINNED]

    def num_obtainable(self, session_id: int) -> int:
        """Blocks that ``take`` could hand to the session now."""
        return self.num_in[FREE] + self.num_in[CACHED] + self._num_own_limbo(session_id)

    def num_pending(self, session_id: int) -> int:
        """Blocks that come back to the session with receipts and fences."""
        return self.num_in[PINNED] + self.num_in[LIMBO] - self._num_own_limbo(session_id)

    def is_obtainable(self, block: int, session_id: int) -> bool:
        """Whether ``num_obtainable`` counts the block."""
        state = self.state[block]
        return state in (FREE, CACHED) or (state == LIMBO and self._owner(block) == session_id)

    def is_writable(self, block: int) -> bool:
        """Whether its one table may write it: nothing else names it and it is not published."""
        return self.tables[block] + self.pins[block] == 1 and self.entries[block] is None

    def fenced_by(self, session_id: int, plan: int) -> list[int]:
        """Blocks that were fenced until the session's plan has run."""
        return self._fenced.get(session_id, {}).get(plan, [])

    def own_limbo(self) -> dict[int, set[int]]:
        """For each session the limbo blocks that it may have back at once."""
        return {i: {*own.unpublished, *own.published} for i, own in self._limbo.items()}

    # A block's life

    def take(self, session_id: int, num_blocks: int) -> list[int]:
        """Hand out blocks, each with a new generation and named by one table."""
        blocks: list[int] = []
        for _ in range(num_blocks):
            if self.free:
                block = self.free.pop()
                self.num_in[FREE] -= 1
            else:
                block = self._reclaim(session_id)
            self.generation[block] += 1
            self.tables[block] = 1
            self.state[block] = HELD
            blocks.append(block)
        self.num_in[HELD] += num_blocks
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more table names each block; those that hold a prefix leave the cache or limbo."""
        for block in blocks:
            self.tables[block] += 1
            if self.tables[block] == 1:
                self._leave(block)
                self._enter(block)

    def publish(self, block: int, entry: Entry) -> None:
        """From now on the held block is found by others as ``entry``."""
        entry.block = block
        self.entries[block] = entry

    def drop(self, blocks: Iterable[int], session_id: int, plan: int) -> int:
        """One table less names each block, once the session's ``plan`` has run.

        Returns how many blocks no table names now.
        """
        num_released = 0
        for block in blocks:
            self.tables[block] -= 1
            # A block without a table is HELD no more, so leaving before fencing is right for both.
            if self.tables[block] == 0:
                self._leave(block)
                self._fence(block, session_id, plan)
                self._enter(block)
                num_released += 1
            else:
                self._fence(block, session_id, plan)
        return num_released

    def pin(self, block: int) -> None:
        """A transfer will read the block."""
        self.pins[block] += 1
        if self.tables[block] == 0 and self.pins[block] == 1:
            self._leave(block)
            self._enter(block)

    def unpin(self, blocks: Iterable[int]) -> None:
        """For each block a transfer less will read it. Tails first."""
        released: list[int] = []
        for block in blocks:
            self.pins[block] -= 1
            if self.tables[block] + self.pins[block] == 0:
                self._leave(block)
                released.append(block)
        self._enter_all(released)

    def fence(self, blocks: Iterable[int], session_id: int, plan: int) -> None:
        """The session may touch these blocks, held or pinned, until ``plan`` has run."""
        for block in blocks:
            self._fence(block, session_id, plan)

    def lift(self, session_id: int, plan: int) -> None:
        """The session's plans up to ``plan`` have run (ENDED: it touches no block again)."""
        by_plan = self._fenced.get(session_id)
        if by_plan is None:
            return
        released: list[int] = []
        for number in [n for n in by_plan if n <= plan]:
            for block in by_plan.pop(number):
                fences = self.fences[block]
                if fences is None or fences.get(session_id) != number:
                    continue  # fenced again by a later plan
                if self.state[block] == LIMBO:
                    self._leave(block)
                    released.append(block)
                del fences[session_id]
                if not fences:
                    self.fences[block] = None
        if not by_plan:
            del self._fenced[session_id]
        self._enter_all(released)

    # Containers of the states

    def _reclaim(self, session_id: int) -> int:
        own = self._limbo.get(session_id)
        if own is not None and own.unpublished:
            block = own.unpublished.popitem()[0]
            self.num_in[LIMBO] -= 1
        elif len(self.policy):
            block = self.policy.pop()
            self.num_in[CACHED] -= 1
        else:
            own = self._limbo[session_id]
            block = own.published.popitem(last=False)[0]
            self.num_in[LIMBO] -= 1
        if own is not None and not own:
            del self._limbo[session_id]
        entry = self.entries[block]
        if entry is not None:
            self.entries[block] = None
            self.index.evict(entry)
            self.counters.num_evictions += 1
        return block

    def _leave(self, block: int) -> None:
        state = self.state[block]
        self.num_in[state] -= 1
        if state == CACHED:
            self.policy.remove(block)
        elif state == LIMBO:
            owner = self._owner(block)
            if owner is not None:
                own = self._limbo[owner]
                if self.entries[block] is None:
                    del own.unpublished[block]
                else:
                    del own.published[block]
                if not own:
                    del self._limbo[owner]

    def _enter(self, block: int) -> None:
        if self.tables[block]:
            state = HELD
        elif self.pins[block]:
            state = PINNED
        elif self.fences[block] is not None:
            state = LIMBO
            owner = self._owner(block)
            if owner is not None:
                own = self._limbo.setdefault(owner, OwnLimbo())
                if self.entries[block] is None:
                    own.unpublished[block] = None
                else:
                    own.published[block] = None
        elif self.entries[block] is not None:
            state = CACHED
            self.policy.add(block)
        else:
            state = FREE
            self.free.append(block)
        self.state[block] = state
        self.num_in[state] += 1

    def _enter_all(self, blocks: list[int]) -> None:
        """Enter blocks that became quiet, then see that their cached ancestors outlive them.

        Blocks come tails first, so inside a run of one prefix the order is right; one walk up from
        the run's head does the rest.
        """
        head: Entry | None = None
        for block in blocks:
            self._enter(block)
            if self.state[block] == CACHED:
                entry = self.entries[block]
                if head is not None and head.parent is not entry:
                    self._touch_ancestors(head)
                head = entry
        if head is not None:
            self._touch_ancestors(head)

    def _touch_ancestors(self, entry: Entry) -> None:
        ancestor = entry.parent
        while ancestor is not None:
            if ancestor.block != NO_BLOCK and self.state[ancestor.block] == CACHED:
                self.policy.touch(ancestor.block)
            ancestor = ancestor.parent

    def _fence(self, block: int, session_id: int, plan: int) -> None:
        fences = self.fences[block]
        if fences is None:
            fences = self.fences[block] = {}
        if fences.get(session_id) == plan:
            return
        fences[session_id] = plan
        self._fenced.setdefault(session_id, {}).setdefault(plan, []).append(block)

    def _owner(self, block: int) -> int | None:
        """The session that alone fences the block."""
        fences = self.fences[block]
        if fences is None or len(fences) != 1:
            return None
        return next(iter(fences))

    def _num_own_limbo(self, session_id: int) -> int:
        own = self._limbo.get(session_id)
        return 0 if own is None else len(own)
