"""What the bytes of a pool mean: one value, one fingerprint. Fingerprints of given layouts are
compared with those of ``docs/internals.md`` in ``test_contract_pages.py``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError
from kvplane.layout import MAX_PAGE_BYTES, LayerGroup, Layout
from kvplane.models.config import read_config
from kvplane.models.hf import layout_from_hf
from kvplane.shard import Shard
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.refusals import refused

FULL = LayerGroup("full", (0, 1), 2, 64)
LAYOUT = Layout("model-a", 16, "float32", "bfloat16", (FULL,))
LATENTS = LayerGroup("latent", (0, 1), 1, 576, cache_kind="latent", value_head_size=512)
SCALED = replace(FULL, key_scales=(0.5, 0.25), value_scales=(1.0, 2.0, 3.0, 4.0))
PATTERN = BlockPattern(32, 4, 8, 1)
FP8 = Layout("model-a", 16, "bfloat16", "float8_e4m3fn", (SCALED,))

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


@pytest.mark.parametrize(
    "change",
    [
        {"model_id": "model-b"},
        {"block_size_tokens": 32},
        {"dtype": "float16"},
        {"kv_dtype": "float32"},
        {"groups": (replace(FULL, name="all"),)},
        {"groups": (replace(FULL, layers=(0, 2)),)},
        {"groups": (replace(FULL, num_kv_heads=4),)},
        {"groups": (replace(FULL, head_size=128),)},
        {"groups": (replace(FULL, sliding_window_tokens=512),)},
        {"groups": (FULL, LayerGroup("sliding", (2,), 2, 64, 512))},
        {"groups": (replace(FULL, block_pattern=PATTERN),)},
    ],
)
def test_every_field_counts_in_the_fingerprint(change: dict[str, Any]) -> None:
    assert replace(LAYOUT, **change).fingerprint != LAYOUT.fingerprint


def test_every_field_of_a_pattern_counts_in_the_fingerprint() -> None:
    changes = {"block_tokens": 64, "local_blocks": 5, "vertical_stride": 9, "head_sliding_step": -1}
    patterns = [PATTERN, *(replace(PATTERN, **{name: new}) for name, new in changes.items())]
    layouts = [replace(LAYOUT, groups=(replace(FULL, block_pattern=p),)) for p in patterns]
    assert len({layout.fingerprint for layout in layouts}) == 5


@pytest.mark.parametrize(
    "change",
    [
        {"key_scales": ()},
        {"value_scales": ()},
        {"key_scales": (0.25, 0.5)},
        {"key_scales": SCALED.value_scales, "value_scales": SCALED.key_scales},
        {"value_scales": (1.0, 2.0, 4.0, 3.0)},
        {"key_scales": (0.5, 0.25000003)},
    ],
)
def test_layouts_that_differ_only_in_scales_do_not_meet(change: dict[str, Any]) -> None:
    assert replace(FP8, groups=(replace(SCALED, **change),)).fingerprint != FP8.fingerprint


@pytest.mark.parametrize("kv_dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_an_8_bit_type_is_for_stored_keys_and_values_only(kv_dtype: str) -> None:
    assert replace(LAYOUT, kv_dtype=kv_dtype).block_bytes() == LAYOUT.block_bytes() // 2
    with refused(InvalidRequestError, "layout.dtype"):
        replace(FP8, dtype=kv_dtype)


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
@pytest.mark.parametrize(
    "scales",
    [(1.0,), (1.0,) * 3, (1.0,) * 8]
    + [(1.0, bad) for bad in (0.0, -1.0, 1e-50, 1e39, math.inf, math.nan, "1", None)],
)
def test_scales_that_are_wrong_are_named(name: str, scales: tuple[Any, ...]) -> None:
    with refused(InvalidRequestError, f"layout.groups[0].{name}"):
        replace(FP8, groups=(replace(SCALED, **{name: scales}),))


@pytest.mark.parametrize("name", ["key_scales", "value_scales"])
def test_wider_types_have_no_scales(name: str) -> None:
    with refused(InvalidRequestError, f"layout.groups[0].{name}"):
        replace(LAYOUT, groups=(replace(FULL, **{name: (1.0, 1.0)}),))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model_id", {"model_id": ""}),
        ("model_id", {"model_id": "x" * 257}),
        ("block_size_tokens", {"block_size_tokens": 0}),
        ("block_size_tokens", {"block_size_tokens": 24}),
        ("dtype", {"dtype": "float64"}),
        ("kv_dtype", {"kv_dtype": "int8"}),
        ("groups", {"groups": ()}),
        ("groups[0].name", {"groups": (replace(FULL, name=""),)}),
        ("groups[0].name", {"groups": (replace(FULL, name="x" * 65),)}),
        ("groups[0].layers", {"groups": (replace(FULL, layers=()),)}),
        ("groups[0].layers", {"groups": (replace(FULL, layers=(1, 0)),)}),
        ("groups[0].layers", {"groups": (replace(FULL, layers=(0, 0)),)}),
        ("groups[0].layers", {"groups": (replace(FULL, layers=(-1, 0)),)}),
        ("groups[1].layers", {"groups": (FULL, replace(FULL, name="again"))}),
        ("groups[0].num_kv_heads", {"groups": (replace(FULL, num_kv_heads=0),)}),
        ("groups[0].num_kv_heads", {"groups": (replace(FULL, num_kv_heads=65_537),)}),
        ("groups[0].head_size", {"groups": (replace(FULL, head_size=0),)}),
        ("groups[0].head_size", {"groups": (replace(FULL, head_size=12),)}),
        ("groups[0].head_size", {"groups": (replace(FULL, head_size=520),)}),
        ("groups[0].cache_kind", {"groups": (replace(FULL, cache_kind="other"),)}),
        ("groups[0].num_kv_heads", {"groups": (replace(LATENTS, num_kv_heads=2),)}),
        ("groups[0].head_size", {"groups": (replace(LATENTS, head_size=584),)}),
        ("groups[0].head_size", {"groups": (replace(LATENTS, cache_kind="keys_and_values"),)}),
        ("groups[0].value_head_size", {"groups": (replace(LATENTS, value_head_size=584),)}),
        ("groups[0].value_head_size", {"groups": (replace(FULL, value_head_size=72),)}),
        ("groups[0].value_head_size", {"groups": (replace(FULL, value_head_size=12),)}),
        ("groups[0].value_head_size", {"groups": (replace(FULL, value_head_size=-8),)}),
        ("groups[0].sliding_window_tokens", {"groups": (replace(FULL, sliding_window_tokens=-1),)}),
        (
            "groups[0].block_pattern.block_tokens",
            {"block_size_tokens": 64, "groups": (replace(FULL, block_pattern=PATTERN),)},
        ),
    ],
)
def test_an_invalid_field_is_named(field: str, change: dict[str, Any]) -> None:
    with refused(InvalidRequestError, f"layout.{field}"):
        replace(LAYOUT, **change)


WINDOW = LayerGroup("sliding", (2,), 4, 128, 512)
ROUNDED = LayerGroup("full", (0, 1), 2, 64, key_scales=(0.1, 1 / 3))  # to float32, as they travel
SMALL_VALUES = replace(LAYOUT, groups=(replace(FULL, value_head_size=32),))
OF_LATENTS = replace(LAYOUT, groups=(LATENTS, LayerGroup("full", (2,), 4, 128)))


@pytest.mark.parametrize(
    "layout",
    [
        replace(FP8, groups=(SCALED, WINDOW)),
        replace(FP8, groups=(ROUNDED,)),
        replace(LAYOUT, groups=(replace(FULL, head_size=512),)),
        SMALL_VALUES,
        OF_LATENTS,
        replace(LAYOUT, groups=(replace(FULL, block_pattern=BlockPattern(32, 4, 8, -2)),)),
    ],
)
def test_a_layout_comes_back_from_its_message(layout: Layout) -> None:
    message = layout.to_proto()
    assert message.fingerprint == layout.fingerprint
    assert Layout.from_proto(pb.Layout.FromString(message.SerializeToString())) == layout


def test_values_smaller_than_keys_take_fewer_bytes() -> None:
    assert SMALL_VALUES.block_bytes() == LAYOUT.block_bytes() * (64 + 32) // (64 + 64)
    assert Shard.whole(SMALL_VALUES).block_bytes(SMALL_VALUES) == SMALL_VALUES.block_bytes()


def test_latents_are_one_row_for_each_token() -> None:
    layout = OF_LATENTS
    assert layout.block_bytes() == Shard.whole(layout).block_bytes(layout) == 2 * 16 * 576 * 2
    assert layout.token_bytes == (2 * 576 + 2 * 4 * 128) * 2
    assert layout.latent_layers == {0, 1}
    message = layout.to_proto()
    assert message.groups[0].cache_kind == pb.CACHE_KIND_LATENT
    message.groups[0].cache_kind = pb.CACHE_KIND_KEYS_AND_VALUES
    message.groups[0].head_size = 512
    with refused(InvalidRequestError, "layout.fingerprint"):
        Layout.from_proto(message)


def test_latents_have_scales_of_keys_alone() -> None:
    scaled = replace(FP8, groups=(replace(LATENTS, key_scales=(0.5, 0.25)),))
    assert scaled.groups[0].key_scales == (0.5, 0.25)
    with refused(InvalidRequestError, "layout.groups[0].value_scales", match="has the key's scale"):
        replace(FP8, groups=(replace(LATENTS, value_scales=(0.5, 0.25)),))


def test_opaque_pages_have_bytes_and_nothing_else() -> None:
    layout = Layout.of_opaque_pages("vllm/tiny", 4096)
    assert Layout.from_proto(layout.to_proto()) == layout
    assert (layout.dtype, layout.kv_dtype, layout.block_size_tokens) == ("uint8", "uint8", 16)
    assert layout.block_bytes() == Shard.whole(layout).block_bytes(layout) == 128 + 4096
    assert (Shard.whole(layout).layers(layout), layout.latent_layers) == ((0,), frozenset())
    assert layout.fingerprint != Layout.of_opaque_pages("vllm/tiny", 8192).fingerprint


# Of opaque pages: the change of the layer group, and the field that is named.
NOT_OPAQUE: list[tuple[dict[str, Any], str]] = [
    ({"page_bytes": 0}, "page_bytes"),
    ({"page_bytes": 96}, "page_bytes"),
    ({"page_bytes": MAX_PAGE_BYTES + 64}, "page_bytes"),
    ({"layers": (0, 1)}, "layers"),
    ({"num_kv_heads": 1}, "num_kv_heads"),
    ({"head_size": 64}, "head_size"),
    ({"value_head_size": 64}, "value_head_size"),
    ({"sliding_window_tokens": 16}, "sliding_window_tokens"),
    ({"key_scales": (1.0,)}, "key_scales"),
    ({"block_pattern": PATTERN}, "block_pattern"),
]


@pytest.mark.parametrize(("change", "field"), NOT_OPAQUE, ids=[str(c) for c, _ in NOT_OPAQUE])
def test_opaque_pages_are_refused_with(change: dict[str, Any], field: str) -> None:
    layout = Layout.of_opaque_pages("vllm/tiny", 4096)
    with refused(InvalidRequestError, f"layout.groups[0].{field}"):
        replace(layout, groups=(replace(layout.groups[0], **change),))


STATES = LayerGroup("states", (1, 3), 2, 0, cache_kind="state", page_bytes=256)
HYBRID = replace(LAYOUT, groups=(FULL, STATES))


def test_states_are_pages_beside_keys_and_values() -> None:
    assert Layout.from_proto(HYBRID.to_proto()) == HYBRID
    assert (HYBRID.state_group, HYBRID.num_layers, LAYOUT.state_group) == (1, 2, None)
    assert HYBRID.attention_groups == LAYOUT.attention_groups == (FULL,)
    assert HYBRID.token_bytes == LAYOUT.token_bytes
    whole = Shard.whole(HYBRID)
    assert (whole.layers(HYBRID), whole.group_layers(HYBRID, 1)) == ((0, 1), (1, 3))
    assert HYBRID.block_bytes(1) == whole.block_bytes(HYBRID, 1) == 2 * 256
    halves = [Shard.of_heads(HYBRID, i, 2) for i in range(2)]
    assert [half.block_bytes(HYBRID, 1) for half in halves] == [2 * 128] * 2
    assert [half.kv_heads(HYBRID, 1) for half in halves] == [range(1), range(1, 2)]
    undivided = replace(HYBRID, groups=(FULL, replace(STATES, num_kv_heads=1)))
    with refused(InvalidRequestError, "shard.num_kv_heads"):
        halves[0].layers(undivided)


# Of states: the change of the layer group, and the field that is named.
NOT_STATES: list[tuple[dict[str, Any], str]] = [
    ({"page_bytes": 0}, "page_bytes"),
    ({"page_bytes": 192}, "page_bytes"),
    ({"page_bytes": MAX_PAGE_BYTES + 128}, "page_bytes"),
    ({"num_kv_heads": 0}, "num_kv_heads"),
    ({"head_size": 64}, "head_size"),
    ({"sliding_window_tokens": 16}, "sliding_window_tokens"),
    ({"key_scales": (1.0,)}, "key_scales"),
]


@pytest.mark.parametrize(("change", "field"), NOT_STATES, ids=[str(c) for c, _ in NOT_STATES])
def test_states_are_refused_with(change: dict[str, Any], field: str) -> None:
    with refused(InvalidRequestError, f"layout.groups[1].{field}"):
        replace(HYBRID, groups=(FULL, replace(STATES, **change)))


@pytest.mark.parametrize("groups", [(STATES,), (STATES, FULL), (FULL, STATES, STATES)])
def test_states_are_the_last_group(groups: tuple[LayerGroup, ...]) -> None:
    index = min(i for i, group in enumerate(groups) if group is STATES)
    with refused(InvalidRequestError, f"layout.groups[{index}]"):
        replace(LAYOUT, groups=groups)


def test_long_ids_are_shown_from_where_they_differ() -> None:
    model = "sglang/Qwen/Qwen3-235B-A22B-Instruct-2507/0123456789abcdef0123456789abcdef01234567"
    mine, others = (
        Layout.of_opaque_pages(f"{model}/bfloat16/{end}", 64)
        for end in ("page_first", "layer_first")
    )
    assert mine.differences(others) == (
        "model_id ...01234567/bfloat16/page_first and not ...01234567/bfloat16/layer_first"
    )
    longer = Layout.of_opaque_pages(f"{mine.model_id}mla", 64)
    assert mine.differences(longer) == (
        "model_id ...float16/page_first and not ...float16/page_firstmla"
    )
    assert mine.differences(Layout.of_opaque_pages("other", 64)) == (
        f"model_id {model[:57]}... and not other"
    )


def test_opaque_pages_are_the_only_group() -> None:
    layout = Layout.of_opaque_pages("vllm/tiny", 4096)
    with refused(InvalidRequestError, "layout.groups"):
        replace(layout, groups=(*layout.groups, FULL))


@pytest.mark.parametrize(
    "change", [{"page_bytes": 4096}, {"cache_kind": "latent"}, {"value_head_size": 32}]
)
def test_what_has_a_default_enters_the_fingerprint_only_if_it_is_another(
    change: dict[str, Any],
) -> None:
    assert not change.keys() & FULL.canonical().keys()
    assert replace(FULL, **change).canonical() == FULL.canonical() | change


Change = Callable[[pb.Layout], object]
LATER = b"\xf8\x07\x01"  # field 127: 1
KINDS = "keys_and_values, latent, state or opaque, the kinds"


def of_group(**fields: Any) -> Change:
    """A change of the first layer group's message."""
    return lambda message: message.groups[0].MergeFrom(pb.LayerGroup(**fields))


