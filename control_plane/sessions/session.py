"""One engine's lease on a pool: its numbers, its plans in flight, and why ended ones ended.

Its sequences, their tables and the draft of its next plan are in the native core, under ``handle``.
Invariant: a plan is in ``plans`` until it is receipted or aborted.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import Final, NamedTuple

from control_plane.pools.pool import Pool
from control_plane.sessions.numbering import Numbering
from kvplane.errors import (
    KvplaneError,
    MissingReceiptError,
    SessionExpiredError,
    SessionNotFoundError,
    StaleEpochError,
)
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.v1 import types_pb2 as tpb

_MAX_VOIDED: Final = 1024
_MAX_SESSION_ID: Final = 2**53 - 1
END_CAUSES: Final[dict[type[KvplaneError], str]] = {
    SessionNotFoundError: "closed",
    SessionExpiredError: "expired",
    StaleEpochError: "epoch",
    MissingReceiptError: "receipt",
}
"""Why sessions end, for metrics, by the error that their callers then get."""


def random_session_id() -> int:
    """Return a session id that nobody can guess."""
    return 1 + secrets.randbelow(_MAX_SESSION_ID)


class PlanRecord(NamedTuple):
    """A plan in flight: its SHA-256, when it was made, and the receipts that are expected of it."""

    digest: bytes
    made_s: float
    receipts: Sequence[bytes] = ()


class ExpectedReceipt(NamedTuple):
    """What a shard signs once it has run a plan."""

    signature: bytes
    plan_number: int
    shard_index: int


class Session:
    """State of an open session; what changes it is in the planner, receipts and abort."""

    __slots__ = (
        "_receipt_prefixes",
        "_voided",
        "client_name",
        "done",
        "epochs",
        "expected",
        "expires_at_s",
        "handle",
        "id",
        "last_plan",
        "namespace",
        "native",
        "numbers",
        "ordinal",
        "payload_version",
        "plan_prefix",
        "plans",
        "pool",
        "receipted",
        "ref",
        "root",
        "tenant",
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
        """Open it in the pool. ``root``: of the prefixes that it shares. ``num_answers``: how many
        answers are remembered. Raises QuotaExceededError.
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
        self.handle = pool.open(self.id, tenant, root)
        self.native = pool.native
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

    @property
    def resync_due(self) -> bool:
        """Whether the next plan says what all tables are."""
        return self.native.resync_due(self.handle)

    def num_held(self) -> int:
        """Count the blocks in its tables, of all layer groups and both tiers."""
        return sum(group.num_blocks_held(self.handle) for group in self.pool.groups)

    def end(self, *, lacks_receipt: bool = False) -> None:
        """Release all blocks. They are retired until every shard has fenced the session."""
        self.drop_plans([*self.plans])
        self.pool.end(self.ref, self.ordinal, lacks_receipt=lacks_receipt)

    # Plans

    def oldest_plan_s(self) -> float | None:
        """Return when the oldest plan in flight was made; None if there is none."""
        for record in self.plans.values():
            return record.made_s
        return None

    def settle(self) -> None:
        """Do what the last answer need not wait for: let go of its request, and expect the receipts
        of its plan, so that those are known when they come.
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
        self.plans[number] = record._replace(receipts=receipts)

    def drop_plans(self, numbers: Sequence[int]) -> None:
        """Forget plans in flight: they have run, or are aborted."""
        for number in numbers:
            for payload in self.plans.pop(number).receipts:
                del self.expected[payload]

    def void(self, number: int) -> None:
        """Remember that the plan is aborted, so that aborting it again changes nothing."""
        self._voided.append(number)

    def is_voided(self, number: int) -> bool:
        """Whether the plan was aborted."""
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


_WHY_ENDED: Final[dict[type[KvplaneError], str]] = {
    SessionExpiredError: "ended when nothing had renewed its lease in time",
    SessionNotFoundError: "is not open: it was closed, or never opened by this tenant",
    StaleEpochError: "ended when a data plane of its pool was restarted",
    MissingReceiptError: "ended because a shard did not receipt in time a plan that others had",
}


class EndedSessions:
    """Why recently ended sessions ended, to tell their callers."""

    __slots__ = ("_max_sessions", "_reasons")

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._reasons: OrderedDict[int, tuple[str, type[KvplaneError]]] = OrderedDict()

    def add(self, session: Session, reason: type[KvplaneError]) -> None:
        """Add a session that ended; later calls raise ``reason``."""
        self._reasons[session.id] = (session.tenant, reason)
        while len(self._reasons) > self._max_sessions:
            self._reasons.popitem(last=False)

    def knows(self, session_id: int, tenant: str | None = None) -> bool:
        """Whether a session of this id, and the tenant's if one is given, is among them."""
        owner, _ = self._reasons.get(session_id, (None, None))
        return owner is not None and tenant in (None, owner)

    def error(self, session_id: int, tenant: str) -> KvplaneError:
        """Return the error for a session that is not open, or not the tenant's."""
        owner, reason = self._reasons.get(session_id, (tenant, SessionNotFoundError))
        if owner != tenant:
            reason = SessionNotFoundError
        return reason(
            f"session {session_id} {_WHY_ENDED[reason]}: open another and admit its sequences "
            "again",
            field="session.session_id",
        )
