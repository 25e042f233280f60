"""Lists of a session's sequences, for the session itself and for operators."""

from __future__ import annotations

from typing import Any

from kvplane import ops
from kvplane.results import SequenceState
from kvplane.transport.connection import Connection
from kvplane.wire.columns import INT64
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.types_pb2 import SessionRef


async def list_sequences(
    connection: Connection,
    stub: Any,
    session: SessionRef,
    sequence_ids: ops.Column,
    timeout_s: float | None,
) -> list[SequenceState]:
    """Get the states of these sequences, or of all for none, ids ascending. ``stub``: of
    SessionService. Raises SequenceNotFoundError.
    """
    request = pb.ListSequencesRequest(
        session=session, sequence_ids=ops.pack(INT64, sequence_ids, "sequence_ids")
    )
    found: list[SequenceState] = []
    async for page in connection.pages(stub.ListSequences, request, timeout_s):
        found += SequenceState.all_from_proto(page.sequences)
    return found
