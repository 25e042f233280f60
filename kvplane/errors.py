"""Everything that can go wrong, in one tree.

    KvplaneError
    ├── InvalidRequestError         INVALID_ARGUMENT      malformed; ``field`` says where
    ├── NotFoundError
    │   ├── PoolNotFoundError       NOT_FOUND
    │   ├── SessionNotFoundError    NOT_FOUND             never opened, closed, or another tenant's
    │   └── SequenceNotFoundError   NOT_FOUND
    ├── SequenceExistsError         ALREADY_EXISTS
    ├── CapacityError
    │   ├── PoolFullError           RESOURCE_EXHAUSTED    LATER: after receipts, frees or swaps
    │   ├── NeverFitsError          OUT_OF_RANGE          NEVER: larger than the pool
    │   ├── QuotaExceededError      RESOURCE_EXHAUSTED
    │   └── TooManyPlansInFlightError  RESOURCE_EXHAUSTED
    ├── StaleError                                        open a new session and admit again
    │   ├── SessionExpiredError     ABORTED
    │   ├── StaleEpochError         ABORTED
    │   ├── MissingReceiptError     ABORTED               a shard did not say that a plan ran
    │   ├── StaleIncarnationError   ABORTED
    │   └── StaleGenerationError    ABORTED
    ├── ConflictError
    │   ├── LayoutMismatchError     FAILED_PRECONDITION
    │   ├── ProtocolMismatchError   FAILED_PRECONDITION
    │   ├── StepConflictError       FAILED_PRECONDITION   a number sent again, with other content
    │   ├── StepOutOfOrderError     FAILED_PRECONDITION
    │   ├── PlanConflictError       FAILED_PRECONDITION   a plan's number again, with another digest
    │   ├── PlanOutOfOrderError     FAILED_PRECONDITION
    │   ├── PlanReceiptedError      FAILED_PRECONDITION
    │   ├── PositionMismatchError   FAILED_PRECONDITION   caller and plane differ on a position
    │   ├── SequenceBusyError       FAILED_PRECONDITION   it computes in the same step
    │   ├── SequenceSwappedError    FAILED_PRECONDITION   it is in the other tier
    │   ├── SequenceRevokedError    ABORTED               it was cut for others: admit it again
    │   ├── RevisionTooOldError     ABORTED               start again from a snapshot
    │   ├── BlockNotWritableError   FAILED_PRECONDITION   a write to a published or shared block
    │   ├── BlockNotWrittenError    FAILED_PRECONDITION   a read of a block without contents
    │   └── BlockInUseError         FAILED_PRECONDITION   a block to be forgotten is in use
    ├── UnauthenticatedError        UNAUTHENTICATED
    ├── NotPermittedError           PERMISSION_DENIED
    ├── UnavailableError
    │   ├── PlaneUnavailableError   UNAVAILABLE           it cannot be reached, or is stopping
    │   └── PoolNotReadyError       UNAVAILABLE           a shard is missing or has not reported yet
    ├── DeadlineExceededError       DEADLINE_EXCEEDED
    ├── CancelledError              CANCELLED
    ├── IntegrityError
    │   ├── BadSignatureError       DATA_LOSS
    │   └── ChecksumMismatchError   DATA_LOSS
    └── InternalError               INTERNAL              a bug or a failed device: see server log

ABORTED errors ask the caller to begin again at a higher level: with a new session, a new admission
or a new snapshot. FAILED_PRECONDITION errors ask it to do something else first.

The planes raise these, one interceptor maps them to gRPC statuses by ``CODES``, and the client maps
them back by ``REASONS``: the caller catches the error that the core raised. This module does not
import gRPC.
"""

from __future__ import annotations

from typing import Final

CODES: Final[dict[type[KvplaneError], str]] = {}
"""gRPC status name of each error that a plane raises. For a reason that it does not know, a client
raises a base class that is not in here.
"""


