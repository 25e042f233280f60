"""Random walks of machines whose rules have no arguments: many more rules a second than when
Hypothesis chooses them, and nothing to shrink.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

from tests.helpers.planes.planes_machine import PlanesMachine

NUM_RULES = 100
_OFTEN = {"step": 3, "serve": 3, "check_steps": 3, "run_plans": 3, "run_all_plans": 3}
_OFTEN |= {"submit_receipts": 3, "deliver_all": 3, "forget": 2, "write_files": 6}


def walk(machine: type[PlanesMachine], seeds: Iterable[int]) -> Counter[str]:
    """Take a walk of ``NUM_RULES`` rules for each seed; return what happened. Some walks choose
    some rules much more often than others.
    """
    happened: Counter[str] = Counter()
    for seed in seeds:
        happened += _walk(machine, seed)
    return happened


def _walk(machine: type[PlanesMachine], seed: int) -> Counter[str]:
    rng, walker, trail = Random(seed), machine(), list[str]()
    state = machine.setup_state()
    rules = {rule.function.__name__: rule for rule in state.rules}
    weights = {name: rng.choice([0.3, 1, 1, 3]) * _OFTEN.get(name, 1) for name in rules}
    (begin,) = state.initializers
    try:
        begin.function(walker, seed=rng.randrange(2**32), num_shards=rng.randint(1, 2))
        for _ in range(NUM_RULES):
            may = [n for n, rule in rules.items() if all(p(walker) for p in rule.preconditions)]
            (name,) = rng.choices(may, [weights[n] for n in may])
            trail.append(name)
            rules[name].function(walker)
            walker.all_is_sound()
        walker.teardown()
    except BaseException as error:
        error.add_note(f"{machine.__name__} of seed {seed}, after {', '.join(trail)}")
        raise
    return walker.world.happened
