"""Where a data plane runs: what is asked for, what is there, what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import kvplane_kernels
import pytest
import torch
from prometheus_client import generate_latest

from data_plane.kernels.arguments import AttentionArguments, WriteArguments
from data_plane.kernels.backends.cpu import CpuKernels, cpu_isa
from data_plane.kernels.device.devices import Machine, choose_device, this_machine, with_index
from data_plane.memory import pool
from data_plane.memory import sizing as memory
from data_plane.server.config import DataPlaneSettings
from data_plane.server.metrics import DataPlaneMetrics
from data_plane.server.server import build_executor
from kvplane.errors import InvalidRequestError, NeverFitsError
from tests.helpers.data.data_server import write_layout
from tests.helpers.refusals import refused

NO_KERNELS = Machine(has_cuda_kernels=False, torch_has_cuda=True, gpus=())
NO_TORCH = Machine(has_cuda_kernels=True, torch_has_cuda=False, gpus=())
NO_GPU = Machine(has_cuda_kernels=True, torch_has_cuda=True, gpus=())
TWO_GPUS = Machine(has_cuda_kernels=True, torch_has_cuda=True, gpus=((9, 0), (8, 0)))
GPU = torch.device("cuda", 1)
OLD_AND_NEW = Machine(has_cuda_kernels=True, torch_has_cuda=True, gpus=((7, 5), (12, 0)))


@pytest.mark.parametrize(
    ("name", "machine", "device"),
    [
        ("auto", TWO_GPUS, "cuda:0"),
        ("auto", OLD_AND_NEW, "cuda:1"),
        ("auto", NO_GPU, "cpu"),
        ("auto", NO_KERNELS, "cpu"),
        ("auto", NO_TORCH, "cpu"),
        ("cpu", TWO_GPUS, "cpu"),
        ("cuda", TWO_GPUS, "cuda:0"),
        ("cuda:0", TWO_GPUS, "cuda:0"),
        ("cuda:1", TWO_GPUS, "cuda:1"),
    ],
)
def test_a_name_stands_for_a_device(name: str, machine: Machine, device: str) -> None:
    assert str(choose_device(name, lambda: machine)) == device


@pytest.mark.parametrize(
    ("name", "machine", "complaint"),
    [
        ("cuda", NO_KERNELS, "the kernels were built without CUDA"),
        ("cuda:0", NO_KERNELS, "the kernels were built without CUDA"),
        ("cuda", NO_TORCH, "torch was built without CUDA"),
        ("cuda", NO_GPU, "there is no GPU 0: this machine has 0 to use"),
        ("cuda:2", TWO_GPUS, "there is no GPU 2: this machine has 2 to use"),
        ("cuda", OLD_AND_NEW, "GPU 0 is sm_75: the kernels need sm_80 or later"),
        ("gpu", TWO_GPUS, "must be"),
        ("mps", TWO_GPUS, "must be"),
        ("cuda:", TWO_GPUS, "must be"),
        ("cuda:-1", TWO_GPUS, "must be"),
        ("cuda:01", TWO_GPUS, "must be"),
        ("", TWO_GPUS, "must be"),
    ],
)
def test_a_device_that_is_not_there_is_refused_with_what_is_missing(
    name: str, machine: Machine, complaint: str
) -> None:
    with refused(InvalidRequestError, "device", match=complaint):
        choose_device(name, lambda: machine)


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_no_gpu_is_asked_where_none_is_meant(name: str) -> None:
    def look() -> Machine:
        raise AssertionError("the GPUs were asked")

    with suppress(InvalidRequestError):
        assert str(choose_device(name, look)) == "cpu"


def test_the_first_gpu_is_named_by_its_number() -> None:
    assert str(with_index(torch.device("cuda"))) == "cuda:0"
    assert str(with_index(torch.device("cuda:1"))) == "cuda:1"
    assert str(with_index(torch.device("cpu"))) == "cpu"


def test_by_default_the_log_and_a_metric_say_what_this_machine_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = DataPlaneMetrics("p")
    with caplog.at_level(logging.INFO, logger="data_plane"):
        layout = write_layout(tmp_path)
        executor = build_executor(DataPlaneSettings(layout=layout, num_device_blocks=1))
    metrics.watch(executor, lambda: 0)
    text = generate_latest(metrics.registry).decode()
    device = str(choose_device("auto", this_machine))
    on_gpu = device != "cpu"
    backend = "cuda" if on_gpu else "cpu"
    assert str(executor.device) == device
    assert f'kvplane_kernel_backend{{backend="{backend}",device="{device}",pool="p"}} 1.0' in text
    said = "kernels backend=cuda" if on_gpu else f"kernels backend=cpu isa={cpu_isa()}"
    assert any(message.startswith(said) for message in caplog.messages)


@pytest.mark.parametrize("num_threads", (-1, 1025))
def test_kernels_of_the_cpu_are_not_made_for(num_threads: int) -> None:
    with refused(InvalidRequestError, "num_threads"):
        CpuKernels(num_threads)


def test_every_kernel_of_the_cpu_is_told_how_many_threads_to_run_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = []

    def recorded(name: str) -> None:
        function = getattr(kvplane_kernels, name)

        def call(**arguments: Any) -> Any:
            told.append((name, arguments["num_threads"]))
            return function(**arguments)

        monkeypatch.setattr(kvplane_kernels, name, call)

    operations = ("copy_blocks", "swap_blocks", "reshape_and_cache", "paged_attention")
    for name in operations:
        recorded(name)
    pool = torch.zeros(2, 1, 2, 1, 8, 8)
    heads, none = torch.zeros(0, 1, 8), torch.zeros(0, dtype=torch.int64)
    pairs, start = none.view(0, 2), torch.zeros(1, dtype=torch.int64)
    for num_threads, expected in ((3, 3), (0, torch.get_num_threads())):
        kernels = CpuKernels(num_threads)
        kernels.copy_blocks(pool, pairs)
        kernels.swap_blocks(pool, pool, pairs)
        kernels.reshape_and_cache(WriteArguments(heads, heads, pool[:, 0], none))
        kernels.paged_attention(AttentionArguments(heads, pool[:, 0], none.view(0, 0), start, none))
        assert told == [(name, expected) for name in operations]
        told.clear()


def test_a_measured_pool_leaves_room_beside_it() -> None:
    def num_blocks(utilization: float, scratch_bytes: int) -> int:
        return memory.measure_num_blocks(
            1000,
            lambda usable: usable // 10,
            utilization=utilization,
            reserve_bytes=50,
            scratch_bytes=scratch_bytes,
        )

    assert num_blocks(1.0, 0) == 95
    assert num_blocks(1.0, 300) == 65
    assert num_blocks(0.5, 300) == 45
    with pytest.raises(NeverFitsError):
        num_blocks(1.0, 945)


def test_a_host_tier_larger_than_the_machine_is_refused_before_it_is_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "free_bytes", lambda device: 4095)
    with refused(NeverFitsError, "num_host_blocks", match="4096 bytes do not fit in the 4095"):
        pool.empty_pinned((4, 256), torch.float32, GPU, "num_host_blocks")


def test_a_tier_of_nothing_is_not_pinned() -> None:
    tensor, unpin = pool.empty_pinned((0, 256), torch.float32, GPU, "num_host_blocks")
    unpin()
    assert tensor.shape == (0, 256)


class FakeDriver:
    """Stands for the driver of a machine that has none: pins nothing, and says with which GPU
    current it was asked, and for what memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: int) -> None:
        self.answer = answer
        self.asked: list[tuple[str, torch.device | None]] = []
        self.memory: list[tuple[int, int]] = []
        self.flags = 0
        self._current: torch.device | None = None
        monkeypatch.setattr(torch.cuda, "device", self._on)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    @contextmanager
    def _on(self, device: torch.device) -> Iterator[None]:
        before, self._current = self._current, device
        yield
        self._current = before

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.asked.append(("register", self._current))
        self.memory.append((address, num_bytes))
        self.flags = flags
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        self.asked.append(("unregister", self._current))
        return 0


