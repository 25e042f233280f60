"""Whose KV it is: what of an engine and of a request decides the bytes, besides the token ids."""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from ..chunks import namespace_of
from . import release

_MAX_MODEL_ID: Final = 256  # characters, as of a pool's layout
_INT32: Final = "i"


@dataclass(eq=False)
class Heard:
    """A request as the connector heard it: its tokens, and what else decides its KV.

    ``parts``: its salt and adapter. ``is_exact``: whether they and the ids say all; if not, nothing
    of it is cached.
    """

    request: Any
    is_exact: bool
    parts: tuple[str | None, ...]
    _ids: array[int] = field(default_factory=lambda: array(_INT32))

    @classmethod
    def of(cls, request: Any) -> Heard:
        """Read a ``vllm.v1.request.Request``."""
        adapter = request.lora_request
        is_exact = (
            request.prompt_token_ids is not None
            and request.prompt_embeds is None
            and not request.resumable
            and not (adapter is not None and adapter.load_inplace)
            and all(
                sum(_place(feature)) <= request.num_prompt_tokens for feature in request.mm_features
            )
        )
        named = () if adapter is None else (adapter.lora_name, adapter.lora_path)
        return cls(request, is_exact, (request.cache_salt, *named))

    def column(self, num_tokens: int, chunk_tokens: int) -> bytes | None:
        """Return an int32 column of the first tokens; None if there are not so many. Their ids
        differ where the images do.

        Generated tokens count too, unless there are images: these are written into the ids of the
        chunk in which they begin, which has to be whole.
        """
        request = self.request
        if not self._ids:
            prompt = array(_INT32, request.prompt_token_ids)
            self._ids = _with_images(prompt, request.mm_features, chunk_tokens)
        if num_tokens > len(self._ids) and not request.mm_features:
            self._ids.extend(request.all_token_ids[len(self._ids) :])
        return self._ids[:num_tokens].tobytes() if num_tokens <= len(self._ids) else None


def _place(feature: Any) -> tuple[int, int]:
    return feature.mm_position.offset, feature.mm_position.length


def _with_images(ids: array[int], features: Any, chunk_tokens: int) -> array[int]:
    """Write the hash of each image over the chunk in which it begins, as the engine guide does."""
    for feature in features:
        begin, size = _place(feature)
        said = f"{begin}:{size}:{feature.identifier}".encode()
        words = struct.unpack("<8I", hashlib.sha256(said).digest())
        first = begin - begin % chunk_tokens
        for i, word in zip(range(first, len(ids)), words, strict=False):
            ids[i] ^= word & 0x7FFFFFFF
    return ids


def weights_of(vllm_config: Any) -> str:
    """Return what vLLM tells a connector of its model, and a tier not."""
    model = vllm_config.model_config
    dtype = str(model.dtype).removeprefix("torch.")
    return ":".join(
        str(each or "-") for each in (model.revision, model.quantization, dtype, model.hf_overrides)
    )


def model_id_of(config: Any, weights: str | None, chunk_bytes: int) -> str:
    """Return the ``model_id`` of the pool that an engine needs, of at most 256 characters: engines
    with the same understand each other's chunks. ``config``: vLLM's ``OffloadingConfig``.
    """
    parallel = config.parallel
    ranks = parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size
    rest = config.groups, config.kv_cache_layout, config.canonical_layout, config.replicated_layout
    said = [
        f"vllm-{release()}/{config.model.name}/{weights or '-'}/kv={config.model.dtype}",
        f"blocks={config.cache.blocks_per_chunk}/bytes={chunk_bytes}",
        f"tp.pp.pcp.dcp={'.'.join(map(str, ranks))}/layout={config.kv_cache_layout}",
        hashlib.sha256(repr(rest).encode()).hexdigest()[:16],
    ]
    full = "/".join(said)
    if len(full) <= _MAX_MODEL_ID:
        return full
    return f"{full[:180]}/{hashlib.sha256(full.encode()).hexdigest()}"


def namespace_for(heard: Heard | None, weight_version: str) -> str:
    """Return the namespace of a request; "" where neither a salt, an adapter nor a version of the
    weights says more. ``heard``: None for a request whose chunks are found by vLLM's own keys, in
    which the salt and the adapter are.
    """
    if heard is None:
        return namespace_of("names", weight_version)
    parts = (weight_version, *heard.parts)
    return namespace_of("", *parts) if any(parts) else ""


# What the connector hears while vLLM calls the tier: below it, on the same thread.
REQUEST: Final[ContextVar[Heard | None]] = ContextVar("request", default=None)
WEIGHTS: Final[ContextVar[str | None]] = ContextVar("weights", default=None)


@contextmanager
def told(variable: ContextVar[Any], value: object) -> Iterator[None]:
    """Set a variable inside the block."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
