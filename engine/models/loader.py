"""Loads a model, its tokenizer and the engine's facts about both from a local Hugging Face folder.
Downloads nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging as transformers_logging

from kvplane.errors import InvalidRequestError, KvplaneError
from kvplane.layout import LayerGroup
from kvplane.models.config import read_config
from kvplane.models.model_layers import layer_groups
from kvplane.transformers import absorbed, attention
from kvplane.transformers.models import adapters
from kvplane.transformers.models.positions import first_position
from kvplane.transformers.models.probe import probe as run_probe
from kvplane.transformers.models.probe import states_of, with_states
from kvplane.transformers.models.rope import WHY, fix_frequencies, max_independent_tokens
from kvplane.transformers.states import States

from ..sampling.detokenizer import REPLACEMENT
from . import baichuan
from .captured import CapturedDecoder
from .compiled import CompiledDecoder

NO_LIMIT: Final = 2**31 - 1
_CPU: Final = torch.device("cpu")
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
)
_SPACE: Final = "\u2581"  # SentencePiece's
_BYTE: Final = re.compile("<0x([0-9A-F]{2})>")
_BYTES: Final = {name: byte for byte, name in bytes_to_unicode().items()}  # of byte-level BPE
_LIMITS: Final = ("max_position_embeddings", "max_seq_len", "model_max_length")

Message = dict[str, str]

_log = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its tokenizer and what the engine needs to know of both. ``tokenizer`` is None
    when the folder has none; then prompts are token ids. ``encoder``: a copy of it, which another
    thread may use. ``longest_token``: most characters of a token. ``end_token_ids`` end a text.
    ``repetition_penalty``: from the model's generation config; 1 for none. ``max_total_tokens``:
    ``NO_LIMIT`` where the config has none; ``limit`` names it in errors. ``groups``: the layers'
    caches, by the probe, or else by the config; ``states``: what layers keep besides keys and
    values. ``namespace``: of its keys, which are separate where RoPE has the frequencies of one
    length. ``decoder``: of compiled or captured steps.
    """

    model: PreTrainedModel
    tokenizer: Any
    encoder: Any
    longest_token: int
    end_token_ids: frozenset[int]
    vocabulary_size: int
    max_total_tokens: int
    groups: tuple[LayerGroup, ...]
    states: States | None
    limit: str
    namespace: str = ""
    repetition_penalty: float = 1.0
    decoder: CompiledDecoder | CapturedDecoder | None = None

    @property
    def num_heads(self) -> int:
        """Number of query heads of a layer."""
        heads: int = self.model.config.get_text_config(decoder=True).num_attention_heads
        return heads

    def encode(self, prompt: str, *, field: str) -> list[int]:
        """Return the prompt's token ids: with the tokenizer's opening tokens, without a trailing
        end of sequence.

        Raises InvalidRequestError naming ``field`` when there is no tokenizer, and when the prompt
        is too long for the model whatever its tokens are.
        """
        ids: list[int] = list(self._tokenizer(field, len(prompt))(prompt)["input_ids"])
        while ids and ids[-1] in self.end_token_ids:
            ids.pop()
        return ids

    def encode_chat(self, messages: Sequence[Message], *, field: str) -> list[int]:
        """Return the token ids of a conversation in the model's chat template, up to where the
        model's answer begins.

        Raises InvalidRequestError naming ``field`` when there is no tokenizer, when it has no
        template, when the template refuses the messages, and when they are too long, as in
        ``encode``.
        """
        tokenizer = self._tokenizer(field, sum(len(each["content"]) for each in messages))
        try:
            encoded = tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=True
            )
        except Exception as error:  # templates are programs and may raise anything
            raise InvalidRequestError(
                f"the chat template refuses the messages: {error}", field=field
            ) from error
        return list(encoded["input_ids"])

    def decode(self, token_id: int) -> tuple[str, bytes]:
        """Return the text and the bytes of one token; empty where there is no tokenizer. Of a part
        of a character, the text is U+FFFD.
        """
        if self.tokenizer is None:
            return "", b""
        text = str(self.tokenizer.decode([token_id]))
        piece = str(self.tokenizer.convert_ids_to_tokens(token_id) or "")
        if REPLACEMENT in text:
            return text, _bytes_of(piece, text)
        if piece.replace(_SPACE, " ") == f" {text}":  # a decoder drops the first space of a text
            text = f" {text}"
        return text, text.encode()

    def _tokenizer(self, field: str, num_characters: int) -> Any:
        if self.encoder is None:
            raise InvalidRequestError("the model has no tokenizer: give token ids", field=field)
        if num_characters > self.max_total_tokens * self.longest_token:
            raise InvalidRequestError(
                f"has {num_characters} characters, too many for {self.limit}", field=field
            )
        return self.encoder


