"""Workloads made from a seed, each of a kind that favours one way of evicting over another.

| name | requests |
|---|---|
| scan | hot prompts; in every other stretch, four in five requests are read only once |
| shift | prompts of unequal popularity; the most popular ones change seven times |
| loop | the same prompts in the same order, again and again |
| bursts | chat, and now and then 150 prompts that are read only once |
| zipf | prompts of unequal popularity that does not change |
| agents | few conversations of many turns on long prompts |
| chat | many conversations of few turns on short prompts |
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import accumulate, count
from typing import Final

from benchmarks.replay.traces import Request

_HOUR_S: Final = 3600.0


class _Workload:
    """Draws from a seed; every id that it makes is new."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._next_id = count()

    def ids(self, num: int) -> list[int]:
        return [next(self._next_id) for _ in range(num)]

    def times(self, num: int, per_s: float) -> list[float]:
        return list(accumulate(self.random.expovariate(per_s) for _ in range(num)))


def _scan(work: _Workload) -> list[Request]:
    hot = [work.ids(40) for _ in range(60)]
    requests = []
    for i, time_s in enumerate(work.times(6000, per_s=2)):
        if i // 500 % 2 and work.random.random() < 0.8:
            ids = work.ids(work.random.randint(5, 60))
        else:
            ids = work.random.choice(hot) + work.ids(2)
        requests.append(Request(time_s, ids))
    return requests


def _loop(work: _Workload) -> list[Request]:
    prompts = [work.ids(30) for _ in range(100)]
    return [Request(float(i), prompts[i % 100]) for i in range(3000)]


def _zipf(work: _Workload, step: int = 0) -> list[Request]:
    """Make requests; ranks of popularity shift by ``step`` prompts with each eighth of them."""
    num_requests = 8000
    times = work.times(num_requests, per_s=3)
    prompts = [work.ids(work.random.randint(5, 60)) for _ in range(400 + 8 * step)]
    weights = [1 / (1 + rank) for rank in range(400)]
    ranks = work.random.choices(range(400), weights, k=num_requests)
    return [
        Request(time_s, prompts[rank + i * 8 // num_requests * step] + work.ids(3))
        for i, (time_s, rank) in enumerate(zip(times, ranks, strict=True))
    ]


def _shift(work: _Workload) -> list[Request]:
    return _zipf(work, step=100)


def _conversations(
    work: _Workload, num: int, again: float, pause: float, first: float, *, shared: int
) -> list[Request]:
    """``again``: probability of another turn. Logarithms of medians: ``pause`` of the seconds
    before it, ``first`` of the ids of the first turn. ``shared``: ids of each of three prompts that
    conversations begin with.
    """
    requests = []
    beginnings = [work.ids(shared) for _ in range(3)]
    for _ in range(num):
        time_s = work.random.random() * _HOUR_S
        ids = work.random.choice(beginnings) + work.ids(
            int(work.random.lognormvariate(first, 1.0)) + 1
        )
        requests.append(Request(time_s, ids))
        while work.random.random() < again:
            time_s += work.random.lognormvariate(pause, 1.0)
            ids = ids + work.ids(int(work.random.lognormvariate(1.0, 0.8)) + 1)
            requests.append(Request(time_s, ids))
    return requests


def _agents(work: _Workload) -> list[Request]:
    return _conversations(work, 60, again=0.97, pause=2.5, first=3.5, shared=30)


def _chat(work: _Workload) -> list[Request]:
    return _conversations(work, 1500, again=0.75, pause=4.0, first=2.5, shared=8)


def _bursts(work: _Workload) -> list[Request]:
    requests = _conversations(work, 800, again=0.8, pause=4.0, first=2.5, shared=0)
    for start_s in work.times(12, per_s=1 / 300):
        for i in range(150):
            requests.append(Request(start_s + 0.05 * i, work.ids(work.random.randint(5, 40))))
    return requests


WORKLOADS: Final[dict[str, Callable[[_Workload], list[Request]]]] = {
    "scan": _scan,
    "shift": _shift,
    "loop": _loop,
    "bursts": _bursts,
    "zipf": _zipf,
    "agents": _agents,
    "chat": _chat,
}


def make_requests(name: str, seed: int) -> list[Request]:
    """Return a workload's requests in the order of time; the same for the same seed."""
    return sorted(WORKLOADS[name](_Workload(seed)), key=lambda request: request.time_s)
