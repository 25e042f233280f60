"""Visits every state of small scenarios of both planes, and prints how many there are.

python -m tests.exhaustive --events 7
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.exhaustive.explorer import SETTINGS, explore


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=6)
    parser.add_argument("--only", choices=[*SETTINGS], help="one scenario")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else SETTINGS:
        begin_s = time.perf_counter()
        result = explore(SETTINGS[name], arguments.events)
        seconds = time.perf_counter() - begin_s
        sys.stdout.write(
            f"{name}: {result.num_states} states, {result.num_events} events,"
            f" up to {arguments.events} in a row, none wrong, {seconds:.1f} s\n"
        )


if __name__ == "__main__":
    main()