# By what is wrong: the change of a message, the field that is named, and what is said.
WRONG_MESSAGES: dict[str, tuple[Change, str, str | None]] = {
    "a page size": (of_group(page_bytes=4096), "layout.groups[0].page_bytes", None),
    "a pattern without local blocks": (
        of_group(block_pattern=pb.BlockPattern(block_tokens=16)),
        "layout.groups[0].block_pattern.local_blocks",
        "from 1",
    ),
    "states alone": (of_group(cache_kind=pb.CACHE_KIND_STATE), "layout.groups[0]", "after all"),
    "opaque, and types of numbers": (
        of_group(cache_kind=pb.CACHE_KIND_OPAQUE),
        "layout.dtype",
        "uint8",
    ),
    "bytes, and not opaque": (
        lambda m: setattr(m, "kv_dtype", pb.ELEMENT_TYPE_UINT8),
        "layout.kv_dtype",
        "one of",
    ),
    "a later kind": (of_group(cache_kind=99), "layout.groups[0].cache_kind", KINDS),
    "a later field": (lambda m: m.MergeFromString(LATER), "layout", "does not know"),
    "a later field of a group": (
        lambda m: m.groups[0].MergeFromString(LATER),
        "layout.groups[0]",
        "does not know",
    ),
    "no type": (lambda m: m.ClearField("dtype"), "layout.dtype", None),
    "no stored type": (lambda m: m.ClearField("kv_dtype"), "layout.kv_dtype", None),
    "another's fingerprint": (
        lambda m: setattr(m, "fingerprint", bytes(32)),
        "layout.fingerprint",
        None,
    ),
}