class KvplaneError(Exception):
    """Base class of all errors. ``message`` is for people; ``field`` names the request field at
    fault, dotted, or is empty.

    ``retry_delay_s``: seconds to wait before trying again, None when trying again cannot help.
    ``request_id``: of the call that a server refused, as its log names it; else empty.
    ``next_number``: of the request to send next, if the refused one has a number and its session
    was found; else 0.
    """

    request_id = ""
    next_number = 0

    def __init_subclass__(cls, code: str = "") -> None:
        if code:
            CODES[cls] = code

    def __init__(
        self, message: str, *, field: str = "", retry_delay_s: float | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.retry_delay_s = retry_delay_s

    @property
    def reason(self) -> str:
        """The reason on the wire: the class name without ``Error`` in UPPER_SNAKE case."""
        return reason_of(type(self))


class InvalidRequestError(KvplaneError, code="INVALID_ARGUMENT"):
    """The request is malformed."""


class NotFoundError(KvplaneError):
    """The request refers to something that does not exist."""


class PoolNotFoundError(NotFoundError, code="NOT_FOUND"):
    """No shard of this pool has registered."""


class SessionNotFoundError(NotFoundError, code="NOT_FOUND"):
    """The session was never opened, was closed, or is not the caller's."""


class SequenceNotFoundError(NotFoundError, code="NOT_FOUND"):
    """The session has no such sequence."""


class SequenceExistsError(KvplaneError, code="ALREADY_EXISTS"):
    """The session has a live sequence of this id."""


class CapacityError(KvplaneError):
    """Base class: there is no room for what was requested."""


class PoolFullError(CapacityError, code="RESOURCE_EXHAUSTED"):
    """LATER: the pool has no room now, but will after receipts, frees or swaps."""


class NeverFitsError(CapacityError, code="OUT_OF_RANGE"):
    """NEVER: the request needs more than the whole pool has."""


class QuotaExceededError(CapacityError, code="RESOURCE_EXHAUSTED"):
    """The caller would exceed a limit on what it may open, send or hold."""


class TooManyPlansInFlightError(CapacityError, code="RESOURCE_EXHAUSTED"):
    """The session has too many plans without receipts; submit receipts before the next step."""


class StaleError(KvplaneError):
    """The request refers to something that has ended: open a new session and admit again."""


class SessionExpiredError(StaleError, code="ABORTED"):
    """The lease ran out, or the session was fenced."""


class StaleEpochError(StaleError, code="ABORTED"):
    """The data plane has restarted since the plan, grant or session was made."""


class MissingReceiptError(StaleError, code="ABORTED"):
    """The session ended: a shard sent no receipt in time for a plan that other shards ran."""


class StaleIncarnationError(StaleError, code="ABORTED"):
    """The control plane has restarted since it opened the session."""


class StaleGenerationError(StaleError, code="ABORTED"):
    """The block was allocated again since, or taken for another session."""


class ConflictError(KvplaneError):
    """The request does not fit the present state."""


class LayoutMismatchError(ConflictError, code="FAILED_PRECONDITION"):
    """The two sides' layouts differ."""


class ProtocolMismatchError(ConflictError, code="FAILED_PRECONDITION"):
    """The two sides are of releases that cannot work together."""


class StepConflictError(ConflictError, code="FAILED_PRECONDITION"):
    """A step's number came again with other content."""


class StepOutOfOrderError(ConflictError, code="FAILED_PRECONDITION"):
    """A step's number is not the next one, nor one that is still remembered."""


class PlanConflictError(ConflictError, code="FAILED_PRECONDITION"):
    """A plan's number came again with another digest."""


class PlanOutOfOrderError(ConflictError, code="FAILED_PRECONDITION"):
    """The plan does not follow the last one, or a layer is of another plan or pass than it."""


class PlanReceiptedError(ConflictError, code="FAILED_PRECONDITION"):
    """The plan, or one after it, has run: it cannot be aborted."""


class PositionMismatchError(ConflictError, code="FAILED_PRECONDITION"):
    """The caller and the control plane disagree on how far a sequence is."""


class SequenceBusyError(ConflictError, code="FAILED_PRECONDITION"):
    """The sequence computes in the same step."""


class SequenceSwappedError(ConflictError, code="FAILED_PRECONDITION"):
    """The sequence is in the other tier than the operation needs."""


class SequenceRevokedError(ConflictError, code="ABORTED"):
    """The sequence was cut: its blocks were reclaimed for others. Admit it again."""


class RevisionTooOldError(ConflictError, code="ABORTED"):
    """Changes since that revision of a prefix index are not kept: start again from a snapshot."""


class BlockNotWritableError(ConflictError, code="FAILED_PRECONDITION"):
    """A write to a block that is published or shared was refused."""


class BlockNotWrittenError(ConflictError, code="FAILED_PRECONDITION"):
    """A read of a block in which the session has neither written nor found anything."""


class BlockInUseError(ConflictError, code="FAILED_PRECONDITION"):
    """A block table refers to a block of the prefix that was to be forgotten."""


class UnauthenticatedError(KvplaneError, code="UNAUTHENTICATED"):
    """The caller did not identify itself."""


class NotPermittedError(KvplaneError, code="PERMISSION_DENIED"):
    """The caller lacks the role or the rights for this request."""


class UnavailableError(KvplaneError):
    """Base class: the service is not available now; try again a little later."""


class PlaneUnavailableError(UnavailableError, code="UNAVAILABLE"):
    """The plane cannot be reached, or is stopping."""


class PoolNotReadyError(UnavailableError, code="UNAVAILABLE"):
    """A shard of the pool is missing or has not reported yet."""


class DeadlineExceededError(KvplaneError, code="DEADLINE_EXCEEDED"):
    """No answer came within the deadline."""


class CancelledError(KvplaneError, code="CANCELLED"):
    """The call was cancelled."""


class IntegrityError(KvplaneError):
    """Base class: received data is not what its author wrote."""


class BadSignatureError(IntegrityError, code="DATA_LOSS"):
    """A signed payload's signature or type is wrong."""


class ChecksumMismatchError(IntegrityError, code="DATA_LOSS"):
    """A checksum is wrong."""


class InternalError(KvplaneError, code="INTERNAL"):
    """A bug, or a device that failed; the server's log has more."""


def reason_of(cls: type[KvplaneError]) -> str:
    """Return the reason of an error class: ``PoolFullError`` -> ``POOL_FULL``."""
    name = cls.__name__.removesuffix("Error")
    return "".join(f"_{c}" if c.isupper() and i else c for i, c in enumerate(name)).upper()


REASONS: Final[dict[str, type[KvplaneError]]] = {reason_of(cls): cls for cls in CODES}
