"""SGLang itself, on a CPU: what it takes from the pool changes no answer and delays no request."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final
from unittest import SkipTest

import pytest

from scripts.planes import ROOT
from tests.engines.programs import Engine, KilledPlanes
from tests.engines.questions import NUM_PROMPTS
from tests.helpers.waiting import stopped, wait_until

SGLANG: Final = ROOT / "build/engines/sglang"
COMMAND: Final = (ROOT / "build/engines/vllm/bin/python", "-m", "tests.engines.sglang_process")
ENVIRONMENT: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCH_EXTENSIONS_DIR": str(ROOT / "build/engines/extensions"),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join((str(ROOT), str(SGLANG))),
}
FAULTS: Final = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.2"}
SETTINGS: Final = {"weights": "recall-1", "connect_s": 60.0, "lookup_s": 0.5}
"""With time for a busy machine, where a miss would hide what is tested."""
PAGE_TOKENS: Final = 32
PAGE_BYTES: Final = "65536"
MODEL_ID: Final = "sglang/models/recall/recall-1/float32/{}/page32/tp1pp1cp1dcp1"
SEEDS: Final = range(1, 7)

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

Start = Callable[..., Engine]
Answer = dict[str, Any]


def hicache(control_plane: str, layout: str, **settings: float) -> dict[str, Any]:
    """Options of SGLang with kvplane, as integrations/sglang/README.md says. ``settings``: of
    ``ChunkSettings``.
    """
    extra = {
        "backend_name": "kvplane",
        "module_path": "kvplane.integrations.sglang.hicache",
        "class_name": "KvplaneHiCache",
        "interface_v1": 1,
        "kvplane": {"control_plane": control_plane, **SETTINGS, **settings},
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_io_backend": "direct",  # the kernels of the other need a GPU
        "hicache_mem_layout": layout,
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",  # however long kvplane takes
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }


def flags(model_id: str) -> list[str]:
    pages = ("--opaque-page-bytes", PAGE_BYTES, "--num-device-blocks", "1024")
    return [*pages, "--model-id", model_id]


@pytest.fixture(scope="module")
def module_stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, folder: Path, name: str, **options: Any) -> Engine:
    faults = options.pop("faults", {})
    command = [*COMMAND, json.dumps(options)]
    engine = Engine(command, ENVIRONMENT | faults, folder / f"{name}.log")
    stack.callback(engine.kill)
    return engine


class Expected:
    """Answers of SGLang without a storage backend, which every other answer is compared with."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._answers: dict[int, Answer] = {}
        self.num_answers = self.num_same = 0

    def __getitem__(self, seed: int) -> Answer:
        if not self._answers:
            for each in SEEDS:
                self._engine.ask(seed=each)
            self._answers = {each: self._engine.answer() for each in SEEDS}
            self._engine.end()
        return self._answers[seed]

    def check(self, engine: Engine, seed: int) -> Answer:
        """Compare the next answer of an engine, which was asked already."""
        given = engine.answer()
        pairs = zip(given["answers"], self[seed]["answers"], strict=True)
        self.num_answers += NUM_PROMPTS
        self.num_same += sum(one == other for one, other in pairs)
        return given

    def assert_same(self, num_asked: int) -> None:
        print(f"identical answers: {self.num_same}/{self.num_answers}")
        assert self.num_same == self.num_answers == num_asked * NUM_PROMPTS

    def ask(self, engine: Engine, seed: int) -> Answer:
        engine.ask(seed=seed)
        return self.check(engine, seed)

    def num_pages(self, *seeds: int) -> int:
        """Return how many pages questions have, with the keys and values of their answers."""
        return sum(
            (num_tokens + len(answer) - 1) // PAGE_TOKENS
            for seed in seeds
            for num_tokens, answer in zip(
                self[seed]["num_tokens"], self[seed]["answers"], strict=True
            )
        )


@pytest.fixture(scope="module")
def alone(module_stack: ExitStack, tmp_path_factory: pytest.TempPathFactory) -> Expected:
    if not SGLANG.exists():
        raise SkipTest("make test-engines installs SGLang")
    return Expected(started(module_stack, tmp_path_factory.mktemp("alone"), "alone"))


