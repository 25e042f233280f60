"""Sends both planes requests that were changed at random, and prints what came of it:

python -m tests.fuzz --inputs 1000000 --seed 1
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.fuzz.fuzzer import Result
from tests.fuzz.run import run


def report(result: Result) -> str:
    """Statuses, how often each came, and what was found."""
    counts = [f"{code:20} {num:9}" for code, num in sorted(result.answers.items())]
    per_s = result.num_inputs / result.seconds
    summary = f"{result.num_inputs} inputs, {per_s:.0f} a second, {len(result.found)} finds"
    return "\n".join((*counts, summary, *result.found)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run(Path(folder), num_inputs=arguments.inputs, seed=arguments.seed))
    sys.stdout.write(report(result))
    return 1 if result.found else 0


if __name__ == "__main__":
    sys.exit(main())
