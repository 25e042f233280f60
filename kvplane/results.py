"""Answers of the planes: failed items as errors, and columns as values."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from kvplane.errors import (
    InternalError,
    InvalidRequestError,
    KvplaneError,
    NeverFitsError,
    PoolFullError,
)
from kvplane.layout import Layout
from kvplane.shard import Shard
from kvplane.tensor import Tensor
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64, UINT8
from kvplane.wire.error_messages import from_wire, seconds_of
from kvplane.wire.v1 import pool_pb2, types_pb2
from kvplane.wire.v1 import prefix_pb2 as ppb
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.types_pb2 import SignedPayload

HASH_BYTES: Final = 16
"""Bytes of a block's hash, which covers all tokens up to the block's end."""


class Signed(Protocol):
    """A plan, a receipt or a grant, which callers pass on unread. At run time it is the message
    that came, so that it costs nothing.
    """

    def SerializeToString(self) -> bytes:
        """Encode it as bytes, for ``read_signed`` in another process."""


def read_signed(data: bytes) -> Signed:
    """Parse what ``Signed.SerializeToString`` returned. Raises InvalidRequestError."""
    try:
        return SignedPayload.FromString(data)
    except DecodeError as error:
        raise InvalidRequestError("is no plan, receipt or grant", field="data") from error


class StepResult:
    """The control plane's answer to a step."""

    __slots__ = ("_earlier", "_message", "_results")

    def __init__(self, _message: pb.StepResponse, _earlier: SessionNews | None = None) -> None:
        """``_earlier``: news of earlier answers that the caller has not read."""
        self._message = _message
        self._earlier = _earlier
        self._results: list[OperationResult] | None = None

    @property
    def results(self) -> list[OperationResult]:
        """The result of each operation, in order."""
        if self._results is None:
            self._results = [OperationResult(each) for each in self._message.results]
        return self._results

    @property
    def plan(self) -> Signed | None:
        """The plan to run on the data planes; None when there is nothing to carry out."""
        return self._message.plan if self._message.HasField("plan") else None

    @property
    def usage(self) -> tuple[TierUsage, ...]:
        """How the pool's blocks are used after the step, for each tier of each layer group."""
        return _tier_usages(self._message.usage)

    @property
    def revision(self) -> int:
        """Revision of the pool's prefix index after the step: its number of changes so far."""
        return self._message.revision

    @property
    def has_news(self) -> bool:
        """Says whether ``news`` has any events."""
        return self._earlier is not None or self._message.HasField("news")

    @property
    def news(self) -> SessionNews:
        """Events since the last answer that the session did not request."""
        news = SessionNews.from_proto(self._message.news)
        return news if self._earlier is None else self._earlier.then(news)

    def after(self, earlier: SessionNews) -> StepResult:
        """Return this result with earlier news before its own."""
        return StepResult(self._message, earlier)

    def raise_for_status(self) -> StepResult:
        """Return the result, or raise the error of the first item that was not done."""
        for outcome in self._message.results:
            for failure in outcome.failures:
                raise _error_of(failure)
        return self


@dataclass(frozen=True, slots=True)
class AdmitResult:
    """Says what an admission did. ``num_blocks``: in the table. ``num_scheduled_tokens``: those
    that the step's plan computes, from position ``num_cached_tokens`` on.
    """

    num_cached_tokens: int
    num_blocks: int
    num_scheduled_tokens: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """Cached blocks that the pins of one step hold. ``num_blocks``: of each pin, the leading whole
    blocks of its prompt; 0 where nothing is cached. ``grant``: to present to data planes; None when
    nothing was found.
    """

    num_blocks: array[int]
    grant: Signed | None

    def entries(self, item: int) -> range:
        """Return the entries of the pin's blocks, by which data planes read them. ``item``: the
        index of the pin in the operation.
        """
        first = sum(self.num_blocks[:item])
        return range(first, first + self.num_blocks[item])


