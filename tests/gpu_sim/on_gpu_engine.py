"""An engine whose model, sampling and pool are on a GPU, with its decode steps captured or not.

test_simulated_gpu.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import simulated_gpu
import torch

from engine.models.captured import sizes_of
from engine.request import SamplingParams
from engine.running.step_memory import utilization_beside_step
from engine.sampling.sampler import logprobs_of, new_stream, sample
from kvplane.errors import NeverFitsError, PlaneUnavailableError, SessionExpiredError
from kvplane.models.hf import layout_from_hf
from tests.helpers.engine_harness import (
    ENGINES,
    LLAMA,
    Engine,
    Reference,
    loaded,
    prompt_of,
    save_model,
)
from tests.helpers.refusals import refused

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(LLAMA, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """Greedy answers by transformers, on the CPU."""
    return Reference(folder)


@pytest.fixture(autouse=True)
def _engines_are_quiet() -> Iterator[None]:
    torch.set_num_threads(1)  # on a busy machine more would mostly wait for each other
    yield
    while ENGINES:
        ENGINES.pop().check()


def on_gpu(folder: Path, *, graphs: bool = True, **settings: Any) -> Engine:
    return Engine(folder, device="cuda", graphs=graphs, **settings)


def run_counting(engine: Engine) -> list[tuple[int, int, bool]]:
    """Run, and return of each step in which every sequence has one token: how many those are, and
    how many layers ran one by one, and whether a graph was replayed.
    """
    steps = []
    while engine.core.has_work:
        steps_before, layers = len(engine.backend.batch_sizes), engine.backend.num_layers_run
        replays = engine.decoder.num_replays if engine.graphs else 0
        engine.deltas += engine.core.step()
        for size in engine.backend.batch_sizes[steps_before:]:
            again = engine.decoder.num_replays if engine.graphs else 0
            steps.append((size, engine.backend.num_layers_run - layers, again > replays))
    return steps


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "graphless"])
def test_texts_are_those_of_transformers(folder: Path, reference: Reference, graphs: bool) -> None:
    """Long prompts are computed in chunks between the replays, and sequences end one by one."""
    engine = on_gpu(folder, graphs=graphs, num_device_blocks=100)
    for seed, (length, new) in enumerate([(9, 5), (70, 9), (12, 14), (150, 10), (3, 20)]):
        engine.add(prompt_of(length, seed), max_tokens=new)
    steps = run_counting(engine)
    engine.check_greedy(reference)
    assert any(is_replayed for *_, is_replayed in steps) == graphs
    assert any(num_layers for _, num_layers, _ in steps)


def test_each_size_is_captured_once_and_replayed_at_other_lengths(
    folder: Path, reference: Reference
) -> None:
    """Answers later in the same session have other lengths and blocks."""
    engine = on_gpu(folder, num_device_blocks=100)
    for turn in range(2):
        for seed in range(5):
            engine.add(prompt_of(5 + 7 * seed, 10 * turn + seed), max_tokens=4 + 3 * seed)
        engine.run()
    engine.check_greedy(reference)
    assert engine.decoder.num_captures == 4  # for 1, 2, 4 and 8
    assert engine.decoder.num_replays > 6 * engine.decoder.num_captures


def test_a_replay_has_the_bits_of_the_same_step_by_layers(folder: Path) -> None:
    """Where as many sequences as the graph has are in the step: no row is padding."""
    found = []
    for graphs in (True, False):
        engine = on_gpu(folder, graphs=graphs)
        ids = [engine.add(prompt_of(6 + i, i), max_tokens=8, record_logits=True) for i in range(4)]
        engine.run()
        outputs = [engine.core.take_output(request_id) for request_id in ids]
        found.append([output.outputs[0].logits for output in outputs])
        assert all(logits.is_cpu for logits in found[-1])
    assert engine.core.stats.num_steps > 5
    assert all(map(torch.equal, *found))


def test_a_new_session_captures_again(folder: Path, reference: Reference) -> None:
    engine = on_gpu(folder)
    engine.add(prompt_of(20, 1), max_tokens=16)
    for _ in range(6):
        engine.deltas += engine.core.step()
    before = engine.decoder.num_captures
    engine.link.faults.append(PlaneUnavailableError("planted"))
    engine.run()
    engine.check_greedy(reference)
    assert engine.core.stats.num_reopened_sessions == 1
    assert (before, engine.decoder.num_captures) == (1, 2)


def test_a_session_that_ends_before_a_capture_costs_no_graph_and_no_token(
    folder: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_gpu(folder)
    own, errors = engine.backend.fixed_step, [SessionExpiredError("planted")]

    def fixed_step(*bounds: int) -> Any:
        if errors:
            raise errors.pop()
        return own(*bounds)

    monkeypatch.setattr(engine.backend, "fixed_step", fixed_step)
    engine.add(prompt_of(20, 1), max_tokens=6)
    engine.run()
    engine.check_greedy(reference)
    assert engine.core.stats.num_reopened_sessions == 1
    assert engine.decoder.num_replays > 0


@pytest.mark.parametrize("max_plan_s", [0.0, 1000.0], ids=["one_by_one", "passes"])
def test_swaps_preemptions_and_prefills_come_between_replays(
    folder: Path, reference: Reference, max_plan_s: float
) -> None:
    engine = on_gpu(folder, num_device_blocks=14, num_host_blocks=8, max_plan_s=max_plan_s)
    for seed in range(6):
        engine.add(prompt_of(10 + 9 * seed, seed), max_tokens=20 - seed)
    engine.run()
    engine.check_greedy(reference)
    counters = engine.planes.observed().counters
    assert min(counters.num_swapped_out_blocks, counters.num_swapped_in_blocks) > 0
    assert engine.core.stats.num_preemptions > 0
    assert engine.decoder.num_replays > 20


def test_sampled_texts_are_those_of_a_cpu(folder: Path) -> None:
    """Also with penalties, several continuations, and beside a beam search."""

    def answers(engine: Engine) -> list[Any]:
        ids = [
            engine.add(prompt_of(21, 1), max_tokens=12, temperature=0.9, seed=8, top_k=20),
            engine.add(prompt_of(30, 2), max_tokens=9, n=3, temperature=1.3, seed=7, top_p=0.9),
            engine.add(prompt_of(5, 3), max_tokens=12, repetition_penalty=1.3),
            engine.add(prompt_of(9, 4), max_tokens=6, num_beams=3, n=2),
        ]
        engine.run()
        return [engine.tokens(request_id) for request_id in ids]

    assert answers(on_gpu(folder)) == answers(Engine(folder))


class Row:
    """A sequence whose next token is drawn."""

    def __init__(self, index: int, **params: Any) -> None:
        self.params = SamplingParams(**params)
        self.stream = new_stream(5, index)
        self.tokens = [1, 2, 2, 3, index]
        self.num_prompt_tokens = 2


ROWS = [
    Row(0),
    Row(1, temperature=0.7),
    Row(2, temperature=1.2, top_k=3, min_p=0.1),
    Row(3, temperature=1.0, top_p=0.8, top_k=7),
    Row(4, repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=0.7),
    Row(5, temperature=2.0, top_p=0.5, repetition_penalty=0.8),
]


def test_sample_gives_the_same_tokens_on_both_devices() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        logits = 3 * torch.randn(len(ROWS), 23, generator=generator)
        logits[:, 11] = logits[:, 7]  # of equal ones the first is taken
        tokens = sample(logits, ROWS)
        assert sample(logits.to(CUDA), ROWS) == tokens
        likeliest = [logprobs_of(x, tokens, [2] * 6, lambda token: ("", b"")) for x in (
            logits, logits.to(CUDA)
        )]  # fmt: skip
        assert likeliest[0] == likeliest[1]


def test_no_tensor_of_the_model_crosses_the_link_in_a_decode_step(folder: Path) -> None:
    """Of one sequence the logits are 388 bytes, a layer's keys and values 256."""
    num, num_drawn, num_blocks = 4, 2, 3
    engine = on_gpu(folder, num_device_blocks=100)
    for seed in range(num):
        engine.add(prompt_of(9, seed), max_tokens=12, temperature=1.0 * (seed % 2), seed=seed)
    for _ in range(4):
        engine.core.step()
    for _ in range(6):
        before, replays = simulated_gpu.crossed(), engine.decoder.num_replays
        engine.core.step()
        sent, received = (
            now - then for now, then in zip(simulated_gpu.crossed(), before, strict=True)
        )
        assert engine.decoder.num_replays == replays + 1
        # An id and a position; of each drawn row its place, twice, a random number and a parameter;
        # the plan's slots, starts and lengths, of as many rows as an engine computes, and tables.
        most = 16 * num + 28 * num_drawn + 8 * (3 * engine.max_sequences + 1)
        assert 0 < sent <= most + 4 * num * num_blocks
        # A token and whether its logits are finite; whether kernels found a fault.
        assert 0 < received <= 9 * num + 4


