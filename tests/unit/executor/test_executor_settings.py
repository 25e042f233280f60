"""The data plane's settings: what is refused, what is measured, what is built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from data_plane import Executor
from data_plane.kernels.backends.cpu import CpuKernels
from data_plane.memory.pool import TORCH_DTYPES
from data_plane.server.config import PROGRAM, DataPlaneSettings
from data_plane.server.server import build_executor, layout_from_json
from data_plane.server.tensor_codec import tensor_from_message, tensor_to_message
from kvplane.errors import InvalidRequestError, NeverFitsError
from kvplane.serving.config import memory_of
from kvplane.serving.settings import parse
from kvplane.shard import Shard
from kvplane.wire.v1 import types_pb2 as pb
from tests.helpers.data.plan_author import LAYOUT, POOL_ID
from tests.helpers.planes_in_process import write_layout
from tests.helpers.refusals import refused

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


@pytest.fixture
def layout_file(tmp_path: Path) -> Path:
    return write_layout(tmp_path, LAYOUT)


def test_a_layout_is_read_back_from_json(layout_file: Path) -> None:
    assert layout_from_json(layout_file) == LAYOUT


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"groups": 3}', '{"groups": [{"layers": [0]}]}'])
def test_a_file_that_is_no_layout_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with refused(InvalidRequestError, "layout"):
        layout_from_json(path)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("model", {"model": Path("m"), "layout": Path("l")}),
        ("bind", {"model": Path("m"), "bind": "nonsense"}),
        ("bind", {"model": Path("m"), "bind": "127.0.0.1:99999"}),
        ("advertise", {"model": Path("m"), "bind": "0.0.0.0:1", "insecure": True}),
        ("advertise", {"model": Path("m"), "advertise": "fd00::5:50052"}),
        ("bind", {"model": Path("m"), "bind": "0.0.0.0:1"}),
        ("control_plane", {"model": Path("m"), "control_plane": ":50051"}),
        ("pool_id", {"model": Path("m"), "pool_id": ""}),
        ("block_size_tokens", {"model": Path("m"), "block_size_tokens": 12}),
        ("tls_cert", {"model": Path("m"), "tls_cert": Path("c")}),
    ],
)
def test_settings_that_contradict_are_refused(field: str, settings: dict[str, Any]) -> None:
    with refused(InvalidRequestError, field):
        DataPlaneSettings(**settings)


@pytest.mark.parametrize("device", ["nonsense", "cuda:0"])
def test_a_device_without_kernels_is_refused(layout_file: Path, device: str) -> None:
    config = DataPlaneSettings(layout=layout_file, device=device, num_device_blocks=1)
    with refused(InvalidRequestError, "device"):
        build_executor(config)


def test_the_pool_is_measured_when_its_size_is_not_given(
    layout_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = 100 * LAYOUT.block_bytes()
    monkeypatch.setattr("data_plane.server.server.free_bytes", lambda device: free_bytes)
    settings = {"memory": "50%", "num_host_blocks": 10}
    executor = build_executor(DataPlaneSettings(layout=layout_file, **settings))
    assert executor.pools.device_tier.shape[0] == 40
    assert executor.pools.host_tier.shape[0] == 10


def test_a_pool_takes_the_bytes_that_it_is_given_and_says_how_many_tokens_they_hold(
    layout_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    memory = str(7 * LAYOUT.block_bytes() + 1)
    executor = build_executor(DataPlaneSettings(layout=layout_file, memory=memory))
    assert executor.pools.device_tier.shape[0] == 7
    assert f"7 blocks = {7 * LAYOUT.block_size_tokens:,} tokens = 0.0 GiB" in caplog.text
    with refused(NeverFitsError, "memory"):
        build_executor(DataPlaneSettings(layout=layout_file, memory="1KiB"))


@pytest.mark.parametrize(
    ("text", "memory"),
    [("8GiB", 8 << 30), ("64MiB", 1 << 26), ("12", 12), ("50%", 0.5), ("99.5%", 0.995)],
)
def test_memory_is_bytes_or_a_share(text: str, memory: float) -> None:
    assert (memory_of(text), type(memory_of(text))) == (memory, type(memory))


@pytest.mark.parametrize("text", ["", "8GB", "-1", "0%", "101%", "1.5GiB", "1.2.3%", "all"])
def test_other_memory_is_refused(text: str) -> None:
    with refused(InvalidRequestError, "memory"):
        DataPlaneSettings(memory=text)


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("num_device_blocks", {"num_device_blocks": 0}),
        ("num_host_blocks", {"num_host_blocks": -1}),
        ("num_threads", {"num_threads": -1}),
        ("pool_id", {"pool_id": ""}),
        ("epoch", {"epoch": -1}),
        ("epoch", {"epoch": 2**64}),
        ("shard.index", {"shard": Shard(1, 1, 0, 2, 0, 2)}),
        ("shard.num_layers", {"shard": Shard(0, 1, 0, 0, 0, 2)}),
        ("shard.first_layer", {"shard": Shard(0, 1, 5, 2, 0, 2)}),
        ("shard.num_kv_heads", {"shard": Shard(0, 1, 0, 2, 1, 2)}),
    ],
)
def test_an_executor_is_not_made_with(field: str, settings: dict[str, Any]) -> None:
    values: dict[str, Any] = {"pool_id": POOL_ID, "num_device_blocks": 2, **settings}
    with refused(InvalidRequestError, field):
        Executor(LAYOUT, **values)


@pytest.mark.parametrize("dtype", TORCH_DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 64), (0, 2, 8), (8,)])
def test_tensors_travel_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Every pattern of 8 bits, NaN and infinities with it."""
    octets = torch.arange(torch.Size(shape).numel() * dtype.itemsize).to(torch.uint8)
    tensor = octets.view(dtype).view(shape)
    for sent in (tensor, tensor.transpose(0, -1)):
        back = tensor_from_message(tensor_to_message(sent), CPU, field="t")
        assert (back.dtype, back.shape) == (dtype, sent.shape)
        assert torch.equal(*(each.flatten().view(torch.uint8) for each in (back, sent)))


