"""Pools of latents, of which values are the first elements, and of values smaller than keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_plane import Executor
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory.pages import PageShape
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT, LayerGroup
from tests.helpers.data.data_rig import LAYERS, Rig
from tests.helpers.data.plan_author import (
    BLOCK_SIZE,
    DEVICE,
    HOST,
    LAYOUT,
    POOL_ID,
    blocks_of,
    dense_attention,
    moved,
    ref,
    set_blocks,
    span,
    tokens,
)
from tests.helpers.refusals import refused

NUM_TOKENS, NUM_QUERY_HEADS = 12, 6
KEY_SCALES, VALUE_SCALES = (0.5, 0.25), (0.125, 2.0)
OPTIONS = AttentionOptions(scale=0.3)
LATENTS = LayerGroup("latent", (0, 1), 1, 24, cache_kind=LATENT, value_head_size=16)
SMALL_VALUES = replace(LAYOUT.groups[0], value_head_size=8)
GROUPS = {"latents": LATENTS, "small values": SMALL_VALUES}


class Stored:
    """A prompt of 12 tokens, and a pool that stores it in blocks 5 and 2."""

    def __init__(self, group: LayerGroup, kv_dtype: str) -> None:
        self.is_latent = group.cache_kind == LATENT
        self.key_size, self.value_size = group.head_size, group.value_head_size
        self.is_scaled = kv_dtype.startswith("float8")
        if self.is_scaled:
            group = replace(group, key_scales=KEY_SCALES)
        if self.is_scaled and not self.is_latent:
            group = replace(group, value_scales=VALUE_SCALES)
        self.rig = Rig(layout=replace(LAYOUT, kv_dtype=kv_dtype, groups=(group,)))
        torch.manual_seed(1)
        self.query = torch.randn(NUM_TOKENS, NUM_QUERY_HEADS, self.key_size)
        self.key = torch.randn(NUM_TOKENS, group.num_kv_heads, self.key_size)
        self.value = torch.randn(NUM_TOKENS, group.num_kv_heads, self.value_size)
        if self.is_latent:
            self.value = self.key[..., : self.value_size]
        stored_sizes = self.key_size + (0 if self.is_latent else self.value_size)
        self.token_elements = group.num_kv_heads * stored_sizes

    def layer(self, layer: int, tokens: slice = slice(None)) -> torch.Tensor:
        """Run a layer of the latest plan with these tokens of the prompt."""
        value = None if self.is_latent else self.value[tokens]
        parts = self.query[tokens], self.key[tokens], value
        out = self.rig.run_layer(layer, *parts, options=OPTIONS)
        assert out is not None
        return out

    def admit(self) -> list[torch.Tensor]:
        """Run the prompt; return both layers' outputs."""
        self.rig.start(1, set_blocks(1, [(5, 1), (2, 1)]), span(1, 0, NUM_TOKENS))
        outputs = [self.layer(layer) for layer in LAYERS]
        assert self.rig.executor.receipt(1) is not None
        return outputs


@pytest.fixture(params=["float32", "bfloat16", "float8_e4m3fn"])
def kv_dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=GROUPS)
def stored(request: pytest.FixtureRequest, kv_dtype: str) -> Stored:
    return Stored(GROUPS[request.param], kv_dtype)


def test_blocks_layouts_and_metrics_have_the_bytes_of_what_is_stored(stored: Stored) -> None:
    layout, pools = stored.rig.executor.layout, stored.rig.executor.pools
    token_bytes = stored.token_elements * pools.device_tier.element_size()
    page = PageShape(layout.groups[0], stored.key.shape[1], BLOCK_SIZE)
    assert page.extents == (BLOCK_SIZE * stored.token_elements,)
    assert pools.device_tier.shape == (8, 2, *page.extents)
    assert pools.device_tier[0].nbytes == pools.host_tier[0].nbytes == layout.block_bytes()
    assert layout.token_bytes == 2 * token_bytes
    stored.admit()
    written = stored.rig.executor.counters.kernel_bytes["write"]
    assert written == 2 * NUM_TOKENS * token_bytes


def test_all_heads_attend_to_keys_and_values(stored: Stored) -> None:
    is_exact = stored.rig.executor.layout.kv_dtype == "float32"
    query = stored.query * OPTIONS.scale * stored.key_size**0.5
    wanted = dense_attention(query, stored.key, stored.value)
    for out in stored.admit():
        assert out.shape == (NUM_TOKENS, NUM_QUERY_HEADS, stored.value_size)
        torch.testing.assert_close(out, wanted, atol=1e-5 if is_exact else 0.25, rtol=1e-5)


