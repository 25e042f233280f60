"""Receipts: data planes' signed statements that plans ran.

All receipts of a request are checked before one is applied. A data plane runs a session's plans in
order and refuses one whose predecessor has not run, so a plan's receipt stands for all before it.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from control_plane.sessions.pool_admission import PoolAdmission
from control_plane.sessions.session import Session
from control_plane.steps.slices import SLICE_BLOCKS, SLICE_RECEIPTS, SLICE_SEQUENCES
from kvplane.errors import (
    BadSignatureError,
    InvalidRequestError,
    ProtocolMismatchError,
    StaleEpochError,
    StaleIncarnationError,
)
from kvplane.slices import Slices
from kvplane.wire import columns, signing
from kvplane.wire.columns import INT64
from kvplane.wire.plane.v1 import plan_pb2
from kvplane.wire.twin import whole
from kvplane.wire.v1 import types_pb2 as tpb


def take_receipts(
    session: Session, admission: PoolAdmission, payloads: Sequence[tpb.SignedPayload]
) -> Slices[None]:
    """Verify all receipts of a request, then apply the plans that every shard has run, and end the
    sequences that were to end with them.

    Receipts of plans receipted or aborted before are skipped. Raises BadSignatureError,
    InvalidRequestError, ProtocolMismatchError, StaleEpochError or StaleIncarnationError naming
    ``receipts[i]``; then none is applied.
    """
    if not payloads:
        return
    highest = [*session.receipted]
    for i, signed in enumerate(payloads):
        if i and i % SLICE_RECEIPTS == 0:
            yield
        expected = session.expected.get(signed.payload)
        if (
            expected is not None
            and signed.type == signing.RECEIPT
            and hmac.compare_digest(signed.signature, expected.signature)
        ):
            _, number, shard = expected
        else:
            number, shard = _checked(session, signed, f"receipts[{i}]")
        if number > highest[shard] and number in session.plans:
            highest[shard] = number
    session.receipted = highest
    done = min(highest)
    if done > session.done:
        session.done = done
        session.drop_plans([number for number in session.plans if number <= done])
        while session.native.receipted(session.handle, done, SLICE_BLOCKS):
            yield
        yield from end_with_plans(session, admission, done)


def end_with_plans(session: Session, admission: PoolAdmission, last: int) -> Slices[None]:
    """End the sequences that were to end with plans up to ``last``, which have run or were aborted.
    The session's next plan drops their tables. A sequence that has ended already, or whose id is of
    a later one by now, is passed over.
    """
    num_ended, native, ending = 0, session.native, session.ending
    while ending and ending[0][0] <= last:
        number, sequence_id = ending.popleft()
        if not native.has_sequence(session.handle, sequence_id):
            session.revoked.pop(sequence_id, None)
            continue
        (_, admitted_by, *_) = native.states(session.handle, columns.pack(INT64, [sequence_id]))
        if columns.read(INT64, admitted_by, "admitted_by")[0] != number:
            continue
        native.finish_sequence(session.handle, sequence_id)
        num_ended += 1
        if num_ended % SLICE_SEQUENCES == 0:
            yield
    if num_ended:
        admission.apply(session)


def _checked(session: Session, signed: tpb.SignedPayload, at: str) -> tuple[int, int]:
    """Verify a receipt other than those expected; returns its plan's and its shard's number."""
    payload = signed.payload
    signing.verify(
        session.pool.key, signing.RECEIPT, signed.type, payload, signed.signature, field=at
    )
    try:
        receipt = plan_pb2.Receipt.FromString(payload)
    except DecodeError as error:
        raise InvalidRequestError("is not a Receipt", field=f"{at}.payload") from error
    _check(session, receipt, payload, at)
    return receipt.plan_number, receipt.shard_index


def _check(session: Session, receipt: plan_pb2.Receipt, payload: bytes, at: str) -> None:
    if receipt.version != session.payload_version:
        raise ProtocolMismatchError(
            f"is {receipt.version}, and the session's plans have {session.payload_version}",
            field=f"{at}.version",
        )
    receipt = whole(receipt, payload, field=f"{at}.payload", reader="control plane")
    epochs = session.epochs
    if receipt.session.incarnation != session.ref.incarnation:
        raise StaleIncarnationError(
            "is of another control plane", field=f"{at}.session.incarnation"
        )
    if receipt.session.session_id != session.id:
        raise BadSignatureError("is another session's", field=f"{at}.session.session_id")
    if receipt.pool_id != session.pool.id:
        raise BadSignatureError("is another pool's", field=f"{at}.pool_id")
    if not 0 <= receipt.shard_index < len(epochs):
        raise BadSignatureError("is not a shard of the pool", field=f"{at}.shard_index")
    if receipt.epoch != epochs[receipt.shard_index]:
        raise StaleEpochError("is of another run of the shard", field=f"{at}.epoch")
    if not 0 < receipt.plan_number <= session.last_plan:
        raise BadSignatureError("is not the number of a plan", field=f"{at}.plan_number")
    record = session.plans.get(receipt.plan_number)
    if record is not None and receipt.plan_digest != record.digest:
        raise BadSignatureError("is of another plan", field=f"{at}.plan_digest")
