"""Everything that can go wrong, in one tree.

    KvplaneError
    ├── InvalidRequestError         INVALID_ARGUMENT      malformed; ``field`` says where
    ├── NotFoundError
    │   ├── PoolNotFoundError       NOT_FOUND
    │   ├── SessionNotFoundError    NOT_FOUND             never opened, over, or another's
    │   └── SequenceNotFoundError   NOT_FOUND
    ├── SequenceExistsError         ALREADY_EXISTS
    ├── CapacityError
    │   ├── PoolFullError           RESOURCE_EXHAUSTED    LATER: after receipts, frees or swaps
    │   ├── NeverFitsError          OUT_OF_RANGE          NEVER: larger than the pool
    │   ├── QuotaExceededError      RESOURCE_EXHAUSTED
    │   └── TooManyPlansInFlightError  RESOURCE_EXHAUSTED
    ├── StaleError                                        open a new session and admit again
    │   ├── SessionExpiredError     FAILED_PRECONDITION
    │   ├── StaleEpochError         FAILED_PRECONDITION
    │   ├── StaleIncarnationError   FAILED_PRECONDITION
    │   └── StaleGenerationError    FAILED_PRECONDITION
    ├── ConflictError
    │   ├── LayoutMismatchError     FAILED_PRECONDITION
    │   ├── ProtocolMismatchError   FAILED_PRECONDITION
    │   ├── StepConflictError       FAILED_PRECONDITION   a number again, with other content
    │   ├── StepOutOfOrderError     FAILED_PRECONDITION
    │   ├── PlanConflictError       FAILED_PRECONDITION   a plan's number again, with another digest
    │   ├── PlanOutOfOrderError     FAILED_PRECONDITION
    │   ├── PlanReceiptedError      FAILED_PRECONDITION
    │   ├── PositionMismatchError   FAILED_PRECONDITION   a sequence is further, or less far
    │   ├── SequenceBusyError       FAILED_PRECONDITION   it computes in this very step
    │   ├── SequenceSwappedError    FAILED_PRECONDITION   it is in the other tier
    │   ├── BlockNotWritableError   FAILED_PRECONDITION   a write to a published or shared block
    │   └── BlockInUseError         FAILED_PRECONDITION   another session's block table refers to it
    ├── UnauthenticatedError        UNAUTHENTICATED
    ├── NotPermittedError           PERMISSION_DENIED
    ├── UnavailableError
    │   ├── PlaneUnavailableError   UNAVAILABLE           it can not be reached, or is stopping
    │   └── PoolNotReadyError       UNAVAILABLE           a shard is missing or has not reported yet
    ├── DeadlineExceededError       DEADLINE_EXCEEDED
    ├── CancelledError              CANCELLED
    ├── IntegrityError
    │   ├── BadSignatureError       DATA_LOSS
    │   └── ChecksumMismatchError   DATA_LOSS
    └── InternalError               INTERNAL              a bug; the server's log has more

The planes raise these, one interceptor maps them to gRPC statuses by ``CODES``, and the client maps
them back by ``REASONS``: what the core raises is what the caller catches. This module knows no
gRPC.
"""

from __future__ import annotations

from typing import Final


