"""Many more engines than the pool has room for are all served, and little is lost by it."""

from __future__ import annotations

import functools

import pytest

from control_plane.admission.decisions import AdmissionConfig
from tests.helpers.admission_load import CASES, HOSTILE, NORMAL, measure


@functools.cache
def measured(name: str) -> dict[str, float]:
    return measure(name, seed=1, duration_s=200.0, config=AdmissionConfig())


# The goodput of honest engines, of that of as many as fit. Receipts that never come keep blocks
# for as long as they may.
LEAST = {
    "overload": 0.9,
    **{f"overload, {kind}": 0.75 if kind == "silent" else 0.9 for kind in HOSTILE},
    "overload, one jumping": 0.9,
}


@pytest.mark.parametrize("name", LEAST)
def test_ten_times_more_than_fits_are_all_served_and_lose_little(name: str) -> None:
    normal, overload = measured(NORMAL), measured(name)
    assert overload["num_served"] == CASES[name]["honest"]
    assert overload["goodput_tokens_per_s"] >= LEAST[name] * normal["goodput_tokens_per_s"]
    assert name != "overload" or overload["recomputed"] < 0.05
