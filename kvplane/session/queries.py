"""What a session can ask without changing anything: these calls have no number."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvplane import ops
from kvplane.results import (
    ExplainedBlock,
    SequenceState,
    explained_blocks,
    sequence_states,
)
from kvplane.transport.connection import Connection
from kvplane.v1 import control_pb2 as pb
from kvplane.v1.types_pb2 import SessionRef


class SessionQueries:
    """Calls that may be made at any time, also while a step runs."""

    def __init__(self, connection: Connection, stub: Any, ref: SessionRef) -> None:
        self.ref = ref
        self._connection = connection
        self._stub = stub

    async def check(
        self, operations: Iterable[pb.Operation], *, timeout_s: float | None = None
    ) -> list[pb.OperationResult]:
        """What each item of these operations would be answered now as all of a step. Nothing is
        taken: another session may come first.
        """
        request = pb.CheckOperationsRequest(session=self.ref, operations=operations)
        response: pb.CheckOperationsResponse = await self._connection.call(
            self._stub.CheckOperations, request, timeout_s
        )
        return list(response.results)

    async def block_table(
        self, sequence_id: int, *, timeout_s: float | None = None
    ) -> pb.GetBlockTableResponse:
        """A sequence's block table. Raises SequenceNotFoundError."""
        request = pb.GetBlockTableRequest(session=self.ref, sequence_id=sequence_id)
        response: pb.GetBlockTableResponse = await self._connection.call(
            self._stub.GetBlockTable, request, timeout_s
        )
        return response

    async def lookup_prefix(
        self, token_ids: ops.Tokens, *, timeout_s: float | None = None
    ) -> pb.LookupPrefixResponse:
        """How much of a prompt is cached now: a hint, nothing is held."""
        request = pb.LookupPrefixRequest(session=self.ref, token_ids=ops.pack_tokens(token_ids))
        response: pb.LookupPrefixResponse = await self._connection.call(
            self._stub.LookupPrefix, request, timeout_s
        )
        return response

    async def explain_prefix(
        self, token_ids: ops.Tokens, *, timeout_s: float | None = None
    ) -> list[ExplainedBlock]:
        """The cached blocks of a prompt's prefix, in order: where they are, and how much used."""
        request = pb.ExplainPrefixRequest(session=self.ref, token_ids=ops.pack_tokens(token_ids))
        response: pb.ExplainPrefixResponse = await self._connection.call(
            self._stub.ExplainPrefix, request, timeout_s
        )
        return explained_blocks(response)

    async def describe_sequence(
        self, sequence_id: int, *, timeout_s: float | None = None
    ) -> SequenceState:
        """How far a sequence is. Raises SequenceNotFoundError."""
        request = pb.DescribeSequenceRequest(session=self.ref, sequence_id=sequence_id)
        response: pb.DescribeSequenceResponse = await self._connection.call(
            self._stub.DescribeSequence, request, timeout_s
        )
        (state,) = sequence_states(response.sequences)
        return state