class KvplaneError(Exception):
    """Base of all. ``message`` is for people; ``field`` names the request field at fault, dotted,
    or is empty.

    ``retry_delay_s``: seconds to wait before trying again, None when trying again can not help.
    """

    def __init__(
        self, message: str, *, field: str = "", retry_delay_s: float | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.retry_delay_s = retry_delay_s

    @property
    def reason(self) -> str:
        """UPPER_SNAKE of the class name without ``Error``: what travels on the wire."""
        return reason_of(type(self))


class InvalidRequestError(KvplaneError):
    """The request is malformed."""


class NotFoundError(KvplaneError):
    """What the request refers to is not there."""


class PoolNotFoundError(NotFoundError):
    """No shard of this pool has registered."""


class SessionNotFoundError(NotFoundError):
    """The session was never opened, has ended, or is not the caller's."""


class SequenceNotFoundError(NotFoundError):
    """The session has no such sequence."""


class SequenceExistsError(KvplaneError):
    """The session has a live sequence of this id."""


class CapacityError(KvplaneError):
    """There is no room."""


class PoolFullError(CapacityError):
    """LATER: no room now."""


class NeverFitsError(CapacityError):
    """NEVER: larger than the pool."""


class QuotaExceededError(CapacityError):
    """The caller has used up what it may have."""


class TooManyPlansInFlightError(CapacityError):
    """Receipts are due before another step."""


class StaleError(KvplaneError):
    """What the request refers to has ended: open a new session and admit again."""


class SessionExpiredError(StaleError):
    """The lease ran out, or the session was fenced."""


class StaleEpochError(StaleError):
    """The data plane is another process than the one that the plan or grant is for."""


class StaleIncarnationError(StaleError):
    """The control plane is another process than the one that opened the session."""


class StaleGenerationError(StaleError):
    """The block has been allocated again since."""


class ConflictError(KvplaneError):
    """The request does not fit the present state."""


class LayoutMismatchError(ConflictError):
    """The two sides' layouts differ."""


class ProtocolMismatchError(ConflictError):
    """No protocol version is spoken by both."""


class StepConflictError(ConflictError):
    """A step's number came again with other content."""


class StepOutOfOrderError(ConflictError):
    """A step's number is not the next one, nor one that is still remembered."""


class PlanConflictError(ConflictError):
    """A plan's number came again with another digest."""


class PlanOutOfOrderError(ConflictError):
    """The plan does not follow the one that ran last."""


class PlanReceiptedError(ConflictError):
    """The plan has run and can not be aborted."""


class PositionMismatchError(ConflictError):
    """The caller and the control plane disagree on how far a sequence is."""


class SequenceBusyError(ConflictError):
    """The sequence computes in this very step."""


class SequenceSwappedError(ConflictError):
    """The sequence is in the other tier than the operation needs."""


class BlockNotWritableError(ConflictError):
    """A write to a block that is published or shared was refused."""


class BlockInUseError(ConflictError):
    """A block that another session's block table refers to was allocated."""


class UnauthenticatedError(KvplaneError):
    """The caller did not show who it is."""


class NotPermittedError(KvplaneError):
    """The caller may not do this."""


class UnavailableError(KvplaneError):
    """Try again a little later."""


class PlaneUnavailableError(UnavailableError):
    """The plane can not be reached, or is stopping."""


class PoolNotReadyError(UnavailableError):
    """A shard of the pool is missing or has not reported yet."""


class DeadlineExceededError(KvplaneError):
    """No answer within the deadline."""


class CancelledError(KvplaneError):
    """The call was cancelled."""


class IntegrityError(KvplaneError):
    """Data is not what its author wrote."""


class BadSignatureError(IntegrityError):
    """A signed payload's signature or type is wrong."""


class ChecksumMismatchError(IntegrityError):
    """A checksum is wrong."""


class InternalError(KvplaneError):
    """A bug."""


# gRPC status name of each leaf; a base class not listed here is never raised itself.
CODES: Final[dict[type[KvplaneError], str]] = {
    InvalidRequestError: "INVALID_ARGUMENT",
    PoolNotFoundError: "NOT_FOUND",
    SessionNotFoundError: "NOT_FOUND",
    SequenceNotFoundError: "NOT_FOUND",
    SequenceExistsError: "ALREADY_EXISTS",
    PoolFullError: "RESOURCE_EXHAUSTED",
    NeverFitsError: "OUT_OF_RANGE",
    QuotaExceededError: "RESOURCE_EXHAUSTED",
    TooManyPlansInFlightError: "RESOURCE_EXHAUSTED",
    SessionExpiredError: "FAILED_PRECONDITION",
    StaleEpochError: "FAILED_PRECONDITION",
    StaleIncarnationError: "FAILED_PRECONDITION",
    StaleGenerationError: "FAILED_PRECONDITION",
    LayoutMismatchError: "FAILED_PRECONDITION",
    ProtocolMismatchError: "FAILED_PRECONDITION",
    StepConflictError: "FAILED_PRECONDITION",
    StepOutOfOrderError: "FAILED_PRECONDITION",
    PlanConflictError: "FAILED_PRECONDITION",
    PlanOutOfOrderError: "FAILED_PRECONDITION",
    PlanReceiptedError: "FAILED_PRECONDITION",
    PositionMismatchError: "FAILED_PRECONDITION",
    SequenceBusyError: "FAILED_PRECONDITION",
    SequenceSwappedError: "FAILED_PRECONDITION",
    BlockNotWritableError: "FAILED_PRECONDITION",
    BlockInUseError: "FAILED_PRECONDITION",
    UnauthenticatedError: "UNAUTHENTICATED",
    NotPermittedError: "PERMISSION_DENIED",
    PlaneUnavailableError: "UNAVAILABLE",
    PoolNotReadyError: "UNAVAILABLE",
    DeadlineExceededError: "DEADLINE_EXCEEDED",
    CancelledError: "CANCELLED",
    BadSignatureError: "DATA_LOSS",
    ChecksumMismatchError: "DATA_LOSS",
    InternalError: "INTERNAL",
}


def reason_of(cls: type[KvplaneError]) -> str:
    """``PoolFullError`` -> ``POOL_FULL``."""
    name = cls.__name__.removesuffix("Error")
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


REASONS: Final[dict[str, type[KvplaneError]]] = {reason_of(cls): cls for cls in CODES}
