"""Lists all cases, and the worlds where each is measured."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from benchmarks.control_plane import prompts, rates, rebuild, scale, slices
from benchmarks.control_plane.engine import World
from benchmarks.control_plane.report import Row
from benchmarks.control_plane.sizes import Sizes

BOTH: Final = ("core", "grpc")
CORE: Final = ("core",)
GRPC: Final = ("grpc",)


@dataclass(frozen=True)
class Case:
    """One measurement, which may give several rows. ``worlds``: where it is measured."""

    name: str
    measure: Callable[[World, Sizes], Awaitable[list[Row]]]
    worlds: tuple[str, ...] = BOTH


CASES: Final = (
    Case("hit_in_use_32k", prompts.hit_in_use_32k),
    Case("miss_32k", prompts.miss_32k),
    Case("announce_32k", prompts.announce_32k, CORE),
    Case("hit_free_32k_pool100k", prompts.hit_free_32k_pool100k),
    Case("empty_step", prompts.empty_step),
    Case("decode_step_256", prompts.decode_step_256),
    Case("fork_2048_blocks", prompts.fork_2048_blocks),
    Case("swap_2048_blocks", prompts.swap_2048_blocks),
    Case("abort_256x2048", prompts.abort_256x2048),
    Case("truncate", prompts.truncate),
    *(
        Case(rates.rate_name(num), partial(rates.steps_per_s, num_engines=num))
        for num in (1, 8, 64)
    ),
    Case("steps_per_s_64_engines_paced", rates.steps_per_s_paced, GRPC),
    Case("steps_per_s_1_engine_ahead", rates.steps_per_s_1_engine_ahead, GRPC),
    Case("decode_beside_32k_admissions", rates.decode_beside_32k_admissions, GRPC),
    Case("scale", scale.scale, CORE),
    Case("rebuild_1M_blocks", rebuild.rebuild_1m_blocks),
    Case("memory", scale.memory, CORE),
    Case("memory_per_session", scale.memory_per_session, CORE),
    Case("slices", slices.slices, CORE),
)