def test_a_model_that_waits_for_the_gpu_runs_by_layers(
    folder: Path,
    reference: Reference,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = on_gpu(folder)
    model: Any = engine.decoder._model

    def wait(*_: Any) -> None:
        model.lm_head.weight[0, 0].item()

    hook = model.model.register_forward_pre_hook(wait)
    with caplog.at_level(logging.WARNING, logger="engine"):
        for seed in range(2):
            engine.add(prompt_of(9, seed), max_tokens=6 + seed)
        engine.run()
    hook.remove()
    engine.check_greedy(reference)
    (line,) = [each for each in caplog.messages if "not captured" in each]
    assert "not permitted when stream is capturing" in line
    assert engine.decoder.num_replays == 0


def test_a_pool_leaves_room_for_what_is_used_the_largest_step_and_graphs(folder: Path) -> None:
    """The simulated GPU has 80 GiB, of which 10 are used."""
    gib, num_tokens, num_sequences = 1 << 30, 512, 64
    model = loaded(folder, 0, "cuda").model
    layout = layout_from_hf(folder)

    def pool_bytes(utilization: float, *, graphs: bool = False, num_processes: int = 1) -> float:
        share = utilization_beside_step(
            model,
            layout,
            utilization=utilization,
            num_processes=num_processes,
            max_batch_tokens=num_tokens,
            max_sequences=num_sequences,
            graphs=graphs,
        )
        return share * 70 * gib

    without = pool_bytes(0.9)
    step_bytes = 62 * gib - without
    of_mlp = 3 * LLAMA.intermediate_size * num_tokens * 4  # gate, up and their product
    assert of_mlp < step_bytes < 10 * of_mlp
    graph_bytes = without - pool_bytes(0.9, graphs=True)
    sizes = sizes_of(num_sequences)
    assert graph_bytes > len(sizes) * (32 << 20) + sum(sizes) * LLAMA.vocab_size * 4
    assert pool_bytes(0.9, num_processes=2) < 31 * gib
    with refused(NeverFitsError, "max_batch_tokens", match="are free on cuda:0"):
        pool_bytes(0.125)


def test_sizes_are_near_each_other_and_reach_the_most() -> None:
    assert sizes_of(1) == [1]
    assert sizes_of(64) == [1, 2, 4, 8, 16, 24, 32, 48, 64]
    assert sizes_of(70)[-3:] == [48, 64, 70]
