"""RoPE that takes its frequencies by the longest position of a forward pass: the probe finds the
length from which it does, and a cache refuses longer rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import VOCABULARY, draw_weights, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine import LLM, SamplingParams
from kvplane.clients.control_client import ControlClient
from kvplane.errors import InvalidRequestError
from kvplane.transformers import PlaneCache, attention, close_planes
from kvplane.transformers.models import adapters, part
from kvplane.transformers.models.rope import max_independent_tokens
from tests.helpers.plane_cache_checks import ARGUMENT
from tests.helpers.refusals import refused

LENGTH = 64
MAX_TOKENS = 128


def rope(rope_type: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **more}


def longrope(num_frequencies: int = 8, **more: Any) -> dict[str, Any]:
    return rope(
        "longrope",
        short_factor=[1.0] * num_frequencies,
        long_factor=[1 + 0.7 * i for i in range(num_frequencies)],
        original_max_position_embeddings=LENGTH,
        partial_rotary_factor=1.0,
        **more,
    )


def made(model_type: str, rope_parameters: dict[str, Any], **entries: Any) -> PreTrainedModel:
    """A tiny model with this RoPE, in which attention matters."""
    attention.register()
    config = tiny_config(model_type)
    entries = {"rope_parameters": rope_parameters, "max_position_embeddings": MAX_TOKENS, **entries}
    config = type(config).from_dict(config.to_dict() | entries)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(model)
    model.generation_config.eos_token_id = None
    return model


def tokens(num_tokens: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (1, num_tokens), generator=generator)


LONG = {"original_max_position_embeddings": LENGTH}
CASES = {
    "phi3": ("phi3", longrope(), LONG, LENGTH),
    "phimoe": ("phimoe", longrope(short_mscale=1.1, long_mscale=1.3), LONG, LENGTH),
    "minicpm3": ("minicpm3", longrope(num_frequencies=4), {}, LENGTH),
    "llama": ("llama", longrope(), {}, LENGTH),
    # After a longer pass its frequencies stay for one that is as long as the config says.
    "dynamic": ("llama", rope("dynamic", factor=4.0), {}, MAX_TOKENS - 1),
    "yarn": ("llama", rope("yarn", factor=2.0, original_max_position_embeddings=64), {}, None),
    "linear": ("llama", rope("linear", factor=4.0), {}, None),
    "by layer type": (
        "gemma3_text",
        {"sliding_attention": rope("default"), "full_attention": rope("dynamic", factor=2.0)},
        {},
        MAX_TOKENS - 1,
    ),
}


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("case", CASES)
def test_the_length_is_found_up_to_which_positions_are_their_own(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(part, "_SMALL", 1000)  # else half precision is probed in a copy
    model_type, parameters, entries, wanted = CASES[case]
    model = made(model_type, parameters, **entries).to(dtype)
    assert max_independent_tokens(model) == wanted


@pytest.mark.parametrize("case", CASES)
def test_keys_of_a_row_change_past_that_length_and_not_before(case: str) -> None:
    """What the length is for, seen in logits: a second row, of the same forward pass, one token
    longer or not.
    """
    model_type, parameters, entries, limit = CASES[case]
    model = made(model_type, parameters, **entries)
    limit = limit or MAX_TOKENS

    def logits(num_tokens: int) -> torch.Tensor:
        """Of the first row; both have three tokens, those of the second are its last ones."""
        positions = torch.stack([torch.arange(3), torch.arange(num_tokens - 3, num_tokens)])
        mask = {"attention_mask": torch.ones(2, 3, dtype=torch.long)}
        with torch.inference_mode():
            ids = tokens(3).expand(2, 3)
            found = model(input_ids=ids, position_ids=positions, use_cache=False, **mask)
        return found.logits[0]

    alone = logits(3)
    assert torch.equal(logits(limit), alone)
    is_dependent = not torch.equal(logits(2 * MAX_TOKENS), alone)
    assert is_dependent == (CASES[case][3] is not None)


@pytest.fixture(params=["phi3", "llama"])
def model(request: pytest.FixtureRequest) -> Iterator[PreTrainedModel]:
    model_type, parameters, entries, _ = CASES[request.param]
    model = made(model_type, parameters, **entries)
    yield model
    close_planes(model)


def generate(model: PreTrainedModel, cache: PlaneCache | None, ids: Any, num: int) -> list[int]:
    adapters.set_attention(model, "eager" if cache is None else attention.NAME)
    how: dict[str, Any] = {"max_new_tokens": num, "do_sample": False, "pad_token_id": 0}
    if cache is not None:
        how[ARGUMENT] = cache
    row = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **how)
    return row[0, ids.shape[1] :].tolist()


def test_a_cache_refuses_longer_rows_by_name_and_keeps_nothing_of_them(
    model: PreTrainedModel,
) -> None:
    long, near, short = tokens(LENGTH + 30), tokens(LENGTH - 4, seed=2), tokens(40, seed=3)
    with PlaneCache(model, num_device_blocks=64) as cache:
        before = cache._planes._link.get_counters()["publications_total"]
        with refused(InvalidRequestError, "input_ids", match=f"at most {LENGTH}: .*RoPE"):
            generate(model, cache, long, 1)
        assert cache._planes._link.get_counters()["publications_total"] == before
        assert cache.batch_size == -1
    grown = pytest.raises(InvalidRequestError, match="RoPE")
    with PlaneCache(model, num_device_blocks=64) as cache, grown:
        generate(model, cache, near, 8)  # while it grows
    for ids, num in ((near, 5), (short, 20)):
        with PlaneCache(model, num_device_blocks=64) as cache:
            assert generate(model, cache, ids, num) == generate(model, None, ids, num)


def test_rows_that_fit_are_answered_in_one_batch(model: PreTrainedModel) -> None:
    ids = torch.cat([tokens(LENGTH - 6, seed=4), tokens(LENGTH - 6, seed=5)])
    mask = torch.ones_like(ids)
    ids[1, :30], mask[1, :30] = 0, 0
    adapters.set_attention(model, attention.NAME)
    with PlaneCache(model, num_device_blocks=64) as cache:
        how = {"attention_mask": mask, ARGUMENT: cache, "pad_token_id": 0}
        got = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, **how)[:, -6:]
    for row, skip in ((0, 0), (1, 30)):
        assert got[row].tolist() == generate(model, None, ids[row : row + 1, skip:], 6)


def test_keys_of_a_chosen_length_are_in_a_namespace_of_their_own(
    tmp_path: Path, control_plane: str
) -> None:
    """So engines that share a pool, and have chosen another length or none, find none of them."""
    made("phi3", longrope(), **LONG).save_pretrained(tmp_path)
    prompt = tokens(100)[0].tolist()
    with LLM(
        tmp_path, control_plane=control_plane, data_plane="embedded", pool_id="p", num_threads=1,
        num_device_blocks=64, num_host_blocks=0, max_total_tokens=MAX_TOKENS, timeout_s=60.0,
    ) as llm:  # fmt: skip
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        for cached in (0, 96):
            (output,) = llm.generate([prompt], params)
            assert output.num_cached_tokens == cached

        async def found(namespace: str) -> int:
            async with ControlClient(control_plane) as client:
                (match,) = await client.find_prefix(prompt, namespace=namespace)
                return match.num_device_tokens

        assert asyncio.run(found(f"rope-{MAX_TOKENS}")) == 96
        assert asyncio.run(found("")) == 0