def test_a_tensor_in_shared_memory_is_refused() -> None:
    memory_range = pb.MemoryRange(region_id=1, offset_bytes=0)
    message = pb.Tensor(dtype=pb.ELEMENT_TYPE_FLOAT32, shape=[0], memory=memory_range)
    with refused(InvalidRequestError, "key.memory", match="shared memory"):
        tensor_from_message(message, CPU, field="key")


def test_the_epoch_is_a_setting(layout_file: Path) -> None:
    config = DataPlaneSettings(layout=layout_file, num_device_blocks=1, device="cpu", epoch=77)
    assert build_executor(config).epoch == 77


def test_bad_settings_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(DataPlaneSettings, PROGRAM, ["--num-device-blocks=-1", "--model=m"], {})
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "--num-device-blocks" in said
    assert said.count("\n") == 1


def test_a_layout_that_is_not_there_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="cannot be read"):
        layout_from_json(Path("/nowhere.json"))


def test_the_program_refuses_to_start_without_a_layout_in_one_line() -> None:
    command = [sys.executable, "-m", "data_plane", "--log-level=error"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "give --model, --layout or --opaque-page-bytes" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("text", ["3", "0:0", ":2", ":", "-1:2", "0:2:4", "a:b"])
@pytest.mark.parametrize("field", ["layers", "kv_heads"])
def test_a_range_of_a_shard_is_first_and_count(field: str, text: str) -> None:
    with refused(InvalidRequestError, field):
        DataPlaneSettings(**{field: text})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["num_device_blocks", "num_host_blocks"])
@pytest.mark.parametrize("num_blocks", [2**62, 2**40])
def test_a_pool_that_does_not_fit_says_what_it_takes_and_what_is_there(
    layout_file: Path, field: str, num_blocks: int
) -> None:
    blocks = {"num_device_blocks": 1, field: num_blocks}
    config = DataPlaneSettings(layout=layout_file, device="cpu", **blocks)  # type: ignore[arg-type]
    with refused(NeverFitsError, field, match=r"take \d+ bytes, \d+ are available"):
        build_executor(config)


def test_a_pool_leaves_the_kernels_what_they_need(
    layout_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = LAYOUT.block_bytes()
    monkeypatch.setattr("data_plane.server.server.free_bytes", lambda device: 100 * block_bytes)
    monkeypatch.setattr(CpuKernels, "scratch_bytes", 40 * block_bytes)
    build_executor(DataPlaneSettings(layout=layout_file, device="cpu", num_device_blocks=60))
    with refused(NeverFitsError, "num_device_blocks", match="are available"):
        build_executor(DataPlaneSettings(layout=layout_file, device="cpu", num_device_blocks=61))


def test_the_memory_of_a_pool_is_there_from_the_start(layout_file: Path) -> None:
    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    num_bytes = 1 << 27
    num_blocks = num_bytes // Shard.whole(LAYOUT).block_bytes(LAYOUT)
    before = resident_bytes()
    config = DataPlaneSettings(layout=layout_file, device="cpu", num_device_blocks=num_blocks)
    executor = build_executor(config)
    assert resident_bytes() - before >= 0.9 * num_bytes
    assert executor.pools.device_tier.nbytes >= 0.9 * num_bytes
