"""Who may speak: the key, the names of this life, and the check that a signed payload was written
for them.

Nothing that fails here is looked at any further, so that a forged or outdated payload never reaches
tables or kernels.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

from google.protobuf.message import DecodeError

from kvplane import signing
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    PoolNotReadyError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.v1 import types_pb2 as pb

Payload = TypeVar("Payload", pb.Plan, pb.SessionGrant)


class Authority:
    """Holds the epoch, the incarnation and the key. Signs receipts, verifies grants and plans."""

    def __init__(self, pool_id: str, shard_index: int, num_shards: int) -> None:
        self.pool_id = pool_id
        self.shard_index = shard_index
        self.num_shards = num_shards
        self.epoch = secrets.randbits(63) or 1
        self.incarnation = 0
        self._key = b""

    def install(self, incarnation: int, key: bytes) -> None:
        """Take a control plane's key. Raises StaleIncarnationError when a higher incarnation was
        seen.
        """
        if incarnation < max(1, self.incarnation):
            raise StaleIncarnationError(
                f"incarnation {incarnation} comes after {self.incarnation}", field="incarnation"
            )
        if len(key) != signing.KEY_BYTES:
            raise InvalidRequestError(f"must be {signing.KEY_BYTES} bytes", field="key")
        self.incarnation, self._key = incarnation, key

    def grant(self, signed: pb.SignedPayload) -> pb.SessionGrant:
        """A verified grant. Raises as ``plan`` does."""
        return self._read(signed, signing.GRANT, pb.SessionGrant, "grant")

    def plan(self, signed: pb.SignedPayload) -> pb.Plan:
        """A verified plan of this pool, epoch and incarnation.

        Raises PoolNotReadyError before there is a key, BadSignatureError, StaleEpochError,
        StaleIncarnationError, and InvalidRequestError for a payload that does not parse or names
        another pool.
        """
        return self._read(signed, signing.PLAN, pb.Plan, "plan")

    def receipt(self, session_id: int, plan_number: int, plan_digest: bytes) -> pb.SignedPayload:
        """The signed word that a plan has run."""
        payload = pb.Receipt(
            pool_id=self.pool_id,
            shard_index=self.shard_index,
            epoch=self.epoch,
            incarnation=self.incarnation,
            session_id=session_id,
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
    ) -> Payload:
        if not self._key:
            raise PoolNotReadyError("the data plane has not registered yet", retry_delay_s=0.5)
        try:
            signing.verify(
                self._key, want_type, signed.type, signed.payload, signed.signature, field=field
            )
        except BadSignatureError:
            # A payload of an earlier life was signed with an earlier key. It is refused either way;
            # if it says what life it is of, the caller is told that instead, because opening a new
            # session helps then.
            if signed.type == want_type:
                self._refuse_if_stale(signed.payload, cls, field)
            raise
        try:
            message = cls.FromString(signed.payload)
        except DecodeError as error:
            raise InvalidRequestError("does not parse", field=f"{field}.payload") from error
        if message.pool_id != self.pool_id:
            raise InvalidRequestError(
                f"is not {self.pool_id!r}, the pool held here", field=f"{field}.pool_id"
            )
        if len(message.shard_epochs) != self.num_shards:
            raise InvalidRequestError(
                f"must name {self.num_shards} shards", field=f"{field}.shard_epochs"
            )
        self._check_life(message, field)
        return message

    def _refuse_if_stale(self, payload: bytes, cls: type[Payload], field: str) -> None:
        try:
            message = cls.FromString(payload)
        except DecodeError:
            return
        if message.pool_id == self.pool_id and len(message.shard_epochs) == self.num_shards:
            self._check_life(message, field)

    def _check_life(self, message: pb.Plan | pb.SessionGrant, field: str) -> None:
        if message.shard_epochs[self.shard_index] != self.epoch:
            raise StaleEpochError(
                "is not this process's epoch", field=f"{field}.shard_epochs[{self.shard_index}]"
            )
        if message.incarnation != self.incarnation:
            raise StaleIncarnationError(
                "is not the incarnation registered with", field=f"{field}.incarnation"
            )
