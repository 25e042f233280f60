"""What counts as identical to transformers, and what the demonstration asks."""

from __future__ import annotations

import torch

from examples.demo import LOGITS_TOLERANCE, Verdict, compare_steps, questions


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def test_equal_tokens_and_close_logits_are_identical() -> None:
    want = logits([0.0, 1.0], [2.0, 0.0])
    verdict, worst = compare_steps([1, 0], want + LOGITS_TOLERANCE / 2, [1, 0], want)
    assert verdict is Verdict.IDENTICAL
    assert 0 < worst <= LOGITS_TOLERANCE


def test_a_logit_that_is_off_is_different_although_the_tokens_agree() -> None:
    want = logits([0.0, 1.0], [2.0, 0.0])
    got = want.clone()
    got[1, 1] += 1e-3
    verdict, worst = compare_steps([1, 0], got, [1, 0], want)
    assert verdict is Verdict.DIFFERENT
    assert worst > LOGITS_TOLERANCE


def test_logits_that_are_no_numbers_are_different() -> None:
    want = logits([0.0, 1.0])
    assert compare_steps([1], want * torch.nan, [1], want)[0] is Verdict.DIFFERENT


def test_tokens_that_part_are_a_tie_only_between_two_best_logits() -> None:
    tie = logits([1.0, 1.0 + LOGITS_TOLERANCE / 2, 0.0])
    assert compare_steps([0], tie, [1], tie)[0] is Verdict.TIE
    clear = logits([1.0, 2.0, 0.0])
    assert compare_steps([0], clear, [1], clear)[0] is Verdict.DIFFERENT


def test_an_answer_of_another_length_is_different() -> None:
    want = logits([0.0, 1.0])
    verdict, _ = compare_steps([1, 1], logits([0.0, 1.0], [0.0, 1.0]), [1], want)
    assert verdict is Verdict.DIFFERENT


def test_the_questions_are_the_same_for_a_seed_and_share_prefixes() -> None:
    asked = questions(3, quick=False)
    assert asked == questions(3, quick=False)
    assert asked != questions(4, quick=False)
    contexts = [question.prompt.partition("?")[0] for question in asked]
    assert 40 <= len(asked) <= 60
    assert len(set(contexts)) < len(contexts) - 20
    assert sum(question.params.n == 4 for question in asked) >= 4


def test_an_answer_is_right_only_with_the_whole_value() -> None:
    question = questions(0, quick=True)[0]
    assert question.is_right(question.answer)
    assert question.is_right(question.answer[:4])
    assert not question.is_right(question.answer[:3])
    assert not question.is_right("#" + question.answer[1:])
