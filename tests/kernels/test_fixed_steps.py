"""A step in fixed rows: its native calls, made again with other contents at the same addresses, are
what a CUDA graph does, and give the bits of a step that goes layer by layer.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from data_plane import StepBounds
from kvplane.attention_options import AttentionOptions
from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError, PlanOutOfOrderError, SessionExpiredError
from kvplane.tensor import Tensor
from tests.helpers.data.fixed_steps import (
    BOUNDS,
    OPTIONS,
    PROMPTS,
    STEPS,
    Call,
    Inputs,
    Stepped,
    assert_replays,
    play,
    rig_with_prompts,
    run_by_layers,
    start_step,
)
from tests.helpers.data.kernel_sets import emulated_kernels
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import span

ROWS = ("block_tables", "query_starts", "context_lens")
VIEWS = {"select", "slice", "unbind", "split", "view", "alias", "as_strided"}


def addresses_of(calls: list[Call]) -> list[str]:
    """The numbers that each call gets: addresses, sizes and strides."""
    return [
        str({name: value for name, value in given.items() if isinstance(value, int)})
        for _, given in calls
    ]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_replayed_step_has_the_bits_of_one_by_layers(options: AttentionOptions) -> None:
    stepped, twin = Stepped(options=options), rig_with_prompts(kernels=emulated_kernels())
    graph = stepped.captured()
    assert_replays(stepped.rig, twin, stepped.step, stepped.inputs, lambda: play(graph), options)


def test_successive_steps_use_the_same_addresses() -> None:
    stepped, lengths = Stepped(), dict(PROMPTS)
    stepped.forward()
    stepped.recorder.taken()
    made = []
    for number, step in enumerate(STEPS[:3], 2):
        start_step(stepped.rig, number, step, lengths)
        stepped.inputs.fill(len(step), number)
        stepped.step.run(stepped.forward, **of_latest(stepped.rig.executor))
        made.append(addresses_of(stepped.recorder.taken()))
        assert stepped.rig.executor.receipt(1) is not None
        for sequence in step:
            lengths[sequence] += 1
    # A write, the plan and the attention; the second layer needs no plan of its own.
    for call, names in zip(made[0], (("slots",), ROWS, (*ROWS, "workspace", "out")), strict=False):
        assert all(f"'{name}': " in call for name in names)
    assert len(made[0]) == 5 and all(calls == made[0] for calls in made[1:])


def test_the_layers_of_a_step_allocate_copy_and_read_nothing() -> None:
    stepped = Stepped(options=OPTIONS["window-sinks-cap"])
    stepped.forward()
    asked: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            asked.append(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    with Watch():
        stepped.forward()
    assert set(asked) <= VIEWS
    with Watch():
        stepped.rig.executor.fixed_step(1, BOUNDS)
    assert "clone" in asked  # It would be seen.


def test_without_rows_a_step_writes_and_attends_to_nothing() -> None:
    stepped = Stepped()
    graph = stepped.captured()
    before = stepped.rig.snapshot()
    stepped.inputs.fill(4, 1)
    play(graph)
    assert all(out.isnan().all() for out in stepped.inputs.outputs(4))
    start_step(stepped.rig, 2, (1, 2), dict(PROMPTS))
    play(graph)  # A plan has started; its rows are not there outside of run.
    assert stepped.rig.snapshot()[0] == before[0]
    stepped.step.run(lambda: play(graph), **of_latest(stepped.rig.executor))
    assert stepped.rig.executor.receipt(1) is not None
    after = stepped.rig.snapshot()
    assert after[0] != before[0]
    stepped.inputs.fill(4, 9)
    play(graph)
    assert stepped.rig.snapshot()[0] == after[0]
    stepped.rig.executor.finish()  # No kernel has found a fault.


def test_steps_of_several_sizes_share_the_rows() -> None:
    bounds = StepBounds(8, 120, num_sequences=3, query_tokens=3)
    stepped, twin = Stepped(bounds), rig_with_prompts(kernels=emulated_kernels())
    small = Inputs(2)
    stepped.forward()
    stepped.forward(small)
    spans = [[span(1, 100, 1), span(2, 9, 1)], [span(3, 70, 3), span(1, 101, 2)]]
    for number, (inputs, of_plan) in enumerate(zip((small, stepped.inputs), spans, strict=True), 2):
        num_tokens = sum(s.num_tokens for s in of_plan)
        for rig in (stepped.rig, twin):
            rig.start(number, *of_plan)
        inputs.fill(num_tokens, number)
        stepped.step.run(
            lambda inputs=inputs: stepped.forward(inputs),  # type: ignore[misc]
            num_tokens=inputs.num_tokens,
            **of_latest(stepped.rig.executor),
        )
        outputs = inputs.outputs(num_tokens)
        assert stepped.rig.executor.receipt(1) is not None
        for output, right in zip(outputs, run_by_layers(twin, inputs, num_tokens), strict=True):
            assert torch.equal(output, right)


def test_a_plan_that_does_not_fit_is_refused_by_the_bound_and_runs_by_layers() -> None:
    three = [span(1, 100, 1), span(2, 9, 1), span(3, 70, 1)]
    stepped, twin = Stepped(), rig_with_prompts(kernels=emulated_kernels())
    executor = stepped.rig.executor
    for rig in (stepped.rig, twin):
        rig.start(2, *three)
    step = executor.fixed_step(1, StepBounds(2, 120))
    with stepped.rig.refuses(InvalidRequestError, "num_tokens"):
        step.run(stepped.forward, **of_latest(stepped.rig.executor))
    inputs = Inputs(3)
    inputs.fill(3, 2)
    outputs = run_by_layers(stepped.rig, inputs, 3)
    for output, right in zip(outputs, run_by_layers(twin, inputs, 3), strict=True):
        assert torch.equal(output, right)
    stepped.rig.start(3, span(2, 10, 2))
    with stepped.rig.refuses(InvalidRequestError, "bounds.query_tokens"):
        stepped.step.run(stepped.forward, **of_latest(stepped.rig.executor))


@pytest.mark.parametrize("name", ("num_tokens", "context_tokens", "num_sequences", "query_tokens"))
def test_bounds_are_checked(name: str) -> None:
    values = {"num_tokens": 4, "context_tokens": 100, name: -1}
    with pytest.raises(InvalidRequestError) as caught:
        StepBounds(**values)
    assert caught.value.field == f"bounds.{name}"


def test_a_step_is_for_kernels_that_have_graphs_and_for_open_sessions() -> None:
    with rig_with_prompts().refuses(InvalidRequestError, "device"):
        rig_with_prompts().executor.fixed_step(1, BOUNDS)
    stepped = Stepped()
    executor = stepped.rig.executor
    with stepped.rig.refuses(SessionExpiredError):
        executor.fixed_step(2, BOUNDS)
    with stepped.rig.refuses(InvalidRequestError, "bounds.context_tokens"):
        executor.fixed_step(1, StepBounds(1 << 20, 1 << 20))
    stepped.rig.fence(1)
    with stepped.rig.refuses(SessionExpiredError):
        stepped.step.run(stepped.forward, **of_latest(stepped.rig.executor))


def test_a_mask_of_blocks_is_not_for_a_step_that_is_replayed() -> None:
    stepped, seen = Stepped(), Tensor.zeros("uint8", (1, 4, 8))
    masked = AttentionOptions(block_pattern=BlockPattern(16, 1), seen_blocks=seen)
    query, key = (torch.zeros(1, num, 8, dtype=torch.bfloat16) for num in (4, 2))
    with stepped.rig.refuses(InvalidRequestError, "options.seen_blocks"):
        stepped.step.layer(0, query, key, key, options=masked)


def test_a_step_of_another_pass_is_refused() -> None:
    stepped = Stepped()
    stepped.rig.start(2, *[span(s, PROMPTS[s], 2) for s in (1, 2)])
    stepped.inputs.fill(2, 2)
    for of_pass in range(2):
        stepped.rig.executor.begin_pass(1, of_pass)
        for wrong in (None, 1 - of_pass):
            with stepped.rig.refuses(PlanOutOfOrderError, "pass_index"):
                stepped.step.run(stepped.forward, plan_number=2, pass_index=wrong)
        stepped.step.run(stepped.forward, plan_number=2, pass_index=of_pass)
    assert stepped.rig.executor.receipt(1) is not None


def test_a_plan_runs_once_and_only_if_all_of_its_layers_do() -> None:
    stepped = Stepped()
    start_step(stepped.rig, 2, (1, 2), dict(PROMPTS))
    with pytest.raises(InvalidRequestError, match="layer 0 was never called"):
        stepped.step.run(lambda: None, **of_latest(stepped.rig.executor))
    with pytest.raises(ValueError, match="of the caller"):
        stepped.step.run(fail, **of_latest(stepped.rig.executor))
    assert stepped.rig.executor.receipt(1) is None
    stepped.inputs.fill(2, 2)
    stepped.step.run(stepped.forward, **of_latest(stepped.rig.executor))
    for _ in range(2):
        with pytest.raises(PlanOutOfOrderError):
            stepped.step.run(stepped.forward, **of_latest(stepped.rig.executor))
        assert stepped.rig.executor.receipt(1) is not None


def fail() -> None:
    raise ValueError("of the caller")


def test_contexts_for_which_the_workspace_has_no_room_are_refused() -> None:
    stepped = Stepped()
    kernels: Any = stepped.rig.executor.kernels
    kernels.max_workspace_bytes = 4_000
    stepped.forward()
    start_step(stepped.rig, 2, (1, 3), dict(PROMPTS))
    with stepped.rig.refuses(InvalidRequestError, "bounds.context_tokens"):
        stepped.step.run(stepped.forward, **of_latest(stepped.rig.executor))
    stepped.inputs.fill(2, 2)
    run_by_layers(stepped.rig, stepped.inputs, 2)


def test_what_a_step_needs_is_in_memory_before_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("data_plane.kernels.backends.cuda.is_capturing", lambda device: True)
    with pytest.raises(InvalidRequestError, match="before they are captured"):
        Stepped().forward()
    monkeypatch.setattr("data_plane.execution.fixed_step.is_capturing", lambda device: True)
    with pytest.raises(InvalidRequestError) as caught:
        Stepped(options=OPTIONS["window-sinks-cap"]).forward()
    assert caught.value.field == "options"
