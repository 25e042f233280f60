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
  handed back to it at once, to others only when lifted. Blocks share these dicts, so a change is
  a new dict.

Invariant: states, counts and containers agree for every block; a cached block comes out of the
policy before its cached ancestors. All operations are O(blocks named in the call); nothing scans
the tier, and what is the same for all blocks of a call is done once. Callers check for room first
and name no block twice in a call; nothing here fails.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from control_plane.blocks.eviction import EvictionPolicy, LeastRecentlyUsed
from control_plane.blocks.prefix_index import NO_BLOCK, Entry, PrefixIndex
from control_plane.planning.model import BlockRef, Blocks, PoolCounters, Tier

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
        self.state = bytearray([FREE]) * num_blocks
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

    def refs(self, blocks: list[int]) -> Blocks:
        """The blocks by their full names."""
        return Blocks(self.tier, blocks, list(map(self.generation.__getitem__, blocks)))

    def num_held(self) -> int:
        """Blocks that a table or a transfer names."""
        return self.num_in[HELD] + self.num_in[PINNED]

    def num_obtainable(self, session_id: int) -> int:
        """Blocks that ``take`` could hand to the session now."""
        return self.num_in[FREE] + self.num_in[CACHED] + self._num_own_limbo(session_id)

    def num_pending(self, session_id: int) -> int:
        """Blocks that come back to the session with receipts and fences."""
        return self.num_in[PINNED] + self.num_in[LIMBO] - self._num_own_limbo(session_id)

    def num_obtainable_of(self, blocks: list[int], session_id: int) -> int:
        """How many of these ``num_obtainable`` counts."""
        states = bytes(map(self.state.__getitem__, blocks))
        num = states.count(FREE) + states.count(CACHED)
        if LIMBO in states:
            fences, state = self.fences, self.state
            num += sum(state[b] == LIMBO and _owner(fences[b]) == session_id for b in blocks)
        return num

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
        split = max(0, len(self.free) - num_blocks)
        blocks = self.free[split:]
        del self.free[split:]
        blocks.reverse()
        self.num_in[FREE] -= len(blocks)
        if len(blocks) < num_blocks:
            blocks += self._reclaim(session_id, num_blocks - len(blocks))
        generation, tables, state = self.generation, self.tables, self.state
        for block in blocks:
            generation[block] += 1
            tables[block] = 1
            state[block] = HELD
        self.num_in[HELD] += num_blocks
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more table names each block; those that hold a prefix leave the cache or limbo."""
        tables, state = self.tables, self.state
        idle = [block for block in blocks if not tables[block]]
        for block in blocks:
            tables[block] += 1
        if idle:
            self._leave(idle)
            for block in idle:
                state[block] = HELD
            self.num_in[HELD] += len(idle)

    def publish(self, entries: Iterable[Entry]) -> None:
        """From now on the entries' blocks, which are held, are found by others."""
        for entry in entries:
            self.entries[entry.block] = entry

    def drop(self, blocks: list[int], session_id: int, plan: int) -> int:
        """One table less names each block, once the session's ``plan`` has run.

        Returns how many blocks no table names now.
        """
        tables = self.tables
        for block in blocks:
            tables[block] -= 1
        released = [block for block in blocks if not tables[block]]
        self._fence(blocks, session_id, plan)
        self._leave(released)
        self._enter(released)
        return len(released)

    def pin(self, block: int) -> None:
        """A transfer will read the block."""
        self.pins[block] += 1
        if self.tables[block] == 0 and self.pins[block] == 1:
            self._leave([block])
            self._enter([block])

    def unpin(self, blocks: Iterable[int]) -> None:
        """For each block a transfer less will read it. Tails first."""
        released: list[int] = []
        for block in blocks:
            self.pins[block] -= 1
            if self.tables[block] + self.pins[block] == 0:
                released.append(block)
        self._leave(released)
        self._enter(released)

    def fence(self, blocks: list[int], session_id: int, plan: int) -> None:
        """The session may touch these blocks, held or pinned, until ``plan`` has run."""
        self._fence(blocks, session_id, plan)

    def lift(self, session_id: int, plan: int) -> None:
        """The session's plans up to ``plan`` have run (ENDED: it touches no block again)."""
        by_plan = self._fenced.get(session_id)
        if by_plan is None:
            return
        fences, state = self.fences, self.state
        released: list[int] = []
        for number in [n for n in by_plan if n <= plan]:
            # The rest is fenced again by a later plan.
            blocks = [
                block
                for block in by_plan.pop(number)
                if (fence := fences[block]) is not None and fence.get(session_id) == number
            ]
            limbo = [block for block in blocks if state[block] == LIMBO]
            self._leave(limbo)
            released += limbo
            known, others = None, None
            for block in blocks:
                fence = fences[block]
                if fence is not known:
                    known, others = fence, _without(fence, session_id)
                fences[block] = others
        if not by_plan:
            del self._fenced[session_id]
        self._enter(released)

    # Containers of the states

    def _reclaim(self, session_id: int, num_blocks: int) -> list[int]:
        """Blocks that are not free: the session's own limbo first if unpublished, else last."""
        own = self._limbo.get(session_id) or OwnLimbo()
        num_unpublished = min(num_blocks, len(own.unpublished))
        blocks = [own.unpublished.popitem()[0] for _ in range(num_unpublished)]
        num_cached = min(num_blocks - len(blocks), len(self.policy))
        pop = self.policy.pop
        evicted = [pop() for _ in range(num_cached)]
        num_published = num_blocks - len(blocks) - num_cached
        evicted += [own.published.popitem(last=False)[0] for _ in range(num_published)]
        self.num_in[LIMBO] -= num_unpublished + num_published
        self.num_in[CACHED] -= num_cached
        if num_unpublished + num_published and not own:
            del self._limbo[session_id]
        entries = self.entries
        self.index.evict(entry for block in evicted if (entry := entries[block]) is not None)
        for block in evicted:
            entries[block] = None
        self.counters.num_evictions += len(evicted)
        return blocks + evicted

    def _leave(self, blocks: list[int]) -> None:
        """Count blocks out of their states, and take them out of the states' containers."""
        states = bytes(map(self.state.__getitem__, blocks))
        for state in set(states):
            self.num_in[state] -= states.count(state)
        if CACHED in states:
            for block, state in zip(blocks, states, strict=True):
                if state == CACHED:
                    self.policy.remove(block)
        if LIMBO in states:
            self._leave_limbo(
                [block for block, state in zip(blocks, states, strict=True) if state == LIMBO]
            )

    def _leave_limbo(self, blocks: list[int]) -> None:
        known: dict[int, int] | None = None
        own: OwnLimbo | None = None
        owners: set[int] = set()
        for block in blocks:
            fence = self.fences[block]
            if fence is not known:
                known, owner = fence, _owner(fence)
                own = None
                if owner is not None:
                    own = self._limbo[owner]
                    owners.add(owner)
            if own is not None and self.entries[block] is None:
                del own.unpublished[block]
            elif own is not None:
                del own.published[block]
        for owner in owners:
            if not self._limbo[owner]:
                del self._limbo[owner]

    def _enter(self, blocks: list[int]) -> None:
        """Let blocks that no table names enter their states; tails first.

        Cached ancestors of those that enter the cache must outlive them. Inside a run of one
        prefix the order is right already; a walk up from the run's head does the rest.
        """
        pins, fences, entries, state = self.pins, self.fences, self.entries, self.state
        head: Entry | None = None
        heads: list[Entry] = []
        known: dict[int, int] | None = None
        own: OwnLimbo | None = None
        for block in blocks:
            entry, fence = entries[block], fences[block]
            if pins[block]:
                state[block] = PINNED
            elif fence is not None:
                state[block] = LIMBO
                if fence is not known:
                    known, own = fence, self._own_limbo(fence)
                if own is not None and entry is None:
                    own.unpublished[block] = None
                elif own is not None:
                    own.published[block] = None
            elif entry is not None:
                state[block] = CACHED
                self.policy.add(block)
                if head is not None and head.parent is not entry:
                    heads.append(head)
                head = entry
            else:
                state[block] = FREE
                self.free.append(block)
        states = bytes(map(state.__getitem__, blocks))
        for entered in set(states):
            self.num_in[entered] += states.count(entered)
        if head is not None:
            heads.append(head)
        for head in heads:
            self._touch_ancestors(head)

    def _touch_ancestors(self, entry: Entry) -> None:
        ancestor = entry.parent
        while ancestor is not None:
            if ancestor.block != NO_BLOCK and self.state[ancestor.block] == CACHED:
                self.policy.touch(ancestor.block)
            ancestor = ancestor.parent

    def _fence(self, blocks: list[int], session_id: int, plan: int) -> None:
        fences = self.fences
        alone = {session_id: plan}
        fenced: list[int] = []
        for block in blocks:
            fence = fences[block]
            if fence is None:
                fences[block] = alone
            elif fence.get(session_id) != plan:
                fences[block] = {**fence, session_id: plan}
            else:
                continue
            fenced.append(block)
        if fenced:
            self._fenced.setdefault(session_id, {}).setdefault(plan, []).extend(fenced)

    def _own_limbo(self, fence: dict[int, int]) -> OwnLimbo | None:
        """Where limbo blocks of this fence are kept for the session that may have them back."""
        owner = _owner(fence)
        return None if owner is None else self._limbo.setdefault(owner, OwnLimbo())

    def _num_own_limbo(self, session_id: int) -> int:
        own = self._limbo.get(session_id)
        return 0 if own is None else len(own)


def _owner(fence: dict[int, int] | None) -> int | None:
    """The session that alone fences a block."""
    return next(iter(fence)) if fence is not None and len(fence) == 1 else None


def _without(fence: dict[int, int] | None, session_id: int) -> dict[int, int] | None:
    """The fence with one session less, None when that was the last."""
    return {i: plan for i, plan in (fence or {}).items() if i != session_id} or None
