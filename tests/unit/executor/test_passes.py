"""Plans in passes: one token of each span after the other, with one plan and one receipt."""

from __future__ import annotations

import pytest
import torch

from kvplane.errors import (
    BlockNotWritableError,
    BlockNotWrittenError,
    InternalError,
    InvalidRequestError,
    PlanOutOfOrderError,
    StaleGenerationError,
)
from tests.helpers.data.data_rig import LAYERS, LateRig, Rig
from tests.helpers.data.plan_author import publications, set_blocks, span, tokens
from tests.helpers.refusals import refused

COUNTS = {1: 3, 2: 1, 3: 4}  # tokens of each sequence's span
FIRST = {1: 7, 2: 0, 3: 14}  # so that some cross the edge of a block
SPANS = [span(i, FIRST[i], num) for i, num in COUNTS.items()]
BLOCKS = {1: [(7, 1), (0, 1)], 2: [(3, 1)], 3: [(1, 1), (5, 1), (2, 1)]}


@pytest.fixture
def rig() -> Rig:
    """Plan 2 has started, whose spans follow prompts."""
    return started(Rig())


def started(rig: Rig) -> Rig:
    prompts(rig).start(2, *SPANS)
    return rig


def prompts(rig: Rig) -> Rig:
    """What comes before the spans."""
    spans = [span(i, 0, num) for i, num in FIRST.items() if num]
    rig.run(1, *[set_blocks(i, blocks) for i, blocks in BLOCKS.items()], *spans)
    return rig


def rows_of(index: int) -> list[int]:
    """Which of the plan's tokens a pass has."""
    rows, begin = [], 0
    for num in COUNTS.values():
        rows += [begin + index] * (index < num)
        begin += num
    return rows


def run_layer(rig: Rig, layer: int, rows: list[int]) -> torch.Tensor:
    total = sum(COUNTS.values())
    key, value = tokens(total, seed=10 + layer), tokens(total, seed=20 + layer)
    output = rig.run_layer(layer, tokens(total, 4, seed=layer)[rows], key[rows], value[rows])
    assert output is not None
    return output


def run_pass(rig: Rig, index: int) -> list[torch.Tensor]:
    rows = rows_of(index)
    assert rig.executor.begin_pass(1, index) == len(rows)
    return [run_layer(rig, layer, rows) for layer in LAYERS]


def test_passes_write_and_attend_as_the_whole_plan_does(rig: Rig) -> None:
    outputs = [run_pass(rig, index) for index in range(4)]
    receipt = rig.author.read_receipt(rig.executor.receipt(1))
    assert receipt.plan_number == 2
    other = started(Rig())
    for layer in LAYERS:
        whole = run_layer(other, layer, [*range(sum(COUNTS.values()))])
        for index in range(4):
            assert torch.equal(outputs[index][layer], whole[rows_of(index)])
    for i, blocks in BLOCKS.items():
        num = len(blocks)
        assert torch.equal(rig.stored(1, i, num), other.stored(1, i, num))


@pytest.mark.parametrize("seed", range(3))
def test_passes_on_a_device_that_works_late_write_the_same(seed: int) -> None:
    late, soon = started(LateRig(seed)), started(Rig())
    for rig in (late, soon):
        for index in range(4):
            run_pass(rig, index)
        assert rig.executor.receipt(1) is not None
    assert torch.equal(late.executor.pools.device_tier, soon.executor.pools.device_tier)


def test_a_device_that_fails_in_a_pass_is_noticed_at_its_end() -> None:
    rig = LateRig()
    started(rig)
    run_pass(rig, 0)
    rig.runtime.failures.append(RuntimeError("the device failed"))
    with pytest.raises(InternalError):
        rig.executor.receipt(1)
    with pytest.raises(InternalError):
        rig.executor.begin_pass(1, 1)


def test_a_span_that_reads_what_another_writes_is_computed_at_once() -> None:
    """In passes it would read slots that are written in a later one."""
    rig = Rig()
    shared = set_blocks(2, [(7, 1), (3, 1)], allocated=[False, True])
    rig.start(1, set_blocks(1, [(7, 1), (0, 1)]), shared, span(1, 0, 12), span(2, 8, 2))
    with refused(InvalidRequestError, "pass_index"):
        rig.executor.begin_pass(1, 0)
    for layer in LAYERS:
        rig.run_layer(layer, tokens(14, 4, seed=layer), tokens(14, seed=1), tokens(14, seed=2))
    assert rig.executor.receipt(1) is not None


