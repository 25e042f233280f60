"""Keys and values in 8 bits, end to end: the model that ships still recalls its facts, and blocks
that are shared, copied, swapped and evicted change nothing of what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
import torch
from dense_kv import DenseKv, LayerScales, calibrated
from engine_planes import ROOT, Process, data_plane

from engine import LLM
from engine.request import RequestOutput
from kvplane.errors import LayoutMismatchError
from kvplane.models.hf import layout_from_hf
from kvplane.results import total_of
from models.recall_task import Question, questions

RECALL = ROOT / "models" / "recall"
ASKED = questions(0, quick=True)
# How far logits, which reach 8 here, may be from those of torch with the same stored numbers: most
# answers' by no more than sums in another order cost, and some by what a key costs that lies so
# near the middle of two numbers of 8 bits that it is rounded to the other one.
MOST, SOME = 1e-4, 0.05
FAR = 2.0  # from those of keys and values in float32, which have 20 bits of mantissa more


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with Process("control_plane", tmp_path_factory.mktemp("logs") / "control.log") as process:
        yield process.address


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerScales]:
    return calibrated(RECALL, tmp_path_factory.mktemp("models") / "scaled", [ASKED[0].prompt])


def answer(llm: LLM, asked: list[Question]) -> list[RequestOutput]:
    return llm.generate([each.prompt for each in asked], [each.params for each in asked])


def distance(dense: DenseKv, output: RequestOutput) -> float:
    """Largest difference of a logit, each after the same tokens."""
    (got,) = output.outputs
    assert got.logits is not None
    token_ids = [*output.prompt_token_ids, *got.token_ids[:-1]]
    want = dense.logits(token_ids, len(output.prompt_token_ids) - 1)
    return float((got.logits - want).abs().max())


@pytest.mark.parametrize("has_scales", [False, True], ids=["scales of 1", "scales of its own"])
def test_a_short_pool_of_8_bits_answers_as_torch_does_with_the_same_numbers(
    control: str, scaled: tuple[Path, LayerScales], has_scales: bool
) -> None:
    model, scales = scaled if has_scales else (RECALL, {})
    with LLM(
        model,
        control_plane=control,
        data_plane="embedded",
        dtype="float32",
        kv_dtype="float8_e4m3fn",
        pool_id=f"small-{has_scales}",
        num_device_blocks=60,
        num_host_blocks=24,
        timeout_s=30.0,
    ) as llm:
        outputs = answer(llm, ASKED)
        counters = llm.get_counters()
    assert total_of(counters, "hit_tokens_total")
    assert counters["copies_on_write_total"]
    assert counters['swapped_blocks_total{direction="out"}']
    assert counters['swapped_blocks_total{direction="in"}']
    assert total_of(counters, "evictions_total")
    same, exact = DenseKv(model, torch.float8_e4m3fn, scales), DenseKv(model)
    greedy = [(q, o) for q, o in zip(ASKED, outputs, strict=True) if q.is_greedy]
    assert all(question.is_right(output.outputs[0].text) for question, output in greedy)
    distances = [distance(same, output) for _, output in greedy]
    assert median(distances) <= MOST
    assert max(distances) <= SOME
    assert SOME < max(distance(exact, output) for _, output in greedy) <= FAR


def test_an_engine_takes_type_and_scales_from_a_pool_in_another_process(
    control: str, scaled: tuple[Path, LayerScales], tmp_path: Path
) -> None:
    folder, scales = scaled
    own = layout_from_hf(RECALL).model_id
    layout = layout_from_hf(folder, dtype="float32", kv_dtype="float8_e5m2", model_id=own)
    blocks = ("--num-device-blocks", "128")
    settings = {"control_plane": control, "pool_id": "remote", "timeout_s": 30.0}
    with data_plane(control, layout, tmp_path / "data.log", *blocks, pool_id="remote"):
        with LLM(RECALL, **settings) as llm:
            outputs = answer(llm, [question for question in ASKED if question.is_greedy][:3])
        with pytest.raises(LayoutMismatchError):
            LLM(RECALL, kv_dtype="float8_e4m3fn", **settings)
        with pytest.raises(LayoutMismatchError):  # other weights, though of the same scales
            LLM(folder, kv_dtype="float8_e5m2", **settings)
    same = DenseKv(RECALL, torch.float8_e5m2, scales)
    assert max(distance(same, output) for output in outputs) <= SOME
