"""Sampling: what each parameter does, and that nothing but the sequence's own stream matters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.sampler import logprobs_of, new_stream, sample
from kvplane.errors import InvalidRequestError
from tests.helpers.refusals import refused

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


@dataclass
class Row:
    """One to be sampled for."""

    params: SamplingParams
    stream: int = 0
    tokens: list[int] = field(default_factory=list)
    num_prompt_tokens: int = 0


def draw(row: Row) -> int:
    """The row's next token, which is added to it."""
    (token,) = sample(LOGITS[None], [row])
    row.tokens.append(token)
    return token


def draws(params: SamplingParams, num: int = 400, *, seed: int = 0, index: int = 0) -> list[int]:
    row = Row(params, new_stream(seed, index))
    return [draw(row) for _ in range(num)]


def test_greedy_takes_the_most_likely_token() -> None:
    assert draw(Row(SamplingParams())) == 1


def test_sampling_at_temperature_one_follows_the_softmax() -> None:
    seen = torch.tensor(draws(SamplingParams(temperature=1.0), 4000)).bincount(minlength=5) / 4000
    assert torch.allclose(seen, torch.softmax(LOGITS, -1), atol=0.03)


def test_a_low_temperature_sharpens_and_a_high_one_flattens() -> None:
    cold = draws(SamplingParams(temperature=0.2)).count(1)
    warm = draws(SamplingParams(temperature=1.0)).count(1)
    hot = draws(SamplingParams(temperature=5.0)).count(1)
    assert cold > warm > hot


def test_top_k_leaves_only_the_k_most_likely() -> None:
    assert set(draws(SamplingParams(temperature=3.0, top_k=2))) == {1, 3}


def test_top_k_leaves_the_first_of_equally_likely_tokens() -> None:
    """Also where only the temperature makes them equal: 1 is still the most likely."""
    ties = torch.tensor([1.0, 2.0, 3.0, 2.0, 2.0, 3.0, 2.0])
    close = torch.tensor([1.0, 1.0 + 2**-23, 1.0, 0.0, 0.0, 0.0, 0.0])
    for logits, temperature, kept in [
        (ties, 3.0, [2, 5, 1, 3, 4, 6, 0]),
        (close, 99999.0, [1, 0, 2, 3, 4, 5, 6]),
    ]:
        for top_k in range(1, 8):
            params = SamplingParams(temperature=temperature, top_k=top_k)
            rows = [Row(params, new_stream(seed, 0)) for seed in range(200)]
            assert set(sample(logits.expand(200, -1), rows)) == set(kept[:top_k])


def test_top_p_leaves_the_smallest_set_that_reaches_p() -> None:
    # softmax: token 1 has 0.64, token 3 has 0.23, token 2 has 0.09
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.6))) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.8))) == {1, 3}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.93))) == {1, 2, 3}


def test_a_seed_gives_the_same_tokens_again_and_another_seed_others() -> None:
    params = SamplingParams(temperature=2.0)
    assert draws(params, 50, seed=3) == draws(params, 50, seed=3)
    assert draws(params, 50, seed=3) != draws(params, 50, seed=4)


def test_each_continuation_has_a_stream_of_its_own() -> None:
    params = SamplingParams(temperature=2.0)
    assert draws(params, 50, index=0) != draws(params, 50, index=1)
    assert draws(params, 50, seed=0, index=1) == draws(params, 50, seed=1, index=0)


def test_draws_do_not_touch_other_streams() -> None:
    params = SamplingParams(temperature=2.0)
    alone = draws(params, 20, seed=5)
    one, other = Row(params, new_stream(5, 0)), Row(params, new_stream(6, 0))
    for _ in range(20):
        draw(one)
        draw(other)
        torch.rand(3)
    assert one.tokens == alone


def test_the_place_alone_says_which_number_of_a_stream_is_drawn() -> None:
    """So nothing is lost when a sequence is computed again."""
    params = SamplingParams(temperature=2.0)
    row = Row(params, new_stream(5, 0))
    whole = [draw(row) for _ in range(20)]
    prompt = [4, 4, 4]
    for place in range(20):
        assert draw(Row(params, new_stream(5, 0), prompt + whole[:place], 3)) == whole[place]


def test_all_numbers_are_drawn_and_none_is_preferred() -> None:
    """Of neighbouring seeds too, whose streams could be alike."""
    first = [draws(SamplingParams(temperature=100.0), 1, seed=seed)[0] for seed in range(2000)]
    counts = torch.tensor(first).bincount(minlength=5)
    assert counts.min() > 330
    assert counts.max() < 470


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=3),
    SamplingParams(temperature=1.3, top_p=0.9),
    SamplingParams(temperature=1.3, top_p=0.8, top_k=20, min_p=0.01),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, frequency_penalty=0.5, presence_penalty=-0.5),
    SamplingParams(temperature=1.0, repetition_penalty=0.8, frequency_penalty=1.0),
]


