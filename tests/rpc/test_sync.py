"""The client for programs without an event loop is the asynchronous one, call for call."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from kvplane import Tensor, ops, sync
from kvplane.errors import InvalidRequestError, PoolNotFoundError
from kvplane.prefixes import BlocksStored, CaughtUp
from tests.helpers.both_planes import LAYOUT, POOL, Planes


def decode(planes: Planes) -> list[str]:
    """What a newcomer does, and what of it can be seen."""
    seen = []
    qkv = Tensor("float32", (12, 1, 8), bytes(384))
    with sync.ControlClient(planes.control.address) as control:
        with control.open_session(POOL) as session, session.open_execution() as execution:
            events = control.watch_prefixes(POOL)
            step = session.run(ops.admit(1, [5] * 12))
            execution.start(step.plan)
            with pytest.raises(InvalidRequestError, match="receipt: is None"):
                session.add_receipt(None)
            for layer in execution.layers:
                execution.layer(layer, qkv, qkv, qkv)
            session.submit_receipts()
            (found,) = control.find_prefix([5] * 12)
            retained = control.retain_prefix(POOL, [5] * 12, time_to_live_s=9)
            seen.append(f"cached {found.num_cached_tokens}, blocks retained {retained}")
            declared = [(x, name) for x in (session, execution) for name in type(x).__annotations__]
            seen.append(f"lacks {[name for x, name in declared if not hasattr(x, name)]}")
            kinds = []
            while BlocksStored not in kinds or kinds[-1] is not CaughtUp:
                kinds.append(type(next(events)))
            events.close()
            again = session.reopen()
            seen.append(f"reopened {again.id != session.id}, {again.layout == LAYOUT}")
            again.close()
            seen.append(f"sessions {len(control.list_sessions(POOL))}")
        with pytest.raises(PoolNotFoundError):
            control.get_pool("nothing")
    return seen


async def test_a_thread_admits_attends_and_finds_its_prompt_cached(planes: Planes) -> None:
    seen = await asyncio.wait_for(asyncio.to_thread(decode, planes), 30)
    assert seen == [
        "cached 8, blocks retained 1",
        "lacks []",
        "reopened True, True",
        "sessions 0",
    ]


async def test_several_threads_share_a_client(planes: Planes) -> None:
    def use(control: sync.ControlClient, threads: set[str]) -> None:
        threads.add(threading.current_thread().name)
        assert control.list_pools() == [POOL]

    threads: set[str] = set()
    control = await asyncio.to_thread(sync.ControlClient, planes.control.address)
    await asyncio.gather(*(asyncio.to_thread(use, control, threads) for _ in range(8)))
    await asyncio.to_thread(control.close)
    assert len(threads) > 1


PROGRAM = """
from kvplane import ops
from kvplane.sync import ControlClient

with ControlClient("127.0.0.1:50051") as control, control.open_session("default") as session:
    with session.open_execution() as execution:
        step = session.run(ops.admit(1, [97, 98, 99]))
        execution.start(step.plan)
        print(execution.num_tokens + session.id)
        for receipt in execution.receipts:
            session.add_receipt(receipt)
"""
WRONG = ("session.step(7)", "session.nothing", "execution.start(step)")


@pytest.mark.nightly  # mypy reads the package anew, which takes several seconds
def test_its_types_are_those_of_the_client(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + "".join(f"        {line}\n" for line in WRONG))
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", str(program)]
    root = Path(__file__).parents[2]
    done: Any = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110)
    first = len(PROGRAM.splitlines()) + 1
    lines = [int(line.split(":")[1]) for line in done.stdout.splitlines() if ": error:" in line]
    assert lines == [first, first + 1, first + 2], done.stdout
