"""Executions in the data plane's process have the calls of the client's, and do what it does."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from data_plane.server.embedded_execution import EmbeddedExecution
from kvplane import sync
from kvplane.errors import InvalidRequestError, PlanOutOfOrderError
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.plan_author import set_blocks, span, tokens


class Session:
    """Keeps the receipts."""

    def __init__(self, rig: Rig) -> None:
        self.grant = rig.author.grant(1)
        self.receipts: list[Any] = []

    def add_receipt(self, receipt: Any) -> None:
        self.receipts.append(receipt)


def opened(rig: Rig, session: Session) -> EmbeddedExecution:
    return EmbeddedExecution(rig.executor, session.grant, take_receipt=session.add_receipt)


def inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tokens(num_tokens, 4), tokens(num_tokens, seed=1), tokens(num_tokens, seed=2)


def prompt_of(rig: Rig) -> Any:
    return rig.plan(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))


def test_a_plan_has_the_executors_outputs_and_gives_its_receipt_once() -> None:
    rig, twin = Rig(), Rig()
    session = Session(rig)
    twin.start(1, set_blocks(1, [(0, 1), (1, 1)]), span(1, 0, 12))
    with opened(rig, session) as execution:
        assert execution.layers == [*LAYERS]
        plan = prompt_of(rig)
        execution.start(plan)
        assert (execution.num_tokens, execution.has_run, session.receipts) == (12, False, [])
        for layer in execution.layers:
            output = execution.layer(layer, *inputs(12))
            want = twin.executor.layer(1, layer, *inputs(12), plan_number=1)
            assert want is not None
            assert torch.equal(output, want)
        assert execution.has_run
        assert rig.author.read_receipt(*session.receipts).plan_number == 1
        execution.layer(LAYERS[-1], *inputs(12))
        execution.start(plan)
        assert execution.has_run
        assert execution.receipts == session.receipts


def test_a_plan_that_computes_nothing_gives_its_receipt_at_its_start() -> None:
    rig = Rig()
    session = Session(rig)
    execution = opened(rig, session)
    execution.start(rig.plan(1, set_blocks(1, [(0, 1)])))
    assert execution.has_run
    assert rig.author.read_receipt(*session.receipts).plan_number == 1
    execution.start(rig.plan(2, span(1, 0, 3)))
    assert not execution.has_run


def test_a_plan_in_passes_has_run_after_its_last_pass() -> None:
    rig = Rig()
    session = Session(rig)
    execution = opened(rig, session)
    plan = rig.plan(1, set_blocks(1, [(0, 1)]), span(1, 0, 3))
    for index in range(3):
        execution.start(plan, pass_index=index)
        assert execution.num_tokens == 1
        for layer in execution.layers:
            assert not session.receipts
            execution.layer(layer, *inputs(1))
    assert execution.has_run
    assert len(session.receipts) == 1


def test_no_plan_and_a_layer_before_any_are_refused() -> None:
    rig = Rig()
    execution = opened(rig, Session(rig))
    with pytest.raises(InvalidRequestError, match="nothing to carry out"):
        execution.start(None)
    execution.start(prompt_of(rig))
    execution.close()
    with pytest.raises(PlanOutOfOrderError):
        execution.layer(0, *inputs(12))


def test_without_a_taker_the_receipt_is_given_by_finish_alone() -> None:
    """The caller may have more work for the device before it waits."""
    rig = Rig()
    execution = EmbeddedExecution(rig.executor, rig.author.grant(1))
    execution.start(prompt_of(rig))
    for layer in execution.layers:
        assert execution.finish() == []
        execution.layer(layer, *inputs(12))
    assert not execution.has_run
    assert rig.author.read_receipt(*execution.finish()).plan_number == 1


@pytest.mark.parametrize("name", ["start", "layer", "close"])
def test_its_calls_take_what_the_clients_take(name: str) -> None:
    """Without a deadline: nothing travels."""
    theirs = inspect.signature(getattr(sync.Execution, name)).parameters
    wanted = [*theirs][1:]
    if name != "close":
        wanted.remove("timeout_s")
    assert [*inspect.signature(getattr(EmbeddedExecution, name)).parameters][1:] == wanted
