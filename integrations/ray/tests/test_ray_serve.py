"""Ray Serve sends calls to the replica whose pool has their prompts cached."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import UP_S

from kvplane.integrations.ray.replica_picker import ReplicaPicker
from kvplane.integrations.router.picker import Picker

pytestmark = [
    pytest.mark.fleet,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore"),  # Ray's
]
POOLS = ("pool-0", "pool-1")
NUM_PROMPTS = 6
PROMPT_TOKENS = 100
ANSWER_TOKENS = 4
APP = "engines"


class Replica:
    """An engine with the pool of its rank."""

    def __init__(self, model: str, control_plane: str) -> None:
        from ray import serve

        from engine import LLM

        self._pool = POOLS[serve.get_replica_context().rank.rank]
        self._llm = LLM(
            model,
            control_plane=control_plane,
            pool_id=self._pool,
            probe=False,
            num_threads=1,
            recovery_timeout_s=UP_S,
        )

    def record_replica_metadata(self) -> dict[str, str]:
        return {"kvplane_pool": self._pool}

    def __call__(self, request: dict[str, Any]) -> tuple[str, list[int]]:
        from engine import SamplingParams

        params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
        output = self._llm.generate([request["prompt"]], [params])[0]
        return self._pool, list(output.outputs[0].token_ids)


@pytest.fixture
def pickers(monkeypatch: pytest.MonkeyPatch) -> list[ReplicaPicker]:
    """Return the pickers of this process's routers. Serve copies the routers' class."""
    made: list[ReplicaPicker] = []
    original = ReplicaPicker.__init__

    def init(self: ReplicaPicker, picker: Picker) -> None:
        original(self, picker)
        made.append(self)

    monkeypatch.setattr(ReplicaPicker, "__init__", init)
    return made


@pytest.fixture
def ask(
    addresses: str, model: Path, pickers: list[ReplicaPicker]
) -> Iterator[Callable[[list[int]], tuple[str, list[int]]]]:
    """Call the deployment; return the pool of the replica that answered, and the answer."""
    from ray import cloudpickle, serve
    from ray.serve.config import RequestRouterConfig

    cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import it
    deployment = serve.deployment(
        num_replicas=len(POOLS),
        ray_actor_options={"num_cpus": 0},
        request_router_config=RequestRouterConfig(
            request_router_class="kvplane.integrations.ray.request_router.KvplaneRequestRouter",
            request_router_kwargs={"control_plane": addresses},
        ),
    )(Replica)
    serve.start(proxy_location="Disabled")
    try:
        handle = serve.run(deployment.bind(str(model), addresses), name=APP, route_prefix=None)
        yield lambda prompt: handle.remote({"prompt": prompt}).result(timeout_s=UP_S)
    finally:
        serve.shutdown()


def test_a_prompt_goes_where_it_is_cached(ask, pickers: list[ReplicaPicker]) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 256) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    first = [ask(prompt) for prompt in prompts]
    pools = [pool for pool, _ in first]
    assert {*pools} == {*POOLS}, "one replica got everything"
    picker = pickers[0].picker

    def num_known() -> int:
        return sum(
            pool in picker.indexes and picker.indexes[pool].num_cached_tokens(prompt) > 0
            for pool, prompt in zip(pools, prompts, strict=True)
        )

    deadline_s = time.monotonic() + UP_S
    while num_known() < NUM_PROMPTS:
        assert time.monotonic() < deadline_s, f"of {NUM_PROMPTS} prompts {num_known()} are known"
        time.sleep(0.05)
    for _ in range(3):
        for i in rng.sample(range(NUM_PROMPTS), NUM_PROMPTS):
            assert ask(prompts[i]) == first[i]
    deadline_s = time.monotonic() + UP_S
    while any(load.num_open for load in picker.loads.values()):
        assert time.monotonic() < deadline_s, "requests stay open"
        time.sleep(0.05)
