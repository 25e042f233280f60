"""The engine's face over real planes: texts, streams, aborts, bad prompts, and both data planes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_planes import POOL, Pair

from data_plane.execution.layer_runner import LayerRunner
from engine import LLM, Delta, SamplingParams
from engine.commands.main import main
from kvplane.errors import InvalidRequestError
from tests.helpers.refusals import refused


@pytest.fixture(scope="module")
def pair(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(model, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest.fixture(scope="module")
def llm(model: Path, pair: Pair) -> Iterator[LLM]:
    with LLM(model, control_plane=pair.control.address, pool_id=POOL, timeout_s=30.0) as opened:
        yield opened


def held_blocks(llm: LLM) -> int:
    return sum(tier.num_held_blocks for tier in llm.get_pool().usage)


def test_requests_may_arrive_in_a_stream_and_not_while_a_batch_is_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans are longer where nobody would wait for them."""
    params, seen, step = SamplingParams(max_tokens=4), list[bool](), llm._core.step

    def watched() -> list[Delta]:
        seen.append(llm._core.may_arrive)
        return step()

    monkeypatch.setattr(llm._core, "step", watched)
    llm.generate(["a batch"], params)
    assert not any(seen) and seen
    assert all(llm._core.may_arrive for _ in llm.stream(["a stream"], params))


def test_a_closed_stream_gives_all_blocks_back(llm: LLM) -> None:
    stream = llm.stream(["one", "two"], SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert held_blocks(llm) > 0
    stream.close()  # type: ignore[attr-defined]
    llm.generate(["another"], SamplingParams(max_tokens=2))
    assert held_blocks(llm) == 0


def test_an_empty_prompt_is_refused_by_its_place_and_nothing_starts(llm: LLM) -> None:
    before = llm.stats.num_requests
    with refused(InvalidRequestError, "prompts[2]"):
        llm.generate(["fine", "also fine", ""])
    with refused(InvalidRequestError, "prompts[1][1]"):
        llm.generate([[5, 6], [5, 300]])
    with refused(InvalidRequestError, "prompts"):
        llm.generate("not a list")
    assert llm.stats.num_requests == before


def test_an_embedded_data_plane_gives_the_same_as_remote_ones(
    llm: LLM, model: Path, pair: Pair, tmp_path: Path
) -> None:
    """Over shared memory, and over gRPC where the data plane shares none."""
    params = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=16, n=3, temperature=1, seed=1),
    ]
    prompts = ["where attention runs does not matter", "nor for continuations"]
    with LLM(
        model,
        control_plane=pair.control.address,
        data_plane="embedded",
        pool_id="embedded",
        num_device_blocks=20,
    ) as embedded:
        got = embedded.generate(prompts, params)
    with (
        Pair(model, tmp_path, shared_memory=False) as other,
        LLM(model, control_plane=other.control.address, pool_id=POOL, timeout_s=30.0) as over_grpc,
    ):
        remote = [llm.generate(prompts, params), over_grpc.generate(prompts, params)]
    for outputs in remote:
        for a, b in zip(got, outputs, strict=True):
            assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]


def test_most_layers_of_an_embedded_engine_are_bound(
    model: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    not_bound = list[int]()
    check = LayerRunner._check

    def noted(self: LayerRunner, batch: Any, index: int, *rest: Any) -> Any:
        not_bound.append(index)
        return check(self, batch, index, *rest)

    monkeypatch.setattr(LayerRunner, "_check", noted)
    with LLM(
        model,
        control_plane=pair.control.address,
        data_plane="embedded",
        pool_id="bound",
        num_device_blocks=20,
    ) as llm:
        not_bound.clear()  # of the probe that measured the model
        llm.generate(["a"], SamplingParams(max_tokens=40, ignore_eos=True))
    num_layers = len(set(not_bound))
    assert 0 < len(not_bound) <= 3 * num_layers, "the prompt's, and the first of one token"


def generated(pair: Pair, model: Path, *flags: str) -> int:
    """The exit code of the program, in this process."""
    where = ["--model", str(model), "--control-plane", pair.control.address, "--pool-id", POOL]
    return main(["generate", *where, *flags])


def test_the_program_prints_what_the_library_answers(
    llm: LLM, model: Path, pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    (want,) = llm.generate(["from the shell"], SamplingParams(max_tokens=12))
    assert generated(pair, model, "--prompt", "from the shell", "--max-tokens", "12") == 0
    assert capsys.readouterr().out.rstrip("\n") == want.outputs[0].text.rstrip("\n")


def test_several_prompts_and_continuations_are_labelled(
    model: Path, pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("first\nsecond\n")
    how = ["--max-tokens", "4", "--n", "2", "--temperature", "1", "--seed", "3"]
    assert generated(pair, model, "--prompts-file", str(prompts), *how) == 0
    printed = capsys.readouterr().out
    assert all(label in printed for label in ("[1.1]", "[1.2]", "[2.1]", "[2.2]"))


def test_a_batch_whose_layers_no_message_takes_is_refused_when_the_engine_starts(
    pair: Pair, model: Path
) -> None:
    with refused(InvalidRequestError, "max_batch_tokens", match=r"at most \d+, is 10000000"):
        LLM(model, control_plane=pair.control.address, pool_id=POOL, max_batch_tokens=10_000_000)
