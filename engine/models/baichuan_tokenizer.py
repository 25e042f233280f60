"""Tokenizers of Baichuan and Baichuan 2, from the sentencepiece model of their checkpoints.

Their tokenizer is code that lies beside the weights, and is not executed. Its ids are
sentencepiece's own, with the opening and closing tokens that its config asks for. A chat model has
no template: its generation config names the two tokens that open each side's messages.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

_PATTERNS: Final = {(True, False): "bos", (False, True): "eos", (True, True): "bos_eos"}
_TEMPLATE: Final = """\
{%%- set opening = {"system": "", "user": "%s", "assistant": "%s"} -%%}
{%%- for message in messages -%%}
{%%- if message["role"] not in opening -%%}
{{- raise_exception("a role is one of " ~ opening.keys() | join(", ")) -}}
{%%- endif -%%}
{{- opening[message["role"]] + message["content"] -}}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}{{- opening["assistant"] -}}{%%- endif -%%}"""


class BaichuanTokenizer(SentencePieceBackend):
    """The tokenizer of a Baichuan folder, made by ``BaichuanTokenizer.load``."""

    def __init__(
        self, *, add_bos_token: bool = True, add_eos_token: bool = False, **named: Any
    ) -> None:
        pattern = _PATTERNS.get((add_bos_token, add_eos_token))
        super().__init__(**named, special_tokens_pattern=pattern)  # type: ignore[no-untyped-call]

    @classmethod
    def load(cls, folder: Path) -> BaichuanTokenizer:
        """Load the tokenizer in ``folder``, with a chat template if its generation config names the
        tokens of a conversation.
        """
        tokenizer: BaichuanTokenizer = cls.from_pretrained(folder, local_files_only=True)
        settings = folder / "generation_config.json"
        fields = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        names = ("user_token_id", "assistant_token_id")
        if all(isinstance(fields.get(name), int) for name in names):
            user, assistant = tokenizer.convert_ids_to_tokens([fields[name] for name in names])
            tokenizer.add_special_tokens({"additional_special_tokens": [user, assistant]})
            tokenizer.chat_template = _TEMPLATE % (user, assistant)
        return tokenizer

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Join tokens to text, with spaces as they are and characters joined from byte tokens."""
        return str(self.sp_model.decode(tokens))
