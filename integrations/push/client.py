"""Moves what one pool has computed to another: from data plane to data plane, not by the caller.

here    a session in which a sequence is computed
there   admit ──► plan ──► a ticket of each shard ──► here's shards send ──► receipts ──► cached
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from kvplane import ops
from kvplane.errors import InvalidRequestError, KvplaneError, LayoutMismatchError
from kvplane.execution.execution import all_of
from kvplane.results import Signed, StepResult
from kvplane.session.session import Session
from kvplane.transport.connection import Connection
from kvplane.transport.retry import Deadline
from kvplane.transport.tls import Tls
from kvplane.wire.v1.types_pb2 import SignedPayload

from . import push_pb2 as pb
from .push_pb2_grpc import PushServiceStub


class PushClient:
    """Calls the plug-in of the data plane at ``target``. ``timeout_s``: default deadline of each
    call.
    """

    def __init__(self, target: str, *, tls: Tls | None = None, timeout_s: float = 10.0) -> None:
        self._connection = Connection(target, tls=tls, timeout_s=timeout_s)

    async def __aenter__(self) -> PushClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def receive_blocks(
        self,
        grant: Signed,
        plan: Signed,
        sequence_id: int,
        *,
        timeout_s: float | None = None,
    ) -> pb.ReceiveBlocksResponse:
        """Start a plan, and let another data plane write its span for a sequence: a ticket for
        that one's ``send_blocks``, or the receipt of a plan that has run.

        Each call gives another ticket. Raises QuotaExceededError for too many.
        """
        request = pb.ReceiveBlocksRequest(
            grant=cast(SignedPayload, grant),
            plan=cast(SignedPayload, plan),
            sequence_id=sequence_id,
        )
        receive = PushServiceStub(self._connection.channel).ReceiveBlocks
        response: pb.ReceiveBlocksResponse = await self._connection.call(
            receive, request, timeout_s
        )
        return response

    async def send_blocks(
        self,
        grant: Signed,
        sequence_id: int,
        ticket: pb.PushTicket,
        *,
        timeout_s: float | None = None,
    ) -> pb.SendBlocksResponse:
        """Send the table entries of a sequence that ``ticket`` names to the data plane that gave
        it; returns when that one has written them.

        Tried once: a ticket serves once. Raises PlanOutOfOrderError while the blocks are computed,
        and what the other data plane refuses.
        """
        request = pb.SendBlocksRequest(
            grant=cast(SignedPayload, grant), sequence_id=sequence_id, ticket=ticket
        )
        send = PushServiceStub(self._connection.channel).SendBlocks
        deadline = self._connection.deadline(timeout_s)
        async with deadline.guard():
            response: pb.SendBlocksResponse = await self._connection.attempt(
                send, request, deadline
            )
        return response

    async def close(self) -> None:
        """Ends every call."""
        await self._connection.close()


@dataclass(frozen=True, slots=True)
class Moved:
    """A sequence that is now in the other pool too. ``num_cached_tokens``: that were there before.
    ``num_bytes``: sent, by all shards.
    """

    num_cached_tokens: int
    num_bytes: int


class PrefixMover:
    """Moves sequences of ``here``, a session, to ``there``, one of another pool of the same layout,
    divided among data planes in the same way. Those of ``here`` must be allowed to send to those
    of ``there`` (``KVPLANE_PUSH_TO``, ``KVPLANE_PUSH_BIND``).

    ``tls``: how to reach the data planes of both. ``timeout_s``: for all of a move.
    """

    def __init__(
        self,
        here: Session,
        there: Session,
        *,
        tls: Tls | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        if len(here.shards) != len(there.shards):
            raise LayoutMismatchError(
                f"pool {here.pool_id!r} has {len(here.shards)} shards, and {there.pool_id!r} has "
                f"{len(there.shards)}: divide both in the same way",
                field="there",
            )
        self._here = here
        self._there = there
        self._timeout_s = timeout_s
        self._sources, self._targets = (
            [PushClient(shard.address, tls=tls, timeout_s=timeout_s) for shard in session.shards]
            for session in (here, there)
        )

    async def __aenter__(self) -> PrefixMover:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def move(
        self,
        sequence_id: int,
        tokens: ops.Tokens,
        *,
        there_id: int | None = None,
        max_total_tokens: int = 0,
    ) -> Moved:
        """Admit ``tokens``, those of ``here``'s sequence or their beginning, as a sequence of
        ``there`` and have what is not cached there sent. It can then be appended to, and others
        find what is full of it.

        ``there_id``: None for the same id. ``max_total_tokens``: as of ``ops.admit``. The plans of
        ``there`` before this one must have run, and no other may be asked for meanwhile. When this
        raises, the sequence is freed again, unless ``there`` cannot be reached: then its lease ends
        it. Raises what admitting raises, PlanOutOfOrderError while ``here`` computes the sequence,
        LayoutMismatchError, and what the data planes refuse.
        """
        new_id = sequence_id if there_id is None else there_id
        async with Deadline.after(self._timeout_s).guard():
            operation = ops.admit(new_id, tokens, max_total_tokens=max_total_tokens)
            result = await self._there.run(operation)
            number = self._there.last_number
            try:
                num_bytes = await self._send(result, sequence_id, new_id)
                await self._there.submit_receipts()
            except BaseException:
                await self._undo(number, new_id)
                raise
        return Moved(result.results[0].admit.num_cached_tokens, num_bytes)

    async def close(self) -> None:
        """Ends every call."""
        for client in (*self._sources, *self._targets):
            await client.close()

    async def _send(self, result: StepResult, sequence_id: int, new_id: int) -> int:
        plan = result.plan
        if plan is None:
            raise InvalidRequestError("there is nothing to compute", field="tokens")
        shards = zip(self._sources, self._targets, strict=True)
        sent = await all_of([self._of_shard(*pair, plan, sequence_id, new_id) for pair in shards])
        for receipt, _ in sent:
            self._there.add_receipt(receipt)
        return sum(num_bytes for _, num_bytes in sent)

    async def _of_shard(
        self,
        source: PushClient,
        target: PushClient,
        plan: Signed,
        sequence_id: int,
        new_id: int,
    ) -> tuple[Signed, int]:
        answer = await target.receive_blocks(self._there.grant, plan, new_id)
        if answer.HasField("receipt"):
            return answer.receipt, 0
        sent = await source.send_blocks(self._here.grant, sequence_id, answer.ticket)
        return sent.receipt, sent.num_bytes

    async def _undo(self, number: int, sequence_id: int) -> None:
        """Give the blocks of ``there`` back: what was written of them is found by nobody. They can
        be allocated again once the data planes have dropped the table, by the next plan.
        """
        with suppress(KvplaneError):
            await self._there.abort_plans(number)
            plan = (await self._there.run(ops.free(sequence_id))).plan
            if plan is not None:
                async with self._there.open_execution() as execution:
                    await execution.start(plan)
                await self._there.submit_receipts()
