"""Sampling: what each parameter does, and that nothing but the sequence's own stream matters."""

from __future__ import annotations

import pytest
import torch

from engine.request import SamplingParams
from engine.sampling.sampler import logprob_of, new_generator, sample
from kvplane.errors import InvalidRequestError

LOGITS = torch.tensor([0.0, 3.0, 1.0, 2.0, -1.0])


def draws(params: SamplingParams, num: int = 400, *, seed: int = 0, index: int = 0) -> list[int]:
    generator = new_generator(seed, index)
    return [sample(LOGITS, params, generator) for _ in range(num)]


def test_greedy_takes_the_most_likely_token_and_no_random_number() -> None:
    generator = new_generator(7, 0)
    before = generator.get_state()
    assert sample(LOGITS, SamplingParams(), generator) == 1
    assert torch.equal(generator.get_state(), before)


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
    one, other = new_generator(5, 0), new_generator(6, 0)
    together = []
    for _ in range(20):
        together.append(sample(LOGITS, params, one))
        sample(LOGITS, params, other)
        torch.rand(3)
    assert together == alone


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("n", 0),
        ("seed", -1),
        ("stop", ("",)),
        ("stop", "text"),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"sampling_params.{field}"


def test_min_p_leaves_out_what_is_less_likely_than_a_share_of_the_likeliest() -> None:
    # softmax: token 1 has 0.64, token 3 has 0.23, token 2 has 0.09
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.3))) == {1, 3}
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.1))) == {1, 2, 3}
    assert set(draws(SamplingParams(temperature=5.0, min_p=1.0))) == {1}


def test_frequency_and_presence_count_what_was_generated_and_not_the_prompt() -> None:
    def token(seen: list[int], num_prompt_tokens: int, **penalties: float) -> int:
        params = SamplingParams(**penalties)
        return sample(LOGITS, params, new_generator(0, 0), seen, num_prompt_tokens)

    assert token([1, 1, 1, 3], 4, presence_penalty=2.0) == 1
    assert token([0, 1], 1, presence_penalty=0.9) == 1
    assert token([0, 1], 1, presence_penalty=1.1) == 3
    assert token([0, 1, 1], 1, presence_penalty=0.9) == 1
    assert token([0, 1, 1], 1, frequency_penalty=0.6) == 3
    assert token([0, 1], 1, frequency_penalty=0.6) == 1
    assert token([0, 4], 1, frequency_penalty=-2.0, presence_penalty=-2.0) == 1
    assert token([4, 4, 4], 0, frequency_penalty=-2.0) == 4


def test_a_log_probability_comes_with_the_likeliest() -> None:
    found = logprob_of(LOGITS, 2, 2, str)
    wanted = torch.log_softmax(LOGITS, -1)
    assert (found.token_id, found.text) == (2, "2")
    assert found.logprob == pytest.approx(float(wanted[2]))
    assert [(each.token_id, each.text) for each in found.likeliest] == [(1, "1"), (3, "3")]
    assert found.likeliest[0].logprob == pytest.approx(float(wanted[1]))
    assert logprob_of(LOGITS, 2, 0, str).likeliest == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.5), ("frequency_penalty", 3.0), ("presence_penalty", float("nan")),
        ("logprobs", -1), ("logprobs", 21),
    ],
)  # fmt: skip
def test_a_parameter_out_of_its_range_is_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.field == f"sampling_params.{name}"


def test_a_repetition_penalty_lowers_what_was_seen() -> None:
    generator = new_generator(0, 0)
    logits = torch.tensor([0.0, 3.0, 1.0, 2.9, -1.0])
    params = SamplingParams(repetition_penalty=1.5)
    assert sample(logits, params, generator, [1, 1]) == 3
    assert sample(logits, params, generator, [0, 4]) == 1
    both = torch.tensor([-1.0, -1.1])  # what is below 0 is lowered too
    assert sample(both, params, generator, [0]) == 1
    assert logits.tolist() == pytest.approx([0.0, 3.0, 1.0, 2.9, -1.0])
