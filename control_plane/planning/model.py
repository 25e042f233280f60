"""The values that go in and out of the core: operations, their results, plans, registrations.

They mirror the messages of ``protos/kvplane/v1`` of the same names, where every field is explained;
here they are plain Python so that the core needs neither grpc nor protobuf. Token ids are ``bytes``
of little-endian int32, as on the wire. What a decode step makes for each sequence is a named tuple,
which is made four times faster than a frozen dataclass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from typing import NamedTuple

from kvplane.errors import KvplaneError
from kvplane.layout import Layout


class Tier(Enum):
    """Where a block lives."""

    DEVICE = "device"
    HOST = "host"

    # Enum's own is a call in Python, which every look-up by tier would pay for.
    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One block as it was when it was allocated."""

    tier: Tier
    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of one tier in columns, so that many cost little more than one."""

    tier: Tier
    indices: Sequence[int]
    generations: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[BlockRef]:
        return map(BlockRef, repeat(self.tier), self.indices, self.generations)


# Operations


@dataclass(frozen=True, slots=True)
class Admit:
    """Start a sequence. ``num_compute_tokens`` None means all that is not cached."""

    sequence_id: int
    token_ids: bytes
    num_compute_tokens: int | None = None
    max_total_tokens: int = 0
    skip_prefix_lookup: bool = False


class Append(NamedTuple):
    """Add known tokens, then compute ``num_slots`` positions after the last one scheduled."""

    sequence_id: int
    token_ids: bytes = b""
    num_slots: int = 0


@dataclass(frozen=True, slots=True)
class Fork:
    """Start a sequence that shares all blocks of its parent."""

    parent_sequence_id: int
    sequence_id: int


@dataclass(frozen=True, slots=True)
class Free:
    """End a sequence."""

    sequence_id: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Move sequences to the host tier."""

    sequence_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Move sequences back to the device tier."""

    sequence_ids: tuple[int, ...]


Operation = Admit | Append | Fork | Free | SwapOut | SwapIn


@dataclass(frozen=True, slots=True)
class LateTokens:
    """Tokens of positions that were reserved without them."""

    sequence_id: int
    first_position: int
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class Receipt:
    """A verified receipt (its signature is checked before it comes here)."""

    session_id: int
    plan_number: int
    plan_digest: bytes
    shard_index: int
    epoch: int
    incarnation: int


# Results


class Status(Enum):
    """Whether an operation was done."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why there is no room."""

    tier: Tier
    num_blocks_needed: int
    num_blocks_available: int
    num_blocks_pending: int


@dataclass(frozen=True, slots=True)
class AdmitResult:
    num_cached_tokens: int
    num_blocks: int
    num_scheduled_tokens: int


class AppendResult(NamedTuple):
    first_position: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class ForkResult:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class FreeResult:
    num_released_blocks: int


@dataclass(frozen=True, slots=True)
class SwapOutResult:
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SwapInResult:
    num_blocks: int


Done = AdmitResult | AppendResult | ForkResult | FreeResult | SwapOutResult | SwapInResult


class OperationResult(NamedTuple):
    """``done`` when OK, ``shortage`` when LATER or NEVER, ``error`` when FAILED."""

    status: Status
    done: Done | None = None
    shortage: Shortage | None = None
    error: KvplaneError | None = None


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How many blocks are in each state: free + cached + held + limbo + reserved == num_blocks.

    Reserved is no state of a block: so many of those free are kept for what sessions are
    guaranteed, and not counted as free here.
    """

    tier: Tier
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_limbo_blocks: int
    num_reserved_blocks: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    sequence_id: int
    num_tokens: int
    num_scheduled_tokens: int
    num_written_tokens: int
    num_cached_tokens: int
    num_blocks: int
    tier: Tier


@dataclass(slots=True)
class PoolCounters:
    """Counts since the control plane learnt of the pool. They never fall."""

    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_copies_on_write: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_evictions: int = 0
    num_publications: int = 0
    max_held_blocks: int = 0


# Plans


@dataclass(frozen=True, slots=True)
class SetBlocks:
    """Set table entries from ``first_block`` on; ``fresh[i]``: allocated by this plan."""

    sequence_id: int
    first_block: int
    blocks: Blocks
    fresh: Sequence[bool]
    replace: bool = False


@dataclass(frozen=True, slots=True)
class ForkTable:
    """Make a table of another's first ``num_blocks`` entries."""

    sequence_id: int
    parent_sequence_id: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class DropTable:
    """Remove a table."""

    sequence_id: int


