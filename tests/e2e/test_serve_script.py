"""``make serve``: both planes until it is told to stop, and neither longer than the other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_planes import ROOT, free_port

from tests.helpers.waiting import wait_until

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
}


@pytest.fixture
def environ() -> dict[str, str]:
    return {
        **os.environ,
        "KVPLANE_CONTROL_PLANE_BIND": f"127.0.0.1:{free_port()}",
        "KVPLANE_CONTROL_PLANE_METRICS_PORT": "-1",
        "KVPLANE_CONTROL_PLANE_PAGE_PORT": str(free_port()),
        "KVPLANE_DATA_PLANE_BIND": f"127.0.0.1:{free_port()}",
        "KVPLANE_DATA_PLANE_METRICS_PORT": "-1",
        "KVPLANE_DATA_PLANE_NUM_DEVICE_BLOCKS": "16",
    }


@pytest.fixture
def serve(tmp_path: Path, environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The script, once it has said that both planes are up."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.serve", "--model", str(tmp_path)],
        cwd=ROOT,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert any("Ctrl-C" in line for line in process.stdout)
            yield process
        finally:
            process.terminate()
            process.wait(30)


def children(process: subprocess.Popen[str]) -> dict[str, int]:
    """Process ids of the planes by their program's name."""
    pids = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    found = {}
    for pid in pids:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        found[words[words.index(b"-c") + 3].decode()] = int(pid)
    return found


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_plane_that_dies_ends_the_other_with_exit_code_1(serve: subprocess.Popen[str]) -> None:
    planes = children(serve)
    os.kill(planes["data_plane"], signal.SIGKILL)
    assert serve.wait(30) == 1
    wait_until(lambda: not is_running(planes["control_plane"]), 5)


def test_another_says_which_address_is_taken_and_ctrl_c_stops_both_planes_with_exit_code_0(
    serve: subprocess.Popen[str], environ: dict[str, str], tmp_path: Path
) -> None:
    planes = children(serve)
    assert set(planes) == {"control_plane", "data_plane"}
    command = [sys.executable, "-m", "scripts.serve", "--model", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot listen on {environ['KVPLANE_CONTROL_PLANE_BIND']}" in done.stderr
    assert all(is_running(pid) for pid in planes.values())
    serve.send_signal(signal.SIGINT)
    assert serve.wait(30) == 0
    assert not any(is_running(pid) for pid in planes.values())
