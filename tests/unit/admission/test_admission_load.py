"""Many more engines than the pool has room for are all served, and little is lost by it."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from control_plane.admission.decisions import AdmissionConfig
from tests.helpers.admission_load import cases, pool


@functools.cache
def requests() -> list[dict[str, Any]]:
    """Prompts of 1,000 to 25,000 tokens, some with a prefix in common, and short answers."""
    rows, chosen = [], random.Random(1)
    for number in range(2000):
        num_prompt = chosen.randint(1_000, 25_000)
        ids = [10_000 * number + i for i in range(num_prompt // pool.CHUNK_TOKENS)]
        ids[: number % 5] = range(len(ids[: number % 5]))
        num_output = chosen.randint(20, 600)
        rows.append({"hash_ids": ids, "input_length": num_prompt, "output_length": num_output})
    return rows


@functools.cache
def measured(name: str) -> dict[str, float]:
    return cases.measure(name, requests(), seed=1, duration_s=130.0, config=AdmissionConfig())


def test_ten_times_more_than_fits_costs_little() -> None:
    normal, overload = measured("normal"), measured("overload")
    assert overload["num_served"] == overload["num_engines"] == 120
    assert overload["goodput_tokens_per_s"] >= 0.9 * normal["goodput_tokens_per_s"]
    assert overload["recomputed"] < 0.05


# Receipts that never come keep blocks for as long as they may.
LEAST = dict.fromkeys(cases.HOSTILE, 0.9) | {"silent": 0.8}


@pytest.mark.parametrize("kind", cases.HOSTILE)
def test_honest_engines_lose_little_beside_hostile_ones(kind: str) -> None:
    normal, beside = measured("normal"), measured(f"overload, {kind}")
    assert beside["num_served"] == 108
    assert beside["goodput_tokens_per_s"] >= LEAST[kind] * normal["goodput_tokens_per_s"]


def test_one_session_does_not_take_the_pool_by_a_jump_in_growth() -> None:
    normal, beside = measured("normal"), measured("overload, one jumping")
    assert beside["num_served"] == 119
    assert beside["goodput_tokens_per_s"] >= 0.9 * normal["goodput_tokens_per_s"]
