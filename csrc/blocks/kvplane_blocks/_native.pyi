"""The native core (csrc/blocks): all block metadata of one pool. Ints and bytes only; columns (little-endian bytes, as on the wire) in and out.

One `Pool` owns both tiers' blocks, the prefix index, eviction, sessions' sequences and tables, and the draft of each session's next plan. It knows no messages but writes the body of a plan in protobuf encoding.
Calls never fail half way: every operation checks, counts, then changes. An item that is refused is reported as a failure and has changed nothing.
Callers (planning/) check: identity, numbering, signatures, quotas, the line. The core checks: ids, positions, lengths of columns, tokens' signs, room.
"""
from typing import Final

Failure = tuple[int, int, int, int, int]   # (item, code, a, b, c); see the codes
LATER: Final = 2
NEVER: Final = 3
LATER_HEADROOM: Final = 4
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

class ColumnError(ValueError):
    """Columns cannot be read: args = (column name, index or -1, what is wrong). The whole operation changed nothing."""

class Pool:
    def __init__(self, block_size_tokens: int, num_device_blocks: int, num_host_blocks: int, device_generations: bytes, host_generations: bytes,
                 eviction_policy: str, window_tokens: int = 0, max_sequences: int = 65536, max_table_entries: int = 4194304) -> None:
        """generations: int64 columns, how often each block was allocated; missing ones are 0."""
    def set_time(self, now_s: float) -> None: ...

    # Sessions. A slot is a small int that is reused after the fence.
    def open_session(self, root: bytes, owner: int) -> int:
        """`root` names the prefixes it shares; `owner`: the tenant's small int (retention caps)."""
    def end_session(self, slot: int) -> None:
        """Release all; blocks stay retired until session_fenced."""
    def session_fenced(self, slot: int) -> None: ...

    # A step: begin, operations, finish. Only one session steps at a time.
    def begin(self, slot: int, number: int, dry_run: bool = False) -> None:
        """dry_run: operations answer what they would answer and change nothing; each judged by itself. End with `end_dry_run`."""
    def end_dry_run(self) -> None: ...
    def admit(self, slot: int, sequence_id: int, token_ids: bytes, fork_ids: bytes, num_compute: int, max_total_tokens: int, skip_lookup: bool, headroom: int
              ) -> tuple[int, int, int] | Failure:
        """num_compute -1: all. -> (num_cached_tokens, num_blocks, num_scheduled_tokens). May be called outside of begin/finish for a granted admission (num_compute 0; number = `admitted_by` set by begin? see grant)."""
    def grant(self, slot: int, admitted_by: int, sequence_id: int, token_ids: bytes, fork_ids: bytes, max_total_tokens: int, skip_lookup: bool, headroom: int) -> tuple[int, int, int] | Failure:
        """An admission outside of a step: its table is sent with the session's next plan; nothing is computed yet."""
    def append(self, slot: int, sequence_ids: bytes, first_positions: bytes, num_slots: bytes, num_tokens: bytes, token_ids: bytes, num_lookahead: bytes) -> tuple[bytes, list[Failure] | None]:
        """-> (int32 column: blocks in each table, failures)."""
    def truncate(self, slot: int, sequence_ids: bytes, num_tokens: bytes) -> tuple[bytes, list[Failure] | None]:
        """num_tokens: int64 column: positions that stay. -> (int32 column: released blocks, failures)."""
    def fork(self, slot: int, parent_ids: bytes, sequence_ids: bytes) -> tuple[bytes, list[Failure] | None]: ...
    def free(self, slot: int, sequence_ids: bytes) -> tuple[bytes, list[Failure] | None]: ...
    def swap(self, slot: int, sequence_ids: bytes, destination_tier: int) -> int | Failure:
        """All or none. -> blocks copied."""
    def cut(self, slot: int, sequence_id: int) -> int:
        """Take a live sequence away outside of a step (its DROP goes with the next plan); what it wrote and will be receipted is published. -> released blocks."""
    def finish(self, slot: int, prefix: bytes) -> bytes | None:
        """The step's plan: `prefix` (fields 1-4 of Plan, encoded) and the rest; None when there is nothing to carry out. It is in flight from now on."""

    # What follows
    def deferred_tokens(self, slot: int, sequence_ids: bytes, admitted_by: bytes, first_positions: bytes, num_tokens: bytes, token_ids: bytes) -> Failure | None:
        """All are checked before one is applied."""
    def receipted(self, slot: int, plan: int) -> None:
        """Plans up to `plan` have run (all shards)."""
    def abort(self, slot: int, next_plan: int) -> None:
        """Abort all plans in flight; the next plan carries whole tables."""
    def resync_due(self, slot: int) -> bool: ...
    def whole_tables(self, slot: int) -> None:
        """The next plan carries whole tables (Resync)."""
    def plans_in_flight(self, slot: int) -> int: ...
    def last_plan(self, slot: int) -> int: ...

    # Queries
    def states(self, slot: int, sequence_ids: bytes | None) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """The columns of SequenceStates in field order, ids ascending; all sequences for None. KeyError(id) for an unknown one."""
    def num_sequences(self, slot: int) -> int: ...
    def num_blocks_held(self, slot: int) -> int:
        """Device and host blocks of the session's tables; one that forks share counts once."""
    def has_sequence(self, slot: int, sequence_id: int) -> bool: ...
    def table(self, slot: int, sequence_id: int) -> tuple[int, bytes, bytes, int, int]:
        """(tier, int32 indices with -1 for trimmed ones, int64 generations, num_tokens known, table entries trimmed)."""
    def common_prefix(self, slot: int, sequence_ids: bytes) -> int:
        """Leading blocks that all the tables share. KeyError(id)."""
    def match(self, root: bytes, token_ids: bytes) -> tuple[int, int, bytes]:
        """(device blocks, host blocks that follow them, 16-byte hashes of all of them)."""
    def match_hashes(self, hashes: bytes) -> tuple[int, int]:
        """The same for chained hashes (16 bytes each), whose chain leads from a root."""
    def explain(self, root: bytes, token_ids: bytes) -> tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes, bytes]:
        """tiers u8, indices i32, generations i64, ref_counts i32, num_hits i64, ages_ms i64, idle_ms i64, priorities u8."""
    def usage(self, tier: int) -> tuple[int, int, int, int, int]:
        """(num_blocks, free, cached, held (also pinned), retired)."""
    def num_obtainable(self, slot: int, tier: int) -> int: ...
    def num_pending(self, slot: int, tier: int) -> int: ...
    def counters(self) -> tuple[int, ...]:
        """(lookup_tokens, hit_tokens, copies_on_write, swapped_out, swapped_in, evictions, publications, max_held, host_hit_tokens, demoted, forgotten)."""
    @property
    def revision(self) -> int: ...
    def generations(self, tier: int) -> bytes: ...

    # Publications for the data planes
    def take_publications(self, max_blocks: int) -> list[tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]]:
        """Newly published device blocks, in order, in runs of one root: (root, indices i32, generations i64, parent_indices i32, parent_generations i64, hashes, token_ids). Empty when there are none (cheap)."""
    def all_publications(self, max_blocks: int) -> list[tuple[bytes, bytes, bytes, bytes, bytes, bytes, bytes]]:
        """Everything findable on the device, parents first, in runs of one root of at most max_blocks."""

    # Retention and forgetting
    def retain(self, slot: int, token_ids: bytes, priority: int, expires_at_s: float, most_blocks: int) -> tuple[int, int] | Failure:
        """-> (retained blocks, of these new to the owner's count). TOO_MANY_ENTRIES when the owner would retain more than most_blocks."""
    def release_retained(self, slot: int, token_ids: bytes) -> int: ...
    def forget(self, slot: int, token_ids: bytes, force: bool) -> tuple[int, int]:
        """The prefix that ends with the last full block of token_ids, and all that follow it. -> (forgotten, in use)."""
    def forget_roots(self, roots: list[bytes], force: bool) -> tuple[int, int]:
        """All or none of them, unless forced."""
    def roots(self) -> list[bytes]: ...

    # Watch
    def watch_enable(self, max_events: int) -> None: ...

    # Rebuild
    def restore(self, root: bytes, parent_block: int, token_ids: bytes, blocks: bytes, hashes: bytes) -> int: ...
    def restored(self) -> None: ...
    def check_integrity(self) -> None:
        """AssertionError saying what is wrong. Recounts everything; slow."""
