"""What waits for planes that went away ends in time, and is answered once they are back."""

from __future__ import annotations

import http.client
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
from tests.helpers.programs import Program

RECOVERY_S = 4.0
SLOW_S = 5.0  # that a busy machine may take beside; a second round begins later


def answer(llm: LLM) -> list[int]:
    """As a server asks."""
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


@pytest.mark.nightly
def test_sigterm_ends_the_wait_for_planes_and_answers_who_waits(
    model: Path, tmp_path: Path
) -> None:
    port_file, log = tmp_path / "port", tmp_path / "engine.log"
    with Pair(model, tmp_path) as pair, ThreadPoolExecutor() as threads:
        process = Program(
            *("engine", "serve", "--model", str(model), "--model-name", "m"),
            *("--control-plane", pair.control.address, "--pool-id", POOL, "--timeout-s", "1"),
            *("--bind", "127.0.0.1:0", "--port-file", str(port_file), "--num-threads", "1"),
            out=log,
        )
        while not port_file.exists():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        pair.data.kill()
        waiting = threads.submit(completion, int(port_file.read_text()))
        while "step failed" not in log.read_text():
            time.sleep(0.1)
        process.terminate()
        began_s = time.monotonic()
        assert waiting.result() == 503
        assert process.wait(20) == 128 + signal.SIGTERM
        assert time.monotonic() - began_s < ATTEMPT_S + SLOW_S
        assert "the engine failed" not in log.read_text()


def completion(port: int) -> int:
    """The status of one completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    body = json.dumps({"model": "m", "prompt": "a prompt", "max_tokens": 2})
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    status = connection.getresponse().status
    connection.close()
    return status
