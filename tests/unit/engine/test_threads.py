"""How torch's threads wait."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from engine.serving.config import ServeSettings
from engine.serving.server import run
from engine.threads import tune_torch, waiting


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an environment that says nothing, and is as it was afterwards."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2, 3})
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("num_threads", "expected"),
    [(1, "default"), (2, "default"), (3, "5000"), (4, "5000"), (0, "5000")],
)
def test_threads_wait_briefly_where_there_is_no_cpu_for_each(
    num_threads: int, expected: str
) -> None:
    tune_torch(num_threads, is_embedded=False)
    assert waiting() == f"GOMP_SPINCOUNT={expected}"


def test_threads_wait_as_long_as_ever_where_nothing_runs_beside_them() -> None:
    tune_torch(4, is_embedded=True)
    assert waiting() == "GOMP_SPINCOUNT=default"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_the_environment_says_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "7")
    tune_torch(4, is_embedded=False)
    assert waiting() == f"{name}=7"


def test_a_server_loads_its_model_in_a_thread_that_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    loaded_in: list[threading.Thread] = []

    def load(config: ServeSettings) -> None:
        loaded_in.append(threading.current_thread())
        raise FileNotFoundError(config.model)

    monkeypatch.setattr("engine.llm.LLM.from_config", load)
    monkeypatch.setattr("engine.serving.server.logs.setup", lambda *settings: None)
    with pytest.raises(FileNotFoundError):
        run(ServeSettings(model=tmp_path))
    assert not loaded_in[0].is_alive()
