"""One cluster, one fleet and one engine's answers, shared by all tests of the fleet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_cluster import POOL, UP_S, SimulatedCluster

from engine import LLM
from tests.helpers.byte_model import save_byte_model
from tests.helpers.same_answers import check_same_answers


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[SimulatedCluster]:
    with SimulatedCluster(2) as cluster:
        from kvplane.integrations.ray import fleet

        fleet.connect(cluster.address)
        yield cluster
        fleet.disconnect()


@pytest.fixture
def addresses(cluster: SimulatedCluster, model: Path) -> str:
    """Addresses of the control planes of a fleet that is up: two pools of two shards."""
    from kvplane.integrations.ray import fleet
    from kvplane.integrations.ray.placement import FleetShape

    shape = FleetShape(
        pools=2,
        shards=2,
        control="--grace-s 0.2",
        data=f"--model {model} --num-device-blocks 64 --num-threads 1",
        timeout_s=UP_S,
    )
    return ",".join(fleet.up(shape))


@pytest.fixture
def same_answers_after(addresses: str, model: Path) -> Callable[[Callable[[], None]], LLM]:
    """Return a function that breaks something while an engine answers; its argument breaks it."""

    def check(broken: Callable[[], None]) -> LLM:
        with LLM(
            model, control_plane=addresses, pool_id=POOL, probe=False, num_threads=1,
            timeout_s=5.0, recovery_timeout_s=UP_S,
        ) as engine:  # fmt: skip
            check_same_answers(engine, broken)
        return engine

    return check
