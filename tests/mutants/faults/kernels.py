"""Faults planted in ``CpuKernels``, before or after its native functions."""

from __future__ import annotations

from collections.abc import Iterator

from tests.mutants.fault import Fault

CPU, NATIVE = (f"data_plane/kernels/backends/{name}.py" for name in ("cpu", "native"))
ATTENTION, BITS, CACHING, BLOCKS, BAD = (
    f"tests/kernels/test_oracle_{name}.py"
    for name in ("attention", "bits", "caching", "blocks", "bad_input")
)

ATTENDS = "        return self._attend(arguments, out, lse, share_reads=self._share_reads)\n"
CACHES = "    def reshape_and_cache(self, arguments: WriteArguments) -> None:\n"


ARGUMENTS = (
    (
        "table_shifted_by_one",
        ATTENTION,
        "a['block_tables'] = a['block_tables'].roll(1, dims=1)",
    ),
    (
        "two_blocks_swapped",
        ATTENTION,
        "tables = a['block_tables'].clone()",
        "if tables.shape[1] >= 2 and bool((tables[:, 1] >= 0).all()):",
        "    tables[:, :2] = tables[:, :2].flip(1)",
        "    a['block_tables'] = tables",
    ),
    (
        "rows_see_one_token_less",
        ATTENTION,
        "longer = a['context_lens'] > a['query_starts'].diff()",
        "a['context_lens'] = a['context_lens'] - longer.long()",
    ),
    (
        "values_of_the_next_head",
        ATTENTION,
        "a['pages'] = a['pages'].clone()",
        "a['pages'][:, 1] = a['pages'][:, 1].roll(1, dims=1)",
    ),
    (
        "values_at_the_end_of_latents",
        ATTENTION,
        "keys, values = a['pages']",
        "a['pages'] = keys, keys[..., keys.shape[3] - values.shape[3] :]",
    ),
    ("keys_and_values_exchanged", ATTENTION, "a['pages'] = a['pages'].flip(1)"),
    (
        "groups_interleaved",
        ATTENTION,
        "num_heads, num_kv_heads = a['query'].shape[1], a['pages'].shape[2]",
        "order = torch.arange(num_heads).view(-1, num_kv_heads).T.flatten()",
        "a['query'] = a['query'][:, order].contiguous()",
    ),
    (
        "window_one_token_wider",
        ATTENTION,
        "window = a['options'].sliding_window_tokens",
        "a['options'] = replace(a['options'], sliding_window_tokens=window + (window > 0))",
    ),
    ("alibi_dropped", ATTENTION, "a['options'] = replace(a['options'], alibi_slopes=())"),
    ("soft_cap_dropped", ATTENTION, "a['options'] = replace(a['options'], logit_soft_cap=0.0)"),
    (
        "sinks_of_the_next_head",
        ATTENTION,
        "sinks = a['options'].sinks",
        "a['options'] = replace(a['options'], sinks=sinks[1:] + sinks[:1])",
    ),
    ("pages_rounded_to_bf16", ATTENTION, "a['pages'] = a['pages'].bfloat16()"),
    (
        "bad_table_entries_taken_as_zero",
        BAD,
        "a['block_tables'] = a['block_tables'].clamp(min=0)",
    ),
    ("key_scales_forgotten", ATTENTION, "a['key_scales'] = None"),
    ("value_scales_forgotten", ATTENTION, "a['value_scales'] = None"),
    (
        "scales_of_the_next_head",
        ATTENTION,
        "for name in ('key_scales', 'value_scales'):",
        "    a[name] = None if a[name] is None else a[name].roll(1)",
    ),
    (
        "scales_of_keys_and_values_exchanged",
        ATTENTION,
        "a['key_scales'], a['value_scales'] = a['value_scales'], a['key_scales']",
    ),
)


def _of_arguments() -> Iterator[Fault]:
    """Attention whose arguments, ``a``, are changed first."""
    for name, tests, *lines in ARGUMENTS:
        changed = (
            "from dataclasses import fields, replace",
            "a = {f.name: getattr(arguments, f.name) for f in fields(arguments) if f.init}",
            *lines,
            "arguments = AttentionArguments(**a)",
        )
        yield Fault(name, CPU, ATTENDS, _lines(*changed) + ATTENDS, tests, "not emulated")


