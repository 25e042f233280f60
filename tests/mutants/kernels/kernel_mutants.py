"""A pytest plugin that plants one fault in ``CpuKernels``: $FAULT names it.

Run with it, the tests in tests/kernels/ must fail.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels

_attention = CpuKernels.paged_attention
_reshape_and_cache = CpuKernels.reshape_and_cache
_swap_blocks = CpuKernels.swap_blocks
_gather_blocks = CpuKernels.gather_blocks

Operation = Callable[..., Any]


def _with_arguments(change: Callable[[dict[str, Any]], None]) -> Operation:
    """Attention whose arguments are changed first."""

    def attention(self: CpuKernels, arguments: AttentionArguments, **results: Any) -> torch.Tensor:
        changed = {f.name: getattr(arguments, f.name) for f in fields(arguments) if f.init}
        change(changed)
        return _attention(self, AttentionArguments(**changed), **results)

    return attention


def attention_returns_zeros(self: Any, arguments: Any, **results: Any) -> torch.Tensor:
    return torch.zeros_like(_attention(self, arguments, **results))


def lse_in_base_two(self: Any, arguments: Any, lse: torch.Tensor | None = None) -> torch.Tensor:
    out = _attention(self, arguments, lse=lse)
    if lse is not None:
        lse /= torch.log(torch.tensor(2.0))
    return out


def bits_depend_on_the_batch(self: Any, arguments: Any, **results: Any) -> torch.Tensor:
    out = _attention(self, arguments, **results)
    if arguments.context_lens.shape[0] > 1:
        out = torch.nextafter(out.float(), torch.zeros(())).to(out.dtype)
    return out


def bits_depend_on_the_threads(self: Any, arguments: Any, **results: Any) -> torch.Tensor:
    out = _attention(self, arguments, **results)
    return torch.nextafter(out, out * 2) if self.num_threads == 7 else out


def table_shifted_by_one(a: dict[str, Any]) -> None:
    a["block_tables"] = a["block_tables"].roll(1, dims=1)


def two_blocks_swapped(a: dict[str, Any]) -> None:
    if a["block_tables"].shape[1] >= 2 and bool((a["block_tables"][:, 1] >= 0).all()):
        a["block_tables"] = a["block_tables"].clone()
        a["block_tables"][:, :2] = a["block_tables"][:, :2].flip(1)


def rows_see_one_token_less(a: dict[str, Any]) -> None:
    longer = a["context_lens"] > a["query_starts"].diff()
    a["context_lens"] = a["context_lens"] - longer.long()


def values_of_the_next_head(a: dict[str, Any]) -> None:
    a["pages"] = a["pages"].clone()
    a["pages"][:, 1] = a["pages"][:, 1].roll(1, dims=1)


def values_at_the_end_of_latents(a: dict[str, Any]) -> None:
    keys, values = a["pages"]
    a["pages"] = keys, keys[..., keys.shape[3] - values.shape[3] :]


def keys_and_values_exchanged(a: dict[str, Any]) -> None:
    a["pages"] = a["pages"].flip(1)


def groups_interleaved(a: dict[str, Any]) -> None:
    num_heads, num_kv_heads = a["query"].shape[1], a["pages"].shape[2]
    order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()
    a["query"] = a["query"][:, order].contiguous()


def window_one_token_wider(a: dict[str, Any]) -> None:
    window = a["options"].sliding_window_tokens
    a["options"] = replace(a["options"], sliding_window_tokens=window + (window > 0))


def alibi_dropped(a: dict[str, Any]) -> None:
    a["options"] = replace(a["options"], alibi_slopes=())


def soft_cap_dropped(a: dict[str, Any]) -> None:
    a["options"] = replace(a["options"], logit_soft_cap=0.0)


def sinks_of_the_next_head(a: dict[str, Any]) -> None:
    sinks = a["options"].sinks
    a["options"] = replace(a["options"], sinks=sinks[1:] + sinks[:1])


def pages_rounded_to_bf16(a: dict[str, Any]) -> None:
    a["pages"] = a["pages"].bfloat16()


def bad_table_entries_taken_as_zero(a: dict[str, Any]) -> None:
    a["block_tables"] = a["block_tables"].clamp(min=0)


def key_scales_forgotten(a: dict[str, Any]) -> None:
    a["key_scales"] = None


def value_scales_forgotten(a: dict[str, Any]) -> None:
    a["value_scales"] = None


def scales_of_the_next_head(a: dict[str, Any]) -> None:
    for name in ("key_scales", "value_scales"):
        if a[name] is not None:
            a[name] = a[name].roll(1)


def scales_of_keys_and_values_exchanged(a: dict[str, Any]) -> None:
    a["key_scales"], a["value_scales"] = a["value_scales"], a["key_scales"]


def newest_slot_not_written(self: Any, arguments: WriteArguments) -> None:
    slots = arguments.slots.clone()
    slots[-1:] = -1
    _reshape_and_cache(self, replace(arguments, slots=slots))


def negative_slots_written(self: Any, arguments: WriteArguments) -> None:
    _reshape_and_cache(self, replace(arguments, slots=arguments.slots.clamp(min=0)))


def keys_cut_off_instead_of_rounded(self: Any, arguments: WriteArguments) -> None:
    key = arguments.key
    if arguments.pages.dtype == torch.bfloat16 and key.dtype == torch.float32:
        key = (key.contiguous().view(torch.int32) & -65536).view(torch.float32)
    _reshape_and_cache(self, replace(arguments, key=key))


def _with_keys_of_fp8_pages(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Operation:
    """Caching whose keys, divided by their scales, are changed before they become fp8.

    ``change`` gets them and the largest number of the type.
    """

    def caching(self: Any, arguments: WriteArguments) -> None:
        pages, key_scales = arguments.pages, arguments.key_scales
        if pages.element_size() == 1:
            divided = arguments.key.float()
            divided = divided / (1 if key_scales is None else key_scales.view(-1, 1))
            key = change(divided, torch.finfo(pages.dtype).max)
            arguments = replace(arguments, key=key, key_scales=None)
        _reshape_and_cache(self, arguments)

    return caching


def fp8_cut_off_instead_of_rounded(quotients: torch.Tensor, largest: float) -> torch.Tensor:
    bits = 20 if largest < 1000 else 21  # of an fp32's that the type does not have
    return (quotients.view(torch.int32) & -(1 << bits)).view(torch.float32)


def fp8_not_saturated(quotients: torch.Tensor, largest: float) -> torch.Tensor:
    return torch.where(quotients.abs() > largest, torch.nan, quotients)


def fp8_subnormals_become_zero(quotients: torch.Tensor, largest: float) -> torch.Tensor:
    smallest = 2**-6 if largest < 1000 else 2**-14
    return torch.where(quotients.abs() < smallest, 0.0, quotients)


def fp8_nan_becomes_zero(quotients: torch.Tensor, largest: float) -> torch.Tensor:
    return quotients.nan_to_num(nan=0.0, posinf=largest, neginf=-largest)


def keys_times_the_inverse_of_their_scales(self: Any, arguments: WriteArguments) -> None:
    if arguments.key_scales is not None:
        key = arguments.key.float() * (1 / arguments.key_scales.view(-1, 1))
        arguments = replace(arguments, key=key, key_scales=None)
    _reshape_and_cache(self, arguments)


def copies_read_the_pool_as_it_was(self: Any, pool: torch.Tensor, pairs: torch.Tensor) -> None:
    _swap_blocks(self, pool.clone(), pool, pairs)


def swaps_the_other_way_round(self: Any, source: Any, destination: Any, pairs: Any) -> None:
    _swap_blocks(self, source, destination, pairs.flip(1))


def gathers_in_order_of_ids(self: Any, pool: Any, block_ids: torch.Tensor) -> torch.Tensor:
    return _gather_blocks(self, pool, block_ids.sort().values)


_CHANGES = (
    table_shifted_by_one,
    two_blocks_swapped,
    rows_see_one_token_less,
    values_of_the_next_head,
    values_at_the_end_of_latents,
    keys_and_values_exchanged,
    groups_interleaved,
    window_one_token_wider,
    alibi_dropped,
    soft_cap_dropped,
    sinks_of_the_next_head,
    pages_rounded_to_bf16,
    bad_table_entries_taken_as_zero,
    key_scales_forgotten,
    value_scales_forgotten,
    scales_of_the_next_head,
    scales_of_keys_and_values_exchanged,
)
_KEYS_OF_FP8_PAGES = (
    fp8_cut_off_instead_of_rounded,
    fp8_not_saturated,
    fp8_subnormals_become_zero,
    fp8_nan_becomes_zero,
)
_ATTENTIONS = (
    attention_returns_zeros,
    lse_in_base_two,
    bits_depend_on_the_batch,
    bits_depend_on_the_threads,
)
_OTHERS: dict[str, tuple[Callable[..., Any], ...]] = {
    "reshape_and_cache": (
        newest_slot_not_written,
        negative_slots_written,
        keys_cut_off_instead_of_rounded,
        keys_times_the_inverse_of_their_scales,
    ),
    "copy_blocks": (copies_read_the_pool_as_it_was,),
    "swap_blocks": (swaps_the_other_way_round,),
    "gather_blocks": (gathers_in_order_of_ids,),
}

# Name of the fault: the function it replaces, and by what.
MUTANTS: dict[str, tuple[str, Callable[..., Any]]] = (
    {change.__name__: ("paged_attention", _with_arguments(change)) for change in _CHANGES}
    | {
        change.__name__: ("reshape_and_cache", _with_keys_of_fp8_pages(change))
        for change in _KEYS_OF_FP8_PAGES
    }
    | {mutant.__name__: ("paged_attention", mutant) for mutant in _ATTENTIONS}
    | {mutant.__name__: (name, mutant) for name, mutants in _OTHERS.items() for mutant in mutants}
)


def pytest_configure() -> None:
    """Plants the fault."""
    name, mutant = MUTANTS[os.environ["FAULT"]]
    setattr(CpuKernels, name, mutant)
