"""vLLM as processes on CPUs, planes for it, and what vLLM alone answers."""

from __future__ import annotations

import json
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from kvplane.results import TierUsage
from kvplane.sync import ControlClient
from scripts.planes import ROOT, Plane, start
from tests.engines import programs
from tests.engines.programs import PATIENCE_S
from tests.engines.questions import prompts_of
from tests.helpers.waiting import wait_until

PYTHON: Final = ROOT / "build/engines/vllm/bin/python"
BLOCK: Final = 32  # tokens, of vLLM and of the pool
NUM_BLOCKS: Final = 512
PATIENT: Final = dict.fromkeys(("connect_s", "lookup_s", "transfer_s"), PATIENCE_S)
"""Options of the tier for a busy machine, where a miss in time would hide what is tested."""
ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}

Answer = dict[str, Any]
"""``vllm_process.py`` says what it has."""


def num_chunks(seed: int) -> int:
    """The whole blocks of a seed's prompts, no two of which share one."""
    return sum(len(prompt) // BLOCK for prompt in prompts_of(seed))


def share_cached(answer: Answer, seed: int) -> float:
    """The share of the prompts' tokens that were not computed."""
    return sum(answer["num_cached"]) / sum(map(len, prompts_of(seed)))


def transfer_of(**tier: Any) -> dict[str, Any]:
    """vLLM's setting for a tier of kvplane's with these options."""
    return {
        "kv_connector": "KvplaneConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "tests.engines.cpu_spec",
            "cpu_bytes_to_use": 64 << 20,
            "secondary_tiers": [{"type": "kvplane", **tier}],
        },
    }


class Engine(programs.Engine):
    """vLLM as a process. ``tier``: options of kvplane's; None for vLLM alone. ``weights``: their
    version. ``num_whole_stores``: after so many it is killed in the middle of one.
    """

    def __init__(
        self,
        log: Path,
        tier: dict[str, Any] | None,
        *,
        weights: int = 1,
        num_whole_stores: int | None = None,
    ) -> None:
        options = {
            "transfer": None if tier is None else transfer_of(**tier),
            "weights": weights,
            "num_whole_stores": num_whole_stores,
        }
        program = Path(__file__).with_name("vllm_process.py")
        super().__init__([PYTHON, program, json.dumps(options)], ENVIRONMENT, log)

    def question(
        self, seed: int, salt: str = "a", lora: Path | None = None, weights: int = 1
    ) -> None:
        """Ask for the answers to a seed's prompts. ``lora``: an adapter's folder."""
        adapter = None if lora is None else str(lora)
        self.ask(prompts=prompts_of(seed), salt=salt, lora=adapter, weights=weights)


class Judge:
    """vLLM alone, whose answers all others have to give."""

    def __init__(self, log: Path) -> None:
        self.engine = Engine(log, None)
        self._known: dict[tuple[object, ...], Answer] = {}
        self.num_same = self.num_answers = 0

    def expected(self, seed: int, lora: Path | None = None, weights: int = 1) -> Answer:
        """Return what it answers; it is asked once."""
        question = seed, lora, weights
        if question not in self._known:
            self.engine.question(seed, lora=lora, weights=weights)
            self._known[question] = self.engine.answer()
        return self._known[question]

    def ask(self, engine: Engine, seed: int, salt: str = "a", **how: Any) -> Answer:
        """Return an engine's answer, which is the expected one."""
        engine.question(seed, salt, **how)
        return self.read(engine, seed, **how)

    def read(self, engine: Engine, seed: int, **how: Any) -> Answer:
        """Return the answer of an engine that was asked."""
        answer = engine.answer()
        self.compare(answer["answers"], self.expected(seed, **how)["answers"])
        return answer

    def compare(self, found: list[list[int]], wanted: list[list[int]]) -> None:
        """Count the answers, which have to be the same."""
        same = [one == other for one, other in zip(found, wanted, strict=True)]
        self.num_answers += len(same)
        self.num_same += sum(same)
        assert all(same)


class Pools:
    """Planes of one test, and engines on them. They end with ``stack``."""

    control: Plane

    def __init__(self, stack: ExitStack, folder: Path, layout: Path) -> None:
        self.stack, self.folder = stack, folder
        self._layout = ("--layout", str(layout), "--num-device-blocks", str(NUM_BLOCKS))

    def start(self, program: str, *flags: str, bind: str = "127.0.0.1:0") -> Plane:
        """Start a plane."""
        log = self.stack.enter_context((self.folder / f"{program}.log").open("ab"))
        flags = (*flags, "--metrics-port", "-1")
        return start(self.stack, program, *flags, bind=bind, output=log)

    def start_control(self, *flags: str) -> None:
        """Start the control plane, a second time at the address of the first."""
        bind = self.control.address if hasattr(self, "control") else "127.0.0.1:0"
        self.control = self.start("control_plane", *flags, bind=bind)

    def start_data(self, *flags: str) -> Plane:
        """Start a data plane of vLLM's layout."""
        return self.start(
            "data_plane", *self._layout, "--control-plane", self.control.address, *flags
        )

    def engine(
        self,
        name: str,
        *,
        weights: int = 1,
        num_whole_stores: int | None = None,
        **tier: Any,
    ) -> Engine:
        """Start an engine with these options of the tier."""
        engine = Engine(
            self.folder / f"{name}.log",
            {"control_plane": self.control.address, **tier},
            weights=weights,
            num_whole_stores=num_whole_stores,
        )
        self.stack.callback(engine.kill)
        return engine

    def usage(self) -> TierUsage:
        """Return what the control plane says of the device's blocks."""
        with ControlClient(self.control.address) as control:
            return control.get_pool("default").usage[0]

    def num_sessions(self) -> int:
        """Count the open sessions."""
        with ControlClient(self.control.address) as control:
            return len(control.list_sessions("default"))

    def wait_until_all_are_back(self) -> TierUsage:
        """Wait until no session is open, and return the usage: no block is held."""
        wait_until(lambda: not self.num_sessions(), why=self.usage)
        usage = self.usage()
        assert usage.num_held_blocks == 0
        assert usage.num_free_blocks + usage.num_cached_blocks == usage.num_blocks == NUM_BLOCKS
        return usage


def kill(plane: Plane) -> None:
    """End a plane at once."""
    plane.process.send_signal(signal.SIGKILL)
    plane.process.wait()
