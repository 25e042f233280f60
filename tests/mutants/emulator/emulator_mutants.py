"""Faults to plant in the sources of the CUDA kernels: what is replaced, by what, and what finds it.

plain: the program of attention_check.cpp, with four seeds. asan, tsan: the same program under
AddressSanitizer or ThreadSanitizer; faults that only they can see name them.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN, ASAN, TSAN = "plain", "asan", "tsan"


@dataclass(frozen=True)
class Mutant:
    """``old`` stands exactly once in ``file`` (of csrc/cuda)."""

    file: str
    old: str
    new: str
    found_by: str = PLAIN


SHORT, LONG, FMA = "attention_short.cuh", "attention_long.cuh", "attention_fma.cuh"
BATCH, TILES, PLAN = "batch.cuh", "tiles.cuh", "plan.cu"

MUTANTS = {
    "missing_barrier": Mutant(
        SHORT,
        "__syncthreads();\n    write_outputs<",
        "write_outputs<",
    ),
    "write_after_read": Mutant(FMA, "__syncthreads();  // The tile before has been read.", ""),
    "write_after_read_of_the_stages": Mutant(
        LONG, "__syncthreads();  // The tile has landed, and the other stage has been read.", ""
    ),
    "early_read_of_a_copy": Mutant(
        SHORT, "wait_for_copies<Ring::kStages - 2>();", "wait_for_copies<Ring::kStages - 1>();"
    ),
    "mask_off_by_one": Mutant(SHORT, "position < own.end;", "position <= own.end;"),
    "window_off_by_one": Mutant(BATCH, "position + 1 - window", "position - window"),
    "wrong_lane": Mutant(
        SHORT, "const int32_t row = 8 * c + lane / 4;", "const int32_t row = 8 * c + lane % 8;"
    ),
    "divergent_shuffle": Mutant(
        TILES,
        "const int64_t key = __shfl_sync(kWholeWarp, key_of_lane, row);",
        "if (column >= pages.head_size) continue;\n"
        "    const int64_t key = __shfl_sync(kWholeWarp, key_of_lane, row);",
    ),
    "shuffle_as_barrier": Mutant(
        FMA,
        "  __syncwarp();\n  for (int32_t token",
        "  __shfl_sync(kWholeWarp, 0, 0);\n  for (int32_t token",
        found_by=TSAN,
    ),
    "table_read_out_of_bounds": Mutant(
        BATCH,
        "if (position < wanted.begin || position >= wanted.end) return -1;",
        "if (position < wanted.begin) return -1;",
        found_by=ASAN,
    ),
    "unused_slots_taken_along": Mutant(
        BATCH,
        "if (position < wanted.begin || position >= wanted.end) return -1;",
        "if (position < wanted.begin || position >= (wanted.end + 15) / 16 * 16) return -1;",
    ),
    "warp_goes_on_alone": Mutant(
        SHORT,
        "__syncwarp();  // All lanes' copies have landed,",
        "// All lanes' copies have landed,",
    ),
    "maximum_of_half_the_lanes": Mutant(
        LONG, "maximum = fmaxf(maximum, __shfl_xor_sync(kWholeWarp, maximum, 2));", ""
    ),
    "splits_share_a_place": Mutant(
        BATCH, "(int64_t{split} * sequence.query_len + token)", "(int64_t{0} * split + token)"
    ),
    "tiles_not_rescaled": Mutant(LONG, "out[d][i] *= rescale[i / 2];", "out[d][i] *= 1.0f;"),
}
