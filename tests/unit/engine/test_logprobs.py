"""Log probabilities in OpenAI's form: each token with its own bytes, and where it begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from engine.scheduling.intents import Span
from engine.serving.answers import Answer
from kvplane.transformers.attention import Step
from tests.helpers.engine_harness import Engine, loaded, prompt_of

TEXT = "Go🎉 né!"
BYTES = sorted(set(TEXT.encode()))


def tokenizer_of(names: Sequence[str], *steps: Any) -> Any:
    """A tokenizer whose token ``i`` is ``names[i]``."""
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.decoder = decoders.Sequence(list(steps))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level(data: Sequence[int]) -> Any:
    return tokenizer_of([bytes_to_unicode()[byte] for byte in data], decoders.ByteLevel())


@pytest.mark.parametrize("is_chat", [False, True])
def test_tokens_have_their_bytes_and_begin_where_the_text_before_them_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, is_chat: bool
) -> None:
    """Each token is a byte, so five are parts of characters."""
    engine = Engine(folder)
    run = engine.core._runner.run

    def spelling(spans: Sequence[Span], step: Step) -> torch.Tensor:
        logits = run(spans, step).clone()
        num = spans[0].sequence.num_output_tokens
        logits[0, BYTES.index(TEXT.encode()[num])] = 100.0
        return logits

    monkeypatch.setattr(engine.core, "_loaded", replace(loaded(folder, 0), tokenizer=byte_level(
        [*BYTES, *(each for each in range(255, 0, -1) if each not in BYTES)][:97]
    )))  # fmt: skip
    monkeypatch.setattr(engine.core._runner, "run", spelling)
    engine.add(prompt_of(9, 1), max_tokens=len(TEXT.encode()), logprobs=3)
    engine.run()
    answer = Answer("m", 1, 1, is_chat=is_chat)
    pieces = list(chain.from_iterable(answer.add(0, delta) for delta in engine.deltas))
    (choice,) = answer.whole()["choices"]
    if is_chat:
        content = choice["logprobs"]["content"]
        assert b"".join(bytes(each["bytes"]) for each in content) == TEXT.encode()
        return
    logprobs = choice["logprobs"]
    offsets = [0, 1, *[2] * 4, 3, 4, *[5] * 2, 6]
    assert choice["text"] == TEXT
    assert logprobs["text_offset"] == offsets
    assert [p["choices"][0]["logprobs"]["text_offset"][0] for p in pieces] == offsets
    assert logprobs["tokens"][1:3] == ["o", "bytes:\\xf0"]
    assert [len(each) for each in logprobs["top_logprobs"]] == [3] * len(offsets)


@pytest.mark.parametrize(
    ("name", "text", "data"),
    [("\u2581Paris", " Paris", b" Paris"), ("is", "is", b"is"), ("<0xE2>", "\ufffd", b"\xe2"),
     ("<0x0A>", "\n", b"\n"), ("\ufffd", "\ufffd", b"\xef\xbf\xbd")],
)  # fmt: skip
def test_a_token_of_sentencepiece_has_its_space_and_its_byte(
    folder: Path, name: str, text: str, data: bytes
) -> None:
    tokenizer = tokenizer_of(
        [name],
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    )
    assert replace(loaded(folder, 0), tokenizer=tokenizer).decode(0) == (text, data)
