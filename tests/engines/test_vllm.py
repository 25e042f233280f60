"""vLLM itself, on a CPU: what it takes from the pool changes no answer and holds up no request."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import save_file

from scripts.planes import ROOT
from tests.engines.programs import PATIENCE_S
from tests.engines.questions import prompts_of
from tests.engines.vllm_engines import (
    PATIENT,
    PYTHON,
    Judge,
    Pools,
    kill,
    num_chunks,
    share_cached,
)
from tests.helpers.waiting import wait_until

SIGNATURES: Final = ROOT / "integrations/vllm/tests/signatures.txt"
ENOUGH: Final = 0.8
"""Share of the prompts' tokens that are taken from the pool; the rest are parts of blocks."""

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]


def save_adapter(folder: Path, seed: int) -> Path:
    """An adapter of the keys and values of models/recall that changes its answers."""
    config = json.loads((ROOT / "models/recall/config.json").read_text())
    rank, hidden = 8, config["hidden_size"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    names, generator = ("k_proj", "v_proj"), torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name in names:
            for side, shape in (("A", (rank, hidden)), ("B", (kv, rank))):
                key = f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_{side}.weight"
                weights[key] = torch.randn(shape, generator=generator) / rank
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_the_stand_ins_were_made_from_this_release() -> None:
    command = [PYTHON, SIGNATURES.with_suffix(".py")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    wanted = [line.split(": ", 1) for line in SIGNATURES.read_text().splitlines()]
    found = [line for line in printed.splitlines() if line in SIGNATURES.read_text()]
    assert found == [line for numbers, line in wanted if "0.32" in numbers.split()]


def test_answers_are_those_of_vllm_alone_whatever_ends(judge: Judge, pools: Pools) -> None:
    pools.start_control()
    data = pools.start_data()
    first = pools.engine("first")
    for seed in (1, 2, 3):
        assert not any(judge.ask(first, seed)["num_cached"])
    first.end()

    kill(pools.control)
    pools.start_control()
    second = pools.engine("second")
    assert not any(judge.ask(second, 1, salt="b")["num_cached"])
    assert share_cached(judge.ask(second, 1), 1) >= ENOUGH
    data.process.send_signal(signal.SIGSTOP)
    slow = judge.ask(second, 2)
    assert slow["taken_s"] < judge.expected(2)["taken_s"] + 2
    kill(data)
    pools.start_data()
    assert not any(judge.ask(second, 3)["num_cached"])
    second.end()


def test_an_engine_killed_in_a_store_leaves_nothing_of_it(judge: Judge, pools: Pools) -> None:
    num_whole = 2
    pools.start_control("--lease-s", "5")
    pools.start_data()
    dying = pools.engine("dying", num_whole_stores=num_whole, **PATIENT)
    other = pools.engine("other", **PATIENT)
    dying.question(1)
    assert dying.process.wait(PATIENCE_S) == -signal.SIGKILL
    assert pools.usage().num_held_blocks > 0, "the session has not ended with its engine"

    taken = judge.ask(other, 1)["num_cached"]
    assert sum(map(bool, taken)) == num_whole
    for cached, prompt in zip(taken, prompts_of(1), strict=True):
        assert not cached or cached >= ENOUGH * len(prompt)
    other.end()
    assert pools.wait_until_all_are_back().num_cached_blocks == num_chunks(1)


def test_what_is_in_files_outlives_all_processes(
    judge: Judge, pools: Pools, tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    tier = ("--file-tier-dir", str(folder), "--file-tier-bytes", str(1 << 30))
    flags = (*tier, "--file-tier-after", "1")
    pools.start_control()
    data = pools.start_data(*flags)
    first = pools.engine("first")
    judge.ask(first, 1)
    wait_until(lambda: len([*folder.rglob("*.block")]) >= num_chunks(1))
    first.kill()
    kill(pools.control)
    kill(data)

    pools.start_control()
    pools.start_data(*flags)
    second = pools.engine("second", **PATIENT)
    assert share_cached(judge.ask(second, 1), 1) >= ENOUGH
    second.end()


def test_adapters_and_weights_have_their_own_chunks(
    judge: Judge, pools: Pools, tmp_path: Path
) -> None:
    pools.start_control()
    pools.start_data()
    one, two = (save_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2))
    assert judge.expected(1, one)["answers"] != judge.expected(1, two)["answers"]
    for is_cached in (False, True):
        engines = {
            version: pools.engine(
                f"version-{version}",
                weights=version,
                weight_version=str(version),
                **PATIENT,
            )
            for version in (1, 2)
        }
        for version, engine in engines.items():
            for lora in (None, one):
                answer = judge.ask(engine, 1, lora=lora, weights=version)
                assert (share_cached(answer, 1) >= ENOUGH) == is_cached
                assert any(answer["num_cached"]) == is_cached
        for version, engine in engines.items():
            if is_cached:
                assert not any(judge.ask(engine, 1, lora=two, weights=version)["num_cached"])
                # An engine whose weights change, and which is not told of a version.
                assert not any(judge.ask(engine, 1, weights=3 - version)["num_cached"])
            engine.end()


def test_two_engines_at_one_time_store_one_copy(judge: Judge, pools: Pools) -> None:
    pools.start_control()
    pools.start_data()
    engines = [pools.engine(name, **PATIENT) for name in ("one", "two")]
    for engine in engines:  # both have started before either is asked
        judge.ask(engine, 2)
    for engine in engines:
        engine.question(1)
    for engine in engines:
        judge.read(engine, 1)
        engine.end()
    usage = pools.wait_until_all_are_back()
    assert usage.num_cached_blocks == num_chunks(1) + num_chunks(2)
