"""Two control planes of which one leads: it is killed, stopped and continued, and etcd's own leader
is killed under it. Engines and data planes follow, with all addresses in their settings.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from engine_planes import POOL, Process, data_plane

from engine import LLM
from kvplane import ControlClient, DataClient, ops
from kvplane.errors import StaleIncarnationError, UnavailableError
from kvplane.models.hf import layout_from_hf
from kvplane.transport.health import check
from tests.helpers.etcd_cluster import EtcdCluster
from tests.helpers.same_answers import check_same_answers

TTL_S = 2
ELECTIONS = ["file", pytest.param("etcd", marks=pytest.mark.nightly)]


class Fleet:
    """Two control planes, and a data plane that knows both."""

    def __init__(self, model: Path, folder: Path, election: str, ttl_s: int = TTL_S) -> None:
        self.controls = [
            Process(
                "control_plane", folder / f"control{i}.log", "--election", election,
                "--election-ttl-s", str(ttl_s), "--grace-s", "0.2",
            )
            for i in range(2)
        ]  # fmt: skip
        blocks = ("--num-device-blocks", "64")
        self.data = data_plane(self.addresses, model, folder / "data.log", *blocks)

    @property
    def addresses(self) -> str:
        return ",".join(each.address for each in self.controls)

    def __enter__(self) -> Fleet:
        for process in (*self.controls, self.data):
            process.start()
        return self

    def __exit__(self, *_: object) -> None:
        for process in (self.data, *self.controls):
            process.stop()

    async def leader(self, timeout_s: float = 30.0) -> Process:
        """The only one that is SERVING."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            serving = [each for each in self.controls if await is_serving(each)]
            if serving:
                (leader,) = serving
                return leader
        raise AssertionError("nobody leads")

    def other(self, process: Process) -> Process:
        return self.controls[1 - self.controls.index(process)]


async def is_serving(process: Process) -> bool:
    try:
        return await check(process.address, timeout_s=0.3) == "SERVING"
    except Exception:
        return False


@pytest.fixture
def election(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with ExitStack() as stack:
        if request.param == "file":
            yield f"file:{tmp_path}/leader"
        else:
            etcd = stack.enter_context(EtcdCluster(tmp_path, 1))
            yield f"etcd://{etcd.endpoints}/fleet"


def engine_on(fleet: Fleet, model: Path) -> LLM:
    return LLM(
        model, control_plane=fleet.addresses, pool_id=POOL, probe=False, num_threads=1,
        timeout_s=3.0, recovery_timeout_s=60.0,
    )  # fmt: skip


@pytest.mark.parametrize("election", ELECTIONS, indirect=True)
async def test_engines_follow_the_next_leader_and_answer_the_same(
    model, tmp_path, election
) -> None:
    with Fleet(model, tmp_path, election) as fleet:
        leader = await fleet.leader()
        assert not await is_serving(fleet.other(leader))
        with engine_on(fleet, model) as engine:
            check_same_answers(engine, leader.kill)
            assert engine.stats.num_reopened_sessions == 1
        assert await fleet.leader() is fleet.other(leader)


@pytest.mark.nightly
@pytest.mark.parametrize("election", ["etcd"], indirect=True)
async def test_a_leader_that_was_stopped_for_too_long_has_no_plan_accepted(
    model, tmp_path, election
) -> None:
    layout = layout_from_hf(model, block_size_tokens=16, dtype="float32")
    with Fleet(model, tmp_path, election) as fleet:
        former = await fleet.leader()
        async with ControlClient(former.address) as control:
            await control.wait_ready(POOL, 60)
            session = await control.open_session(POOL, layout)
            os.kill(former.pid, signal.SIGSTOP)
            try:
                stopped_s = time.monotonic()
                while await fleet_leader(fleet) is not fleet.other(former):
                    assert time.monotonic() - stopped_s < 20
            finally:
                os.kill(former.pid, signal.SIGCONT)
            async with ControlClient(fleet.other(former).address) as later:
                await later.wait_ready(POOL, 60)
            async with DataClient(fleet.data.address) as data:
                with pytest.raises((StaleIncarnationError, UnavailableError)):
                    # Either it still plans, and the plan is refused where the memory is, or it
                    # knows already that it does not lead.
                    plan = (await session.step([ops.admit(1, [1, 2, 3])], timeout_s=2)).plan
                    await (await data.open(session.grant)).start(plan)
                with pytest.raises(StaleIncarnationError):
                    await data.open(session.grant)
            await session.detach()
        assert former.wait(10) == 1
        former.start()  # as its supervisor would: it stands by
        assert await fleet.leader() is fleet.other(former)


async def fleet_leader(fleet: Fleet) -> Process | None:
    """A later leader: the stopped one does not answer."""
    for each in fleet.controls:
        if await is_serving(each):
            return each
    return None


@pytest.mark.nightly
async def test_the_death_of_etcds_own_leader_changes_nothing(model, tmp_path) -> None:
    with (
        EtcdCluster(tmp_path, 3) as etcd,
        Fleet(model, tmp_path, f"etcd://{etcd.endpoints}/fleet", ttl_s=5) as fleet,
    ):
        leader = await fleet.leader()
        async with ControlClient(fleet.addresses) as control:
            before = (await control.get_server_info()).incarnation
            etcd.kill_raft_leader()
            end_s = time.monotonic() + 7
            while time.monotonic() < end_s:
                assert (await control.get_server_info(timeout_s=1)).incarnation == before
        assert await fleet.leader() is leader
