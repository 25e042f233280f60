"""The operator behind attention "kvplane": what torch.compile is told of it is true."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.transformers import attention

NUM_ROWS, NUM_HEADS, NUM_KV_HEADS, NUM_COLUMNS, SIZE, VALUE_SIZE = 2, 4, 2, 5, 16, 8


class Zeros:
    """A step that gives zeros. ``layers``: those computed, in order."""

    latent_layers: frozenset[int] = frozenset()

    def __init__(self, *, takes_model_shapes: bool = False) -> None:
        self.takes_model_shapes = takes_model_shapes
        self.layers: list[int] = []

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor | None,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        assert value is not None
        self.layers.append(index)
        if query.dim() == 4:
            query = query.transpose(1, 2)
        return query.new_zeros(*query.shape[:-1], value.shape[-1])


class Layer(torch.nn.Module):
    """An attention module as the operator sees it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.layer_idx = index

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        return attention._attention(self, query, key, value, None, scaling=0.25)[0]


def tensors(num_queries: int = NUM_COLUMNS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value as a model's projections leave them: heads are not the outer axis."""
    sizes = (
        (num_queries, NUM_HEADS, SIZE),
        (NUM_COLUMNS, NUM_KV_HEADS, SIZE),
        (NUM_COLUMNS, NUM_KV_HEADS, VALUE_SIZE),
    )
    query, key, value = (torch.randn(NUM_ROWS, *size).transpose(1, 2) for size in sizes)
    return query, key, value


def without_model() -> Any:
    return torch.nn.Module()


@pytest.mark.parametrize(
    ("step", "tokens", "num_queries"),
    [
        (Zeros(takes_model_shapes=True), None, NUM_COLUMNS),
        (Zeros(), None, NUM_COLUMNS),
        (Zeros(), torch.tensor([2, 3, 4, 7, 8, 9]), NUM_COLUMNS),
        (Zeros(takes_model_shapes=True), None, 2),
    ],
    ids=["as the model has them", "packed", "some columns computed", "last columns alone"],
)
def test_shapes_and_strides_are_those_that_compilers_are_told(
    step: Zeros, tokens: torch.Tensor | None, num_queries: int
) -> None:
    real, options = (attention._PAGES, *tensors(num_queries)), (3, 0.25, 0, 0.0, None, None, False)
    with attention.running(step, without_model(), tokens):
        found = torch.ops.kvplane.attention(*real, *options)
    told = torch.ops.kvplane.attention(*(each.to("meta") for each in real), *options)
    assert (found.shape, found.stride(), found.dtype) == (told.shape, told.stride(), told.dtype)


def test_no_call_is_left_out_of_a_graph_nor_moved() -> None:
    """Each one writes pages, whatever becomes of its output."""

    def layers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        Layer(0)(query, key, value)
        Layer(2)(query, key, value)
        return query + 1

    step = Zeros()
    compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
    with attention.running(step, without_model()), torch.no_grad():
        compiled(*tensors())
    assert step.layers == [0, 2]


def test_refusals_of_a_compiled_call_are_those_of_any_other() -> None:
    layer = Layer(1)
    layer.compile(backend="eager")
    query, key, value = tensors()
    with pytest.raises(InvalidRequestError, match=r"give cache=PlaneCache\(model\)"):
        layer(query, key, value)
    with attention.running(Zeros(), without_model()):
        with pytest.raises(InvalidRequestError, match="has no gradient"):
            layer(query.clone().requires_grad_(), key, value)
        layer(query, key, value)
        with pytest.raises(InvalidRequestError, match="layer 1 calls attention twice"):
            layer(query, key, value)


def test_a_position_bias_is_refused() -> None:
    with (
        attention.running(Zeros(), without_model()),
        pytest.raises(InvalidRequestError, match="position bias"),
    ):
        attention._attention(Layer(0), *tensors(), None, position_bias=torch.zeros(1))
