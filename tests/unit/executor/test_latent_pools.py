"""A pool of latents: one row for each token, of which values are the first elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_plane import Executor
from data_plane.kernels.backends.cpu import CpuKernels
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import KEYS_AND_VALUES, LATENT, LayerGroup
from tests.helpers.data.data_rig import Rig
from tests.helpers.data.latest_plan import of_latest
from tests.helpers.data.plan_author import (
    DEVICE,
    HOST,
    LAYOUT,
    POOL_ID,
    dense_attention,
    ref,
    set_blocks,
    span,
    tokens,
    transfer,
)
from tests.helpers.refusals import refused

NUM_TOKENS, BLOCK_SIZE, LATENT_SIZE, VALUE_SIZE = 12, 8, 24, 16
GROUP = LayerGroup("latent", (0, 1), 1, LATENT_SIZE, cache_kind=LATENT, value_head_size=VALUE_SIZE)
OPTIONS = AttentionOptions(scale=0.3)
KEY_SCALES = (0.5, 0.25)


@pytest.fixture(params=["float32", "bfloat16", "float8_e4m3fn"])
def rig(request: pytest.FixtureRequest) -> Rig:
    is_fp8 = request.param.startswith("float8")
    group = replace(GROUP, key_scales=KEY_SCALES) if is_fp8 else GROUP
    return Rig(layout=replace(LAYOUT, kv_dtype=request.param, groups=(group,)))


def rows(num_tokens: int, num_heads: int, seed: int = 0) -> torch.Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_heads, LATENT_SIZE, generator=made)


def admit(rig: Rig) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Runs 12 tokens on blocks 5 and 2. Returns the latents and both layers' outputs."""
    changes = [set_blocks(1, [(5, 1), (2, 1)])]
    rig.start(1, changes=changes, spans=[span(1, 0, NUM_TOKENS)])
    query, latent = rows(NUM_TOKENS, 6), rows(NUM_TOKENS, 1, seed=1)
    outputs = [rig.run_layer(i, query, latent, None, options=OPTIONS) for i in (0, 1)]
    assert rig.executor.receipt(1) is not None
    return latent, [out for out in outputs if out is not None]


def test_a_block_has_the_bytes_of_one_row_for_each_token(rig: Rig) -> None:
    layout, pools = rig.executor.layout, rig.executor.pools
    assert pools.device_tier.shape == (8, 2, BLOCK_SIZE * LATENT_SIZE)
    assert pools.device_tier[0].nbytes == pools.host_tier[0].nbytes == layout.block_bytes()
    assert layout.token_bytes == 2 * LATENT_SIZE * pools.device_tier.element_size()


def test_metrics_count_the_bytes_of_rows(rig: Rig) -> None:
    admit(rig)
    element_bytes = rig.executor.pools.device_tier.element_size()
    written = rig.executor.counters.kernel_bytes["write"]
    assert written == 2 * NUM_TOKENS * LATENT_SIZE * element_bytes


def test_all_heads_attend_to_the_row_and_to_its_first_elements(rig: Rig) -> None:
    latent, outputs = admit(rig)
    is_exact = rig.executor.layout.kv_dtype == "float32"
    query = rows(NUM_TOKENS, 6) * OPTIONS.scale * LATENT_SIZE**0.5
    wanted = dense_attention(query, latent, latent[..., :VALUE_SIZE])
    for out in outputs:
        assert out.shape == (NUM_TOKENS, 6, VALUE_SIZE)
        torch.testing.assert_close(out, wanted, atol=1e-5 if is_exact else 0.25, rtol=1e-5)


def test_tokens_one_by_one_give_the_bits_of_the_whole_prompt(rig: Rig) -> None:
    """From the second on, by the native call that is bound once."""
    latent, outputs = admit(rig)
    query = rows(NUM_TOKENS, 6)
    for i in range(NUM_TOKENS):
        changes = [] if i else [set_blocks(2, [(4, 1), (1, 1)])]
        rig.start(2 + i, changes=changes, spans=[span(2, i, 1)])
        for layer, wanted in enumerate(outputs):
            one = query[i : i + 1], latent[i : i + 1], None
            got = rig.executor.layer(1, layer, *one, options=OPTIONS, **of_latest(rig.executor))
            assert torch.equal(got, wanted[i : i + 1])
        assert rig.executor.receipt(1) is not None


