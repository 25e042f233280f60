"""What the demonstration asks: questions about facts that stand far back in the prompt."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.request import SamplingParams
from models.recall_task import VALUE_LETTERS, Facts

ANSWER_LETTERS = VALUE_LETTERS + 1  # the value and the semicolon that ends it


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt and what is right. ``params.temperature`` 0 means that it is compared."""

    prompt: str
    answer: str
    params: SamplingParams

    @property
    def is_greedy(self) -> bool:
        """Whether transformers must give the very same tokens."""
        return self.params.temperature == 0

    def is_right(self, text: str) -> bool:
        """Whether ``text`` begins with the value asked for, and ends it where it ends."""
        return text[:ANSWER_LETTERS] == self.answer[:ANSWER_LETTERS]


def questions(seed: int, *, quick: bool) -> list[Question]:
    """Groups that share one context each, contexts asked once, and some with four continuations.

    Long contexts and short ones alternate, so that some fit into a small host tier and some do not.
    """
    rng = random.Random(seed)
    num_groups, num_single, num_sampled = (3, 6, 2) if quick else (6, 14, 4)
    asked: list[Question] = []
    for i in range(num_groups):
        facts = Facts.random(rng, rng.randint(36, 50) if i % 2 == 0 else rng.randint(14, 24))
        for _ in range(3 if quick else 5):
            asked.append(_recitation(rng, facts, rng.choice((24, 40, 64))))
    for _ in range(num_single):
        facts = Facts.random(rng, rng.randint(12, 50))
        asked.append(_recitation(rng, facts, rng.choice((24, 40, 64))))
    for i in range(num_sampled):
        facts = Facts.random(rng, rng.randint(12, 30))
        question = _recitation(rng, facts, 32)
        params = SamplingParams(max_tokens=32, temperature=0.8, top_k=20, top_p=0.95, n=4, seed=i)
        asked.append(Question(question.prompt, question.answer, params))
    return _interleaved(rng, asked)


def _recitation(rng: random.Random, facts: Facts, max_tokens: int) -> Question:
    """Ask for one fact and let the text run on over the facts that follow it."""
    index = rng.randrange(len(facts.pairs))
    params = SamplingParams(max_tokens=max_tokens, stop=(".",), record_logits=True)
    return Question(facts.text + facts.question(index), facts.recitation(index), params)


def _interleaved(rng: random.Random, asked: list[Question]) -> list[Question]:
    """In random order, so that a group's questions find its blocks cached, evicted or swapped."""
    rng.shuffle(asked)
    return asked