@pytest.mark.parametrize("seed", range(5))
def test_a_row_gets_the_token_that_it_gets_alone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num, vocabulary = 30, 1000
    logits = 3 * torch.randn(num, vocabulary, generator=generator)
    chosen = torch.randint(len(PARAMS), (num,), generator=generator).tolist()
    rows = [
        Row(PARAMS[i], new_stream(seed, place), list(range(place % 7, 40)), 5 + place % 3)
        for place, i in enumerate(chosen)
    ]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(num)]
    assert sample(logits, rows) == alone


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((name, {name: value}) for name, value in [
            ("max_tokens", 0), ("temperature", -0.1), ("temperature", float("nan")), ("top_k", -1),
            ("top_k", 2**63), ("top_p", 0.0), ("top_p", 1.1), ("n", 0), ("seed", -1),
            ("stop", ("",)), ("stop", "text"), ("min_p", 1.5), ("frequency_penalty", 3.0),
            ("presence_penalty", float("nan")), ("logprobs", -1), ("logprobs", 21),
            ("repetition_penalty", 0.0), ("repetition_penalty", 1e-320),
            ("repetition_penalty", 1e300), ("repetition_penalty", float("nan")),
            ("num_beams", 65), ("num_beams", 0), ("length_penalty", float("nan")),
        ]),
        ("n", {"num_beams": 2, "n": 3}),
        ("temperature", {"num_beams": 2, "temperature": 1.0}),
        ("stop", {"num_beams": 2, "stop": ("a",)}),
        ("logprobs", {"num_beams": 2, "logprobs": 1}),
        ("record_logits", {"num_beams": 2, "record_logits": True}),
    ],
)  # fmt: skip
def test_a_bad_parameter_is_refused_by_name(field: str, values: dict[str, Any]) -> None:
    with refused(InvalidRequestError, f"sampling_params.{field}"):
        SamplingParams(**values)


# Each is a number that float32 has as 0 or infinite, or that it can be divided to.
@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-300}, {"temperature": 1e-300, "top_p": 0.5}, {"temperature": 1e-40},
        {"temperature": 1.0, "top_p": 1e-320}, {"temperature": 1.0, "min_p": 1.0},
    ],
)  # fmt: skip
def test_an_extreme_parameter_leaves_the_most_likely_token(extreme: dict[str, float]) -> None:
    assert set(draws(SamplingParams(**extreme), 20)) == {1}  # type: ignore[arg-type]


@pytest.mark.parametrize("extreme", [{"temperature": 1e300}, {"temperature": 1.0, "min_p": 1e-320}])
def test_an_extreme_parameter_leaves_all_tokens(extreme: dict[str, float]) -> None:
    assert set(draws(SamplingParams(**extreme), 2000)) == {0, 1, 2, 3, 4}  # type: ignore[arg-type]


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_logits_that_are_no_numbers_give_a_token_of_the_vocabulary(
    value: float, top_p: float
) -> None:
    rows = [Row(SamplingParams(temperature=1.0, top_p=top_p)) for _ in range(2)]
    logits = torch.stack([torch.full((5,), value), LOGITS])
    tokens = sample(logits, rows)
    assert all(0 <= token < 5 for token in tokens)
    assert tokens[1] == sample(LOGITS[None], rows[1:])[0]


def test_min_p_leaves_out_what_is_less_likely_than_a_share_of_the_likeliest() -> None:
    # softmax: token 1 has 0.64, token 3 has 0.23, token 2 has 0.09
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.3))) == {1, 3}
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.1))) == {1, 2, 3}
    assert set(draws(SamplingParams(temperature=5.0, min_p=1.0))) == {1}


def test_frequency_and_presence_count_what_was_generated_and_not_the_prompt() -> None:
    def token(seen: list[int], num_prompt_tokens: int, **penalties: float) -> int:
        params = SamplingParams(**penalties)
        return sample(LOGITS[None], [Row(params, 0, seen, num_prompt_tokens)])[0]

    assert token([1, 1, 1, 3], 4, presence_penalty=2.0) == 1
    assert token([0, 1], 1, presence_penalty=0.9) == 1
    assert token([0, 1], 1, presence_penalty=1.1) == 3
    assert token([0, 1, 1], 1, presence_penalty=0.9) == 1
    assert token([0, 1, 1], 1, frequency_penalty=0.6) == 3
    assert token([0, 1], 1, frequency_penalty=0.6) == 1
    assert token([0, 4], 1, frequency_penalty=-2.0, presence_penalty=-2.0) == 1
    assert token([4, 4, 4], 0, frequency_penalty=-2.0) == 4


def named(token: int) -> tuple[str, bytes]:
    return str(token), str(token).encode()


def test_a_log_probability_comes_with_the_likeliest() -> None:
    found = logprobs_of(LOGITS[None], [2], [2], named)[0]
    wanted = torch.log_softmax(LOGITS, -1)
    assert (found.token_id, found.text) == (2, "2")
    assert found.logprob == pytest.approx(float(wanted[2]))
    assert [(each.token_id, each.text) for each in found.likeliest] == [(1, "1"), (3, "3")]
    assert found.likeliest[0].logprob == pytest.approx(float(wanted[1]))
    assert logprobs_of(LOGITS[None], [2], [0], named)[0].likeliest == ()
    masked = LOGITS.masked_fill(LOGITS < 2, -torch.inf)
    excluded = logprobs_of(masked[None], [1], [3], named)[0].likeliest[2]
    assert excluded.logprob == -9999.0  # as JSON has no infinity


def test_a_repetition_penalty_lowers_what_was_seen() -> None:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0])
    params = SamplingParams(repetition_penalty=1.5)
    assert sample(logits[None], [Row(params, 0, [1, 1])]) == [3]
    assert sample(logits[None], [Row(params, 0, [0, 4])]) == [1]
    both = torch.tensor([-1.0, -1.1])  # what is below 0 is lowered too
    assert sample(both[None], [Row(params, 0, [0])]) == [1]
    assert logits.tolist() == pytest.approx([0.0, 3.0, 1.0, 2.9, -1.0])
