"""What the fuzzer runs: random bytes become calls of kvplane_blocks, which must answer or refuse.

    python tests/fuzz/fuzz_blocks.py [LIBFUZZER_OPTION...] [FOLDER_OF_INPUTS | INPUT...]

The first byte of an input picks one of TARGETS. A target may raise only what a caller is told of.
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
from pool_calls import fuzz_pool

NUM_COUNTERS = 1 << 16  # kNumCounters of csrc/blocks/tests/coverage.cpp


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


TARGETS = (fuzz_hashes, fuzz_pool)


def run(data: bytes) -> None:
    """One input."""
    provider = atheris.FuzzedDataProvider(data)
    TARGETS[provider.ConsumeIntInRange(0, len(TARGETS) - 1)](provider)


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


if __name__ == "__main__":
    count_native_code()
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()
