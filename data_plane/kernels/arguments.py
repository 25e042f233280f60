"""The arguments of the kernels. All checks of their shapes, dtypes and devices are here.

A layer's pages are described in ``data_plane.memory.pages``. They are views of a pool
``[num_blocks, num_layers, ...]``, in which a block is contiguous. Slot ``block * block_size +
offset`` holds one token. Queries, keys, values and pages may each be fp32, fp16 or bf16; pages may
also be fp8 (e4m3 or e5m2), and then have scales: ``round(key / scale)`` is stored, saturated, and
stands for ``stored * scale``. The kernels themselves check the values of ids and lengths.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from data_plane.memory.pages import Pages
from data_plane.memory.upload import upload
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError
from kvplane.layout import MAX_HEAD_SIZE, MAX_LATENT_SIZE

FLOATS: Final = (torch.float32, torch.float16, torch.bfloat16)
FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
HOST: Final = torch.device("cpu")

NumbersOfHeads = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""ALiBi slopes and sinks, float32 [num_heads], and seen blocks, uint8 [num_sequences or 1,
num_heads, num_blocks]; None for those that options do not have.
"""

_MAX_MASK_BYTES: Final = 1 << 24  # of a pattern's heads, whatever the query and the stride
_ANY: Final = None  # in a shape: any extent
_PAGES: Final = "[num_blocks, 2, num_kv_heads, block_size, head_size]"
_KEYS: Final = "[num_blocks, num_kv_heads, block_size, head_size]"
_POOL: Final = "[num_blocks, num_layers, 2, num_kv_heads, block_size, head_size]"
_FLAT_POOL: Final = "[num_blocks, num_layers, page_elements]"


@dataclass(frozen=True, slots=True)
class WriteArguments:
    """Arguments of ``reshape_and_cache``. All tensors are on the device of ``pages``.

    key, value: [num_tokens, num_kv_heads, head_size], contiguous in the last dimension; value's
        last extent is that of the pages' values. value is None where the pages hold latents.
    pages: one layer's.
    slots: int64 [num_tokens]; negative = do not write.
    key_scales, value_scales: float32 [1] or [num_kv_heads], for fp8 pages only. None = 1.

    Raises InvalidRequestError naming the tensor that does not fit.
    """

    key: torch.Tensor
    value: torch.Tensor | None
    pages: Pages
    slots: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    keys: torch.Tensor = field(init=False)
    """Keys in the pages, [num_blocks, num_kv_heads, block_size, head_size]."""
    values: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        _set(self, keys_and_values(self.pages), "keys", "values")
        device = self.keys.device
        is_latent = are_latents(self.keys, self.values)
        wanted = "be absent: a latent's value is a part of its key" if is_latent else "be given"
        require(is_latent == (self.value is None), f"must {wanted}", "value")
        check_tensor("slots", self.slots, "[num_tokens]", (_ANY,), (torch.int64,), device)
        for name, tensor, stored in (
            ("key", self.key, self.keys),
            ("value", self.value, self.values),
        ):
            if tensor is None:
                continue
            wanted = "[num_tokens, num_kv_heads, head_size]"
            shape = (self.slots.shape[0], stored.shape[1], stored.shape[3])
            check_tensor(name, tensor, wanted, shape, FLOATS, device)
            _check_last_stride(name, tensor)
        _check_scales(self.keys, self.key_scales, self.value_scales)
        _make_contiguous(self, "slots")


@dataclass(frozen=True, slots=True)
class HostLengths:
    """A batch's lengths on the host: int64, contiguous.

    query_starts: [num_sequences + 1]. context_lens: [num_sequences].
    tables_may_share: False where no two sequences begin with the same block. Saves a launch on a
        GPU.
    """

    query_starts: NDArray[np.int64]
    context_lens: NDArray[np.int64]
    tables_may_share: bool = True

    def of(self, first: int, end: int) -> HostLengths:
        """Return the lengths of sequences ``first`` to ``end`` - 1, as a batch of their own."""
        starts = self.query_starts[first : end + 1]
        lens = self.context_lens[first:end]
        return HostLengths(starts - starts[0], lens, self.tables_may_share)