@pytest.mark.parametrize("what", WRONG_MESSAGES)
def test_a_message_that_is_wrong_is_refused_by_its_field(what: str) -> None:
    change, field, match = WRONG_MESSAGES[what]
    message = LAYOUT.to_proto()
    change(message)
    with refused(InvalidRequestError, field, match=match):
        Layout.from_proto(message)


@pytest.mark.parametrize(
    "change",
    [
        of_group(cache_kind=pb.CACHE_KIND_KEYS_AND_VALUES, value_head_size=FULL.head_size),
        of_group(page_bytes=0),
        lambda message: message.ClearField("fingerprint"),
    ],
    ids=["defaults", "no page size", "no fingerprint"],
)
def test_what_may_be_left_out_may_be_said(change: Change) -> None:
    message = LAYOUT.to_proto()
    change(message)
    assert Layout.from_proto(message) == LAYOUT


def test_a_block_holds_k_and_v_of_all_layers_of_its_group() -> None:
    assert LAYOUT.block_bytes() == 2 * 2 * 2 * 16 * 64 * 2
    assert LAYOUT.num_layers == 2


def write_model(folder: Path, config: dict[str, Any], weights: bytes = b"w") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(weights)
    return folder


def test_a_llama_config_gives_its_kv_heads_and_head_size(tmp_path: Path) -> None:
    layout = layout_from_hf(write_model(tmp_path / "tiny", LLAMA), model_id="m")
    assert layout == Layout("m", 16, "float32", "float32", (LayerGroup("full", (0, 1, 2), 2, 16),))