def test_there_is_no_receipt_before_the_last_pass(rig: Rig) -> None:
    for index in range(4):
        assert rig.executor.receipt(1) is None
        run_pass(rig, index)
    assert rig.executor.receipt(1) is not None
    # The next plan goes on from there.
    rig.run(3, span(2, 1, 1))


def test_a_plan_with_passes_left_has_not_run(rig: Rig) -> None:
    run_pass(rig, 0)
    with rig.refuses(PlanOutOfOrderError, "plan.previous"):
        rig.start(3, span(2, 1, 1))


def test_passes_come_in_order(rig: Rig) -> None:
    with rig.refuses(PlanOutOfOrderError, "pass_index"):
        rig.executor.begin_pass(1, 1)
    with rig.refuses(InvalidRequestError, "pass_index"):
        rig.executor.begin_pass(1, -1)
    with rig.refuses(InvalidRequestError, "pass_index"):
        rig.executor.begin_pass(1, 4)
    rig.executor.begin_pass(1, 0)
    run_layer(rig, 0, rows_of(0))
    with rig.refuses(PlanOutOfOrderError, "pass_index"):
        rig.executor.begin_pass(1, 1)
    run_layer(rig, 1, rows_of(0))
    run_pass(rig, 1)
    with rig.refuses(PlanOutOfOrderError, "pass_index"):
        rig.executor.begin_pass(1, 0)


def test_a_plan_that_was_begun_whole_has_no_passes(rig: Rig) -> None:
    run_layer(rig, 0, [*range(8)])
    with rig.refuses(PlanOutOfOrderError, "pass_index"):
        rig.executor.begin_pass(1, 0)


def test_the_present_pass_may_be_begun_and_its_layers_sent_again(rig: Rig) -> None:
    first = run_pass(rig, 0)
    for again in (run_pass(rig, 0), run_pass(rig, 0)):
        assert all(map(torch.equal, first, again))
    for index in range(1, 4):
        run_pass(rig, index)
    before = rig.snapshot()
    run_pass(rig, 3)
    assert rig.snapshot() == before, "a plan that has run writes nothing"


def test_a_pass_takes_its_own_number_of_tokens(rig: Rig) -> None:
    rig.executor.begin_pass(1, 0)
    with rig.refuses(InvalidRequestError):
        run_layer(rig, 0, [*range(8)])


def test_what_passes_have_written_can_be_read_and_no_more(rig: Rig) -> None:
    run_pass(rig, 0)
    rig.executor.begin_pass(1, 1)
    run_layer(rig, 0, rows_of(1))
    # The second token of sequence 1 is at position 8, the first of its second block.
    data, _ = rig.executor.read_blocks(1, 1, range(2), first_layer=0, num_layers=1)
    is_written = data[0, :, 0, 0].any(dim=-1).flatten()
    assert is_written.tolist() == [i < 9 for i in range(16)]
    with rig.refuses(BlockNotWrittenError, "entries[1]"):
        rig.executor.read_blocks(1, 1, range(2), first_layer=1, num_layers=1)
    data, _ = rig.executor.read_blocks(1, 1, [0], first_layer=1, num_layers=1)
    assert data[0, 0, 0, 0].any(dim=-1).all()


def test_blocks_are_not_sent_to_a_plan_in_passes(rig: Rig) -> None:
    rig.executor.begin_pass(1, 0)
    data, _ = rig.executor.read_blocks(1, 1, [0])
    with rig.refuses(PlanOutOfOrderError, "plan.number"):
        rig.executor.write_blocks(1, 1, 0, data)


def test_a_block_that_is_taken_or_published_between_passes_is_noticed(rig: Rig) -> None:
    run_pass(rig, 0)
    rig.executor.publish(publications((2, 1)))  # that the last token of sequence 3 goes to
    rig.executor.begin_pass(1, 1)
    with rig.refuses(BlockNotWritableError):
        run_layer(rig, 0, rows_of(1))


def test_a_block_that_another_session_gets_between_passes_is_noticed(rig: Rig) -> None:
    run_pass(rig, 0)
    rig.open(2)
    rig.run(1, set_blocks(1, [(1, 2)]), span(1, 0, 3), session_id=2)
    rig.executor.begin_pass(1, 1)
    with rig.refuses(StaleGenerationError):
        run_layer(rig, 0, rows_of(1))


def test_a_plan_that_computes_nothing_has_no_passes() -> None:
    rig = prompts(Rig())
    rig.start(2)
    with rig.refuses(InvalidRequestError, "pass_index"):
        rig.executor.begin_pass(1, 0)


def test_a_plan_is_named(rig: Rig) -> None:
    with rig.refuses(PlanOutOfOrderError, "plan.number"):
        rig.executor.begin_pass(1, 0, plan_number=1)
