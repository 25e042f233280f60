"""A prefix is found by what computes it: by the same weights, settings and layers, and no others.

Each row has two states A and B of a model. Answers are compared with those of eager attention.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, close_planes
from kvplane.transformers.model_state import namespace_of
from tests.helpers.plane_cache_checks import ARGUMENT, ATOL, one_prompt, tiny_llama
from tests.helpers.refusals import refused
from tests.models import model_states as states
from tests.models.model_states import LLAMA, OTHERS, ask

POOL = {"num_device_blocks": 64}
FOUND = 32  # of 45 tokens, all whole blocks
MANY_LAYERS = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


@pytest.fixture
def model() -> Iterator[PreTrainedModel]:
    model = tiny_llama()
    yield model
    close_planes(model)


@pytest.mark.parametrize("row", [*LLAMA, "soft cap"])
def test_one_state_never_finds_what_another_left(row: str) -> None:
    """In one process and one pool: A, A again, B, B again."""
    model, change = states.made(row)
    results = [ask(model, **POOL), ask(model, **POOL)]
    change(model)
    results += [ask(model, **POOL), ask(model, **POOL)]
    with PlaneCache(model, **POOL) as cache:
        cache._planes.backend._executor.check_integrity()  # type: ignore[union-attr]
    close_planes(model)
    assert [found for found, _ in results] == [0, FOUND, 0, FOUND]
    assert max(off for _, off in results) < ATOL


def test_states_that_come_back_find_what_they_left(model: PreTrainedModel) -> None:
    assert ask(model, **POOL)[0] == 0
    for scale, found in ((0.5, 0), (2.0, FOUND), (0.5, FOUND)):  # A, then B, A and B again
        for layer in model.model.layers:
            layer.self_attn.scaling *= scale
        got = ask(model, **POOL)
        assert got[0] == found and got[1] < ATOL


@pytest.mark.nightly  # loads models in two processes; on push one process looks
def test_two_processes_share_what_equal_states_compute_and_nothing_else(tmp_path: Path) -> None:
    rows = [row for row in LLAMA if row not in ("weights that are assigned", "an optimizer's step")]
    others = ("soft cap", "window")
    asked = ["weights.A", *(f"{row}.B" for row in rows)]
    asked += [f"{row}.{state}" for row in others for state in "AB"]
    found = states.found_twice(tmp_path, ("weights", *others), asked)
    # Another window is another layout, which the pool refuses.
    first, again = [0] * (len(asked) - 1), [FOUND] * (len(asked) - 1)
    assert found == [[*first, states.REFUSED], [*again, states.REFUSED]]


def test_another_dtype_is_another_pool_or_is_refused(model: PreTrainedModel) -> None:
    """The layout of a pool has its dtype, and one model's planes are of one layout."""
    assert ask(model, **POOL)[0] == 0
    OTHERS["dtype"][1](model)
    with pytest.raises(InvalidRequestError):
        ask(model, **POOL)


def states_of_a_window() -> tuple[PreTrainedModel, PreTrainedModel]:
    model, change = states.made("window")
    narrow = states.made("window")[0]
    change(narrow)
    return model, narrow


@pytest.mark.parametrize("window", [5, 24, None])
def test_another_window_is_another_pool(window: int | None) -> None:
    """A window is of the layout: with equal weights and tokens nothing is found under another."""
    model = states.made("window")[0]
    assert [ask(model, **POOL)[0] for _ in range(2)] == [0, FOUND]
    model.config.sliding_window = window
    with pytest.raises(InvalidRequestError, match="windows than its pool: call close_planes"):
        ask(model, **POOL)
    close_planes(model)
    results = [ask(model, **POOL) for _ in range(2)]
    close_planes(model)
    assert [found for found, _ in results] == [0, FOUND]
    assert max(off for _, off in results) < ATOL


def test_windows_have_names_of_their_own() -> None:
    names = [namespace_of(model, is_shared=True) for model in [*states_of_a_window()] * 2]
    assert names == names[:2] * 2 and names[0] != names[1]


def test_sequences_of_other_weights_are_not_gone_on_with(model: PreTrainedModel) -> None:
    ids = one_prompt()["input_ids"]
    model.set_attn_implementation("kvplane")
    with PlaneCache(model, **POOL) as cache, torch.no_grad():
        model(ids, **{ARGUMENT: cache})
        LLAMA["weights"](model)
        with refused(InvalidRequestError, "cache", match="other weights, adapters or set"):
            model(torch.tensor([[7]]), **{ARGUMENT: cache})
        cache.reset()
        assert sum(tier.num_held_blocks for tier in cache.get_pool().usage) == 0
    assert ask(model, **POOL)[1] < ATOL


