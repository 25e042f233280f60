"""Types of the native module; the headers in csrc/blocks describe what they do.

Columns are little-endian bytes, as on the wire. A refused item is returned as a failure and has
changed nothing.
"""

from collections.abc import Sequence
from typing import Final, TypedDict, Unpack

_Failure = tuple[int, int, int, int, int]
"""Item, code, and three values a, b, c whose meaning depends on the code:

LATER, NEVER        a: blocks needed, b: blocks available, c: tier
LATER_HEADROOM      as LATER; there would be room but for the headroom
LATER_QUOTA, NEVER_QUOTA   as LATER and NEVER, of the blocks that the owner may hold
NOT_FOUND, EXISTS, BAD_ID, BUSY   a: the id
SWAPPED             a: the id, b: the tier that it is on
POSITION            a: the id, b: the next handle's position, c: what was given
NEGATIVE            a: 0 num_slots, 1 token_ids, 2 num_lookahead_slots, 3 num_tokens
TOO_MANY_SEQUENCES  a: the most
NOT_KNOWN           a: the id, b: tokens known, c: the first position given
OTHER_ADMISSION     a: the id, b: the step that admitted it, c: the step given
TOO_LONG            a: the id, b: its positions, c: what was given
TRIMMED             a: the id, b: the first position still held, c: what was given
OTHER_TOKENS        a: the id, b: the position
BEYOND_SLOTS        a: the id, b: its slots
TOO_MANY_ENTRIES, TOO_MANY_PINNED   a: the most, b: now, c: more
CHECKPOINT          a: the id, b: where its slots begin, c: where they end
"""

_Run = tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]
"""Published blocks of one root: the root, and columns of indices, generations, indices and
generations of their parents, hashes, token ids."""

_Done = bytes | tuple[int, int, int]
"""Of an append: blocks of each table. Of an admission: cached tokens, blocks, scheduled tokens."""

LATER: Final = 2
NEVER: Final = 3
LATER_HEADROOM: Final = 4
LATER_QUOTA: Final = 5
NEVER_QUOTA: Final = 6
NOT_FOUND: Final = 10
EXISTS: Final = 11
BAD_ID: Final = 12
BUSY: Final = 13
SWAPPED: Final = 14
POSITION: Final = 15
NEGATIVE: Final = 16
TOO_MANY_SEQUENCES: Final = 17
NOT_KNOWN: Final = 18
OTHER_ADMISSION: Final = 19
TOO_LONG: Final = 20
TRIMMED: Final = 21
OTHER_TOKENS: Final = 22
BEYOND_SLOTS: Final = 23
TOO_MANY_ENTRIES: Final = 24
TOO_MANY_PINNED: Final = 25
CHECKPOINT: Final = 26

FAMILY_STARTED: Final = 1
"""It holds device blocks from now on: it was admitted, or swapped in."""
FAMILY_LEFT_DEVICE: Final = 2
"""It was swapped out."""
FAMILY_ENDED: Final = 3
"""Its last sequence has ended; it held device blocks."""
FAMILY_ENDED_ON_HOST: Final = 4
"""Its last sequence has ended; it was swapped out."""

class ColumnError(ValueError):
    """Columns cannot be read: args are the column, the index or -1, and what is wrong."""

class _Settings(TypedDict, total=False):
    device_generations: bytes
    """Of blocks that were allocated before, also of more than there are."""
    host_generations: bytes
    eviction_policy: str
    window_tokens: int
    holds_states: bool
    """Whether blocks are checkpoints of states, which only some blocks of tokens have."""
    max_sequences: int
    max_table_entries: int
    max_pinned_blocks: int
    max_owner_blocks: int
    """Device blocks that tables of an owner's sessions may refer to; 0: any number."""
    seed: int