@dataclass(frozen=True, slots=True)
class ItemFailure:
    """An item of an operation that was not done. ``error``: why, PoolFullError if it may be done
    later, NeverFitsError if the pool can never hold it. ``queue_position``: of an admission that
    waits, from 1, else 0. If there is no room, ``num_blocks_pending`` are those that receipts are
    about to free.
    """

    item: int
    error: KvplaneError
    queue_position: int = 0
    num_blocks_needed: int = 0
    num_blocks_available: int = 0
    num_blocks_pending: int = 0

    @classmethod
    def from_proto(cls, message: pb.ItemFailure) -> ItemFailure:
        """Read a message."""
        return cls(
            message.item,
            _error_of(message),
            message.shortage.queue_position,
            message.shortage.num_blocks_needed,
            message.shortage.num_blocks_available,
            message.shortage.num_blocks_pending,
        )

    @property
    def is_later(self) -> bool:
        """Says whether the item may be done later."""
        return isinstance(self.error, PoolFullError)


class OperationResult:
    """The result of one operation. Columns have an element for each item, 0 if it failed."""

    __slots__ = ("_message",)

    def __init__(self, _message: pb.OperationResult) -> None:
        self._message = _message

    @property
    def failures(self) -> list[ItemFailure]:
        """The items that were not done, ascending. They have changed nothing."""
        return [ItemFailure.from_proto(each) for each in self._message.failures]

    @property
    def admit(self) -> AdmitResult:
        """The result of ``ops.admit``; all fields are 0 when it was not done."""
        done = self._message.admit
        return AdmitResult(done.num_cached_tokens, done.num_blocks, done.num_scheduled_tokens)

    @property
    def num_table_blocks(self) -> array[int]:
        """Number of blocks in each table after ``ops.append`` or ``ops.fork``."""
        return columns.read(INT32, self._message.num_table_blocks, "num_table_blocks")

    @property
    def checkpoint_positions(self) -> array[int]:
        """Where the plan keeps a checkpoint of each sequence that ``ops.admit`` or ``ops.append``
        asked one for: as asked, or 0 if no block was left. Empty where none was asked for.
        """
        return columns.read(INT32, self._message.checkpoint_positions, "checkpoint_positions")

    @property
    def num_released_blocks(self) -> array[int]:
        """Number of blocks that no table refers to after ``ops.free`` or ``ops.truncate``."""
        return columns.read(INT32, self._message.num_released_blocks, "num_released_blocks")

    @property
    def num_swapped_blocks(self) -> int:
        """Number of blocks that ``ops.swap`` copies to the other tier."""
        return self._message.num_swapped_blocks

    @property
    def pinned(self) -> Pinned:
        """Return the blocks that ``ops.pin`` found and holds, and the grant to read them."""
        grant = self._message.pin_grant if self._message.HasField("pin_grant") else None
        num_blocks = columns.read(INT32, self._message.num_pinned_blocks, "num_pinned_blocks")
        return Pinned(num_blocks, grant)


def total_of(counters: Mapping[str, int], name: str) -> int:
    """Sum a counter of ``ControlClient.get_counters``, such as "evictions_total", over labels."""
    return sum(value for sample, value in counters.items() if sample.partition("{")[0] == name)


class TierUsage(NamedTuple):
    """How the blocks of one tier of one layer group are used; the message of the same name.
    ``tier``: a ``types_pb2.Tier``. A tuple, because an engine reads some after each step.
    """

    group: int
    tier: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_held_blocks: int
    num_retired_blocks: int


_fields_of_usage: Final = attrgetter(*TierUsage._fields)


def _tier_usages(messages: Iterable[types_pb2.TierUsage]) -> tuple[TierUsage, ...]:
    """Parse messages of tiers' usage."""
    return tuple([TierUsage._make(_fields_of_usage(each)) for each in messages])


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """A registered data plane; the message of the same name. ``epoch``: the run of its process."""

    shard: Shard
    epoch: int
    address: str
    connected: bool
    has_file_tier: bool

    @classmethod
    def from_proto(cls, message: types_pb2.ShardInfo) -> ShardInfo:
        """Parse a message."""
        return cls(
            Shard.from_proto(message.shard),
            message.epoch,
            message.address,
            message.connected,
            message.has_file_tier,
        )

    def to_proto(self) -> types_pb2.ShardInfo:
        """Convert the description to its message."""
        return types_pb2.ShardInfo(
            shard=self.shard.to_proto(),
            epoch=self.epoch,
            address=self.address,
            connected=self.connected,
            has_file_tier=self.has_file_tier,
        )


