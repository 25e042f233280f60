"""Layout of a pool's bytes, as a frozen value with a fingerprint.

One block holds K and V of ``block_size_tokens`` tokens for every layer of one group. In each layer
its page is laid out ``[2, num_kv_heads, block_size_tokens, head_size]``, K before V (the order that
vLLM and FlashInfer call HND). Where values are smaller than keys, a page is its keys
``[num_kv_heads, block_size_tokens, head_size]`` and then its values ``[num_kv_heads,
block_size_tokens, value_head_size]``. A page of latents is their keys alone: a value is the first
``value_head_size`` elements of its key. An opaque page is 128 bytes that say how many bytes it
holds, and under which key of the caller, and then ``page_bytes`` bytes. A page of state is
``page_bytes`` bytes, which only callers understand: one layer's recurrent state at a block's end.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvplane.block_pattern import BlockPattern
from kvplane.errors import InvalidRequestError
from kvplane.wire.dtypes import dtype_from_wire, dtype_to_wire
from kvplane.wire.protocol import MAX_LAYER_BYTES
from kvplane.wire.twin import whole
from kvplane.wire.v1 import types_pb2 as pb

BLOCK_SIZES: Final = (8, 16, 32, 64, 128, 256)
MAX_HEAD_SIZE: Final = 512
MAX_LATENT_SIZE: Final = 576
"""Largest number of elements of a latent: DeepSeek's 512, and 64 with positions."""
FLOAT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Types of queries, keys and values, each with the bytes of an element."""
FP8_BYTES: Final = {"float8_e4m3fn": 1, "float8_e5m2": 1}
"""Types that only stored keys and values may have, with bytes; the only ones with scales."""
KV_BYTES: Final = FLOAT_BYTES | FP8_BYTES
"""Types that stored keys and values may have, with bytes."""
BYTE: Final = "uint8"
"""The type of opaque pages and of states."""
ELEMENT_BYTES: Final = KV_BYTES | {BYTE: 1}
MAX_PAGE_BYTES: Final = MAX_LAYER_BYTES
"""Bytes of the largest opaque page."""
OPAQUE_HEADER_BYTES: Final = 128
"""Bytes before those of an opaque page, as ``data_plane/execution/opaque_pages.py`` says."""
KEYS_AND_VALUES: Final = "keys_and_values"
LATENT: Final = "latent"
OPAQUE: Final = "opaque"
STATE: Final = "state"
_CACHE_KINDS: Final = {
    pb.CACHE_KIND_UNSPECIFIED: KEYS_AND_VALUES,
    pb.CACHE_KIND_KEYS_AND_VALUES: KEYS_AND_VALUES,
    pb.CACHE_KIND_LATENT: LATENT,
    pb.CACHE_KIND_STATE: STATE,
    pb.CACHE_KIND_OPAQUE: OPAQUE,
}
_TO_KIND: Final = {name: kind for kind, name in _CACHE_KINDS.items()}
_MAX_SHOWN_CHARS: Final = 60
_NUM_SAME_SHOWN: Final = 18  # characters before the first that differs
_SCALES: Final = ("key_scales", "value_scales")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that share a block table; see the message of the same name.

    Scales are rounded to float32, the type that they are sent in. No scales means that all are 1.
    ``cache_kind``: "keys_and_values", "latent", "state" or "opaque". ``value_head_size``: 0 where
    it is ``head_size``. ``page_bytes``: of opaque pages and of states, otherwise 0. Of states,
    ``num_kv_heads`` is the number of equal parts that shards can divide a page into.
    ``block_pattern``: None where queries see all blocks.
    """

    name: str
    layers: tuple[int, ...]
    num_kv_heads: int
    head_size: int
    sliding_window_tokens: int = 0
    key_scales: tuple[float, ...] = ()
    value_scales: tuple[float, ...] = ()
    cache_kind: str = KEYS_AND_VALUES
    value_head_size: int = 0
    page_bytes: int = 0
    block_pattern: BlockPattern | None = None

    def __post_init__(self) -> None:
        if self.value_head_size == self.head_size:
            object.__setattr__(self, "value_head_size", 0)
        for name in _SCALES:
            object.__setattr__(self, name, tuple(_float32(x) for x in getattr(self, name)))

    @property
    def value_size(self) -> int:
        """Number of elements of one head's value."""
        return self.value_head_size or self.head_size

    @property
    def stored_sizes(self) -> tuple[int, ...]:
        """Number of elements stored of a head and token: of key and value, or of the latent."""
        if self.cache_kind == LATENT:
            return (self.head_size,)
        return (self.head_size, self.value_size)

    def page_shape(self, num_kv_heads: int, block_size_tokens: int) -> tuple[int, ...]:
        """The shape of one layer's page of one block: ``[2, num_kv_heads, block_size_tokens,
        head_size]``, or its number of elements where it does not hold two of one size.
        """
        if self.cache_kind == OPAQUE:
            return (OPAQUE_HEADER_BYTES + self.page_bytes,)
        if self.cache_kind == STATE:
            return (self.page_bytes * num_kv_heads // self.num_kv_heads,)
        if self.stored_sizes == (self.head_size, self.head_size):
            return (2, num_kv_heads, block_size_tokens, self.head_size)
        return (num_kv_heads * block_size_tokens * sum(self.stored_sizes),)

    def canonical(self) -> dict[str, Any]:
        """Return the fields from which the fingerprint is computed. Scales are the bits of their
        float32, because languages print floats in different ways. Scales, cache kind, value head
        size, page size and block pattern are left out when they are the default.
        """
        fields = asdict(self)
        if self.cache_kind == KEYS_AND_VALUES:
            del fields["cache_kind"]
        if self.value_head_size == 0:
            del fields["value_head_size"]
        if self.page_bytes == 0:
            del fields["page_bytes"]
        if self.block_pattern is None:
            del fields["block_pattern"]
        for name in _SCALES:
            scales = fields.pop(name)
            if scales:
                count = len(scales)
                fields[name] = struct.unpack(f"<{count}I", struct.pack(f"<{count}f", *scales))
        return fields


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of a pool's bytes; see the message of the same name. Valid by construction."""

    model_id: str
    block_size_tokens: int
    dtype: str
    kv_dtype: str
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        _require(1 <= len(self.model_id) <= 256, "model_id", "1 to 256 characters")
        _require(
            self.block_size_tokens in BLOCK_SIZES, "block_size_tokens", f"one of {BLOCK_SIZES}"
        )
        _require(len(self.groups) >= 1, "groups", "at least one")
        is_opaque = any(group.cache_kind == OPAQUE for group in self.groups)
        floats, stored = ({BYTE: 1}, {BYTE: 1}) if is_opaque else (FLOAT_BYTES, KV_BYTES)
        _require(self.dtype in floats, "dtype", f"one of {tuple(floats)}")
        _require(self.kv_dtype in stored, "kv_dtype", f"one of {tuple(stored)}")
        seen: set[int] = set()
        for i, group in enumerate(self.groups):
            at = f"groups[{i}]"
            _require(1 <= len(group.name) <= 64, f"{at}.name", "1 to 64 characters")
            _require(len(group.layers) >= 1, f"{at}.layers", "at least one")
            _require(
                tuple(sorted(set(group.layers))) == group.layers and group.layers[0] >= 0,
                f"{at}.layers",
                "ascending, unique and not negative",
            )
            _require(
                group.cache_kind in _TO_KIND,
                f"{at}.cache_kind",
                f"{KEYS_AND_VALUES}, {LATENT}, {STATE} or {OPAQUE}, the kinds that this version "
                "serves",
            )
            if group.cache_kind == STATE:  # a layer may also be in a group that attends
                _require(0 < i == len(self.groups) - 1, at, f"after all others if it is of {STATE}")
                self._check_pages(group, at)
                continue
            _require(seen.isdisjoint(group.layers), f"{at}.layers", "in no other group")
            seen.update(group.layers)
            if group.cache_kind == OPAQUE:
                _require(len(self.groups) == 1, "groups", f"one where pages are {OPAQUE}")
                _require(group.layers == (0,), f"{at}.layers", f"layer 0 alone where {OPAQUE}")
                self._check_pages(group, at)
                continue
            _require(
                group.page_bytes == 0,
                f"{at}.page_bytes",
                f"0 unless the kind is {OPAQUE} or {STATE}",
            )
            self._check_heads(group, at)
            _require(
                0 <= group.sliding_window_tokens < 2**31,
                f"{at}.sliding_window_tokens",
                "0 or a positive int32",
            )
            if group.block_pattern is not None:
                group.block_pattern.check_fits(
                    self.block_size_tokens, f"layout.{at}.block_pattern."
                )
            self._check_scales(group, at)

    def _check_heads(self, group: LayerGroup, at: str) -> None:
        is_latent = group.cache_kind == LATENT
        most_heads, largest = (1, MAX_LATENT_SIZE) if is_latent else (65_536, MAX_HEAD_SIZE)
        _require(
            1 <= group.num_kv_heads <= most_heads,
            f"{at}.num_kv_heads",
            "1, which all query heads share" if is_latent else "1 to 65,536",
        )
        _require(
            8 <= group.head_size <= largest and group.head_size % 8 == 0,
            f"{at}.head_size",
            f"a multiple of 8 from 8 to {largest}",
        )
        _require(
            8 <= group.value_size <= group.head_size and group.value_size % 8 == 0,
            f"{at}.value_head_size",
            "0, or a multiple of 8 up to head_size",
        )

    def _check_pages(self, group: LayerGroup, at: str) -> None:
        """Check a group whose pages only callers understand."""
        kind = group.cache_kind
        parts, most = (group.num_kv_heads, 65_536) if kind == STATE else (1, 0)
        _require(
            min(1, most) <= group.num_kv_heads <= most,
            f"{at}.num_kv_heads",
            "the parts of a page, 1 to 65,536" if most else f"0 where pages are {OPAQUE}",
        )
        _require(
            0 < group.page_bytes <= MAX_PAGE_BYTES and group.page_bytes % (64 * parts) == 0,
            f"{at}.page_bytes",
            f"a multiple of {64 * parts} from {64 * parts} to {MAX_PAGE_BYTES}",
        )
        for name in ("head_size", "value_head_size", "sliding_window_tokens"):
            _require(getattr(group, name) == 0, f"{at}.{name}", f"0 where pages are {kind}")
        for name in (*_SCALES, "block_pattern"):
            _require(not getattr(group, name), f"{at}.{name}", f"empty where pages are {kind}")

    def _check_scales(self, group: LayerGroup, at: str) -> None:
        num_layers = len(group.layers)
        _require(
            not group.value_scales or group.cache_kind != LATENT,
            f"{at}.value_scales",
            "empty for latents: a value is a part of its key, and has the key's scale",
        )
        for name in _SCALES:
            scales = getattr(group, name)
            _require(
                not scales or self.kv_dtype in FP8_BYTES,
                f"{at}.{name}",
                f"empty unless kv_dtype is one of {tuple(FP8_BYTES)}",
            )
            _require(
                len(scales) in (0, num_layers, num_layers * group.num_kv_heads),
                f"{at}.{name}",
                "none, one for each layer, or one for each layer and KV head",
            )
            _require(
                all(0 < scale < math.inf for scale in scales),
                f"{at}.{name}",
                "finite and above 0 as float32",
            )

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of the fields as JSON with sorted keys and no spaces, in UTF-8.

        A group's fields are those of ``LayerGroup.canonical``. Layouts that differ only in scales
        have different fingerprints.
        """
        fields = asdict(self) | {"groups": [group.canonical() for group in self.groups]}
        text = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).digest()

    def with_scales_of(self, pool: Layout) -> Layout:
        """Return the layout with a pool's scales, which decide how values are stored, if its groups
        differ in nothing else. Otherwise return it unchanged, for the control plane to refuse.
        """
        scaled = replace(self, groups=pool.groups) if self.kv_dtype == pool.kv_dtype else self
        return scaled if _unscaled(scaled) == _unscaled(self) else self

    def differences(self, other: Layout) -> str:
        """Return a text with each field that differs: this layout's value, then the other's."""
        mine, others = dict(_flat(asdict(self))), dict(_flat(asdict(other)))
        return ", ".join(
            f"{name} {' and not '.join(_shown(mine.get(name), others.get(name)))}"
            for name in dict.fromkeys((*mine, *others))
            if mine.get(name) != others.get(name)
        )

    @classmethod
    def of_opaque_pages(
        cls, model_id: str, page_bytes: int, *, block_size_tokens: int = 16
    ) -> Layout:
        """Return the layout of a pool of opaque blocks: each holds up to ``page_bytes`` bytes,
        which only callers understand. Callers with equal ``model_id`` understand each other's.
        Raises InvalidRequestError for an id or a number of bytes that is out of range.
        """
        group = LayerGroup(
            OPAQUE, (0,), num_kv_heads=0, head_size=0, cache_kind=OPAQUE, page_bytes=page_bytes
        )
        return cls(model_id, block_size_tokens, BYTE, BYTE, (group,))

    @property
    def is_opaque(self) -> bool:
        """Return whether the pool's blocks are opaque pages, over which no layer runs."""
        return self.groups[0].cache_kind == OPAQUE

    @property
    def state_group(self) -> int | None:
        """Index of the group that keeps checkpoints of states, which is the last; None if there is
        none.
        """
        return len(self.groups) - 1 if self.groups[-1].cache_kind == STATE else None

    @property
    def attention_groups(self) -> tuple[LayerGroup, ...]:
        """The groups whose layers run: all but that of states."""
        return self.groups[: self.state_group]

    @property
    def whole_group(self) -> int:
        """Index of the first group without an attention window, in which prefixes are whole; 0 if
        all have one.
        """
        windows = [group.sliding_window_tokens for group in self.attention_groups]
        return windows.index(0) if 0 in windows else 0

    @property
    def num_layers(self) -> int:
        """Number of layers that run, over all groups."""
        return sum(len(group.layers) for group in self.attention_groups)

    @property
    def latent_layers(self) -> frozenset[int]:
        """The layers that keep latents."""
        groups = (group for group in self.groups if group.cache_kind == LATENT)
        return frozenset(layer for group in groups for layer in group.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes in the layers that run, of all groups."""
        blocks = sum(self.block_bytes(group) for group in range(len(self.attention_groups)))
        return blocks // self.block_size_tokens

    def block_bytes(self, group: int = 0) -> int:
        """Return the bytes of one block of ``group``, over all its layers and heads."""
        g = self.groups[group]
        page_elements = math.prod(g.page_shape(g.num_kv_heads, self.block_size_tokens))
        return len(g.layers) * page_elements * ELEMENT_BYTES[self.stored_dtype(group)]

    def stored_dtype(self, group: int) -> str:
        """Return the type of the elements of a group's pages."""
        return BYTE if group == self.state_group else self.kv_dtype

    def to_proto(self) -> pb.Layout:
        """Convert the layout to its message, with its fingerprint."""
        return pb.Layout(
            model_id=self.model_id,
            block_size_tokens=self.block_size_tokens,
            dtype=dtype_to_wire(self.dtype),
            kv_dtype=dtype_to_wire(self.kv_dtype),
            groups=[
                pb.LayerGroup(
                    name=g.name,
                    layers=g.layers,
                    num_kv_heads=g.num_kv_heads,
                    head_size=g.head_size,
                    sliding_window_tokens=g.sliding_window_tokens,
                    key_scales=g.key_scales,
                    value_scales=g.value_scales,
                    cache_kind=_TO_KIND[g.cache_kind],
                    value_head_size=g.value_head_size,
                    page_bytes=g.page_bytes,
                    block_pattern=None if g.block_pattern is None else g.block_pattern.to_proto(),
                )
                for g in self.groups
            ],
            fingerprint=self.fingerprint,
        )

    @classmethod
    def from_proto(cls, message: pb.Layout) -> Layout:
        """Parse a message. Raises InvalidRequestError, also for a fingerprint that is wrong and for
        fields that this version does not know.
        """
        message = whole(message, message.SerializeToString(), field="layout", reader="side")
        layout = cls(
            model_id=message.model_id,
            block_size_tokens=message.block_size_tokens,
            dtype=dtype_from_wire(message.dtype, field="layout.dtype"),
            kv_dtype=dtype_from_wire(message.kv_dtype, field="layout.kv_dtype"),
            groups=tuple(
                LayerGroup(
                    g.name,
                    tuple(g.layers),
                    g.num_kv_heads,
                    g.head_size,
                    g.sliding_window_tokens,
                    tuple(g.key_scales),
                    tuple(g.value_scales),
                    _CACHE_KINDS.get(g.cache_kind, f"unknown ({g.cache_kind})"),
                    g.value_head_size,
                    g.page_bytes,
                    BlockPattern.of_field(g, f"layout.groups[{i}]"),
                )
                for i, g in enumerate(message.groups)
            ),
        )
        if message.fingerprint and message.fingerprint != layout.fingerprint:
            raise InvalidRequestError(
                "is not that of the other fields: leave it empty, or compute it from them",
                field="layout.fingerprint",
            )
        return layout


def _unscaled(layout: Layout) -> Layout:
    groups = (replace(group, key_scales=(), value_scales=()) for group in layout.groups)
    return replace(layout, groups=tuple(groups))


def _flat(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested fields by path, such as "groups[0].head_size"."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _flat(part, f"{at}.{name}" if at else name)
    elif isinstance(value, tuple) and value and isinstance(value[0], dict):
        for i, part in enumerate(value):
            yield from _flat(part, f"{at}[{i}]")
    else:
        yield at, value


def _shown(*values: Any) -> list[str]:
    """Return two values as short texts that do not leave out where they begin to differ."""
    texts = ["none" if value is None else str(value) for value in values]
    differ = (i for i, (one, other) in enumerate(zip(*texts, strict=False)) if one != other)
    begin = next(differ, min(map(len, texts))) - _NUM_SAME_SHOWN
    if begin > _MAX_SHOWN_CHARS // 2:
        texts = [f"...{text[begin:]}" for text in texts]
    most = _MAX_SHOWN_CHARS
    return [text if len(text) <= most else f"{text[: most - 3]}..." for text in texts]


def _require(ok: bool, field: str, wanted: str) -> None:
    if not ok:
        raise InvalidRequestError(f"must be {wanted}", field=f"layout.{field}")


def _float32(number: Any) -> float:
    """Round to the nearest float32; NaN, which no scale may be, if out of range or no number."""
    try:
        (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    except (OverflowError, struct.error):
        return math.nan
    return float(rounded)