class LayerGroup:
    """One layer group: its blocks, tables and prefixes."""

    def __init__(
        self,
        block_size_tokens: int,
        num_device_blocks: int,
        num_host_blocks: int,
        **settings: Unpack[_Settings],
    ) -> None: ...
    def set_time(self, now_s: float) -> None: ...
    def usage(self, tier: int) -> tuple[int, int, int, int, int]: ...
    def states(
        self, handle: int, sequence_ids: bytes | None
    ) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]: ...
    def num_blocks_held(self, handle: int) -> int: ...
    def table(self, handle: int, sequence_id: int) -> tuple[int, bytes, bytes, int, int]: ...
    def num_owned(self, owner: int) -> int: ...
    def counters(self) -> tuple[int, int, int, int, int, int, int, int, int, int, int]: ...
    @property
    def num_touched(self) -> int:
        """How often operations have visited a block or an entry of the index so far."""
    @property
    def revision(self) -> int: ...
    def generations(self, tier: int) -> bytes: ...
    def take_publications(self, max_blocks: int) -> list[_Run]: ...
    @property
    def has_publications(self) -> bool: ...
    @property
    def has_withdrawn(self) -> bool: ...
    def publications_in(self, begin: int, end: int) -> tuple[list[_Run], bytes, bytes, int]: ...
    def check_integrity(self) -> None: ...
    def outdate(self, all: bool) -> None:
        """Give each device block that is not published, or each, another generation."""
    def forget_some(self, max_entries: int) -> bool: ...
    def take_withdrawn(self, max_blocks: int) -> tuple[bytes, bytes]: ...
    def num_retained(self, owner: int) -> int: ...
    def roots(self) -> list[bytes]: ...
    def watch_enable(self, max_events: int) -> None: ...
    def changes_since(
        self, revision: int, root: bytes, max_events: int
    ) -> tuple[int, bytes, bytes, bytes, bytes, bytes] | None: ...
    def snapshot(
        self, root: bytes, cursor: int, max_blocks: int
    ) -> tuple[int, int, bytes, bytes, bytes, bytes]: ...
    def memory(self) -> tuple[int, int, int]: ...
    @property
    def num_token_chunks(self) -> int: ...
    def block_times(self) -> list[float]: ...
    def num_sequences_in(self, tier: int) -> int: ...
    def oldest_release_s(self) -> float: ...
    def block_map(self, tier: int, max_cells: int) -> tuple[int, bytes]: ...