def test_tokens_one_by_one_give_the_bits_of_the_whole_prompt(stored: Stored) -> None:
    """From the second on, by the native call that is bound once."""
    outputs = stored.admit()
    for i in range(NUM_TOKENS):
        changes = [] if i else [set_blocks(2, [(4, 1), (1, 1)])]
        stored.rig.start(2 + i, *changes, span(2, i, 1))
        for layer, wanted in enumerate(outputs):
            one = slice(i, i + 1)
            assert torch.equal(stored.layer(layer, one), wanted[one])
        assert stored.rig.executor.receipt(1) is not None


def test_keys_come_before_values_in_a_page_and_latents_are_alone(stored: Stored) -> None:
    stored.admit()
    blocks, _ = stored.rig.executor.read_blocks(1, 1, range(2))
    keys = stored.key.shape[1] * BLOCK_SIZE * stored.key_size
    parts = [(blocks[..., :keys], stored.key, KEY_SCALES)]
    if stored.is_latent:
        assert blocks.shape[-1] == keys
    else:
        parts.append((blocks[..., keys:], stored.value, VALUE_SCALES))
    for of_part, given, scales in parts:
        pages = of_part.unflatten(-1, (given.shape[1], BLOCK_SIZE, given.shape[2]))
        rows = pages.transpose(2, 3).flatten(1, 2)[:, :NUM_TOKENS]
        for row, scale in zip(rows, scales if stored.is_scaled else (1.0, 1.0), strict=True):
            assert torch.equal(row.float(), (given / scale).to(blocks.dtype).float())


def test_blocks_move_and_come_back_bit_for_bit(stored: Stored) -> None:
    rig, outputs = stored.rig, stored.admit()
    before, _ = rig.executor.read_blocks(1, 1, range(2))
    there = [ref(0, 1, HOST), ref(3, 1, HOST)]
    rig.run(2, *moved(1, [ref(5), ref(2)], there))
    host, names = rig.executor.read_blocks(1, 1, range(2))
    assert torch.equal(host.view(torch.uint8), before.view(torch.uint8))
    assert (names.tier, blocks_of(names)) == (HOST, [(0, 1), (3, 1)])
    rig.run(3, *moved(1, there, [ref(1), ref(6)]))
    counters, moved_bytes = rig.executor.counters, 2 * rig.executor.layout.block_bytes()
    assert counters.num_transferred_blocks == {"swap_out": 2, "swap_in": 2}
    assert counters.transfer_bytes == {"swap_out": moved_bytes, "swap_in": moved_bytes}
    back, names = rig.executor.read_blocks(1, 1, range(2))
    assert torch.equal(back.view(torch.uint8), before.view(torch.uint8))
    assert (names.tier, blocks_of(names)) == (DEVICE, [(1, 1), (6, 1)])
    rig.start(4, set_blocks(2, [(3, 1), (4, 1)]), span(2, 0, NUM_TOKENS))
    assert rig.executor.write_blocks(1, 2, 0, before) is not None
    for layer, wanted in enumerate(outputs):
        got = rig.run_layer(layer, stored.query, None, None, options=OPTIONS)
        assert got is not None
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("group", "value_size", "options", "field", "match"),
    [
        (LATENTS, 16, OPTIONS, "value", None),
        (LATENTS, 0, AttentionOptions(), "options.scale", None),
        (SMALL_VALUES, 16, OPTIONS, "value", r"must be \[2, 2, 8\]"),
        (SMALL_VALUES, 4, OPTIONS, "value", r"must be \[2, 2, 8\]"),
        (LAYOUT.groups[0], 0, OPTIONS, "value", None),
    ],
    ids=["a value", "the default scale", "a large value", "a small value", "no value"],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    group: LayerGroup, value_size: int, options: AttentionOptions, field: str, match: str | None
) -> None:
    stored = Stored(group, "float32")
    stored.rig.start(1, set_blocks(1, [(5, 1)]), span(1, 0, 2))
    before = stored.rig.snapshot()
    value = tokens(2, group.num_kv_heads)[..., :value_size] if value_size else None
    with refused(InvalidRequestError, field, match=match):
        stored.rig.run_layer(0, stored.query[:2], stored.key[:2], value, options=options)
    assert stored.rig.snapshot() == before


class GpuKernels(CpuKernels):
    """As of a GPU, as far as a layout is concerned."""

    backend = "cuda"
    cache_kinds = (KEYS_AND_VALUES,)


def test_kernels_that_do_not_serve_the_kind_are_refused_before_memory_is_taken() -> None:
    layout = replace(LAYOUT, groups=(LATENTS,))
    with refused(
        InvalidRequestError, "layout.groups[0].cache_kind", match="for the cuda kernels, is latent"
    ):
        Executor(layout, pool_id=POOL_ID, num_device_blocks=2**40, kernels=GpuKernels(1))
