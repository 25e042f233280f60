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


Run = Callable[[Newcomer], Awaitable[None]]
MISTAKES: dict[str, tuple[Run, type[KvplaneError], str]] = {}


def mistake(error: type[KvplaneError], message: str) -> Callable[[Run], Run]:
    """Add a mistake, the error that it raises, and the error's text; ... stands for anything."""

    def add(run: Run) -> Run:
        MISTAKES[run.__name__] = run, error, message
        return run

    return add


@mistake(PlaneUnavailableError, "...127.0.0.1:9...")
async def nobody_listens(_: Newcomer) -> None:
    async with ControlClient("127.0.0.1:9", timeout_s=1.0) as control:
        await control.get_server_info()


@mistake(
    ProtocolMismatchError,
    "PoolService is served by the control plane, and this is a data plane: are the "
    "planes' addresses swapped?",
)
async def control_client_for_a_data_plane(who: Newcomer) -> None:
    async with ControlClient(who.planes.data.address) as control:
        await control.list_pools()


@mistake(
    ProtocolMismatchError,
    "ExecutionService is served by a data plane, and this is the control plane: are the "
    "planes' addresses swapped?",
)
async def data_client_for_a_control_plane(who: Newcomer) -> None:
    async with DataClient(who.planes.control.address) as data:
        await data.open(who.session.grant)


@mistake(PoolNotFoundError, "pool_id: 'llama' is not registered: see ListPools")
async def a_pool_that_is_not_there(who: Newcomer) -> None:
    await who.control.open_session("llama", LAYOUT)


@mistake(
    LayoutMismatchError,
    "layout: is not that of pool 'default': it has block_size_tokens 16 and not 8, "
    "groups[0].head_size 16 and not 8",
)
async def another_layout(who: Newcomer) -> None:
    group = replace(LAYOUT.groups[0], head_size=16)
    await who.control.open_session(POOL, replace(LAYOUT, block_size_tokens=16, groups=(group,)))


@mistake(InvalidRequestError, "operations[0].admit.token_ids: must hold at least 1 token")
async def no_tokens(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, []))


@mistake(
    SequenceExistsError,
    "operations[0].admit.sequence_id: sequence 1 is live already: end it, or take another id",
)
async def an_id_twice(who: Newcomer) -> None:
    await who.run(ops.admit(1, [1, 2]))
    await who.session.run(ops.admit(1, [3]))


@mistake(
    SequenceNotFoundError,
    "operations[0].append.sequence_ids[0]: sequence 7 is not live: admit it first",
)
async def an_id_that_is_not_live(who: Newcomer) -> None:
    await who.session.run(ops.append(7, [1], 1, first_positions=0))


@mistake(
    PositionMismatchError,
    "operations[0].append.first_positions[0]: the next slot of sequence 1 is at position "
    "3, not 2: ListSequences tells its positions",
)
async def a_wrong_position(who: Newcomer) -> None:
    await who.run(ops.admit(1, [1, 2, 3], max_total_tokens=8))
    await who.session.run(ops.append(1, [4], 1, first_positions=2))


@mistake(
    NeverFitsError,
    "125 blocks of the device tier are needed and 32 are available: the pool can never "
    "hold this many; ask for fewer tokens",
)
async def a_prompt_larger_than_the_pool(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, range(1000)))


@mistake(
    PoolFullError,
    "20 blocks of the device tier are needed and 7 are available, 0 more when plans have "
    "run: submit receipts, free or swap out sequences, then try again in 0.05 s",
)
async def a_pool_that_is_full(who: Newcomer) -> None:
    await who.run(ops.admit(1, range(8 * 25)))
    await who.session.run(ops.admit(2, range(1000, 1000 + 8 * 20)))


@mistake(
    TooManyPlansInFlightError,
    "4 plans wait for their receipts: run them, and submit receipts with add_receipt or "
    "submit_receipts",
)
async def receipts_never_handed_in(who: Newcomer) -> None:
    for i in range(1, 9):
        await who.session.run(ops.admit(i, [i]))


@mistake(InvalidRequestError, "receipt: is None: a plan has one when all its layers have run")
async def a_receipt_before_the_plan_has_run(who: Newcomer) -> None:
    who.session.add_receipt(None)


@mistake(InvalidRequestError, "plan: is None: the step has nothing to carry out")
async def a_step_without_a_plan_is_executed(who: Newcomer) -> None:
    await who.execution.start((await who.session.step([ops.free([])])).plan)


@mistake(
    PlanOutOfOrderError,
    "plan.previous: run plan 1 first: this one follows it, and the session's last plan "
    "to finish here is 0",
)
async def plans_in_the_wrong_order(who: Newcomer) -> None:
    await who.session.run(ops.admit(1, [1, 2]))
    await who.execution.start((await who.session.run(ops.admit(2, [3, 4]))).plan)


@mistake(
    PlanOutOfOrderError,
    "plan.previous: finish plan 1 first: send its missing layers, or abort it at the control plane",
)
async def a_plan_before_the_last_one_has_finished(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    await who.execution.start((await who.session.run(ops.admit(2, [3, 4]))).plan)


@mistake(PlanOutOfOrderError, "no plan was started: call start first")
async def a_layer_before_start(who: Newcomer) -> None:
    await who.execution.layer(0, zeros(2), zeros(2), zeros(2))


@mistake(InvalidRequestError, "layer.layer: layer 3 is not in this shard, which has [0, 1, 2]")
async def a_layer_that_the_model_does_not_have(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    await who.execution.layer(3, zeros(2), zeros(2), zeros(2))


@mistake(
    InvalidRequestError, "layer.key: must be [num_tokens, num_kv_heads, head_size], is [1, 2, 1, 8]"
)
async def a_batch_dimension(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    batched = Tensor("float32", (1, 2, 1, 8), bytes(64))
    await who.execution.layer(0, zeros(2), batched, zeros(2))


@mistake(InvalidRequestError, "layer.key: must be [2, 1, 8], is [1, 1, 8]")
async def tokens_left_out(who: Newcomer) -> None:
    await who.execution.start((await who.session.run(ops.admit(1, [1, 2]))).plan)
    await who.execution.layer(0, zeros(1), zeros(1), zeros(1))


@mistake(SessionNotFoundError, "session.session_id: was closed here: open another")
async def a_session_used_after_its_end(who: Newcomer) -> None:
    await who.session.close()
    await who.session.run(ops.admit(1, [1]))


@pytest.mark.parametrize("name", MISTAKES)
async def test_a_mistake_is_answered_with_what_to_do(
    planes: Planes, control: ControlClient, data: DataClient, name: str
) -> None:
    run, cls, message = MISTAKES[name]
    async with (
        await control.open_session(POOL, LAYOUT) as session,
        await data.open(session.grant) as execution,
    ):
        with pytest.raises(KvplaneError) as caught:
            await run(Newcomer(planes, control, data, session, execution))
    pattern = re.escape(message).replace(re.escape("..."), ".*")
    assert type(caught.value) is cls
    assert re.fullmatch(pattern, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("variable", ["http_proxy", "https_proxy", "grpc_proxy"])
async def test_a_proxy_for_the_web_is_not_asked_for_a_plane(
    planes: Planes, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    async with ControlClient(planes.control.address, timeout_s=5.0) as control:
        await control.get_pool(POOL)


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
