"""Sessions that hold as much as they may: making them, and ending them in every way, keeps nobody
waiting.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import grpc
import pytest

from kvplane import ops
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.attacked_planes import HonestCaller, assert_calm
from tests.helpers.planning.control_wire import Stub, stub_of
from tests.helpers.planning.registration_messages import LAYOUT

NUM_BLOCKS = 480
NUM_FORKS = 8_000  # of so many blocks each, all that a session's tables may refer to
FORKS_A_STEP = 4_000

End = Callable[[Stub, tpb.SessionRef, int], object]
ENDS: dict[str, End] = {
    "closed": lambda stub, s, n: stub.CloseSession(pb.CloseSessionRequest(session=s)),
    "freed": lambda stub, s, n: run(stub, s, n, pb.Operation(free=pb.Free(sequence_ids=forks(0)))),
    "taken back": lambda stub, s, n: stub.AbortPlans(
        pb.AbortPlansRequest(whole_tables=True, session=s, number=n)
    ),
}


def forks(step: int) -> bytes:
    first = 2 + step * FORKS_A_STEP
    return struct.pack(f"<{FORKS_A_STEP}q", *range(first, first + FORKS_A_STEP))


def run(stub: Stub, session: tpb.SessionRef, number: int, *operations: pb.Operation) -> None:
    for i, operation in enumerate(operations):
        step = pb.StepRequest(session=session, number=number + i, operations=[operation])
        result = stub.Step(step)
        assert not result.results[0].failures, result.results[0].failures[0]


@pytest.mark.parametrize("end", ENDS)
def test_a_session_of_many_forks_ends_between_others_steps(
    channel: grpc.Channel, honest: HonestCaller, end: str
) -> None:
    stub = stub_of(channel)
    prompt = ops.admit(1, range(NUM_BLOCKS * LAYOUT.block_size_tokens), num_compute_tokens=0)
    parents = struct.pack(f"<{FORKS_A_STEP}q", *[1] * FORKS_A_STEP)
    made = [
        pb.Operation(fork=pb.Fork(parent_sequence_ids=parents, sequence_ids=forks(i)))
        for i in range(NUM_FORKS // FORKS_A_STEP)
    ]

    def attack() -> list[float]:
        session = stub.OpenSession(
            pb.OpenSessionRequest(
                pool_id="pool",
                layout=tpb.Layout(fingerprint=LAYOUT.fingerprint),
            )
        ).session
        with honest.meanwhile(1.0) as during:
            run(stub, session, 1, prompt, *made)
            ENDS[end](stub, session, 2 + len(made))
        stub.CloseSession(pb.CloseSessionRequest(session=session))
        return during

    assert_calm(honest, attack)
