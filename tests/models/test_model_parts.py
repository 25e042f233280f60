"""Parts of a model, one for each rank, compute together what the whole model computes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import TYPES, VOCABULARY, tiny_model
from transformers import PreTrainedModel

from engine.parallel.group import RankGroup
from engine.parallel.model_part import keep_part, shards_of
from kvplane import LayerGroup, Layout
from kvplane.errors import InternalError, InvalidRequestError
from kvplane.models.model_layers import layer_groups

NOT_ALONE = ("gemma4_assistant", "gemma4_unified_assistant", "xmod")
"""Types that need more than token ids, or that transformers cannot build."""
SOME = ("llama", "qwen2", "gemma3_text", "starcoder2", "cohere2")
TOKENS = torch.arange(3, 23).unsqueeze(0) % VOCABULARY


def layout_of(model: PreTrainedModel) -> Layout:
    return Layout("m", 16, "float32", "float32", layer_groups(model.config))


def on_ranks(folder: Path, num_ranks: int, act: Callable[[RankGroup], Any]) -> list[Any]:
    """What ``act`` returns on each rank; here ranks are threads."""

    def run(rank: int) -> Any:
        return act(RankGroup(folder / "meeting", rank, num_ranks, 10.0))

    with ThreadPoolExecutor(num_ranks) as threads:
        return [done.result() for done in [threads.submit(run, i) for i in range(num_ranks)]]


def size_of(model: PreTrainedModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_parts(tmp_path: Path, model: PreTrainedModel, layout: Layout) -> None:
    models = [copy.deepcopy(model) for _ in range(2)]

    @torch.inference_mode()
    def act(group: RankGroup) -> torch.Tensor:
        part = models[group.rank]
        keep_part(part, layout, group)
        return part(input_ids=TOKENS, use_cache=False).logits

    with torch.inference_mode():
        whole = model(input_ids=TOKENS, use_cache=False).logits
    first, second = on_ranks(tmp_path, 2, act)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, whole, rtol=1e-4, atol=1e-4)
    assert size_of(models[0]) < 0.75 * size_of(model)


@pytest.mark.parametrize("model_type", SOME)
def test_the_parts_compute_what_the_whole_does(tmp_path, model_type) -> None:
    model = tiny_model(model_type)
    check_parts(tmp_path, model, layout_of(model))


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", sorted({*TYPES} - {*SOME, *NOT_ALONE}))
def test_any_model_is_computed_in_parts_or_refused(tmp_path, model_type) -> None:
    model = tiny_model(model_type)
    try:
        layout = layout_of(model)
        keep_part(copy.deepcopy(model), layout, RankGroup(tmp_path / "one", 0, 1, 10.0))
    except InvalidRequestError:
        return
    check_parts(tmp_path, model, layout)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("opt", "no plan"),
        ("phi3", "cuts layers as colwise_gather_output"),
        ("qwen3_moe", "cuts layers as moe_tp_experts, packed_colwise"),
    ],
)
def test_a_model_without_a_plan_that_is_served_is_refused(tmp_path, model_type, why) -> None:
    model = tiny_model(model_type)
    with pytest.raises(InvalidRequestError, match=f"tensor_parallel: .*{why}"):
        keep_part(model, layout_of(model), RankGroup(tmp_path / "meeting", 0, 1, 10.0))


def test_a_model_whose_attention_has_one_projection_is_refused(tmp_path) -> None:
    model = tiny_model("gpt_neox")
    plan = model.config.base_model_tp_plan
    model.config.base_model_tp_plan = {name: plan[name] for name in plan if name != "embed_in"}
    with pytest.raises(InvalidRequestError, match=r"tensor_parallel: .*other layers than q_proj"):
        keep_part(model, layout_of(model), RankGroup(tmp_path / "meeting", 0, 1, 10.0))


def test_ranks_that_do_not_divide_the_heads_or_the_features_are_refused(tmp_path) -> None:
    model = tiny_model("llama")
    with pytest.raises(InvalidRequestError, match="tensor_parallel: must divide the model's"):
        shards_of(layout_of(model), 3)
    groups = (LayerGroup("a", (0, 1), 2, 8), LayerGroup("b", (2, 3), 1, 8))
    with pytest.raises(InvalidRequestError, match="tensor_parallel"):
        shards_of(Layout("m", 16, "float32", "float32", groups), 2)


def test_ranks_tell_and_gather_messages_of_any_length(tmp_path) -> None:
    def act(group: RankGroup) -> tuple[list[bytes], list[list[bytes]]]:
        told = [group.tell(b"x" * n) for n in (0, 1, 70_000)]
        return told, [group.gather(bytes([group.rank]) * n * group.rank) for n in (0, 1, 5)]

    for told, gathered in on_ranks(tmp_path, 3, act):
        assert told == [b"", b"x", b"x" * 70_000]
        assert gathered == [[bytes([i]) * n * i for i in range(3)] for n in (0, 1, 5)]


def test_ranks_that_do_not_come_are_a_typed_error(tmp_path) -> None:
    with pytest.raises(InternalError, match="does not answer"):
        RankGroup(tmp_path / "meeting", 0, 2, 0.2)
