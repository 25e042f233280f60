"""Checkpoints as people have them, answered by the engine as transformers' ``generate`` answers."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine import LLM, SamplingParams
from tests.e2e.engine_planes import ROOT
from tests.helpers.programs import printed
from tests.models.tiny_models import VOCABULARY, tiny_model

NUM_NEW = 10
POOL: dict[str, Any] = {
    "data_plane": "embedded", "num_device_blocks": 32, "num_host_blocks": 0, "num_threads": 1,
}  # fmt: skip
NAMES = itertools.count()
PROMPT = torch.randint(3, VOCABULARY, (30,), generator=torch.Generator().manual_seed(2)).tolist()


def save(folder: Path, dtype: Any = torch.float32, **how: Any) -> Path:
    """A tiny model with a tokenizer whose words are numbers."""
    model = tiny_model("llama").to(dtype)
    model.save_pretrained(folder, **how)
    words = {"?": 0} | {f"{i}": i for i in range(1, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def engine(folder: Path, control: str, **settings: Any) -> LLM:
    return LLM(folder, control_plane=control, pool_id=f"pool-{next(NAMES)}", **POOL, **settings)


def expected(folder: Path, prompt: list[int], **how: Any) -> list[int]:
    """The new tokens of transformers' greedy ``generate``."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    how = {"do_sample": False, "max_new_tokens": NUM_NEW, "pad_token_id": 0} | how
    tokens: list[int] = model.generate(torch.tensor([prompt]), **how)[0].tolist()
    return tokens[len(prompt) :]


def test_weights_in_several_files_are_read_as_transformers_reads_them(
    tmp_path: Path, control: str
) -> None:
    folder = save(tmp_path / "m", max_shard_size="50KB")
    wanted = expected(folder, PROMPT, min_new_tokens=NUM_NEW, eos_token_id=None)
    with engine(folder, control) as llm:
        params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True)
        assert llm.generate([PROMPT], params)[0].outputs[0].token_ids == wanted
    assert len(set(wanted)) > 2


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.2), (torch.float16, 0.1)])
def test_half_precision_is_kept_and_computes_what_it_computes_in_transformers(
    tmp_path: Path, control: str, dtype: torch.dtype, tolerance: float
) -> None:
    folder = save(tmp_path / "m", dtype=dtype)
    with engine(folder, control) as llm:
        assert llm.get_pool().layout.dtype == str(dtype).removeprefix("torch.")
        params = SamplingParams(max_tokens=NUM_NEW, ignore_eos=True, record_logits=True)
        answer = llm.generate([PROMPT], params)[0].outputs[0]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype)
    tokens = torch.tensor([PROMPT + answer.token_ids])
    with torch.inference_mode():
        wanted = model(tokens, use_cache=False).logits[0, len(PROMPT) - 1 : -1].float()
    assert answer.logits is not None
    assert float((answer.logits - wanted).abs().max() / wanted.std()) < tolerance


QUANTISE = """
import sys
import torch
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, TorchAoConfig
source, target, kind, *prompt = sys.argv[1:]
config = TorchAoConfig(
    {"weights": Int8WeightOnlyConfig, "both": Int8DynamicActivationInt8WeightConfig}[kind]()
)
model = AutoModelForCausalLM.from_pretrained(
    source, quantization_config=config, dtype=torch.float32, attn_implementation="eager"
)
model.save_pretrained(target)
ids = torch.tensor([[int(token) for token in prompt]])
new = model.generate(ids, do_sample=False, max_new_tokens=10, eos_token_id=None, pad_token_id=0)
print(*new[0, ids.shape[1]:].tolist())
"""


@pytest.fixture(scope="module")
def torchao() -> Path:
    """Kept under build/: where torchao is installed, every import of transformers loads it."""
    folder = ROOT / "build" / "torchao"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    if not (folder / "torchao").is_dir():
        subprocess.run([*pip, "torchao==0.18.0"], check=True, timeout=100)
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["weights", "both"])
def test_an_int8_checkpoint_of_torchao_is_answered_by_the_command(
    tmp_path: Path, control: str, torchao: Path, kind: str
) -> None:
    source, target = save(tmp_path / "m"), save(tmp_path / "quantised")
    prompt = [f"{token}" for token in PROMPT]
    wanted = run(torchao, "-c", QUANTISE, str(source), str(target), kind, *prompt)
    said = run(
        torchao,
        *("-m", "engine", "generate", "--model", str(target), "--prompt", " ".join(prompt)),
        *("--max-tokens", f"{NUM_NEW}", "--ignore-eos", "--pool-id", f"pool-{next(NAMES)}"),
        *("--control-plane", control, "--data-plane", "embedded", "--num-device-blocks", "32"),
    )
    assert said.split() == wanted.split()


def run(path: Path, *arguments: str) -> str:
    """What Python prints, with ``path`` on its path."""
    env = {"PYTHONPATH": f"{path}:{ROOT}"}
    return printed(sys.executable, *arguments, env=env, timeout_s=100)
