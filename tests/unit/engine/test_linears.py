"""Linear layers with packed weights: the same numbers, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.models.loader import PackedLinear, pack_linears
from tests.helpers.engine_harness import LLAMA


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 33])
def test_a_packed_layer_computes_what_torch_does_whatever_else_is_in_the_batch(
    num_rows: int, bias: bool
) -> None:
    torch.manual_seed(num_rows)
    linear = torch.nn.Linear(96, 200, bias=bias)
    rows = torch.randn(1, num_rows, 96)
    with torch.inference_mode():
        packed = PackedLinear(linear)
        out = packed(rows)
        torch.testing.assert_close(out, linear(rows), atol=1e-5, rtol=1e-5)
        for i in range(num_rows):
            assert torch.equal(packed(rows[:, i : i + 1])[0, 0], out[0, i])
    assert packed.weight.shape == linear.weight.shape
    assert packed.weight.dtype == linear.weight.dtype


def test_all_linear_layers_of_a_model_are_packed() -> None:
    model = AutoModelForCausalLM.from_config(LLAMA).train(mode=False)
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        wanted = model(ids).logits
        # Of each layer: queries, keys, values, output, gate, up, down; and the head.
        assert pack_linears(model) == 7 * LLAMA.num_hidden_layers + 1
        torch.testing.assert_close(model(ids).logits, wanted, atol=1e-4, rtol=1e-4)
    assert pack_linears(model) == 0


def test_a_type_that_is_not_served_stays_as_it_is() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.float64))
    assert pack_linears(model) == 0
    assert type(model[0]) is torch.nn.Linear
