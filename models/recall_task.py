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

KEY_LETTERS = 3
VALUE_LETTERS = 3
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