def _bytes_of(piece: str, text: str) -> bytes:
    """Return the bytes of a token that is no whole text: ``piece`` is its name in the vocabulary,
    by byte fallback or in the characters of a byte-level vocabulary.
    """
    if match := _BYTE.fullmatch(piece):
        return bytes.fromhex(match[1])
    data = bytes(_BYTES[each] for each in piece if each in _BYTES)
    return data if data.decode(errors="replace") == text else text.encode()


def load(
    folder: Path,
    dtype: str,
    *,
    probe: bool = True,
    latent: bool = True,
    packs: bool = False,
    max_total_tokens: int = 0,
    device: torch.device = _CPU,
) -> LoadedModel:
    """Load the model in ``folder`` in ``dtype`` on ``device``, with attention "kvplane".

    ``probe``: first compare the model's logits with those of transformers' own attention.
    ``latent``: as for ``layer_groups``. ``packs``: pack the weights of linear layers, as
    ``pack_linears`` does. ``max_total_tokens``: as in ``EngineSettings``. Raises
    InvalidRequestError for the field "model" for a model that transformers cannot load, and for one
    that the probe refuses.
    """
    transformers_logging.disable_progress_bar()
    attention.register()
    is_baichuan = read_config(folder).model_type == baichuan.MODEL_TYPE
    load_model = baichuan.load if is_baichuan else _load_model
    model = load_model(folder, getattr(torch, dtype))
    move(model, device)
    model.train(mode=False)
    adapters.adapt(model)
    if packs:
        _log.info("linear layers with packed weights num=%d", pack_linears(model))
    text_config = model.config.get_text_config(decoder=True)
    max_total_tokens, limit, namespace = _limit_context(model, text_config, max_total_tokens)
    of_config = layer_groups(model.config, latent=latent)
    states = states_of(model)
    groups = run_probe(model, latent=latent) if probe else with_states(of_config, states)
    adapters.set_attention(model, attention.NAME)
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZER_FILES)
    tokenizer: Any = _load_tokenizer(folder, is_baichuan=is_baichuan) if has_tokenizer else None
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        encoder=deepcopy(tokenizer),
        longest_token=max(map(len, tokenizer.get_vocab())) if has_tokenizer else 0,
        end_token_ids=_end_token_ids(model),
        vocabulary_size=text_config.vocab_size,
        max_total_tokens=max_total_tokens,
        groups=groups,
        states=states,
        limit=limit,
        namespace=namespace,
        repetition_penalty=getattr(model.generation_config, "repetition_penalty", None) or 1.0,
    )


def move(model: PreTrainedModel, device: torch.device) -> None:
    """Move a model's weights to ``device``."""
    model.to(device)  # type: ignore[arg-type]


def _load_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, attn_implementation="eager"
        )
    except KvplaneError:
        raise
    except Exception as error:  # each model's code may raise anything
        raise InvalidRequestError(
            f"transformers cannot load it: {type(error).__name__}: {error}", field="model"
        ) from error


