"""Models that mix windows with full attention hold only what a window sees, and say the same."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from kvplane.transformers import PlaneCache, close_planes
from kvplane.wire.v1 import types_pb2 as tpb
from tests.helpers.plane_cache_checks import ARGUMENT

BLOCK_SIZE = 16


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt_oss"])
def test_layers_with_a_window_hold_what_it_sees(model_type: str) -> None:
    model, eager = tiny_model(model_type), tiny_model(model_type)
    model.set_attn_implementation("kvplane")
    ids = torch.randint(3, 60, (1, 60), generator=torch.Generator().manual_seed(1))
    how = {"do_sample": False, "max_new_tokens": 140, "min_new_tokens": 140, "pad_token_id": 0}
    with PlaneCache(model, num_device_blocks=256) as cache:
        output = model.generate(ids, **{ARGUMENT: cache}, **how)
        pool = cache.get_pool()
    close_planes(model)
    held = {
        pool.layout.groups[usage.group].sliding_window_tokens: usage.num_held_blocks
        for usage in pool.usage
        if usage.tier == tpb.TIER_DEVICE
    }
    as_if_full = -(-output.shape[1] // BLOCK_SIZE)
    assert held == {0: as_if_full, 8: 2}
    assert torch.equal(output, eager.generate(ids, **how))
