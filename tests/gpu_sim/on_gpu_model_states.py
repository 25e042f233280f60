"""A model on a GPU and the same one on a CPU round otherwise, and find nothing that the other left.

test_simulated_gpu.py names this file to pytest, which does not collect it by itself.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from kvplane.transformers import close_planes
from kvplane.transformers.model_state import namespace_of
from tests.helpers import plane_cache_checks as checks
from tests.models import model_states as states

FOUND = 32  # of 45 tokens, all whole blocks
ASKED = ("device.A", "device.B")


def test_a_model_that_moves_finds_nothing_that_it_left() -> None:
    model, move = states.made("device")
    results = [states.ask(model, num_device_blocks=64) for _ in range(2)]
    move(model)
    results += [states.ask(model, num_device_blocks=64) for _ in range(2)]
    close_planes(model)
    assert [found for found, _ in results] == [0, FOUND, 0, FOUND]
    assert max(off for _, off in results) < checks.ATOL


def test_two_processes_find_what_their_own_device_left(tmp_path: Path) -> None:
    found = states.found_twice(tmp_path, ["device"], ASKED)
    assert found == [[0, 0], [FOUND, FOUND]]


def test_a_checkpoint_on_a_gpu_is_not_in_the_namespace_of_engines(tmp_path: Path) -> None:
    """On a CPU they have the empty one, and on a GPU one of their own."""
    checks.tiny_llama().save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    names = [namespace_of(model, is_shared=True, folder=tmp_path)]
    for device in ("cuda", "cpu"):
        model.to(device)
        names.append(namespace_of(model, is_shared=True, folder=tmp_path))
    assert names[0] == names[2] == "" and names[1] != ""
