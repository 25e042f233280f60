"""vLLM alone, and planes for vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import SkipTest

import pytest

from scripts.planes import start
from tests.engines.vllm_engines import PYTHON, Engine, Judge, Pools


@pytest.fixture(autouse=True, scope="session")
def installed() -> None:
    if not PYTHON.exists():
        raise SkipTest("make test-engines installs vLLM")


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Judge]:
    judge = Judge(tmp_path_factory.mktemp("judge") / "alone.log")
    yield judge
    judge.engine.end()
    print(f"\nidentical answers: {judge.num_same}/{judge.num_answers}")


@pytest.fixture(scope="session")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The layout that vLLM needs, as an engine says when it starts; another's pool ends it."""
    folder = tmp_path_factory.mktemp("layout")
    with ExitStack() as stack, (folder / "planes.log").open("ab") as output:
        stack.enter_context(output)
        control = start(stack, "control_plane", "--metrics-port", "-1", output=output)
        start(
            *(stack, "data_plane", "--opaque-page-bytes", "64", "--model-id", "another's"),
            *("--num-device-blocks", "8", "--control-plane", control.address),
            *("--metrics-port", "-1"),
            output=output,
        )
        refused = Engine(folder / "refused.log", {"control_plane": control.address})
        refused.end()
    log = refused.log.read_text()
    assert "model_id vllm-0.32/models/recall/" in log and "and not another's" in log
    (said,) = set(re.findall(r"kvplane data --layout <\(echo '(.*)'\)", log))
    path = folder / "layout.json"
    path.write_text(said)
    return path


@pytest.fixture
def pools(layout: Path, tmp_path: Path) -> Iterator[Pools]:
    with ExitStack() as stack:
        yield Pools(stack, tmp_path, layout)
