"""Puts load on both planes: prompts that share prefixes, answered by a model in batches. When a
plane restarts, the engine opens another session.

    python examples/load.py 127.0.0.1:50051 --model models/recall --duration-s 60
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path

from kvplane.engine import LLM, SamplingParams

BATCH = 96  # prompts that are asked at once
NUM_PREFIXES = 24
PREFIX_TOKENS = 256
MAX_OWN_TOKENS = 128


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("control_plane", nargs="?", default="127.0.0.1:50051")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--duration-s", type=float, default=10.0)
    return parser.parse_args(argv)


def main(given: argparse.Namespace) -> None:
    rng = random.Random(1)
    prefixes = [rng.choices(range(97, 123), k=PREFIX_TOKENS) for _ in range(NUM_PREFIXES)]
    params = SamplingParams(max_tokens=32, ignore_eos=True)
    until_s = time.monotonic() + given.duration_s
    with LLM(given.model, control_plane=given.control_plane) as llm:
        while time.monotonic() < until_s:
            own = [rng.choices(range(97, 123), k=rng.randint(1, MAX_OWN_TOKENS))
                   for _ in range(BATCH)]  # fmt: skip
            llm.generate([rng.choice(prefixes) + tokens for tokens in own], params)
    cached = f"{llm.stats.num_cached_prompt_tokens} of {llm.stats.num_prompt_tokens} prompt tokens"
    lost = f"{llm.stats.num_reopened_sessions} sessions lost"
    print(f"{llm.stats.num_requests} requests, {cached} cached, {lost}")


if __name__ == "__main__":
    main(arguments())
