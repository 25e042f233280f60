"""Requests that wait for planes that went away end in time, and are answered once they are back."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from engine_planes import POOL, Pair

from engine import LLM, SamplingParams
from engine.running.core import ATTEMPT_S
from kvplane.errors import KvplaneError
from tests.helpers.http_programs import HttpProgram
from tests.helpers.waiting import wait_until

RECOVERY_S = 4.0
SLOW_S = 5.0  # that a busy machine may take beside; a second round begins later


def answer(llm: LLM) -> list[int]:
    """Ask as a server does."""
    request_id = llm.submit("a prompt", SamplingParams(max_tokens=4, ignore_eos=True))
    try:
        while (output := llm.take_output(request_id)) is None:
            llm.step()
    except KvplaneError:
        llm.abort(request_id)
        raise
    return output.outputs[0].token_ids


@pytest.mark.parametrize(
    "victims", [("data",), pytest.param(("control", "data"), marks=pytest.mark.nightly)]
)
def test_requests_fail_within_the_time_for_recovery_and_are_answered_once_planes_are_back(
    model: Path, tmp_path: Path, victims: tuple[str, ...]
) -> None:
    with Pair(model, tmp_path) as pair:
        waits = {"timeout_s": 10.0, "recovery_timeout_s": RECOVERY_S}
        with LLM(model, control_plane=pair.control.address, pool_id=POOL, **waits) as llm:
            calm = answer(llm)
            for victim in victims:
                getattr(pair, victim).kill()
            for _ in victims:  # beside the control plane, a second request does not wait for more
                began_s = time.monotonic()
                with pytest.raises(KvplaneError):
                    answer(llm)
                assert time.monotonic() - began_s < RECOVERY_S + SLOW_S, "a second round was begun"
            for victim in victims:
                getattr(pair, victim).start()
            pair.wait_ready()
            assert answer(llm) == calm  # by a session that its first step opens


def test_sigterm_ends_the_wait_for_a_control_plane_that_is_away(
    model: Path, tmp_path: Path
) -> None:
    program = HttpProgram(
        *(tmp_path, "engine", "engine", "serve", "--model", str(model), "--num-threads", "1"),
        *("--control-plane", "127.0.0.1:9", "--recovery-timeout-s", "40"),
    )
    program.start()
    wait_until(lambda: program.log.exists() and "waiting" in program.log.read_text())
    program.process.terminate()
    assert program.process.wait(10.0) == 128 + signal.SIGTERM
    assert "Traceback" not in program.log.read_text()


def test_health_says_whether_requests_can_be_served(model: Path, tmp_path: Path) -> None:
    with Pair(model, tmp_path) as pair:
        program = HttpProgram(
            *(tmp_path, "engine", "engine", "serve", "--model", str(model), "--num-threads", "1"),
            *("--control-plane", pair.control.address, "--pool-id", POOL, "--timeout-s", "1"),
        )
        program.start()
        try:
            program.wait()
            assert program.request("GET", "/health")[0] == 200
            for plane in (pair.control, pair.data):
                plane.kill()
                wait_until(lambda: program.request("GET", "/health")[0] == 503)
                assert program.request("GET", "/healthz")[0] == 200
                plane.start()
                wait_until(lambda: program.request("GET", "/health")[0] == 200)
        finally:
            program.stop()


@pytest.mark.nightly
def test_sigterm_ends_the_wait_for_planes_and_answers_who_waits(
    model: Path, tmp_path: Path
) -> None:
    with Pair(model, tmp_path) as pair, ThreadPoolExecutor() as threads:
        program = HttpProgram(
            *(tmp_path, "engine", "engine", "serve", "--model", str(model), "--model-name", "m"),
            *("--control-plane", pair.control.address, "--pool-id", POOL, "--timeout-s", "1"),
            *("--num-threads", "1"),
            headers={"Content-Type": "application/json"},
        )
        program.start()
        program.wait()
        pair.data.kill()
        body = json.dumps({"model": "m", "prompt": "a prompt", "max_tokens": 2}).encode()
        waiting = threads.submit(program.request, "POST", "/v1/completions", body)
        wait_until(lambda: "step failed" in program.log.read_text())
        program.process.terminate()
        began_s = time.monotonic()
        assert waiting.result()[0] == 503
        assert program.process.wait(20) == 128 + signal.SIGTERM
        assert time.monotonic() - began_s < ATTEMPT_S + SLOW_S
        assert "the engine failed" not in program.log.read_text()