def test_rows_are_stored_once_by_their_scale(rig: Rig) -> None:
    latent, _ = admit(rig)
    blocks, _ = rig.executor.read_blocks(1, 1, range(2))
    assert blocks.shape == (2, 2, BLOCK_SIZE * LATENT_SIZE)
    for layer, scale in enumerate(KEY_SCALES):
        stored = blocks[layer].view(2 * BLOCK_SIZE, LATENT_SIZE)[:NUM_TOKENS]
        scale = scale if blocks.element_size() == 1 else 1.0
        assert torch.equal(stored.float(), (latent[:, 0] / scale).to(blocks.dtype).float())


def test_blocks_move_and_come_back_bit_for_bit(rig: Rig) -> None:
    _, outputs = admit(rig)
    before, _ = rig.executor.read_blocks(1, 1, range(2))
    out = [transfer(ref(5), ref(0, 1, HOST)), transfer(ref(2), ref(3, 1, HOST))]
    rig.run(2, changes=[set_blocks(1, [(0, 1), (3, 1)], tier=HOST, replace=True)], transfers=out)
    host, _ = rig.executor.read_blocks(1, 1, range(2))
    assert torch.equal(host.view(torch.uint8), before.view(torch.uint8))
    moved = rig.executor.counters.transfer_bytes["swap_out"]
    assert moved == 2 * rig.executor.layout.block_bytes()
    back = [transfer(ref(0, 1, HOST), ref(1)), transfer(ref(3, 1, HOST), ref(6))]
    rig.run(3, changes=[set_blocks(1, [(1, 1), (6, 1)], tier=DEVICE, replace=True)], transfers=back)
    rig.start(4, changes=[set_blocks(2, [(3, 1), (4, 1)])], spans=[span(2, 0, NUM_TOKENS)])
    assert rig.executor.write_blocks(1, 2, 0, before) is not None
    for layer, wanted in enumerate(outputs):
        query, named = rows(NUM_TOKENS, 6), of_latest(rig.executor)
        got = rig.executor.layer(1, layer, query, None, None, options=OPTIONS, **named)
        assert got is not None
        assert torch.equal(got, wanted)


def test_a_value_and_a_default_scale_are_refused_before_anything_is_written(rig: Rig) -> None:
    rig.start(1, changes=[set_blocks(1, [(5, 1), (2, 1)])], spans=[span(1, 0, 2)])
    before = rig.executor.pools.device_tier.clone()
    query, latent = rows(2, 6), rows(2, 1)
    for value, options, field in (
        (latent[..., :VALUE_SIZE], OPTIONS, "value"),
        (None, AttentionOptions(), "options.scale"),
    ):
        with refused(InvalidRequestError, field):
            rig.run_layer(0, query, latent, value, options=options)
    assert torch.equal(rig.executor.pools.device_tier.view(torch.uint8), before.view(torch.uint8))


def test_a_pool_of_keys_and_values_wants_both() -> None:
    rig = Rig()
    rig.start(1, changes=[set_blocks(1, [(5, 1)])], spans=[span(1, 0, 2)])
    with rig.refuses(InvalidRequestError, "value"):
        rig.run_layer(0, tokens(2, 4), tokens(2), None)


class GpuKernels(CpuKernels):
    """As of a GPU, as far as a layout is concerned."""

    backend = "cuda"
    cache_kinds = (KEYS_AND_VALUES,)


def test_kernels_that_do_not_serve_the_kind_are_refused_before_memory_is_taken() -> None:
    layout = replace(LAYOUT, groups=(GROUP,))
    with refused(
        InvalidRequestError, "layout.groups[0].cache_kind", match="for the cuda kernels, is latent"
    ):
        Executor(layout, pool_id=POOL_ID, num_device_blocks=2**40, kernels=GpuKernels(1))