def test_a_write_through_data_is_told(model: PreTrainedModel) -> None:
    """Nothing shows it, so the documents name the way out."""
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert ask(model, **POOL)[0] == 0
    weight.data.mul_(1.5)
    with PlaneCache(model, **POOL) as cache:
        cache.weights_changed()
    assert ask(model, **POOL)[0] == 0
    found, off = ask(model, **POOL)
    assert found == FOUND and off < ATOL


def test_weights_without_versions_need_a_namespace() -> None:
    with torch.inference_mode():
        model = tiny_llama()
    with refused(InvalidRequestError, "namespace", match="was made in inference mode"):
        PlaneCache(model, **POOL, probe=False)
    with torch.inference_mode():
        given = {**POOL, "namespace": "mine", "probe": False}
        assert [ask(model, **given)[0] for _ in range(2)] == [0, FOUND]
    close_planes(model)


def test_a_namespace_that_is_given_is_taken_as_it_is(model: PreTrainedModel) -> None:
    given = {**POOL, "namespace": "mine"}
    assert ask(model, **given)[0] == 0
    model.config.pad_token_id = 3
    assert ask(model, **given)[0] == FOUND
    with pytest.raises(InvalidRequestError) as caught:
        PlaneCache(model, **POOL, namespace="n" * 129)
    assert "namespace" in caught.value.field


def count_calls(model: PreTrainedModel) -> None:
    """Each forward pass sets an attribute."""
    attention = model.model.layers[1].self_attn
    attention.calls = 0

    def count(*_: Any) -> None:
        attention.calls += 1

    attention.register_forward_pre_hook(count)


def prefill(model: PreTrainedModel, **settings: Any) -> int:
    """One forward pass of a prompt; the number of tokens that were found."""
    model.set_attn_implementation("kvplane")
    with PlaneCache(model, **settings) as cache, torch.no_grad():
        model(one_prompt()["input_ids"], **{ARGUMENT: cache}, logits_to_keep=1)
        return cache.num_cached_tokens[0]


def test_what_each_pass_changes_is_named_with_the_way_out(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    count_calls(model)
    name = r"model\.layers\.1\.self_attn\.calls"
    with pytest.raises(InvalidRequestError, match=rf"before {name} changed: .* give namespace="):
        ask(model, **POOL)
    assert [prefill(model, **POOL) for _ in range(6)] == [0] * 6
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(
        rf"passes {name} had changed\. .* give PlaneCache a namespace=", warning.message
    )
    given = {**POOL, "namespace": "mine"}
    assert [ask(model, **given)[0] for _ in range(2)] == [0, FOUND]


def test_a_change_between_calls_is_no_cause_to_warn(
    model: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(6):
        model.model.layers[0].self_attn.scaling *= 0.9
        assert ask(model, **POOL)[0] == 0
    for _ in range(6):  # as of a model that is trained, and scored by single passes
        with PlaneCache(model, **POOL) as cache:
            cache.weights_changed()
        assert prefill(model, **POOL) == 0
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_an_object_that_each_pass_sets_costs_no_look_at_the_whole_model(
    model: PreTrainedModel,
) -> None:
    attention = model.model.layers[0].self_attn
    attention.seen = torch.ones(3)
    name, watch = namespace_of(model, is_shared=False), model._kvplane_state._watch
    attention.seen = torch.zeros(3)
    assert namespace_of(model, is_shared=False) == name
    assert model._kvplane_state._watch is watch
    attention.seen = 3.0
    assert namespace_of(model, is_shared=False) != name


def fastest_s(call: Callable[[], Any], num_calls: int) -> float:
    times = []
    for _ in range(num_calls):
        began_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - began_s)
    return min(times)


def test_looking_for_changes_is_cheap() -> None:
    """Beside a step of a model of 24 layers in which nearly all time is that of Python. A step of
    the smallest models that anybody serves takes four times as long; there it is below 1 %.
    """
    model = Qwen2ForCausalLM(Qwen2Config(**MANY_LAYERS)).train(False)
    token = torch.tensor([[7]])
    with torch.inference_mode():
        step_s = fastest_s(lambda: model(token, use_cache=False), 10)
    namespace_of(model, is_shared=False)
    look_s = fastest_s(lambda: namespace_of(model, is_shared=False), 50)
    assert look_s < 0.04 * step_s, f"{look_s * 1e6:.0f} us of {step_s * 1e6:.0f} us"
