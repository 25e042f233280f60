"""An engine with a data plane on the CUDA kernels, emulated, says what it says on the CPU's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_planes import ROOT, Process

from engine import LLM, SamplingParams
from tests.helpers.data.kernel_sets import emulated_kernels

MODEL = ROOT / "models" / "recall"
PROMPTS = [
    "abc=xyz;def=uvw;ghi=rst;.?def=",
    "abc=xyz;def=uvw;ghi=rst;.?abc=",
    "one=abc;two=ghk;.?two=",
]


def answers(control: Process, pool_id: str) -> list[list[int]]:
    """The pool is so small that sequences go to the host and back."""
    with LLM(
        MODEL,
        control_plane=control.address,
        data_plane="embedded",
        pool_id=pool_id,
        block_size_tokens=8,
        num_device_blocks=10,
        num_host_blocks=16,
    ) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=16, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]


def test_the_shipped_model_answers_the_same_on_the_emulated_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Process("control_plane", tmp_path / "control.log") as control:
        expected = answers(control, "cpu")
        emulated = emulated_kernels()
        swaps: list[int] = []

        run_swaps = emulated.swap_blocks

        def swap_blocks(*tensors: torch.Tensor) -> None:
            swaps.append(len(tensors[-1]))
            run_swaps(*tensors)

        monkeypatch.setattr(emulated, "swap_blocks", swap_blocks)
        monkeypatch.setattr(
            "data_plane.server.server.kernels_of", lambda device, num_threads: emulated
        )
        assert answers(control, "emulated") == expected
        assert len(swaps) >= 2, "out and in"
    assert "".join(chr(token - 3) for token in expected[0][:3]) == "uvw"
