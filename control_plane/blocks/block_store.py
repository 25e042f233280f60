"""The blocks of one tier of a pool: references, pins, what may still touch each, and reuse.

Every block is in exactly one state:

    FREE ──allocate──► HELD ──its last reference is released──► PINNED   while a transfer reads it
     ▲                  ▲                                         │ the transfer has run
     │                  │ share (a prefix hit)                    ▼
     │                  ├─────────────────────────────────── RETIRED   while an unfinished plan may
     │                  │                                         │    touch it
     │                  │                                         │ those plans have finished
     ├── not published ◄──────────────────────────────────────────┤
     │                  │                                         ▼
     │                  └─────────────────────────────────── CACHED    published: evicted when free
     │                                                            │    blocks run short
     └──────────────────────── allocate ◄─────────────────────────┘

- ``ref_count[b]``: table entries that refer to it, over all sessions; ``pins[b]``: unfinished
  transfers that read it.
- ``retire_after[b]``: {session: plan}: until that plan has finished, the session's block tables at
  the data plane may still refer to the block. A session whose plans alone a block waits for can
  allocate it at once, since its plans run in order; others only when all plans have finished.
  Blocks share these dicts, so they are replaced and never modified.

Invariant: states, counts and containers agree for every block; a cached block is evicted before its
cached ancestors. Operations take time linear in the blocks of the call, plus the length of the
prefixes that become cached; only ``restore`` scans the store. Callers check for room first and pass
no block twice in a call, except to ``unpin``; nothing here fails. Blocks, sessions and plans are
ints, prefixes are bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

from control_plane.blocks.eviction import EvictionPolicy, LeastRecentlyUsed
from control_plane.blocks.prefix_index import NO_BLOCK, Entry, PrefixIndex

FREE, CACHED, RETIRED, PINNED, HELD = range(5)

# Above every plan's number: blocks that wait for the fence of an ended session.
ENDED: Final = 2**63


class OwnRetired:
    """Retired blocks that only one session's plans may touch: it can allocate them at once.

    ``plain`` ones are reused first. ``kept`` ones hold a published prefix, or may soon: they are
    reused last.
    """

    __slots__ = ("kept", "plain")

    def __init__(self) -> None:
        self.plain: dict[int, None] = {}
        self.kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.plain) + len(self.kept)


class BlockStore:
    """All blocks of one tier."""

    __slots__ = (
        "_own_retired",
        "_waiting",
        "free",
        "generation",
        "index",
        "num_blocks",
        "num_evictions",
        "num_in",
        "pins",
        "policy",
        "ref_count",
        "retire_after",
        "state",
    )

    def __init__(self, num_blocks: int, block_size_tokens: int, generation: list[int]) -> None:
        """``generation[b]``: how often block b was allocated. The list is kept and updated."""
        self.num_blocks = num_blocks
        self.generation = generation
        self.index = PrefixIndex(num_blocks, block_size_tokens)
        self.ref_count = [0] * num_blocks
        self.pins = [0] * num_blocks
        self.retire_after: list[dict[int, int] | None] = [None] * num_blocks
        self.state = bytearray([FREE]) * num_blocks
        self.num_in = [num_blocks, 0, 0, 0, 0]
        self.num_evictions = 0
        self.free = list(range(num_blocks - 1, -1, -1))
        self.policy: EvictionPolicy = LeastRecentlyUsed()
        self._own_retired: dict[int, OwnRetired] = {}
        # {session: {plan: blocks that wait for it, in the order of release, tails first}}
        self._waiting: dict[int, dict[int, list[int]]] = {}

    def restore(self, blocks: list[int]) -> None:
        """Make free blocks, just entered in the index, cached; the first is evicted first."""
        for block in blocks:
            self.state[block] = CACHED
            self.policy.add(block)
        self.num_in[FREE] -= len(blocks)
        self.num_in[CACHED] += len(blocks)
        self.free = [b for b in self.free if self.state[b] == FREE]

    # Queries

    def generations(self, blocks: Iterable[int]) -> list[int]:
        """The generation of each block."""
        return list(map(self.generation.__getitem__, blocks))

    def num_held(self) -> int:
        """Blocks that a table or a transfer refers to."""
        return self.num_in[HELD] + self.num_in[PINNED]

    def num_obtainable(self, session_id: int) -> int:
        """Blocks that the session could allocate now."""
        return self.num_in[FREE] + self.num_in[CACHED] + self._num_own_retired(session_id)

    def num_pending(self, session_id: int) -> int:
        """Blocks that the session can allocate once receipts and fences have come."""
        return self.num_in[PINNED] + self.num_in[RETIRED] - self._num_own_retired(session_id)

    def num_obtainable_of(self, blocks: list[int], session_id: int) -> int:
        """How many of ``blocks`` are among those that ``num_obtainable`` counts."""
        states = bytes(map(self.state.__getitem__, blocks))
        num = states.count(FREE) + states.count(CACHED)
        if RETIRED in states:
            after, state = self.retire_after, self.state
            num += sum(state[b] == RETIRED and _owner(after[b]) == session_id for b in blocks)
        return num

    def is_writable(self, block: int) -> bool:
        """Whether one table refers to the block, no transfer reads it, and it is not published."""
        return self.ref_count[block] + self.pins[block] == 1 and self.index.entries[block] is None

    def waiting(self, session_id: int, plan: int) -> list[int]:
        """Blocks released to wait for the session's plan; some may have been reused since."""
        return self._waiting.get(session_id, {}).get(plan, [])

    def own_retired(self) -> dict[int, OwnRetired]:
        """For each session, the retired blocks that it can allocate at once."""
        return self._own_retired

    # Changes

    def allocate(self, session_id: int, num_blocks: int) -> list[int]:
        """Blocks for one table, each of a new generation."""
        split = max(0, len(self.free) - num_blocks)
        blocks = self.free[split:]
        del self.free[split:]
        blocks.reverse()
        self.num_in[FREE] -= len(blocks)
        if len(blocks) < num_blocks:
            blocks += self._reclaim(session_id, num_blocks - len(blocks))
        generation, ref_count, state = self.generation, self.ref_count, self.state
        for block in blocks:
            generation[block] += 1
            ref_count[block] = 1
            state[block] = HELD
        self.num_in[HELD] += num_blocks
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a table's reference to each block; idle ones, which hold a prefix, become held."""
        ref_count, state = self.ref_count, self.state
        idle = [block for block in blocks if not ref_count[block]]
        for block in blocks:
            ref_count[block] += 1
        if idle:
            self._leave(idle)
            for block in idle:
                state[block] = HELD
            self.num_in[HELD] += len(idle)

    def publish(
        self, root: bytes, parent: int, token_ids: bytes, blocks: list[int]
    ) -> tuple[list[int], list[int], int]:
        """Let others find ``blocks``, which are not free; see ``PrefixIndex.publish``."""
        entered, refilled, last = self.index.publish(root, parent, token_ids, blocks)
        if self.num_in[RETIRED] and RETIRED in map(self.state.__getitem__, entered):
            self.keep(entered[::-1])
        return entered, refilled, last

    def keep(self, blocks: list[int]) -> None:
        """Reuse the retired ones last: they hold a prefix, or may soon. Tails first."""
        for block in blocks:
            owner = _owner(self.retire_after[block]) if self.state[block] == RETIRED else None
            if owner is not None and block in self._own_retired[owner].plain:
                del self._own_retired[owner].plain[block]
                self._own_retired[owner].kept[block] = None

    def release(self, blocks: list[int], session_id: int, plan: int) -> int:
        """Remove a table's reference to each block, which the session may touch until its
        ``plan`` has finished.

        Tails of prefixes come first. Returns how many blocks no table refers to any more.
        """
        ref_count = self.ref_count
        for block in blocks:
            ref_count[block] -= 1
        released = [block for block in blocks if not ref_count[block]]
        self.touched_until(blocks, session_id, plan)
        self._leave(released)
        self._enter(released)
        return len(released)

    def pin(self, block: int) -> None:
        """A transfer will read the block."""
        self.pins[block] += 1
        if self.ref_count[block] == 0 and self.pins[block] == 1:
            self._leave([block])
            self._enter([block])

    def unpin(self, blocks: Iterable[int]) -> None:
        """Remove a transfer's pin from each block. Tails first."""
        released: list[int] = []
        for block in blocks:
            self.pins[block] -= 1
            if self.ref_count[block] + self.pins[block] == 0:
                released.append(block)
        self._leave(released)
        self._enter(released)

    def touched_until(self, blocks: list[int], session_id: int, plan: int) -> None:
        """The session may touch these blocks, held or pinned, until ``plan`` has finished."""
        retire_after = self.retire_after
        alone = {session_id: plan}
        known: dict[int, int] | None = None
        merged = alone
        waiting: list[int] = []
        for block in blocks:
            after = retire_after[block]
            if after is not known:
                known = after
                if after is None:
                    merged = alone
                elif after.get(session_id) == plan:
                    merged = after
                else:
                    merged = {**after, session_id: plan}
            if merged is not after:
                retire_after[block] = merged
                waiting.append(block)
        if waiting:
            self._waiting.setdefault(session_id, {}).setdefault(plan, []).extend(waiting)

    def plans_finished(self, session_id: int, plan: int) -> None:
        """The session's plans up to ``plan`` have run."""
        by_plan = self._waiting.get(session_id)
        if by_plan is None:
            return
        retire_after, state = self.retire_after, self.state
        released: list[int] = []
        for number in [n for n in by_plan if n <= plan]:
            # The others have since come to wait for a later plan of the session.
            blocks = [
                block
                for block in by_plan.pop(number)
                if (after := retire_after[block]) is not None and after.get(session_id) == number
            ]
            retired = [block for block in blocks if state[block] == RETIRED]
            self._leave(retired)
            released += retired
            known, others = None, None
            for block in blocks:
                after = retire_after[block]
                if after is not known:
                    known, others = after, _without(after, session_id)
                retire_after[block] = others
        if not by_plan:
            del self._waiting[session_id]
        self._enter(released)

    def session_fenced(self, session_id: int) -> None:
        """The ended session no longer touches any block."""
        self.plans_finished(session_id, ENDED)

    # Containers of the states

    def _reclaim(self, session_id: int, num_blocks: int) -> list[int]:
        """Blocks that are not free: the session's own plain retired ones, then cached ones, then
        its own kept ones.
        """
        own = self._own_retired.get(session_id) or OwnRetired()
        num_plain = min(num_blocks, len(own.plain))
        blocks = [own.plain.popitem()[0] for _ in range(num_plain)]
        num_cached = min(num_blocks - len(blocks), len(self.policy))
        pop = self.policy.pop
        evicted = [pop() for _ in range(num_cached)]
        num_kept = num_blocks - len(blocks) - num_cached
        evicted += [own.kept.popitem(last=False)[0] for _ in range(num_kept)]
        self.num_in[RETIRED] -= num_plain + num_kept
        self.num_in[CACHED] -= num_cached
        if num_plain + num_kept and not own:
            del self._own_retired[session_id]
        self.num_evictions += self.index.evict(evicted)
        return blocks + evicted

    def _leave(self, blocks: list[int]) -> None:
        """Remove blocks from the counts and containers of their states."""
        states = bytes(map(self.state.__getitem__, blocks))
        for state in set(states):
            self.num_in[state] -= states.count(state)
        if CACHED in states:
            for block, state in zip(blocks, states, strict=True):
                if state == CACHED:
                    self.policy.remove(block)
        if RETIRED in states:
            self._leave_retired(
                [block for block, state in zip(blocks, states, strict=True) if state == RETIRED]
            )

    def _leave_retired(self, blocks: list[int]) -> None:
        known: dict[int, int] | None = None
        own: OwnRetired | None = None
        owners: set[int] = set()
        for block in blocks:
            after = self.retire_after[block]
            if after is not known:
                known, owner = after, _owner(after)
                own = None
                if owner is not None:
                    own = self._own_retired[owner]
                    owners.add(owner)
            if own is not None and block in own.plain:
                del own.plain[block]
            elif own is not None:
                del own.kept[block]
        for owner in owners:
            if not self._own_retired[owner]:
                del self._own_retired[owner]

    def _enter(self, blocks: list[int]) -> None:
        """Put blocks that no table refers to in their states; tails first.

        Cached ancestors of blocks that become cached must be evicted after them. Within a run of
        one prefix the order is right already; a walk up from the run's head sees to the others.
        """
        pins, retire_after, state = self.pins, self.retire_after, self.state
        entries = self.index.entries
        head: Entry | None = None
        heads: list[Entry] = []
        known: dict[int, int] | None = None
        own: OwnRetired | None = None
        for block in blocks:
            entry, after = entries[block], retire_after[block]
            if pins[block]:
                state[block] = PINNED
            elif after is not None:
                state[block] = RETIRED
                if after is not known:
                    known, owner = after, _owner(after)
                    own = (
                        None if owner is None else self._own_retired.setdefault(owner, OwnRetired())
                    )
                if own is not None and entry is None:
                    own.plain[block] = None
                elif own is not None:
                    own.kept[block] = None
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

    def _num_own_retired(self, session_id: int) -> int:
        own = self._own_retired.get(session_id)
        return 0 if own is None else len(own)


def _owner(after: dict[int, int] | None) -> int | None:
    """The session, if a block waits for only one; else None."""
    return next(iter(after)) if after is not None and len(after) == 1 else None


def _without(after: dict[int, int] | None, session_id: int) -> dict[int, int] | None:
    """``after`` without the session; None when no other is left."""
    return {i: plan for i, plan in (after or {}).items() if i != session_id} or None
