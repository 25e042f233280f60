"""The mistakes that people make first, and what they are told: where the fault is, what was found,
and what to do.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc.aio
import pytest
import torch

from kvplane import ControlClient, DataClient, Execution, Session, Tensor, ops
from kvplane.errors import (
    InvalidRequestError,
    KvplaneError,
    LayoutMismatchError,
    NeverFitsError,
    PlaneUnavailableError,
    PlanOutOfOrderError,
    PoolFullError,
    PoolNotFoundError,
    PositionMismatchError,
    ProtocolMismatchError,
    SequenceExistsError,
    SequenceNotFoundError,
    SessionNotFoundError,
    TooManyPlansInFlightError,
)
from kvplane.v1 import execution_pb2, pool_pb2, session_pb2
from tests.helpers.both_planes import LAYOUT, POOL, Planes, run_step, zeros


@dataclass
class Newcomer:
    """Somebody with a session on a pool of 32 blocks of 8 tokens."""

    planes: Planes
    control: ControlClient
    data: DataClient
    session: Session
    execution: Execution

    async def run(self, *operations: Any) -> None:
        """A step and its plan, as they are meant."""
        await run_step(self.session, self.execution, *operations)


async def nobody_listens(_: Newcomer) -> None:
    async with ControlClient("127.0.0.1:9", timeout_s=0.3) as control:
        await control.get_server_info()


async def a_target_without_a_port(_: Newcomer) -> None:
    ControlClient("localhost")


async def control_client_for_a_data_plane(who: Newcomer) -> None:
    async with ControlClient(who.planes.data.address) as control:
        await control.list_pools()


async def data_client_for_a_control_plane(who: Newcomer) -> None:
    async with DataClient(who.planes.control.address) as data:
        await data.open(who.session.grant)


async def a_pool_that_is_not_there(who: Newcomer) -> None:
    await who.control.open_session("llama", LAYOUT)


async def another_layout(who: Newcomer) -> None:
    group = replace(LAYOUT.groups[0], head_size=16)
    await who.control.open_session(POOL, replace(LAYOUT, block_size_tokens=16, groups=(group,)))


async def tokens_that_are_text(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, "a prompt"))  # type: ignore[arg-type]


async def no_tokens(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, []))


async def an_id_twice(who: Newcomer) -> None:
    await who.run(ops.admit(1, [1, 2]))
    await who.session.run(ops.admit(1, [3]))


async def an_id_that_is_not_live(who: Newcomer) -> None:
    await who.session.run(ops.append(7, [1], 1, first_positions=0))


async def a_wrong_position(who: Newcomer) -> None:
    await who.run(ops.admit(1, [1, 2, 3], max_total_tokens=8))
    await who.session.run(ops.append(1, [4], 1, first_positions=2))


async def a_prompt_larger_than_the_pool(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, range(1000)))


async def a_pool_that_is_full(who: Newcomer) -> None:
    await who.run(ops.admit(1, range(8 * 25)))
    await who.session.run(ops.admit(2, range(1000, 1000 + 8 * 20)))


async def receipts_never_handed_in(who: Newcomer) -> None:
    for i in range(1, 9):
        await who.session.run(ops.admit(i, [i]))


async def a_receipt_before_the_plan_has_run(who: Newcomer) -> None:
    who.session.add_receipt(None)


async def a_step_without_a_plan_is_executed(who: Newcomer) -> None:
    await who.execution.start((await who.session.step([ops.free([])])).plan)


async def plans_in_the_wrong_order(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, [1, 2]))
    await who.execution.start((await who.session.run(ops.admit(2, [3, 4]))).plan)


async def a_plan_before_the_last_one_has_finished(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    await who.execution.start((await who.session.run(ops.admit(2, [3, 4]))).plan)


async def a_layer_before_start(who: Newcomer) -> None:
    await who.execution.layer(0, zeros(2), zeros(2), zeros(2))


async def a_layer_that_the_model_does_not_have(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    await who.execution.layer(3, zeros(2), zeros(2), zeros(2))


async def a_batch_dimension(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    batched = Tensor("float32", (1, 2, 1, 8), bytes(64))
    await who.execution.layer(0, zeros(2), batched, zeros(2))


async def tokens_left_out(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    await who.execution.layer(0, zeros(1), zeros(1), zeros(1))


async def a_transposed_array(_: Newcomer) -> None:
    Tensor.from_array(torch.zeros(8, 2).T)


async def bytes_of_another_type(_: Newcomer) -> None:
    Tensor("float32", (2, 1, 8), bytes(2 * 8 * 2))


async def a_session_used_after_its_end(who: Newcomer) -> None:
    await who.session.close()
    await who.session.run(ops.admit(1, [1]))


# What each raises, and the message from its first character; ... stands for anything.
MISTAKES: dict[Callable[[Newcomer], Awaitable[None]], tuple[type[KvplaneError], str]] = {
    nobody_listens: (PlaneUnavailableError, "...127.0.0.1:9..."),
    a_target_without_a_port: (
        InvalidRequestError,
        "target: must be host:port, is 'localhost'",
    ),
    control_client_for_a_data_plane: (
        ProtocolMismatchError,
        "PoolService is served by the control plane, and this is a data plane: are the "
        "planes' addresses swapped?",
    ),
    data_client_for_a_control_plane: (
        ProtocolMismatchError,
        "ExecutionService is served by a data plane, and this is the control plane: are the "
        "planes' addresses swapped?",
    ),
    a_pool_that_is_not_there: (
        PoolNotFoundError,
        "pool_id: 'llama' is not registered: see ListPools",
    ),
    another_layout: (
        LayoutMismatchError,
        "layout: is not that of pool 'default': it has block_size_tokens 16 and not 8, "
        "groups[0].head_size 16 and not 8",
    ),
    tokens_that_are_text: (InvalidRequestError, "token_ids: must be integers of 32 bits"),
    no_tokens: (
        InvalidRequestError,
        "operations[0].admit.token_ids: must hold at least 1 token",
    ),
    an_id_twice: (
        SequenceExistsError,
        "operations[0].admit.sequence_id: sequence 1 is live already: free it, or take another id",
    ),
    an_id_that_is_not_live: (
        SequenceNotFoundError,
        "operations[0].append.sequence_ids[0]: sequence 7 is not live: admit it first",
    ),
    a_wrong_position: (
        PositionMismatchError,
        "operations[0].append.first_positions[0]: the next slot of sequence 1 is at position "
        "3, not 2: ListSequences tells its positions",
    ),
    a_prompt_larger_than_the_pool: (
        NeverFitsError,
        "125 blocks of the device tier are needed and 32 are available: the pool can never "
        "hold this many; ask for fewer tokens",
    ),
    a_pool_that_is_full: (
        PoolFullError,
        "20 blocks of the device tier are needed and 7 are available, 0 more when plans have "
        "run: submit receipts, free or swap out sequences, then try again in 0.05 s",
    ),
    receipts_never_handed_in: (
        TooManyPlansInFlightError,
        "4 plans wait for their receipts: run them, and submit receipts with add_receipt or "
        "submit_receipts",
    ),
    a_receipt_before_the_plan_has_run: (
        InvalidRequestError,
        "receipt: is None: a plan has one when all its layers have run",
    ),
    a_step_without_a_plan_is_executed: (
        InvalidRequestError,
        "plan: is None: the step has nothing to carry out",
    ),
    plans_in_the_wrong_order: (
        PlanOutOfOrderError,
        "plan.previous: run plan 1 first: this one follows it, and the session's last plan "
        "to finish here is 0",
    ),
    a_plan_before_the_last_one_has_finished: (
        PlanOutOfOrderError,
        "plan.previous: finish plan 1 first: send its missing layers, or abort it at the "
        "control plane",
    ),
    a_layer_before_start: (
        PlanOutOfOrderError,
        "no plan was started: call start first",
    ),
    a_layer_that_the_model_does_not_have: (
        InvalidRequestError,
        "layer.layer: layer 3 is not in this shard, which has [0, 1, 2]",
    ),
    a_batch_dimension: (
        InvalidRequestError,
        "layer.key: must be [num_tokens, num_kv_heads, head_size], is [1, 2, 1, 8]",
    ),
    tokens_left_out: (
        InvalidRequestError,
        "layer.key: must be [2, 1, 8], is [1, 1, 8]",
    ),
    a_transposed_array: (
        InvalidRequestError,
        "array: is not contiguous: pass array.contiguous(), or numpy.ascontiguousarray(array)",
    ),
    bytes_of_another_type: (
        InvalidRequestError,
        "data: float32 of shape [2, 1, 8] takes 64 bytes, not 32",
    ),
    a_session_used_after_its_end: (
        SessionNotFoundError,
        "session.session_id: was closed here: open another",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
async def test_a_mistake_is_answered_with_what_to_do(
    planes: Planes,
    control: ControlClient,
    data: DataClient,
    mistake: Callable[[Newcomer], Awaitable[None]],
) -> None:
    cls, message = MISTAKES[mistake]
    async with (
        await control.open_session(POOL, LAYOUT) as session,
        await data.open(session.grant) as execution,
    ):
        with pytest.raises(KvplaneError) as caught:
            await mistake(Newcomer(planes, control, data, session, execution))
    pattern = re.escape(message).replace(re.escape("..."), ".*")
    assert type(caught.value) is cls
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)


async def test_a_plane_names_the_plane_of_each_service_that_it_lacks(planes: Planes) -> None:
    for file in (session_pb2, execution_pb2, pool_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            texts = []
            for plane in (planes.control, planes.data):
                async with grpc.aio.insecure_channel(plane.address) as channel:
                    call: Any = channel.unary_unary(f"/{service.full_name}/Nothing")
                    with pytest.raises(grpc.aio.AioRpcError) as failure:
                        await call(b"")
                    assert failure.value.code() is grpc.StatusCode.UNIMPLEMENTED
                    texts.append(failure.value.details() or "")
            num_lacking = sum("is served by" in text for text in texts)
            assert num_lacking == (0 if service.name == "ServerService" else 1), texts
