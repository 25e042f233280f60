"""Scheduling over the real cores of both planes: batching, budgets, preemption, forks, aborts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from engine.scheduling.sequence import SequenceStatus
from kvplane.errors import NeverFitsError
from kvplane.wire import columns
from kvplane.wire.v1 import session_pb2 as pb
from kvplane.wire.v1.types_pb2 import TIER_DEVICE as DEVICE
from kvplane.wire.v1.types_pb2 import TIER_HOST as HOST
from tests.helpers.engine_harness import Engine, Reference, prompt_of


def kinds(step: list[pb.Operation]) -> list[str]:
    return [
        {DEVICE: "swap_in", HOST: "swap_out"}[operation.swap.tier]
        if operation.HasField("swap")
        else str(operation.WhichOneof("operation"))
        for operation in step
    ]


def all_kinds(engine: Engine) -> list[str]:
    return [kind for step in engine.link.steps for kind in kinds(step)]


def test_requests_run_together_and_each_is_right(folder: Path, reference: Reference) -> None:
    engine = Engine(folder)
    for length in (5, 17, 30, 9):
        engine.add(prompt_of(length, length), max_tokens=10)
    engine.run()
    engine.check_greedy(reference)
    assert max(engine.backend.batch_sizes) > 30  # several prompts in one forward
    assert engine.backend.batch_sizes.count(4) >= 5  # four decoding sequences in one forward


def test_a_step_has_one_append_for_all_sequences_that_decode(folder: Path) -> None:
    engine = Engine(folder)
    for seed in range(5):
        engine.add(prompt_of(6 + seed, seed), max_tokens=4)
    engine.run()
    decoding = engine.link.steps[2]
    assert kinds(decoding) == ["append"]
    append = decoding[0].append
    positions = columns.read(columns.INT32, append.first_positions, "")
    assert positions.tolist() == [7 + seed for seed in range(5)]
    for column in (append.num_slots, append.num_tokens):
        assert columns.read(columns.INT32, column, "").tolist() == [1] * 5


def test_a_disagreement_on_positions_is_settled_and_costs_no_token(
    folder: Path, reference: Reference
) -> None:
    engine = Engine(folder)
    for seed in range(2):
        engine.add(prompt_of(9, seed), max_tokens=8)
    for _ in range(3):
        engine.core.step()
    engine.scheduler.running[0].num_computed -= 1
    engine.run()
    assert engine.core.stats.num_aborted_plans == 1
    engine.check_greedy(reference)


def test_no_step_computes_more_than_the_budget(folder: Path, reference: Reference) -> None:
    engine = Engine(folder, max_batch_tokens=16)
    engine.add(prompt_of(6, 2), max_tokens=12)
    engine.add(prompt_of(60, 1), max_tokens=4)
    engine.run()
    assert max(engine.backend.batch_sizes) <= 16
    engine.check_greedy(reference)


def test_a_long_prompt_does_not_hold_up_who_is_decoding(folder: Path) -> None:
    engine = Engine(folder, max_batch_tokens=8)
    short = engine.add(prompt_of(4, 1), max_tokens=20)
    engine.core.step()
    engine.add(prompt_of(64, 2), max_tokens=1)
    tokens = [d for _ in range(6) for d in engine.core.step() if d.request_id == short]
    assert len(tokens) == 6


def test_no_more_sequences_run_than_allowed(folder: Path) -> None:
    engine = Engine(folder, max_sequences=3)
    for seed in range(6):
        engine.add(prompt_of(6, seed), max_tokens=4)
    engine.add(prompt_of(6, 9), max_tokens=4, n=3, temperature=1.0, seed=1)
    most = 0
    while engine.core.has_work:
        engine.core.step()
        most = max(most, len(engine.scheduler.running))
    assert most == 3


def test_first_come_is_first_served(folder: Path) -> None:
    engine = Engine(folder, max_sequences=1)
    ids = [engine.add(prompt_of(6, seed), max_tokens=3) for seed in range(4)]
    engine.run()
    order = [delta.request_id for delta in engine.deltas if delta.finish_reason]
    assert order == ids


def test_a_lower_priority_goes_first_and_is_preempted_last(
    folder: Path, reference: Reference
) -> None:
    engine = Engine(folder, max_sequences=1)
    ids = [
        engine.add(prompt_of(6, seed), max_tokens=3, priority=p) for seed, p in enumerate((5, 5))
    ]
    engine.core.step()
    ids += [engine.add(prompt_of(6, seed), max_tokens=3, priority=-1) for seed in (2, 3)]
    engine.run()
    ends = [delta.request_id for delta in engine.deltas if delta.finish_reason]
    assert ends == [ids[0], ids[2], ids[3], ids[1]]

    tight = Engine(folder, num_device_blocks=8)
    late = tight.add(prompt_of(16, 0), max_tokens=30, priority=1)
    first = tight.add(prompt_of(16, 1), max_tokens=30)
    tight.run()
    ends = [delta.request_id for delta in tight.deltas if delta.finish_reason]
    assert ends == [first, late]
    assert tight.core.stats.num_swap_preemptions > 0
    tight.check_greedy(reference)


def test_a_shared_prefix_is_computed_once(folder: Path, reference: Reference) -> None:
    engine = Engine(folder)
    shared = prompt_of(40, 1)
    engine.add([*shared, 5], max_tokens=4)
    engine.run()
    before = sum(engine.backend.batch_sizes)
    second = engine.add([*shared, 6], max_tokens=4)
    engine.run()
    assert sum(engine.backend.batch_sizes) - before == 1 + 3
    engine.check_greedy(reference)
    assert engine.outputs[second].num_cached_tokens == 40


def crowded(folder: Path, num_host_blocks: int) -> Engine:
    """Six sequences that grow to 8 blocks each in a pool of 30."""
    engine = Engine(folder, num_device_blocks=30, num_host_blocks=num_host_blocks)
    for seed in range(6):
        engine.add(prompt_of(30, seed), max_tokens=34)
    return engine


@pytest.mark.parametrize(
    ("num_host_blocks", "is_swapped", "is_recomputed"),
    [(64, True, False), (0, False, True), (7, True, True)],
    ids=["swapped", "computed again", "both where the host tier is full"],
)
def test_who_came_last_gives_way_when_blocks_run_short(
    folder: Path,
    reference: Reference,
    num_host_blocks: int,
    is_swapped: bool,
    is_recomputed: bool,
) -> None:
    engine = crowded(folder, num_host_blocks)
    engine.run()
    engine.check_greedy(reference)
    counters, stats = engine.planes.observed().counters, engine.core.stats
    assert bool(counters.num_swapped_out_blocks) is is_swapped
    assert bool(counters.num_swapped_in_blocks) is is_swapped
    assert ("swap_out" in all_kinds(engine)) is is_swapped
    assert (stats.num_swap_preemptions > 0) is is_swapped
    assert (stats.num_recompute_preemptions > 0) is is_recomputed


def test_the_first_request_is_never_preempted(folder: Path) -> None:
    engine = crowded(folder, num_host_blocks=0)
    first = engine.scheduler.waiting[0]
    engine.core.step()
    while first.status is not SequenceStatus.FINISHED:
        assert first.status is SequenceStatus.RUNNING
        engine.core.step()
    assert engine.core.stats.num_preemptions > 0
    assert engine.core.take_output(next(iter(engine.asked))) is not None


def test_blocks_that_come_back_by_themselves_are_waited_for(folder: Path) -> None:
    """A swap out pins its sources until its plan is receipted: nobody else has to go for that."""
    engine = crowded(folder, num_host_blocks=64)
    engine.run()
    assert all(kinds(step).count("swap_out") <= 1 for step in engine.link.steps)
    steps = list(zip(engine.link.steps, engine.link.results, strict=True))
    for (step, result), (following, _) in itertools.pairwise(steps):
        waiting = any(
            failure.is_later and failure.num_blocks_pending > 0
            for operation in result.results
            for failure in operation.failures
        )
        if "swap_out" in kinds(step) and waiting:
            assert "swap_out" not in kinds(following)


def test_a_prompt_that_can_never_fit_fails_alone(folder: Path, reference: Reference) -> None:
    engine = Engine(folder, num_device_blocks=8)
    large = engine.add(prompt_of(100, 2), max_tokens=4)
    small = engine.add(prompt_of(10, 1), max_tokens=4)
    engine.run()
    assert engine.tokens(large) == [[]]
    assert isinstance(engine.outputs[large].error, NeverFitsError)
    assert engine.outputs[large].outputs[0].finish_reason == "error"
    engine.check_greedy(reference, small)
    assert engine.outputs[small].error is None


def test_continuations_share_the_prompt_and_copy_what_they_write(folder: Path) -> None:
    engine = Engine(folder)
    prompt = prompt_of(20, 1)
    together = engine.add(prompt, max_tokens=12, n=4, temperature=1.5, seed=11)
    engine.run()
    forks = [o.fork for step in engine.link.steps for o in step if o.HasField("fork")]
    assert [columns.count(columns.INT64, fork.sequence_ids) for fork in forks] == [3]
    assert engine.planes.observed().counters.num_copies_on_write >= 3
    tokens = engine.tokens(together)
    assert len({tuple(each) for each in tokens}) == 4
    for i, want in enumerate(tokens):  # each one alone, from the seed of its own stream
        alone = Engine(folder)
        request = alone.add(prompt, max_tokens=12, temperature=1.5, seed=11 + i)
        alone.run()
        assert alone.tokens(request) == [want]


def test_forks_come_before_appends_and_nothing_is_freed_before_it_is_forked(folder: Path) -> None:
    engine = Engine(folder)
    engine.add(prompt_of(20, 1), max_tokens=6, n=3, temperature=1.0, seed=2)
    engine.add(prompt_of(9, 3), max_tokens=12)
    engine.run()
    order = {"fork": 0, "free": 1, "swap_out": 2, "append": 3, "swap_in": 4, "admit": 5}
    for step in engine.link.steps:
        ranks = [order[kind] for kind in kinds(step)]
        assert ranks == sorted(ranks)
    for result in engine.link.results:
        assert not any(operation.failures for operation in result.results)


def test_continuations_that_end_at_once_are_not_forked(folder: Path) -> None:
    engine = Engine(folder)
    request = engine.add(prompt_of(12, 1), max_tokens=1, n=4, temperature=1.0, seed=3)
    engine.run()
    assert [len(tokens) for tokens in engine.tokens(request)] == [1, 1, 1, 1]
    assert "fork" not in all_kinds(engine)


def test_one_request_alone_in_a_pool_too_small_for_its_continuations_ends(folder: Path) -> None:
    engine = Engine(folder, num_device_blocks=9, num_host_blocks=4)
    request = engine.add(prompt_of(20, 1), max_tokens=30, n=4, temperature=1.0, seed=5)
    engine.run()
    calm = Engine(folder, num_device_blocks=100)
    want = calm.add(prompt_of(20, 1), max_tokens=30, n=4, temperature=1.0, seed=5)
    calm.run()
    assert engine.tokens(request) == calm.tokens(want)


@pytest.mark.parametrize("num_host_blocks", [0, pytest.param(64, marks=pytest.mark.nightly)])
def test_preemption_does_not_thrash(
    folder: Path, reference: Reference, num_host_blocks: int
) -> None:
    """Eight requests, of which three fit at their full length, cost little more than one at a
    time: who was preempted waits until another has ended.
    """
    engine = Engine(folder, num_device_blocks=24, num_host_blocks=num_host_blocks)
    for seed in range(8):
        engine.add(prompt_of(20, seed), max_tokens=40)
    engine.run()
    engine.check_greedy(reference)
    stats = engine.core.stats
    assert 0 < stats.num_preemptions <= 8
    assert stats.num_computed_tokens <= 1.5 * 8 * (20 + 39)


def test_a_prompt_in_parts_gives_the_logits_of_the_whole(folder: Path) -> None:
    """Computed beside a sequence that decodes, ten tokens a step."""
    logits = []
    for max_batch_tokens in (64, 10):
        engine = Engine(folder, max_batch_tokens=max_batch_tokens)
        engine.add(prompt_of(4, 1), max_tokens=20)
        engine.core.step()
        request_id = engine.add(prompt_of(60, 2), max_tokens=5, record_logits=True)
        engine.run()
        output = engine.core.take_output(request_id)
        assert output is not None
        logits.append(output.outputs[0].logits)
    assert max(engine.backend.batch_sizes) == 10
    torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)
