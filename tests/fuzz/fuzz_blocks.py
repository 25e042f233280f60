"""What the fuzzer runs: random bytes become calls of kvplane_blocks, which must answer or refuse.

    python tests/fuzz/fuzz_blocks.py TARGET [LIBFUZZER_OPTION...] [FOLDER_OF_INPUTS | INPUT...]

A target may raise only what a caller is told of, and in the end whatever it made must be whole.
Run by test_fuzz_blocks.py with a build that counts coverage; with a file it runs that input alone.
"""

from __future__ import annotations

import ctypes
import sys

import atheris
import atheris.core_with_libfuzzer as libfuzzer
import kvplane_blocks
import xxhash
from kvplane_blocks import _native

from tests.fuzz.pool_calls import STEP_CALLS, end, end_some, fence
from tests.fuzz.pool_world import World, make_calls, new_core, settings
from tests.fuzz.prefix_calls import PREFIX_CALLS
from tests.fuzz.query_calls import QUERY_CALLS
from tests.fuzz.rebuild_calls import rebuilt
from tests.fuzz.watch_calls import WATCH_CALLS, check_followers

NUM_COUNTERS = 1 << 16  # kNumCounters of coverage.cpp
BLOCK_TOKENS = (4, 4, 1)
CALLS = STEP_CALLS + PREFIX_CALLS + QUERY_CALLS + WATCH_CALLS
UNSETTLED = (end, end_some, fence)


def fuzz_hashes(data: atheris.FuzzedDataProvider) -> None:
    root = data.ConsumeBytes(data.ConsumeIntInRange(0, 300))
    expected = xxhash.xxh3_128_digest(b"kvplane.v1.tenant\0" + root)
    assert kvplane_blocks.root_hash(root) == expected

    parent = data.ConsumeBytes(data.ConsumeIntInRange(0, 40))
    tokens = data.ConsumeBytes(data.remaining_bytes())
    try:
        found = kvplane_blocks.chained_hash(parent, tokens)
    except ValueError:
        assert len(parent) != 16
    else:
        assert len(parent) == 16 and found == xxhash.xxh3_128_digest(parent + tokens)


def new_world(data: atheris.FuzzedDataProvider, least: int, most: int) -> World:
    """A pool of so many layer groups."""
    same, block_tokens = settings(data), data.PickValueInList([*BLOCK_TOKENS])
    num = data.ConsumeIntInRange(least, most)
    cores = [
        new_core(data, block_tokens, same, may_hold_states=0 < i == num - 1) for i in range(num)
    ]
    return World(data, cores, block_tokens)


def fuzz_pool(data: atheris.FuzzedDataProvider) -> None:
    world = new_world(data, 1, 1)
    make_calls(world, CALLS, unsettled=UNSETTLED)
    check_followers(world)


def fuzz_groups(data: atheris.FuzzedDataProvider) -> None:
    world = new_world(data, 2, 3)
    make_calls(world, CALLS, unsettled=UNSETTLED)
    check_followers(world)


def fuzz_rebuild(data: atheris.FuzzedDataProvider) -> None:
    """The pool goes on when it is built."""
    same, block_tokens = settings(data), data.PickValueInList([*BLOCK_TOKENS])
    cores = [rebuilt(data, block_tokens, same) for _ in range(data.ConsumeIntInRange(1, 2))]
    whole = [core for core in cores if core is not None]
    for core in whole:
        core.check_integrity()
    if len(whole) == len(cores):
        make_calls(World(data, whole, block_tokens), CALLS, unsettled=UNSETTLED)


TARGETS = {
    "hashes": fuzz_hashes,
    "pool": fuzz_pool,
    "groups": fuzz_groups,
    "rebuild": fuzz_rebuild,
}


def count_native_code() -> None:
    """Tells libFuzzer where the module's counters are.

    By its own library's symbols: AddressSanitizer's library has empty ones of the same names.
    """
    module, library = ctypes.CDLL(_native.__file__), ctypes.CDLL(libfuzzer.__file__)
    for symbol, item_bytes, tell in (
        ("kvplane_counters", 1, library.__sanitizer_cov_8bit_counters_init),
        ("kvplane_places", 16, library.__sanitizer_cov_pcs_init),
    ):
        num_bytes = item_bytes * NUM_COUNTERS
        start = ctypes.addressof((ctypes.c_uint8 * num_bytes).in_dll(module, symbol))
        tell(ctypes.c_void_p(start), ctypes.c_void_p(start + num_bytes))


def main() -> None:
    program, target, *options = sys.argv
    fuzz = TARGETS[target]
    count_native_code()
    atheris.Setup([program, *options], lambda data: fuzz(atheris.FuzzedDataProvider(data)))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