class SharedPlans:
    """Work plans that the kernels make from lengths and tables, shared by calls with the same ones,
    such as the layers of a step. The kernels fill it; tensors that they keep here live as long as
    it.
    """

    def __init__(self) -> None:
        self.made: dict[tuple[object, ...], object] = {}


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """Arguments of ``paged_attention``. All tensors are on the device of ``pages``.

    query: [num_tokens, num_heads, head_size], the sequences' query tokens one after another,
        contiguous in the last dimension; num_heads is a multiple of num_kv_heads.
    pages: one layer's.
    block_tables: int32 or int64 [num_sequences, max_blocks]; entries that no query token attends to
        are not read.
    query_starts: int64 [num_sequences + 1], from 0 up to num_tokens; a sequence may have no query
        tokens.
    context_lens: int64 [num_sequences], tokens with KV in the pages, those of this call included.
        Query token i of query_len has position context_len - query_len + i and attends to positions
        up to its own.
    options: with as many alibi_slopes and sinks as there are heads, or none; with a scale where
        the pages hold latents; with a block pattern whose blocks are whole ones of the pages.
    key_scales, value_scales: those that fp8 pages were written with.
    max_query_len: no sequence has more query tokens than this; 0 = not known. Saves a launch on a
        GPU.
    lengths: query_starts and context_lens on the host. Without them a GPU needs memory for the
        longest contexts that the tables have room for.
    plans: shared by all calls with these same lengths and tables, which must not change meanwhile;
        None: each call makes its own.
    is_padded: query_starts may end before num_tokens. The tokens beyond belong to no sequence, and
        the output has no values for them. Only on a GPU.
    of_heads: the result of ``numbers_of_heads`` for these options; None: made here, which copies
        them to the device.
    first_kv_head: the model's number of the pages' first KV head, for block patterns.

    Raises InvalidRequestError naming the argument that does not fit.
    """

    query: torch.Tensor
    pages: Pages
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    options: AttentionOptions = AttentionOptions()
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None
    max_query_len: int = 0
    lengths: HostLengths | None = None
    plans: SharedPlans | None = None
    is_padded: bool = False
    of_heads: NumbersOfHeads | None = None
    first_kv_head: int = 0
    keys: torch.Tensor = field(init=False)
    """Keys in the pages, [num_blocks, num_kv_heads, block_size, head_size]."""
    values: torch.Tensor = field(init=False)
    slopes: torch.Tensor | None = field(init=False)
    """ALiBi slopes on the device that reads them: float32 [num_heads]."""
    sinks: torch.Tensor | None = field(init=False)
    seen_blocks: torch.Tensor | None = field(init=False)
    """Which blocks of the options' pattern each head sees beside the local ones, uint8 [1,
    num_heads, num_blocks], a row that repeats; of a caller's mask [num_sequences, ...].
    """

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the output: [num_tokens, num_heads, value_head_size]."""
        num_tokens, num_heads, _ = self.query.shape
        return num_tokens, num_heads, self.values.shape[3]

    def __post_init__(self) -> None:
        _set(self, keys_and_values(self.pages), "keys", "values")
        device = self.keys.device
        _, num_kv_heads, _, head_size = self.keys.shape
        wanted = "[num_tokens, num_heads, head_size]"
        check_tensor("query", self.query, wanted, (_ANY, _ANY, head_size), FLOATS, device)
        _check_last_stride("query", self.query)
        num_heads = self.query.shape[1]
        if num_heads < 1 or num_heads % num_kv_heads != 0:
            raise InvalidRequestError(
                f"must have a multiple of the pages' {num_kv_heads} heads, has {num_heads}",
                field="query",
            )
        lens, starts, tables = self.context_lens, self.query_starts, self.block_tables
        check_tensor("context_lens", lens, "[num_sequences]", (_ANY,), (torch.int64,), device)
        num = lens.shape[0]
        wanted = "[num_sequences + 1]"
        check_tensor("query_starts", starts, wanted, (num + 1,), (torch.int64,), device)
        integers = (torch.int32, torch.int64)
        wanted = "[num_sequences, max_blocks]"
        check_tensor("block_tables", tables, wanted, (num, _ANY), integers, device)
        _check_scales(self.keys, self.key_scales, self.value_scales)
        if are_latents(self.keys, self.values):
            wanted = "must be given: the keys that latents stand for have another size"
            require(self.options.scale != 0, wanted, "options.scale")
        for name in ("block_tables", "query_starts", "context_lens"):
            _make_contiguous(self, name)
        if self.options.block_pattern is not None:
            self.options.block_pattern.check_fits(self.keys.shape[2], "options.block_pattern.")
        if self.options.seen_blocks is not None:
            _check_mask(self.options, num_heads, lens, self.lengths)
        kv_heads = range(self.first_kv_head, self.first_kv_head + num_kv_heads)
        of_heads = self.of_heads or numbers_of_heads(self.options, num_heads, kv_heads, device)
        _set(self, of_heads, "slopes", "sinks", "seen_blocks")


def numbers_of_heads(
    options: AttentionOptions, num_heads: int, kv_heads: range, device: torch.device
) -> NumbersOfHeads:
    """Return the options' ALiBi slopes, sinks and seen blocks as tensors on ``device``.
    ``kv_heads``: the model's numbers of the KV heads. Raises InvalidRequestError unless slopes and
    sinks have ``num_heads`` elements.
    """

    def seen_blocks() -> torch.Tensor | None:
        if options.seen_blocks is not None:
            mask: torch.Tensor = options.seen_blocks.torch()
            return mask
        pattern = options.block_pattern
        if pattern is None:
            return None
        most = _MAX_MASK_BYTES // max(1, pattern.vertical_stride)
        wanted = f"must be at most {most} with this vertical stride, are {num_heads}"
        require(num_heads <= most, f"must have heads that {wanted}", "query")
        return torch.tensor([pattern.seen_blocks(num_heads, kv_heads)], dtype=torch.uint8)

    def numbers_of(name: str) -> torch.Tensor | None:
        given = getattr(options, name)
        if len(given) not in (0, num_heads):
            raise InvalidRequestError(
                f"must be none or {num_heads}, one for each query head, are {len(given)}",
                field=f"options.{name}",
            )
        if not given:
            return None
        return torch.tensor(given, dtype=torch.float32)

    slopes, sinks, seen = (
        numbers if numbers is None or device.type == "cpu" else upload([numbers], device)[0]
        for numbers in (numbers_of("alibi_slopes"), numbers_of("sinks"), seen_blocks())
    )
    return slopes, sinks, seen


def _check_mask(
    options: AttentionOptions,
    num_heads: int,
    context_lens: torch.Tensor,
    lengths: HostLengths | None,
) -> None:
    """Check that a caller's mask has the batch's extents and covers contexts as far as the host
    knows them: on a device, a row that is too short repeats. Raises InvalidRequestError.
    """
    pattern, seen = options.block_pattern, options.seen_blocks
    assert pattern is not None and seen is not None
    wanted = [context_lens.shape[0], num_heads]
    at = "options.seen_blocks"
    require(
        [*seen.shape[:2]] == wanted,
        f"must be [{wanted[0]}, {wanted[1]}, num_blocks], is {[*seen.shape]}",
        at,
    )
    if lengths is None and context_lens.device.type != "cpu":
        return
    known = context_lens.numpy() if lengths is None else lengths.context_lens
    most, covered = int(known.max(initial=0)), seen.shape[2] * pattern.block_tokens
    require(most <= covered, f"must cover {most} positions, and covers {covered}", at)


def keys_and_values(pages: Pages) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a layer's views of keys and of values. Raises InvalidRequestError if malformed."""
    if isinstance(pages, tuple):
        keys, values = pages
        for tensor in pages:
            check_tensor("pages", tensor, _KEYS, (_ANY,) * 4, FLOATS + FP8, keys.device)
    else:
        if not isinstance(pages, torch.Tensor):
            raise InvalidRequestError(f"must be a tensor, is {type(pages).__name__}", field="pages")
        check_tensor("pages", pages, _PAGES, (_ANY, 2, *(_ANY,) * 3), FLOATS + FP8, pages.device)
        keys, values = pages.unbind(1)
    if values.dtype != keys.dtype or values.stride(0) != keys.stride(0):
        raise InvalidRequestError("must be keys and values of one pool", field="pages")
    _require_shape("pages", values, (*keys.shape[:3], _ANY))
    largest = MAX_LATENT_SIZE if are_latents(keys, values) else MAX_HEAD_SIZE
    for tensor in (keys, values):
        _check_last_stride("pages", tensor)
        _check_geometry("pages", tensor, largest)
    if values.shape[3] > keys.shape[3]:
        raise InvalidRequestError("must have values no larger than keys", field="pages")
    return keys, values


