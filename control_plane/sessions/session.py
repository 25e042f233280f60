"""One engine's session: its lease on a pool, its numbers, its plans in flight, what it waits for,
and its news.

Its sequences, their tables and the draft of its next plan are in the native core, under ``handle``.
Invariant: a plan is in ``plans`` until it is receipted or aborted.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from control_plane.pools.pool import Pool
from control_plane.sessions.numbering import Numbering
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import session_pb2 as cpb
from kvplane.wire.v1 import types_pb2 as tpb

_MAX_VOIDED: Final = 1024


class PlanRecord(NamedTuple):
    """A plan in flight: its SHA-256, when it was made, and the receipt expected of each shard."""

    digest: bytes
    made_s: float
    receipts: Sequence[bytes] = ()


class ExpectedReceipt(NamedTuple):
    """Describes the receipt that a shard will sign once it has run a plan."""

    signature: bytes
    plan_number: int
    shard_index: int


def forks_of(message: cpb.Admit) -> Sequence[int]:
    """Return the ids of the forks that an admission starts."""
    return columns.read(INT64, message.fork_sequence_ids, "fork_sequence_ids")


class Wanted(NamedTuple):
    """Blocks that a family waits for, and the sequence of it that asked for them."""

    sequence_id: int
    num_blocks: int


@dataclass(slots=True)
class QueuedAdmission:
    """A session's entry in the queue: an admission of step ``number``, or without a message a
    swap-in of the family ``key``. ``since_s``: when it was queued. ``lapses_s``: when a swap-in at
    the head of the queue is removed from it.
    """

    key: int
    message: cpb.Admit | None
    number: int
    since_s: float
    lapses_s: float | None = None

    def names(self, sequence_id: int) -> bool:
        """Return whether the admission would start this id, as its sequence or as a fork."""
        message = self.message
        return message is not None and (
            sequence_id == message.sequence_id or sequence_id in forks_of(message)
        )

    def is_of(self, sequence_id: int) -> bool:
        """Return whether this is the admission of the sequence with this id."""
        return self.message is not None and self.message.sequence_id == sequence_id


class Session:
    """State of an open session; steps, receipts, aborts and the queue's decisions change it.

    ``queued``: its entry in the queue. ``wanted``: for each family whose growth is blocked, what
    it waits for. ``revoked``: sequences that were cut, which the engine may not know yet.
    ``ending``: plans with the sequences that end with them, in order. ``news``: for the next
    answer, None when there are none. ``is_drafted``: whether changes made
    outside of its steps wait for its next plan.
    """

    __slots__ = (
        "_receipt_prefixes",
        "_voided",
        "client_name",
        "done",
        "ending",
        "epochs",
        "expected",
        "expires_at_s",
        "handle",
        "id",
        "is_drafted",
        "last_plan",
        "namespace",
        "native",
        "news",
        "numbers",
        "ordinal",
        "payload_version",
        "plan_prefix",
        "plans",
        "pool",
        "queued",
        "receipted",
        "ref",
        "revoked",
        "root",
        "tenant",
        "wanted",
    )

    def __init__(
        self,
        ref: tpb.SessionRef,
        pool: Pool,
        *,
        ordinal: int,
        tenant: str,
        client_name: str,
        namespace: str,
        root: bytes,
        num_answers: int,
    ) -> None:
        """Open the session in the pool. ``root``: of the prefixes that it shares. ``num_answers``:
        how many answers are remembered. Raises QuotaExceededError.
        """
        self.ref = ref
        self.id = ref.session_id
        self.pool = pool
        self.ordinal = ordinal
        self.tenant = tenant
        self.client_name = client_name
        self.namespace = namespace
        self.root = root
        self.expires_at_s = 0.0
        self.epochs = pool.epochs  # of the shards; a session ends when one of them changes
        # Of its grant, plans and receipts. Fields of later versions are left out.
        self.payload_version = pool.shards.payload_version
        self.native = pool.native
        self.handle = self.native.open_session(root, pool.owner(tenant))
        self.numbers = Numbering(num_answers)
        self.last_plan = 0
        self.plans: dict[int, PlanRecord] = {}  # in flight, oldest first
        self.receipted = [0] * pool.shards.num_shards  # highest plan receipted by each shard
        self.done = 0  # highest plan receipted by all
        # The fields that all plans of the session begin with, encoded.
        self.plan_prefix = plan_pb2.Plan(
            version=self.payload_version, session=ref, pool_id=pool.id, shard_epochs=self.epochs
        ).SerializeToString(deterministic=True)
        self.expected: dict[bytes, ExpectedReceipt] = {}  # of plans in flight, by payload
        self._receipt_prefixes = [
            plan_pb2.Receipt(
                version=self.payload_version,
                session=ref,
                pool_id=pool.id,
                shard_index=shard_index,
                epoch=epoch,
            ).SerializeToString(deterministic=True)
            for shard_index, epoch in enumerate(self.epochs)
        ]
        self._voided: deque[int] = deque(maxlen=_MAX_VOIDED)
        self.queued: QueuedAdmission | None = None
        self.wanted: dict[int, Wanted] = {}
        self.revoked: OrderedDict[int, None] = OrderedDict()
        self.ending: deque[tuple[int, int]] = deque()
        self.news: cpb.News | None = None
        self.is_drafted = False

    @property
    def resync_due(self) -> bool:
        """Return whether the next plan has to state all tables, and not only changes."""
        return self.native.resync_due(self.handle)

    def num_held(self) -> int:
        """Count the blocks of the session's tables and pins, of all layer groups and both tiers."""
        groups = self.pool.groups
        num_pinned = len(groups) * self.native.num_pinned(self.handle)
        return num_pinned + sum(group.num_blocks_held(self.handle) for group in groups)

    def may_forget(self, sequence_id: int) -> bool:
        """Return whether the id is that of a queued admission, or of a sequence that was cut."""
        waits = self.queued is not None and self.queued.names(sequence_id)
        return waits or sequence_id in self.revoked

    # Plans

    def oldest_plan_s(self) -> float | None:
        """Return when the oldest plan in flight was made; None if there is none."""
        for record in self.plans.values():
            return record.made_s
        return None

    def settle(self) -> None:
        """Do what the last answer need not wait for: replace its request by a digest, and compute
        which receipts its plan will get.
        """
        self.numbers.settle()
        number = self.last_plan
        record = self.plans.get(number)
        if record is None or record.receipts or not record.digest:
            return  # no plan, or one that is still being hashed
        end = b"\x30%b\x3a\x20%b" % (_varint(number), record.digest)
        receipts = [prefix + end for prefix in self._receipt_prefixes]
        for shard_index, payload in enumerate(receipts):
            signature = signing.sign(self.pool.key, signing.RECEIPT, payload)
            self.expected[payload] = ExpectedReceipt(signature, number, shard_index)
        self.plans[number] = PlanRecord(record.digest, record.made_s, receipts)

    def drop_plans(self, numbers: Sequence[int]) -> None:
        """Remove plans that have run or were aborted from those in flight."""
        for number in numbers:
            for payload in self.plans.pop(number).receipts:
                del self.expected[payload]

    def void(self, number: int) -> None:
        """Remember that the plan was aborted, so that aborting it again changes nothing."""
        self._voided.append(number)

    def is_voided(self, number: int) -> bool:
        """Return whether the plan was aborted."""
        return number in self._voided


def _varint(value: int) -> bytes:
    """Encode a value as protobuf's varint."""
    if value < 1 << 14:  # in two bytes at most, as most are
        return bytes((value & 0x7F | 0x80, value >> 7) if value > 0x7F else (value,))
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
