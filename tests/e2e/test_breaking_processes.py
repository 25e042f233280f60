"""Processes that sleep, die and come back at bad moments: the same answers, nothing left held."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_planes import POOL, Pair, Process, wait_until

from kvplane.results import PoolInfo
from kvplane.sync import ControlClient
from tests.helpers.programs import Program

LEASE_S = 2.0
PROMPTS = ["a prompt of a few blocks, so that there is something to hold; " * 3, "a short one"]
MAX_TOKENS = 250


def describe(pair: Pair, pool: str = POOL) -> PoolInfo:
    with ControlClient(pair.control.address) as client:
        return client.get_pool(pool)


def counters_of(pair: Pair) -> dict[str, int]:
    with ControlClient(pair.control.address) as client:
        return client.get_counters(POOL)


def num_held(pool: PoolInfo) -> int:
    return sum(tier.num_held_blocks for tier in pool.usage)


def num_in_use(pool: PoolInfo) -> int:
    """Blocks held or retired. Every block must be in one state."""
    for tier in pool.usage:
        parts = (
            tier.num_free_blocks, tier.num_cached_blocks, tier.num_held_blocks,
            tier.num_retired_blocks,
        )  # fmt: skip
        assert min(parts) >= 0
        assert sum(parts) == tier.num_blocks
    return sum(t.num_held_blocks + t.num_retired_blocks for t in pool.usage)


class Engine:
    """``engine generate`` as a process, its answers in a file."""

    def __init__(self, model: Path, pair: Pair, folder: Path, *more: str, pool: str = POOL) -> None:
        self.out = folder / f"answers-{time.monotonic_ns()}"
        self.log = self.out.with_suffix(".log")
        prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
        self.process = Program(
            *("engine", "generate", "--model", str(model)),
            *("--control-plane", pair.control.address, "--pool-id", pool),
            *("--max-tokens", str(MAX_TOKENS), "--ignore-eos"),
            *("--no-probe", "--num-threads", "1", *prompts, *more),
            out=self.out,
            err=self.log,
        )

    def answers(self) -> str:
        assert self.process.wait(90) == 0, self.log.read_text()
        return self.out.read_text()


@pytest.fixture
def pair(model: Path, tmp_path: Path) -> Iterator[Pair]:
    with Pair(model, tmp_path, lease_s=LEASE_S, num_device_blocks=40) as running:
        yield running


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("calm")
    with Pair(model, folder, lease_s=LEASE_S) as pair:
        return Engine(model, pair, folder).answers()


def is_busy(pair: Pair, pool: str = POOL) -> bool:
    return num_held(describe(pair, pool)) > 3


EMBEDDED = ("--data-plane", "embedded", "--num-device-blocks", "40")


@pytest.mark.nightly  # sleeps for a lease; sessions that expire have tests of theirs on push
@pytest.mark.parametrize(
    ("more", "after_s"), [((), 0.0), ((), 0.07), (EMBEDDED, 0.0), (EMBEDDED, 0.07)]
)
def test_an_engine_that_slept_past_its_lease_gives_the_same_answers(
    model: Path, pair: Pair, tmp_path: Path, calm: str, more: tuple[str, ...], after_s: float
) -> None:
    pool = "embedded" if more else POOL
    engine = Engine(model, pair, tmp_path, *more, pool=pool)
    wait_until(lambda: is_busy(pair, pool))
    time.sleep(after_s)
    engine.process.send_signal(signal.SIGSTOP)
    time.sleep(LEASE_S * 1.5)
    if not more:
        wait_until(lambda: num_in_use(describe(pair)) == 0)
    engine.process.send_signal(signal.SIGCONT)
    assert engine.answers() == calm
    assert "session reopened" in engine.log.read_text()
    if not more:
        wait_until(lambda: num_in_use(describe(pair)) == 0)


Disturbance = Callable[[Pair, Engine], None]


def asleep(*victims: str) -> Disturbance:
    """Planes that sleep past lease and heartbeats."""

    def disturb(pair: Pair, engine: Engine) -> None:
        pids = [getattr(pair, victim).pid for victim in victims]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(LEASE_S * 3)
        assert engine.process.poll() is None, "it must still be at work"
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

    return disturb


def kill_the_control_plane_thrice(pair: Pair, _: Engine) -> None:
    for delay_s in (0.0, 0.9, 1.6):
        time.sleep(delay_s)
        pair.control.kill()
        pair.control.start()


def kill_the_data_plane(pair: Pair, _: Engine) -> None:
    pair.data.kill()
    pair.data.start()


def restart_the_data_plane_without_a_control_plane(pair: Pair, _: Engine) -> None:
    pair.control.kill()
    pair.data.kill()
    pair.data.start()
    time.sleep(3)
    pair.control.start()


def nightly(disturb: Disturbance, name: str) -> Any:
    return pytest.param(disturb, id=name, marks=pytest.mark.nightly)


@pytest.mark.parametrize(
    "disturb",
    [
        pytest.param(kill_the_data_plane, id="data killed"),
        pytest.param(kill_the_control_plane_thrice, id="control killed"),
        nightly(restart_the_data_plane_without_a_control_plane, "both killed"),
        nightly(asleep("control"), "control asleep"),
        nightly(asleep("data"), "data asleep"),
        nightly(asleep("control", "data"), "both asleep"),
    ],
)
def test_planes_that_die_or_sleep_change_no_answer(
    model: Path,
    pair: Pair,
    tmp_path: Path,
    calm: str,
    disturb: Disturbance,
    request: pytest.FixtureRequest,
) -> None:
    engine = Engine(model, pair, tmp_path)
    wait_until(lambda: is_busy(pair))
    disturb(pair, engine)
    assert engine.answers() == calm
    if "killed" in request.node.callspec.id:
        assert "session reopened" in engine.log.read_text()
    wait_until(lambda: num_in_use(describe(pair)) == 0)


@pytest.mark.parametrize("kill_after_s", [0.0, pytest.param(0.13, marks=pytest.mark.nightly)])
def test_an_engine_killed_mid_step_leaves_no_block_held_after_its_lease(
    model: Path, pair: Pair, tmp_path: Path, calm: str, kill_after_s: float
) -> None:
    engine = Engine(model, pair, tmp_path)
    wait_until(lambda: is_busy(pair))
    time.sleep(kill_after_s)
    assert engine.process.poll() is None, "it must still be at work"
    engine.process.kill()
    engine.process.wait()
    assert num_in_use(describe(pair)) > 0
    wait_until(lambda: num_in_use(describe(pair)) == 0, LEASE_S + 5.0)
    counters = counters_of(pair)
    assert (counters["sessions"], counters['sequences{state="device"}']) == (0, 0)
    assert Engine(model, pair, tmp_path).answers() == calm


@pytest.mark.nightly
def test_a_killed_embedded_engine_leaves_nothing_held_and_another_takes_its_pool(
    model: Path, pair: Pair, tmp_path: Path, calm: str
) -> None:
    engine = Engine(model, pair, tmp_path, *EMBEDDED, pool="embedded")
    wait_until(lambda: is_busy(pair, "embedded"))
    engine.process.kill()
    engine.process.wait()
    # Its data plane died with it, and can not receipt its plans: the blocks stay retired.
    wait_until(lambda: num_held(describe(pair, "embedded")) == 0)
    assert Engine(model, pair, tmp_path, *EMBEDDED, pool="embedded").answers() == calm
    assert Engine(model, pair, tmp_path).answers() == calm


@pytest.mark.nightly
def test_two_engines_that_each_want_more_than_half_of_the_pool_both_come_to_an_end(
    model: Path, tmp_path: Path, calm: str
) -> None:
    longest = -(-(len(PROMPTS[0]) + MAX_TOKENS) // 16)
    blocks = {"num_device_blocks": 2 * longest - 2, "num_host_blocks": 4}
    with Pair(model, tmp_path, lease_s=LEASE_S, **blocks) as pair:
        engines = [Engine(model, pair, tmp_path) for _ in range(2)]
        assert [engine.answers() for engine in engines] == [calm, calm]
        assert counters_of(pair)["max_held_blocks"] > longest
        wait_until(lambda: num_in_use(describe(pair)) == 0)


@pytest.mark.nightly  # sleeps; shards that are taken over have tests of theirs on push
def test_a_data_plane_that_was_taken_over_while_it_slept_ends_and_says_why(
    model: Path, tmp_path: Path
) -> None:
    """Started again, as by a supervisor, it has a newer epoch and takes the shard back."""
    control = Process("control_plane", tmp_path / "control.log", "--heartbeat-s", "0.5").start()
    common = ("--control-plane", control.address, "--model", str(model), "--pool-id", POOL)
    first, second = (
        Process("data_plane", tmp_path / f"{name}.log", *common, "--num-device-blocks", "8")
        for name in ("first", "second")
    )

    def holder() -> str:
        with ControlClient(control.address) as client:
            (shard,) = client.get_pool(POOL).shards
            return shard.address if shard.connected else ""

    try:
        first.start()
        wait_until(lambda: holder() == first.address)
        os.kill(first.pid, signal.SIGSTOP)
        second.start()
        wait_until(lambda: holder() == second.address)
        second.stop()
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(30) == 1
        told = (tmp_path / "first.log").read_text()
        assert told.count("STALE_EPOCH") == 1
        last = told.splitlines()[-1]
        assert last.startswith(f"data_plane: error: shard 0 of pool '{POOL}' is registered by a")
        assert "This process ends" in last
        first.start()
        wait_until(lambda: holder() == first.address)
    finally:
        for process in (first, second, control):
            process.kill()