@pytest.fixture
def expected(alone: Expected) -> Expected:
    alone.num_answers = alone.num_same = 0
    return alone


def is_taken(answer: Answer) -> bool:
    """Return whether 80 % of the prompts' tokens came from kvplane."""
    return sum(answer["num_cached"]) >= 0.8 * sum(answer["num_tokens"])


def test_answers_are_those_of_sglang_alone_whatever_is_killed(
    expected: Expected, stack: ExitStack, tmp_path: Path
) -> None:
    planes = KilledPlanes(stack, tmp_path, *flags("another's"))
    options = hicache(planes.control.address, "layer_first")

    def start(name: str) -> Engine:
        return started(stack, tmp_path, name, **options)

    refused = start("refused")
    assert refused.process.wait(300) != 0
    log = refused.log.read_text()
    assert "layout: is not that of pool 'default': it has model_id sglang/models/recall" in log
    assert "and not another's" in log
    wanted = re.search(r"data plane: --opaque-page-bytes (\d+) --model-id '(.+)'", log)
    assert wanted is not None
    assert wanted.groups() == (PAGE_BYTES, MODEL_ID.format("layer_first"))
    planes.kill("data")
    planes.start_data(*flags(MODEL_ID.format("layer_first")))

    first = start("first")
    for seed in (1, 2, 3):
        assert sum(expected.ask(first, seed)["num_cached"]) == 0
    wait_until(lambda: planes.num_used == expected.num_pages(1, 2, 3))
    planes.restart("control")
    expected.ask(first, 4)
    first.end()
    num_used = planes.num_used

    second, twin = start("second"), start("twin")
    for engine in (second, twin):
        engine.ask(seed=1)
    assert is_taken(expected.check(second, 1)) and is_taken(expected.check(twin, 1))
    time.sleep(2)  # for receipts, and what nobody holds any more
    assert planes.num_used <= num_used, "what is cached is not stored again"
    for engine in (second, twin):
        engine.ask(seed=5)
    for engine in (second, twin):
        expected.check(engine, 5)

    expected.ask(twin, 6)
    twin.kill()
    assert expected.ask(second, 6)["num_cached"][-1] == 0, "killed in the middle of its store"

    with stopped(planes.data.process.pid):
        slow = expected.ask(second, 2)
    assert sum(slow["num_cached"]) == 0
    for taken_s, alone_s in zip(slow["taken_s"], expected[2]["taken_s"], strict=True):
        assert taken_s < alone_s + 2
    planes.restart("data")
    assert sum(expected.ask(second, 3)["num_cached"]) == 0
    second.end()
    expected.assert_same(12)


def test_pages_of_another_memory_layout_outlive_all_processes_in_files(
    expected: Expected, stack: ExitStack, tmp_path: Path
) -> None:
    layout, files = "page_first_direct", tmp_path / "files"
    tier = ("--file-tier-dir", str(files), "--file-tier-bytes", "100000000")
    tier = (*tier, "--file-tier-after", "1")
    planes = KilledPlanes(stack, tmp_path, *flags(MODEL_ID.format(layout)), *tier)
    options = hicache(planes.control.address, layout, lookup_s=2.0)
    first = started(stack, tmp_path, "first", **options)
    for seed in (1, 2):
        assert sum(expected.ask(first, seed)["num_cached"]) == 0
    num_pages = expected.num_pages(1, 2)
    wait_until(lambda: len([*files.rglob("*.block")]) == num_pages)
    first.kill()
    planes.restart("control", "data")
    assert planes.num_used == 0

    second = started(stack, tmp_path, "second", **options)
    faulty = started(stack, tmp_path, "faulty", faults=FAULTS, **options)
    assert is_taken(expected.ask(second, 1))
    for seed in (1, 2, 3):
        expected.ask(faulty, seed)
    assert "injector enabled" in faulty.log.read_text()
    expected.assert_same(6)
