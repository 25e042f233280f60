"""An engine of both planes that compares every output with dense attention."""

from __future__ import annotations

import torch

from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.execution.execution import Execution
from kvplane.results import StepResult
from kvplane.session import Session
from kvplane.tensor import Tensor
from kvplane.wire.v1 import session_pb2 as pb
from tests.helpers.both_planes import add_receipts
from tests.helpers.data.plan_author import dense_attention, tokens

CPU = torch.device("cpu")


def key_of(positions: torch.Tensor) -> torch.Tensor:
    """Return keys (and values, and a quarter of the queries), as functions of the position only."""
    return tokens(128, seed=1)[positions]


class Engine:
    """One session that runs what it is given and checks every output.

    ``begins``: whether plans that compute something are sent without waiting for their answers.
    """

    def __init__(self, session: Session, execution: Execution, *, begins: bool = False) -> None:
        self.session = session
        self.execution = execution
        self._begins = begins

    async def step(self, *operations: pb.Operation, spans: list[tuple[int, int]]) -> StepResult:
        """``spans``: first position and number of tokens of each span of the plan."""
        result = (await self.session.step(operations)).raise_for_status()
        num_tokens = sum(num for _, num in spans)
        if self._begins and num_tokens:
            assert result.plan is not None
            await self.execution.begin(result.plan, num_tokens)
        else:
            await self.execution.start(result.plan)
            assert self.execution.num_tokens == num_tokens
        if not self.execution.has_run:
            for layer in self.execution.layers:
                await self._layer(layer, spans)
        add_receipts(self.session, self.execution)
        return result

    async def _layer(self, layer: int, spans: list[tuple[int, int]]) -> None:
        positions = [torch.arange(first, first + num) for first, num in spans]
        key = key_of(torch.cat(positions))
        query = key.repeat_interleave(2, dim=1)
        parts = (Tensor.from_proto(tensor_to_message(t)) for t in (query, key, key))
        answer = await self.execution.layer(layer, *parts)
        got = tensor_from_message(answer.to_proto(), CPU, field="output")
        begin = 0
        for (first, num), own in zip(spans, positions, strict=True):
            seen = key_of(torch.arange(first + num))
            query = key_of(own).repeat_interleave(2, dim=1)
            want = dense_attention(query, seen, seen)
            torch.testing.assert_close(got[begin : begin + num], want, atol=1e-5, rtol=1e-5)
            begin += num
