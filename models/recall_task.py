"""The recall task: facts stand far back in the prompt, and the answer is a copy of one of them.

A context is a list of facts ``key=value;`` in random letters, closed by ``.``. A question is
``?key=``, and the only right continuation is the value, then the facts that follow it, letter for
letter. Keys and values are random, so nothing but attention over the right blocks can answer: a
wrong block is a wrong answer.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import NamedTuple

from engine.request import SamplingParams

KEY_LETTERS = 3
VALUE_LETTERS = 3
ANSWER_LETTERS = VALUE_LETTERS + 1  # the value and the semicolon that ends it
FACT_BYTES = KEY_LETTERS + VALUE_LETTERS + 2


@dataclass(frozen=True)
class Facts:
    """An ordered list of (key, value) pairs with distinct keys."""

    pairs: tuple[tuple[str, str], ...]

    @classmethod
    def random(cls, rng: random.Random, num_facts: int) -> Facts:
        """Draw ``num_facts`` pairs of random lower-case letters with distinct keys."""
        keys: dict[str, None] = {}
        while len(keys) < num_facts:
            keys["".join(rng.choices(string.ascii_lowercase, k=KEY_LETTERS))] = None
        return cls(
            tuple((k, "".join(rng.choices(string.ascii_lowercase, k=VALUE_LETTERS))) for k in keys)
        )

    @property
    def text(self) -> str:
        """The context: every fact in order, closed by a full stop."""
        return "".join(f"{k}={v};" for k, v in self.pairs) + "."

    def question(self, index: int) -> str:
        """Return the question whose answer starts with the value of pair ``index``."""
        return f"?{self.pairs[index][0]}="

    def recitation(self, index: int) -> str:
        """Return the right continuation of ``question(index)``: its value, then the later facts and
        the full stop.
        """
        key = self.pairs[index][0]
        tail = "".join(f"{k}={v};" for k, v in self.pairs[index:]) + "."
        return tail[len(key) + 1 :]


class Question(NamedTuple):
    """One prompt and its right answer, which is compared where it is greedy."""

    prompt: str
    answer: str
    params: SamplingParams

    @property
    def is_greedy(self) -> bool:
        """Whether there is one right answer, token for token."""
        return self.params.temperature == 0

    def is_right(self, text: str) -> bool:
        """Return whether ``text`` begins with the value asked for, and ends it where it ends."""
        return text[:ANSWER_LETTERS] == self.answer[:ANSWER_LETTERS]


def questions(seed: int, *, quick: bool) -> list[Question]:
    """Make groups that share a context each, contexts asked once, and some with four continuations.

    Long contexts and short ones alternate, so that some fit into a small host tier and some do not.
    The order is random, so that a group's questions find its blocks cached, evicted or swapped.
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
    rng.shuffle(asked)
    return asked


def _recitation(rng: random.Random, facts: Facts, max_tokens: int) -> Question:
    """Ask for one fact and let the text run on over the facts that follow it."""
    index = rng.randrange(len(facts.pairs))
    params = SamplingParams(max_tokens=max_tokens, stop=(".",), record_logits=True)
    return Question(facts.text + facts.question(index), facts.recitation(index), params)