def _load_tokenizer(folder: Path, *, is_baichuan: bool) -> Any:
    try:
        if is_baichuan:
            from .baichuan_tokenizer import BaichuanTokenizer  # needs sentencepiece

            return BaichuanTokenizer.load(folder)
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InvalidRequestError(
            f"transformers cannot load its tokenizer: {type(error).__name__}: {error}",
            field="model",
        ) from error


def _limit_context(model: PreTrainedModel, config: Any, asked: int) -> tuple[int, str, str]:
    """Return the maximum tokens of a sequence, ``asked`` if not 0; the limit's name in errors; the
    namespace of prefixes.
    """
    of_config, of_rope = _max_total_tokens(config), max_independent_tokens(model)
    of_config -= first_position(model)
    if asked > of_config:
        raise InvalidRequestError(
            f"must be at most the model's {of_config} positions", field="max_total_tokens"
        )
    if asked and of_rope is not None and asked > of_rope:
        fix_frequencies(model, asked)
        return asked, f"max_total_tokens, {asked}", f"rope-{asked}"
    if asked:
        return asked, f"max_total_tokens, {asked}", ""
    if of_rope is None or of_rope >= of_config:
        return of_config, f"the model's {of_config} positions", ""
    _log.warning("context cut num_tokens=%d of=%d: %s", of_rope, of_config, WHY)
    return of_rope, f"{of_rope}: {WHY}. Shorten it, or load the model with max_total_tokens", ""


def _max_total_tokens(config: Any) -> int:
    """Return how many positions the config allows, times the factor of RoPE scaling where they are
    those of training; of layers with several kinds of RoPE the fewest.
    """
    limits = (getattr(config, name, None) for name in _LIMITS)
    limit = next((limit for limit in limits if isinstance(limit, int)), None)
    if limit is None:
        return NO_LIMIT
    rope = getattr(config, "rope_parameters", None) or {}
    of_layers = [each for each in rope.values() if isinstance(each, dict)] or [rope]
    return min(_scaled(limit, each) for each in of_layers)


def _scaled(num_positions: int, rope: dict[str, Any]) -> int:
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type") in ("linear", "dynamic"):
        return int(num_positions * factor)
    if rope.get("rope_type") == "yarn":
        original = rope.get("original_max_position_embeddings") or num_positions
        return max(num_positions, int(original * factor))
    return num_positions


def _end_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids of tokens that end a text, from the config, as transformers' generate."""
    end: Any = getattr(model.generation_config, "eos_token_id", None)
    if isinstance(end, int):
        return frozenset([end])
    return frozenset(end or ())


class PackedLinear(torch.nn.Module):
    """A linear layer computed by oneDNN, with weights packed for it, on the CPU and without
    gradients. ``weight`` has its shape and type, and no memory.

    It is faster than torch's own, and a row's bits do not depend on how many rows there are. The
    operators are those that torch.compile uses for frozen weights.
    """

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.nn.Parameter(linear.weight.detach().to("meta"), requires_grad=False)
        self.bias = linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)
        self.register_buffer("_packed", packed, persistent=False)  # torch.compile may freeze it

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map [..., in_features] to [..., out_features]."""
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self.bias, "none", [], ""
        )
        return out


def pack_linears(model: torch.nn.Module) -> int:
    """Replace a model's linear layers, except absorbed ones, by PackedLinear if oneDNN computes
    with their type on this machine. Returns how many were packed.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear
        and _is_served(child.weight)
        and not absorbed.is_projection(parent, name)
    ]
    for parent, name, linear in found:
        setattr(parent, name, PackedLinear(linear))
    return len(found)


def _is_served(weight: torch.Tensor) -> bool:
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if weight.device.type != "cpu" or not has_onednn:
        return False
    if weight.dtype == torch.float32:
        return True
    served = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return weight.dtype in served and bool(served[weight.dtype]())
