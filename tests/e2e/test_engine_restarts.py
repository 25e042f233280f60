"""Either plane is killed under a running engine: it goes on, and answers as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from engine_planes import POOL, Pair, save_byte_model

from engine import LLM, SamplingParams

PROMPTS = ["a prompt that is long enough for a few blocks of its own; " * 2, "short", "and a third"]
PARAMS = [
    SamplingParams(max_tokens=48, ignore_eos=True),
    SamplingParams(max_tokens=40, ignore_eos=True, n=3, temperature=1.0, seed=5),
    SamplingParams(max_tokens=60, ignore_eos=True),
]


def collect(
    llm: LLM, disturb: Callable[[], None] | None, at: int
) -> dict[tuple[int, int], list[int]]:
    """Tokens of every continuation; ``disturb`` is called once ``at`` tokens have come."""
    tokens: dict[tuple[int, int], list[int]] = {}
    ids: list[str] = []
    num_tokens = 0
    for delta in llm.stream(PROMPTS, PARAMS):
        if delta.request_id not in ids:
            ids.append(delta.request_id)
        tokens.setdefault((ids.index(delta.request_id), delta.index), []).extend(delta.token_ids)
        num_tokens += len(delta.token_ids)
        if disturb is not None and num_tokens >= at:
            disturb()
            disturb = None
    assert disturb is None
    return tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("byte-model"))


@pytest.mark.parametrize("victim", ["data", pytest.param("control", marks=pytest.mark.nightly)])
def test_a_plane_that_is_killed_and_comes_back_changes_no_token(
    model: Path, tmp_path: Path, victim: str
) -> None:
    with (
        Pair(model, tmp_path) as pair,
        LLM(model, control_plane=pair.control.address, pool_id=POOL, timeout_s=20.0) as llm,
    ):
        calm = collect(llm, None, 0)

        def disturb() -> None:
            plane = pair.data if victim == "data" else pair.control
            plane.kill()
            plane.start()

        for at in (4, 90):
            assert collect(llm, disturb, at) == calm
        assert llm.stats.num_reopened_sessions >= 2
        assert all(tier.num_held_blocks == 0 for tier in llm.describe_pool().usage.tiers)
