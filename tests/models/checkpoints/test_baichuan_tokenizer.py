"""Text into Baichuan's checkpoints and out of them, by their sentencepiece model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from engine.commands.main import main
from engine.models import loader
from engine.models.baichuan_tokenizer import BaichuanTokenizer
from kvplane.errors import InvalidRequestError
from tests.models.checkpoints.test_baichuan import reference, write

VOCABULARY = 360
TEXTS = ["the quick brown fox jumps over the lazy dog 345", "百川大模型 你好", "a b  c   d"]
USER, ASSISTANT = 3, 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SentencePieceProcessor:
    """As Baichuan's was: BPE, bytes for what is unknown, spaces kept, none added."""
    prefix = tmp_path_factory.mktemp("sentencepiece") / "tokenizer"
    SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 10), model_prefix=str(prefix), vocab_size=VOCABULARY,
        model_type="bpe", byte_fallback=True, split_digits=True, add_dummy_prefix=False,
        remove_extra_whitespaces=False, normalization_rule_name="identity", minloglevel=2,
        user_defined_symbols=["<reserved_106>", "<reserved_107>"],
    )  # fmt: skip
    return SentencePieceProcessor(model_file=f"{prefix}.model")


def add_tokenizer(folder: Path, trained: SentencePieceProcessor, **settings: Any) -> Path:
    """The files that lie in a checkpoint of Baichuan, but for its code."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(trained.serialized_model_proto())
    tokens = {
        f"{name}_token": {"__type": "AddedToken", "content": content, "normalized": True}
        | dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
        for name, content in {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}.items()
    }
    code = {"AutoTokenizer": ["tokenization_baichuan.BaichuanTokenizer", None]}
    config = {"tokenizer_class": "BaichuanTokenizer", "auto_map": code, "use_fast": False}
    config |= {"clean_up_tokenization_spaces": False, "add_bos_token": False, **tokens, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("text", ["the lazy fox", "  two  spaces ", "百川€ 42", "é", " lead", ""])
def test_ids_are_sentencepieces_and_give_the_text_back(
    trained: SentencePieceProcessor, tmp_path: Path, text: str
) -> None:
    tokenizer = BaichuanTokenizer.load(add_tokenizer(tmp_path, trained))
    ids = list(tokenizer(text)["input_ids"])
    assert ids == trained.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({"add_bos_token": True}, [1], []),
        ({"add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_the_config_says_what_opens_and_closes_a_text(
    trained: SentencePieceProcessor,
    tmp_path: Path,
    settings: dict[str, bool],
    before: list[int],
    after: list[int],
) -> None:
    tokenizer = BaichuanTokenizer.load(add_tokenizer(tmp_path, trained, **settings))
    assert tokenizer("the fox")["input_ids"] == before + trained.encode("the fox") + after


def test_a_conversation_is_opened_by_the_tokens_of_the_generation_config(
    trained: SentencePieceProcessor, tmp_path: Path
) -> None:
    folder = tmp_path / "baichuan"
    write(folder, "2-7B", "bin", VOCABULARY)
    add_tokenizer(folder, trained)
    settings = {"user_token_id": USER, "assistant_token_id": ASSISTANT, "eos_token_id": 2}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    loaded = loader.load(folder, "float32", probe=False)
    said = [("system", "the fox"), ("user", " dog"), ("assistant", "你好"), ("user", "42")]
    messages = [{"role": role, "content": content} for role, content in said]
    wanted = [*trained.encode("the fox"), USER, *trained.encode(" dog"), ASSISTANT]
    wanted += [*trained.encode("你好"), USER, *trained.encode("42"), ASSISTANT]
    assert loaded.encode_chat(messages, field="messages") == wanted
    with pytest.raises(InvalidRequestError, match="a role is one of system, user, assistant"):
        loaded.encode_chat([{"role": "tool", "content": "x"}], field="messages")


@pytest.mark.parametrize("kind", ["2-7B", pytest.param("13B", marks=pytest.mark.nightly)])
def test_the_command_continues_a_text(
    trained: SentencePieceProcessor,
    tmp_path: Path,
    control_plane: str,
    kind: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, prompt, num_new = tmp_path / "baichuan", "百川 the quick 42", 12
    config, stored = write(folder, kind, "bin", VOCABULARY)
    add_tokenizer(folder, trained)
    where = ["--control-plane", control_plane, "--data-plane", "embedded"]
    sizes = ["--num-device-blocks", "16", "--num-host-blocks", "0", "--max-tokens", str(num_new)]
    ask = ["generate", "--model", str(folder), "--prompt", prompt, "--ignore-eos"]
    assert main([*ask, *where, *sizes]) == 0
    ids = trained.encode(prompt)
    for _ in range(num_new):
        ids.append(int(reference(config, stored, ids)[-1].argmax()))
    new = ids[-num_new:]
    wanted = BaichuanTokenizer.load(folder).decode(new, skip_special_tokens=True)
    assert capsys.readouterr().out == f"{wanted}\n"
    assert len(set(new)) > 4
