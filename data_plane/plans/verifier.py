"""Checks that a signed payload was written by this pool's control plane for this process.

A payload that fails is refused here, so a forged or outdated one never reaches tables or kernels.
"""

from __future__ import annotations

import threading
import time
from typing import Final, TypeVar

from google.protobuf.message import DecodeError

from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    PoolNotReadyError,
    ProtocolMismatchError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.wire import signing
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.protocol import NEWEST_PAYLOAD_VERSION, OLDEST_PAYLOAD_VERSION
from kvplane.wire.twin import whole
from kvplane.wire.v1 import types_pb2 as pb

Payload = TypeVar("Payload", plan_pb2.Plan, plan_pb2.SessionGrant, plan_pb2.PinGrant)

_MAX_EPOCH: Final = 2**64 - 1


class Verifier:
    """Verifies grants and plans, and signs receipts, for one epoch, one incarnation and one key."""

    def __init__(self, pool_id: str, shard_index: int, num_shards: int, epoch: int = 0) -> None:
        """``epoch``: higher than the replaced process's; 0 takes the clock's nanoseconds."""
        if not 0 <= epoch <= _MAX_EPOCH:
            raise InvalidRequestError(f"must be 0 to {_MAX_EPOCH}, is {epoch}", field="epoch")
        self.pool_id = pool_id
        self.shard_index = shard_index
        self.num_shards = num_shards
        self.epoch = epoch or _epochs.next()
        self.incarnation = 0
        self._key = b""

    @property
    def key_id(self) -> bytes:
        """Identifier of the pool's key; empty before there is one."""
        return signing.key_id(self._key)

    def install(self, incarnation: int, key: bytes) -> None:
        """Install a control plane's key. Raises StaleIncarnationError when a higher incarnation was
        seen, and InvalidRequestError for a key of the wrong length.
        """
        if incarnation < max(1, self.incarnation):
            raise StaleIncarnationError(
                f"this data plane has registered with incarnation {self.incarnation} of the "
                f"control plane, so incarnation {incarnation} has been replaced: stop that process",
                field="incarnation",
            )
        if len(key) != signing.KEY_BYTES:
            raise InvalidRequestError(
                f"must be {signing.KEY_BYTES} bytes, is {len(key)}", field="key"
            )
        self.incarnation, self._key = incarnation, key

    def check_incarnation(self, incarnation: int, field: str) -> None:
        """Raise StaleIncarnationError for an incarnation other than the one registered with."""
        if incarnation != self.incarnation:
            raise StaleIncarnationError(
                f"this data plane is registered with incarnation {self.incarnation} of the control "
                f"plane, not {incarnation}: open another session",
                field=field,
            )

    def grant(self, signed: pb.SignedPayload) -> plan_pb2.SessionGrant:
        """Verify a session's grant and return it parsed. Raises as ``plan`` does."""
        return self._read(signed, signing.GRANT, plan_pb2.SessionGrant, "grant")[0]

    def pin_grant(self, signed: pb.SignedPayload) -> plan_pb2.PinGrant:
        """Verify a grant to read pinned blocks and return it parsed. Raises as ``plan`` does."""
        return self._read(signed, signing.PIN_GRANT, plan_pb2.PinGrant, "pin_grant")[0]

    def plan(self, signed: pb.SignedPayload) -> tuple[plan_pb2.Plan, bytes]:
        """Verify a plan for this pool, epoch and incarnation. Returns it and its payload's digest.

        Raises PoolNotReadyError before there is a key, BadSignatureError, StaleEpochError,
        StaleIncarnationError, ProtocolMismatchError for an unknown version, and InvalidRequestError
        for a payload that does not parse, is for another pool, or has unknown fields.
        """
        return self._read(signed, signing.PLAN, plan_pb2.Plan, "plan")

    def receipt(
        self, session: pb.SessionRef, plan_number: int, plan_digest: bytes, *, version: int
    ) -> pb.SignedPayload:
        """Return a signed receipt, which states that a plan has run. ``version``: the plan's
        payload version, which the control plane that wrote it reads too.
        """
        payload = plan_pb2.Receipt(
            version=version,
            session=session,
            pool_id=self.pool_id,
            shard_index=self.shard_index,
            epoch=self.epoch,
            plan_number=plan_number,
            plan_digest=plan_digest,
        ).SerializeToString()
        return pb.SignedPayload(
            type=signing.RECEIPT,
            payload=payload,
            signature=signing.sign(self._key, signing.RECEIPT, payload),
        )

    def _read(
        self, signed: pb.SignedPayload, want_type: str, cls: type[Payload], field: str
    ) -> tuple[Payload, bytes]:
        if not self._key:
            raise PoolNotReadyError(
                "the data plane has not registered with a control plane yet: try again",
                retry_delay_s=0.5,
            )
        try:
            digest = signing.verify(
                self._key, want_type, signed.type, signed.payload, signed.signature, field=field
            )
        except BadSignatureError:
            # A payload for an earlier run was signed with an earlier key. It is refused either
            # way, but the error for an earlier run is more useful: opening another session helps.
            if signed.type == want_type:
                self._refuse_if_stale(signed.payload, cls, field)
            raise
        try:
            message = cls.FromString(signed.payload)
        except DecodeError as error:
            raise InvalidRequestError(
                f"must be a {want_type}, but does not parse", field=f"{field}.payload"
            ) from error
        oldest, newest = OLDEST_PAYLOAD_VERSION, NEWEST_PAYLOAD_VERSION
        if not oldest <= message.version <= newest:
            which = "this data plane" if message.version > newest else "the control plane"
            raise ProtocolMismatchError(
                f"the payload has version {message.version}, and this data plane reads {oldest} to "
                f"{newest}: update {which}",
                field=f"{field}.version",
            )
        message = whole(message, signed.payload, field=f"{field}.payload", reader="data plane")
        if message.pool_id != self.pool_id:
            raise InvalidRequestError(
                f"the payload is for pool {message.pool_id!r}, and this is {self.pool_id!r}",
                field=f"{field}.pool_id",
            )
        if len(message.shard_epochs) != self.num_shards:
            raise InvalidRequestError(
                f"must have one epoch for each of the pool's {self.num_shards} shards, has "
                f"{len(message.shard_epochs)}",
                field=f"{field}.shard_epochs",
            )
        self._check_run(message, field)
        return message, digest

    def _refuse_if_stale(self, payload: bytes, cls: type[Payload], field: str) -> None:
        try:
            message = cls.FromString(payload)
        except DecodeError:
            return
        if message.pool_id == self.pool_id and len(message.shard_epochs) == self.num_shards:
            self._check_run(message, field)

    def _check_run(
        self, message: plan_pb2.Plan | plan_pb2.SessionGrant | plan_pb2.PinGrant, field: str
    ) -> None:
        epoch = message.shard_epochs[self.shard_index]
        if epoch != self.epoch:
            raise StaleEpochError(
                f"the payload is for epoch {epoch} of this shard, which is now {self.epoch}: open "
                "another session",
                field=f"{field}.shard_epochs[{self.shard_index}]",
            )
        self.check_incarnation(message.session.incarnation, f"{field}.session.incarnation")


class _Epochs:
    """Generates epochs: nanoseconds since 1970, strictly ascending within a process."""

    def __init__(self) -> None:
        self._last = 0
        self._lock = threading.Lock()

    def next(self) -> int:
        with self._lock:
            self._last = max(self._last + 1, time.time_ns())
            return self._last


_epochs: Final = _Epochs()
