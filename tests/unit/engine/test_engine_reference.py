"""What counts as identical to transformers, and what the demonstration asks."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from engine.request import CompletionOutput
from examples.demo import LOGITS_TOLERANCE, compare
from models.recall_task import questions


def logits(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows)


def compared(token_ids: list[int], got: torch.Tensor, want: torch.Tensor) -> tuple[bool, float]:
    """Of a prompt of one token, and a model whose logits are ``want``."""

    def model(_: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.cat([want, want[-1:]])[None])

    model.device = torch.device("cpu")  # type: ignore[attr-defined]
    return compare(model, [5], CompletionOutput(0, "", token_ids, "stop", got))


def test_the_best_tokens_and_close_logits_are_identical() -> None:
    want = logits([0.0, 1.0], [2.0, 0.0])
    verdict, worst = compared([1, 0], want + LOGITS_TOLERANCE / 2, want)
    assert verdict
    assert 0 < worst <= LOGITS_TOLERANCE


def test_a_logit_that_is_off_is_different_although_the_tokens_agree() -> None:
    want = logits([0.0, 1.0], [2.0, 0.0])
    got = want.clone()
    got[1, 1] += 1e-3
    verdict, worst = compared([1, 0], got, want)
    assert not verdict
    assert worst > LOGITS_TOLERANCE


def test_logits_that_are_no_numbers_are_different() -> None:
    want = logits([0.0, 1.0])
    assert not compared([1], want * torch.nan, want)[0]


def test_another_token_will_do_only_where_the_two_best_tie() -> None:
    tie = logits([1.0, 1.0 + LOGITS_TOLERANCE / 2, 0.0])
    assert compared([0], tie, tie)[0]
    clear = logits([1.0, 2.0, 0.0])
    assert not compared([0], clear, clear)[0]


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