@dataclass(frozen=True, slots=True)
class PoolInfo:
    """A pool's description. ``shards``: those registered. ``ready``: whether it takes sessions."""

    layout: Layout
    shards: tuple[ShardInfo, ...]
    ready: bool
    usage: tuple[TierUsage, ...]

    @classmethod
    def from_proto(cls, message: pool_pb2.GetPoolResponse) -> PoolInfo:
        """Parse a message. Raises InvalidRequestError for a layout that is not valid."""
        return cls(
            Layout.from_proto(message.layout),
            tuple(map(ShardInfo.from_proto, message.shards)),
            message.ready,
            _tier_usages(message.usage),
        )


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Describes a plane. ``version``: its release. ``incarnation``: the run of the control plane;
    for a data plane the one that it registered with, or 0. Data planes only: ``pool_id`` and
    ``shard``, its part of a pool, and ``device``, where its device tier is: "cpu" or "cuda:N".
    """

    version: str
    incarnation: int
    pool_id: str
    shard: ShardInfo | None
    device: str


@dataclass(frozen=True, slots=True)
class SessionSummary:
    """Description of an open session; the message of the same name. ``time_to_live_s``: how long
    its lease still runs. ``incarnation``: of the control plane that opened it.
    """

    incarnation: int
    session_id: int
    client_name: str
    namespace: str
    num_sequences: int
    num_held_blocks: int
    num_plans_in_flight: int
    last_number: int
    time_to_live_s: float

    @classmethod
    def from_proto(cls, message: pool_pb2.SessionSummary) -> SessionSummary:
        """Parse a message."""
        return cls(
            message.session.incarnation,
            message.session.session_id,
            message.client_name,
            message.namespace,
            message.num_sequences,
            message.num_held_blocks,
            message.num_plans_in_flight,
            message.last_number,
            message.time_to_live.ToTimedelta().total_seconds(),
        )


_TIERS: Final = {types_pb2.TIER_DEVICE: "device", types_pb2.TIER_HOST: "host"}
_MAY_BE_EMPTY: Final = ("num_awaited_blocks", "checkpoint_positions")


@dataclass(frozen=True, slots=True)
class SequenceState:
    """State of a sequence at the control plane; an element of the message SequenceStates.

    ``admitted_by``: the number of the step that admitted or forked it. Of its ``num_tokens`` known
    tokens the first ``num_scheduled_tokens`` were cached or are computed by some plan, and the KV
    of the first ``num_written_tokens`` is written. ``tier``: a ``types_pb2.Tier``.
    ``num_awaited_blocks``: blocks that it waits for since an append of it was LATER.
    ``checkpoint_position``: in a layout with states, the tokens before its deepest written
    checkpoint; 0 without one.
    """

    sequence_id: int
    admitted_by: int
    num_tokens: int
    num_scheduled_tokens: int
    num_written_tokens: int
    num_cached_tokens: int
    num_blocks: int
    tier: int
    num_awaited_blocks: int = 0
    checkpoint_position: int = 0

    @classmethod
    def all_from_proto(cls, message: pb.SequenceStates) -> list[SequenceState]:
        """Parse sequences' states, ids ascending. Raises InvalidRequestError if columns differ."""
        num_sequences = columns.count(INT64, message.sequence_ids)
        kinds = {"sequence_ids": INT64, "admitted_by": INT64, "tiers": UINT8}
        zeros = bytes(columns.size_bytes(INT32) * num_sequences)
        values = (
            columns.read(
                kinds.get(field.name, INT32),
                getattr(message, field.name) or (zeros if field.name in _MAY_BE_EMPTY else b""),
                f"sequences.{field.name}",
                length=num_sequences,
            )
            for field in pb.SequenceStates.DESCRIPTOR.fields
        )
        return [cls(*each) for each in zip(*values, strict=True)]


