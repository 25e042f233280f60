"""The packed forward, attention routed away, gives what the model gives by itself.

``DenseStep`` stands for the data plane: it keeps every sequence's keys and values, and attends by
positions.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedModel

from engine.models import loader
from engine.request import Request, SamplingParams
from engine.running.core import Runner
from engine.sampling.detokenizer import Detokenizer
from engine.sampling.sampler import new_stream
from engine.scheduling.intents import Span
from engine.scheduling.sequence import EngineSequence
from kvplane.attention_options import AttentionOptions
from kvplane.errors import InvalidRequestError


class DenseStep:
    """Attention over a cache of whole tensors, one for each sequence and layer."""

    latent_layers: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.layers_seen: dict[int, int] = defaultdict(int)

    def layer(
        self,
        index: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        options: AttentionOptions,
    ) -> torch.Tensor:
        self.layers_seen[index] += 1
        assert options.sliding_window_tokens == 0
        outs, at = [], 0
        for span in self.spans:
            end = at + span.num_tokens
            name = (span.sequence.kv_id, index)
            old_k, old_v = self.cache.get(name, (key[:0], value[:0]))
            k = torch.cat([old_k[: span.first_position], key[at:end]])
            v = torch.cat([old_v[: span.first_position], value[at:end]])
            self.cache[name] = (k, v)
            groups = query.shape[1] // key.shape[1]
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", query[at:end], k)
            scores = scores * (options.scale or query.shape[-1] ** -0.5)
            last = torch.arange(span.first_position, span.first_position + span.num_tokens)
            seen = torch.arange(k.shape[0])[None, :] <= last[:, None]
            weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v))
            at = end
        return torch.cat(outs)


LLAMA = LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    tie_word_embeddings=False, eos_token_id=[1, 2],
)  # fmt: skip
OPT = OPTConfig(
    vocab_size=97, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=128, word_embed_proj_dim=64, tie_word_embeddings=False,
    pad_token_id=0, eos_token_id=2,
)  # fmt: skip


def save(config: LlamaConfig | OPTConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that attention matters
    model.save_pretrained(folder)
    return folder


def sequence(kv_id: int, tokens: list[int]) -> EngineSequence:
    request = Request(f"r{kv_id}", kv_id, "", tokens, SamplingParams())
    return EngineSequence(
        request, 0, list(tokens), new_stream(0, 0), Detokenizer(None), kv_id=kv_id
    )


@pytest.fixture(params=["llama", "opt"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save(LLAMA if request.param == "llama" else OPT, tmp_path / request.param)


def spans_of(cuts: list[tuple[EngineSequence, int, int]]) -> list[Span]:
    return [Span(s, a, b - a, b == len(s.tokens)) for s, a, b in cuts]


def test_packed_chunks_give_the_logits_that_the_model_gives_alone(folder: Path) -> None:
    loaded = loader.load(folder, "float32")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    one = sequence(1, torch.randint(3, 97, (23,)).tolist())
    two = sequence(2, torch.randint(3, 97, (11,)).tolist())
    runner, step = Runner(loaded.model), DenseStep()
    got = {}
    for cuts in (
        [(one, 0, 9)],
        [(two, 0, 10), (one, 9, 20)],
        [(two, 10, 11), (one, 20, 23)],
    ):
        step.spans = spans_of(cuts)
        logits = runner.run(step.spans, step)
        due = [span.sequence.kv_id for span in step.spans if span.is_last]
        assert logits.shape == (len(due), 97)
        got.update(zip(due, logits, strict=True))
    for each in (one, two):
        with torch.no_grad():
            want = reference(torch.tensor([each.tokens])).logits[0, -1]
        torch.testing.assert_close(got[each.kv_id], want, atol=1e-4, rtol=0)
    assert step.layers_seen == {0: 3, 1: 3}


def test_a_neighbour_in_the_batch_changes_nothing(folder: Path) -> None:
    loaded = loader.load(folder, "float32")
    runner = Runner(loaded.model)
    one, two = sequence(1, [5, 6, 7, 8]), sequence(2, [9, 10, 11])
    alone, both = DenseStep(), DenseStep()
    alone.spans = spans_of([(one, 0, 4)])
    both.spans = spans_of([(two, 0, 3), (one, 0, 4)])
    torch.testing.assert_close(
        runner.run(alone.spans, alone)[0], runner.run(both.spans, both)[1], atol=1e-5, rtol=0
    )


def test_the_model_keeps_no_cache(folder: Path) -> None:
    loaded = loader.load(folder, "float32")
    step = DenseStep()
    one = sequence(1, [5, 6, 7])
    step.spans = spans_of([(one, 0, 3)])
    shapes = []
    original = step.layer

    def layer(
        index: int, query: torch.Tensor, key: torch.Tensor, *rest: Any, **options: Any
    ) -> torch.Tensor:
        shapes.append((query.shape[0], key.shape[0]))
        return original(index, query, key, *rest, **options)

    step.layer = layer  # type: ignore[method-assign]
    runner = Runner(loaded.model)
    runner.run(step.spans, step)
    one.tokens.append(8)
    step.spans = spans_of([(one, 3, 4)])
    runner.run(step.spans, step)
    assert shapes == [(3, 3), (3, 3), (1, 1), (1, 1)]


def test_what_the_engine_must_know_is_read_from_the_folder(tmp_path: Path) -> None:
    loaded = loader.load(save(LLAMA, tmp_path), "bfloat16")
    assert loaded.model.dtype == torch.bfloat16
    assert loaded.end_token_ids == {1, 2}
    assert (loaded.vocabulary_size, loaded.max_total_tokens) == (97, 128)
    with pytest.raises(InvalidRequestError, match="no tokenizer") as caught:
        loaded.encode("text", field="prompts[3]")
    assert caught.value.field == "prompts[3]"
