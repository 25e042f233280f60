"""An engine that decodes in several sessions at once, in a process of its own, on both planes over
TLS. It says how long each step took, with all its layers.

    decoding_engine.py CONTROL TOKEN_FILE NUM_SESSIONS PAUSE_S

Then a line of stdin for each period, its seconds; the answer is a line of JSON: the latencies, in
seconds. PAUSE_S is between two steps of a session.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from kvplane import ControlClient, Session, Tensor, Tls, ops
from kvplane.execution.execution import Execution
from kvplane.wire.v1.session_pb2 import Operation

POOL_ID = "pool"
TLS = Path(__file__).parents[1] / "rpc" / "tls"
PROMPT = range(20)
NUM_NEW_TOKENS = 16


@dataclass
class Decoder:
    """One session and its execution."""

    session: Session
    execution: Execution
    pause_s: float

    async def period(self, seconds: float) -> list[float]:
        """Return the latency of each decode step."""
        latencies: list[float] = []
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s:
            await self.step(ops.admit(1, PROMPT))
            for position in range(len(PROMPT), len(PROMPT) + NUM_NEW_TOKENS):
                begin_s = time.perf_counter()
                await self.step(ops.append(1, [5], 1, first_positions=position))
                latencies.append(time.perf_counter() - begin_s)
                await asyncio.sleep(self.pause_s)
            await self.step(ops.free([1]))
        return latencies

    async def step(self, operation: Operation) -> None:
        answer = await self.session.step([operation])
        assert not answer.results[0].failures, answer.results[0].failures[0]
        if answer.plan is None:
            return
        await self.execution.start(answer.plan)
        for layer in [] if self.execution.has_run else self.execution.layers:
            rows = Tensor.zeros("float32", self.execution.key_shape(layer))
            await self.execution.layer(layer, rows, rows, rows)


async def main(control: str, token_file: str, num_sessions: str, pause_s: str) -> None:
    tls = Tls(ca_file=TLS / "ca.pem", server_name="kvplane.test", token_file=Path(token_file))
    async with AsyncExitStack() as stack:
        controller = await stack.enter_async_context(ControlClient(control, tls=tls))
        decoders = []
        for _ in range(int(num_sessions)):
            session = await stack.enter_async_context(controller.open_session(POOL_ID))
            execution = await stack.enter_async_context(session.open_execution())
            decoders.append(Decoder(session, execution, float(pause_s)))
        tell([])
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            periods = await asyncio.gather(*(each.period(float(line)) for each in decoders))
            tell([latency for each in periods for latency in each])


def tell(latencies: list[float]) -> None:
    sys.stdout.write(json.dumps(latencies) + "\n")
    sys.stdout.flush()


asyncio.run(main(*sys.argv[1:]))
