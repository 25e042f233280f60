"""An engine's view of its sequences, from the answers that it gets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvplane.results import Granted
from kvplane.wire import columns
from kvplane.wire.columns import INT32, INT64
from kvplane.wire.v1 import session_pb2 as cpb
from tests.helpers.core.core_messages import DEVICE, unpack
from tests.helpers.outcomes import is_refused


@dataclass
class ModelSequence:
    """An engine's view of a sequence. ``truth``: its tokens, also those not yet submitted."""

    admitted_by: int
    truth: list[int]
    num_known: int
    num_scheduled: int
    tier: int = DEVICE


Sequences = dict[int, ModelSequence]


def believe(
    sequences: Sequences, number: int, operation: cpb.Operation, result: cpb.OperationResult
) -> None:
    """Apply an operation of step ``number`` to an engine's view of its sequences, by its answer."""
    kind = operation.WhichOneof("operation")
    failed = {failure.item for failure in result.failures}
    assert len(failed) == len(result.failures)
    if is_refused(result):
        assert failed == {0}
        return
    if kind == "admit":
        _admitted(sequences, number, operation.admit, result.admit)
    elif kind == "append":
        _appended(sequences, operation.append, failed)
    elif kind == "fork":
        parents = columns.read(INT64, operation.fork.parent_sequence_ids, "parents")
        ids = columns.read(INT64, operation.fork.sequence_ids, "ids")
        for item, (parent_id, i) in enumerate(zip(parents, ids, strict=True)):
            if item not in failed:
                parent = sequences[parent_id]
                sequences[i] = ModelSequence(
                    number,
                    list(parent.truth),
                    parent.num_known,
                    parent.num_scheduled,
                    parent.tier,
                )
    elif kind == "free":
        for item, i in enumerate(columns.read(INT64, operation.free.sequence_ids, "ids")):
            if item not in failed:
                sequences.pop(i, None)  # or it waited, or was cut
    elif kind == "truncate":
        _truncated(sequences, operation.truncate, failed)
    elif kind == "swap":
        for i in columns.read(INT64, operation.swap.sequence_ids, "ids"):
            sequences[i].tier = operation.swap.tier


def _admitted(sequences: Sequences, number: int, admit: cpb.Admit, done: cpb.AdmitResult) -> None:
    tokens = unpack(admit.token_ids)
    scheduled = done.num_cached_tokens + done.num_scheduled_tokens
    sequences[admit.sequence_id] = ModelSequence(number, tokens, len(tokens), scheduled)
    for i in columns.read(INT64, admit.fork_sequence_ids, "fork_sequence_ids"):
        sequences[i] = ModelSequence(number, list(tokens), len(tokens), scheduled)


def believe_grants(
    sequences: Sequences, waiting: dict[int, tuple[int, cpb.Admit]], granted: Iterable[Granted]
) -> None:
    """Apply grants of admissions. ``waiting``: the step that asked for each waiting admission."""
    for grant in granted:
        asked_by, admit = waiting.pop(grant.sequence_id)
        tokens = unpack(admit.token_ids)
        forks = columns.read(INT64, admit.fork_sequence_ids, "fork_sequence_ids")
        for i in (grant.sequence_id, *forks):
            sequences[i] = ModelSequence(
                asked_by, list(tokens), len(tokens), grant.num_cached_tokens
            )


def _truncated(sequences: Sequences, truncate: cpb.Truncate, failed: set[int]) -> None:
    ids = columns.read(INT64, truncate.sequence_ids, "ids")
    for item, (i, num) in enumerate(
        zip(ids, columns.read(INT32, truncate.num_tokens, "num_tokens"), strict=True)
    ):
        if item not in failed:
            sequence = sequences[i]
            sequence.num_known = min(sequence.num_known, num)
            sequence.num_scheduled = min(sequence.num_scheduled, num)
            del sequence.truth[max(sequence.num_known, sequence.num_scheduled) :]


def _appended(sequences: Sequences, append: cpb.Append, failed: set[int]) -> None:
    token_ids, begin = unpack(append.token_ids), 0
    for item, (i, first, slots, num_tokens) in enumerate(
        zip(
            columns.read(INT64, append.sequence_ids, "ids"),
            columns.read(INT32, append.first_positions, "first_positions"),
            columns.read(INT32, append.num_slots, "slots"),
            columns.read(INT32, append.num_tokens, "num_tokens"),
            strict=True,
        )
    ):
        tokens = token_ids[begin : begin + num_tokens]
        begin += num_tokens
        if item in failed:
            continue
        sequence = sequences[i]
        assert first == sequence.num_scheduled, "appended at another position than meant"
        end = sequence.num_known + len(tokens)
        sequence.truth[sequence.num_known : end] = tokens
        sequence.num_known = end
        sequence.num_scheduled += slots
        # Tokens of slots beyond those known: this engine knows them first.
        while len(sequence.truth) < sequence.num_scheduled:
            sequence.truth.append(len(sequence.truth) % 2)
