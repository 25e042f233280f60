"""Prompts for models/recall, without any engine's packages."""

from __future__ import annotations

import random
from typing import Final

NUM_PROMPTS: Final = 6


def prompts_of(seed: int) -> list[list[int]]:
    """Return questions about one of many pairs, as token ids; no two begin alike."""
    rng, prompts = random.Random(seed), []
    for i in range(NUM_PROMPTS):
        words = [["".join(rng.choices("abcdefgh", k=3)) for _ in "kv"] for _ in range(45 + 4 * i)]
        text = "".join(f"{key}={value};" for key, value in words)
        prompts.append([ord(letter) + 3 for letter in f"{text}?{rng.choice(words)[0]}="])
    return prompts
