"""docs/models.md says what is so: each type's row is what examining it gives now.

``examine`` checks more than its row: an exact type's logits in packed, chunked rows are those of
eager attention, they are not when attention gives zeros, and the probe agrees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kvplane.errors import InvalidRequestError
from kvplane.transformers import attention
from kvplane.transformers.attention import options_of
from kvplane.transformers.models import adapters
from kvplane.transformers.models.probe import probe
from tests.models import census
from tests.models.tiny_models import TYPES, tiny_model

FAMILIES = (
    "bert", "bloom", "cohere2", "cpmant", "deepseek_v3", "diffllama", "falcon", "falcon_h1",
    "gemma2", "gemma3_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_oss", "gptj",
    "jamba", "lfm2", "llama", "llama4_text", "mamba", "mbart", "mimo_v2_flash", "minicpm3",
    "minimax", "mixtral", "mpt", "nemotron_h", "opt", "phi3", "qwen3_next", "roberta", "stablelm",
    "zamba2",
)  # fmt: skip
"""Examined on each push: one of each way to attend, and of each reason to refuse; at night all are.
"""


@pytest.fixture(autouse=True)
def _registered() -> None:
    attention.register()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_what_the_document_says(model_type: str) -> None:
    assert census.examine(model_type) == census.documented()[model_type]


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", [name for name in TYPES if name not in FAMILIES])
def test_every_other_type_is_what_the_document_says(model_type: str) -> None:
    assert census.examine_apart(model_type) == census.documented()[model_type]


def test_the_document_counts_its_rows() -> None:
    rows = census.documented()
    assert set(TYPES) <= set(rows)
    text = census.DOCUMENT.read_text(encoding="utf-8")
    for verdict in (census.EXACT, census.REFUSED, census.NOT_RUN):
        count = sum(row.verdict == verdict for row in rows.values())
        assert f" {count} {verdict}" in text
    assert sum(row.verdict == census.EXACT for row in rows.values()) >= 90


def test_a_model_that_hardly_attends_is_no_evidence() -> None:
    """Zeroed attention must move the logits, or their equality says nothing."""
    model = tiny_model("llama")
    groups = probe(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(1e-7)
    with pytest.raises(AssertionError, match="attention moves logits"):
        census.check_exact(model, groups)


@pytest.mark.parametrize(
    ("model_type", "lost"),
    [
        ("gpt_oss", {"sinks": ()}),
        ("gpt_oss", {"sliding_window_tokens": 9}),
        ("gemma2", {"logit_soft_cap": 0.0}),
        ("gemma2", {"scale": 0.0}),
        ("bloom", {"alibi_slopes": ()}),
    ],
)
def test_an_option_that_is_lost_is_noticed(
    model_type: str, lost: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(model_type)
    adapters.adapt(model)
    groups = probe(model)

    def options(*arguments: Any) -> Any:
        made = options_of(*arguments)
        return replace(made, **{name: lost[name] for name in lost if getattr(made, name)})

    monkeypatch.setattr(attention, "options_of", options)
    with pytest.raises(AssertionError, match="logits are"):
        census.check_exact(model, groups)
    with pytest.raises(InvalidRequestError, match="options do not express"):
        probe(model)