TableChange = SetBlocks | ForkTable | DropTable


@dataclass(frozen=True, slots=True)
class Transfer:
    """Copy one whole block."""

    source: BlockRef
    destination: BlockRef


class Row(NamedTuple):
    """The tokens that a plan computes for one sequence."""

    sequence_id: int
    first_position: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What one step changes; see the message of the same name."""

    pool_id: str
    shard_epochs: tuple[int, ...]
    incarnation: int
    session_id: int
    number: int
    previous: int
    resync: bool
    changes: tuple[TableChange, ...]
    transfers: tuple[Transfer, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class SealedPlan:
    """A plan as it travels: its bytes, their signature and the digest that names it."""

    payload: bytes
    signature: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The answer to a step; ``plan`` is None when there is nothing to carry out."""

    number: int
    results: tuple[OperationResult, ...]
    plan: SealedPlan | None
    usage: tuple[TierUsage, ...]


# Registration


@dataclass(frozen=True, slots=True)
class Shard:
    """The part of a pool that one data plane holds."""

    index: int = 0
    num_shards: int = 1
    first_layer: int = 0
    num_layers: int = 0
    first_kv_head: int = 0
    num_kv_heads: int = 0


@dataclass(frozen=True, slots=True)
class Hello:
    """A data plane introduces itself. ``incarnation``: the highest registered with, 0 for none."""

    pool_id: str
    shard: Shard
    epoch: int
    layout: Layout
    num_device_blocks: int
    num_host_blocks: int
    address: str
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """The core's answer to Hello. ``key`` signs the pool's plans and receipts."""

    incarnation: int
    resumed: bool
    key: bytes


@dataclass(frozen=True, slots=True)
class Publication:
    """What a block holds; see the message of the same name."""

    block: BlockRef
    tenant: str
    parent_hash: bytes
    hash: bytes
    token_ids: bytes


@dataclass(frozen=True, slots=True)
class Publications:
    """Publications of one tenant in columns, so that many cost little more than one."""

    tenant: str
    blocks: Blocks
    parent_hashes: Sequence[bytes]
    hashes: Sequence[bytes]
    token_ids: Sequence[bytes]

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[Publication]:
        return map(
            Publication,
            self.blocks,
            repeat(self.tenant),
            self.parent_hashes,
            self.hashes,
            self.token_ids,
        )


@dataclass(frozen=True, slots=True)
class ReportedBlock:
    """One block as a data plane knows it."""

    block: BlockRef
    publication: Publication | None = None


@dataclass(frozen=True, slots=True)
class PublishBlocks:
    """For a data plane: mark these blocks as published."""

    publications: Publications


@dataclass(frozen=True, slots=True)
class Fence:
    """For a data plane: stop this session."""

    session_id: int


Outgoing = PublishBlocks | Fence


@dataclass(frozen=True, slots=True)
class ShardInfo:
    shard: Shard
    epoch: int
    address: str
    connected: bool


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """What DescribePool answers with."""

    pool_id: str
    layout: Layout
    shards: tuple[ShardInfo, ...]
    ready: bool
    usage: tuple[TierUsage, ...]
    num_sessions: int
    num_sequences: int
    counters: PoolCounters


@dataclass(frozen=True, slots=True)
class OpenedSession:
    """What OpenSession answers with, but for the signed grant, which the servicer makes from it."""

    session_id: int
    pool_id: str
    tenant: str
    key: bytes
    shard_epochs: tuple[int, ...]
    incarnation: int
    time_to_live_s: float
    max_plans_in_flight: int
    layout: Layout
    shards: tuple[ShardInfo, ...]
    num_device_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """The core's settings. ``watermark``: share of device blocks that admissions leave free."""

    lease_s: float = 30.0
    max_plans_in_flight: int = 4
    watermark: float = 0.01
    max_operations: int = 4096
    max_sequences: int = 65_536
    max_sessions: int = 1024


@dataclass(slots=True)
class ResyncOutcome:
    """What Resync answers with."""

    sequences: Sequence[SequenceState]
    plan: SealedPlan


@dataclass(frozen=True, slots=True)
class PrefixInfo:
    """What LookupPrefix answers with."""

    num_cached_tokens: int
    hashes: tuple[bytes, ...] = field(default=())
