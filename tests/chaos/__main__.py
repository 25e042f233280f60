"""Breaks a running fleet for a while and prints what came of it:

python -m tests.chaos --seconds 600 --seed 1 --json OUT
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tests.chaos.faults import FAULTS
from tests.chaos.run import Result, run
from tests.e2e.engine_planes import save_byte_model


def report(result: Result) -> str:
    """How often each fault was there, what came of it, and what was wrong."""
    counts = [f"{name:16} {result.num_faults[name]:5}" for name in FAULTS]
    summary = (
        f"{result.num_phases} phases, {sum(result.num_faults.values())} faults,"
        f" {result.num_answers} answers, {len(result.wrong)} wrong,"
        f" {result.num_engine_restarts} engines restarted,"
        f" longest recovery {result.longest_recovery_s:.1f} s"
        f" (after {', '.join(result.slowest_phase)})"
    )
    return "\n".join((*counts, summary, *result.wrong)) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder that the processes' logs stay in")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        model = save_byte_model(Path(folder) / "model")
        result = asyncio.run(run(model, logs, seed=arguments.seed, seconds=arguments.seconds))
    sys.stdout.write(report(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
