"""Which device a rank's model is on, how ranks then add up, and how long rank 0 waits for another.
Machines and NCCL are stand-ins.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_plane.kernels.device import devices
from data_plane.kernels.device.devices import Machine
from engine.config import EngineSettings
from engine.parallel import backends, group
from engine.parallel.group import RankGroup
from kvplane.errors import InternalError


def settings_of(
    folder: Path, patch: pytest.MonkeyPatch, device: str, num_gpus: int, num_ranks: int
) -> EngineSettings:
    """Return settings on a machine of so many GPUs."""
    machine = Machine(True, True, ((9, 0),) * num_gpus)
    patch.setattr(devices, "machine_of_torch", lambda: machine)
    patch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    return EngineSettings(model=folder, device=device, tensor_parallel=num_ranks)


@pytest.mark.parametrize(
    ("device", "num_gpus", "wanted", "is_nccl"),
    [
        ("auto", 0, ["cpu", "cpu"], False),
        ("auto", 2, ["cuda:0", "cuda:1"], True),
        ("cuda", 2, ["cuda:0", "cuda:1"], True),
        ("cuda:2", 4, ["cuda:2", "cuda:3"], True),
        ("cuda:1", 2, ["cuda:1", "cuda:1"], False),
        ("cuda", 1, ["cuda:0", "cuda:0"], False),
        ("cpu", 2, ["cpu", "cpu"], False),
        ("cuda:1", 4, ["cuda:1"], False),
    ],
)
def test_ranks_have_a_gpu_each_and_nccl_if_there_are_enough(
    device: str,
    num_gpus: int,
    wanted: list[str],
    is_nccl: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = settings_of(tmp_path, monkeypatch, device, num_gpus, len(wanted))
    assert [str(backends.device_of(config, rank)) for rank in range(len(wanted))] == wanted
    gpus: list[Any] = []
    monkeypatch.setattr(backends, "RankGroup", lambda *_, gpu: gpus.append(gpu))
    for rank in range(len(wanted)):
        backends.group_of(config, tmp_path, rank)
    assert gpus == [torch.device(each) if is_nccl else None for each in wanted]


class Nccl:
    """Stands for NCCL's process group of this rank."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, num_ranks: int, options: Any) -> None:
        self.timeout_s = options._timeout.total_seconds()

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        tensors[0].add_(100)
        return SimpleNamespace(wait=lambda: None)


def test_a_rank_with_a_gpu_of_its_own_adds_up_by_nccl_and_talks_by_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group._C10D, "ProcessGroupNCCL", Nccl, raising=False)
    by_gloo = RankGroup(tmp_path / "gloo", 0, 1, 5.0)
    by_nccl = RankGroup(tmp_path / "nccl", 0, 1, 5.0, gpu=torch.device("cuda", 0))
    assert by_nccl._nccl.timeout_s == 5.0
    for ranks, wanted in ((by_gloo, 1.0), (by_nccl, 101.0)):
        tensor = torch.ones(3)
        assert ranks.add_up(tensor) is tensor
        assert tensor.tolist() == [wanted] * 3
        assert ranks.gather(b"a message") == [b"a message"]


def test_a_rank_that_receives_nothing_keeps_rank_0_no_longer_than_its_timeout(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(RankGroup, tmp_path / "meeting", 1, 2, 60.0)
        first = RankGroup(tmp_path / "meeting", 0, 2, 1.0)
        assert other.result(60.0).rank == 1
    with pytest.raises(InternalError, match="does not answer"):
        first.tell(b"step")