LARGE = (1 << 20,)


def test_a_large_tier_is_pinned_for_the_gpu_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is registered without these flags cannot be reached by the kernel that swaps blocks, or
    not by every GPU.
    """
    portable, mapped = 1, 2  # as CUDA numbers cudaHostRegisterPortable and cudaHostRegisterMapped
    driver = FakeDriver(monkeypatch, 0)
    tensor, unpin = pool.empty_pinned(LARGE, torch.float32, GPU, "num_host_blocks")
    unpin()
    assert driver.flags == portable | mapped
    assert tensor.shape == LARGE
    assert driver.asked == [("register", GPU), ("unregister", GPU)]
    assert driver.memory == [(tensor.data_ptr(), tensor.nbytes)]


def test_a_tier_that_can_not_be_pinned_leaves_no_error_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launches: list[torch.device] = []

    def ones(_size: int, *, device: torch.device) -> None:
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")

    FakeDriver(monkeypatch, 2)
    monkeypatch.setattr(torch, "ones", ones)
    with refused(NeverFitsError, "num_host_blocks", match="cannot be pinned"):
        pool.empty_pinned(LARGE, torch.float32, GPU, "num_host_blocks")
    assert launches == [GPU]


CGROUPS = {
    "version 2": ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    "version 1": (
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
}


@pytest.mark.parametrize("version", CGROUPS)
def test_files_that_a_container_has_cached_count_as_free(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, use, stat, name = CGROUPS[version]
    (tmp_path / "memory").mkdir()
    (tmp_path / limit).write_text("1000000\n")
    (tmp_path / use).write_text("900000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes(torch.device("cpu")) == 100_000
    (tmp_path / stat).write_text(f"anon 5\n{name} 600000\nactive_file 7\nfile 8\n")
    assert memory.free_bytes(torch.device("cpu")) == 700_000
    (tmp_path / limit).write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) > 1_000_000