class Pool:
    """One or several layer groups, kept in step. Numbers of blocks are of the smallest one."""

    def __init__(self, groups: list[LayerGroup]) -> None: ...
    def open_session(self, root: bytes, owner: int) -> int: ...
    def end_session(self, handle: int, max_blocks: int = ...) -> bool:
        """End a session and release about ``max_blocks`` of its blocks, by default all. Returns
        whether some are left for ``end_some``; then it must not be fenced yet.
        """
    def end_some(self, handle: int, max_blocks: int) -> bool:
        """Release about ``max_blocks`` of an ended session; returns whether some are left."""
    def session_fenced(self, handle: int) -> None: ...
    def begin(self, handle: int, number: int) -> None: ...
    # check_as: if not 0, changes nothing, and answers each item as the only one of that step.
    def admit(
        self,
        handle: int,
        sequence_id: int,
        token_ids: bytes,
        fork_ids: bytes,
        num_compute: int,
        max_total_tokens: int,
        skip_lookup: bool,
        headroom: int,
        check_as: int = 0,
        checkpoint: int = 0,
    ) -> tuple[int, int, int] | _Failure: ...
    def grant(
        self,
        handle: int,
        admitted_by: int,
        sequence_id: int,
        token_ids: bytes,
        fork_ids: bytes,
        num_compute: int,
        max_total_tokens: int,
        skip_lookup: bool,
        headroom: int,
    ) -> tuple[int, int, int] | _Failure: ...
    def append(
        self,
        handle: int,
        sequence_ids: bytes,
        first_positions: bytes,
        num_slots: bytes,
        num_tokens: bytes,
        token_ids: bytes,
        num_lookahead: bytes,
        check_as: int = 0,
        only_if_sure: bool = False,
        checkpoints: bytes = b"",
    ) -> tuple[bytes, list[_Failure] | None] | None:
        """``only_if_sure``: return None, with nothing changed, if there might not be room for all
        of it.
        """
    def growth(
        self,
        handle: int,
        sequence_ids: bytes,
        first_positions: bytes,
        num_slots: bytes,
        num_lookahead: bytes,
        check_as: int = 0,
    ) -> bytes: ...
    def truncate(
        self, handle: int, sequence_ids: bytes, num_tokens: bytes, check_as: int = 0
    ) -> tuple[bytes, list[_Failure] | None]: ...
    def fork(
        self, handle: int, parent_ids: bytes, sequence_ids: bytes, check_as: int = 0
    ) -> tuple[bytes, list[_Failure] | None]: ...
    def free(
        self, handle: int, sequence_ids: bytes, check_as: int = 0
    ) -> tuple[bytes, list[_Failure] | None]: ...
    def pin(
        self,
        handle: int,
        pin_ids: bytes,
        num_tokens: bytes,
        token_ids: bytes,
        headroom: int,
        expires_at_s: float,
        check_as: int = 0,
    ) -> tuple[bytes, list[_Failure] | None, tuple[bytes, bytes, bytes, bytes]]:
        """Return the blocks that each pin holds, the refused items, and columns of all blocks:
        groups, tiers, indices, generations.
        """
    def unpin(self, handle: int, pin_ids: bytes) -> None: ...
    def num_pinned(self, handle: int) -> int: ...
    def swap(
        self,
        handle: int,
        sequence_ids: bytes,
        destination_tier: int,
        headroom: int = 0,
        max_blocks: int = ...,
        check_as: int = 0,
    ) -> int | _Failure | None:
        """Return how many blocks it has moved. None: it has handled about ``max_blocks``, and
        ``swap_some`` must be called before any other call of the session until that returns
        another answer.
        """
    def swap_some(self, handle: int, max_blocks: int) -> int | _Failure | None: ...
    def cut(self, handle: int, sequence_id: int) -> int: ...
    def finish_sequence(self, handle: int, sequence_id: int) -> None: ...
    def reserve(self, handle: int, sequence_id: int, num_blocks: int) -> bool: ...
    def prepare(self, handle: int, max_blocks: int) -> bool:
        """Write about ``max_blocks`` of tables, after an abort and before ``finish``. Returns
        whether some are left.
        """
    def finish(self, handle: int, prefix: bytes) -> bytes | None: ...
    def answer(
        self,
        number: int,
        results: bytes,
        payload: bytes,
        signature: bytes,
        revision: int,
        news: bytes,
    ) -> tuple[bytes, int]:
        """Encode a StreamStepsResponse with a StepResponse at its end; returns it, and where the
        StepResponse begins. ``results``: its field of that name, encoded. ``payload``, ``news``:
        empty without a plan, or news. The pool's usage is added.
        """
    def deferred_tokens(
        self,
        handle: int,
        sequence_ids: bytes,
        admitted_by: bytes,
        first_positions: bytes,
        num_tokens: bytes,
        token_ids: bytes,
    ) -> _Failure | None: ...
    def receipted(self, handle: int, plan: int, max_blocks: int = ...) -> bool:
        """Record that plans up to this one have run. Publishes or releases about ``max_blocks`` at
        a time; if it returns True, the same call must follow before any other of the session.
        """
    def abort(
        self, handle: int, next_plan: int, keeps_tables: bool = True, max_blocks: int = ...
    ) -> bool:
        """Abort all plans in flight. ``keeps_tables``: the next plan need not send entries that the
        data plane has. Returns whether some work is left for the next call, as ``receipted`` does.
        """
    def resync_due(self, handle: int) -> bool: ...
    def plans_in_flight(self, handle: int) -> int: ...
    def last_plan(self, handle: int) -> int: ...
    def sequence_ids(self, handle: int) -> bytes: ...
    def states(
        self, handle: int, sequence_ids: bytes | None
    ) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]: ...
    def planned_checkpoints(self, handle: int, sequence_ids: bytes, positions: bytes) -> bytes:
        """Return each position for which its sequence was just given a checkpoint; 0 for others."""
    def checkpoints(self, handle: int, sequence_ids: bytes) -> bytes:
        """Return where each sequence's deepest written checkpoint is; nothing without states."""
    def num_sequences(self, handle: int) -> int: ...
    def has_sequence(self, handle: int, sequence_id: int) -> bool: ...
    def take_family_events(self, handle: int) -> Sequence[tuple[int, int]]:
        """Return what happened to families since the last call, as (change, family). A family is
        an admission with all forks of it; a session's are counted from 1. Each comes once.
        """
    def family_of(self, handle: int, sequence_id: int) -> int: ...
    def family_on_device(self, handle: int, family: int) -> bytes:
        """Return the ids of its sequences that hold device blocks, ascending."""
    def family_held(self, handle: int, family: int) -> int:
        """Return how many device blocks the tables of its sequences refer to, added up."""
    def family_progress(self, handle: int, family: int) -> tuple[float, bool]:
        """Return when one that holds device blocks last made progress, and whether a plan in flight
        computes tokens of one.
        """
    def num_blocks_held(self, handle: int) -> int: ...
    def num_device_blocks_held(self, handle: int) -> int:
        """Return how many device blocks its tables refer to, or more: where some of its sequences
        are on the host tier, a shared block counts once for each table.
        """
    def search(
        self, primary: LayerGroup, root: bytes, token_ids: bytes, hashes: bytes, with_hashes: bool
    ) -> PrefixSearch:
        """Begin a search for a prompt, which is given by its tokens or by the hashes of its leading
        full blocks. ``primary``: the group whose blocks the answer counts. ``with_hashes``: have
        the search compute the hashes that ``blocks`` returns, instead of that call.
        """
    def usage(self, tier: int) -> tuple[int, int, int, int, int]: ...
    def num_obtainable(self, handle: int, tier: int) -> int: ...
    def num_pending(self, handle: int, tier: int) -> int: ...
    def num_own_retired(self, handle: int, tier: int) -> int: ...
    def retain(
        self,
        root: bytes,
        owner: int,
        token_ids: bytes,
        priority: int,
        expires_at_s: float,
        most_blocks: int,
    ) -> tuple[int, int] | _Failure: ...
    def release_retained(self, root: bytes, owner: int, token_ids: bytes) -> int: ...
    def forget(
        self, root: bytes, token_ids: bytes, force: bool, most_counted: int
    ) -> tuple[int, int]: ...
    def forget_roots(self, roots: list[bytes], force: bool) -> tuple[int, int]: ...

