"""A model, its tokenizer and what the engine must know of both, from a local Hugging Face folder.
Nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as transformers_logging

from kvplane.errors import InvalidRequestError
from kvplane.transformers import attention

ARCHITECTURES: Final = ("llama", "opt")
TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``tokenizer`` is None when the folder has none; then prompts are token ids. ``end_token_ids``
    end a text.
    """

    model: PreTrainedModel
    tokenizer: Any
    end_token_ids: frozenset[int]
    vocabulary_size: int
    max_total_tokens: int

    def encode(self, prompt: str, *, field: str) -> list[int]:
        """The prompt's token ids: with the tokenizer's opening tokens, without a trailing end of
        sequence.

        Raises InvalidRequestError naming ``field`` when there is no tokenizer.
        """
        if self.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: give token ids", field=field)
        ids: list[int] = list(self.tokenizer(prompt)["input_ids"])
        while ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return ids


def load(folder: Path, dtype: str) -> LoadedModel:
    """Load ``folder`` in ``dtype`` with attention "kvplane". Raises InvalidRequestError for another
    architecture.
    """
    transformers_logging.disable_progress_bar()
    attention.register()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=TORCH_DTYPES[dtype], local_files_only=True
    )
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise InvalidRequestError(
            f"is of type {config.model_type!r}: must be one of {', '.join(ARCHITECTURES)}",
            field="model",
        )
    model.set_attn_implementation(attention.NAME)
    model.train(mode=False)
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZER_FILES)
    tokenizer = (
        AutoTokenizer.from_pretrained(folder, local_files_only=True) if has_tokenizer else None
    )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        end_token_ids=_end_token_ids(model),
        vocabulary_size=config.vocab_size,
        max_total_tokens=config.max_position_embeddings,
    )


def _end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """As transformers' generate takes them: from the generation config, one id or several."""
    end: Any = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(end, int):
        return frozenset([end])
    return frozenset(end or ())
