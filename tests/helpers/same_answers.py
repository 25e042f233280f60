"""An engine answers the same while something of its pool is broken."""

from __future__ import annotations

from collections.abc import Callable

from engine import LLM, SamplingParams

PROMPTS = [[5, 9, 33, 44, 77] * 9, [8, 9, 10, 55], [5, 9, 33, 44, 77] * 8]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)


def check_same_answers(engine: LLM, broken: Callable[[], None]) -> None:
    """Compare answers with those to the same prompts before. ``broken`` breaks something once some
    tokens have come.
    """
    expected = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]
    tokens: dict[str, list[int]] = {}
    for i, delta in enumerate(engine.stream(PROMPTS, PARAMS)):
        tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
        if i == 20:
            broken()
    assert [*tokens.values()] == expected
