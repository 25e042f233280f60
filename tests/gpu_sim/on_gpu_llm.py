"""Whole engines on a GPU: their pool embedded, in another process on the same GPU, and in shards.

test_simulated_gpu.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from control_plane.server.config import ControlPlaneSettings
from control_plane.server.server import ControlPlaneServer
from engine.llm import LLM
from engine.request import SamplingParams
from kvplane.errors import InvalidRequestError
from kvplane.runtime import device_region
from kvplane.sync.loop_thread import LoopThread
from scripts.planes import run_planes
from tests.helpers.engine_harness import LLAMA, Reference, prompt_of, save_model
from tests.helpers.refusals import refused

CUDA = torch.device("cuda", 0)
PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((9, 30, 5))]
NEW = [6, 9, 12]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)  # on a busy machine more would mostly wait for each other
    return save_model(LLAMA, tmp_path_factory.mktemp("llama"))


@contextmanager
def control_plane() -> Iterator[str]:
    """Start one in this process; yields its address."""
    loop = LoopThread("control-plane")
    config = ControlPlaneSettings(bind="127.0.0.1:0", metrics_port=-1)
    server = loop.run(ControlPlaneServer.start(config))
    yield server.address
    loop.run(server.stop())
    loop.close()


def check_texts(llm: LLM, folder: Path) -> None:
    """Check that answers are those of transformers on the CPU."""
    assert llm.device == CUDA
    outputs = llm.generate(PROMPTS, [SamplingParams(max_tokens=each) for each in NEW])
    reference = Reference(folder)
    for output, prompt, new in zip(outputs, PROMPTS, NEW, strict=True):
        assert output.outputs[0].token_ids == reference.greedy(prompt, new)


def llm_of(folder: Path, address: str, **settings: Any) -> LLM:
    settings = {"max_sequences": 4, "block_size_tokens": 8, "num_threads": 1} | settings
    return LLM(folder, control_plane=address, timeout_s=30.0, recovery_timeout_s=180.0, **settings)


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "graphless"])
def test_an_engine_that_embeds_its_pool_takes_the_first_gpu_by_itself(
    folder: Path, graphs: bool
) -> None:
    own = {"data_plane": "embedded", "num_device_blocks": 64, "graphs": graphs}
    with control_plane() as address, llm_of(folder, address, **own) as llm:
        check_texts(llm, folder)
        backend: Any = llm._backend
        decoder: Any = llm._core._runner._decoder
        assert backend._executor.device == CUDA
        assert llm._link.namespace == "cuda"  # an engine on a CPU finds nothing of this one's
        assert (decoder is not None and decoder.num_replays > 0) == graphs


def test_compiled_steps_are_refused_by_name(folder: Path) -> None:
    with refused(InvalidRequestError, "compile", match="on cuda:0"):
        llm_of(folder, "127.0.0.1:1", data_plane="embedded", compile=True)


def test_a_data_plane_of_the_same_gpu_gets_tensors_in_shared_memory_if_the_driver_allows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--model", str(folder), "--device", "cuda", "--num-device-blocks", "64")
    flags += ("--block-size-tokens", "8")
    with run_planes(tmp_path, flags) as planes:
        with llm_of(folder, planes.control.address) as llm:
            check_texts(llm, folder)
            layers: Any = llm._backend._layers
            assert layers._regions[0].whole.is_cuda
        native: Any = device_region.cuda_module()

        def open_shared(**_: Any) -> Any:
            raise RuntimeError("cudaIpcOpenMemHandle: operation not supported")

        monkeypatch.setattr(native, "open_shared", open_shared)
        with (
            caplog.at_level(logging.WARNING, logger="kvplane"),
            llm_of(folder, planes.control.address) as llm,
        ):
            check_texts(llm, folder)
        assert any("operation not supported" in message for message in caplog.messages)


def test_two_ranks_share_the_only_gpu(folder: Path) -> None:
    """Their sums are by gloo: NCCL wants a GPU for each."""
    own = {"data_plane": "embedded", "num_device_blocks": 64, "tensor_parallel": 2}
    with control_plane() as address, llm_of(folder, address, **own) as llm:
        check_texts(llm, folder)