@dataclass(frozen=True, slots=True)
class AbortResult:
    """Result of ``abort_plans``: the state of every sequence. ``plan``, unless None, contains all
    tables whole and must run before later ones.
    """

    sequences: list[SequenceState]
    plan: Signed | None


@dataclass(frozen=True, slots=True)
class BlockTable:
    """A sequence's blocks in one layer group, in order. ``tier``: a ``types_pb2.Tier``. Entries
    behind the attention window have index -1 and generation 0.
    """

    group: int
    tier: int
    indices: array[int]
    generations: array[int]

    @classmethod
    def from_proto(cls, message: types_pb2.Blocks) -> BlockTable:
        """Parse a block table. Raises InvalidRequestError when columns differ in length."""
        indices = columns.read(INT32, message.indices, "indices")
        generations = columns.read(INT64, message.generations, "generations", length=len(indices))
        return cls(message.group, message.tier, indices, generations)


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A cached block of a prefix; an element of the message PrefixBlocks.

    ``block_hash``: its chained hash. ``tier``: a ``types_pb2.Tier``. ``ref_count``: block tables
    that refer to it. ``num_hits``: admissions that found it. ``age_s``: since it was published.
    ``idle_s``: since a sequence last referred to it. ``priority``: of its retention, 0 when it is
    not retained.
    """

    block_hash: bytes
    tier: int
    index: int
    generation: int
    ref_count: int
    num_hits: int
    age_s: float
    idle_s: float
    priority: int


@dataclass(frozen=True, slots=True)
class PoolMatch:
    """The longest cached prefix of a prompt in one pool; the message of the same name.

    ``num_device_tokens``: leading tokens cached on the device, whole blocks. ``num_host_tokens``:
    tokens that follow them, cached in the host tier. ``revision``: of the pool's prefix index.
    ``blocks``: the blocks found, if they were asked for.
    """

    pool_id: str
    num_device_tokens: int
    num_host_tokens: int
    revision: int
    blocks: tuple[CachedBlock, ...] = ()

    @classmethod
    def from_proto(cls, message: ppb.PoolMatch) -> PoolMatch:
        """Parse a match. Raises InvalidRequestError when columns differ in length."""
        return cls(
            message.pool_id,
            message.num_device_tokens,
            message.num_host_tokens,
            message.revision,
            tuple(_cached_blocks(message.blocks)),
        )

    @property
    def num_cached_tokens(self) -> int:
        """Number of leading tokens cached in either tier, in whole blocks."""
        return self.num_device_tokens + self.num_host_tokens


@dataclass(frozen=True, slots=True)
class ForgetResult:
    """Result of ``forget_prefixes``. ``num_forgotten_blocks``: taken out of the index.
    ``num_blocks_in_use``: of these, blocks that sequences still refer to.
    """

    num_forgotten_blocks: int
    num_blocks_in_use: int


def _cached_blocks(message: ppb.PrefixBlocks) -> Iterator[CachedBlock]:
    hashes = columns.fixed(message.hashes, HASH_BYTES)

    def column(kind: str, name: str) -> array[int]:
        return columns.read(kind, getattr(message, name), name, length=len(hashes))

    for each in zip(
        hashes,
        column(UINT8, "tiers"),
        column(INT32, "indices"),
        column(INT64, "generations"),
        column(INT32, "ref_counts"),
        column(INT64, "num_hits"),
        (ms / 1000 for ms in column(INT64, "ages_ms")),
        (ms / 1000 for ms in column(INT64, "idle_ms")),
        column(UINT8, "priorities"),
        strict=True,
    ):
        yield CachedBlock(*each)


@dataclass(frozen=True, slots=True)
class Granted:
    """An admission that waited in the queue and was granted, with the forks that it asked for."""

    sequence_id: int
    num_cached_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SessionNews:
    """Events that a session did not request; the message News.

    ``cut``: the ``session_pb2.CutReason`` of each sequence that lost its blocks, which must be
    admitted again. ``num_blocks_asked``: blocks that the session is asked to release, 0 for none,
    within ``deadline_s`` seconds; else ``sequences_asked`` are cut.
    """

    granted: tuple[Granted, ...]
    cut: Mapping[int, int]
    num_blocks_asked: int
    deadline_s: float
    sequences_asked: tuple[int, ...]

    @classmethod
    def from_proto(cls, news: pb.News) -> SessionNews:
        """Read a message. Raises InvalidRequestError for malformed columns."""
        ids = columns.read(INT64, news.granted_sequence_ids, "granted_sequence_ids")
        num_cached, num_blocks = (
            columns.read(INT32, getattr(news, field), field, length=len(ids))
            for field in ("granted_num_cached_tokens", "granted_num_blocks")
        )
        cut = columns.read(INT64, news.cut_sequence_ids, "cut_sequence_ids")
        reasons = columns.read(UINT8, news.cut_reasons, "cut_reasons", length=len(cut))
        return cls(
            granted=tuple(map(Granted, ids, num_cached, num_blocks)),
            cut=dict(zip(cut, reasons, strict=True)),
            num_blocks_asked=news.num_blocks_asked,
            deadline_s=seconds_of(news.asked_within),
            sequences_asked=tuple(
                columns.read(INT64, news.asked_sequence_ids, "asked_sequence_ids")
            ),
        )

    def then(self, later: SessionNews) -> SessionNews:
        """Return these news merged with later ones."""
        asked = later if later.num_blocks_asked else self
        return SessionNews(
            (*self.granted, *later.granted),
            {**self.cut, **later.cut},
            asked.num_blocks_asked,
            asked.deadline_s,
            asked.sequences_asked,
        )


@dataclass(frozen=True, slots=True)
class ShardBlocks:
    """Whole blocks of one shard, in the canonical order (``BlockService`` in the contract).
    ``layout_fingerprint``: of the pool where they were read, empty if it is not known.
    ``num_bytes``: of opaque pages, how many leading bytes of each hold something; empty for all.
    """

    blocks: Tensor
    layout_fingerprint: bytes = b""
    num_bytes: tuple[int, ...] = ()


def _error_of(failure: pb.ItemFailure) -> KvplaneError:
    """Return the error of an item that was not done: for LATER PoolFullError with its retry delay,
    for NEVER NeverFitsError, for FAILED the error that the control plane gave.
    """
    if failure.status == pb.ITEM_STATUS_FAILED:
        return from_wire(failure.error)
    shortage = failure.shortage
    text = (
        f"{shortage.num_blocks_needed} blocks of the {_TIERS.get(shortage.tier, 'unknown')} tier "
        f"are needed and {shortage.num_blocks_available} are available"
    )
    by_quota = shortage.reason == pb.SHORTAGE_REASON_QUOTA
    if failure.status == pb.ITEM_STATUS_NEVER:
        whose = "tenant may" if by_quota else "pool can"
        return NeverFitsError(f"{text}: the {whose} never hold this many; ask for fewer tokens")
    if failure.status != pb.ITEM_STATUS_LATER:
        return InternalError(f"item status {failure.status} is not known")
    delay_s = None
    if shortage.HasField("retry_delay"):
        delay_s = shortage.retry_delay.ToTimedelta().total_seconds()
    advice = "submit receipts, free or swap out sequences, then try again"
    if delay_s is not None:
        advice += f" in {delay_s:g} s"
    if shortage.queue_position:
        advice = f"the admission waits, at position {shortage.queue_position} in the queue"
    if by_quota:
        text += " by the tenant's quota"
    else:
        text += f", {shortage.num_blocks_pending} more when plans have run"
    return PoolFullError(f"{text}: {advice}", retry_delay_s=delay_s)