def are_latents(keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether values are views of their keys' first elements, not stored apart."""
    return keys.numel() > 0 and keys.data_ptr() == values.data_ptr()


def bytes_of_token(keys: torch.Tensor, values: torch.Tensor) -> int:
    """Return how many bytes one position takes in a layer's pages, keys and values together."""
    value_bytes = 0 if are_latents(keys, values) else values[0].nbytes
    return (keys[0].nbytes + value_bytes) // keys.shape[2]


def check_pool(name: str, pool: torch.Tensor, *devices: torch.device) -> None:
    """Raise InvalidRequestError unless the tensor is a pool of blocks on one of the devices."""
    if getattr(pool, "ndim", 0) == 3:
        check_tensor(name, pool, _FLAT_POOL, (_ANY,) * 3, (*FLOATS, *FP8, torch.uint8), *devices)
        if pool.shape[2] % 8 != 0 or pool.shape[2] < 1:
            raise InvalidRequestError("must have pages of a multiple of 8 elements", field=name)
    else:
        check_tensor(name, pool, _POOL, (_ANY, _ANY, 2, *(_ANY,) * 3), FLOATS + FP8, *devices)
        _check_geometry(name, pool)
    if pool.shape[1] < 1:
        raise InvalidRequestError("must have at least one layer", field=name)
    if pool.shape[0] > 0 and not pool[0].is_contiguous():
        raise InvalidRequestError("must be contiguous within a block", field=name)


def check_swap(
    source: torch.Tensor, destination: torch.Tensor, pairs: torch.Tensor, device: torch.device
) -> None:
    """Raise InvalidRequestError unless both pools have the same layout and are on the device or the
    host, and the pairs are well formed.
    """
    check_pool("source", source, device, HOST)
    check_pool("destination", destination, device, HOST)
    if destination.dtype != source.dtype:
        raise InvalidRequestError(
            f"must have source's dtype {source.dtype}, has {destination.dtype}",
            field="destination",
        )
    _require_shape("destination", destination, (_ANY, *source.shape[1:]))
    check_pairs(pairs)


def check_pairs(pairs: torch.Tensor) -> None:
    """Raise InvalidRequestError unless the tensor is a list of pairs of block ids on the host."""
    check_tensor("pairs", pairs, "[num_pairs, 2]", (_ANY, 2), (torch.int64,), HOST)


def shape_of_blocks(pool: torch.Tensor, block_ids: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of these blocks in canonical order: layers come before blocks."""
    check_tensor("block_ids", block_ids, "[num_block_ids]", (_ANY,), (torch.int64,), HOST)
    return (pool.shape[1], block_ids.shape[0], *pool.shape[2:])


def check_blocks(blocks: torch.Tensor, shape: tuple[int, ...], pool: torch.Tensor) -> None:
    """Raise InvalidRequestError unless blocks have ``shape_of_blocks`` and fit the pool."""
    wanted = f"[num_layers, num_block_ids, {', '.join(map(str, shape[2:]))}]"
    check_tensor("blocks", blocks, wanted, shape, (pool.dtype,), pool.device)


def check_result(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise InvalidRequestError unless a result is contiguous and of this shape and dtype."""
    check_tensor(name, tensor, str(list(shape)), tuple(shape), (dtype,), device)
    if not tensor.is_contiguous():
        raise InvalidRequestError("must be contiguous", field=name)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    wanted: str,
    shape: tuple[int | None, ...],
    dtypes: Collection[torch.dtype],
    *devices: torch.device,
) -> None:
    """Check that the tensor is dense and as described. Raises InvalidRequestError naming the
    tensor.

    ``wanted``: the shape in words. ``shape``: None where any extent will do. ``devices``: where it
    may be; one without an index stands for all devices of its type.
    """
    if not isinstance(tensor, torch.Tensor):
        raise InvalidRequestError(f"must be a tensor, is {type(tensor).__name__}", field=name)
    on_device = any(is_on(tensor, device) for device in devices)
    if not on_device or tensor.layout != torch.strided:
        names = " or ".join(dict.fromkeys(str(device) for device in devices))
        raise InvalidRequestError(
            f"must be a dense tensor on {names}, is {tensor.layout} on {tensor.device}", field=name
        )
    if tensor.dim() != len(shape):
        raise InvalidRequestError(f"must be {wanted}, is {list(tensor.shape)}", field=name)
    if tensor.dtype not in dtypes:
        listed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        has = str(tensor.dtype).removeprefix("torch.")
        raise InvalidRequestError(f"must have dtype {listed}, has {has}", field=name)
    _require_shape(name, tensor, shape)
    if tensor.numel() > 0 and tensor.data_ptr() == 0:
        raise InvalidRequestError("must have memory, has none", field=name)


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Return whether a tensor is on a device; one without an index stands for all of its type."""
    has = tensor.device
    return has.type == device.type and device.index in (None, has.index)


def require(ok: bool, wanted: str, name: str) -> None:
    """Raise InvalidRequestError with the message ``wanted`` for field ``name`` unless ``ok``."""
    if not ok:
        raise InvalidRequestError(wanted, field=name)


def _check_geometry(name: str, tensor: torch.Tensor, largest: int = MAX_HEAD_SIZE) -> None:
    """Check the last extents of pages or of a pool: [..., num_kv_heads, block_size, head_size]."""
    num_kv_heads, block_size, head_size = tensor.shape[-3:]
    if num_kv_heads < 1 or block_size < 1:
        raise InvalidRequestError(
            f"must hold at least one head and token, has shape {list(tensor.shape)}",
            field=name,
        )
    if head_size % 8 != 0 or not 8 <= head_size <= largest:
        raise InvalidRequestError(
            f"must have a head size that is a multiple of 8 up to {largest}, has {head_size}",
            field=name,
        )


def _check_scales(
    keys: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None
) -> None:
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is None:
            continue
        if keys.dtype not in FP8:
            raise InvalidRequestError("only fp8 pages have scales", field=name)
        wanted = "[1] or [num_kv_heads]"
        check_tensor(name, scales, wanted, (_ANY,), (torch.float32,), keys.device)
        if scales.shape[0] != 1:
            _require_shape(name, scales, (keys.shape[1],))


def _check_last_stride(name: str, tensor: torch.Tensor) -> None:
    if tensor.stride(-1) != 1 and tensor.numel() > 0:
        raise InvalidRequestError(
            f"must be contiguous in the last dimension, has strides {tensor.stride()}", field=name
        )


def _require_shape(name: str, tensor: torch.Tensor, shape: tuple[int | None, ...]) -> None:
    """Raise InvalidRequestError for a tensor of another shape; None stands for any extent."""
    wanted = [has if n is None else n for n, has in zip(shape, tensor.shape, strict=True)]
    if wanted != list(tensor.shape):
        raise InvalidRequestError(f"must be {wanted}, is {list(tensor.shape)}", field=name)


def _set(arguments: object, values: Iterable[object], *names: str) -> None:
    for name, value in zip(names, values, strict=True):
        object.__setattr__(arguments, name, value)


def _make_contiguous(arguments: object, name: str) -> None:
    object.__setattr__(arguments, name, getattr(arguments, name).contiguous())