class PrefixSearch:
    """A search for the longest cached prefix of a prompt. The answer is of the moment of the last
    call of ``search_some``, and is to be read before the pool changes.
    """

    def search_some(self, max_blocks: int) -> bool:
        """Look for about ``max_blocks`` more blocks. Returns whether some are left."""
    def counts(self) -> tuple[int, int]:
        """Return how many blocks were found on the device, and how many follow them."""
    def blocks(self) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """Return columns of the blocks found, as in ``PrefixBlocks`` of prefix.proto."""

class Rebuild:
    def __init__(
        self, block_size_tokens: int, num_shards: int, whole: Rebuild | None = None
    ) -> None:
        """``whole``: of a group of states, that of the group whose blocks its publications name."""
    def start_shard(self, shard: int, num_device_blocks: int, num_host_blocks: int) -> None: ...
    def add_blocks(self, shard: int, tier: int, indices: bytes, generations: bytes) -> None: ...
    def add_publications(
        self,
        shard: int,
        root: bytes,
        indices: bytes,
        generations: bytes,
        parent_indices: bytes,
        parent_generations: bytes,
        hashes: bytes,
        token_ids: bytes,
    ) -> None: ...
    def begin(self, now_s: float = 0.0, **settings: Unpack[_Settings]) -> None: ...
    def step(self, max_blocks: int) -> bool: ...
    def take(self) -> LayerGroup: ...
    @property
    def num_restored(self) -> int: ...
    @property
    def num_roots(self) -> int: ...

def duration_bounds_s() -> list[float]: ...
def root_hash(root: bytes) -> bytes: ...
def chained_hash(parent_hash: bytes, tokens: bytes) -> bytes: ...
