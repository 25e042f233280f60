"""Processes that die and come back at bad moments: the same answers, nothing left held. Those that
sleep or die together are met by ``tests/chaos``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engine_planes import POOL, Pair, Process, data_plane, num_in_use, wait_until

from kvplane.results import PoolInfo
from kvplane.sync import ControlClient
from tests.helpers.programs import Program

LEASE_S = 2.0
PROMPTS = ["a prompt of a few blocks, so that there is something to hold; " * 3, "a short one"]
MAX_TOKENS = 250


def describe(pair: Pair) -> PoolInfo:
    with ControlClient(pair.control.address) as client:
        return client.get_pool(POOL)


def counters_of(pair: Pair) -> dict[str, int]:
    with ControlClient(pair.control.address) as client:
        return client.get_counters(POOL)


class Engine:
    """``engine generate`` as a process, its answers in a file."""

    def __init__(self, model: Path, pair: Pair, folder: Path) -> None:
        self.out = folder / f"answers-{time.monotonic_ns()}"
        self.log = self.out.with_suffix(".log")
        prompts = [part for prompt in PROMPTS for part in ("--prompt", prompt)]
        self.process = Program(
            *("engine", "generate", "--model", str(model)),
            *("--control-plane", pair.control.address, "--pool-id", POOL),
            *("--max-tokens", str(MAX_TOKENS), "--ignore-eos"),
            *("--no-probe", "--num-threads", "1", *prompts),
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


def is_busy(pair: Pair) -> bool:
    return sum(tier.num_held_blocks for tier in describe(pair).usage) > 3


def kill_the_control_plane_thrice(pair: Pair) -> None:
    for delay_s in (0.0, 0.9, 1.6):
        time.sleep(delay_s)
        pair.control.kill()
        pair.control.start()


def kill_the_data_plane(pair: Pair) -> None:
    pair.data.kill()
    pair.data.start()


@pytest.mark.parametrize("disturb", [kill_the_data_plane, kill_the_control_plane_thrice])
def test_planes_that_die_change_no_answer(
    model: Path, pair: Pair, tmp_path: Path, calm: str, disturb: Callable[[Pair], None]
) -> None:
    engine = Engine(model, pair, tmp_path)
    wait_until(lambda: is_busy(pair))
    disturb(pair)
    assert engine.answers() == calm
    assert "session reopened" in engine.log.read_text()
    wait_until(lambda: num_in_use(describe(pair)) == 0)


def test_an_engine_killed_mid_step_leaves_no_block_held_after_its_lease(
    model: Path, pair: Pair, tmp_path: Path, calm: str
) -> None:
    engine = Engine(model, pair, tmp_path)
    wait_until(lambda: is_busy(pair))
    assert engine.process.poll() is None, "it must still be at work"
    engine.process.kill()
    engine.process.wait()
    assert num_in_use(describe(pair)) > 0
    wait_until(lambda: num_in_use(describe(pair)) == 0, LEASE_S + 5.0)
    counters = counters_of(pair)
    assert (counters["sessions"], counters['sequences{state="device"}']) == (0, 0)
    assert Engine(model, pair, tmp_path).answers() == calm


@pytest.mark.nightly  # sleeps; shards that are taken over have tests of theirs on push
def test_a_data_plane_that_was_taken_over_while_it_slept_ends_and_says_why(
    model: Path, tmp_path: Path
) -> None:
    """Started again, as by a supervisor, it has a newer epoch and takes the shard back."""
    control = Process("control_plane", tmp_path / "control.log", "--heartbeat-s", "0.5").start()
    first, second = (
        data_plane(control.address, model, tmp_path / f"{name}.log", "--num-device-blocks", "8")
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
