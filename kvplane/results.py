"""What came of a step: items that were not done as errors, and columns as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvplane import columns
from kvplane.columns import INT32, INT64, UINT8
from kvplane.error_codec import from_wire
from kvplane.errors import InternalError, KvplaneError, NeverFitsError, PoolFullError
from kvplane.v1 import control_pb2 as pb
from kvplane.v1 import types_pb2

_TIERS: Final = {types_pb2.TIER_DEVICE: "device", types_pb2.TIER_HOST: "host"}


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A sequence as the control plane sees it; an element of the message SequenceStates.

    ``admitted_by``: the number of the step that admitted or forked it. Of its ``num_tokens`` known
    tokens the first ``num_scheduled_tokens`` were cached or are computed by some plan, and the KV
    of the first ``num_written_tokens`` is written. ``tier``: a ``types_pb2.Tier``.
    """

    sequence_id: int
    admitted_by: int
    num_tokens: int
    num_scheduled_tokens: int
    num_written_tokens: int
    num_cached_tokens: int
    num_blocks: int
    tier: int


def sequence_states(message: pb.SequenceStates) -> list[SequenceState]:
    """The elements, ids ascending. Raises InvalidRequestError when columns differ in length."""
    num_sequences = columns.count(INT64, message.sequence_ids)
    kinds = {"num_blocks": INT32, "tiers": UINT8}
    values = (
        columns.read(
            kinds.get(field.name, INT64),
            getattr(message, field.name),
            f"sequences.{field.name}",
            length=num_sequences,
        )
        for field in pb.SequenceStates.DESCRIPTOR.fields
    )
    return [SequenceState(*each) for each in zip(*values, strict=True)]


def error_of(failure: pb.ItemFailure) -> KvplaneError:
    """Why an item of an operation was not done: LATER is PoolFullError with its retry delay, NEVER
    is NeverFitsError, FAILED the error that the control plane gave.
    """
    if failure.status == pb.OPERATION_STATUS_FAILED:
        return from_wire(failure.error)
    shortage = failure.shortage
    text = (
        f"{shortage.num_blocks_needed} blocks of the {_TIERS.get(shortage.tier, 'unknown')} tier "
        f"are needed and {shortage.num_blocks_available} are available"
    )
    if failure.status == pb.OPERATION_STATUS_NEVER:
        return NeverFitsError(f"{text}: the pool can never hold this many; ask for fewer tokens")
    if failure.status != pb.OPERATION_STATUS_LATER:
        return InternalError(f"operation status {failure.status} is not known")
    delay_s = None
    if shortage.HasField("retry_delay"):
        delay_s = shortage.retry_delay.ToTimedelta().total_seconds()
    return PoolFullError(
        f"{text}, {shortage.num_blocks_pending} more when plans have run: submit receipts, free "
        "or swap out sequences, then try again",
        retry_delay_s=delay_s,
    )


def require_done(result: pb.StepResult) -> pb.StepResult:
    """``result``. Raises ``error_of`` the first item that was not done."""
    for outcome in result.results:
        for failure in outcome.failures:
            raise error_of(failure)
    return result