RESULTS = (
    ("attention_returns_zeros", ATTENTION, "out.zero_()"),
    (
        "lse_in_base_two",
        ATTENTION,
        "if lse is not None:",
        "    lse /= torch.log(torch.tensor(2.0))",
    ),
    (
        "bits_depend_on_the_batch",
        BITS,
        "if arguments.context_lens.shape[0] > 1:",
        "    out.copy_(torch.nextafter(out.float(), torch.zeros(())))",
    ),
    (
        "bits_depend_on_the_threads",
        BITS,
        "if self.num_threads == 7:",
        "    out.copy_(torch.nextafter(out, out * 2))",
    ),
)


def _of_results() -> Iterator[Fault]:
    """Attention whose output, ``out``, is changed."""
    for name, tests, *lines in RESULTS:
        changed = (ATTENDS.strip().replace("return", "out ="), *lines, "return out")
        yield Fault(name, CPU, ATTENDS, _lines(*changed), tests, "not emulated")


QUOTIENTS = (
    "if arguments.keys.element_size() == 1:",
    "    largest = torch.finfo(arguments.keys.dtype).max",
    "    scales = arguments.key_scales",
    "    key = arguments.key.float() / (1 if scales is None else scales.view(-1, 1))",
)
DIVIDED = "    arguments = replace(arguments, key=key, key_scales=None)"
WRITES = (
    (
        "newest_slot_not_written",
        ATTENTION,
        "slots = arguments.slots.clone()",
        "slots[-1:] = -1",
        "arguments = replace(arguments, slots=slots)",
    ),
    (
        "negative_slots_written",
        CACHING,
        "arguments = replace(arguments, slots=arguments.slots.clamp(min=0))",
    ),
    (
        "keys_cut_off_instead_of_rounded",
        CACHING,
        "key = arguments.key",
        "if arguments.keys.dtype == torch.bfloat16 and key.dtype == torch.float32:",
        "    key = (key.contiguous().view(torch.int32) & -65536).view(torch.float32)",
        "arguments = replace(arguments, key=key)",
    ),
    (
        "keys_times_the_inverse_of_their_scales",
        CACHING,
        "if arguments.key_scales is not None:",
        "    key = arguments.key.float() * (1 / arguments.key_scales.view(-1, 1))",
        DIVIDED,
    ),
    (
        "fp8_cut_off_instead_of_rounded",
        CACHING,
        *QUOTIENTS,
        "    bits = 20 if largest < 1000 else 21  # of an fp32's that the type does not have",
        "    key = (key.view(torch.int32) & -(1 << bits)).view(torch.float32)",
        DIVIDED,
    ),
    (
        "fp8_not_saturated",
        CACHING,
        *QUOTIENTS,
        "    key = torch.where(key.abs() > largest, torch.nan, key)",
        DIVIDED,
    ),
    (
        "fp8_subnormals_become_zero",
        CACHING,
        *QUOTIENTS,
        "    smallest = 2**-6 if largest < 1000 else 2**-14",
        "    key = torch.where(key.abs() < smallest, 0.0, key)",
        DIVIDED,
    ),
    (
        "fp8_nan_becomes_zero",
        CACHING,
        *QUOTIENTS,
        "    key = key.nan_to_num(nan=0.0, posinf=largest, neginf=-largest)",
        DIVIDED,
    ),
)


def _of_writes() -> Iterator[Fault]:
    """Caching whose ``arguments`` are changed first, if they are of a CPU."""
    for name, tests, *lines in WRITES:
        changed = CACHES + _lines("from dataclasses import replace", *lines)
        yield Fault(name, NATIVE, CACHES, changed, tests, "not emulated")


def _lines(*lines: str) -> str:
    return "".join(f"        {line}\n" for line in lines)


FAULTS = (
    *_of_arguments(),
    *_of_results(),
    *_of_writes(),
    Fault(
        "copies_read_the_pool_as_it_was",
        NATIVE,
        'self._copy("copy_blocks", pool, pool, pairs)',
        'self._copy("swap_blocks", pool.clone(), pool, pairs)',
        BLOCKS,
    ),
    Fault(
        "swaps_the_other_way_round",
        NATIVE,
        'self._copy("swap_blocks", source, destination, pairs)',
        'self._copy("swap_blocks", source, destination, pairs.flip(1))',
        BLOCKS,
    ),
    Fault(
        "gathers_in_order_of_ids",
        NATIVE,
        'self._pack("gather_blocks", pool, block_ids, blocks)',
        'self._pack("gather_blocks", pool, block_ids.sort().values, blocks)',
        BLOCKS,
    ),
)