def test_a_layout_has_the_dtype_of_the_checkpoint_unless_another_is_given(tmp_path: Path) -> None:
    def dtypes(config: dict[str, Any], **given: str) -> tuple[str, str]:
        layout = layout_from_hf(write_model(tmp_path / "tiny", config), **given)
        return layout.dtype, layout.kv_dtype

    half = LLAMA | {"torch_dtype": "float16"}
    assert dtypes(half) == ("float16", "float16")
    assert dtypes(half, dtype="float32") == ("float32", "float32")
    assert dtypes(half, kv_dtype="bfloat16") == ("float16", "bfloat16")
    of_text = {"model_type": "gemma3", "text_config": {"dtype": "bfloat16"}}
    assert dtypes(of_text) == ("bfloat16", "bfloat16")
    with refused(InvalidRequestError, "config.dtype"):
        dtypes(LLAMA | {"dtype": "float64"})


def test_the_model_id_is_the_folder_and_a_hash_of_config_and_weights(tmp_path: Path) -> None:
    first = layout_from_hf(write_model(tmp_path / "tiny", LLAMA))
    name, _, digest = first.model_id.rpartition("-")
    assert (name, len(digest)) == ("tiny", 16)
    assert layout_from_hf(write_model(tmp_path / "tiny", LLAMA)) == first
    other_weights = layout_from_hf(write_model(tmp_path / "tiny", LLAMA, b"v"))
    other_config = layout_from_hf(write_model(tmp_path / "tiny", {**LLAMA, "rope_theta": 1}))
    assert len({first.model_id, other_weights.model_id, other_config.model_id}) == 3


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("model_type", {"model_type": None}),
        ("layer_types", {"model_type": "mamba"}),
        ("layer_types", {"model_type": "qwen3_next", "full_attention_interval": 2}),
        ("num_attention_heads", {"model_type": "rwkv", "num_attention_heads": None}),
        ("num_hidden_layers", {"num_hidden_layers": 0}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("hidden_size", {"model_type": "opt", "hidden_size": 100, "head_dim": None}),
    ],
)
def test_a_config_that_is_wrong_names_the_entry(
    tmp_path: Path, field: str, change: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "tiny", {**LLAMA, **change})
    with refused(InvalidRequestError, f"config.{field}"):
        layout_from_hf(folder)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"config\.json cannot be read"):
        layout_from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidRequestError, match="is not JSON"):
        layout_from_hf(tmp_path)


def test_infinity_in_a_config_is_read(tmp_path: Path) -> None:
    limit = [0.0, {"__float__": "Infinity"}]  # as transformers writes it
    folder = write_model(tmp_path / "h1", {"model_type": "falcon_h1", "time_step_limit": limit})
    assert list(read_config(folder).time_step_limit) == [0.0, float("inf")]


def test_a_shard_travels_and_says_what_it_holds_of_a_layout() -> None:
    shard = Shard(1, 2, first_layer=1, num_layers=1, first_kv_head=1, num_kv_heads=1)
    assert Shard.from_proto(shard.to_proto()) == shard
    assert shard.layers(LAYOUT) == (1,)
    assert shard.block_bytes(LAYOUT) == 16 * 2 * 64 * 2  # slots, K and V, head size, bytes
    whole = Shard.whole(LAYOUT)
    assert whole.layers(LAYOUT) == (0, 1)
    assert whole.block_bytes(LAYOUT) == LAYOUT.block_bytes()
